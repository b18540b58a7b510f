"""The sizes that an Arrow file declares, read before pyarrow reads the file.

pyarrow decompresses buffers as it reads a record batch, and does not tell whether columns share buffers: a
few bytes of a stranger could become any number of bytes in memory. So the three facts that show this, the
places of the record batches, the lengths of their buffers and whether these are compressed, are read here
from the file's metadata.

The trick: Arrow keeps metadata as flatbuffers, which can be read without a schema compiler. A table is a
position in the file, whose first four bytes lead back to its vtable; the vtable has the offset of each
member, by its number in Arrow's schema files (File.fbs, Message.fbs), or 0 for a default. A member that is a
table or a vector is a relative offset again, and a vector begins with its length.
"""

import struct
from collections.abc import Iterator

import numpy as np

MAGIC = b"ARROW1"
SMALLEST = 24  # bytes of a file
# Numbers of members, as in Arrow's schema files.
FOOTER_DICTIONARIES = 2
FOOTER_RECORD_BATCHES = 3
MESSAGE_HEADER_TYPE = 1
MESSAGE_HEADER = 2
DICTIONARY_DATA = 1
BATCH_BUFFERS = 2
BATCH_COMPRESSION = 3
DICTIONARY_BATCH = 2  # a type of header
# Of an entry of the footer: offset, length of the metadata, length of the body.
BLOCK_BYTES = 24
CONTINUATION = -1  # marks a message of the present format


def batches(data: memoryview) -> Iterator[int]:
    """The position of each dictionary and record batch, as the footer of the file says.

    ValueError when the bytes are no Arrow file.
    """
    if len(data) < SMALLEST or data[-len(MAGIC) :] != MAGIC:
        raise ValueError("it is no Arrow file")
    end = len(data) - len(MAGIC) - 4
    start = end - _int(data, end)
    footer = _follow(data, start)
    for member in (FOOTER_DICTIONARIES, FOOTER_RECORD_BATCHES):
        place = _member(data, footer, member)
        if not place:
            continue
        blocks = _follow(data, place)
        for number in range(_int(data, blocks)):
            (position,) = struct.unpack_from(
                "<q", data, blocks + 4 + BLOCK_BYTES * number
            )
            yield position


def buffer_bytes(data: memoryview, batch: int) -> int:
    """The bytes of all buffers of a dictionary or record batch; ValueError when they are compressed."""
    prefix = 8 if _int(data, batch) == CONTINUATION else 4
    message = _follow(data, batch + prefix)
    header_type = _member(data, message, MESSAGE_HEADER_TYPE)
    place = _member(data, message, MESSAGE_HEADER)
    if not header_type or not place:
        raise ValueError("a message of it has no header")
    header = _follow(data, place)
    if data[header_type] == DICTIONARY_BATCH:  # its values are a record batch
        header = _follow(data, _member(data, header, DICTIONARY_DATA))
    if _member(data, header, BATCH_COMPRESSION):
        raise ValueError("it is compressed")
    place = _member(data, header, BATCH_BUFFERS)
    if not place:
        return 0
    buffers = _follow(data, place)
    pairs = np.frombuffer(data, "<i8", 2 * _int(data, buffers), buffers + 4)
    lengths = pairs[1::2]  # each after the offset of its buffer
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= len(data):
        raise ValueError("it has a buffer larger than itself")
    return int(lengths.sum())


def _member(data: memoryview, table: int, number: int) -> int:
    """The position of a member of a table; 0 when it has its default."""
    vtable = table - _int(data, table)
    (size,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + entry)
    return table + offset if offset else 0


def _follow(data: memoryview, position: int) -> int:
    """The position of the table or vector to which a relative offset leads."""
    return position + _int(data, position)


def _int(data: memoryview, position: int) -> int:
    if position < 0:
        raise ValueError("it points to before its start")
    return int(struct.unpack_from("<i", data, position)[0])
