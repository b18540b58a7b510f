"""Open files of a local store: byte ranges are mapped, copied, or read ahead of time."""

import functools
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vlmdistill.stores.backends.backend import truncated
from vlmdistill.stores.input_files import open_regular
from vlmdistill.stores.schema import Array

OPEN_FILES = 128
MAPPED_BYTES = 1 << 16  # below this a read is cheaper than a memory map
# Reads and checks are in parts of this size: two fit into a core's own cache.
CACHED_BYTES = 1 << 18
SEEK_BYTES = 1 << 18  # a disk reads as many in the time of one seek


class OpenFile:
    """A file that stays open for reading while it is used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = open_regular(path)
        weakref.finalize(self, os.close, self._number)

    def read_range(self, start: int, length: int) -> Array:
        """Map just this range: its memory is free once the caller drops the array."""
        if length < MAPPED_BYTES:
            data = np.empty(length, np.uint8)
            self.readinto(start, data, lambda _: None)
            return data
        # Touching a map past the end of the file kills the process.
        if os.fstat(self._number).st_size < start + length:
            raise truncated(str(self._path))
        skip = start % mmap.ALLOCATIONGRANULARITY
        # Private and writable: torch takes it without a copy, and writes never reach the file.
        mapped = mmap.mmap(
            self._number,
            skip + length,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=start - skip,
        )
        return np.frombuffer(mapped, np.uint8, length, skip)

    def readinto(
        self, start: int, out: Array, on_part: Callable[[memoryview], None]
    ) -> None:
        """Read in parts that are still in the processor's cache when `on_part` is called with them."""
        for at in range(0, len(out), CACHED_BYTES):
            part = out.data[at : at + CACHED_BYTES]
            if os.preadv(self._number, [part], start + at) != len(part):
                raise truncated(str(self._path))
            on_part(part)

    def prefetch(self, start: int, length: int) -> None:
        """Let the disk start on a range, and on the bytes around a small one, unless it is cached."""
        # Not its ends: they may be cached because of their neighbors.
        if not hasattr(os, "posix_fadvise") or self._is_cached(start + length // 2):
            return
        if length < SEEK_BYTES:
            start -= start % SEEK_BYTES
            length = 2 * SEEK_BYTES
        os.posix_fadvise(self._number, start, length, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, at: int) -> bool:
        """Whether a byte is in the page cache: a third of the cost of reading cached bytes ahead."""
        try:
            return bool(os.preadv(self._number, [bytearray(1)], at, os.RWF_NOWAIT))
        except OSError:  # it is not, or the file system does not support the question
            return False


def open_files(root: Path) -> Callable[[str], OpenFile]:
    """Opens files below a folder by name; the most recently read ones stay open."""
    return functools.lru_cache(OPEN_FILES)(lambda name: OpenFile(root / name))
