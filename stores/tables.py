"""The index of a shard and other small tables, as Arrow IPC files.

Writing uses pyarrow alone: its plain paths start no threads, so a process may fork around it.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmdistill.stores.commits import put_table
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import Record, damaged, digest, read_record
from vlmdistill.stores.place import Place, writing
from vlmdistill.stores.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    import polars as pl

INDEX = "index.arrow"
SPAN = pa.struct([("start", pa.int32()), ("length", pa.int32())])
ROW = "_row"  # suffix of the offsets: text_row, visual_row, span_row, sample_row
XXH3 = "xxh3."  # prefix of the checksums: xxh3.hidden.text
LOSS = "int8."  # prefix of what 8 bits lost of a sample: [summed squared error, summed squares]

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
WHOLE = 2**53  # up to here floats have all whole numbers
log = logging.getLogger("vlmdistill.stores")
ADDED = ("unit", "shard")  # columns that only the merged index has


def reserved(column: str) -> bool:
    """Whether a column name belongs to the index itself."""
    return column in CORE or column in ADDED or column.startswith((XXH3, LOSS))


def index_table(rows: Sequence[Mapping[str, Any]], arrays: Sequence[str]) -> pa.Table:
    """The index of a shard, one row per sample; StoreError when one cannot hold the meta of all."""
    columns: dict[str, pa.Array] = {}
    for name, kind in CORE.items():
        columns[name] = pa.array([row[name] for row in rows], kind)
    for name in arrays:
        columns[XXH3 + name] = pa.array([row[XXH3 + name] for row in rows], pa.uint64())
    for name in sorted({name for row in rows for name in row} - set(columns)):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
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


def to_arrow(table: pa.Table) -> bytes:
    """An Arrow IPC file of this table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.unify_dictionaries().combine_chunks())  # a file has one dictionary a column
    return bytes(sink.getvalue())


def read_arrow(place: Place, name: str, entry: Sequence[Any]) -> pa.Table:
    """Read an Arrow IPC file that a record names with (bytes, blake3); StoreError when it differs."""
    try:
        data = place.extent(name, 0, entry[0])
        if digest(data.data) != entry[1]:
            raise damaged(f"{place.url}/{name}")

        return pa.ipc.open_file(pa.py_buffer(data)).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(f"{place.url}/{name}", str(error)) from error


def write_table(place: Place, folder: str, name: str, table: pa.Table, facts: Record) -> None:
    """Keep a table under a name: a file named by its content, made to count by a record with `facts`."""
    data = to_arrow(table)
    entry = (len(data), digest(data))
    file = f"{folder}/{name}-{entry[1][:16]}.arrow"
    record = {**facts, "schema": SCHEMA_VERSION, "file": file, "entry": entry}
    with writing(place):
        put_table(place, file, data, record)


def read_table(place: Place, folder: str, name: str) -> tuple[Record, pa.Table]:
    """The record and the table kept under a name; FileNotFoundError when there is none."""
    record = read_record(place, f"{folder}/{name}.json")
    return record, read_arrow(place, record["file"], record["entry"])


def table_names(place: Place, folder: str) -> list[str]:
    """The names of the tables kept in a folder, sorted."""
    return [name.removesuffix(".json") for name in place.names(folder) if name.endswith(".json")]


def merge_index(frames: "Sequence[pl.DataFrame]", arrays: Sequence[str]) -> "pl.DataFrame":
    """One frame of all shards, sorted by key; of equal keys the one of the first unit by name."""
    import polars as pl

    if not frames:
        checksums = {XXH3 + name: pa.uint64() for name in arrays}
        empty = {**CORE, **checksums, **dict.fromkeys(ADDED, pa.string())}
        frame = pl.from_arrow(pa.schema(empty).empty_table())
        assert isinstance(frame, pl.DataFrame)
        return frame
    if found := unlike(frame.schema for frame in frames):
        name, one, other = found
        units = [_unit_with(frames[at], name) for at in (one, other)]
        kinds = [frames[at].schema[name] for at in (one, other)]
        raise StoreError(
            f"the meta column '{name}' is {kinds[0]} in unit {units[0]} and {kinds[1]} in unit {units[1]}: "
            f"remove the record of one of them, such as commits/{units[1]}.json, run `store gc --grace 0` "
            "and write that unit again, with the type of the other"
        )
    merged = pl.concat(frames, how="diagonal_relaxed")
    for name in [name for name, kind in merged.schema.items() if kind.is_float()]:
        for frame in [frame for frame in frames if frame.schema.get(name, pl.Null()).is_integer()]:
            if len(odd := frame.filter(~pl.col(name).is_between(-WHOLE, WHOLE))):
                what = f"the meta column '{name}' has whole numbers beyond 2^53 in unit {odd['unit'][0]}"
                log.warning(f"{what}, and fractions in others: their last digits are lost")
    return merged.sort("key", "unit").unique("key", keep="first", maintain_order=True)


def unlike(schemas: "Iterable[Mapping[str, pl.DataType]]") -> tuple[str, int, int] | None:
    """The first column whose types do not go together, and which two of the schemas have them."""
    seen: dict[str, dict[pl.DataType, int]] = {}
    for at, schema in enumerate(schemas):
        for name, kind in schema.items():
            kinds = seen.setdefault(name, {})
            for other, first in kinds.items():
                if not _alike(kind, other):
                    return name, first, at
            kinds.setdefault(kind, at)
    return None


def _alike(kind: "pl.DataType", other: "pl.DataType") -> bool:
    """Whether values of two types make one column as they are: equal, both numbers, or one of no values."""
    import polars as pl

    if isinstance(kind, pl.List) and isinstance(other, pl.List):
        return kind == other or pl.Null in (kind.inner, other.inner)
    return kind == other or pl.Null in (kind, other) or (kind.is_numeric() and other.is_numeric())


def _unit_with(frame: "pl.DataFrame", column: str) -> str:
    """The first unit that has values in a column, or the first."""
    units = frame.drop_nulls(column)["unit"]
    return str(units[0] if len(units) else frame["unit"][0])
