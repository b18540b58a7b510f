"""Files written aside and renamed, where others see a file while it is being written.

An object store shows an object once all of it has come. Other file systems show what has come so far, and
keep it when its writer dies.
"""

import contextlib
import secrets
from collections.abc import Callable
from typing import Any

# Those of fsspec whose `mv` is one rename. Some replace the file that is there, others refuse to.
RENAMING = frozenset({"file", "sftp", "ssh", "smb", "hdfs"})


def needed(fs: Any) -> bool:
    """Whether files are seen before they are whole, and can be renamed; also below a `dir::`."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    below = getattr(fs, "fs", None) if "dir" in protocols else None
    return needed(below) if below is not None else not RENAMING.isdisjoint(protocols)


def create(fs: Any, folder: str, path: str, send: Callable[[str], None]) -> bool:
    """Make a file unless it exists, `send` writing it into `folder` first; whether this call made it.

    Where a rename replaces what is there, racing writers may both win, each with a whole file.
    """
    return _place(fs, folder, send, lambda ready: not fs.exists(path) and _renamed(fs, ready, path))


def replace(fs: Any, folder: str, path: str, send: Callable[[str], None]) -> None:
    """Make or replace a file; where a rename refuses to replace one, it is gone for a moment."""

    def over(ready: str) -> bool:
        while not _renamed(fs, ready, path):
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(path)
        return True

    _place(fs, folder, send, over)


def _place(fs: Any, folder: str, send: Callable[[str], None], into: Callable[[str], bool]) -> bool:
    ready = f"{folder}/{secrets.token_hex(8)}"
    fs.makedirs(folder, exist_ok=True)
    made = False
    try:
        send(ready)
        made = into(ready)
    finally:
        if not made:
            with contextlib.suppress(OSError):
                fs.rm_file(ready)
    return made


def _renamed(fs: Any, ready: str, path: str) -> bool:
    """Rename a file; false where that is refused because there is one already."""
    try:
        fs.mv(ready, path)
    except OSError:
        if not fs.exists(path):
            raise
        return False
    return True
