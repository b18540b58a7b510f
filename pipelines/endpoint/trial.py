"""Which version of a drafter drafts: a new one is on trial, and withdrawn if it accepts less."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import FOR_USER, one_line

FEWEST = 16  # requests of each version, before they are compared
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
    """The version in use, and the tokens for each call of the target of each version, by sample.

    `size` samples of a new version decide whether it stays; `fewest` of each version are compared.
    """

    name: str  # of the drafter whose versions these are
    current: str | None
    size: int = 64
    fewest: int = FEWEST
    swaps: int = 0
    rollbacks: int = 0
    refused: set[str] = field(default_factory=set)
    """Versions that cannot be used, or were withdrawn here."""
    _before: str | None = None
    """The last version that was not on trial, while the current one is."""
    _unrecorded: Withdrawal | None = None  # not yet in the workspace
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._samples: dict[str, deque[float]] = {}

    @property
    def running(self) -> bool:
        """Whether the version in use is on trial."""
        return self._before is not None

    def wanted(self, workspace: Workspace) -> str | None:
        """The version to switch to, None if that in use is the right one; DataError on a damaged record."""
        version = versions.current(workspace, self.name, again=True)
        is_settled = version == self.current or version in self.refused
        return None if is_settled else version

    def refuse(self, version: str, why: Exception) -> None:
        """Do not try a version again."""
        self.refused.add(version)
        reason = one_line(why)
        log.warning("the published drafter %s cannot be used: %s", version, reason)

    def begin(self, version: str) -> None:
        """Put a version in use; it is compared with the last one that was not on trial."""
        with self._lock:
            replaced, self.current = self.current, version
            passed = self._before or replaced
            self._before = None if version == passed else passed
            if self._before is not None:
                self._samples[version] = deque(maxlen=self.size)
            self.swaps += 1
        if replaced is not None:
            log.info("%s drafts from now on, in place of %s", version, replaced)

    def add(self, version: str, tokens_per_call: float) -> Withdrawal | None:
        """Count a sample; a withdrawal if the version is on trial and accepts less than the one before."""
        with self._lock:
            samples = self._samples.setdefault(version, deque(maxlen=self.size))
            samples.append(tokens_per_call)
            before = self._before
            if before is None or version != self.current:
                return None
            why = ""
            samples_before = self._samples.get(before, ())
            if min(len(samples), len(samples_before)) >= self.fewest:
                why = less(samples, samples_before)
            if not why:
                if len(samples) == self.size:
                    self._before = None  # it stays
                return None
            self.current, self._before = before, None
            self.refused.add(version)
            self.rollbacks += 1
            withdrawal = Withdrawal(version, before, why)
            self._unrecorded = withdrawal
        log.warning("%s is withdrawn, and %s drafts again: %s", version, before, why)
        return withdrawal

    def tell(self, workspace: Workspace) -> None:
        """Record a withdrawal in the workspace, where other servers and the next round read it.

        If that fails, as while another process writes there, the next call tries again.
        """
        withdrawal = self._unrecorded
        if withdrawal is None:
            return
        try:
            versions.record(
                workspace,
                self.name,
                withdrawal.before,
                base=withdrawal.version,
                published=True,
                why=withdrawal.why,
            )
        except FOR_USER as error:
            log.warning(
                "the workspace is not told that %s is withdrawn: %s",
                withdrawal.version,
                one_line(error),
            )
        else:
            self._unrecorded = None

    def means(self) -> dict[str, float]:
        """Of each version, the mean over its last samples."""
        with self._lock:
            return {
                version: fmean(samples)
                for version, samples in self._samples.items()
                if samples
            }


def less(new: Sequence[float], old: Sequence[float]) -> str:
    """Why the new version accepts less than the old one, beyond the spread of samples; empty if it does not.

    The two met different requests, so that their means are compared by Welch's standard error.
    """
    new_error, old_error = variance(new) / len(new), variance(old) / len(old)
    standard_error = (new_error + old_error) ** 0.5
    if fmean(old) - fmean(new) <= SURE * standard_error:
        return ""
    return (
        f"{fmean(new):.2f} tokens for each call over {len(new)} samples, and {fmean(old):.2f} over the "
        f"{len(old)} before"
    )
