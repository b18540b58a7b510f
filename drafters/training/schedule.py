"""The schedule of a run: steps of each stage, learning rates, length of each epoch."""

from collections.abc import Callable, Sequence
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
        epochs = [one.epochs for one in self.stages]
        before, after = (sum(epochs[: number + more]) for more in (0, 1))
        share = self.config.steps / max(sum(epochs), 1e-9)
        return round(share * after) - round(share * before)

    def share(self, number: int) -> str:
        """What a stage takes of the run, as text."""
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

        `drawn` gives the samples of an epoch by stage and ramp, `batches` how many those make on a rank.
        """
        planned: float = position.total - position.taken
        for number in range(position.stage, len(self.stages)):
            stage = self.stages[number]
            if self.config.steps:
                planned += self.steps(number) if drawn(number, 0.0) else 0
                continue
            # The share of samples with images may move: the first epoch, the mean of those between, the last.
            epochs, mixed = ceil(stage.epochs), stage.visual[0] != stage.visual[1]
            counts = {0.0: 1, 0.5: epochs - 2, 1.0: stage.epochs - epochs + 1}
            for ramp, count in (
                counts if mixed and epochs > 1 else {0.0: stage.epochs}
            ).items():
                if count and (keys := drawn(number, ramp)):
                    planned += count * ceil(batches(keys) / self.micro)
        return max(1, ceil(planned))

    def progress(self, position: Position, part: float = 0.0) -> float:
        """Share of the stage that is done, where `part` is the share of the current epoch."""
        if self.config.steps:
            steps = self.steps(position.stage)
            return position.taken / steps if steps else 1.0
        epochs = self.stages[position.stage].epochs
        return (position.epoch + part) / epochs if epochs else 1.0

    def learning_rate(self, position: Position, part: float) -> float:
        """A linear rise over `warmup` of the stage, then a linear fall to zero."""
        progress, warmup = self.progress(position, part), self.config.warmup
        rising = (progress + 1e-3) / (warmup + 1e-3)
        factor = rising if progress < warmup else (1 - progress) / (1 - warmup)
        return self.stages[position.stage].learning_rate * factor

    def ramp(self, position: Position) -> float:
        """How far the share of samples with images has moved in the current epoch, 0 to 1."""
        if steps := self.steps(position.stage):
            return min(1.0, position.begun / steps)
        return min(
            1.0, position.epoch / max(1, ceil(self.stages[position.stage].epochs) - 1)
        )

    def batches_left(self, position: Position, whole: float, read: float) -> int:
        """Batches that may still be read of an epoch of `whole` batches, of which `read` are done."""
        if steps := self.steps(position.stage):
            return (steps - position.taken) * self.micro
        share = min(1.0, self.stages[position.stage].epochs - position.epoch)
        return round(round(whole * share) - read)

    def is_last_epoch(self, position: Position, whole: float) -> bool:
        """Whether no epoch of any stage follows this one of `whole` batches."""
        if position.stage < len(self.stages) - 1:
            return False
        if steps := self.steps(position.stage):
            return steps - position.begun <= ceil(whole / self.micro)
        return position.epoch + 1 >= self.stages[position.stage].epochs
