"""Checks of the files of records: a file against its checksum, a shard against its index.

A shard whose bytes match its record may still be unreadable, when a faulty writer made it. So its
index is compared with the record, its arrays' descriptions with the store's layout, and every sample's rows
with the checksums that a reader compares: samples that pass here are read by `Store.read`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import blake3
import numpy as np
import pyarrow as pa
import xxhash
import zarr
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from vlmdistill.stores.arrays import (
    ArraySpec,
    chunk_index,
    metadata,
    not_finite,
    read_rows,
)
from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError, one_line
from vlmdistill.stores.heads import read_head
from vlmdistill.stores.index.arrow import read_arrow
from vlmdistill.stores.index.tables import CORE, LOSS, XXH3, check_columns, table_of
from vlmdistill.stores.layout import TOKENS, Layout, untiled
from vlmdistill.stores.manifest import (
    GROUP,
    INDEX,
    Commit,
    Entry,
    StoreRecord,
    TableRecord,
    commit_name,
)
from vlmdistill.stores.schema import CHUNK_FILE, Array, Rows

MOST = 1 << 16  # bytes of a description
Kind = Literal["damaged", "missing", "unreadable", "orphan", "unfinished", "note"]


@dataclass(frozen=True)
class Finding:
    """One file that is not as it should be.

    `damaged` and `missing` files are named by a record, or are records themselves; `unreadable` ones could
    not be looked at. `orphan` files are named by none and `unfinished` ones belong to a writer, perhaps a
    dead one: neither is ever read, and gc removes those of writers. A `note` is no fault.
    """

    kind: Kind
    name: str
    detail: str


def failed(name: str, error: Exception) -> Finding:
    """Classify a read error as a finding."""
    cause: BaseException = error
    if isinstance(error, StoreError) and error.__cause__:
        cause = error.__cause__
    if isinstance(cause, PermissionError):
        return Finding("unreadable", name, "it cannot be read: permission denied")
    if isinstance(cause, FileNotFoundError):
        return Finding("missing", name, "it is gone")
    wrong_kind = isinstance(cause, IsADirectoryError | NotADirectoryError)
    if isinstance(cause, OSError) and not wrong_kind:
        return Finding("unreadable", name, f"it cannot be read: {one_line(cause)}")
    return Finding("damaged", name, one_line(error))


class HashedReader:
    """A file that is read once, from its first byte to its last, and hashed on the way."""

    def __init__(self, backend: Backend, name: str, size: int) -> None:
        self._backend = backend
        self._name = name
        self._size = size
        self._position = 0
        self._hash = blake3.blake3()

    def parts(self, length: int) -> Iterator[memoryview]:
        """The next bytes, as far as the file goes."""
        end = min(self._position + length, self._size)
        for data in self._backend.blocks(self._name, self._position, end):
            self._hash.update(data)
            self._position += len(data)
            yield data

    def checksum(self) -> str:
        """The blake3 of the whole file."""
        for _ in self.parts(self._size):
            pass
        return self._hash.hexdigest()


class StoreChecks:
    """Compares files with their records, in a store whose files were listed with these sizes.

    Without a layout, as where `store.json` is damaged, shards are compared with their records alone.
    """

    def __init__(
        self, backend: Backend, sizes: Mapping[str, int], layout: Layout | None
    ) -> None:
        self._backend = backend
        self._sizes = sizes
        self._layout = layout

    def file(self, name: str, entry: Entry) -> list[Finding]:
        """Compare a file with the size and checksum of its record."""
        try:
            wrong = self._wrong_size(name, entry)
            if wrong:
                return [wrong]
            same = self._backend.digest(name, entry[0]) == entry[1]
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        return [] if same else [Finding("damaged", name, "its checksum does not match")]

    def _wrong_size(self, name: str, entry: Entry) -> Finding | None:
        size = self._sizes.get(name)
        if size != entry[0]:
            size = self._backend.size(name)  # it may have come since all was listed
        if size is None:
            return Finding("missing", name, f"{entry[0]} bytes are gone")
        if size != entry[0]:
            why = f"it has {size} bytes, its record says {entry[0]}"
            return Finding("damaged", name, why)
        return None

    def table(self, record: TableRecord) -> list[Finding]:
        """Compare a table with its record, and check that it is one of its kind."""
        findings = self.file(record.file, record.entry)
        if findings:
            return findings
        try:
            table_of(self._backend, record)
        except (OSError, StoreError) as error:
            return [failed(record.file, error)]
        return []

    def head(self, store: StoreRecord) -> list[Finding]:
        """Compare the frozen head with the store's record."""
        name = store.head.file
        try:
            wrong = self._wrong_size(name, store.head.entry)
            if wrong:
                return [wrong]
            read_head(self._backend, store.head, store.info.hidden_size)
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        return []

    def shard(self, record: Commit) -> tuple[list[Finding], pa.Table | None]:
        """Compare a shard with its record, and its files with each other; also returns a good index."""
        specs = self._layout.arrays if self._layout else ()
        spec_of = {f"{spec.name}/{CHUNK_FILE}": spec for spec in specs}
        others = [name for name in record.files if name not in spec_of]
        findings = self._files(record, others)
        misfit = (
            self._layout.misfit(record.rows, record.files) if self._layout else None
        )
        if misfit:
            findings.append(Finding("damaged", commit_name(record.shard), misfit))
        if not findings:
            findings += self._group(f"{record.path}/{GROUP}")
        index = _CheckedIndex()
        if not any(finding.name == f"{record.path}/{INDEX}" for finding in findings):
            index = self._index(record)
            findings += index.findings

        # The rows of arrays can be compared only with an index that fits.
        if index.table is None or findings:
            findings += self._files(record, spec_of.keys() & record.files.keys())
            return findings, index.good
        for spec in specs:
            findings += self._array(record, spec, index.table)
        only_notes = all(finding.kind == "note" for finding in findings)
        if self._layout and only_notes:
            findings += _check_tokens(self._backend, record, index.table, self._layout)
        return findings, index.good

    def _index(self, record: Commit) -> "_CheckedIndex":
        """Read the index of a shard, and compare it with the record."""
        if not self._layout:
            return _CheckedIndex()
        name = f"{record.path}/{INDEX}"
        try:
            table = read_arrow(self._backend, name, record.files[INDEX])
            faults = list(_index_faults(self._layout, record, table))
        except (OSError, StoreError) as error:
            return _CheckedIndex(findings=[failed(name, error)])
        return _CheckedIndex(
            table, [Finding("damaged", name, fault) for fault in faults]
        )

    def _group(self, name: str) -> list[Finding]:
        """Open the description of a shard as zarr does."""
        try:
            _opened(zarr.open_group, self._backend, name)
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        return []

    def _files(self, record: Commit, names: Iterable[str]) -> list[Finding]:
        findings = []
        for name in names:
            findings += self.file(f"{record.path}/{name}", record.files[name])
        return findings

    def _array(self, record: Commit, spec: ArraySpec, table: pa.Table) -> list[Finding]:
        """Compare an array with its description, and each sample's rows with their checksum in the index."""
        name = f"{record.path}/{spec.name}/{CHUNK_FILE}"
        total = record.rows[spec.rows]
        sizes = (_counts(table)[spec.rows] * spec.row_bytes).tolist()
        checksums = table[XXH3 + spec.name].to_pylist()
        not_finite_rows = set[int]()
        try:
            description = f"{record.path}/{spec.name}/{GROUP}"
            _require_described(self._backend, description, spec, total)
            if not total:
                differing = _first_differing(iter(()), sizes, checksums)
            else:
                entry = record.files[f"{spec.name}/{CHUNK_FILE}"]
                wrong = self._wrong_size(name, entry)
                if wrong:
                    return [wrong]
                reader = HashedReader(self._backend, name, entry[0])
                blocks = reader.parts(total * spec.row_bytes)
                watched = _watched(blocks, spec, not_finite_rows)
                differing = _first_differing(watched, sizes, checksums)
                if reader.checksum() != entry[1]:
                    return [Finding("damaged", name, "its checksum does not match")]
                self._require_chunk_index(name, spec, total, entry[0])
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        if differing is not None:
            key = table["key"][differing]
            why = f"sample {key} has another checksum in the index"
            return [Finding("damaged", name, why)]
        if not_finite_rows:
            return [_note_not_finite(name, spec, table, not_finite_rows)]
        return []

    def _require_chunk_index(
        self, name: str, spec: ArraySpec, total: int, size: int
    ) -> None:
        """StoreError unless the file of an array ends with the chunk index of `total` rows."""
        expected = chunk_index(spec, total)
        start = size - len(expected)
        tail = self._backend.read_range(name, start, len(expected))
        if tail.tobytes() != expected:
            raise StoreError("its chunk index does not say where its rows are")


@dataclass(frozen=True)
class _CheckedIndex:
    """The index of a shard, None when it cannot be read, and its faults."""

    table: pa.Table | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def good(self) -> pa.Table | None:
        """The index, if it has no fault."""
        return None if self.findings else self.table


def _note_not_finite(
    name: str, spec: ArraySpec, table: pa.Table, rows: set[int]
) -> Finding:
    first_row = table[f"{spec.rows}_row"].to_numpy()
    numbers = np.searchsorted(first_row, sorted(rows), side="right") - 1
    samples = np.unique(numbers)
    detail = (
        f"{len(rows)} rows of {len(samples)} samples, the first {table['key'][samples[0]]}, are not finite: "
        "training on them fails, leave them out with a view"
    )
    return Finding("note", name, detail)


def _index_faults(layout: Layout, record: Commit, table: pa.Table) -> Iterator[str]:
    """In which ways an index does not fit its record or the layout."""
    arrays = tuple(spec.name for spec in layout.arrays)
    losses = tuple(record.losses)
    schema = bytes(table.schema.serialize())
    try:
        check_columns(schema, arrays, record.meta, losses)
    except ValueError as error:
        yield one_line(error)
        return
    checksums = [XXH3 + name for name in arrays]
    for name in (*CORE, *checksums, *(LOSS + name for name in losses)):
        if table[name].null_count:
            yield f"its column {name} lacks values"
            return
    if any(_spans(table).field(name).null_count for name in ("start", "length")):
        yield "a span lacks its start or its length"
        return
    yield from _loss_faults(layout, record, table)
    if len(table["key"].unique()) != len(table):
        yield "a key is there twice"
    for kind, count_N in _counts(table).items():
        row_N = table[f"{kind}_row"].to_numpy()
        wrong = (count_N < 0) | (row_N != np.cumsum(count_N) - count_N)
        total = int(count_N.sum())
        if wrong.any():
            key = table["key"][np.argmax(wrong)]
            yield f"sample {key}: its {kind} rows do not follow the sample before"
        elif total != record.rows[kind]:
            yield f"its samples have {total} {kind} rows, its record says {record.rows[kind]}"


def _loss_faults(layout: Layout, record: Commit, table: pa.Table) -> Iterator[str]:
    """In which ways the losses of 8-bit features do not fit the layout or the samples."""
    int8 = {name for name, encoding in layout.encoding.items() if encoding == "int8"}
    if record.losses.keys() != int8:
        yield f"its record has losses of {sorted(record.losses)}, the store keeps {sorted(int8)} in 8 bits"
    for name, sums in record.losses.items():
        column = table[LOSS + name]
        if (_lengths(column) != 2).any():
            yield "the losses of a sample in 8 bits are not two numbers"
            continue
        values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        sums_of_samples = values.reshape(-1, 2).sum(axis=0)
        equal = np.allclose(sums_of_samples, sums, rtol=1e-6, atol=0)
        if not equal or not np.isfinite(sums).all():
            yield f"its record says that 8 bits lost {list(sums)} of {name}, its samples say another number"


def _lengths(lists: pa.ChunkedArray) -> Array:
    lengths: Array = (
        lists.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    )
    return lengths.astype(np.int64)


def _counts(table: pa.Table) -> dict[Rows, Array]:
    """How many rows each sample has of every kind."""
    return {
        "text": table["text_tokens"].to_numpy().astype(np.int64),
        "visual": table["visual_tokens"].to_numpy().astype(np.int64),
        "span": _lengths(table["spans"]),
        "sample": np.ones(len(table), np.int64),
    }


def _require_described(
    backend: Backend, name: str, spec: ArraySpec, total: int
) -> None:
    """StoreError when zarr does not read a `zarr.json` as the array that the layout has."""
    wanted = metadata(spec, total)
    facts: Mapping[str, Any] = _opened(zarr.open_array, backend, name)
    for attribute in ("rows", "dtype"):
        if facts["attributes"].get(attribute) != wanted["attributes"].get(attribute):
            raise StoreError(
                f"the attribute {attribute} in {name} does not fit {spec.name}"
            )
    expected = _read_by_zarr(zarr.open_array, json.dumps(wanted).encode())
    for member, value in expected.items():
        if member in ("attributes", "dimension_names"):
            continue
        if facts[member] != value:
            raise StoreError(
                f"the {member} in {name} does not fit {spec.name} with {total} rows"
            )


def _opened(
    open_node: Callable[..., Any], backend: Backend, name: str
) -> Mapping[str, Any]:
    """The metadata that zarr reads in a `zarr.json`; StoreError when it does not open it."""
    try:
        return _read_by_zarr(open_node, backend.read(name, MOST))
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        Warning,
    ) as error:
        raise StoreError(f"zarr cannot open {name} ({one_line(error)})") from error


def _read_by_zarr(open_node: Callable[..., Any], data: bytes) -> Mapping[str, Any]:
    node = open_node(MemoryStore({GROUP: Buffer.from_bytes(data)}), mode="r")
    facts: Mapping[str, Any] = node.metadata.to_dict()
    return facts


def _watched(
    parts: Iterator[memoryview], spec: ArraySpec, rows: set[int]
) -> Iterator[memoryview]:
    """The parts of an array; `rows` gains the numbers of rows that are not finite."""
    itemsize = np.dtype(spec.dtype).itemsize
    values = 0
    for part in parts:
        rows.update((values + not_finite(spec, part)) // spec.width)
        values += len(part) // itemsize
        yield part


def _first_differing(
    parts: Iterator[memoryview], sizes: Sequence[int], checksums: Sequence[int]
) -> int | None:
    """The number of the first sample whose rows, one after the other, have not the checksum of the index."""
    pairs = zip(_checksums(parts, sizes), checksums, strict=True)
    for number, (checksum, expected) in enumerate(pairs):
        if checksum != expected:
            return number
    return None


def _checksums(parts: Iterator[memoryview], sizes: Iterable[int]) -> Iterator[int]:
    """The xxh3 of the next bytes, of each size in turn."""
    rest = memoryview(b"")
    for size in sizes:
        if size <= len(rest):
            yield xxhash.xxh3_64_intdigest(rest[:size])
            rest = rest[size:]
            continue
        state = xxhash.xxh3_64()
        missing = size
        while missing:
            rest = rest or next(parts, rest)
            if not rest:
                raise StoreError("it ends before its last row")
            state.update(rest[:missing])
            used = min(missing, len(rest))
            missing -= used
            rest = rest[used:]
        yield state.intdigest()


def _check_tokens(
    backend: Backend, record: Commit, table: pa.Table, layout: Layout
) -> Iterator[Finding]:
    """Samples whose tokens no target can have, or do not fit their line of the index."""
    total = record.rows["text"]
    tokens_T4, _ = read_rows(backend, record.path, TOKENS, range(total))
    counts = ("text_tokens", "visual_tokens", "response_tokens")
    columns = ["key", "text_row", *counts, "spans"]
    for line in table.select(columns).to_pylist():
        start = line["text_row"]
        fault = _token_fault(
            layout, line, tokens_T4[start : start + line["text_tokens"]]
        )
        if fault:
            index = f"{record.path}/{INDEX}"
            yield Finding("damaged", index, f"sample {line['key']}: {fault}")


def _token_fault(
    layout: Layout, line: Mapping[str, Any], tokens_T4: Array
) -> str | None:
    ids_T, position_T, rope_T, response_T = tokens_T4.T
    spans = [(span["start"], span["length"]) for span in line["spans"]]
    fault = layout.impossible_tokens(ids_T, rope_T) or untiled(position_T, spans)
    if fault:
        return fault
    if sum(length for _, length in spans) != line["visual_tokens"]:
        return f"it has {line['visual_tokens']} visual tokens, its spans another number"
    if int(response_T.sum()) != line["response_tokens"]:
        return f"it has {line['response_tokens']} response tokens, its tokens say another number"
    return None


def _spans(table: pa.Table) -> pa.StructArray:
    return table["spans"].combine_chunks().flatten()
