"""The example that trains a drafter for a folder of photos."""

import json
from pathlib import Path

import pytest

from examples.photos import photos
from tests.pipelines.bench.made_up import newest
from vlmdistill.pipelines.demo import files

pytestmark = pytest.mark.slow


def test_a_folder_of_photos_becomes_a_drafter_and_a_comparison(tmp_path: Path) -> None:
    made = files.write(tmp_path, images=5, dialogues=0, seed=6)
    (made.images / "notes.txt").write_text("not a photo")
    few = [
        "--set",
        "steps=2",
        "--set",
        "batch_tokens=512",
        "--max-new-tokens",
        "16",
        "--workers",
        "0",
    ]
    assert photos([str(made.images), "--runs", str(tmp_path / "runs"), *few]) == 0
    workspace = tmp_path / "runs" / "demo-small"
    at, sampled = newest(workspace / "reports", "sparrow").temperatures
    assert (at.temperature, sampled.temperature) == (0, 1)
    assert {one.kind for one in at.prompts} == {"image"}
    assert {one.drafted.check for one in at.prompts} == {"identical"}
    (skipped,) = map(
        json.loads, (workspace / "prompts.skipped.jsonl").read_text().splitlines()
    )
    assert skipped["detail"] == "notes.txt"


def test_a_folder_without_photos_stops_at_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("not a photo")
    assert photos([str(tmp_path), "--runs", str(tmp_path / "runs")]) == 1
    assert "neither image nor video" in capsys.readouterr().err
