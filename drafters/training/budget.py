"""Training for a time: a run gets as many steps as fit into it, by the length of real steps.

The number is decided before the first step, so that the learning rates and the stages' shares are those of a
run with so many steps. A run that continues keeps it.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.training import ranks, saved, trainer
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run, TrainingBudget
from vlmdistill.stores.errors import StoppedError

TIMED = 4
"""Steps of each stage by which the length of its steps is measured."""

log = logging.getLogger(__name__)


def fitted(run: Run, force: bool = False) -> Run:
    """The run with the steps that fit into its budget, the same on all ranks; without a budget, the run.

    A run that is finished or was stopped keeps its steps, unless it starts over by `force`. Raises what
    `trainer.train` raises.
    """
    budget = run.budget
    if budget is None:
        return run
    ranks.join()
    steps = 0 if force else ranks.first(lambda: _decided(run))
    if not steps:
        timed = _timed(run, budget)
        steps = ranks.first(lambda: _affordable(run, budget, timed))
    training = replace(run.config.training, steps=steps)
    return replace(run, config=replace(run.config, training=training))


def _decided(run: Run) -> int:
    """The steps of the run in the folder or at the URL of `run`, another one included; 0 if there is none."""
    if run.out.exists():
        return int(describe(run.out)["config"].get("steps", 0))
    checkpoint = saved.read(run.state)
    if checkpoint is None and run.checkpoints:
        checkpoint = saved.RemoteRun(run.state, run.checkpoints).checkpoint()
    return int(checkpoint.settings.get("steps", 0)) if checkpoint else 0


def _affordable(
    run: Run, budget: TrainingBudget, timed: Sequence[tuple[str, float]]
) -> int:
    """The steps that fit into the budget."""
    seconds = _mean_seconds(timed, run.config.schedule)
    steps = max(1, round(budget.seconds / seconds))
    log.info("%s: %d steps of %.3g s", budget.text, steps, seconds)
    return steps


def _mean_seconds(timed: Sequence[tuple[str, float]], stages: Sequence[Stage]) -> float:
    """The mean length of a step, where each stage has its share of the run's steps.

    The run's first step, which loads kernels, does not count if there is another. A stage without samples has
    its share and takes no time.
    """
    lengths: dict[str, list[float]] = {}
    for stage_name, seconds in timed[1:] or timed:
        lengths.setdefault(stage_name, []).append(seconds)
    epochs = {stage.name: stage.epochs for stage in stages}
    of_stages = [epochs[name] * median(of_stage) for name, of_stage in lengths.items()]
    return sum(of_stages) / sum(epochs.values())


def _timed(run: Run, budget: TrainingBudget) -> list[tuple[str, float]]:
    """Steps of each stage, in the time that the budget counts; on rank 0.

    They write into a temporary folder alone, and make no drafter.
    """
    timed: list[tuple[str, float]] = []

    def note(progress: TrainingProgress) -> None:
        seconds = progress.cpu_seconds if budget.of_cpu else progress.seconds
        timed.append((progress.stage, seconds))

    config = replace(run.config, training=_short(run.config.training))
    with TemporaryDirectory() as folder:
        short_run = replace(
            run,
            config=config,
            out=Path(folder) / run.out.name,
            held_out=0,
            save_every=config.training.steps + 1,
            checkpoints=None,
            trackers=(),
        )
        log.info("timing %d steps", config.training.steps)
        try:
            trainer.take_steps(short_run, note)
        except StoppedError as error:
            again = "steps were being timed, which the same command does again"
            raise StoppedError(again, error.signal) from None
    gc.collect()  # the engine, which is part of a reference cycle
    return timed


def _short(config: TrainConfig) -> TrainConfig:
    """Settings for `TIMED` steps of each stage, without validation; samples come in their mean proportion."""
    stages = tuple(map(_representative, config.stages))
    trained = sum(stage.epochs > 0 for stage in stages)
    return replace(
        config,
        steps=TIMED * max(1, trained),
        validate_every=0,
        patience=0,
        stages=stages,
    )


def _representative(stage: Stage) -> Stage:
    share = mean(stage.visual)
    return replace(stage, epochs=float(stage.epochs > 0), visual=(share, share))
