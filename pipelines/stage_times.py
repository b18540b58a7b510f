"""How long each stage of a run took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from vlmdistill.pipelines.flow import ProgressBar
from vlmdistill.stores.progress import Progress

STAGES: Final = {
    "rows": "prompts",
    "responses": "responses",
    "samples": "features",
    "steps": "training",
    "prompts": "evaluation",
}
"""The stage by what its progress bar counts."""


class StageTimes:
    """The seconds of each stage, from the end of the stage before it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._ends: list[tuple[str, float]] = []

    def end(self, stage: str) -> None:
        """A stage has ended, or a part of it."""
        self._ends.append((stage, self._now()))

    def timed(self, bar: ProgressBar) -> ProgressBar:
        """A progress bar whose ends are those of the stages."""

        @contextmanager
        def timed_bar(action: str, unit: str, kept_in: str = "") -> Iterator[Progress]:
            with bar(action, unit, kept_in) as report:
                yield report
            self.end(STAGES[unit])

        return timed_bar

    def minutes(self) -> dict[str, float]:
        """Minutes to one decimal by stage, and at last their sum: the total.

        The ends are rounded, not the differences: so the sum is that of the shown numbers.
        """
        tenths = dict[str, int]()
        total = 0
        for stage, end in self._ends:
            passed = round((end - self._began) / 6)
            tenths[stage] = tenths.get(stage, 0) + passed - total
            total = passed
        tenths["total"] = total
        return {stage: count / 10 for stage, count in tenths.items()}
