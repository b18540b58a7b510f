"""Arrow files, as the format has them: uncompressed, of plain columns, no larger in memory than on disk.

A file may come from a stranger: compressed buffers, columns that share memory, or columns without any, make
few bytes into any number of them, and other types make polars end the process. They are refused beforehand.
"""

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
import numpy as np
import pyarrow as pa

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError, naming, one_line
from vlmdistill.stores.manifest import Entry, damaged, digest

if TYPE_CHECKING:
    import polars as pl

MOST_COLUMNS, MOST_ARRAYS = 1 << 12, 1 << 16  # of a table; in all its record batches
DEPTH = 4  # lists within lists
BATCH_ROWS = 1 << 16  # of the record batches of a large table
SMALL_BYTES = 1 << 18
BLOCK = 1 << 20  # bytes that are hashed at once
MAGIC = b"ARROW1"
SCALARS = (  # what a column or a list may hold; of numbers, those that polars has
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    pa.types.is_decimal128,
)


def to_arrow(table: pa.Table) -> bytes:
    """An Arrow IPC file of this table; StoreError when it has columns that the format does not."""
    _require_plain(table.schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(
            table.unify_dictionaries().combine_chunks()
        )  # a file has one dictionary a column
    return bytes(sink.getvalue())


def write_arrow(path: Path, frame: "pl.DataFrame") -> Entry:
    """Write a frame as an Arrow IPC file, some rows after the other: (bytes, blake3).

    A large one has not the memory for a second of its kind. StoreError as from `to_arrow`.
    """
    import polars as pl

    kinds = frame.schema.dtypes()
    whole = any(
        kind in (pl.Categorical, pl.Enum) for kind in kinds
    )  # a file has one dictionary a column
    parts = frame.iter_slices(max(1, len(frame)) if whole else BATCH_ROWS)
    schema = _require_plain(
        frame.clear().to_arrow(compat_level=pl.CompatLevel.oldest()).schema
    )
    with (
        naming(path),
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        for part in parts:
            writer.write_table(
                part.to_arrow(compat_level=pl.CompatLevel.oldest()).combine_chunks()
            )
    state = blake3.blake3()
    with path.open("rb") as written:
        while data := written.read(BLOCK):
            state.update(data)
    return path.stat().st_size, state.hexdigest()


def read_arrow(backend: Backend, name: str, entry: Entry) -> pa.Table:
    """Read an Arrow IPC file that a record names with (bytes, blake3); StoreError when it differs."""
    where = f"{backend.url}/{name}"
    try:
        size = entry[0]
        small = size < SMALL_BYTES  # nothing is kept open for one
        data = (
            memoryview(backend.read(name, size))
            if small
            else backend.read_range(name, 0, size).data
        )
        if digest(data) != entry[1]:
            raise damaged(where)
        return _read(data)
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error) as error:
        raise damaged(where, one_line(error)) from error


def _require_plain(schema: pa.Schema) -> pa.Schema:
    try:
        plain(schema)
    except ValueError as error:
        raise StoreError(f"this table cannot be kept: {error}") from None
    return schema


def frame_of(table: pa.Table) -> "pl.DataFrame":
    """The same as a polars frame."""
    import polars as pl

    frame = pl.from_arrow(table, rechunk=False)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _read(data: memoryview) -> pa.Table:
    blocks = list(_blocks(data))
    if sum(_buffers(data, block) for block in blocks) > len(data):
        raise ValueError("its columns share memory")
    reader = pa.ipc.open_file(pa.py_buffer(data))
    hollow = plain(reader.schema)
    if len(blocks) * len(reader.schema) > MOST_ARRAYS:
        raise ValueError(
            f"it has {len(blocks)} record batches of {len(reader.schema)} columns"
        )
    table = reader.read_all()
    table.validate(full=True)
    if sum(_nulls(part) for name in hollow for part in table[name].chunks) > len(data):
        raise ValueError("it has lists of more nulls than it has bytes")
    return table


def plain(schema: pa.Schema) -> tuple[str, ...]:
    """The columns with lists of nulls, which take no memory; ValueError when a schema is not the format's.

    It has a column of keys, so that rows take memory, no two of one name, and all of plain types.
    """
    return _plain(bytes(schema.serialize()))


@functools.lru_cache
def _plain(serialized: bytes) -> tuple[str, ...]:
    schema = pa.ipc.read_schema(pa.py_buffer(serialized))
    names = schema.names
    if len(names) > MOST_COLUMNS or len(set(names)) < len(names):
        raise ValueError(f"it has two columns of one name, or more than {MOST_COLUMNS}")
    kind = schema.field("key").type if "key" in names else None
    if kind not in (pa.string(), pa.large_string()):
        raise ValueError("it has no text column 'key'")
    for field in schema:
        if not _is_plain(field.type):
            raise ValueError(
                f"its column {field.name[:200]!r} is {str(field.type)[:200]}"
            )
    return tuple(
        field.name
        for field in schema
        if pa.types.is_nested(field.type) and "null" in str(field.type)
    )


def _is_plain(kind: pa.DataType, depth: int = 0) -> bool:
    if isinstance(kind, pa.BaseExtensionType) or depth > DEPTH:
        return False
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(kind.value_type, depth + 1)
    if pa.types.is_struct(kind):
        return all(_is_plain(field.type, depth + 1) for field in kind)
    if pa.types.is_dictionary(kind):
        return kind.value_type in (pa.string(), pa.large_string())
    if pa.types.is_timestamp(kind):
        return kind.tz in (None, "UTC")
    return any(known(kind) for known in SCALARS)


def _nulls(array: pa.Array) -> int:
    """Values of no bytes that are in lists."""
    if isinstance(array, pa.ListArray | pa.LargeListArray):
        return _nulls(array.flatten())
    if isinstance(array, pa.StructArray):
        return sum(_nulls(array.field(at)) for at in range(array.type.num_fields))
    return len(array) if isinstance(array, pa.NullArray) else 0


# Arrow keeps metadata as flatbuffers: of these, blocks and one flag are read here, before pyarrow sees them.


def _blocks(data: memoryview) -> Iterator[int]:
    """Where the metadata of each dictionary and record batch begin, as the footer of the file says."""
    if len(data) < 24 or data[-6:] != MAGIC:
        raise ValueError("it is no Arrow file")
    end = len(data) - 10
    footer = end - _int(data, end)
    root = footer + _int(data, footer)
    for member in (2, 3):  # dictionaries, record batches
        if at := _member(data, root, member):
            at += _int(data, at)
            for number in range(_int(data, at)):
                yield struct.unpack_from("<q", data, at + 4 + 24 * number)[0]


def _buffers(data: memoryview, block: int) -> int:
    """The bytes of all buffers of a dictionary or record batch; ValueError when they are compressed."""
    start = block + (8 if _int(data, block) == -1 else 4)
    message = start + _int(data, start)
    kind, header = _member(data, message, 1), _member(data, message, 2)
    if not kind or not header:
        raise ValueError("a message of it has no header")
    header += _int(data, header)
    if data[kind] == 2:  # a dictionary: its values are a record batch
        header = _member(data, header, 1)
        header += _int(data, header)
    if _member(data, header, 3):
        raise ValueError("it is compressed")
    at = _member(data, header, 2)
    at += _int(data, at) if at else 0
    lengths = np.frombuffer(
        data, "<i8", 2 * _int(data, at) if at else 0, at + 4 if at else 0
    )[1::2]
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= len(data):
        raise ValueError("it has a buffer larger than itself")
    return int(lengths.sum())


def _member(data: memoryview, table: int, number: int) -> int:
    """Where a member of a flatbuffers table lies; 0 when it has its default."""
    members = table - _int(data, table)
    (size,) = struct.unpack_from("<H", data, members)
    if 4 + 2 * number + 2 > size:
        return 0
    (at,) = struct.unpack_from("<H", data, members + 4 + 2 * number)
    return table + at if at else 0


def _int(data: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("it points to before its start")
    return int(struct.unpack_from("<i", data, at)[0])
