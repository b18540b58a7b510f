"""Ragged tensors as Zarr v3 arrays: rows of all samples of a shard one after the other.

Each array is one shard file in the layout of Zarr's sharding codec: inner chunks in order, then
the offset and length of each, then their crc32c. It is written here directly, row by row, since
the generic path needs the whole shard in memory; stock Zarr readers open it. Uncompressed, the
rows of a sample are one plain extent of the file.
"""

import contextlib
import functools
import json
import os
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import blake3
import google_crc32c
import numpy as np
import xxhash

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.place import Place
from vlmdistill.stores.schema import Array

CHUNK_ROWS = 256
LEVEL = 1
CHUNK_FILE = "c/0/0"
EMPTY_CHUNK = (1 << 64) - 1
BUFFER = 1 << 20
LARGE = 1 << 20  # bytes from which on a thread pays
SYNC_EVERY = 1 << 26

Rows = Literal["text", "visual", "span", "sample"]  # what one row of an array stands for


@dataclass(frozen=True)
class ArraySpec:
    """One array of every shard: its folder name, what a row is, and how rows are stored."""

    name: str
    rows: Rows
    dtype: str  # as numpy names it: what is on disk
    width: int
    compressed: bool = False
    attributes: tuple[tuple[str, str], ...] = ()  # the logical dtype, column names: for human readers

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, uncompressed."""
        return np.dtype(self.dtype).itemsize * self.width


def zstd() -> Any:
    """The codec of compressed arrays: exponents shrink, mantissas are noise, so harder does not pay."""
    from numcodecs.zstd import Zstd  # type: ignore[import-untyped]

    return Zstd(level=LEVEL)


def metadata(spec: ArraySpec, rows: int, chunk_rows: int) -> dict[str, Any]:
    """The `zarr.json` of an array with `rows` rows in one shard of chunks of `chunk_rows`."""
    itemsize = np.dtype(spec.dtype).itemsize
    codecs: list[dict[str, Any]] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}
    ]
    if spec.compressed:
        codecs.append({"name": "zstd", "configuration": {"level": LEVEL, "checksum": False}})
    sharding = {
        "chunk_shape": [chunk_rows, spec.width],
        "codecs": codecs,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    shard_rows = max(1, -(-rows // chunk_rows)) * chunk_rows
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, spec.width],
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_rows, spec.width]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"rows": spec.rows, **dict(spec.attributes)},
        "dimension_names": [spec.rows, "channel"],
    }


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Threads that hash and sync while the caller writes on: all three let the interpreter go."""
    return ThreadPoolExecutor(3, thread_name_prefix="vlmdistill-write")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads stay behind in the parent


class HashedFile:
    """A file written once, front to back, hashed on the way and durable when closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=BUFFER)
        self._hash = blake3.blake3()
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self.bytes = 0

    def write(self, data: Any) -> None:
        """Append bytes or a contiguous array."""
        view = memoryview(data).cast("B")
        if len(view) < LARGE:
            self._file.write(view)
            self._hash.update(view)
        else:
            hashing = _helpers().submit(self._hash.update, view)
            try:
                self._file.write(view)
            finally:
                hashing.result()  # the caller may change its data once we return
            self._unsynced += len(view)
            self._sync_along()
        self.bytes += len(view)

    def _sync_along(self) -> None:
        """Start to force what is written to the disk, so that closing need not wait for all of it."""
        if self._unsynced >= SYNC_EVERY and (self._syncing is None or self._syncing.done()):
            self._wait()
            self._syncing = _helpers().submit(os.fdatasync, self._file.fileno())
            self._unsynced = 0

    def _wait(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.result()

    def close(self) -> tuple[int, str]:
        """Force it to the disk; (bytes, blake3)."""
        self._wait()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self.bytes, self._hash.hexdigest()

    def abort(self) -> None:
        """Close without a promise, also after `close`; what is buffered may not fit a full disk."""
        with contextlib.suppress(OSError):
            self._wait()
        with contextlib.suppress(OSError):
            self._file.close()


def write_file(path: Path, data: bytes) -> tuple[int, str]:
    """Write a whole durable file; (bytes, blake3)."""
    file = HashedFile(path)
    try:
        file.write(data)
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
        self._chunks: list[tuple[int, int]] = []
        self._pending: list[Array] = []  # rows of a compressed chunk that is not full yet
        self._codec: Any = zstd() if spec.compressed else None

    def append(self, rows: Array) -> int:
        """Add rows [n, width]; their xxh3."""
        rows = np.ascontiguousarray(rows)
        data = rows.data if len(rows) else b""
        if rows.nbytes < LARGE:
            checksum = xxhash.xxh3_64_intdigest(data)
            self._store(rows)
        else:
            hashing = _helpers().submit(xxhash.xxh3_64_intdigest, data)
            try:
                self._store(rows)
            finally:
                checksum = hashing.result()
        self.rows += len(rows)
        return checksum

    def _store(self, rows: Array) -> None:
        if self._codec is None:
            if len(rows):
                self._file.write(rows)
            return
        self._pending.append(rows)
        held = sum(len(part) for part in self._pending)
        if held >= CHUNK_ROWS:
            self._compress(held - held % CHUNK_ROWS)

    def _compress(self, rows: int) -> None:
        held = np.concatenate(self._pending)
        for start in range(0, rows, CHUNK_ROWS):
            packed = self._codec.encode(np.ascontiguousarray(held[start : start + CHUNK_ROWS]))
            self._chunks.append((self._file.bytes, len(packed)))
            self._file.write(packed)
        self._pending = [held[rows:].copy()]

    def close(self) -> dict[str, tuple[int, str]]:
        """Write what remains, the chunk index and the metadata: file name -> (bytes, blake3)."""
        chunk_rows = CHUNK_ROWS
        if self._codec is not None:
            tail = -self.rows % CHUNK_ROWS
            if tail:
                self._pending.append(np.zeros((tail, self.spec.width), self.spec.dtype))
                self._compress(CHUNK_ROWS)
        elif self.rows:
            # Chunks are cut evenly once the rows are known, so that hardly any row is padding.
            count = -(-self.rows // CHUNK_ROWS)
            chunk_rows = -(-self.rows // count)
            self._file.write(bytes((count * chunk_rows - self.rows) * self.spec.row_bytes))
            size = chunk_rows * self.spec.row_bytes
            self._chunks = [(i * size, size) for i in range(count)]
        files = {}
        if self.rows:
            index = b"".join(struct.pack("<QQ", *chunk) for chunk in self._chunks)
            self._file.write(index + struct.pack("<I", google_crc32c.value(index)))
            files[f"{self.spec.name}/{CHUNK_FILE}"] = self._file.close()
        else:  # Zarr reads a missing file as the fill value, here of no rows at all
            self._file.abort()
            (self._folder / CHUNK_FILE).unlink()
        described = json.dumps(metadata(self.spec, self.rows, chunk_rows)).encode()
        files[f"{self.spec.name}/zarr.json"] = write_file(self._folder / "zarr.json", described)
        return files

    def abort(self) -> None:
        """Close the file as it is."""
        self._file.abort()


@functools.lru_cache(maxsize=256)  # shards never change, so neither do their chunk indices
def _chunk_index(place: Place, name: str, size: int, chunks: int) -> Array:
    """Offset and length of each chunk, [chunks, 2]; StoreError when their crc32c does not match."""
    length = chunks * 16
    tail = place.extent(name, max(0, size - length - 4), length + 4).tobytes()
    if struct.pack("<I", google_crc32c.value(tail[:length])) != tail[length:]:
        raise StoreError(f"the chunk index of {place.url}/{name} is damaged: run `store verify`")
    return np.frombuffer(tail[:length], "<u8").astype(np.int64).reshape(chunks, 2)


def read_rows(
    place: Place, shard: str, spec: ArraySpec, span: range, total: int, size: int, out: Array | None = None
) -> tuple[Array, int]:
    """The rows of `span` [n, width] and their xxh3, of an array of `total` rows in a file of `size` bytes.

    They are read into `out` when it is given. StoreError when the file is too short or cannot be
    decompressed; equality is for the caller to check, by the xxh3 in the index.
    """
    if spec.compressed:
        rows = _decompressed(place, shard, spec, span, total, size)
    elif out is not None:
        state = xxhash.xxh3_64()
        name, start, _ = extent_of(shard, spec, span)
        place.fill(name, start, out.reshape(-1).view(np.uint8), state.update)
        return out, state.intdigest()
    else:
        rows = place.extent(*extent_of(shard, spec, span)).view(spec.dtype).reshape(len(span), spec.width)
    checksum = xxhash.xxh3_64_intdigest(rows.data if len(rows) else b"")
    if out is None:
        return rows, checksum
    out[:] = rows
    return out, checksum


def extent_of(shard: str, spec: ArraySpec, span: range) -> tuple[str, int, int]:
    """File, first byte and bytes of uncompressed rows."""
    return f"{shard}/{spec.name}/{CHUNK_FILE}", span.start * spec.row_bytes, len(span) * spec.row_bytes


def _decompressed(place: Place, shard: str, spec: ArraySpec, span: range, total: int, size: int) -> Array:
    if not len(span):
        return np.empty((0, spec.width), spec.dtype)
    name = f"{shard}/{spec.name}/{CHUNK_FILE}"
    first, last = span.start // CHUNK_ROWS, -(-span.stop // CHUNK_ROWS)
    chunks = _chunk_index(place, name, size, -(-total // CHUNK_ROWS))[first:last]
    begin = int(chunks[0, 0])
    data = place.extent(name, begin, int(chunks[-1].sum()) - begin)
    codec = zstd()
    try:
        parts = [codec.decode(data[at - begin : at - begin + n]) for at, n in chunks.tolist()]
    except (RuntimeError, ValueError) as error:
        raise StoreError(f"{place.url}/{name} is damaged: {error}. Run `store verify`") from error
    rows = np.frombuffer(b"".join(parts), spec.dtype).reshape(-1, spec.width)
    skip = span.start - first * CHUNK_ROWS
    return rows[skip : skip + len(span)]
