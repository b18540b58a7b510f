"""A wrong name, an incomplete download or an unsupported model is one clear line each."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.hf_api import ModelInfo
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.pipelines.targets.spoil import edit, refusal
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import Capturer, CaptureSettings
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.responses.responder import Responder
from vlmdistill.pipelines.targets import loading
from vlmdistill.pipelines.targets.checkpoints.registry import HUB, Options
from vlmdistill.pipelines.targets.describe import describe
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.families import FAMILIES
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.stock.target import StockTarget
from vlmdistill.pipelines.workspace.workspace import Workspace, absolute_model
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature

Checkpoint = Callable[..., Path]


def edit_text(folder: Path, **values: Any) -> None:
    """Change the text model of a configuration."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config={**text, **values})


def test_every_supported_family_is_tested() -> None:
    assert set(FAMILIES) == set(tiny.FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_of_families_says_what_their_classes_say(kind: str) -> None:
    family = FAMILIES[kind].load()
    assert (family.model_type, FAMILIES[kind].videos) == (
        kind,
        family.frame_processor is not None,
    )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_facts_of_a_target(checkpoint: Checkpoint, family: str) -> None:
    target = load(str(checkpoint(family)))
    info = target.info
    assert (info.hidden_size, info.num_layers, info.num_heads, info.num_kv_heads) == (
        32,
        3,
        4,
        2,
    )
    assert (
        info.vocab_size,
        info.intermediate_size,
        info.head_dim,
        info.max_position,
    ) == (320, 48, 8, 1024)
    assert info.rope_theta == 10000
    assert info.hidden_act == "silu"
    assert info.attention_bias == (
        family in ("llava_onevision", "qwen2_vl", "qwen2_5_vl")
    )
    assert target.head.embed_VD.shape == target.head.lm_head_VD.shape == (320, 32)
    assert target.dtype == torch.float32
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_provenance_tells_checkpoints_apart(
    copy: Callable[[str], Path], checkpoint: Checkpoint
) -> None:
    features = {Feature("hidden", "text"), Feature("embed", "visual")}
    base = load(str(checkpoint("llava"))).provenance(features, "bfloat16")
    assert base.features == ("embed.visual", "hidden.text")
    folder = copy("llava")
    assert base.mismatch(load(str(folder)).provenance(features, "bfloat16")) is None
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("USER", "HUMAN"))
    changed = load(str(folder))
    assert "template_hash" in (
        base.mismatch(changed.provenance(features, "bfloat16")) or ""
    )
    assert str(changed.fingerprint) != str(load(str(checkpoint("llava"))).fingerprint)
    other = load(str(checkpoint("llava", seed=1))).provenance(features, "bfloat16")
    assert "weights_hash" in (base.mismatch(other) or "")
    edit(folder / "preprocessor_config.json", do_normalize=False)
    template.write_text(template.read_text().replace("HUMAN", "USER"))
    assert "processor_hash" in (
        base.mismatch(load(str(folder)).provenance(features, "bfloat16")) or ""
    )


def test_unknown_name_lists_the_known_ones() -> None:
    message = refusal("qwen9")
    assert "qwen9" in message
    assert "qwen2.5-vl-7b" in message


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "someone/some-model"])
def test_hub_out_of_reach(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("[Errno -2] Name or service not known\nmore words")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    message = refusal(name)
    assert HUB.get(name, name) in message
    assert "Name or service not known" in message
    assert f"instead of '{name}'" in message


def test_hub_cache_is_used_without_asking(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("qwen2_vl"))

    def cached(repository: str, *, local_files_only: bool) -> str:
        assert (repository, local_files_only) == ("Qwen/Qwen2-VL-7B-Instruct", True)
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert load("qwen2-vl-7b").info.family == "qwen2-vl"


@pytest.mark.parametrize("kind", ["gpt2", "qwen9_vl", None])
def test_unknown_family(copy: Callable[[str], Path], kind: str | None) -> None:
    folder = copy("llava")
    edit(folder / "config.json", model_type=kind)
    message = refusal(folder)
    assert f"'{kind}'" in message
    assert "qwen3_vl" in message


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "lacks the weights model.safetensors"),
        ("tokenizer.json", "has no tokenizer"),
        ("chat_template.jinja", "has no chat template"),
        ("preprocessor_config.json", "has no image processor"),
    ],
)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_incomplete_download(
    copy: Callable[[str], Path], family: str, lost: str, said: str
) -> None:
    folder = copy(family)
    (folder / lost).unlink()
    assert said in refusal(folder)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_missing_shard(copy: Callable[[str], Path], family: str) -> None:
    folder = copy(family)
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors (1 of 2 files)" in message


def test_the_fingerprint_is_of_the_loaded_files(copy: Callable[[str], Path]) -> None:
    """Where weights lie in one file and in shards as well, the stock loading takes the one file."""
    folder = copy("llava")
    alone = load(str(folder))
    index = folder / "model.safetensors.index.json"
    shutil.copy(
        folder / "model.safetensors", folder / "model-00001-of-00001.safetensors"
    )
    index.write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}})
    )
    assert load(str(folder)).fingerprint == alone.fingerprint
    whole = load_file(folder / "model.safetensors")
    name = next(name for name in whole if name.endswith("lm_head.weight"))
    save_file(
        {**whole, name: whole[name] + 1},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    changed = load(str(folder))
    assert changed.fingerprint != alone.fingerprint
    torch.testing.assert_close(changed.head.lm_head_VD, alone.head.lm_head_VD + 1)
    (folder / "model-00001-of-00001.safetensors").unlink()
    assert load(str(folder)).fingerprint == changed.fingerprint, (
        "an index that is left over says nothing"
    )


@pytest.mark.parametrize("places", [None, [], {"a": 3, "b": "model-1.safetensors"}])
def test_a_broken_weight_index(copy: Callable[[str], Path], places: object) -> None:
    folder = copy("llava")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places})
    )
    assert "model.safetensors.index.json is corrupt" in refusal(folder)


def test_an_index_names_no_file_outside_its_folder(copy: Callable[[str], Path]) -> None:
    folder = copy("llava")
    (folder / "model.safetensors").rename(folder.parent / "model-1.safetensors")
    index = {"weight_map": {"a": "../model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../model-1.safetensors'" in refusal(folder)


def test_a_configuration_of_endless_nesting_is_refused(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llava")
    (folder / "config.json").write_text("[" * 200_000)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_a_part_of_the_configuration_that_is_null(
    copy: Callable[[str], Path], part: str
) -> None:
    folder = copy("llava")
    edit(folder / "config.json", **{part: None})
    assert part in refusal(folder)


def test_a_workspace_does_not_hide_the_model_of_its_name(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: str(checkpoint("llava"))
    )
    (tmp_path / "llava-1.5-7b" / "responses").mkdir(parents=True)
    assert describe("llava-1.5-7b", 10, 10).found
    assert load("llava-1.5-7b").folder == checkpoint("llava")
    assert Workspace.of("llava-1.5-7b", tmp_path).root == tmp_path / "llava-1.5-7b"
    assert absolute_model("llava-1.5-7b") == "llava-1.5-7b"


def test_an_adapter_beside_the_weights_is_not_ignored(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(checkpoint("llava"), folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(TargetError, match=r"adapter_config.json.*merge it"):
        load(str(folder))


def test_weights_without_safetensors(copy: Callable[[str], Path]) -> None:
    """Only safetensors are fetched and read: another download would not help."""
    folder = copy("llava")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "has pytorch_model.bin and no safetensors files" in message
    assert "save_pretrained" in message
    assert "download it again" not in message
    assert describe(str(folder), 10, 10).lacking == message


def test_a_hub_model_without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(repository: str, *, local_files_only: bool) -> str:
        raise OSError("not here")

    files = [{"rfilename": name} for name in ("config.json", "pytorch_model.bin")]
    info = ModelInfo(id="someone/some-model", tags=[], siblings=files)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    message = refusal("someone/some-model")
    assert "no safetensors files" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_weights_without_their_scale(
    copy: Callable[[str], Path], dtype: torch.dtype
) -> None:
    folder = copy("qwen2_vl")
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in weights if key.endswith("down_proj.weight"))
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "no quantization_config that gives its scale" in refusal(folder)


def test_corrupt_files(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2_vl")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    assert "is corrupt: it has" in refusal(folder)
    weights.write_bytes(b"\xff" * 8 + whole[8:])
    assert "its header is unreadable" in refusal(folder)
    weights.write_bytes(b"")
    assert "its header is unreadable" in refusal(folder)
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "no regular file" in refusal(folder)


def test_weights_of_another_model(
    copy: Callable[[str], Path], checkpoint: Checkpoint
) -> None:
    folder = copy("llava")
    shutil.copy(checkpoint("qwen2_vl") / "model.safetensors", folder)
    assert "the weights" in refusal(folder)
    shutil.copy(checkpoint("llava", layers=2) / "model.safetensors", folder)
    assert "the weights lack" in refusal(folder)


def test_a_window_takes_the_stock_forward_pass(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2_vl")
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    edit_text(folder, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert isinstance(load(str(folder)), StockTarget)
    edit_text(folder, sliding_window=None, layer_types=None)
    assert not isinstance(load(str(folder)), StockTarget)


def test_a_mistral_ignores_kinds_of_layers(copy: Callable[[str], Path]) -> None:
    """Its configuration lists none: every layer has the window."""
    folder = copy("llava_mistral")  # whose window is the default, beyond all positions
    assert not isinstance(load(str(folder)), StockTarget)
    edit_text(
        folder,
        sliding_window=1023,
        use_sliding_window=False,
        layer_types=["full_attention"] * 3,
    )
    assert isinstance(load(str(folder)), StockTarget)


@pytest.mark.parametrize("kind", ["mixtral", "olmo2", "phi3", "qwen2_vl_text"])
def test_another_text_model_needs_its_own_weights(
    copy: Callable[[str], Path], kind: str
) -> None:
    folder = copy("llava")
    edit_text(folder, model_type=kind)
    assert "the weights lack" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention": "flash_attention_2"}, "'flash_attention_2' needs a GPU"),
        ({"attention": "xformers"}, "'xformers': choose one of sdpa, eager"),
        ({"layers": {"": "cpu", "nothing": 0}}, "several devices"),
        ({"dtype": "int8"}, "'int8'"),
        ({"device": "gpu"}, "'gpu'"),
        ({"device": "cuda:99"}, "'cuda:99'"),
    ],
)
def test_wrong_settings(
    checkpoint: Checkpoint, settings: dict[str, Any], said: str
) -> None:
    assert said in refusal(checkpoint("llava"), **settings)


def test_workers_use_the_load_options(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, how = (
        str(checkpoint("qwen2_vl")),
        Options(dtype="bfloat16", attention="eager"),
    )
    responder = Responder(model, SamplingSettings(), Filters(), 2, how)
    capturer = Capturer(
        model,
        CaptureStore(tmp_path / "store"),
        "",
        CaptureSettings(drafters=["hivis"]),
        how,
    )
    for target in (responder.target, capturer.target):
        assert target.dtype == torch.bfloat16
        assert target.model.config.get_text_config()._attn_implementation == "eager"


def test_rotary_positions_that_depend_on_the_length_are_refused(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llava")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    edit_text(folder, rope_parameters=rope)
    assert "rotary positions of type 'dynamic'" in refusal(folder)


def test_a_target_without_eos_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2_vl")
    (folder / "generation_config.json").unlink()
    assert load(str(folder)).info.eos_ids == (1,), "the tokenizer's, for lack of others"
    assert describe(str(folder), 10, 10).target.eos_ids == (1,)
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert "no end-of-sequence token" in refusal(folder)
    with pytest.raises(TargetError, match="no end-of-sequence token"):
        describe(str(folder), 10, 10)
    (folder / "tokenizer.json").unlink()
    half = describe(str(folder), 10, 10)
    assert (half.found, half.target.eos_ids) == (False, ()), (
        "unknown before the download is complete"
    )


def test_without_a_generation_config_every_other_eos_counts(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llava")
    (folder / "generation_config.json").unlink()
    theirs = json.loads((folder / "config.json").read_text())["text_config"][
        "eos_token_id"
    ]
    assert theirs == 2, "of the class; the tokenizer's is 1"
    assert set(load(str(folder)).info.eos_ids) == {1, 2}
    assert set(describe(str(folder), 10, 10).target.eos_ids) == {1, 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"eos_token_id": "</s>"}', "'</s>'"),
    ],
)
def test_a_broken_generation_config_is_refused(
    copy: Callable[[str], Path], text: str, said: str
) -> None:
    folder = copy("llava")
    (folder / "generation_config.json").write_text(text)
    assert said in refusal(folder)
    with pytest.raises(TargetError) as caught:
        describe(str(folder), 10, 10)
    assert str(caught.value) == refusal(folder)


def test_the_demo_is_a_checkpoint_like_any_other() -> None:
    demo, folder = load("demo-small"), load(str(EMBEDDED["demo-small"]))
    assert demo.info.family == "qwen2.5-vl"
    assert demo.fingerprint == folder.fingerprint


def test_a_family_that_needs_a_newer_transformers_says_so(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vars(loading)["transformers"], "__version__", "5.17.0")
    load(str(checkpoint("qwen2_5_vl")))
    with pytest.raises(TargetError, match=r"5\.17\.0.*5\.23"):
        load(str(checkpoint("llava_onevision")))
