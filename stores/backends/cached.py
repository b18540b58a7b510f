"""A bounded cache of remote arrays on a local disk, shared by all processes of a machine.

    DIR/<hash>            the bytes of one range of an array: rows of one sample
        <hash>.<random>   one that is being written, of its full size from the start
        used              bytes reserved so far; also the lock under which room is made

A name is a hash of shard and range, and a shard is named by its content, so a file never goes stale, and
several stores may share a folder. Files have no checksum of their own: the store compares every row that it
reads with its index, and lets the cache `forget` those that differ.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from vlmdistill.stores.backends.backend import REQUESTS
from vlmdistill.stores.backends.locks import locked
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.schema import CHUNK_FILE

GRAIN = 4096  # a file system gives room in blocks
# The share that is freed at once: to choose the files, the whole folder is listed.
FREED = 0.1
STALE = 7 * 24 * 3600.0  # seconds without use of a file
DEAD = 60.0  # seconds without a write to an unfinished one
USED = "used"
RANGE = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{8})?")
ALL_NAMES = "g"  # sorts above every name in hex
SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(i?)B", re.IGNORECASE)
log = logging.getLogger("vlmdistill.stores")


class Cache:
    """Files of a folder that never take more than `limit` bytes, whatever process writes or is killed."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.hits = self.misses = 0  # bytes
        self._failed = False
        self._highest = ALL_NAMES  # the last removal left no name above
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as counter:
            self._reserve(counter, 0)

    @classmethod
    def of(cls, text: str) -> "Cache":
        """The cache that `DIR:SIZE` describes, such as `/scratch/cache:500GB`; StoreError if it does not."""
        folder, _, size = text.rpartition(":")
        match = SIZE.fullmatch(size.strip())
        if not folder or not match:
            raise StoreError(
                f"a cache of '{text}': give a folder and a size, such as /scratch/cache:500GB"
            )
        number, prefix, binary = match.groups()
        power = " KMGT".index(prefix.upper() or " ")
        factor = (1024 if binary else 1000) ** power
        try:
            return cls(Path(folder).expanduser(), int(float(number) * factor))
        except OSError as error:
            raise StoreError(
                f"a cache in {folder}: {error.strerror or error}: give another folder"
            ) from None

    def get(self, name: str, length: int) -> bytes | None:
        """The bytes that were kept under a name, if there are so many."""
        try:
            with (self.folder / name).open("rb") as file:
                os.utime(file.fileno())
                data = file.read()
        except OSError:
            return None
        return data if len(data) == length else None

    def put(self, name: str, data: bytes) -> None:
        """Keep bytes, if there is room on the disk, and if they would not be the next to go."""
        size = _on_disk(len(data))
        if size + GRAIN > self.limit or name > self._highest:
            return
        unfinished = self.folder / f"{name}.{secrets.token_hex(4)}"
        try:
            with self._locked() as counter:
                if not self._reserve(counter, size):
                    raise OSError(
                        errno.ENOSPC, "files in it cannot be removed, and leave no room"
                    )
                with unfinished.open("xb") as file:
                    file.truncate(len(data))  # counted in full from now on
            with unfinished.open("r+b") as file:
                file.write(data)
            # Under the lock, so that no process that counts misses it under both names.
            with self._locked():
                unfinished.rename(self.folder / name)
        except FileNotFoundError:  # another process needed the room
            return
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if not self._failed:
                log.warning(
                    "the cache %s is not written to: %s",
                    self.folder,
                    error.strerror or error,
                )
            self._failed = True

    def drop(self, name: str) -> bool:
        """Remove a file; whether it was there."""
        try:
            (self.folder / name).unlink()
        except OSError:
            return False
        return True

    def _locked(self) -> AbstractContextManager[int]:
        return locked(self.folder / USED, wait=True)

    def _reserve(self, counter: int, size: int) -> bool:
        """Count `size` more bytes before they are written: a crash leaves the counter too high, not too low.

        If they do not fit by the counter, the files are counted, and some are removed; false if the bytes
        still do not fit.
        """
        limit = self.limit - GRAIN  # of the file `used` itself
        text = os.pread(counter, 32, 0)
        used = int(text) if text.strip().isdigit() else limit + 1
        if used + size > limit:
            files = self._listed()
            used = sum(file.size for file in files)
            if used + size > limit:
                used = self._evict(files, used, down_to=(1 - FREED) * limit - size)
        fits = used + size <= limit
        if fits:
            used += size
        os.pwrite(counter, f"{used:<31}\n".encode(), 0)
        return fits

    def _evict(self, files: "list[_File]", used: int, down_to: float) -> int:
        """Remove files in this order until the others take at most `down_to` bytes; returns their bytes."""
        remaining = list[str]()
        removed_one_in_use = False
        for file in files:
            if used > max(0, down_to) and self.drop(file.name):
                used -= file.size
                removed_one_in_use |= not file.idle
            elif not file.idle:
                remaining.append(file.name)
        if removed_one_in_use:
            self._highest = max(remaining, default=ALL_NAMES)
        return used

    def _listed(self) -> "list[_File]":
        """The files of the cache, in the order in which they are removed.

        In an epoch of random order, the least recently used file is as likely to be next as any other. So
        all processes keep the same names: their share of the samples is then read from the cache. Files
        that are no longer read, perhaps of another store, go first.
        """
        now = time.time()
        files = list[_File]()
        for entry in os.scandir(self.folder):
            if not RANGE.fullmatch(entry.name):
                continue
            unfinished = "." in entry.name
            # Another process may drop it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat()
                idle = now - info.st_mtime > (DEAD if unfinished else STALE)
                files.append(_File(idle, entry.name, _on_disk(info.st_size)))
        return sorted(files, reverse=True)


@dataclass(frozen=True, order=True)
class _File:
    """A file of the cache."""

    idle: bool  # long unused
    name: str
    size: int


class Cached(Remote):
    """A remote backend whose arrays are read through a cache, the ranges of a batch all at once."""

    def __init__(self, url: str, cache: Cache) -> None:
        super().__init__(url)
        self.cache = cache
        self._coming: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="vlmdistill-fetch")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_again, (self.url, self.cache.folder, self.cache.limit))

    def within(self, folder: str) -> "Cached":
        """The backend of a folder below this root, with the same cache."""
        return Cached(f"{self.url}/{folder}", self.cache)

    def prefetch(self, name: str, start: int, length: int) -> None:
        """Start to fetch a range that is not in the cache."""
        with self._lock:
            key = _key(name, start, length)
            if length and key not in self._coming:
                self._coming[key] = self._pool.submit(
                    self._load, key, name, start, length
                )

    def forget(self, name: str, start: int, length: int) -> bool:
        """Remove a range from the cache; whether it was there."""
        return self.cache.drop(_key(name, start, length))

    def _get_range(self, name: str, start: int, length: int) -> bytes:
        if not name.endswith(CHUNK_FILE):
            return super()._get_range(name, start, length)
        key = _key(name, start, length)
        with self._lock:
            coming = self._coming.pop(key, None)
        return coming.result() if coming else self._load(key, name, start, length)

    def _load(self, key: str, name: str, start: int, length: int) -> bytes:
        data = self.cache.get(key, length)
        if data is not None:
            self.cache.hits += length
            return data
        data = super()._get_range(name, start, length)
        self.cache.misses += length
        self.cache.put(key, data)
        return data


def _again(url: str, folder: Path, limit: int) -> Cached:
    return Cached(url, Cache(folder, limit))


def _key(name: str, start: int, length: int) -> str:
    return blake3(f"{name}:{start}:{length}".encode()).hexdigest()[:32]


def _on_disk(size: int) -> int:
    """The bytes that a file of a size takes on a disk."""
    return -(-size // GRAIN) * GRAIN
