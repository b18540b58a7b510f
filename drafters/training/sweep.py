"""A learning rate range test: the rate rises from step to step until the loss does not fall any more."""

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.9  # share of the mean so far in the smoothed loss
DIVERGED = 4.0  # times the lowest smoothed loss: the test ends
BELOW = 10.0  # the suggestion is the rate of the lowest smoothed loss, divided by this


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rates to try: `steps` of them, evenly spaced in their logarithm."""

    low: float = 1e-6
    high: float = 1.0
    steps: int = 200

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        return float(self.low * (self.high / self.low) ** (step / max(1, self.steps - 1)))


@dataclass(frozen=True)
class RangeTest:
    """Learning rates as tried, with the loss at each."""

    stage: str
    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def smoothed(self) -> list[float]:
        """Means of the losses so far, the later the heavier, without the bias of a start at zero."""
        mean, values = 0.0, []
        for step, loss in enumerate(self.losses, 1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            values.append(mean / (1 - SMOOTHING**step))
        return values

    @property
    def diverged(self) -> bool:
        """Whether there is nothing to learn from higher rates."""
        smoothed = self.smoothed
        return not smoothed[-1] <= DIVERGED * min(smoothed)  # also when it is not a number

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss was lowest."""
        smoothed = self.smoothed
        return self.rates[smoothed.index(min(smoothed))]

    @property
    def suggestion(self) -> float:
        """A tenth of that: there the loss still falls fast, and far from where it rises."""
        return self.lowest / BELOW
