"""Advisory locks of files and folders (flock): the kernel drops them when a process ends, however it ends."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXISTING = os.O_RDONLY | os.O_NONBLOCK  # else a FIFO would block
NEW = os.O_RDWR | os.O_CREAT


def lock(path: Path, wait: bool = False, flags: int = EXISTING) -> int | None:
    """Open a file or folder and lock it, until the descriptor is closed; None without lock support.

    BlockingIOError when another process has locked it, unless `wait`.
    """
    handle = os.open(path, flags, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    except BaseException:  # Ctrl-C while it waits
        os.close(handle)
        raise
    return handle


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[int]:
    """Lock a file, made if it is missing, for as long as the context lasts; its descriptor.

    BlockingIOError when another process has locked it, unless `wait`; OSError without lock support.
    """
    handle = lock(path, wait, NEW)
    if handle is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))
    try:
        yield handle
    finally:
        os.close(handle)


class WorkspaceLocks:
    """The locks that this process holds for its workspaces, until they are released or it ends."""

    def __init__(self) -> None:
        self._handles: dict[Path, list[int]] = {}

    def take(self, folder: Path, must: bool = False) -> bool:
        """Lock a folder; false when another process has it, it is gone, or it `must` be locked and cannot."""
        try:
            handle = lock(folder)
        except (FileNotFoundError, BlockingIOError):
            return False
        self._add(folder, handle)
        return handle is not None or not must

    def adopt(self, folder: Path, path: Path) -> bool:
        """Lock `path` until `folder` is released, after its present owner; false when it is gone by then."""
        try:
            handle = lock(path, wait=True)
        except FileNotFoundError:
            return False
        self._add(folder, handle)
        return path.exists() if handle is None else _is_same(path, handle)

    def _add(self, folder: Path, handle: int | None) -> None:
        if handle is not None:
            self._handles.setdefault(folder, []).append(handle)

    def release(self, folder: Path) -> None:
        """Release every lock that is held for a folder."""
        for handle in self._handles.pop(folder, []):
            os.close(handle)


def _is_same(path: Path, handle: int) -> bool:
    """Whether a path still leads to the file that was opened by it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
