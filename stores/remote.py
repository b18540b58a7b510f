"""Places behind fsspec: object stores that need know no more than PUT, GET, LIST and DELETE."""

import errno
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from vlmdistill.stores import multipart
from vlmdistill.stores.place import STAGING, Place, cut
from vlmdistill.stores.schema import Array


class Remote(Place):
    """A prefix of an object store, such as `s3://bucket/store`. A PUT is whole or nothing there."""

    here = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Listings must be true now: a cached one would hide what other writers commit.
        self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._root = root.rstrip("/")
        self._is_s3 = "s3" in self._fs.protocol

    def __reduce__(self) -> tuple[Any, ...]:
        return (Remote, (self.url,))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

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
        if len(data) != length:
            raise cut(f"{self.url}/{name}")
        return data

    def _cat(self, name: str, **part: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(name), **part))
        except _broken_lines() as error:
            raise ConnectionError(str(error)) from error

    def create(self, name: str, data: bytes) -> bool:
        """A conditional PUT where the store has one; elsewhere racing writers may both win, each whole."""
        path = self._path(name)
        self._make_parent(path)
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
        self._make_parent(self._path(name))
        self._fs.pipe_file(self._path(name), data)

    def publish(self, folder: Path, name: str) -> None:
        """PUT the files that are not there: equal names of folders have equal content."""
        there = self.files(name)
        for file in sorted(folder.rglob("*")):
            leaf = file.relative_to(folder).as_posix()
            if file.is_file() and there.get(leaf) != file.stat().st_size:
                path = self._path(f"{name}/{leaf}")
                self._make_parent(path)
                self._put(file, path)

    def _put(self, file: Path, path: str) -> None:
        if self._is_s3 and file.stat().st_size > multipart.PART:
            multipart.upload(self._fs, file, path)
        else:
            self._fs.put_file(str(file), path)

    def _make_parent(self, path: str) -> None:
        if not self._is_s3:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes."""
        base = self._path(folder)
        return {path[len(base) + 1 :]: int(about["size"]) for path, about in self._find(folder).items()}

    def _find(self, folder: str) -> dict[str, Any]:
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {path: about for path, about in found.items() if about["type"] == "file"}

    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing."""
        try:
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """DELETE a file or everything below a folder."""
        for path in self._find(name) or [self._path(name)]:
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                continue

    def idle(self, folder: str) -> float:
        """Compare the store's own modification times with that of an object written now."""
        times = [_modified(about) for about in self._find(folder).values()]
        now = self._now() if times else None
        return 0.0 if now is None else now - max(times)

    def _now(self) -> float | None:
        """The clock of the place; None when a collector took our probe for a dead one's."""
        probe = f"{STAGING}/probe-{secrets.token_hex(8)}"
        self.replace(probe, b"")
        found = [_modified(about) for about in self._find(probe).values()]
        self.remove(probe)
        return found[0] if found else None

    def leftovers(self, grace: float, dry_run: bool) -> Iterator[tuple[str, int]]:
        """Parts of uploads to S3 that nobody continued."""
        for begun in multipart.pending(self._fs, f"{self._root}/") if self._is_s3 else ():
            size, last = multipart.held(self._fs, self._root, begun)
            now = self._now()
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
        """A folder of this machine: shards are built here and then sent."""
        del name
        return Path(tempfile.mkdtemp(prefix="vlmdistill-"))

    def release(self, folder: Path, keep: bool = False) -> None:
        """Remove the folder: what was sent already is not sent again, and the rest is near."""
        del keep
        shutil.rmtree(folder, ignore_errors=True)


def _broken_lines() -> tuple[type[Exception], ...]:
    """What aiohttp, where it is installed, raises for a broken line: not an OSError."""
    try:
        from aiohttp import ClientError
    except ImportError:
        return ()
    return (ClientError,)


def _modified(about: dict[str, Any]) -> float:
    when = about.get("LastModified") or about.get("mtime") or about.get("created")
    return float(when.timestamp() if isinstance(when, datetime) else when or 0)
