"""Checks of what records name: a file against its checksum, a shard against its index.

A shard whose bytes match its record may still be unreadable, when a faulty writer made it. So its
index is compared with the record, its arrays' descriptions with the store's layout, and every sample's rows
with the checksums that a reader compares: what passes here is what `Store.read` returns.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    dead one: neither is ever read, and gc removes what a writer left. A `note` is no fault.
    """

    kind: Kind
    name: str
    detail: str


def failed(name: str, error: Exception) -> Finding:
    """Classify a read error as a finding."""
    cause = (
        error.__cause__ if isinstance(error, StoreError) and error.__cause__ else error
    )
    if isinstance(cause, PermissionError):
        return Finding("unreadable", name, "it cannot be read: permission denied")
    if isinstance(cause, FileNotFoundError):
        return Finding("missing", name, "it is gone")
    if isinstance(cause, OSError) and not isinstance(
        cause, IsADirectoryError | NotADirectoryError
    ):
        return Finding("unreadable", name, f"it cannot be read: {one_line(cause)}")
    return Finding("damaged", name, one_line(error))


class Front:
    """A file that is read once, from its first byte to its last, and hashed on the way."""

    def __init__(self, backend: Backend, name: str, size: int) -> None:
        self._backend, self._name, self._size = backend, name, size
        self._at, self._hash = 0, blake3.blake3()

    def parts(self, length: int) -> Iterator[memoryview]:
        """The next bytes, as far as the file goes."""
        end = min(self._at + length, self._size)
        for data in self._backend.blocks(self._name, self._at, end):
            self._hash.update(data)
            self._at += len(data)
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
        self._backend, self._sizes, self._layout = backend, sizes, layout

    def file(self, name: str, entry: Entry) -> list[Finding]:
        """Compare a file with what its record says of it."""
        try:
            if odd := self._sized(name, entry):
                return [odd]
            same = self._backend.digest(name, entry[0]) == entry[1]
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        return [] if same else [Finding("damaged", name, "its checksum does not match")]

    def _sized(self, name: str, entry: Entry) -> Finding | None:
        has = self._sizes.get(name)
        if has != entry[0]:
            has = self._backend.size(name)  # it may have come since all was listed
        if has is None:
            return Finding("missing", name, f"{entry[0]} bytes are gone")
        if has != entry[0]:
            return Finding(
                "damaged", name, f"it has {has} bytes, its record says {entry[0]}"
            )
        return None

    def table(self, record: TableRecord) -> list[Finding]:
        """Compare a table with its record, and look whether it is one of its kind."""
        found = self.file(record.file, record.entry)
        try:
            if not found:
                table_of(self._backend, record)
        except (OSError, StoreError) as error:
            return [failed(record.file, error)]
        return found

    def head(self, store: StoreRecord) -> list[Finding]:
        """Compare the frozen head with what the store's record says of it."""
        name = store.head.file
        try:
            if odd := self._sized(name, store.head.entry):
                return [odd]
            read_head(self._backend, store.head, store.info.hidden_size)
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        return []

    def shard(self, record: Commit) -> tuple[list[Finding], pa.Table | None]:
        """Compare a shard with its record, and its files with each other; also its index if it is good."""
        specs = (
            {f"{spec.name}/{CHUNK_FILE}": spec for spec in self._layout.arrays}
            if self._layout
            else {}
        )
        findings = self._files(
            record, [name for name in record.files if name not in specs]
        )
        if self._layout and (why := self._layout.misfit(record.rows, record.files)):
            findings.append(Finding("damaged", commit_name(record.shard), why))
        if not findings:
            findings += self._group(f"{record.named}/{GROUP}")
        index, table, good = f"{record.named}/{INDEX}", None, None
        if self._layout and not any(one.name == index for one in findings):
            try:
                table = read_arrow(self._backend, index, record.files[INDEX])
                odd = [
                    Finding("damaged", index, why)
                    for why in _odd_index(self._layout, record, table)
                ]
                good = None if odd else table
                findings += odd
            except (OSError, StoreError) as error:
                findings.append(failed(index, error))
        if table is None or findings:
            return findings + self._files(
                record, specs.keys() & record.files.keys()
            ), good
        for spec in specs.values():
            findings += self._array(record, spec, table)
        if self._layout and all(one.kind == "note" for one in findings):
            findings += _check_tokens(self._backend, record, table, self._layout)
        return findings, good

    def _group(self, name: str) -> list[Finding]:
        """Open the description of a shard as zarr does."""
        try:
            _opened(zarr.open_group, self._backend, name)
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        return []

    def _files(self, record: Commit, names: Iterable[str]) -> list[Finding]:
        return [
            one
            for name in names
            for one in self.file(f"{record.named}/{name}", record.files[name])
        ]

    def _array(self, record: Commit, spec: ArraySpec, table: pa.Table) -> list[Finding]:
        """Compare an array with its description, and each sample's rows with their checksum in the index."""
        name, total = f"{record.named}/{spec.name}/{CHUNK_FILE}", record.rows[spec.rows]
        sizes = (_counts(table)[spec.rows] * spec.row_bytes).tolist()
        checksums = table[XXH3 + spec.name].to_pylist()
        backend, strange = self._backend, set[int]()
        try:
            _require_described(
                backend, f"{record.named}/{spec.name}/{GROUP}", spec, total
            )
            if not total:
                odd = _first_odd(iter(()), sizes, checksums)
            else:
                entry = record.files[f"{spec.name}/{CHUNK_FILE}"]
                if wrong := self._sized(name, entry):
                    return [wrong]
                front = Front(backend, name, entry[0])
                parts = _watched(front.parts(total * spec.row_bytes), spec, strange)
                odd = _first_odd(parts, sizes, checksums)
                if front.checksum() != entry[1]:
                    return [Finding("damaged", name, "its checksum does not match")]
                tail = chunk_index(spec, total)
                if (
                    backend.read_range(name, entry[0] - len(tail), len(tail)).tobytes()
                    != tail
                ):
                    raise StoreError("its chunk index does not say where its rows are")
        except (OSError, StoreError) as error:
            return [failed(name, error)]
        if odd is not None:
            return [
                Finding(
                    "damaged",
                    name,
                    f"sample {table['key'][odd]} has another checksum in the index",
                )
            ]
        if not strange:
            return []
        first = table[f"{spec.rows}_row"].to_numpy()
        samples = np.unique(np.searchsorted(first, sorted(strange), side="right") - 1)
        what = f"{len(strange)} rows of {len(samples)} samples, the first {table['key'][samples[0]]}, are not"
        return [
            Finding(
                "note",
                name,
                f"{what} finite: training on them fails, leave them out with a view",
            )
        ]


def _odd_index(layout: Layout, record: Commit, table: pa.Table) -> Iterator[str]:
    """In what an index does not fit its record or the layout."""
    arrays = tuple(spec.name for spec in layout.arrays)
    try:
        check_columns(
            bytes(table.schema.serialize()), arrays, record.meta, tuple(record.losses)
        )
    except ValueError as error:
        yield one_line(error)
        return
    needed = (
        *CORE,
        *(XXH3 + name for name in arrays),
        *(LOSS + name for name in record.losses),
    )
    if empty := [name for name in needed if table[name].null_count]:
        yield f"its column {empty[0]} lacks values"
        return
    if any(_spans(table).field(name).null_count for name in ("start", "length")):
        yield "a span lacks its start or its length"
        return
    eights = {name for name, encoding in layout.encoding.items() if encoding == "int8"}
    if record.losses.keys() != eights:
        yield f"its record has losses of {sorted(record.losses)}, the store keeps {sorted(eights)} in 8 bits"
    for name, sums in record.losses.items():
        if (_lengths(table[LOSS + name]) != 2).any():
            yield "what 8 bits lost of a sample is not two numbers"
            continue
        each_N2 = (
            table[LOSS + name]
            .combine_chunks()
            .flatten()
            .to_numpy(zero_copy_only=False)
            .reshape(-1, 2)
        )
        if (
            not np.allclose(each_N2.sum(axis=0), sums, rtol=1e-6, atol=0)
            or not np.isfinite(sums).all()
        ):
            yield f"its record says that 8 bits lost {list(sums)} of {name}, its samples say another number"
    if len(table["key"].unique()) != len(table):
        yield "a key is there twice"
    for kind, count_N in _counts(table).items():
        row_N = table[f"{kind}_row"].to_numpy()
        odd = np.flatnonzero((count_N < 0) | (row_N != np.cumsum(count_N) - count_N))
        if len(odd):
            yield f"sample {table['key'][odd[0]]}: its {kind} rows do not follow the sample before"
        elif int(count_N.sum()) != record.rows[kind]:
            yield f"its samples have {count_N.sum()} {kind} rows, its record says {record.rows[kind]}"


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
    found: Mapping[str, Any] = _opened(zarr.open_array, backend, name)
    for fact in ("rows", "dtype"):
        if found["attributes"].get(fact) != wanted["attributes"].get(fact):
            raise StoreError(f"the attribute {fact} in {name} does not fit {spec.name}")
    for member, value in _read_by_zarr(
        zarr.open_array, json.dumps(wanted).encode()
    ).items():
        if member not in ("attributes", "dimension_names") and found[member] != value:
            raise StoreError(
                f"the {member} in {name} does not fit {spec.name} with {total} rows"
            )


def _opened(
    open_node: Callable[..., Any], backend: Backend, name: str
) -> Mapping[str, Any]:
    """What zarr reads in a `zarr.json`; StoreError when it does not open it."""
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
    at = 0
    for part in parts:
        rows.update((at + not_finite(spec, part)) // spec.width)
        at += len(part) // np.dtype(spec.dtype).itemsize
        yield part


def _first_odd(
    parts: Iterator[memoryview], sizes: Sequence[int], checksums: Sequence[int]
) -> int | None:
    """The first sample whose rows, one after the other, have not the checksum of the index."""
    pairs = zip(_checksums(parts, sizes), checksums, strict=True)
    return next(
        (at for at, (found, wanted) in enumerate(pairs) if found != wanted), None
    )


def _checksums(parts: Iterator[memoryview], sizes: Iterable[int]) -> Iterator[int]:
    """The xxh3 of each next so many bytes."""
    rest = memoryview(b"")
    for size in sizes:
        if size <= len(rest):
            yield xxhash.xxh3_64_intdigest(rest[:size])
            rest = rest[size:]
            continue
        state = xxhash.xxh3_64()
        while size:
            if not rest and not (rest := next(parts, rest)):
                raise StoreError("it ends before its last row")
            state.update(rest[:size])
            size, rest = max(0, size - len(rest)), rest[size:]
        yield state.intdigest()


def _check_tokens(
    backend: Backend, record: Commit, table: pa.Table, layout: Layout
) -> Iterator[Finding]:
    """Samples with tokens that the target cannot have, or that make no sequence or another number."""
    index, total = f"{record.named}/{INDEX}", record.rows["text"]
    tokens_T4 = read_rows(backend, record.named, TOKENS, range(total))[0]
    columns = [
        "key",
        "text_row",
        "text_tokens",
        "visual_tokens",
        "response_tokens",
        "spans",
    ]
    for row in table.select(columns).to_pylist():
        mine_T4 = tokens_T4[row["text_row"] : row["text_row"] + row["text_tokens"]]
        spans = [(span["start"], span["length"]) for span in row["spans"]]
        why = layout.unknown(mine_T4[:, 0], mine_T4[:, 2]) or untiled(
            mine_T4[:, 1], spans
        )
        if not why and sum(length for _, length in spans) != row["visual_tokens"]:
            why = (
                f"it has {row['visual_tokens']} visual tokens, its spans another number"
            )
        if not why and int(mine_T4[:, 3].sum()) != row["response_tokens"]:
            why = f"it has {row['response_tokens']} response tokens, its tokens say another number"
        if why:
            yield Finding("damaged", index, f"sample {row['key']}: {why}")


def _spans(table: pa.Table) -> pa.StructArray:
    return table["spans"].combine_chunks().flatten()
