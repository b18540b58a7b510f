"""A lock in an object store: one writer on all machines.

The lock is an object that its holder touches every minute. Whoever finds one waits for a sign of life, and is
refused if there is one. A lock that nobody touches for five minutes is taken over, as is at once that of a
process of this machine that has ended.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import DataError, VlmdistillError

TOUCHED = 60.0  # seconds between two signs of life
ABANDONED = 300.0  # seconds without one
POLL = 2.0  # seconds between two looks at the lock of another
log = logging.getLogger("vlmdistill.pipelines")


class Holder(msgspec.Struct, frozen=True):
    """The content of a lock."""

    host: str
    machine: str
    process: int
    token: str
    touched: int = 0  # times

    @property
    def ended(self) -> bool:
        """Whether it was a process of this machine, which has ended."""
        if not self.machine or self.machine != machine():
            return False
        try:
            os.kill(self.process, 0)
        except (OSError, OverflowError) as error:
            return not isinstance(error, PermissionError)
        return self.process == os.getpid()  # an earlier one of that number, as in a container


def machine() -> str:
    """This machine and this container, until they start again; hosts may share a name. Empty if unknown."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {booted} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


@contextmanager
def locked(there: Backend, name: str) -> Iterator[None]:
    """Hold the lock `name`; DataError if a process that is alive has it. OSError as the backend raises it."""
    mine = _acquire(there, name)
    ended = threading.Event()
    touching = threading.Thread(target=_touch, args=(there, name, mine, ended), daemon=True)
    touching.start()
    try:
        yield
    finally:
        ended.set()
        touching.join()
        with suppress(OSError, VlmdistillError):
            if _has(there, name, mine):
                there.remove(name)


def _acquire(there: Backend, name: str) -> Holder:
    mine = Holder(socket.gethostname(), machine(), os.getpid(), secrets.token_hex(8))
    first: Holder | None = None
    while not there.create(name, msgspec.json.encode(mine)):
        if (other := _holder(there, name)) is None:
            continue
        if other.ended or there.seconds_idle(name) > ABANDONED:
            there.replace(name, msgspec.json.encode(mine))
            time.sleep(POLL)  # of several that take it over, the last one has it
            if _has(there, name, mine):
                break
        elif first is None:
            first = other
            log.info("%s is locked by %s: waiting for a sign of life", there.url, other.host)
        elif other != first:
            raise DataError(
                f"another run, process {other.process} on {other.host}, is writing to {there.url}: wait "
                "until it ends, or stop it"
            )
        time.sleep(POLL)
    return mine


def _touch(there: Backend, name: str, mine: Holder, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(TOUCHED):
        with suppress(OSError, VlmdistillError):  # the next one may succeed
            if not _has(there, name, mine):
                log.warning("%s/%s was taken over by another machine: is a clock wrong?", there.url, name)
                return
            count += 1
            there.replace(name, msgspec.json.encode(msgspec.structs.replace(mine, touched=count)))


def _has(there: Backend, name: str, mine: Holder) -> bool:
    other = _holder(there, name)
    return other is not None and other.token == mine.token


def _holder(there: Backend, name: str) -> Holder | None:
    try:
        return msgspec.json.decode(there.read(name, 1 << 12), type=Holder)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return Holder("an unknown machine", "", 0, "")
