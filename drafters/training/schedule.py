"""The schedule of a run: steps of each stage, learning rates, length of each epoch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.training.saved import Position


@dataclass(frozen=True)
class Schedule:
    """What a run does at each position, by its settings alone."""

    config: TrainConfig
    stages: Sequence[Stage]  # as trained
    micro: int  # micro-batches of an optimizer step on each rank

    def steps(self, number: int) -> int:
        """Optimizer steps of a stage if the run counts steps, else 0; they sum to `config.steps`."""
        epochs = [stage.epochs for stage in self.stages]
        steps_per_epoch = self.config.steps / max(sum(epochs), 1e-9)
        end_before = round(steps_per_epoch * sum(epochs[:number]))
        end = round(steps_per_epoch * sum(epochs[: number + 1]))
        return end - end_before

    def length_of(self, number: int) -> str:
        """The steps or epochs of a stage, as text."""
        if self.config.steps:
            return f"{self.steps(number)} of {self.config.steps} steps"
        return f"{self.stages[number].epochs:g} epochs"

    def planned(
        self,
        position: Position,
        drawn: Callable[[int, float], Sequence[str]],
        batches: Callable[[Sequence[str]], int],
    ) -> int:
        """Optimizer steps of the whole run: exact where it counts steps, else to a few steps an epoch.

        `drawn` gives the samples of an epoch by stage and ramp, `batches` how many batches those make on a
        rank.
        """
        planned: float = position.total - position.stage_steps
        for number in range(position.stage, len(self.stages)):
            if self.config.steps:
                planned += self.steps(number) if drawn(number, 0.0) else 0
                continue
            for ramp, epochs in _epochs_by_ramp(self.stages[number]).items():
                keys = drawn(number, ramp) if epochs else ()
                if keys:
                    planned += epochs * ceil(batches(keys) / self.micro)
        return max(1, ceil(planned))

    def progress(self, position: Position, part: float = 0.0) -> float:
        """Share of the stage that is done, where `part` is the share of the current epoch."""
        if self.config.steps:
            steps = self.steps(position.stage)
            return position.stage_steps / steps if steps else 1.0
        epochs = self.stages[position.stage].epochs
        return (position.epoch + part) / epochs if epochs else 1.0

    def learning_rate(self, position: Position, part: float) -> float:
        """A linear rise over `warmup` of the stage, then a linear fall to zero."""
        progress = self.progress(position, part)
        warmup = self.config.warmup
        rising = (progress + 1e-3) / (warmup + 1e-3)
        factor = rising if progress < warmup else (1 - progress) / (1 - warmup)
        return self.stages[position.stage].learning_rate * factor

    def ramp(self, position: Position) -> float:
        """How far the share of samples with images has moved in the current epoch, 0 to 1."""
        if steps := self.steps(position.stage):
            return min(1.0, position.steps_before_epoch / steps)
        last_epoch = ceil(self.stages[position.stage].epochs) - 1
        return min(1.0, position.epoch / max(1, last_epoch))

    def batches_left(self, position: Position, batches: float, read: float) -> int:
        """Batches that may still be read of an epoch of so many `batches`, of which some are `read`."""
        if steps := self.steps(position.stage):
            return (steps - position.stage_steps) * self.micro
        share = min(1.0, self.stages[position.stage].epochs - position.epoch)
        return round(round(batches * share) - read)

    def is_last_epoch(self, position: Position, batches: float) -> bool:
        """Whether no epoch of any stage follows this epoch of so many `batches`."""
        if position.stage < len(self.stages) - 1:
            return False
        if steps := self.steps(position.stage):
            return steps - position.steps_before_epoch <= ceil(batches / self.micro)
        return position.epoch + 1 >= self.stages[position.stage].epochs


def _epochs_by_ramp(stage: Stage) -> Mapping[float, float]:
    """The epochs of a stage by `ramp`: how far the share of samples with images has moved.

    If it moves: the first epoch, those between, all at half of the way, and the last, which may be cut.
    """
    epochs = ceil(stage.epochs)
    start, end = stage.visual
    if start == end or epochs <= 1:
        return {0.0: stage.epochs}
    return {0.0: 1, 0.5: epochs - 2, 1.0: stage.epochs - epochs + 1}
