"""Training for a time: timed steps decide how many are taken, and a stopped run keeps their number."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafters import synthetic
from tests.drafters.synthetic import plan
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.training import trainer
from vlmdistill.drafters.training.budget import TIMED, fitted
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run, TrainingBudget
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores.errors import StoppedError, TrainingError
from vlmdistill.stores.store import Store

pytestmark = pytest.mark.slow

HALF_A_SECOND = TrainingBudget(0.5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(synthetic.store(tmp_path_factory.mktemp("budget"), 24).path)


@pytest.fixture
def run(store: Path, tmp_path: Path) -> Run:
    settings = ("steps=8", "stages.text.epochs=1", "stages.multimodal.epochs=3")
    made = plan(store, tmp_path / "out", settings=settings)
    return replace(made, budget=HALF_A_SECOND)


class Clock:
    """Steps that take the seconds of their stage, and twice as many CPU seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.stages: list[str] = []
        self._take = trainer.take_steps
        self._seconds = seconds
        monkeypatch.setattr(trainer, "take_steps", self.take_steps)

    def take_steps(self, run: Run, on_step: trainer.OnStep) -> None:
        def lengthened(progress: TrainingProgress) -> None:
            self.stages.append(progress.stage)
            seconds = self._seconds[progress.stage]
            on_step(replace(progress, seconds=seconds, cpu_seconds=2 * seconds))

        self._take(run, lengthened)


@pytest.mark.parametrize(
    ("time", "steps"),
    [(TrainingBudget(100), 40), (TrainingBudget(100, of_cpu=True), 20)],
)
def test_steps_follow_from_the_length_of_those_of_each_stage(
    time: TrainingBudget, steps: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the steps is of the first stage: 0.25 * 1 s + 0.75 * 3 s = 2.5 s."""
    clock = Clock(monkeypatch, text=1, multimodal=3)
    affordable = fitted(replace(run, budget=time))
    assert clock.stages == ["text"] * TIMED + ["multimodal"] * TIMED
    assert affordable.config.training.steps == steps
    assert affordable.config.training.stages == run.config.training.stages


def test_a_run_for_a_time_has_the_schedule_of_its_steps_and_says_its_budget(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, text=0.05, multimodal=0.05)
    steps: list[TrainingProgress] = []
    train(fitted(run), steps.append)
    assert [step.stage for step in steps] == ["text"] * 2 + ["multimodal"] * 8
    rates = [step.learning_rate for step in steps[2:]]
    assert rates[1:] == sorted(rates[1:], reverse=True)  # down to the end of the stage
    spent = describe(run.out)["training"]["budget"]
    assert spent["asked"] == HALF_A_SECOND.text
    assert spent["seconds"] == pytest.approx(
        sum(step.seconds for step in steps), abs=0.1
    )
    assert spent["cpu_seconds"] > 0


def test_a_stopped_run_keeps_its_steps_and_is_not_timed_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Clock(monkeypatch, text=0.05, multimodal=0.05)
    copied = replace(run, checkpoints=str(tmp_path / "copies"))

    def stop(progress: TrainingProgress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        train(fitted(copied), stop)
    elsewhere = replace(copied, out=tmp_path / "elsewhere" / "out")
    monkeypatch.setattr(trainer, "take_steps", _never)
    for again in (elsewhere, copied):  # by the copy, and by the checkpoint on this disk
        assert fitted(again).config.training.steps == 10
    seen: list[int] = []
    train(fitted(copied), lambda progress: seen.append(progress.step))
    assert seen == [*range(5, 11)]
    train(fitted(copied), _never)  # it is finished


def _never(*_: Any) -> None:
    raise AssertionError


def test_a_run_with_another_budget_is_another_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, text=0.25, multimodal=0.25)
    train(fitted(run))
    other = replace(run, budget=TrainingBudget(90))
    with pytest.raises(TrainingError, match=r"budget 1\.5 minutes, not 0\.00\d+ minut"):
        train(fitted(other))
    with pytest.raises(TrainingError, match=r"budget None, not 0\.00\d+ minutes"):
        train(replace(fitted(run), budget=None))
    assert fitted(other, force=True).config.training.steps == 360


def test_steps_that_are_timed_leave_no_drafter_no_statistics_and_no_copy(
    run: Run, store: Path, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    timed = replace(run, out=tmp_path / "timed", checkpoints=str(copies))
    before = [path.relative_to(store) for path in store.rglob("*")]
    assert fitted(timed).config.training.steps > 0
    assert [path.relative_to(store) for path in store.rglob("*")] == before
    columns = Store.open(store).index.columns
    assert not [name for name in columns if name.startswith("timed.")]
    assert not [path for path in (timed.out, timed.state, copies) if path.exists()]


def test_a_run_that_cannot_train_fails_while_it_is_timed(
    store: Path, tmp_path: Path
) -> None:
    settings = ("steps=6", "stages.*.learning_rate=1e25")
    wrong = plan(store, tmp_path / "out", settings=settings)
    with pytest.raises(TrainingError, match="nan"):
        fitted(replace(wrong, budget=HALF_A_SECOND))


def test_a_signal_ends_the_timing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    take = trainer.take_steps

    def stopped(short_run: Run, on_step: trainer.OnStep) -> None:
        def stop(progress: TrainingProgress) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        take(short_run, stop)

    monkeypatch.setattr(trainer, "take_steps", stopped)
    with pytest.raises(StoppedError, match="the same command does again") as ended:
        fitted(run)
    assert ended.value.signal == signal.SIGINT
