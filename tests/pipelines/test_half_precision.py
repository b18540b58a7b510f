"""A target whose states a dtype cannot hold: every command that runs it says so, and none gives a result."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.served_app import serving
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import TargetError

SCALE = 1e5  # of states, which float32 and bfloat16 can hold, and float16 cannot
OUTPUTS = (
    "embed_tokens.weight",
    "o_proj.weight",
    "down_proj.weight",
)  # what is added to the states


def scaled(folder: Path, *parts: str) -> Path:
    """Scale weights of a checkpoint by the ends of their names."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith(parts):
            weights[name] *= SCALE
    save_file(weights, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that gives the same logits as another one, with larger states."""
    folder = tiny.checkpoint("llava", tmp_path_factory.mktemp("wide"), layers=1)
    return scaled(folder, *OUTPUTS)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, wide: Path) -> list[str]:
    """Options of a workspace with prompts and, in float32, responses."""
    folder = tmp_path_factory.mktemp("work")
    rows = [
        {"conversations": [{"from": "human", "value": f"What is {number}?"}]}
        for number in range(4)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    options = ["--model", str(wide), "--runs", str(folder / "runs")]
    assert (
        main(["prompts", str(folder / "rows.json"), "--eval-share", "0.5", *options])
        == 0
    )
    short = ["--max-new-tokens", "8", "--min-words", "0", "--workers", "0"]
    assert main(["responses", *options, *short]) == 0
    return options


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "What is this?"],
        ["generate", "What is this?", "--drafter", "lookahead"],
        ["serve", "--port", "0"],
        ["eval", "lookahead", "--threads", "1", "--anyway"],
        ["features", "--for", "eagle3", "--workers", "0", "--anyway"],
        [
            "responses",
            "--temperature",
            "0",
            "--out",
            "again",
            "--workers",
            "0",
            "--anyway",
        ],
    ],
    ids=lambda command: "-".join(command[:1] + command[2:4:2]),
)
def test_a_target_that_float16_cannot_run_is_named_and_so_is_the_dtype_that_can(
    workspace: list[str],
    command: list[str],
    failing: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = failing(*command, *workspace, "--target-dtype", "float16", "--quiet")
    assert "float16" in line
    assert "--target-dtype bfloat16" in line


def test_what_float32_and_bfloat16_can_hold_is_run(wide: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        prompt = (target := load(str(wide), dtype=dtype)).encode(tiny.message("Hello"))
        assert target.generate([prompt], max_new_tokens=2)


@pytest.mark.parametrize("family", ["llava", "llava_gemma2"])
def test_an_image_that_float16_cannot_hold_costs_its_prompt_alone(
    tmp_path: Path, family: str
) -> None:
    folder = scaled(
        tiny.checkpoint(family, tmp_path / "model", layers=1),
        "multi_modal_projector.linear_2.weight",
    )
    target = load(str(folder), dtype="float16", attention="eager", proven=True)
    text, image = (
        target.encode(tiny.message("Hello")),
        target.encode(tiny.message("Hello", tiny.picture(28, 28))),
    )
    assert target.generate([text], max_new_tokens=2, temperature=0)
    with pytest.raises(TargetError, match="bfloat16") as caught:
        target.generate([text, image], max_new_tokens=2)
    assert getattr(caught.value, "at", None) == 1
    with pytest.raises(TargetError, match="bfloat16"):
        target.prefill(image)


def test_a_server_refuses_an_image_that_float16_cannot_hold_and_goes_on(
    tmp_path: Path,
) -> None:
    folder = scaled(
        tiny.checkpoint("llava", tmp_path / "model", layers=1),
        "multi_modal_projector.linear_2.weight",
    )
    decoder = ServedDecoder("wide", load(str(folder), dtype="float16"))
    image = {
        "type": "image_url",
        "image_url": {"url": tiny.data_url(tiny.picture(28, 28))},
    }
    text = {"type": "text", "text": "Hello"}
    answers = []
    with serving(decoder) as server:
        for content in ([image, text], [text]):
            turns = [{"role": "user", "content": content}]
            body = json.dumps(
                {"model": "wide", "messages": turns, "max_tokens": 2}
            ).encode()
            kind = "application/json"
            answers.append(
                server.request("POST", "/v1/chat/completions", body, Content_Type=kind)
            )
    assert [status for status, _ in answers] == [400, 200]
    assert "float16" in json.loads(answers[0][1])["error"]["message"]


@pytest.mark.parametrize("ending", ["model.norm.weight", "lm_head.weight"])
def test_weights_that_are_damaged_are_no_matter_of_the_dtype(
    tmp_path: Path, ending: str
) -> None:
    folder = tiny.checkpoint("llava", tmp_path / "model", layers=1)
    weights = load_file(folder / "model.safetensors")
    (damaged,) = (name for name in weights if name.endswith(ending))
    weights[damaged][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match="float32") as caught:
        load(str(folder))
    assert "--target-dtype" not in str(caught.value)


def test_responses_keep_what_a_bad_image_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scaled(
        tiny.checkpoint("llava", tmp_path / "model", layers=1),
        "multi_modal_projector.linear_2.weight",
    )
    tiny.picture(28, 28).save(tmp_path / "1.png")
    rows = [
        {"conversations": [{"from": "human", "value": "Who?"}], **more}
        for more in ({}, {"image": "1.png"})
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    import_prompts(
        [str(tmp_path / "rows.json")], tmp_path / "runs" / "model" / "prompts.parquet"
    )
    options = [
        "--model",
        str(folder),
        "--runs",
        str(tmp_path / "runs"),
        "--workers",
        "0",
        "--anyway",
    ]
    command = [
        "responses",
        "--json",
        "--max-new-tokens",
        "4",
        "--min-words",
        "0",
        "--target-dtype",
        "float16",
        *options,
    ]
    assert main(command) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["kept"], summary["failed"]) == (1, 1)
