"""The frozen embedding and LM head: one safetensors file in a folder named by its content."""

import json
import struct

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

NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
}  # as safetensors says it
HEADER = 1 << 16  # bytes of the header of the file


def write_head(backend: Backend, head: FrozenTables) -> HeadRecord:
    """Write the tables, a tied one once; what the store's record keeps of them."""
    if head.dtype not in STORAGE:
        raise StoreError(
            f"the head's dtype '{head.dtype}' cannot be stored: use one of {', '.join(STORAGE)}"
        )
    tables = {"embed": head.embed_VD} | (
        {} if head.tied else {"lm_head": head.lm_head_VD}
    )
    header, end = {}, 0
    for name, table in tables.items():
        if table.dtype != STORAGE[head.dtype] or table.ndim != 2:
            raise StoreError(
                f"the {name} table is {table.dtype}{list(table.shape)}, "
                f"not {STORAGE[head.dtype]}[vocabulary, width]"
            )
        shape, start, end = list(table.shape), end, end + table.nbytes
        header[name] = {
            "dtype": NAMES[head.dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    folder = backend.workspace()
    try:
        parts = map(np.ascontiguousarray, tables.values())
        entry = write_file(
            folder / HEAD_FILE, struct.pack("<Q", len(text)) + text, *parts
        )
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


class _Table(Struct, forbid_unknown_fields=True):
    """What the header of the file says of a table."""

    dtype: str
    shape: tuple[Count, Count]
    data_offsets: tuple[Count, Count]


class _Header(Struct, forbid_unknown_fields=True):
    embed: _Table
    lm_head: _Table | None = None
    metadata: dict[str, str] = field(name="__metadata__", default_factory=dict)


def read_head(backend: Backend, record: HeadRecord, width: int) -> FrozenTables:
    """Map the tables [vocabulary, width] after checking the whole file; StoreError when it is damaged."""
    name, (size, checksum) = record.file, record.entry
    where = f"{backend.url}/{name}"
    try:
        data = backend.read_range(name, 0, size)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise damaged(where, error.strerror or one_line(error)) from error
    if digest(data.data) != checksum:
        raise damaged(where)
    try:
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        if length > HEADER:
            raise ValueError(f"its header has {length} bytes")
        header = decode(data[8 : 8 + length].tobytes(), _Header)
        embed_VD = _table(data[8 + length :], header.embed, record.dtype, width)
        if record.tied != (header.lm_head is None):
            raise ValueError(
                "its record says otherwise whether embedding and LM head are one table"
            )
        lm_head_VD = (
            _table(data[8 + length :], header.lm_head, record.dtype, width)
            if header.lm_head
            else embed_VD
        )
    except (struct.error, ValueError) as error:
        raise damaged(where, one_line(error)) from error
    return FrozenTables(embed_VD, lm_head_VD, record.dtype, record.generation)


def _table(data: Array, about: _Table, dtype: str, width: int) -> Array:
    (rows, columns), (start, end) = about.shape, about.data_offsets
    size = rows * columns * np.dtype(STORAGE[dtype]).itemsize
    if (
        about.dtype != NAMES[dtype]
        or columns != width
        or end != start + size
        or end > len(data)
    ):
        what = f"{about.dtype}{[*about.shape]} at {[*about.data_offsets]} of {len(data)} bytes"
        raise ValueError(
            f"its header has a table of {what}, not {NAMES[dtype]} of width {width}"
        )
    shaped: Array = data[start:end].view(STORAGE[dtype]).reshape(rows, columns)
    return shaped
