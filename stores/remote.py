"""Places behind fsspec: file systems, and object stores that know no more than PUT, GET, LIST, DELETE."""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import numpy as np
from fsspec.archive import AbstractArchiveFileSystem

from vlmdistill.stores import aside, multipart
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.local import Locks, lock
from vlmdistill.stores.place import STAGING, Place, cut
from vlmdistill.stores.schema import Array

BLOCK = 1 << 24
REQUESTS = 16  # at once
NESTED = {"dir": "store", "zip": "store.zip", "tar": "store.tar"}  # they lie in something
ONE_BY_ONE = threading.RLock()  # for the client of sftp, in which requests of several threads never end
SCRATCH = "vlmdistill-shard-"  # folders of this machine in which shards are built


class Remote(Place):
    """A prefix of an object store, such as `s3://bucket/store`. A PUT is whole or nothing there.

    So it is on file systems behind fsspec, such as `sftp://host/store`: what is sent there is renamed.
    """

    here = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        if protocol in NESTED and "::" not in url:  # what fsspec says of it helps nobody
            what = f"{url} cannot be opened: say after '::' what it lies in"
            raise StoreError(f"{what}, as in {protocol}://folder::s3://bucket/{NESTED[protocol]}")
        # Listings must be true now: a cached one would hide what other writers commit. These keep none.
        options = {} if protocol in aside.RENAMING else {"use_listings_cache": False}
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, **options)
        except OSError:
            raise
        except Exception as error:  # no such protocol, or its package is not installed
            raise StoreError(f"{url} cannot be opened: {error}") from error
        self._root = root.rstrip("/")
        self._is_s3 = "s3" in self._fs.protocol
        self._is_web = "http" in self._fs.protocol
        self._is_seen_early = aside.needed(self._fs)
        self._turn = ONE_BY_ONE if "sftp" in self._fs.protocol else contextlib.nullcontext()
        # Some would take what is written, but replace what is there, or only seem to.
        archive = isinstance(self._fs, AbstractArchiveFileSystem)
        self._read_only = "a web server" if self._is_web else "an archive" if archive else ""
        self._locks = Locks()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Remote, (self.url,))

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)  # the root of an archive has no name

    @contextmanager
    def _asked(self, name: str = "") -> Iterator[None]:
        """Turn whatever the library of a protocol raises into an OSError that says where."""
        where = f"{self.url}/{name}" if name else self.url
        try:
            with self._turn:
                yield
        except OSError as error:
            if error.errno is not None:  # without a number, a name would take the place of its words
                error.filename = error.filename or where
            raise
        except Exception as error:
            raise ConnectionError(f"{where}: {type(error).__name__}: {error}") from error

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError when there is none."""
        return self._cat(name)

    def extent(self, name: str, start: int, length: int) -> Array:
        """One ranged request."""
        return np.frombuffer(
            bytearray(self._get(name, start, length)), np.uint8
        )  # writable, as torch likes it

    def fill(self, name: str, start: int, out: Array, seen: Callable[[memoryview], None]) -> None:
        """One ranged request, copied."""
        out[:] = np.frombuffer(self._get(name, start, len(out)), np.uint8)
        seen(out.data)

    def _get(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            data = self._cat(name, start=start, end=start + length)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the range is not satisfiable
                raise
            data = b""
        if len(data) > length:  # a plain server that sends whole files whatever is asked
            data = data[start : start + length]
        if len(data) != length:
            raise cut(f"{self.url}/{name}")
        return data

    def _cat(self, name: str, **part: int) -> bytes:
        with self._asked(name):
            return bytes(self._fs.cat_file(self._path(name), **part))

    def create(self, name: str, data: bytes) -> bool:
        """A conditional PUT where the store has one; elsewhere racing writers may both win, each whole."""
        path = self._path(name)
        with self._changed(name):
            self._make_parent(path)
            if self._is_seen_early:
                return aside.create(self._fs, self._path(STAGING), path, partial(self._pipe, data))
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, ValueError, TypeError):
                if self._fs.exists(path):
                    return False
                self._fs.pipe_file(path, data)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """A PUT."""
        with self._changed(name):
            self._write(self._path(name), partial(self._pipe, data))

    def _pipe(self, data: bytes, path: str) -> None:
        self._fs.pipe_file(path, data)

    def _write(self, path: str, send: Callable[[str], None]) -> None:
        self._make_parent(path)
        if self._is_seen_early:
            aside.replace(self._fs, self._path(STAGING), path, send)
        else:
            send(path)

    def publish(self, folder: Path, name: str) -> None:
        """PUT the files that are not there, or not the same."""
        there = self.files(name)
        for file in sorted(folder.rglob("*")):
            leaf = file.relative_to(folder).as_posix()
            if not file.is_file():
                continue
            if there.get(leaf) != file.stat().st_size or not self._has(f"{name}/{leaf}", file):
                with self._changed(f"{name}/{leaf}"):
                    self._put(file, self._path(f"{name}/{leaf}"))

    def _has(self, name: str, file: Path) -> bool:
        """Whether a file of the same size has the bytes of a local one."""
        try:
            with file.open("rb") as mine:
                for part in iter(lambda: mine.read(BLOCK), b""):
                    if self.extent(name, mine.tell() - len(part), len(part)).data != part:
                        return False
        except (FileNotFoundError, StoreError):  # it has gone, or was cut, since it was listed
            return False
        return True

    def _put(self, file: Path, path: str) -> None:
        if self._is_s3 and file.stat().st_size > multipart.PART:
            multipart.upload(self._fs, file, path)
        else:
            self._write(path, partial(self._fs.put_file, str(file)))

    @contextmanager
    def _changed(self, name: str) -> Iterator[None]:
        """As `_asked`, of a file that is written or removed."""
        if self._read_only:
            raise OSError(errno.EROFS, f"{self._read_only} can only be read from")
        with self._asked(name):
            yield

    def _make_parent(self, path: str) -> None:
        if not self._is_s3:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes."""
        base = self._path(folder)
        found = {path.removeprefix(base).lstrip("/"): about for path, about in self._find(folder).items()}
        sizes = {self._name(name): about["size"] for name, about in found.items()}
        untold = [name for name, size in sizes.items() if size is None]  # web servers list names alone
        if untold:
            with ThreadPoolExecutor(REQUESTS) as pool:
                told = pool.map(lambda name: self.size(f"{folder}/{name}".lstrip("/")), untold)
                sizes |= zip(untold, told, strict=True)
        return {name: int(size) for name, size in sizes.items() if size is not None}

    def _name(self, listed: str) -> str:
        return unquote(listed) if self._is_web else listed

    def _find(self, folder: str) -> dict[str, Any]:
        try:
            with self._asked(folder):
                self._fs.invalidate_cache()
                told = self._fs.find(self._path(folder), detail=True)
                # Of a path that is a file itself some tell nothing.
                found = {path: about or self._fs.info(path) for path, about in told.items()}
        except FileNotFoundError:
            return {}
        # Web servers put links among the names that sort them.
        files = {path: about for path, about in found.items() if about["type"] == "file"}
        return {path: about for path, about in files.items() if not (self._is_web and "?" in path)}

    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing."""
        try:
            with self._asked(name):
                self._fs.invalidate_cache()
                size = self._fs.info(self._path(name))["size"]
        except FileNotFoundError:
            return None
        if size is None:
            raise OSError(f"{self.url}/{name} has no size: the server does not tell it")
        return int(size)

    def names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder."""
        try:
            with self._asked(folder):
                self._fs.invalidate_cache()
                found = self._fs.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Object stores may list a folder, where an object stands for it, among what it holds.
        base = self._path(folder).strip("/")
        paths = [path.rstrip("/") for path in found if path.strip("/") != base]
        return sorted(self._name(path.rpartition("/")[2]) for path in paths)

    def remove(self, name: str) -> None:
        """DELETE a file or everything below a folder."""
        for path in self._find(name) or [self._path(name)]:
            with contextlib.suppress(FileNotFoundError), self._changed(name):
                self._fs.rm_file(path)

    def idle(self, folder: str, dry_run: bool = False) -> float:
        """Compare the store's own modification times with that of an object written now."""
        times = [_modified(about) for about in self._find(folder).values()]
        now = self.clock(dry_run) if times else None
        return 0.0 if now is None else now - max(times)

    def _probe(self) -> float | None:
        probe = f"{STAGING}/probe-{secrets.token_hex(8)}"
        self.replace(probe, b"")
        found = [_modified(about) for about in self._find(probe).values()]
        self.remove(probe)
        return found[0] if found else None

    def leftovers(self, grace: float, dry_run: bool) -> Iterator[tuple[str, int]]:
        """Parts of uploads to S3 that nobody continued."""
        for begun in multipart.pending(self._fs, f"{self._root}/") if self._is_s3 else ():
            size, last = multipart.held(self._fs, self._root, begun)
            now = self.clock(dry_run)
            if now is not None and now - last >= grace:
                if not dry_run:
                    multipart.abort(self._fs, self._root, begun)
                yield f"upload of {begun['Key']}", size

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """An empty object, removed afterwards."""
        self.replace(name, b"")
        yield
        self.remove(name)

    def workspace(self, name: str | None = None) -> Path:
        """A locked folder of this machine: shards are built here and sent. What the dead left goes."""
        del name
        for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
            _sweep(left)
        while True:
            folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
            if not self._locks.take(folder):
                continue  # another process swept it away
            if folder.exists():
                return folder
            self.release(folder)

    def release(self, folder: Path, keep: bool = False) -> None:
        """Remove the folder: what was sent already is not sent again, and the rest is near."""
        del keep
        shutil.rmtree(folder, ignore_errors=True)
        self._locks.release(folder)


def _sweep(folder: Path) -> None:
    """Remove a folder that no living process holds."""
    try:
        handle = lock(folder)
    except OSError:  # it is held, gone, or another user's
        return
    if handle is not None:  # locks are known here
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _modified(about: dict[str, Any]) -> float:
    when = about.get("LastModified") or about.get("mtime") or about.get("created")
    return float(when.timestamp() if isinstance(when, datetime) else when or 0)
