"""The frozen embedding and LM head: one safetensors file in a folder named by its content."""

import json
import struct

import numpy as np

from vlmdistill.stores.arrays import HashedFile
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.layout import STORAGE
from vlmdistill.stores.manifest import HEADS, Record, damaged, digest
from vlmdistill.stores.place import Place
from vlmdistill.stores.schema import Array, Head

FILE = "head.safetensors"
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors says it


def write_head(place: Place, head: Head) -> Record:
    """Write the tables, a tied one once; what the store's record keeps of them."""
    if head.dtype not in STORAGE:
        raise StoreError(f"the head's dtype '{head.dtype}' cannot be stored: use one of {', '.join(STORAGE)}")
    tables = {"embed": head.embed_VD} | ({} if head.tied else {"lm_head": head.lm_head_VD})
    header, end = {}, 0
    for name, table in tables.items():
        if table.dtype != STORAGE[head.dtype] or table.ndim != 2:
            raise StoreError(
                f"the {name} table is {table.dtype}{list(table.shape)}, "
                f"not {STORAGE[head.dtype]}[vocabulary, width]"
            )
        shape, start, end = list(table.shape), end, end + table.nbytes
        header[name] = {"dtype": NAMES[head.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    folder = place.workspace()
    try:
        file = HashedFile(folder / FILE)
        try:
            file.write(struct.pack("<Q", len(text)) + text)
            for table in tables.values():
                file.write(np.ascontiguousarray(table))
            entry = file.close()
        finally:
            file.abort()
        name = f"{HEADS}/{entry[1][:16]}"
        place.publish(folder, name)
    finally:
        place.release(folder)
    return {
        "file": f"{name}/{FILE}",
        "entry": entry,
        "dtype": head.dtype,
        "tied": head.tied,
        "generation": dict(head.generation),
    }


def read_head(place: Place, record: Record) -> Head:
    """Map the tables after checking the whole file; StoreError when it is damaged or missing."""
    name, (size, checksum) = record["file"], record["entry"]
    where = f"{place.url}/{name}"
    try:
        data = place.extent(name, 0, size)
    except FileNotFoundError as error:
        raise damaged(where, "it is missing") from error
    if digest(data.data) != checksum:
        raise damaged(where)
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())

    def table(name: str) -> Array:
        start, end = (8 + length + offset for offset in header[name]["data_offsets"])
        shaped: Array = data[start:end].view(STORAGE[record["dtype"]]).reshape(header[name]["shape"])
        return shaped

    embed_VD = table("embed")
    lm_head_VD = embed_VD if record["tied"] else table("lm_head")
    return Head(embed_VD, lm_head_VD, record["dtype"], record["generation"])
