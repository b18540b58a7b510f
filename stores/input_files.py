"""Reading files that another program may have written: regular ones only, JSON of a declared type."""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from vlmdistill.stores.errors import DataError, one_line

T = TypeVar("T")


def regular(path: str | Path) -> Path:
    """The path of a file, for a library that opens it by itself.

    IsADirectoryError for all that is no regular file, which the library may wait for without an end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _not_regular(path)
    return Path(path)


def open_regular(path: str | Path) -> int:
    """A descriptor for reading a file.

    IsADirectoryError for all that is no regular file: a FIFO or a device may block for ever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise _not_regular(path)


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EISDIR, "it is no regular file", str(path))


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """The content of a file; IsADirectoryError for all that is no regular file.

    An OSError with errno EFBIG for a file of more than `most` bytes, of which nothing is read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(
                errno.EFBIG, f"it has {size} bytes, more than {most}", str(path)
            )
        return file.read()


def decode(data: bytes | str, kind: type[T]) -> T:
    """JSON as a declared type; ValueError when it is none, or is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError(one_line(error)) from None


def read(path: Path, kind: type[T], expected: str, remedy: str) -> T:
    """A JSON file as a declared type.

    FileNotFoundError when it is missing; DataError when it cannot be read, or is not the `expected`: one line
    with the path, the reason and the `remedy`.
    """
    try:
        return decode(read_bytes(path), kind)
    except FileNotFoundError:
        raise
    except OSError as cause:
        raise DataError(f"{path} cannot be read: {cause.strerror or cause}") from None
    except ValueError as cause:
        raise DataError(
            f"{path} is not {expected} ({one_line(cause)}): {remedy}"
        ) from None
