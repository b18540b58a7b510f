"""The file system of a store: exclusive creation of whole files, listings, reads of ranges."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import blake3

from vlmdistill.stores.errors import StoreError, naming
from vlmdistill.stores.schema import Array

BLOCK = 1 << 24
REQUESTS = 64  # in flight to a remote backend, where each is small
STREAMS = 16  # in flight, where each moves up to BLOCK bytes
T = TypeVar("T")
U = TypeVar("U")
STAGING = "staging"  # unfinished local work; readers never look here


class Backend(ABC):
    """Named files under one root. Names use '/' and are relative to the root."""

    url: str
    is_local: bool
    _ahead: float | None = None
    """The clock that stamps files, minus the monotonic one of this process."""
    exclusive = True
    """Whether of several writers that create a file at once, only one is told that it did."""

    @abstractmethod
    def within(self, folder: str) -> "Backend":
        """The backend of a folder below this root."""

    @abstractmethod
    def read(self, name: str, most: int | None = None) -> bytes:
        """The whole file, or its first `most` bytes; FileNotFoundError when it is missing."""

    @abstractmethod
    def read_range(self, name: str, start: int, length: int) -> Array:
        """Bytes [start, start + length) of a file as uint8: mapped when local and large."""

    def blocks(self, name: str, start: int, end: int) -> Iterator[memoryview]:
        """Bytes [start, end) of a file, one block after the other."""
        for at in range(start, end, BLOCK):
            check_wanted()
            yield self.read_range(name, at, min(BLOCK, end - at)).data

    def digest(self, name: str, size: int) -> str:
        """The blake3 of the first `size` bytes of a file, as 64 hex digits."""
        state = blake3.blake3()
        for block in self.blocks(name, 0, size):
            state.update(block)
        return state.hexdigest()

    def copy(self, name: str, size: int, path: Path) -> None:
        """Write the first `size` bytes of a file into a local file."""
        with path.open("wb") as out:
            for block in self.blocks(name, 0, size):
                with naming(path):
                    out.write(block)

    @abstractmethod
    def readinto(
        self, name: str, start: int, out: Array, on_part: Callable[[memoryview], None]
    ) -> None:
        """Read bytes from `start` on into all of `out` (uint8), calling `on_part` with each part read."""

    def prefetch(self, name: str, start: int, length: int) -> None:
        """Start reading a range that will be needed soon."""
        del name, start, length

    def forget(self, name: str, start: int, length: int) -> bool:
        """Drop a range from a cache, so that it is read again; whether there was one of it."""
        del name, start, length
        return False

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create the file, whole and durable, unless it exists; whether this call created it."""

    @abstractmethod
    def replace(self, name: str, data: bytes | Path) -> None:
        """Create or replace the file, whole and durable: the last writer wins.

        `data` may be a file of a `workspace`, which is not written to any more.
        """

    @abstractmethod
    def publish(self, folder: Path, name: str) -> None:
        """Make a finished, durable local folder visible as `name`, which is made from its content.

        Files that are already there are compared and kept if equal. In any case `seconds_idle` restarts.
        """

    @abstractmethod
    def list_files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes. Empty when it is missing."""

    @abstractmethod
    def list_names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder. Empty when it is missing."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing."""

    def map(
        self, function: Callable[[T], U], items: Iterable[T], most: int = REQUESTS
    ) -> Iterator[U]:
        """Apply a function to each item: up to `most` calls at once where each is a request.

        Results come in order, and no call begins long before its result is wanted, or after an error.
        """
        if self.is_local:
            return map(function, items)
        return in_flight(function, items, most)

    def links(self, folder: str = "") -> list[str]:
        """The symbolic links below a folder, or the folder if it is one: names relative to the root."""
        return []

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with its content; nothing happens when it is missing."""

    @abstractmethod
    def seconds_idle(self, name: str) -> float:
        """Seconds since the last write to a file or to anything below a folder; 0 when it is missing.

        By the clock that stamps the files, see `now`.
        """

    def now(self) -> float:
        """The time by the clock that stamps files here, which may be a server's; seconds since 1970.

        That of this machine where nothing can be written, or nothing is stamped.
        """
        if self._ahead is None:
            stamped = 0.0
            with suppress(OSError, StoreError):
                stamped = self._stamp()
            self._ahead = (stamped or time.time()) - time.monotonic()
        return self._ahead + time.monotonic()

    @abstractmethod
    def _stamp(self) -> float:
        """Write something, remove it, and say when it was written; 0 if that is not known."""

    @contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """Lock a file or folder against its writer; false when a live process has it. Remote: always true."""
        yield True

    @abstractmethod
    def workspace(self, name: str | None = None) -> Path:
        """A locked local folder to build a shard in; for a local store on the same file system.

        A `name` finds the folder of an interrupted process again.
        """

    @abstractmethod
    def release(self, folder: Path, keep: bool = False) -> None:
        """Give a `workspace` back and remove it, unless its files are to be found again."""


_call = threading.local()


def in_flight(function: Callable[[T], U], items: Iterable[T], most: int) -> Iterator[U]:
    """The results of a function in the order of the items, with up to `most` calls at once.

    Interrupted, it waits for no call that asks `check_wanted` now and then.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(most, initializer=setattr, initargs=(_call, "stop", stop))
    waiting = deque[Future[U]]()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def check_wanted() -> None:
    """InterruptedError in a call of `in_flight` whose result is no longer waited for."""
    stop = getattr(_call, "stop", None)
    if stop and stop.is_set():
        raise InterruptedError("interrupted")


def truncated(where: str) -> StoreError:
    """The error for a file that is shorter than its record says."""
    return StoreError(
        f"{where} is damaged: it is shorter than its record says. `vlmdistill store verify` lists all damage"
    )


@contextmanager
def writing(backend: "Backend") -> Iterator[None]:
    """Turn a failed write, as on a full disk, into a StoreError that names the store."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write to {backend.url}: {error.strerror or error}. No partial data was committed: "
            "fix the cause and run again"
        ) from error
