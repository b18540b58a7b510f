"""The decoder that requests get: a new version of its drafter takes over between two requests.

A request keeps the decoder that it came with, so a switch changes no output: all versions verify with the
same target. A version that accepts less than the one before, on the first requests after the switch, is
withdrawn.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, variance

from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder, ServedResponse
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import VlmdistillError, one_line

FEWEST = 8  # requests of each version, before they are compared
SURE = 3.0  # standard errors
log = logging.getLogger("vlmdistill.pipelines")


@dataclass
class Switch:
    """Hands out the decoder in use. `trial` requests decide whether a new version stays."""

    current: ServedDecoder
    workspace: Workspace | None = None  # None: nothing is ever switched
    name: str = ""  # of the drafter whose versions are followed
    trial: int = 64
    swaps: int = 0
    rollbacks: int = 0
    refused: set[str] = field(default_factory=set)  # versions that cannot be used, or were withdrawn here
    _before: ServedDecoder | None = None  # while the current one is on trial
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._gained: dict[str, deque[float]] = {}  # tokens for each call, of the last requests

    def look(self) -> None:
        """Switch to the version that is in use by now."""
        if self.workspace is None:
            return
        wanted = versions.current(self.workspace, self.name, again=True)
        if wanted == self.current.drafter_name or wanted in self.refused:
            return
        try:
            proposer = self.current.target.drafter(self.workspace.drafter(wanted))
        except VlmdistillError as error:
            self.refused.add(wanted)
            log.warning("the published drafter %s cannot be used: %s", wanted, one_line(error))
            return
        with self._lock:
            before = self.current
            self.current = replace(before, drafter=proposer, drafter_name=wanted)
            self._gained[wanted] = deque(maxlen=self.trial)
            self._before = before
            self.swaps += 1
        log.info("requests are drafted by %s from now on, in place of %s", wanted, before.drafter_name)

    def ended(self, response: ServedResponse) -> None:
        """Count a response; withdraw the current version if it accepts less than the one before."""
        name, counts = response.drafter_name, response.decoding
        if name is None or not counts.calls:
            return
        with self._lock:
            gained = self._gained.setdefault(name, deque(maxlen=self.trial))
            gained.append((counts.tokens - 1) / counts.calls)
            before = self._before
            if before is None or name != self.current.drafter_name:
                return
            earlier = self._gained.get(before.drafter_name or "", deque())
            why = less(gained, earlier)
            if not why and len(gained) == self.trial:
                self._before = None  # it stays
            if not why:
                return
            self.current, self._before = before, None
            self.refused.add(name)
            self.rollbacks += 1
        log.warning("%s is withdrawn, and %s drafts again: %s", name, before.drafter_name, why)
        if self.workspace and before.drafter_name:
            threading.Thread(target=self._withdraw, args=(name, before.drafter_name, why)).start()

    def _withdraw(self, name: str, before: str, why: str) -> None:
        """Tell the workspace, which other servers and the next round read."""
        assert self.workspace is not None
        try:
            versions.withdraw(self.workspace, self.name, name, before, why)
        except (VlmdistillError, OSError) as error:
            log.warning("the workspace is not told that %s is withdrawn: %s", name, one_line(error))

    def tokens_per_call(self) -> dict[str, float]:
        """Of each version, the mean over its last requests."""
        with self._lock:
            return {name: fmean(gained) for name, gained in self._gained.items() if gained}

    @contextmanager
    def following(self, seconds: float) -> Iterator[None]:
        """Look for new versions every so many seconds; 0: never."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(seconds):
                try:
                    self.look()
                except (VlmdistillError, OSError) as error:  # the next look may succeed
                    log.warning("versions of %s cannot be read: %s", self.name, one_line(error))

        thread = threading.Thread(target=follow, daemon=True)
        if seconds:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if seconds:
                thread.join()


def less(new: "deque[float]", old: "deque[float]") -> str:
    """Why the new version accepts less than the old one, beyond what requests differ by; empty if it may not.

    The two met different requests, so that their means are compared by Welch's standard error.
    """
    if min(len(new), len(old)) < FEWEST:
        return ""
    error = (variance(new) / len(new) + variance(old) / len(old)) ** 0.5
    if fmean(old) - fmean(new) <= SURE * error:
        return ""
    return (
        f"{fmean(new):.2f} tokens for each call over {len(new)} requests, and {fmean(old):.2f} over the "
        f"{len(old)} before"
    )
