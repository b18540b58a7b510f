"""Places on a local or shared POSIX file system: whole files by link and rename, reads by memory map."""

import errno
import fcntl
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

from vlmdistill.stores.files import OpenFiles
from vlmdistill.stores.place import STAGING, Place
from vlmdistill.stores.schema import Array

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def ensure(folder: Path) -> None:
    """Make a folder and its parents, durably."""
    if not folder.is_dir():
        ensure(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


class Local(Place):
    """A folder of a local or shared POSIX file system."""

    here = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self._files = OpenFiles(root)
        self._locks = Locks()

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Local.__init__(self, state["root"])

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError when there is none."""
        return (self.root / name).read_bytes()

    def extent(self, name: str, start: int, length: int) -> Array:
        """Mapped, so that memory follows what is held."""
        return self._files[name].extent(start, length) if length else np.empty(0, np.uint8)

    def fill(self, name: str, start: int, out: Array, seen: Callable[[memoryview], None]) -> None:
        """Part by part."""
        if len(out):
            self._files[name].fill(start, out, seen)

    def announce(self, name: str, start: int, length: int) -> None:
        """Let the disk start on an extent while others are still being read."""
        if length:
            self._files[name].announce(start, length)

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

        return self._place(name, data, link)

    def replace(self, name: str, data: bytes) -> None:
        """Rename a finished file into place."""

        def rename(ready: Path, path: Path) -> bool:
            os.rename(ready, path)
            return True

        self._place(name, data, rename)

    def _place(self, name: str, data: bytes, into: Callable[[Path, Path], bool]) -> bool:
        path = self.root / name
        ensure(path.parent)
        folder = self.workspace()
        ready = folder / "record"
        try:
            with ready.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            made = into(ready, path)
        finally:
            self.release(folder)
        sync(path.parent)
        return made

    def publish(self, folder: Path, name: str) -> None:
        """Rename the folder; one already there under the same content-made name is as good once compared."""
        path = self.root / name
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
            if self._adopt(folder, path):
                self._mend(folder, path)
                break
        sync(path.parent)

    def files(self, folder: str) -> dict[str, int]:
        """Every file below a folder: name relative to the folder -> bytes."""
        return {name: about.st_size for name, about in self._walk(folder)}

    def _walk(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        base = self.root / folder
        for parent, _, leaves in os.walk(base):
            for leaf in leaves:
                path = Path(parent, leaf)
                try:
                    yield path.relative_to(base).as_posix(), path.stat()
                except FileNotFoundError:  # another process removed it while we walked
                    continue

    def size(self, name: str) -> int | None:
        """Bytes of one file, or None when it is missing: no other file is looked at."""
        try:
            found = os.stat(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self, folder: str) -> list[str]:
        """The sorted names directly inside a folder."""
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Remove a file or a folder; a folder vanishes at once, by a rename, before it is emptied."""
        path = self.root / name
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        ensure(self.root / STAGING)
        doomed = self.root / STAGING / f"removed-{secrets.token_hex(8)}"
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def idle(self, folder: str, dry_run: bool = False) -> float:
        """Compare modification times with that of a folder made now, on the same file system."""
        path, now = self.root / folder, self.clock(dry_run)
        times = [about.st_mtime for _, about in self._walk(folder)]
        return max(0.0, now - max([*times, path.stat().st_mtime])) if now and path.exists() else 0.0

    def _probe(self) -> float | None:
        folder = self.workspace()
        try:
            return folder.stat().st_mtime
        finally:
            self.release(folder)

    def workspace(self, name: str | None = None) -> Path:
        """A locked folder in staging: the kernel drops the lock when the process ends, however it ends."""
        ensure(self.root / STAGING)
        while True:
            folder = self.root / STAGING / (name or secrets.token_hex(8))
            folder.mkdir(exist_ok=name is not None)
            if not self._locks.take(folder):
                name = None  # another process has it: take one of our own; or a collector was faster
                continue
            if folder.exists():
                return folder
            self.release(folder)

    def _adopt(self, folder: Path, path: Path) -> bool:
        """Guard a shard that another writer published, living or dead; false when a collector took it."""
        try:
            os.utime(path)  # to a collector it is fresh again
            handle = lock(path)
        except FileNotFoundError:
            return False
        except BlockingIOError:  # its own writer lives, and guards it
            return True
        if handle is None:
            return path.exists()
        if not _is(path, handle):
            os.close(handle)
            return False
        self._locks.add(folder, handle)  # beside its own: it may have to be mended from there
        return True

    def _mend(self, folder: Path, path: Path) -> None:
        """Write anew, one whole file after the other, what is not there as in `folder`."""
        for file in [file for file in folder.rglob("*") if file.is_file()]:
            there = path / file.relative_to(folder)
            if _equal(file, there):
                continue
            work = self.workspace()
            try:
                shutil.copyfile(file, work / "file")
                sync(work / "file")
                ensure(there.parent)
                os.rename(work / "file", there)
            finally:
                self.release(work)
            sync(there.parent)
            self._files = OpenFiles(self.root)  # those open may be what was replaced

    def release(self, folder: Path, keep: bool = False) -> None:
        """Remove the folder if it is still there, then let its lock go."""
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        self._locks.release(folder)

    @contextmanager
    def seized(self, name: str) -> Iterator[bool | None]:
        """Hold the lock of a folder or file; false when a living process has it, wherever it was renamed."""
        try:
            handle = lock(self.root / name)
        except (FileNotFoundError, BlockingIOError):
            yield False
            return
        try:
            yield None if handle is None else True
        finally:
            if handle is not None:
                os.close(handle)

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """A file that is locked before it is seen."""
        path = self.root / name
        ensure(path.parent)
        folder = self.workspace()
        handle = None
        try:
            (folder / "mark").touch()
            handle = lock(folder / "mark")
            os.rename(folder / "mark", path)
            self.release(folder)
            yield
            path.unlink()
        finally:
            self.release(folder)
            if handle is not None:
                os.close(handle)


class Locks:
    """The locks that this process holds for folders of its own, until they are released or it ends."""

    def __init__(self) -> None:
        self._handles: dict[Path, list[int]] = {}

    def take(self, folder: Path) -> bool:
        """Lock a folder, where locks are known; false when another process has it, or it is gone."""
        try:
            handle = lock(folder)
        except (FileNotFoundError, BlockingIOError):
            return False
        if handle is not None:
            self.add(folder, handle)
        return True

    def add(self, folder: Path, handle: int) -> None:
        """Hold a lock on something else as long as the folder's."""
        self._handles.setdefault(folder, []).append(handle)

    def release(self, folder: Path) -> None:
        """Let go whatever is held for a folder."""
        for handle in self._handles.pop(folder, []):
            os.close(handle)


def _equal(file: Path, there: Path) -> bool:
    """Whether two files have the same bytes; not when there is no second."""
    filecmp.clear_cache()  # it trusts times of change
    try:
        return filecmp.cmp(file, there, shallow=False)
    except OSError:
        return False


def _is(path: Path, handle: int) -> bool:
    """Whether a path still leads to what was opened by it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def lock(path: Path) -> int | None:
    """Lock a file or folder; BlockingIOError when another process has it, None where locks are unknown."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle
