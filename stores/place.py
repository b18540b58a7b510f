"""Places: a folder of named files, on a local disk or behind any fsspec URL.

A store needs little of a file system: whole-file exclusive creation, listing, and reading byte
ranges. No locks, no appends, no renames of what is already visible.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.schema import Array

STAGING = "staging"  # unfinished local work; nothing in it counts


class Place(ABC):
    """Named files under one root. Names use '/' and are relative to the root."""

    url: str
    here: bool  # local: what was written is where it was compared

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError when there is none."""

    @abstractmethod
    def extent(self, name: str, start: int, length: int) -> Array:
        """Bytes [start, start + length) of a file as uint8: mapped when local and large."""

    @abstractmethod
    def fill(self, name: str, start: int, out: Array, seen: Callable[[memoryview], None]) -> None:
        """Read bytes from `start` on into all of `out` (uint8), telling `seen` each part that has come."""

    def announce(self, name: str, start: int, length: int) -> None:
        """Say that an extent will be read soon."""
        del name, start, length

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Make the file, whole and durable, unless it exists; whether this call made it."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Make or replace the file, whole and durable: the last writer wins."""

    @abstractmethod
    def publish(self, folder: Path, name: str) -> None:
        """Make a finished, durable local folder visible as `name`.

        Files that are there already stay, once they were found equal; others are written anew.
        """

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes. Empty when missing."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder. Empty when missing."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file or a folder with all it holds; quiet when missing."""

    @abstractmethod
    def idle(self, folder: str, dry_run: bool = False) -> float:
        """Seconds since anything below a folder was written, by its `clock`."""

    def clock(self, dry_run: bool) -> float | None:
        """The place's own clock; None when a collector took our probe for a dead writer's.

        A dry run may look where nothing can be written: there it takes the clock of this machine.
        """
        try:
            return self._probe()
        except OSError:
            if not dry_run:
                raise
            return time.time()

    @abstractmethod
    def _probe(self) -> float | None:
        """When something that is written now was written; None when it is gone already."""

    def leftovers(self, grace: float, dry_run: bool) -> Iterator[tuple[str, int]]:
        """Remove what is no file and yet takes room, idle for `grace` seconds: what it was, and its bytes."""
        del grace, dry_run
        yield from ()

    @abstractmethod
    def workspace(self, name: str | None = None) -> Path:
        """A local folder to build a shard in; for a local place on the same file system.

        Of a `name`, what an interrupted process left of it is found again.
        """

    @abstractmethod
    def release(self, folder: Path, keep: bool = False) -> None:
        """Give a `workspace` back, whatever became of it; its files stay only to be found again."""

    @contextmanager
    def seized(self, name: str) -> Iterator[bool | None]:
        """Hold something against its writer; false when a living process has it, None where none can tell."""
        del name
        yield None

    @contextmanager
    @abstractmethod
    def held(self, name: str) -> Iterator[None]:
        """An empty file that stands while its maker is at work; it stays behind when that dies or fails."""
        yield


def cut(where: str) -> StoreError:
    """The error of whoever finds a file shorter than it must be."""
    what = f"{where} is damaged: it is shorter than its record says"
    return StoreError(f"{what}. `vlmdistill store verify` lists all damage")


@contextmanager
def writing(place: "Place") -> Iterator[None]:
    """Turn a full disk and its like into an error that names the place."""
    try:
        yield
    except OSError as error:
        what = f"cannot write to {place.url}: {error.strerror or error}"
        raise StoreError(f"{what}. Nothing half-written counts: mend that and run again") from error


def place_of(path: str | Path) -> Place:
    """The place at a path or URL; StoreError where nothing speaks to a URL. `file://`, `local://`: here."""
    text = os.path.expanduser(path)
    if not text:
        raise StoreError("the name of a store is empty: give a folder or a URL")
    if "://" in text and not text.startswith(("file://", "local://")):
        from vlmdistill.stores.remote import Remote

        return Remote(text)
    from vlmdistill.stores.local import Local

    if "://" in text:
        url = urlsplit(text)
        if url.netloc not in ("", "localhost", "~"):
            raise StoreError(f"{text} names another machine, '{url.netloc}': write file:///absolute/path")
        text = os.path.expanduser(url.netloc.removeprefix("localhost") + url2pathname(url.path))
    return Local(Path(text))
