"""Stop a run on SIGINT (Ctrl-C) or SIGTERM (Slurm, docker, torchrun)."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from vlmdistill.stores.errors import StoppedError

ASKING = (signal.SIGINT, signal.SIGTERM)
# seconds in which a SIGTERM comes again: from Slurm to all processes, and from torchrun to its own
ECHO = 10.0


def asked(flags: Sequence[float]) -> int | None:
    """The signal of some flags, if any."""
    return next(
        (
            number
            for number, some in reversed([*zip(ASKING, flags, strict=True)])
            if some
        ),
        None,
    )


class Signals:
    """In this context a signal ends the run with StoppedError, whose message `where` returns.

    It ends at once, unless `patient` is set: then the first signal only sets `received`, which the trainer
    checks between two steps, and a second one ends the run, unless it is the echo of a SIGTERM.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.patient = False
        self.where: Callable[[], str] = lambda: (
            "no step was taken yet; the same command goes on from here"
        )
        self._before: dict[int, Any] = {}
        self._first = 0.0  # when the first signal came

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._receive) for number in ASKING
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is KeyboardInterrupt and self.received is not None:
            raise StoppedError(self.where(), self.received) from None

    @property
    def flags(self) -> list[float]:
        """The signal that was received, one-hot: the sum over ranks says what any has received."""
        return [float(self.received == number) for number in ASKING]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self._first = now
        echo = number == self.received == signal.SIGTERM and now - self._first < ECHO
        wait = self.patient and (self.received is None or echo)
        self.received = number
        if not wait:
            raise KeyboardInterrupt  # no library handles it as an error
