"""Train on a store that is still captured.

The capture says in the store how many samples there will be, and when it has ended. Until then, the share of
the samples that are there bounds the share of the first half of the steps that a run takes: with half of the
samples, a quarter of all steps. So no sample is read much more often than others, and at least half of the
run reads the whole store.
"""

import logging
import time
from dataclasses import dataclass

from vlmdistill.drafters.training import ranks
from vlmdistill.stores.errors import StoreError, TrainingError, one_line
from vlmdistill.stores.store import Store

LEAD = 0.5  # share of the steps that may be taken before the capture has ended
POLL = 1.0  # seconds between looks at the store
PATIENT = 5.0  # seconds of waiting after which it is said
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Growth:
    """How far a capture is."""

    units: tuple[str, ...] = ()
    samples: int = 0
    expected: int = 0
    ended: bool = False

    @classmethod
    def of(cls, store: Store | None) -> "Growth":
        """What a store holds by now; nothing yet if no capture has begun.

        A store without the record of a capture is older, copied or merged: its units are all there will be.
        """
        if store is None:
            return cls()
        capture, units = store.capture, store.units()
        records = store.backend.map(store.commit, units)
        samples = sum(record.rows["sample"] for record in records)
        if capture is None:
            return cls(tuple(units), samples, samples, bool(units))
        return cls(tuple(units), samples, capture.samples, capture.ended)

    def steps(self, whole: int) -> int:
        """The steps that a run of `whole` steps may have done."""
        return whole if self.ended else int(LEAD * whole * min(1.0, self.samples / max(1, self.expected)))


class Capture:
    """Looks at a growing store for all ranks, as one of them sees it."""

    def __init__(self, path: str, wait: float) -> None:
        self.path, self.wait = path, wait
        self._store: Store | None = None
        self._last = Growth()
        self._since = time.monotonic()
        self._said = False

    def begin(self) -> None:
        """Start to wait."""
        self._since, self._said = time.monotonic(), False

    def look(self) -> tuple[Growth, str]:
        """How far the capture is, and why waiting for more makes no sense; all ranks call it."""
        return ranks.first(self._look)

    def _look(self) -> tuple[Growth, str]:
        trouble = ""
        try:
            self._store = self._store or Store.find(self.path)
            now = Growth.of(self._store)
        except OSError as error:  # the next look may succeed
            now, trouble = self._last, f"; the last look failed: {one_line(error)}"
        except StoreError as error:
            return self._last, str(error)
        if now != self._last:
            self._last = now
            self._since = time.monotonic()
        waited = time.monotonic() - self._since
        state = f"{now.samples} of {now.expected} samples are captured" if now.expected else "none has begun"
        state += trouble
        if waited > PATIENT and not self._said:
            self._said = True
            log.warning("waiting for the capture into %s: %s", self.path, state)
        if waited <= self.wait:
            return now, ""
        return now, (
            f"the capture into {self.path} has written nothing for {self.wait:g} seconds ({state}): run "
            "`vlmdistill features` again, and this command, which goes on; --wait gives it more time"
        )

    def first(self) -> None:
        """Wait until there is something to read; TrainingError after `wait` seconds without."""
        while not (found := self.look())[0].units:
            if found[0].ended:
                raise TrainingError(
                    f"the capture into {self.path} has ended without a sample: run `vlmdistill features`"
                )
            if found[1]:
                raise TrainingError(found[1])
            time.sleep(POLL)
