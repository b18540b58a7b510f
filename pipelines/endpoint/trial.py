"""Which version of a drafter drafts: a new one is on trial, and withdrawn if it accepts less."""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, variance

from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import FOR_USER, one_line

FEWEST = 8  # samples of each version, before they are compared
SURE = 3.0  # standard errors
log = logging.getLogger("vlmdistill.pipelines")


@dataclass(frozen=True)
class Withdrawal:
    """A version that accepts less, the one before it, and why."""

    version: str
    before: str
    why: str


@dataclass
class Trials:
    """The version in use, and what each has gained: tokens for each call of the target, by sample.

    `size` samples of a new version decide whether it stays.
    """

    name: str  # of the drafter whose versions these are
    current: str | None
    size: int = 64
    swaps: int = 0
    rollbacks: int = 0
    refused: set[str] = field(default_factory=set)  # versions that cannot be used, or were withdrawn here
    _before: str | None = None  # while the current one is on trial
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._gained: dict[str, deque[float]] = {}

    def wanted(self, workspace: Workspace) -> str | None:
        """The version to switch to, None if that in use is the right one; DataError on a damaged record."""
        found = versions.current(workspace, self.name, again=True)
        return None if found == self.current or found in self.refused else found

    def refuse(self, version: str, why: Exception) -> None:
        """Do not try a version again."""
        self.refused.add(version)
        log.warning("the published drafter %s cannot be used: %s", version, one_line(why))

    def begin(self, version: str) -> None:
        """A version drafts from now on, and the one before is what it is compared with."""
        with self._lock:
            self._before, self.current = self.current, version
            self._gained[version] = deque(maxlen=self.size)
            self.swaps += 1
        if self._before is not None:
            log.info("%s drafts from now on, in place of %s", version, self._before)

    def add(self, version: str, tokens_per_call: float) -> Withdrawal | None:
        """Count a sample; a withdrawal if the version is on trial and accepts less than the one before."""
        with self._lock:
            gained = self._gained.setdefault(version, deque(maxlen=self.size))
            gained.append(tokens_per_call)
            before = self._before
            if before is None or version != self.current:
                return None
            why = less(gained, self._gained.get(before, deque()))
            if not why and len(gained) == self.size:
                self._before = None  # it stays
            if not why:
                return None
            self.current, self._before = before, None
            self.refused.add(version)
            self.rollbacks += 1
        log.warning("%s is withdrawn, and %s drafts again: %s", version, before, why)
        return Withdrawal(version, before, why)

    def record(self, workspace: Workspace, gone: Withdrawal) -> None:
        """Tell the workspace, which other servers and the next round read."""
        try:
            versions.record(
                workspace, self.name, gone.before, base=gone.version, published=True, why=gone.why
            )
        except FOR_USER as error:
            log.warning("the workspace is not told that %s is withdrawn: %s", gone.version, one_line(error))

    def means(self) -> dict[str, float]:
        """Of each version, the mean over its last samples."""
        with self._lock:
            return {name: fmean(gained) for name, gained in self._gained.items() if gained}


def less(new: "deque[float]", old: "deque[float]") -> str:
    """Why the new version accepts less than the old one, beyond what samples differ by; empty if it may not.

    The two met different requests, so that their means are compared by Welch's standard error.
    """
    if min(len(new), len(old)) < FEWEST:
        return ""
    error = (variance(new) / len(new) + variance(old) / len(old)) ** 0.5
    if fmean(old) - fmean(new) <= SURE * error:
        return ""
    return (
        f"{fmean(new):.2f} tokens for each call over {len(new)} samples, and {fmean(old):.2f} over the "
        f"{len(old)} before"
    )
