"""Video through the whole flow: files, prompts, responses, features, evaluation."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.drafters import synthetic
from vlmdistill.cli.main import main
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.store import Store

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_whole_flow(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(5):
        tiny.film(tmp_path / f"{i}.mp4", tiny.clip(12, 56, 28, i))
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "video", "video": f"{i}.mp4"}, "What moves?"],
                }
            ]
        }
        for i in range(5)
    ]
    for name, chosen in (("train", rows[:3]), ("eval", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    where = ("--model", str(model), "--runs", str(tmp_path / "runs"))
    for side in ("train", "eval"):
        run(
            capsys,
            "prompts",
            str(tmp_path / f"{side}.jsonl"),
            "--split",
            side,
            "--fps",
            "5",
            *where,
        )
    run(
        capsys,
        "responses",
        "--max-new-tokens",
        "12",
        "--min-words",
        "0",
        "--workers",
        "0",
        *where,
    )
    run(capsys, "features", "--for", "sparrow,hivis", "--workers", "0", *where)
    workspace = Workspace.of(str(model), tmp_path / "runs")
    store = Store.open(workspace.features)
    assert len(store.keys()) == 3
    for sample in map(store.read, store.keys()):
        (media,) = json.loads(str(sample.meta["media"]))
        assert media["seconds"] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        assert sample.visual_tokens == sample.meta["frames"]  # two for each pair
    synthetic.save("sparrow", workspace.drafter("sparrow"), target=load(str(model)))
    facts = json.loads(
        run(capsys, "eval", "sparrow", "--max-new-tokens", "16", "--json", *where)
    )
    (result,) = facts["sparrow"]["temperatures"]
    assert result["lossless"] == {"identical": 2, "near_tie": 0, "different": 0}
    video = ("--video", str(tmp_path / "4.mp4"), "--max-new-tokens", "16", *where)
    responses = {
        run(capsys, "generate", "What moves?", *video, *more)
        for more in (("--fps", "5"), ("--fps", "5", "--drafter", "sparrow"))
    }
    assert len(responses) == 1
    assert (
        run(capsys, "generate", "What moves?", *video, "--frames", "2") not in responses
    )


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2_5_vl")
