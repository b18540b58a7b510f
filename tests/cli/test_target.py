"""`vlmdistill target`: named targets, checkpoint folders and the hub cache."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers

from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.registry import HUB, REGISTRY, shipped
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.loading import load

Checkpoint = Callable[..., Path]


@pytest.fixture
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Path], Path]:
    """An empty hub cache, into which a checkpoint is put under a hub id."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))

    def put(repository: str, files: Path) -> Path:
        folder = root / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / "0123abcd"
        shutil.copytree(files, snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123abcd")
        return snapshot

    return put


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["target", *arguments, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """All that a command prints."""
    capsys.readouterr()
    main(["target", *arguments])
    shown = capsys.readouterr()
    return shown.out + shown.err


JOINED = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
PRINTED = JOINED.replace("message['content'] +", "message['content'] | string +")


@pytest.mark.parametrize("template", [JOINED, PRINTED])
def test_a_template_for_text_is_named_by_show_and_check_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    folder = tiny.checkpoint("qwen2_5_vl", tmp_path / "model", layers=1)
    (folder / "chat_template.jinja").write_text(template)
    for command in ("show", "check"):
        shown = lines_of(capsys, command, str(folder))
        assert "chat_template.jinja" in shown
        assert "str" not in shown.replace("string", "")  # no error of Python
    assert facts_of(capsys, "show", str(folder))["found"] is False


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_language_model_is_told_from_an_incomplete_download(
    tmp_path: Path, command: str, failing: Callable[..., str]
) -> None:
    settings = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 40,
    }
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **settings, intermediate_size=16, num_attention_heads=2
        )
    ).save_pretrained(tmp_path / "text")
    line = failing("target", command, str(tmp_path / "text"))
    assert "download" not in line
    assert "vision-language" in line


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize("given", ["folder", "file", "converted"])
def test_gguf_files_are_named_with_what_to_use_instead(
    tmp_path: Path, command: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    if given == "converted":  # a folder with the configuration beside it
        tiny.checkpoint("qwen2_5_vl", folder, layers=1)
        (folder / "model.safetensors").rename(folder / "model.gguf")
    else:
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
    shown = lines_of(
        capsys, command, str(folder / "model.gguf" if given == "file" else folder)
    )
    assert "GGUF" in shown
    assert "safetensors" in shown
    assert "incomplete" not in shown


def test_a_known_name_is_shown_without_weights(
    cache: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(capsys, "show", "qwen2.5-vl-7b")
    assert facts["origin"] == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert (facts["found"], facts["folder"]) == (False, None)
    assert facts["class"] == "Qwen2_5_VLForConditionalGeneration"
    assert facts["parameters"]["all"] == 8_292_166_656
    assert facts["target"]["num_layers"] == 28
    assert facts["captured"] == [
        "embed",
        "layer2",
        "layer14",
        "layer21",
        "layer25",
        "hidden",
    ]
    assert facts["head_bytes"] == 2 * 2 * 152064 * 3584


def test_each_drafter_has_the_size_of_a_sample(
    cache: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = facts_of(capsys, "show", "qwen2.5-vl-7b")["drafters"]
    assert set(costs) == {*catalogue.NAMES, "all"}
    row = 2 * 3584
    eagle, sparrow, hivis = costs["eagle2"], costs["sparrow"], costs["hivis"]
    assert (eagle["text_bytes"], eagle["visual_bytes"]) == (1000 * row, 2 * 2500 * row)
    assert sparrow["features"] == ["hidden.span", "hidden.text", "layer14.visual"]
    assert (sparrow["text_bytes"], sparrow["visual_bytes"]) == (1000 * row, 2501 * row)
    assert (hivis["visual_bytes"], costs["lookahead"]["bytes"]) == (0, 0)
    whole = costs.pop("all")["bytes"]
    assert all(cost["bytes"] <= whole for cost in costs.values())
    assert whole < sum(cost["bytes"] for cost in costs.values()), (
        "what several need is stored once"
    )
    options = ["--text-tokens", "10", "--visual-tokens", "20", "--image-count", "3"]
    other = facts_of(capsys, "show", "qwen2.5-vl-7b", *options)["drafters"]["sparrow"]
    assert (other["text_bytes"], other["visual_bytes"]) == (10 * row, 23 * row)


def test_the_table_is_readable(cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["target", "show", "qwen3-vl-4b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = {line.split("  ")[0]: line for line in lines}
    assert "4.44B" in facts["parameters"]
    assert "one table of 778 MB" in facts["vocabulary"]
    assert "first use" in facts["weights"]
    assert re.split("  +", facts["sparrow"])[1:4] == ["17.9 MB", "5.12 MB", "12.8 MB"]
    assert facts["sparrow"].endswith("  hidden.text, layer18.visual, hidden.span")
    assert facts["lookahead"].endswith("nothing")
    assert max(map(len, lines)) < 140


def test_a_local_folder_is_shown_as_it_loads(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("llava_onevision")
    facts, target = facts_of(capsys, "show", str(folder)), load(str(folder))
    assert (facts["found"], facts["folder"]) == (True, str(folder))
    assert facts["target"] == json.loads(json.dumps(target.info.to_dict()))
    assert facts["parameters"]["all"] == sum(
        weight.numel() for weight in target.model.parameters()
    )
    assert facts["hashes"]["weights"] == target.fingerprint.weights


def test_the_hub_cache_is_searched(
    cache: Any, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = HUB["qwen2-vl-7b"]
    snapshot = cache(hub, checkpoint("qwen2_vl"))
    for name in ("qwen2-vl-7b", hub):
        facts = facts_of(capsys, "show", name)
        assert (facts["found"], facts["folder"]) == (True, str(snapshot))
        assert facts["target"]["hidden_size"] == 32, (
            "the checkpoint counts, not the packaged configuration"
        )
    cache("someone/finetune", checkpoint("llava"))
    assert (
        facts_of(capsys, "show", "someone/finetune")["target"]["family"] == "llava-1.5"
    )
    (snapshot / "model.safetensors").unlink()
    half = facts_of(capsys, "show", "qwen2-vl-7b")
    assert (half["found"], half["folder"]) == (False, str(snapshot))
    assert "model.safetensors" in half["lacking"]
    listed = facts_of(capsys, "list")["targets"]
    assert {name for name, one in listed.items() if one["found"] is not None} == {
        *EMBEDDED,
        "qwen2-vl-7b",
    }
    assert listed["qwen2-vl-7b"]["found"] is False


def test_the_list_has_a_line_for_each(
    cache: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["target", "list"]) == 0
    shown = capsys.readouterr()
    header, *lines = shown.out.splitlines()
    assert header.split() == ["name", "family", "parameters", "weights", "checkpoint"]
    assert [line.split()[0] for line in lines] == [
        *EMBEDDED,
        packaged.NAME,
        *REGISTRY,
    ]
    assert all("  here  " in line for line in lines[: len(EMBEDDED)])
    assert all("  not here  " in line for line in lines[len(EMBEDDED) :])
    assert "8.29B" in next(line for line in lines if line.startswith("qwen2.5-vl-7b"))
    assert "llava_onevision" in shown.err


def test_an_unusable_target_is_one_line(
    cache: Any, checkpoint: Checkpoint, tmp_path: Path, failing: Callable[..., str]
) -> None:
    assert "'qwen9'" in failing("target", "show", "qwen9")
    assert "someone/some-model" in failing("target", "show", "someone/some-model")
    folder = Path(shutil.copytree(checkpoint("llava"), tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert "'gpt2'" in failing("target", "show", str(folder))
    (folder / "config.json").write_text(
        json.dumps({**config, "text_config": {"model_type": "nonsense"}})
    )
    assert str(folder) in failing("target", "show", str(folder))
    (folder / "config.json").unlink()
    assert "config.json" in failing("target", "show", str(folder))


def test_an_attention_implementation_that_does_not_work_here_is_refused(
    workplace: Path, failing: Callable[..., str]
) -> None:
    assert "'flash_attention_2'" in failing(
        "generate", "--attention", "flash_attention_2", "what?"
    )
    assert (
        main(["generate", "--attention", "eager", "--max-new-tokens", "3", "what?"])
        == 0
    )
    assert main(["features", "--attention", "xformers"]) == 2


def test_a_folder_with_a_configuration_alone_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = shipped("qwen2-vl-7b")
    assert config is not None
    shutil.copy(config, tmp_path / "config.json")
    facts = facts_of(capsys, "show", str(tmp_path))
    assert (facts["found"], facts["target"]["num_layers"]) == (False, 28)
    assert facts["lacking"]
