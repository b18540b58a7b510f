"""The frozen embedding and LM head: one safetensors file in a folder named by its content."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct, field

from vlmdistill.stores.arrays import write_file
from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError, one_line
from vlmdistill.stores.input_files import decode
from vlmdistill.stores.layout import STORAGE
from vlmdistill.stores.manifest import (
    HEAD_FILE,
    HEADS,
    Count,
    HeadRecord,
    damaged,
    digest,
)
from vlmdistill.stores.schema import Array, FrozenTables

# The names of dtypes in a safetensors file.
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
HEADER = 1 << 16  # the largest header of such a file, in bytes


def write_head(backend: Backend, head: FrozenTables) -> HeadRecord:
    """Write the tables, a tied one once; returns the part of the store's record that describes them."""
    if head.dtype not in STORAGE:
        raise StoreError(
            f"the head's dtype '{head.dtype}' cannot be stored: use one of {', '.join(STORAGE)}"
        )
    tables = {"embed": head.embed_VD}
    if not head.tied:
        tables["lm_head"] = head.lm_head_VD
    header = json.dumps(_header_of(tables, head.dtype), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    folder = backend.workspace()
    try:
        contiguous = map(np.ascontiguousarray, tables.values())
        length = struct.pack("<Q", len(header))
        entry = write_file(folder / HEAD_FILE, length + header, *contiguous)
        name = f"{HEADS}/{entry[1][:16]}"
        backend.publish(folder, name)
    finally:
        backend.release(folder)
    return HeadRecord(
        file=f"{name}/{HEAD_FILE}",
        entry=entry,
        dtype=head.dtype,
        tied=head.tied,
        generation=dict(head.generation),
    )


def _header_of(tables: Mapping[str, Array], dtype: str) -> dict[str, Any]:
    """The header of a safetensors file of these tables; StoreError when one has another dtype or shape."""
    header = {}
    end = 0
    for name, table in tables.items():
        if table.dtype != STORAGE[dtype] or table.ndim != 2:
            raise StoreError(
                f"the {name} table is {table.dtype}{list(table.shape)}, "
                f"not {STORAGE[dtype]}[vocabulary, width]"
            )
        start, end = end, end + table.nbytes
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(table.shape),
            "data_offsets": [start, end],
        }
    return header


class _Table(Struct, forbid_unknown_fields=True):
    """A table as the header of the file describes it."""

    dtype: str
    shape: tuple[Count, Count]
    data_offsets: tuple[Count, Count]


class _Header(Struct, forbid_unknown_fields=True):
    embed: _Table
    lm_head: _Table | None = None
    metadata: dict[str, str] = field(name="__metadata__", default_factory=dict)


def read_head(backend: Backend, record: HeadRecord, width: int) -> FrozenTables:
    """Map the tables [vocabulary, width] after checking the whole file; StoreError when it is damaged."""
    size, checksum = record.entry
    path = f"{backend.url}/{record.file}"
    try:
        data = backend.read_range(record.file, 0, size)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise damaged(path, error.strerror or one_line(error)) from error
    if digest(data.data) != checksum:
        raise damaged(path)
    try:
        return _tables(data, record, width)
    except (struct.error, ValueError) as error:
        raise damaged(path, one_line(error)) from error


def _tables(data: Array, record: HeadRecord, width: int) -> FrozenTables:
    """The tables of a safetensors file; ValueError when they are not those of the record."""
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > HEADER:
        raise ValueError(f"its header has {length} bytes")
    header = decode(data[8 : 8 + length].tobytes(), _Header)
    if record.tied != (header.lm_head is None):
        raise ValueError(
            "its record says otherwise whether embedding and LM head are one table"
        )
    content = data[8 + length :]
    embed_VD = _table(content, header.embed, record.dtype, width)
    lm_head_VD = embed_VD
    if header.lm_head:
        lm_head_VD = _table(content, header.lm_head, record.dtype, width)
    return FrozenTables(embed_VD, lm_head_VD, record.dtype, record.generation)


def _table(content: Array, described: _Table, dtype: str, width: int) -> Array:
    """The table [vocabulary, width] that the header describes; ValueError when it cannot be one."""
    rows, columns = described.shape
    start, end = described.data_offsets
    size = rows * columns * np.dtype(STORAGE[dtype]).itemsize
    right_type = described.dtype == NAMES[dtype] and columns == width
    right_size = end == start + size and end <= len(content)
    if not (right_type and right_size):
        raise ValueError(
            f"its header has a table of {described.dtype}{[*described.shape]} at "
            f"{[*described.data_offsets]} of {len(content)} bytes, not {NAMES[dtype]} of width {width}"
        )
    shaped: Array = content[start:end].view(STORAGE[dtype]).reshape(rows, columns)
    return shaped
