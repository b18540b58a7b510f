"""A lock at a store: it avoids double work; safety does not depend on it.

    <name>.<generation>.json   the holder; created, never replaced
    <name>.<generation>.alive  replaced by the holder every minute

Whoever finds a lock waits for a sign of life, and is refused if there is one. A lock that shows none for five
minutes, measured by the process that waits, is taken over by creating the next generation; at once, if its
holder was a process of this machine that has ended.
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
from vlmdistill.stores.errors import FOR_USER, DataError

TOUCHED = 60.0  # seconds between two signs of life
ABANDONED = 300.0  # seconds without one
POLL = 2.0  # seconds between two looks at the lock of another
log = logging.getLogger("vlmdistill.stores")


class Holder(msgspec.Struct, frozen=True):
    """The content of a lock."""

    host: str
    machine: str
    process: int
    token: str

    @property
    def ended(self) -> bool:
        """Whether it was a process of this machine, which has ended."""
        if not self.machine or self.machine != machine():
            return False
        try:
            os.kill(self.process, 0)
        except (OSError, OverflowError) as error:
            return not isinstance(error, PermissionError)
        # A process with this number was an earlier one, as in a container.
        return self.process == os.getpid()


def machine() -> str:
    """This machine and this container, until they start again; hosts may share a name. Empty if unknown."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {booted} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Lease:
    """A lock that this process holds."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._own = Holder(
            socket.gethostname(), machine(), os.getpid(), secrets.token_hex(8)
        )
        self._generation = 0
        self._ended = threading.Event()
        self._touching = threading.Thread(
            target=self._touch, name="vlmdistill-lease", daemon=True
        )

    def acquire(self, wait: bool = False) -> None:
        """DataError if a process that is alive has the lock, unless `wait`: then when that has released it.

        OSError as the backend raises it.
        """
        seen = None  # of the lock of another: its generation and last sign of life
        since = 0.0
        while not self._take(generation := self._latest()):
            other, now = self._holder(generation), time.monotonic()
            if other is None:  # released
                continue
            sign = generation, self._alive(generation)
            if seen is None:
                log.info(
                    "%s is locked by %s: waiting for a sign of life",
                    self._backend.url,
                    other.host,
                )
            elif sign != seen and not wait:
                raise DataError(
                    f"another run, process {other.process} on {other.host}, is writing to "
                    f"{self._backend.url}: wait until it ends, or stop it"
                )
            since = since if sign == seen else now
            seen = sign
            time.sleep(POLL)
            if now - since > ABANDONED and self._create(generation + 1):
                break
        self._touching.start()

    def _take(self, generation: int) -> bool:
        """Take a lock that is free, or whose holder was a process of this machine that has ended."""
        other = self._holder(generation) if generation else None
        free = generation == 0 or (other is not None and other.ended)
        return free and self._create(generation + 1)

    def _create(self, generation: int) -> bool:
        self._generation = generation
        data = msgspec.json.encode(self._own)
        if self._backend.create(self._file(generation), data):
            return True
        return self._holder(generation) == self._own

    def release(self) -> None:
        """Remove the lock, and those that it has taken over."""
        self._ended.set()
        if self._touching.ident:
            self._touching.join()
        with suppress(*FOR_USER):
            for generation in range(self._latest(), 0, -1):
                if generation > self._generation:
                    return
                for end in ("alive", "json"):
                    self._backend.remove(f"{self._name}.{generation}.{end}")

    def _touch(self) -> None:
        count = 0
        while not self._ended.wait(TOUCHED):
            with suppress(*FOR_USER):  # the next one may succeed
                count += 1
                file = self._file(self._generation, "alive")
                self._backend.replace(file, str(count).encode())

    def _latest(self) -> int:
        folder, _, leaf = self._name.rpartition("/")
        generations = []
        for name in self._backend.list_names(folder):
            number, _, end = name.removeprefix(f"{leaf}.").partition(".")
            if number.isdecimal() and end == "json":
                generations.append(int(number))
        return max(generations, default=0)

    def _alive(self, generation: int) -> bytes:
        with suppress(FileNotFoundError):
            return self._backend.read(self._file(generation, "alive"), 32)
        return b""

    def _holder(self, generation: int) -> Holder | None:
        try:
            data = self._backend.read(self._file(generation), 1 << 12)
            return msgspec.json.decode(data, type=Holder)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            return Holder("an unknown machine", "", 0, "")

    def _file(self, generation: int, end: str = "json") -> str:
        return f"{self._name}.{generation}.{end}"


@contextmanager
def leased(backend: Backend, name: str, wait: bool = False) -> Iterator[None]:
    """Hold the lock `name` at a store; DataError if a process that is alive has it, unless `wait`."""
    lease = Lease(backend, name)
    lease.acquire(wait)
    try:
        yield
    finally:
        lease.release()
