"""Files of a local store, open for reading: extents mapped, copied, or asked of the disk ahead of time."""

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vlmdistill.stores.place import cut
from vlmdistill.stores.schema import Array

OPEN_FILES = 128
MAPPED_BYTES = 1 << 16  # below this a read is cheaper than a memory map
CACHED_BYTES = 1 << 18  # read and checked in parts of this size: two fit well into what a core has to itself
SEEK_BYTES = 1 << 18  # a disk reads so much in the time that it takes to find a byte


class OpenFile:
    """A file open for reading until nobody uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)

    def extent(self, start: int, length: int) -> Array:
        """Map just this extent, so that memory follows what is held, not what was ever read."""
        if length < MAPPED_BYTES:
            data = np.empty(length, np.uint8)
            self.fill(start, data, lambda _: None)
            return data
        if os.fstat(self._number).st_size < start + length:  # touching a map past the end kills the process
            raise cut(str(self._path))
        skip = start % mmap.ALLOCATIONGRANULARITY
        # Private and writable: torch takes it without a copy, and nobody can change the file.
        mapped = mmap.mmap(
            self._number,
            skip + length,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=start - skip,
        )
        return np.frombuffer(mapped, np.uint8, length, skip)

    def fill(self, start: int, out: Array, seen: Callable[[memoryview], None]) -> None:
        """Read in parts that stay in the processor's cache until `seen` has looked at them."""
        for at in range(0, len(out), CACHED_BYTES):
            part = out.data[at : at + CACHED_BYTES]
            if os.preadv(self._number, [part], start + at) != len(part):
                raise cut(str(self._path))
            seen(part)

    def announce(self, start: int, length: int) -> None:
        """Let the disk start on an extent, and on what lies around a small one, unless it is in memory."""
        # Not its ends: they may be there because of its neighbours.
        if not hasattr(os, "posix_fadvise") or self._in_memory(start + length // 2):
            return
        if length < SEEK_BYTES:
            start -= start % SEEK_BYTES
            length = 2 * SEEK_BYTES
        os.posix_fadvise(self._number, start, length, os.POSIX_FADV_WILLNEED)

    def _in_memory(self, at: int) -> bool:
        """Whether the system has a byte at hand; a third of the price of asking for megabytes that it has."""
        try:
            return bool(os.preadv(self._number, [bytearray(1)], at, os.RWF_NOWAIT))
        except OSError:  # it would have to wait for the disk, or the file system cannot tell
            return False


class OpenFiles:
    """The files below a folder that were read last."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> OpenFile:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = OpenFile(self._root / name)
                if len(self._files) > OPEN_FILES:
                    self._files.popitem(last=False)
            self._files.move_to_end(name)
            return file
