"""Ragged tensors as Zarr v3 arrays: the rows of all samples of a shard, uncompressed, in one file.

The file is written directly, row by row, since zarr-python needs the whole shard in memory; stock Zarr
readers open it. The rows of a sample are one range of its bytes.
"""

import contextlib
import functools
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import blake3
import google_crc32c
import numpy as np
import xxhash

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import naming
from vlmdistill.stores.schema import CHUNK_FILE, Array, Rows

CHUNK_ROWS = 256
BUFFER = 1 << 20
LARGE = 1 << 20  # bytes from which on a thread pays
SYNC_EVERY = 1 << 26  # bytes
CACHED = 1 << 16  # values that stay in the processor's cache
# The bits of the exponent, which are all set in infinities and NaN alone.
EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
T = TypeVar("T")


@dataclass(frozen=True)
class ArraySpec:
    """One array of every shard: its folder name, what a row is, and how rows are stored."""

    name: str
    rows: Rows
    dtype: str  # on disk, as numpy names it
    width: int
    attributes: tuple[tuple[str, str], ...] = ()
    """The logical dtype and column names, for human readers."""

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, uncompressed."""
        return np.dtype(self.dtype).itemsize * self.width


def metadata(spec: ArraySpec, rows: int) -> dict[str, Any]:
    """The `zarr.json` of an array with `rows` rows."""
    itemsize = np.dtype(spec.dtype).itemsize
    sharding = {
        "chunk_shape": [chunk_rows(rows), spec.width],
        "codecs": [LITTLE_ENDIAN if itemsize > 1 else {"name": "bytes"}],
        "index_codecs": [LITTLE_ENDIAN, {"name": "crc32c"}],
        "index_location": "end",
    }
    shard_rows = max(1, chunk_count(rows)) * chunk_rows(rows)
    grid = {"chunk_shape": [shard_rows, spec.width]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, spec.width],
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"rows": spec.rows, **dict(spec.attributes)},
        "dimension_names": [spec.rows, "channel"],
    }


def chunk_count(rows: int) -> int:
    """The chunks of an array with so many rows."""
    return -(-rows // CHUNK_ROWS)


def chunk_rows(rows: int) -> int:
    """The rows of a chunk: as many as there may be, cut evenly, so that hardly any row is padding."""
    if not rows:
        return CHUNK_ROWS
    return -(-rows // chunk_count(rows))


def chunk_index(spec: ArraySpec, rows: int) -> bytes:
    """Offset and length of each chunk and their crc32c, which end the file of an array."""
    size = chunk_rows(rows) * spec.row_bytes
    offsets = [number * size for number in range(chunk_count(rows))]
    index = b"".join(struct.pack("<QQ", offset, size) for offset in offsets)
    return index + struct.pack("<I", google_crc32c.value(index))


def file_bytes(spec: ArraySpec, rows: int) -> int:
    """The bytes of the file of an array with so many rows."""
    count = chunk_count(rows)
    data = chunk_rows(rows) * count * spec.row_bytes
    return data + count * 16 + 4  # the index, and its crc32c


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Threads that hash and sync while the caller writes: all three release the GIL."""
    return ThreadPoolExecutor(3, thread_name_prefix="vlmdistill-write")


# Threads stay behind in the parent.
os.register_at_fork(after_in_child=_helpers.cache_clear)


def _write_hashed(
    write: Callable[[Any], object], hash_of: Callable[[Any], T], data: memoryview
) -> T:
    """Write bytes and hash them, both at once where that pays."""
    if len(data) < LARGE:
        write(data)
        return hash_of(data)
    hashing = _helpers().submit(hash_of, data)
    try:
        write(data)
    finally:
        result = hashing.result()  # the caller may change its data once we return
    return result


class HashedFile:
    """A file written once, front to back, hashed on the way and durable when closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("xb", buffering=BUFFER)
        self._hash = blake3.blake3()
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self.bytes = 0

    def write(self, data: Any) -> None:
        """Append bytes or a contiguous array."""
        view = memoryview(data).cast("B")
        with naming(self._path):
            _write_hashed(self._file.write, self._hash.update, view)
        self.bytes += len(view)
        self._unsynced += len(view) if len(view) >= LARGE else 0
        # An fdatasync meanwhile, so that closing does not wait for all bytes.
        idle = self._syncing is None or self._syncing.done()
        if idle and self._unsynced >= SYNC_EVERY:
            self._wait()
            self._syncing = _helpers().submit(os.fdatasync, self._file.fileno())
            self._unsynced = 0

    def _wait(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            with naming(self._path):
                syncing.result()

    def close(self) -> tuple[int, str]:
        """Force it to the disk; (bytes, blake3)."""
        self._wait()
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        return self.bytes, self._hash.hexdigest()

    def abort(self) -> None:
        """Close without fsync, also after `close`; buffered bytes may not fit a full disk."""
        with contextlib.suppress(OSError):
            self._wait()
        with contextlib.suppress(OSError):
            self._file.close()


def not_finite(spec: ArraySpec, data: memoryview) -> Array:
    """The numbers [n] of the values that are infinite or NaN, in bytes of an array."""
    exponent = EXPONENTS.get(dict(spec.attributes).get("dtype", ""))
    if exponent is None or spec.dtype == "int8":
        return np.empty(0, np.int64)
    bits = np.frombuffer(data, f"u{np.dtype(spec.dtype).itemsize}")
    masked = np.empty(min(len(bits), CACHED), bits.dtype)
    numbers = [np.empty(0, np.int64)]
    for start in range(0, len(bits), CACHED):
        block = bits[start : start + CACHED]
        exponents = np.bitwise_and(block, exponent, out=masked[: len(block)])
        if exponents.max() == exponent:
            numbers.append(start + np.flatnonzero(exponents == exponent))
    return np.concatenate(numbers)


def write_file(path: Path, *parts: Any) -> tuple[int, str]:
    """Write a whole durable file of bytes and contiguous arrays; (bytes, blake3)."""
    file = HashedFile(path)
    try:
        for part in parts:
            file.write(part)
        return file.close()
    finally:
        file.abort()


class ArrayWriter:
    """Appends the rows of one sample after the other to an array."""

    def __init__(self, shard: Path, spec: ArraySpec) -> None:
        self.spec = spec
        self.rows = 0
        self._folder = shard / spec.name
        self._file = HashedFile(self._folder / CHUNK_FILE)

    def append(self, rows: Array) -> tuple[int, int]:
        """Add rows [n, width]; their xxh3, and how many of them are not finite."""
        data = memoryview(b"")
        if len(rows):
            data = np.ascontiguousarray(rows).data.cast("B")
        bad_rows = np.unique(not_finite(self.spec, data) // self.spec.width)
        checksum = _write_hashed(self._file.write, xxhash.xxh3_64_intdigest, data)
        self.rows += len(rows)
        return checksum, len(bad_rows)

    def close(self) -> dict[str, tuple[int, str]]:
        """Write padding, the chunk index and the metadata: file name -> (bytes, blake3)."""
        files = {}
        if self.rows:
            padding = -self.rows % chunk_rows(self.rows)
            self._file.write(bytes(padding * self.spec.row_bytes))
            self._file.write(chunk_index(self.spec, self.rows))
            files[f"{self.spec.name}/{CHUNK_FILE}"] = self._file.close()
        else:  # Zarr reads a missing file as the fill value, here of no rows at all
            self._file.abort()
            (self._folder / CHUNK_FILE).unlink()
        text = json.dumps(metadata(self.spec, self.rows)).encode()
        entry = write_file(self._folder / "zarr.json", text)
        files[f"{self.spec.name}/zarr.json"] = entry
        return files

    def abort(self) -> None:
        """Close the file as it is."""
        self._file.abort()


def read_rows(
    backend: Backend,
    folder: str,
    spec: ArraySpec,
    span: range,
    out: Array | None = None,
) -> tuple[Array, int]:
    """The rows of `span` [n, width], in `out` if given, and their xxh3.

    StoreError when the file is too short; the caller compares the checksum with the index.
    """
    if out is None:
        rows = backend.read_range(*byte_range(folder, spec, span)).view(spec.dtype)
        rows = rows.reshape(len(span), spec.width)
        return rows, xxhash.xxh3_64_intdigest(rows.data if len(rows) else b"")
    state = xxhash.xxh3_64()
    name, start, _ = byte_range(folder, spec, span)
    backend.readinto(name, start, out.reshape(-1).view(np.uint8), state.update)
    return out, state.intdigest()


def byte_range(folder: str, spec: ArraySpec, span: range) -> tuple[str, int, int]:
    """File, first byte and number of bytes of some rows."""
    name = f"{folder}/{spec.name}/{CHUNK_FILE}"
    return name, span.start * spec.row_bytes, len(span) * spec.row_bytes
