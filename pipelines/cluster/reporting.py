"""The reports of a stage: its progress while it runs, and an error when too many prompts failed."""

import time
from collections.abc import Mapping

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.progress import Progress

LISTED_CAUSES = 2  # in the error message


class StageTally:
    """Samples, tokens and failures of a stage so far. It reports them to `progress` as they come."""

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self.tokens = 0
        self.failed = dict[str, str]()  # key -> error
        self._progress = progress
        self._done = done
        self._total = total
        self._start = time.monotonic()

    def starting(self) -> None:
        """Report that workers are being started."""
        self._progress(self._done, self._total, "starting")

    def started(self) -> None:
        """Measure from here on: the time that workers need to start does not count."""
        self._start = time.monotonic()

    def add(self, samples: int, tokens: int, failed: Mapping[str, str]) -> None:
        """Count the result of a task: samples that are done, and those that failed."""
        self._done += samples + len(failed)
        self.tokens += tokens
        self.failed |= failed
        rate = self.tokens / self.seconds
        self._progress(self._done, self._total, f"{rate:.0f} tokens/s")

    @property
    def seconds(self) -> float:
        """The time since the workers were ready."""
        return time.monotonic() - self._start


def check_failed(failed: Mapping[str, str], total: int, allowed: float) -> None:
    """DataError with the first causes if more than a share `allowed` (0 to 1) of `total` prompts failed."""
    if len(failed) <= allowed * total:
        return
    causes = list(dict.fromkeys(failed.values()))
    listed = "; ".join(causes[:LISTED_CAUSES])
    unlisted = len(causes) - LISTED_CAUSES
    if unlisted > 0:
        listed += f"; and {unlisted} more causes"
    # In thousandths, rounded up: --allow-failed with this share permits what failed.
    thousandths = -(-1000 * len(failed) // total)
    share = min(1.0, thousandths / 1000)
    raise DataError(
        f"{len(failed)} of {total} prompts failed: {listed}. All others are "
        f"done. Run the same command to retry, or add --allow-failed {share:g} to continue without them"
    )
