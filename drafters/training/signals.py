"""Stop a run on SIGINT (Ctrl-C) or SIGTERM (Slurm, docker, torchrun)."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import TypeAlias

from vlmdistill.stores.errors import StoppedError

ASKING = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a process to end."""
ECHO = 10.0
"""Seconds in which a SIGTERM comes again: Slurm sends one to all processes, torchrun to its children."""

Handler: TypeAlias = Callable[[int, FrameType | None], object]


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Give `handler` the signals that ask to end; without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in ASKING}
    try:
        yield
    finally:
        for number, earlier_handler in before.items():
            signal.signal(number, earlier_handler)


def asked(flags: Sequence[float]) -> int | None:
    """The signal in the sum of all ranks' `Signals.flags`, None if there is none; SIGTERM before SIGINT."""
    for number, count in reversed([*zip(ASKING, flags, strict=True)]):
        if count:
            return number
    return None


class Signals:
    """In this context a signal ends the run with StoppedError, whose message `where` returns.

    It ends at once, unless `patient` is set: then the first signal only sets `received`, which the trainer
    checks after each step, and a second one ends the run, unless it is the echo of a SIGTERM.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.patient = False
        self.where: Callable[[], str] = lambda: (
            "no step was taken yet; the same command goes on from here"
        )
        self._context = ExitStack()
        self._first_at = 0.0  # when the first signal came

    def wait_for_step(self, where: Callable[[], str]) -> None:
        """From now on the first signal waits until a step is done; `where` says what is done and saved."""
        self.where = where
        self.patient = True

    def __enter__(self) -> "Signals":
        self._context.enter_context(handling(self._receive))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.close()
        if kind is KeyboardInterrupt and self.received is not None:
            raise StoppedError(self.where(), self.received) from None

    @property
    def flags(self) -> list[float]:
        """The signal that was received, one-hot: the sum over ranks says what any rank has received."""
        return [float(self.received == number) for number in ASKING]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = self.received is None
        if is_first:
            self._first_at = now
        is_echo = (
            number == self.received == signal.SIGTERM and now - self._first_at < ECHO
        )
        self.received = number
        if not (self.patient and (is_first or is_echo)):
            raise KeyboardInterrupt  # no library handles it as an error
