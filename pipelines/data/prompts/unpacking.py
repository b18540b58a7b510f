"""Unpack files as a stream, with bounded memory."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from vlmdistill.stores.errors import DataError, one_line

XZ_MEMORY = 2**28  # bytes to unpack a file; `xz -9` needs 65 MiB


class _Xz(io.RawIOBase):
    """The content of an xz file. `lzma.open` takes as much memory as the file says it needs."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begin()

    def _begin(self) -> None:
        self._unpacker = self._new_unpacker()
        self._pending = b""  # packed bytes behind the end of a stream
        self._position = 0  # in the content

    def _new_unpacker(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        """It is only read."""
        return True

    def seekable(self) -> bool:
        """To its beginning."""
        return True

    def tell(self) -> int:
        """How many bytes of the content were read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go back to the beginning; OSError for any other place."""
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("an xz file is read from its beginning")
        self._file.seek(0)
        self._begin()
        return 0

    def readinto(self, buffer: Any) -> int:
        """The next bytes of the content; 0 at its end. LZMAError if it is damaged, EOFError if it is cut."""
        while True:
            if self._unpacker.eof and not self._begin_next_stream():
                return 0
            packed, self._pending = self._pending, b""
            if self._unpacker.needs_input and not packed:
                packed = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("it ends before its content does")
            content = self._unpacker.decompress(packed, len(buffer))
            if content:
                buffer[: len(content)] = content
                self._position += len(content)
                return len(content)

    def _begin_next_stream(self) -> bool:
        """Go on with the stream that follows, after zeros; False if there is none."""
        packed = self._unpacker.unused_data.lstrip(b"\0")
        while not packed:
            read = self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not read:
                return False
            packed = read.lstrip(b"\0")
        self._unpacker = self._new_unpacker()
        self._pending = packed
        return True


def _open_xz(file: IO[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Xz(file))


UNPACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": _open_xz,
}
"""By the first bytes of a file."""


@contextmanager
def unpacked(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """The content of an open file, which may be compressed, as its first bytes say.

    DataError if it is damaged, or needs too much memory.
    """
    start = file.read(8)
    file.seek(0)
    matching = (
        unpacker for magic, unpacker in UNPACKERS.items() if start.startswith(magic)
    )
    unpacker = next(matching, nullcontext)
    try:
        with unpacker(file) as content:
            yield content
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not of a decompressor
        if isinstance(error, lzma.LZMAError) and "emory" in str(error):
            raise DataError(
                f"{path} needs more than {XZ_MEMORY // 2**20} MiB of memory: pack it again with xz -6"
            ) from None
        raise DataError(
            f"{path} cannot be decompressed ({one_line(error)}): download it again"
        ) from None
