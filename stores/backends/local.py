"""A local or shared POSIX file system: whole files by link and rename, reads by memory map."""

import contextlib
import errno
import filecmp
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vlmdistill.stores.backends.backend import STAGING, Backend
from vlmdistill.stores.backends.locks import WorkspaceLocks, lock
from vlmdistill.stores.backends.open_files import open_files
from vlmdistill.stores.errors import StoreError, naming
from vlmdistill.stores.input_files import open_regular
from vlmdistill.stores.schema import Array

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

os.umask(UMASK := os.umask(0o077))  # which can only be read by setting it


def shared(path: Path) -> None:
    """Let others read a file as the umask permits: safetensors writes for the owner alone."""
    path.chmod(path.stat().st_mode | 0o666 & ~UMASK)


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def ensure(folder: Path) -> None:
    """Make a folder and its parents, durably."""
    if not folder.is_dir():
        ensure(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


@contextmanager
def atomic_write(
    path: Path, *, alone: bool = False, private: bool = False
) -> Iterator[Path]:
    """Write a file atomically: the yielded temporary path is synced and renamed to `path` at the end.

    Where no other process writes this file, `alone` overwrites the leftovers of a killed one. A `private`
    file is for this user only, from the beginning on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = f".{path.name}" if alone else f".{path.name}.{secrets.token_hex(4)}.tmp"
    aside = path.with_name(name)
    try:
        if private:
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with naming(path):
            yield aside
        if not private:
            shared(aside)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def left_over(folder: Path, start: str = "") -> list[Path]:
    """The temporary files of killed processes in a folder, for names that start so; see `atomic_write`."""
    return [*folder.glob(f".{start}*.tmp")]


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Write a folder atomically: the yielded temporary one is synced and replaces `folder` at the end.

    After an error or an interruption, the earlier folder is kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = f".{folder.name}.{secrets.token_hex(4)}"
    new = folder.with_name(f"{start}.tmp")
    old = folder.with_name(f"{start}.old")
    new.mkdir()
    try:
        with naming(folder):
            yield new
        for parent, _, names in os.walk(new):
            for path in (Path(parent, name) for name in names):
                shared(path)
                sync(path)
            sync(Path(parent))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        sync(folder.parent)
    finally:  # after Ctrl-C, too
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


class Local(Backend):
    """A folder of a local or shared POSIX file system."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self._open = open_files(root)
        self._locks = WorkspaceLocks()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Local, (self.root,))

    def within(self, folder: str) -> "Local":
        """The backend of a folder below this root; StoreError when a link leads to it."""
        return Local(self._own(f"{folder}/"))

    def read(self, name: str, most: int | None = None) -> bytes:
        """The whole file, or its first `most` bytes; FileNotFoundError when it is missing."""
        with open(open_regular(f"{self.url}/{name}"), "rb") as file:
            if most is None:
                return file.read()
            size = os.fstat(file.fileno()).st_size
            return file.read(min(most, size + 1))

    def read_range(self, name: str, start: int, length: int) -> Array:
        """Mapped: its memory is free once the caller drops the array."""
        if not length:
            return np.empty(0, np.uint8)
        return self._open(name).read_range(start, length)

    def readinto(
        self, name: str, start: int, out: Array, on_part: Callable[[memoryview], None]
    ) -> None:
        """Part by part."""
        if len(out):
            self._open(name).readinto(start, out, on_part)

    def prefetch(self, name: str, start: int, length: int) -> None:
        """Let the disk start on a range while others are still being read."""
        if length:
            self._open(name).prefetch(start, length)

    def create(self, name: str, data: bytes) -> bool:
        """Link a finished file into place: atomic, exclusive, and whole on every POSIX system."""

        def link(ready: Path, path: Path) -> bool:
            try:
                os.link(ready, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                # No hard links here: two racing writers may both win, each with a whole file.
                if path.exists():
                    return False
                os.rename(ready, path)
            return True

        return self._write(name, data, link)

    def replace(self, name: str, data: bytes | Path) -> None:
        """Rename a finished file into place."""
        self._write(name, data, lambda ready, path: bool(ready.rename(path)))

    def _own(self, name: str) -> Path:
        """A path to write to; StoreError when a folder on the way is a link, which may lead elsewhere."""
        *folders, leaf = name.split("/")
        path = self.root
        for folder in folders:
            path /= folder
            if path.is_symlink():
                raise StoreError(
                    f"{path} is a symbolic link, which may lead elsewhere: use a folder"
                )
        return path / leaf

    def _write(
        self, name: str, data: bytes | Path, into: Callable[[Path, Path], bool]
    ) -> bool:
        path = self._own(name)
        ensure(path.parent)
        folder = self.workspace()
        ready = folder / "record"
        try:
            with naming(path):
                if isinstance(data, bytes):
                    ready.write_bytes(data)
                else:
                    _link(data, ready)
            sync(ready)
            success = into(ready, path)
        finally:
            self.release(folder)
        sync(path.parent)
        return success

    def publish(self, folder: Path, name: str) -> None:
        """Rename the folder. One that is there already under this name is locked, compared and repaired."""
        path = self._own(name)
        ensure(path.parent)
        for parent, _, _ in os.walk(folder):
            sync(Path(parent))
        while True:
            try:
                os.rename(folder, path)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if self._locks.adopt(folder, path):
                self._repair(folder, name)
                break
        os.utime(path)
        sync(path.parent)

    def list_files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes."""
        return {name: info.st_size for name, info in self._walk(folder)}

    def _walk(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        base = f"{self.url}/{folder}" if folder else self.url
        for entry in _entries(base):
            # Another process may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not entry.is_dir():
                    yield entry.path[len(base) + 1 :], entry.stat()

    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing."""
        try:
            info = os.stat(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info.st_size if stat.S_ISREG(info.st_mode) else None

    def list_names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder."""
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Remove a file, link or folder; a folder vanishes at once, by a rename, before it is emptied."""
        path = self._own(name)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        removed = self._own(f"{STAGING}/removed-{secrets.token_hex(8)}")
        ensure(removed.parent)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(path, removed)
        while removed.exists():
            # Another `store gc` may empty it, too.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(removed)

    def links(self, folder: str = "") -> list[str]:
        """The symbolic links below a folder, which may itself be one: names relative to the root."""
        base = os.path.join(self.root, folder)
        if folder and os.path.islink(base):
            return [folder]
        return sorted(
            os.path.relpath(entry, self.root)
            for entry in _entries(base)
            if entry.is_symlink()
        )

    def seconds_idle(self, name: str) -> float:
        """By modification times."""
        now = self.now()
        path = self.root / name
        try:
            times = [path.lstat().st_mtime]
        except FileNotFoundError:
            return 0.0
        if not path.is_symlink():
            times += [info.st_mtime for _, info in self._walk(name)]
        return max(0.0, now - max(times))

    def _stamp(self) -> float:
        """Of a folder in staging."""
        folder = self.workspace()
        try:
            return folder.stat().st_mtime
        finally:
            self.release(folder)

    def workspace(self, name: str | None = None) -> Path:
        """A locked folder in staging: the kernel drops the lock when the process ends, however it ends."""
        while True:
            folder = self._own(f"{STAGING}/{name or secrets.token_hex(8)}")
            ensure(folder.parent)
            if name and self.links(f"{STAGING}/{name}"):
                name = None  # no writer makes links
                continue
            folder.mkdir(exist_ok=name is not None)
            if not self._locks.take(folder, must=name is not None):
                name = None  # another process has it, or `store gc` was faster
            elif folder.exists():
                return folder
            else:
                self.release(folder)

    def _repair(self, folder: Path, name: str) -> None:
        """Replace files that differ from those in `folder`, one whole file after the other."""
        for file in [file for file in folder.rglob("*") if file.is_file()]:
            published = self._own(f"{name}/{file.relative_to(folder).as_posix()}")
            if _equal(file, published):
                continue
            work = self.workspace()
            try:
                shutil.copyfile(file, work / "file")
                sync(work / "file")
                ensure(published.parent)
                os.rename(work / "file", published)
            finally:
                self.release(work)
            sync(published.parent)
            # An open file may be the one just replaced.
            self._open = open_files(self.root)

    def release(self, folder: Path, keep: bool = False) -> None:
        """Remove the folder if it is still there, then release its lock."""
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        self._locks.release(folder)

    @contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """Lock a folder or file; false when a live process has locked it, also under an earlier name."""
        path = self.root / name
        handle = None
        if not path.is_symlink():  # no writer makes a link: its target is not ours
            try:
                handle = lock(path)
            except (FileNotFoundError, BlockingIOError):
                yield False
                return
        try:
            yield True
        finally:
            if handle is not None:
                os.close(handle)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder that can be listed; links are not followed."""
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as listing:
                entries = list(listing)
        except OSError:
            continue
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)


def _link(file: Path, ready: Path) -> None:
    """Link a file, or copy it where there are no links."""
    try:
        os.link(file, ready)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(file, ready)


def _equal(file: Path, other: Path) -> bool:
    """Whether two files have the same bytes; false when the second is missing."""
    filecmp.clear_cache()  # it compares modification times alone
    try:
        return filecmp.cmp(file, other, shallow=False)
    except OSError:
        return False
