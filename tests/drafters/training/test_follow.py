"""Training on a store that is still captured."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafters import synthetic
from tests.drafters.synthetic import plan
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.training import follow, saved
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores.errors import StoppedError, TrainingError
from vlmdistill.stores.store import Store

SHARD, SHARDS, STEPS = 5, 4, 40


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL", 0.02)


def capture(path: Path, *numbers: int) -> None:
    """Add shards by number; the capture has ended with the last one."""
    for number in numbers:
        store = synthetic.store(path, (number + 1) * SHARD, unit=f"u{number}", first=number * SHARD)
        store.announce(SHARD * SHARDS, ended=number == SHARDS - 1)


def following(store: Path, out: Path, **more: Any) -> Run:
    settings = (f"steps={STEPS}", "stages.text.epochs=0", "stages.multimodal.visual=[1,1]")
    return replace(plan(store, out, settings=settings, held_out=0.1), follow=True, **more)


def stop_at(step: int) -> Callable[[TrainingProgress], None]:
    return lambda one: os.kill(os.getpid(), signal.SIGTERM) if one.step == step else None


def test_each_shard_is_read_once_it_is_there_and_half_of_the_steps_after_the_last(tmp_path: Path) -> None:
    store, taken = tmp_path / "store", list[int]()
    there: list[tuple[int, int]] = []  # steps that were done, shards that were there a while later

    def grow() -> None:
        for number in range(SHARDS):
            time.sleep(0.5)
            there.append((len(taken), number))
            capture(store, number)

    thread = threading.Thread(target=grow)
    thread.start()
    train(following(store, tmp_path / "out"), lambda one: taken.append(one.step))
    thread.join()
    assert taken == [*range(1, STEPS + 1)]
    assert all(steps <= follow.LEAD * STEPS * shards / SHARDS for steps, shards in there)
    shards = describe(tmp_path / "out")["training"]["shards"]
    assert [*shards] == [f"u{number}" for number in range(SHARDS)]
    assert shards["u0"] >= shards["u3"] > 1


def test_where_nothing_more_comes_it_is_the_run_that_does_not_follow(tmp_path: Path) -> None:
    capture(tmp_path / "store", *range(SHARDS))
    run = following(tmp_path / "store", tmp_path / "followed")
    train(run)
    train(replace(run, follow=False, out=tmp_path / "after"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("followed", "after")]
    assert files[0] == files[1]


def test_a_dead_capture_ends_the_run_which_goes_on_when_it_does(tmp_path: Path) -> None:
    run = following(tmp_path / "store", tmp_path / "out", wait=0.2)
    with pytest.raises(TrainingError, match="vlmdistill features"):
        train(run)
    capture(tmp_path / "store", 0, 1)
    with pytest.raises(TrainingError, match="10 of 20 samples"):
        train(run)
    capture(tmp_path / "store", 2)
    with pytest.raises(StoppedError):
        train(run, stop_at(12))  # in the middle of an epoch
    state = json.loads((tmp_path / "out.training" / "checkpoint.json").read_bytes())
    assert state["position"]["reader"] is not None
    capture(tmp_path / "store", 3)
    steps = list[int]()
    train(run, lambda one: steps.append(one.step))
    assert steps == [*range(14, STEPS + 1)]
    lines = (tmp_path / "out.training" / "metrics.jsonl").read_text().splitlines()
    done = [json.loads(line) for line in lines]
    assert [one["step"] for one in done if "train/loss" in one] == [*range(1, STEPS + 1)]


def test_the_checkpoint_of_a_run_holds_the_shards_of_a_large_store(tmp_path: Path) -> None:
    shards = {f"unit-{number:016x}": 1.5 for number in range(100_000)}
    now = saved.Saved(
        signature="", settings={}, ranks=1, dtype="float32", position=saved.Position(shards=shards)
    )
    saved.write(tmp_path, now, {})
    found = saved.read(tmp_path)
    assert found is not None
    assert found.position.shards == shards


def test_a_store_without_the_record_of_a_capture_is_all_there_is(tmp_path: Path) -> None:
    """As it was captured by an earlier version, merged, pushed or pulled."""
    synthetic.store(tmp_path / "store", SHARD * SHARDS)
    assert follow.Capture(str(tmp_path / "store"), 60).look()[0].ended
    seen = list[int]()
    train(following(tmp_path / "store", tmp_path / "out", wait=60), lambda one: seen.append(one.step))
    assert len(seen) == STEPS


def test_a_capture_that_has_ended_without_a_sample_is_refused_at_once(tmp_path: Path) -> None:
    synthetic.store(tmp_path / "store", 0).announce(0, ended=True)
    for unit in (tmp_path / "store" / "commits").glob("*"):
        unit.unlink()
    with pytest.raises(TrainingError, match="ended"):
        train(following(tmp_path / "store", tmp_path / "out", wait=1e6))


@pytest.mark.parametrize("settings", [(), (f"steps={STEPS}", "validate_every=2")])
def test_what_cannot_follow_is_refused_before_it_waits(settings: tuple[str, ...], tmp_path: Path) -> None:
    run = plan(tmp_path / "store", tmp_path / "out", settings=settings, held_out=0.3)
    with pytest.raises(TrainingError, match="--follow"):
        train(replace(run, follow=True, wait=1e6))


def test_a_store_that_does_not_answer_for_a_while_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bucket does, or a network file system: only after `wait` seconds is the capture given up."""
    capture(tmp_path / "store", 0)
    growing = follow.Capture(str(tmp_path / "store"), wait=0.5)
    before = growing.look()

    def unreachable(store: Store) -> list[str]:
        raise OSError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "units", unreachable)
        assert growing.look() == before
        time.sleep(0.6)
        _, dead = growing.look()
        assert "connection reset" in dead
    capture(tmp_path / "store", 1)
    assert growing.look()[0].samples > before[0].samples
