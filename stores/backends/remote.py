"""Object stores (S3, GCS, Azure) and web servers, through fsspec."""

import contextlib
import errno
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import numpy as np

from vlmdistill.stores.backends.backend import (
    BLOCK,
    REQUESTS,
    STAGING,
    Backend,
    T,
    U,
    check_wanted,
    truncated,
)
from vlmdistill.stores.backends.locks import WorkspaceLocks
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.schema import Array

STORE = "store.json"  # the file by which a store is recognized
TRIES = 3  # of a PUT that meets another
UNSENT = "vlmdistill-unsent-"  # folders for shards that are built


class Remote(Backend):
    """A prefix of an object store, such as `s3://bucket/store`. A PUT there is whole or does not happen."""

    is_local = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            # A cached listing would hide the commits of other writers.
            self._fs, root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, **_options(self.url)
            )
        except OSError:
            raise
        except Exception as error:  # the package of the protocol is not installed
            raise StoreError(f"{url} cannot be opened: {error}") from error
        self._root = root.rstrip("/")
        self._locks = WorkspaceLocks()
        self._is_web = "http" in self._fs.protocol

    def __reduce__(self) -> tuple[Any, ...]:
        return (Remote, (self.url,))

    def within(self, folder: str) -> "Remote":
        """The backend of a folder below this root."""
        return Remote(f"{self.url}/{folder}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _request(self, name: str = "", write: bool = False) -> Iterator[None]:
        """Turn any error of the protocol's library into an OSError that names the file."""
        path = f"{self.url}/{name}" if name else self.url
        if write and self._is_web:
            raise OSError(errno.EROFS, "a web server can only be read from")
        try:
            self._fs.invalidate_cache()
            yield
        except OSError as error:
            if error.errno is not None:  # else a file name would hide the message
                error.filename = error.filename or path
            raise
        except Exception as error:
            kind = type(error).__name__
            raise ConnectionError(f"{path}: {kind}: {error}") from error

    def read(self, name: str, most: int | None = None) -> bytes:
        """The whole file, or its first `most` bytes; FileNotFoundError when it is missing."""
        return self._get(name) if most is None else self._get(name, start=0, end=most)

    def read_range(self, name: str, start: int, length: int) -> Array:
        """One ranged request; writable, so that torch takes it without a copy."""
        return np.frombuffer(bytearray(self._get_range(name, start, length)), np.uint8)

    def readinto(
        self, name: str, start: int, out: Array, on_part: Callable[[memoryview], None]
    ) -> None:
        """One ranged request, copied."""
        out[:] = np.frombuffer(self._get_range(name, start, len(out)), np.uint8)
        on_part(out.data)

    def _get_range(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            data = self._get(name, start=start, end=start + length)
        except OSError as error:
            # The range is not satisfiable, unless it is: S3 has the same number for a bad request.
            if error.errno != errno.EINVAL or (self.size(name) or 0) >= start + length:
                raise
            data = b""
        # Plain web servers ignore ranges and send the whole file.
        if len(data) > length:
            if len(data) > BLOCK:  # each block would fetch all of it
                raise StoreError(
                    f"{self.url}: this server ignores ranges, and sends all of a large file"
                )
            data = data[start : start + length]
        if len(data) != length:
            raise truncated(f"{self.url}/{name}")
        return data

    def _get(self, name: str, **bounds: int) -> bytes:
        with self._request(name):
            return bytes(self._fs.cat_file(self._path(name), **bounds))

    def create(self, name: str, data: bytes) -> bool:
        """A conditional PUT where the store has one; elsewhere racing writers may both win, each whole."""
        path = self._path(name)
        with self._request(name, write=True):
            for attempt in range(1, TRIES + 1):
                try:
                    self._fs.pipe_file(path, data, mode="create")
                    return True
                except FileExistsError:
                    return False
                except (OSError, NotImplementedError, ValueError, TypeError) as error:
                    number = error.errno if isinstance(error, OSError) else errno.ENOSYS
                    unsupported = number == errno.ENOSYS
                    # Some stores only say that the request is not valid.
                    if self._fs.exists(path):
                        if unsupported:
                            return False
                        # If the content is equal, the reply to an attempt was lost.
                        return bool(self._fs.cat_file(path) == data)
                    if unsupported:
                        break
                    # EIO may be a conflict with another PUT.
                    if number != errno.EIO or attempt == TRIES:
                        raise
            self.exclusive = False
            self._fs.pipe_file(path, data)  # a PUT without a condition
        return True

    def replace(self, name: str, data: bytes | Path) -> None:
        """A PUT; of a large file in parts."""
        with self._request(name, write=True):
            if isinstance(data, bytes):
                self._fs.pipe_file(self._path(name), data)
            else:
                self._put(data, name)

    def publish(self, folder: Path, name: str) -> None:
        """PUT the files that are missing or differ; at least one, so that the shard is fresh for gc."""
        sizes = self.list_files(name)
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sent = []
        for file in files:
            leaf = file.relative_to(folder).as_posix()
            same_size = sizes.get(leaf) == file.stat().st_size
            if not (same_size and self.same(f"{name}/{leaf}", file)):
                sent.append(file)
        smallest = min(files, key=lambda file: file.stat().st_size)
        for file in sent or [smallest]:
            target = f"{name}/{file.relative_to(folder).as_posix()}"
            check_wanted()
            with self._request(target, write=True):
                self._put(file, target)

    def _put(self, file: Path, name: str) -> None:
        """A PUT of a file; of S3 in blocks, few of which are in memory at once."""
        options = {}
        if "s3" in self._fs.protocol:
            options = {"chunksize": BLOCK, "max_concurrency": 2}
        self._fs.put_file(str(file), self._path(name), **options)

    def same(self, name: str, file: Path) -> bool:
        """Whether a file begins with all bytes of a local one; false when either is missing or shorter."""
        try:
            with file.open("rb") as local:
                blocks = self.blocks(name, 0, file.stat().st_size)
                return all(local.read(len(block)) == block for block in blocks)
        except (FileNotFoundError, StoreError):
            return False  # it was removed or truncated since it was listed

    def map(
        self, function: Callable[[T], U], items: Iterable[T], most: int = REQUESTS
    ) -> Iterator[U]:
        """In turn in memory, where a listing fails while others write."""
        at_once = 1 if self._fs.protocol == "memory" else most
        return super().map(function, items, at_once)

    def list_files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes."""
        base = self._path(folder)
        sizes: dict[str, int | None] = {}
        for path, info in self._find(folder).items():
            name = path.removeprefix(base).lstrip("/")
            sizes[self._unquoted(name)] = info["size"]
        # Web servers list names alone.
        unknown = [name for name, size in sizes.items() if size is None]
        paths = [f"{folder}/{name}".lstrip("/") for name in unknown]
        sizes |= zip(unknown, self.map(self.size, paths), strict=True)
        return {name: int(size) for name, size in sizes.items() if size is not None}

    def _unquoted(self, listed: str) -> str:
        return unquote(listed) if self._is_web else listed

    def _find(self, folder: str) -> dict[str, Any]:
        """The files below a folder, or the file itself: full path -> fsspec's details of it."""
        base = self._path(folder)
        files = {}
        try:
            with self._request(folder):
                for path, details in self._fs.find(base, detail=True).items():
                    # Of a path that is itself a file, some implementations return no details.
                    info = details or self._fs.info(path)
                    # The pages of web servers also have links that sort the listing.
                    is_link = "?" in path or path.rstrip("/") == base
                    if info["type"] == "file" and not (self._is_web and is_link):
                        files[path] = info
        except FileNotFoundError:
            files = {}
        if self._is_web and not files:
            self._require_listings()
        return files

    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing."""
        try:
            with self._request(name):
                info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        if info["type"] == "directory":
            return None
        size = info["size"]
        if size is None:
            raise OSError(f"{self.url}/{name}: the server does not report its size")
        return int(size)

    def versions(self, name: str) -> dict[str, str]:
        """A text that changes with the content of a file: of one, or of all below a folder, by full name."""
        base = f"{self._root}/".lstrip("/")
        return {
            path.lstrip("/").removeprefix(base): _version(info)
            for path, info in self._find(name).items()
        }

    def list_names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder."""
        try:
            with self._request(folder):
                listed = self._fs.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            listed = []
        if not listed and self._is_web:
            self._require_listings()
        # Where an object has the name of the folder, some object stores list it among its content.
        base = self._path(folder).strip("/")
        paths = [path.rstrip("/") for path in listed if path.strip("/") != base]
        return sorted(self._unquoted(path.rpartition("/")[2]) for path in paths)

    def _require_listings(self) -> None:
        """StoreError when a server has a store, and its folders look empty as it does not list them."""
        with self._request():
            try:
                names = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                names = []
            hidden = not any(name.endswith(f"/{STORE}") for name in names)
            hidden = hidden and self._fs.exists(self._path(STORE))
        if hidden:
            raise StoreError(
                f"{self.url}: this server does not list folders, so its files are unknown"
            )

    def remove(self, name: str) -> None:
        """DELETE a file or everything below a folder."""
        for path in self._find(name) or [self._path(name)]:
            with (
                contextlib.suppress(FileNotFoundError),
                self._request(name, write=True),
            ):
                self._fs.rm_file(path)

    def seconds_idle(self, name: str) -> float:
        """By the modification times that the object store reports; 0 where it reports none."""
        times = [_modified(info) for info in self._find(name).values()]
        if not times or not all(times):
            return 0.0
        return max(0.0, self.now() - max(times))

    def _stamp(self) -> float:
        """Of an empty object in staging."""
        name = f"{STAGING}/probe-{secrets.token_hex(8)}"
        self.create(name, b"")
        try:
            with self._request(name):
                return _modified(self._fs.info(self._path(name)))
        finally:
            self.remove(name)

    def workspace(self, name: str | None = None) -> Path:
        """A locked temporary folder of this machine: shards are built here and sent.

        The folders of killed processes are removed.
        """
        remove_unsent()
        while True:
            folder = Path(tempfile.mkdtemp(prefix=UNSENT))
            # Another process may have removed it just now.
            if self._locks.take(folder) and folder.exists():
                return folder

    def release(self, folder: Path, keep: bool = False) -> None:
        """Remove the folder, with `keep`, too: files that were sent are not sent again."""
        shutil.rmtree(folder, ignore_errors=True)
        self._locks.release(folder)


def unsent() -> list[Path]:
    """The folders of shards on their way to a URL, in the folder for temporary files."""
    return [*Path(tempfile.gettempdir()).glob(f"{UNSENT}*")]


def remove_unsent() -> list[Path]:
    """Remove shards that were on their way to a URL when their process on this machine was killed.

    The folders of processes that still run.
    """
    locks = WorkspaceLocks()
    in_use = list[Path]()
    for folder in unsent():
        with contextlib.suppress(OSError):  # it is of another user
            if locks.take(folder, must=True):
                shutil.rmtree(folder, ignore_errors=True)
                locks.release(folder)
            elif folder.exists():
                in_use.append(folder)
    return in_use


def _options(url: str) -> dict[str, Any]:
    """Connections for all requests: the library of S3 opens ten."""
    if not url.startswith(("s3:", "s3a:")):
        return {}
    configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {"max_pool_connections": REQUESTS, **configured}}


def _version(info: dict[str, Any]) -> str:
    tag = info.get("ETag") or info.get("etag")
    return str(tag or f"{info['size']} {_modified(info)}")


def _modified(info: dict[str, Any]) -> float:
    """When an object was written, in seconds since 1970; 0 if the protocol does not tell."""
    names = ("LastModified", "last_modified", "mtime", "created")
    time = next((info[name] for name in names if info.get(name)), 0)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if isinstance(time, datetime):
        time = time.timestamp()
    return float(time)
