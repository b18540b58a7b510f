"""A bounded cache of remote arrays on a local disk, shared by all processes of a machine.

    DIR/<hash>            the bytes of one range of an array: rows of one sample
        <hash>.<random>   a range that is being written, of its full size from the start
        used              how many bytes are reserved for files; also the lock under which room is made

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

BLOCK_BYTES = 4096  # a file system gives room in blocks
# Share of the limit that is freed when it is reached: each time, the whole folder is listed.
FREED_SHARE = 0.1
STALE = 7 * 24 * 3600.0  # seconds without use of a file
DEAD = 60.0  # seconds without a write to an unfinished file
COUNTER = "used"
FILE_NAME = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{8})?")
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
        self._highest_kept = ALL_NAMES  # of the names that the last removal left
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as counter_fd:
            self._reserve(counter_fd, 0)

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
        """The bytes that are kept under a name; None if there are none, or not `length` of them."""
        try:
            with (self.folder / name).open("rb") as file:
                os.utime(file.fileno())
                data = file.read()
        except OSError:
            return None
        return data if len(data) == length else None

    def put(self, name: str, data: bytes) -> None:
        """Keep bytes, unless there is no room, or they would be the first to be removed again."""
        size = _on_disk(len(data))
        if size + BLOCK_BYTES > self.limit or name > self._highest_kept:
            return
        unfinished = self.folder / f"{name}.{secrets.token_hex(4)}"
        try:
            with self._locked() as counter_fd:
                if not self._reserve(counter_fd, size):
                    raise OSError(
                        errno.ENOSPC, "files in it cannot be removed, and leave no room"
                    )
                with unfinished.open("xb") as file:
                    file.truncate(len(data))  # counted in full from now on
            with unfinished.open("r+b") as file:
                file.write(data)
            # Under the lock, so that a process that lists the files finds it by one of its names.
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
        return locked(self.folder / COUNTER, wait=True)

    def _reserve(self, counter_fd: int, size: int) -> bool:
        """Add `size` bytes to the counter before they are written: a crash leaves it too high, not too low.

        If they do not fit by the counter, the files are counted, and some are removed; false if the bytes
        still do not fit.
        """
        limit = self.limit - BLOCK_BYTES  # of the counter's own file
        text = os.pread(counter_fd, 32, 0)
        used = int(text) if text.strip().isdigit() else None  # a new counter is empty
        if used is None or used + size > limit:
            files = self._listed()
            used = sum(file.size for file in files)
            if used + size > limit:
                most_left = (1 - FREED_SHARE) * limit - size
                used = self._evict(files, used, max(0.0, most_left))
        fits = used + size <= limit
        if fits:
            used += size
        os.pwrite(counter_fd, f"{used:<31}\n".encode(), 0)
        return fits

    def _evict(self, files: "list[_File]", used: int, most_left: float) -> int:
        """Remove files in this order until at most `most_left` of `used` bytes are left; returns these."""
        kept_names = list[str]()
        removed_one_in_use = False
        for file in files:
            is_removed = used > most_left and self.drop(file.name)
            if is_removed:
                used -= file.size
            if file.is_stale:
                continue
            if is_removed:
                removed_one_in_use = True
            else:
                kept_names.append(file.name)
        if removed_one_in_use:
            self._highest_kept = max(kept_names, default=ALL_NAMES)
        return used

    def _listed(self) -> "list[_File]":
        """The files of the cache, in the order in which they are removed.

        Stale files, perhaps of another store, come first, then others from the highest name down. An epoch
        reads in random order, so the least recently used file is as likely to be read next as any other.
        By name, all processes keep the same files, and always read that share of the samples from the cache.
        """
        now = time.time()
        files = list[_File]()
        for entry in os.scandir(self.folder):
            if not FILE_NAME.fullmatch(entry.name):
                continue
            longest_pause = DEAD if "." in entry.name else STALE
            # Another process may drop it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat()
                is_stale = now - info.st_mtime > longest_pause
                files.append(_File(is_stale, entry.name, _on_disk(info.st_size)))
        return sorted(files, reverse=True)


@dataclass(frozen=True, order=True)
class _File:
    """A file of the cache; the last in order is the first to be removed."""

    is_stale: bool  # long unused, or of a writer that has died
    name: str
    size: int


class Cached(Remote):
    """A remote backend whose arrays are read through a cache, the ranges of a batch all at once."""

    def __init__(self, url: str, cache: Cache) -> None:
        super().__init__(url)
        self.cache = cache
        self._fetches: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="vlmdistill-fetch")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.url, self.cache.folder, self.cache.limit))

    def within(self, folder: str) -> "Cached":
        """The backend of a folder below this root, with the same cache."""
        return Cached(f"{self.url}/{folder}", self.cache)

    def prefetch(self, name: str, start: int, length: int) -> None:
        """Start to load a range, from the cache or the remote, for the next read of it."""
        with self._lock:
            key = _key(name, start, length)
            if length and key not in self._fetches:
                self._fetches[key] = self._pool.submit(
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
            fetch = self._fetches.pop(key, None)
        return fetch.result() if fetch else self._load(key, name, start, length)

    def _load(self, key: str, name: str, start: int, length: int) -> bytes:
        data = self.cache.get(key, length)
        if data is not None:
            self.cache.hits += length
            return data
        data = super()._get_range(name, start, length)
        self.cache.misses += length
        self.cache.put(key, data)
        return data


def _reopened(url: str, folder: Path, limit: int) -> Cached:
    return Cached(url, Cache(folder, limit))


def _key(name: str, start: int, length: int) -> str:
    return blake3(f"{name}:{start}:{length}".encode()).hexdigest()[:32]


def _on_disk(size: int) -> int:
    """The bytes that a file of a size takes on a disk."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
