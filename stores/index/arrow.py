"""Arrow files, as the format has them: uncompressed, of plain columns, no larger in memory than on disk.

A file may come from a stranger: compressed buffers, columns that share memory, or columns without any, make
few bytes into any number of them, and other types make polars end the process. They are refused beforehand.
"""

import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
import pyarrow as pa

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError, naming, one_line
from vlmdistill.stores.index import arrow_metadata
from vlmdistill.stores.manifest import Entry, damaged, digest

if TYPE_CHECKING:
    import polars as pl

MOST_COLUMNS = 1 << 12
MOST_ARRAYS = 1 << 16  # columns times record batches
DEPTH = 4  # lists within lists
BATCH_ROWS = 1 << 16  # of the record batches of a large table
SMALL_BYTES = 1 << 18
BLOCK = 1 << 20  # bytes that are hashed at once
SCALARS = (  # the types in a column or a list; of numbers, those that polars has
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
        # A file has one dictionary a column.
        writer.write_table(table.unify_dictionaries().combine_chunks())
    return bytes(sink.getvalue())


def write_arrow(path: Path, frame: "pl.DataFrame") -> Entry:
    """Write a frame as an Arrow IPC file, some rows after the other: (bytes, blake3).

    A large one has not the memory for a second of its kind. StoreError as from `to_arrow`.
    """
    import polars as pl

    oldest = pl.CompatLevel.oldest()
    schema = _require_plain(frame.clear().to_arrow(compat_level=oldest).schema)
    rows = BATCH_ROWS
    types = frame.schema.dtypes()
    if any(kind in (pl.Categorical, pl.Enum) for kind in types):
        rows = max(1, len(frame))  # a file has one dictionary a column
    with (
        naming(path),
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        for part in frame.iter_slices(rows):
            table = part.to_arrow(compat_level=oldest)
            writer.write_table(table.combine_chunks())
    return path.stat().st_size, _digest(path)


def _digest(path: Path) -> str:
    state = blake3.blake3()
    with path.open("rb") as file:
        while data := file.read(BLOCK):
            state.update(data)
    return state.hexdigest()


def read_arrow(backend: Backend, name: str, entry: Entry) -> pa.Table:
    """Read an Arrow IPC file that a record names with (bytes, blake3); StoreError when it differs."""
    path = f"{backend.url}/{name}"
    size, checksum = entry
    try:
        if size < SMALL_BYTES:  # nothing is kept open for it
            data = memoryview(backend.read(name, size))
        else:
            data = backend.read_range(name, 0, size).data
        if digest(data) != checksum:
            raise damaged(path)
        return _read(data)
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error) as error:
        raise damaged(path, one_line(error)) from error


def _require_plain(schema: pa.Schema) -> pa.Schema:
    try:
        plain(schema)
    except ValueError as error:
        raise StoreError(f"this table cannot be kept: {error}") from None
    return schema


def frame_of(table: pa.Table) -> "pl.DataFrame":
    """A table as a polars frame."""
    import polars as pl

    frame = pl.from_arrow(table, rechunk=False)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _read(data: memoryview) -> pa.Table:
    batches = list(arrow_metadata.batches(data))
    buffer_bytes = [arrow_metadata.buffer_bytes(data, batch) for batch in batches]
    if sum(buffer_bytes) > len(data):
        raise ValueError("its columns share memory")
    reader = pa.ipc.open_file(pa.py_buffer(data))
    lists_of_nulls = plain(reader.schema)
    columns = len(reader.schema)
    if len(batches) * columns > MOST_ARRAYS:
        raise ValueError(f"it has {len(batches)} record batches of {columns} columns")
    table = reader.read_all()
    table.validate(full=True)
    chunks = [chunk for name in lists_of_nulls for chunk in table[name].chunks]
    if sum(map(_nulls, chunks)) > len(data):
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
            name, kind = field.name[:200], str(field.type)[:200]
            raise ValueError(f"its column {name!r} is {kind}")
    names_of_lists = []
    for field in schema:
        if pa.types.is_nested(field.type) and "null" in str(field.type):
            names_of_lists.append(field.name)
    return tuple(names_of_lists)


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
    return any(is_kind(kind) for is_kind in SCALARS)


def _nulls(array: pa.Array) -> int:
    """Values of no bytes that are in lists."""
    if isinstance(array, pa.ListArray | pa.LargeListArray):
        return _nulls(array.flatten())
    if isinstance(array, pa.StructArray):
        fields = range(array.type.num_fields)
        return sum(_nulls(array.field(number)) for number in fields)
    return len(array) if isinstance(array, pa.NullArray) else 0
