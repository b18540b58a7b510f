"""A log whose every text and image has a mark, and the search for marks in files of all kinds."""

import base64
import io
import json
import lzma
import re
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests import tiny
from tests.pipelines.traffic.conftest import asked, said, write

MARK = "Zebedee bounces past the roundabout"
ANSWER = "There is a marmalade machine behind the carousel, and it is number {}."
IMAGES = (None, "png", None, "jpeg")  # of an exchange, by its number
DAY = 86400
EXCHANGES = 24
XZ = "xz"  # which pyarrow does not read
COMPRESSED = {
    "gzip": b"\x1f\x8b\x08",
    "bz2": b"BZh",
    "zstd": b"\x28\xb5\x2f\xfd",
    "lz4": b"\x04\x22\x4d\x18",
    XZ: b"\xfd7zXZ\0",
}
"""What compressed data begin with, by the names of pyarrow."""
BASE64 = re.compile(rb"[A-Za-z0-9+/]{24,}")
BASE64_LINE_END = re.compile(rb"(?<=[A-Za-z0-9+/]{60})\r?\n(?=[A-Za-z0-9+/])")
DEPTH = 3  # of what is packed within what is packed
TABLES = {
    b"PAR1": pq.read_table,
    b"ARROW1": lambda file: pa.ipc.open_file(file).read_all(),
}
BLOCK = 1 << 20


def marked_log(folder: Path, first: int = 0) -> Path:
    """Exchanges of 40 days ago, half of them with an image, every text of which has a mark."""
    when = time.time() - 40 * DAY
    lines = [
        {
            "time": when + number,
            "request": asked(f"Tell me if {MARK} {number}.", _image(number)),
            "response": said(ANSWER.format(number)),
        }
        for number in range(first, first + EXCHANGES)
    ]
    return write(folder / "day.jsonl", lines)


def _image(number: int) -> str | None:
    kind = IMAGES[number % len(IMAGES)]
    return tiny.data_url(tiny.picture(84, 84, number), kind) if kind else None


def marks(encode: Callable[[str], Sequence[int]]) -> dict[str, bytes]:
    """What must not be found, by kind: texts, their tokens, and images, also within a page."""
    sought = {"PNG": b"IHDR", "JPEG": b"JFIF", "page": b"data:image"}
    for kind, text in {"question": MARK, "answer": ANSWER.partition("{}")[0]}.items():
        tokens = encode(f"- {text.strip()}")[3:-1]
        sought[kind] = text.strip().encode()
        sought[f"{kind} as tokens"] = np.asarray(tokens, np.int32).tobytes()
        numbers = json.dumps(tokens)[1:-1]
        sought[f"{kind} as numbers"] = numbers.encode()
        sought[f"{kind} as numbers without spaces"] = numbers.replace(" ", "").encode()
    return sought


def found(folder: Path, sought: Collection[bytes]) -> list[str]:
    """The files below a folder that hold one of these, compressed or not."""
    return [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and any(mark in content for content in _contents(file) for mark in sought)
    ]


def _contents(file: Path) -> Iterator[bytes]:
    """The bytes of a file, and what they hold in another form."""
    content = file.read_bytes()
    if "tokens" in file.parts:  # of a store: a row of four numbers for each
        yield np.frombuffer(content[: len(content) // 16 * 16], np.int32)[::4].tobytes()
    yield from _unpacked(content)


def _unpacked(content: bytes, depth: int = DEPTH) -> Iterator[bytes]:
    """Bytes, the values of the table that they are, and all that is packed anywhere in them."""
    yield content
    for magic, read in TABLES.items():
        if content.startswith(magic) and content.endswith(magic):
            for column in read(pa.BufferReader(content)).columns:
                yield from _values(column)
    if depth:
        for inner in _packed(content):
            yield from _unpacked(inner, depth - 1)


def _packed(content: bytes) -> Iterator[bytes]:
    """What is an archive, compressed or base64 in bytes."""
    if content.startswith(b"PK\x03\x04"):
        yield from _members(content)
    for name, magic in COMPRESSED.items():
        start = content.find(magic)
        while start >= 0:
            yield _decompressed(content[start:], name)
            start = content.find(magic, start + 1)
    # JSON may escape a slash, and URLs have other letters.
    plain = content.replace(b"\\/", b"/").translate(bytes.maketrans(b"-_", b"+/"))
    for run in BASE64.findall(BASE64_LINE_END.sub(b"", plain)):
        whole = run[:-1] if len(run) % 4 == 1 else run
        yield base64.b64decode(whole + b"=" * (-len(whole) % 4))


def _members(content: bytes) -> Iterator[bytes]:
    """The files of a ZIP archive, such as one of torch."""
    with (
        suppress(zipfile.BadZipFile),  # it is cut
        zipfile.ZipFile(io.BytesIO(content)) as archive,
    ):
        for name in archive.namelist():
            yield archive.read(name)


def _values(column: Any) -> Iterator[bytes]:
    """The texts of a column of a table one after the other, and its integers as numbers of four bytes."""
    if isinstance(column, pa.ChunkedArray):
        for chunk in column.chunks:
            yield from _values(chunk)
        return
    kind = column.type
    if pa.types.is_dictionary(kind):
        yield from _values(column.dictionary)
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _values(part)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _values(column.flatten())
    elif pa.types.is_integer(kind):
        yield column.drop_null().to_numpy().astype(np.int32).tobytes()
    else:
        yield "\n".join(map(str, column.to_pylist())).encode()


def _decompressed(content: bytes, name: str) -> bytes:
    """What can be read of compressed data, which may be cut, or something else."""
    read = list[bytes]()
    if name == XZ:
        xz = lzma.LZMADecompressor()
        with suppress(lzma.LZMAError, EOFError):
            for start in range(0, len(content), BLOCK):
                read.append(xz.decompress(content[start : start + BLOCK]))
        return b"".join(read)
    with (
        suppress(OSError),
        pa.input_stream(pa.BufferReader(content), compression=name) as stream,
    ):
        while block := stream.read(BLOCK):
            read.append(block)
    return b"".join(read)


def data(folder: Path) -> list[str]:
    """The arrays of stores and the responses below a folder: all are of the marked exchanges."""
    files = [*folder.rglob("c/0/0"), *folder.rglob("*part-*.parquet")]
    return sorted(str(file.relative_to(folder)) for file in files)
