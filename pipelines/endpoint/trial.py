"""Which version of a drafter drafts: a new one is on trial, and withdrawn if it accepts less."""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, variance

from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import FOR_USER, one_line

FEWEST = 16  # samples of each version, before they are compared
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
    refused: set[str] = field(
        default_factory=set
    )  # versions that cannot be used, or were withdrawn here
    _before: str | None = (
        None  # the last that was not on trial, while the current one is
    )
    _untold: Withdrawal | None = None  # what the workspace does not know yet
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._gained: dict[str, deque[float]] = {}

    @property
    def running(self) -> bool:
        """Whether the version in use is on trial."""
        return self._before is not None

    def wanted(self, workspace: Workspace) -> str | None:
        """The version to switch to, None if that in use is the right one; DataError on a damaged record."""
        found = versions.current(workspace, self.name, again=True)
        return None if found == self.current or found in self.refused else found

    def refuse(self, version: str, why: Exception) -> None:
        """Do not try a version again."""
        self.refused.add(version)
        log.warning(
            "the published drafter %s cannot be used: %s", version, one_line(why)
        )

    def begin(self, version: str) -> None:
        """A version drafts from now on, and the last that was not on trial is what it is compared with."""
        with self._lock:
            before, self.current = self.current, version
            passed = self._before or before
            self._before = None if version == passed else passed
            if self._before is not None:
                self._gained[version] = deque(maxlen=self.size)
            self.swaps += 1
        if before is not None:
            log.info("%s drafts from now on, in place of %s", version, before)

    def add(self, version: str, tokens_per_call: float) -> Withdrawal | None:
        """Count a sample; a withdrawal if the version is on trial and accepts less than it is allowed to."""
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
            self._untold = gone = Withdrawal(version, before, why)
        log.warning("%s is withdrawn, and %s drafts again: %s", version, before, why)
        return gone

    def tell(self, workspace: Workspace) -> None:
        """Tell the workspace of a withdrawal, which other servers and the next round read.

        If that fails, as while another process writes there, the next call tries again.
        """
        if (gone := self._untold) is None:
            return
        try:
            versions.record(
                workspace,
                self.name,
                gone.before,
                base=gone.version,
                published=True,
                why=gone.why,
            )
        except FOR_USER as error:
            log.warning(
                "the workspace is not told that %s is withdrawn: %s",
                gone.version,
                one_line(error),
            )
        else:
            self._untold = None

    def means(self) -> dict[str, float]:
        """Of each version, the mean over its last samples."""
        with self._lock:
            return {
                name: fmean(gained) for name, gained in self._gained.items() if gained
            }


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
