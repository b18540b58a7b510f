"""The index of a shard and other small tables, as Arrow IPC files.

Writing uses pyarrow alone: its plain paths start no threads, so a process may fork around it.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from vlmdistill.stores.backends.backend import Backend, writing
from vlmdistill.stores.commits import is_complete, note
from vlmdistill.stores.errors import RacedError, StoreError
from vlmdistill.stores.index.arrow import BATCH_ROWS, frame_of, read_arrow, write_arrow
from vlmdistill.stores.manifest import (
    KINDS,
    VIEWS,
    CacheRecord,
    Commit,
    TableRecord,
    ViewRecord,
    damaged,
    read_record,
    record_names,
    seal,
)
from vlmdistill.stores.retry import retried
from vlmdistill.stores.suggestions import did_you_mean

if TYPE_CHECKING:
    import polars as pl

SPAN = pa.struct([("start", pa.int32()), ("length", pa.int32())])
ROW = "_row"  # suffix of the offsets: text_row, visual_row, span_row, sample_row
XXH3 = "xxh3."  # prefix of the checksums: xxh3.hidden.text
LOSS = "int8."  # prefix of the losses of 8 bits: [summed squared error, summed squares]

CORE: Mapping[str, pa.DataType] = {
    "key": pa.string(),
    "dataset": pa.string(),
    "text_tokens": pa.int32(),
    "visual_tokens": pa.int32(),
    "response_tokens": pa.int32(),
    "spans": pa.list_(SPAN),
    "text_row": pa.int64(),
    "visual_row": pa.int64(),
    "span_row": pa.int64(),
    "sample_row": pa.int64(),
}
EXACT = 2**53  # up to here floats have all whole numbers
log = logging.getLogger("vlmdistill.stores")
T = TypeVar("T", bound=TableRecord)
ADDED = ("shard",)  # columns that only the merged index has


def reserved(column: str) -> bool:
    """Whether a column name belongs to the index itself."""
    return column in CORE or column in ADDED or column.startswith((XXH3, LOSS))


def index_table(rows: Sequence[Mapping[str, Any]], arrays: Sequence[str]) -> pa.Table:
    """The index of a shard, one row per sample; StoreError when one cannot hold the meta of all."""
    types = {**CORE, **{XXH3 + name: pa.uint64() for name in arrays}}
    columns: dict[str, pa.Array] = {}
    for name, kind in types.items():
        columns[name] = pa.array([row[name] for row in rows], kind)
    names = {name for row in rows for name in row}
    for name in sorted(names - columns.keys()):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise StoreError(
                f"the meta column '{name}' mixes types among samples: give it one type ({error})"
            ) from error
        except (OverflowError, UnicodeError) as error:
            raise StoreError(
                f"the meta column '{name}' cannot hold all values of the samples ({error}): whole numbers "
                "have 64 bits with their sign, text is Unicode without surrogates"
            ) from error
    return pa.table(columns)


@retried()
def write_table(
    backend: Backend,
    record: TableRecord,
    frame: "pl.DataFrame",
    unchanged: Callable[[], bool] | None = None,
) -> bool:
    """Write a table to a file named by its content, and its record, completed with that name.

    False, and nothing replaced, when `unchanged`, called just before the record is written, returns false.
    """
    name = f"{record.FOLDER}/{record.name}.json"
    with writing(backend):
        folder = backend.workspace()
        try:
            entry = write_arrow(folder / "table", frame)
            record = msgspec.structs.replace(
                record, file=record.file_of(entry), entry=entry
            )
            # Even if it is there: it may be damaged, or old enough for gc.
            backend.replace(record.file, folder / "table")
            if unchanged and not unchanged():
                return False
            backend.replace(name, seal(record))
            if not is_complete(backend, record):
                raise RacedError(
                    f"{backend.url}/{record.file} was removed while it was written: try again"
                )
            note(backend, name, record)
            return True
        finally:
            backend.release(folder)


def read_table(backend: Backend, kind: type[T], name: str) -> tuple[T, pa.Table]:
    """The record and the table kept under a name; FileNotFoundError when it is missing."""
    record = read_record(backend, f"{kind.FOLDER}/{name}.json", kind)
    return record, table_of(backend, record)


def table_of(backend: Backend, record: TableRecord) -> pa.Table:
    """The table that a record names; StoreError when it is damaged, or says two things of one sample."""
    table = read_arrow(backend, record.file, record.entry)
    if isinstance(record, CacheRecord):  # looked through by `merge_index`
        return table
    path = f"{backend.url}/{record.file}"
    keys = table["key"]
    if keys.null_count or pc.count_distinct(keys).as_py() < len(keys):
        raise damaged(path, "it lacks a key, or has one twice")
    if isinstance(record, ViewRecord):
        _check_view(path, record, table)
    return table


def _check_view(path: str, record: ViewRecord, table: pa.Table) -> None:
    """StoreError unless a table has the columns of a view and the numbers of its record."""
    types = {field.name: _small(field.type) for field in table.schema}
    reason = types.get("reason", pa.bool_())
    is_text = reason in (pa.string(), pa.null()) or pa.types.is_dictionary(reason)
    if len(types) > 2 or not is_text:
        raise damaged(path, "the columns of a view are key and, as text, reason")
    kept = table["reason"].null_count
    if (len(table), kept) != (record.rows, record.kept):
        raise damaged(
            path,
            f"its record says that it keeps {record.kept} of {record.rows} samples",
        )


def view_keys(backend: Backend, name: str) -> "pl.DataFrame":
    """The keys that a view keeps. Raises StoreError listing the existing views when there is no such view."""
    import polars as pl

    views = record_names(backend, VIEWS)
    if name not in views:  # which may be a path, and no name at all
        names = ", ".join(views) or "none yet: make one with `store filter`"
        near = did_you_mean(name, views)
        raise StoreError(f"{backend.url} has no view '{name}'{near}. Views: {names}")
    _, table = read_table(backend, ViewRecord, name)
    kept = frame_of(table).filter(pl.col("reason").is_null())
    return kept.select("key")


@functools.lru_cache
def check_columns(
    schema: bytes,
    arrays: tuple[str, ...],
    meta: tuple[str, ...] | None = None,
    losses: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
) -> None:
    """ValueError unless an index has the columns of every index, and of meta those that its record names.

    Without `meta` there is no record, and any further columns may be there. `schema` is serialized, so that
    it is looked up quickly: most shards have the same.
    """
    fields = pa.ipc.read_schema(pa.py_buffer(schema))
    types = {field.name: _small(field.type) for field in fields}
    wanted = {**CORE, **dict.fromkeys(added, pa.string())}
    wanted |= {XXH3 + name: pa.uint64() for name in arrays}
    wanted |= {LOSS + name: pa.list_(pa.float64()) for name in losses}
    for name, kind in wanted.items():
        if types.get(name) != kind:
            raise ValueError(
                f"its column {name} is {types.get(name, 'missing')}, not {kind}"
            )
    if meta is None:
        return
    for name in meta:
        if name not in types or reserved(name):
            raise ValueError(f"it has no column {name!r}, which its record names")
    for name in types:
        if name in wanted or name in meta:
            continue
        if name.startswith(LOSS) or not reserved(name):
            raise ValueError(
                f"it has a column {name!r}, which its record does not name"
            )


def _small(kind: pa.DataType) -> pa.DataType:
    """The type with offsets of 32 bits: a large table has offsets of 64."""
    if pa.types.is_large_list(kind):
        return pa.list_(kind.value_type)
    if pa.types.is_large_string(kind):
        return pa.string()
    return kind


def check_values(
    index: "pl.DataFrame", arrays: Sequence[str], commits: Iterable[Commit]
) -> None:
    """StoreError when a sample lacks a value of the index, or has an impossible one.

    The rows that it names must exist: the records of the shards, `commits`, say how many each has.
    """
    totals = _row_totals(commits)
    names = [*CORE, *(XXH3 + array for array in arrays)]
    wrong = _wrong_line(names)
    # A large index has not the memory for all lines at once.
    for lines in index.iter_slices(BATCH_ROWS):
        with_totals = lines.select("shard", *names).join(
            totals, on="shard", how="left", maintain_order="left"
        )
        refused = with_totals.filter(wrong)
        if len(refused):
            line = refused.row(0, named=True)
            raise _impossible_value(f"{line['key']} in {line['shard']}")
        spans = lines["spans"].rechunk().to_arrow().flatten()
        sides = [spans.field(number) for number in range(2)]
        if any(column.null_count for column in (spans, *sides)):
            raise _impossible_value("some key in some shard")


def _impossible_value(sample: str) -> StoreError:
    return damaged(
        "an index",
        f"of sample {sample} a value is missing, or cannot be: it names rows or tokens that are not there",
    )


def _row_totals(commits: Iterable[Commit]) -> "pl.DataFrame":
    """The rows of each kind that each shard has, as <kind>_rows."""
    import polars as pl

    rows_of_shard = {commit.shard: commit.rows for commit in commits}
    columns: dict[str, list[Any]] = {"shard": list(rows_of_shard)}
    types: dict[str, Any] = {"shard": pl.String}
    for kind in KINDS:
        columns[f"{kind}_rows"] = [rows[kind] for rows in rows_of_shard.values()]
        types[f"{kind}_rows"] = pl.Int64
    return pl.DataFrame(columns, types)


def _wrong_line(names: Sequence[str]) -> "pl.Expr":
    """Whether a line, joined with `_row_totals`, lacks one of these values or contradicts itself."""
    import polars as pl

    integers = [name for name, kind in CORE.items() if pa.types.is_integer(kind)]
    missing = [pl.col(name).is_null() for name in names]
    negative = [pl.col(name) < 0 for name in integers]
    counts = {
        "text": pl.col("text_tokens"),
        "visual": pl.col("visual_tokens"),
        "span": pl.col("spans").list.len().cast(pl.Int64),
        "sample": pl.lit(1),
    }
    beyond = [
        pl.col(kind + ROW) > pl.col(f"{kind}_rows") - count
        for kind, count in counts.items()
    ]
    length = pl.element().struct.field("length").cast(pl.Int64)
    lengths = pl.col("spans").list.eval(length)
    untrue_spans = (
        lengths.list.sum() != pl.col("visual_tokens"),
        lengths.list.min() < 1,
    )
    return pl.any_horizontal(*missing, *negative, *beyond, *untrue_spans)


def merge_index(frames: "list[pl.DataFrame]", arrays: Sequence[str]) -> "pl.DataFrame":
    """One frame of all shards, sorted by key; of equal keys the one of the first shard by name.

    `frames` is empty afterwards, so that their memory can be freed column by column.
    """
    import polars as pl

    if not frames:
        checksums = {XXH3 + name: pa.uint64() for name in arrays}
        empty = {**CORE, **checksums, **dict.fromkeys(ADDED, pa.string())}
        return frame_of(pa.schema(empty).empty_table())
    _require_alike(frames)
    headers = [frame.clear() for frame in frames]
    for name in pl.concat(headers, how="diagonal_relaxed").schema:
        _warn_of_rounding(name, frames)
    merged = pl.concat(frames, how="diagonal_relaxed", rechunk=False)
    frames.clear()  # with two of them a large index would not fit
    keys = merged["key"]
    ascending = (keys.shift(-1) > keys).sum()
    if ascending == len(keys) - 1:  # as it comes from the cache
        return merged
    del keys
    order = _order(merged)
    columns = []
    for name in merged.columns:
        columns.append(merged.drop_in_place(name).rechunk().gather(order))
        pa.default_memory_pool().release_unused()
    return pl.DataFrame(columns)


def _order(merged: "pl.DataFrame") -> "pl.Series":
    """The numbers of the lines to keep, sorted by key."""
    numbered = merged.select("key").with_row_index("number").sort("key")
    if (numbered["key"].shift(-1) == numbered["key"]).any():
        numbered = merged.select("key", "shard").with_row_index("number")
        numbered = numbered.sort("key", "shard")
        numbered = numbered.unique("key", keep="first", maintain_order=True)
    return numbered["number"]


def _require_alike(frames: "Sequence[pl.DataFrame]") -> None:
    """StoreError when a column has types in two frames that do not go together."""
    conflict = unlike(frame.schema for frame in frames)
    if conflict is None:
        return
    name = conflict.column
    first, second = frames[conflict.first], frames[conflict.second]
    first_shard, second_shard = _shard_with(first, name), _shard_with(second, name)
    raise StoreError(
        f"the meta column '{name}' is {first.schema[name]} in shard {first_shard} and "
        f"{second.schema[name]} in shard {second_shard}: remove the record of one of them, such as "
        f"commits/{second_shard}.json, and its copy in ledger/, run `store gc --grace 0` and write that "
        "shard again, with the type of the other"
    )


def _warn_of_rounding(name: str, frames: "Sequence[pl.DataFrame]") -> None:
    """Log whole numbers of a column that become floats with fewer digits, as others have fractions."""
    import polars as pl

    types = [frame.schema.get(name, pl.Null()) for frame in frames]
    if not any(kind.is_float() for kind in types):
        return
    for frame, kind in zip(frames, types, strict=True):
        if not kind.is_integer():
            continue
        inexact = frame.filter(~pl.col(name).is_between(-EXACT, EXACT))
        if len(inexact):
            log.warning(
                "the meta column '%s' has whole numbers beyond 2^53 in shard %s, and fractions in others: "
                "their last digits are lost",
                name,
                inexact["shard"][0],
            )


@dataclass(frozen=True)
class Conflict:
    """A column whose types in two schemas do not go together, and the numbers of these schemas."""

    column: str
    first: int
    second: int


def unlike(schemas: "Iterable[Mapping[str, pl.DataType]]") -> Conflict | None:
    """The first column whose types do not go together."""
    seen: dict[str, dict[pl.DataType, int]] = {}
    for number, schema in enumerate(schemas):
        for name, kind in schema.items():
            kinds = seen.setdefault(name, {})
            for other, first in kinds.items():
                if not _alike(kind, other):
                    return Conflict(name, first, number)
            kinds.setdefault(kind, number)
    return None


def _alike(kind: "pl.DataType", other: "pl.DataType") -> bool:
    """Whether values of two types make one column as they are: equal, both numbers, or one of no values."""
    import polars as pl

    if isinstance(kind, pl.List) and isinstance(other, pl.List):
        return kind == other or pl.Null in (kind.inner, other.inner)
    if kind == other or pl.Null in (kind, other):
        return True
    return kind.is_numeric() and other.is_numeric()


def _shard_with(frame: "pl.DataFrame", column: str) -> str:
    """The first shard that has values in a column, or the first."""
    shards = frame.drop_nulls(column)["shard"]
    return str(shards[0] if len(shards) else frame["shard"][0])
