"""Faults at a chosen call: every C function that may change a disk is a point to fail or die at."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

WRITES = frozenset({"write", "flush", "fsync", "open", "mkdir", "link", "rename"})
CALLS = WRITES | {
    "close",
    "utime",
    "unlink",
    "rmdir",
    "flock",
    "scandir",
    "listdir",
    "stat",
    "lstat",
    "preadv",
    "replace",
}


class Calls:
    """Counts the calls named so far and does something at one of them."""

    def __init__(
        self, names: frozenset[str], at: int | None, before: bool = True
    ) -> None:
        self.names = names
        self.at = at
        self.event = "c_call" if before else "c_return"
        self.count = 0

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        name = getattr(function, "__name__", "")
        if event != self.event or name not in self.names:
            return
        if (
            name == "open"
            and self.names is WRITES
            and frame.f_locals.get("mode", "r")[0] not in "wx"
        ):
            return  # reading needs no room
        self.count += 1
        if self.count == self.at:
            self.strike()

    def strike(self) -> None:
        """A full disk. Python takes the hook away when it raises: the fault strikes once."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Kill(Calls):
    """Death without a goodbye."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def struck(calls: Calls) -> Iterator[Calls]:
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)
