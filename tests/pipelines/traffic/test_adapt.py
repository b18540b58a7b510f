"""The length of a step, by which a round of `adapt` turns minutes into steps."""

import json
import os
import signal
import threading
from pathlib import Path
from statistics import median

import pytest

from tests.drafters import synthetic
from tests.drafters.synthetic import plan
from vlmdistill.pipelines.traffic.adapt import seconds_per_step
from vlmdistill.stores.errors import StoppedError, TrainingError
from vlmdistill.stores.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(synthetic.store(tmp_path / "store", 24).path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    empty = tmp_path / "timed"
    empty.mkdir()
    return empty


def test_what_is_timed_are_the_steps_of_the_run_in_all_its_stages(
    store: Path, folder: Path, tmp_path: Path
) -> None:
    settings = ("steps=8", "stages.text.epochs=1", "stages.multimodal.epochs=3")
    seconds = seconds_per_step(plan(store, tmp_path / "out", settings=settings), folder)
    lines = (folder / "out.training" / "metrics.jsonl").read_text().splitlines()
    steps = [
        figures for figures in map(json.loads, lines) if "train/seconds" in figures
    ]
    assert [figures["stage"] for figures in steps] == ["text"] * 2 + ["multimodal"] * 6
    assert seconds == pytest.approx(
        median(figures["train/seconds"] for figures in steps)
    )


def test_steps_that_are_timed_leave_no_drafter_no_statistics_and_no_copy(
    store: Path, folder: Path, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    run = plan(store, tmp_path / "out", settings=("steps=6",), checkpoints=str(copies))
    before = [path.relative_to(store) for path in store.rglob("*")]
    assert seconds_per_step(run, folder) > 0
    assert [path.relative_to(store) for path in store.rglob("*")] == before
    assert not [
        name for name in Store.open(store).index.columns if name.startswith("out.")
    ]
    assert not [
        path for path in (run.out, run.state, folder / "out", copies) if path.exists()
    ]


def test_a_run_that_cannot_train_fails_while_it_is_timed(
    store: Path, folder: Path, tmp_path: Path
) -> None:
    settings = ("steps=6", "stages.*.learning_rate=1e25")
    with pytest.raises(TrainingError, match="nan"):
        seconds_per_step(plan(store, tmp_path / "out", settings=settings), folder)


def test_a_signal_ends_the_timing(store: Path, folder: Path, tmp_path: Path) -> None:
    run = plan(store, tmp_path / "out", settings=("steps=100000",))
    ended = threading.Event()

    def stop() -> None:
        while not (folder / "out.training" / "metrics.jsonl").exists():
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with pytest.raises(StoppedError) as stopped:
            seconds_per_step(run, folder)
    finally:
        ended.set()
        stopping.join()
    assert stopped.value.signal == signal.SIGINT
