"""Rows of Parquet files and of other Arrow tables."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vlmdistill.pipelines.data.prompts.json_rows import loads
from vlmdistill.pipelines.data.prompts.row import MOST_BYTES, Row, dataset_name
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, one_line

ROWS_AT_ONCE = 16  # they may hold images
LIST_ITEM_BYTES = 8  # of an item of a list in memory, at least
LARGE_CHUNK = 2**28  # bytes of a column chunk, unpacked
MOST_RATIO = 200  # of unpacked to packed bytes in a large column chunk


@contextmanager
def reading_parquet(path: Path, advice: str = "") -> Iterator[None]:
    """Say which Parquet file cannot be read, and what to do."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {one_line(error)}{advice}"
        ) from None


def parquet_rows(file: IO[bytes], path: Path) -> Iterator[Row]:
    """The rows of an open Parquet file; DataError if it cannot be read, or memory cannot hold a row."""
    import pyarrow.parquet as pq

    source = str(path.resolve())
    number = 0
    with reading_parquet(path):
        parquet = pq.ParquetFile(file)
        require_single_names(parquet.schema_arrow.names, path)
        for batch in parquet.iter_batches(_rows_at_once(parquet.metadata, path)):
            for value, problem in values(batch):
                number += 1
                yield Row(source, dataset_name(path), number, value, problem=problem)


def require_single_names(names: Sequence[str], path: Path) -> None:
    """DataError if two columns of a table have one name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{path} has two columns {repeated[0]!r}: rename one")


def _rows_at_once(metadata: Any, path: Path) -> int:
    """How many rows of a Parquet file memory can hold, whatever they unpack to.

    A single value may be as long as the column chunk that it is in. DataError if a chunk unpacks to far more
    than it has in the file.
    """
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for position in range(group.num_columns):
            chunk = group.column(position)
            unpacked = chunk.total_uncompressed_size
            is_list = metadata.schema.column(position).max_repetition_level > 0
            if is_list:
                unpacked = max(unpacked, chunk.num_values * LIST_ITEM_BYTES)
            packed = max(chunk.total_compressed_size, 1)
            if unpacked > LARGE_CHUNK and unpacked > MOST_RATIO * packed:
                raise DataError(
                    f"{path}: {packed} bytes of its column {chunk.path_in_schema} unpack to {unpacked}: "
                    "write it again in smaller row groups"
                )
            largest = max(largest, unpacked)
    return max(1, min(ROWS_AT_ONCE, MOST_BYTES // largest))


def values(batch: Any) -> Iterator[tuple[Any, BadRowError | None]]:
    """The rows of an Arrow batch, or what is wrong with a row."""
    try:
        rows = python_rows(batch)
    except (ValueError, OverflowError, BadRowError) as error:
        # Text that is not UTF-8, JSON text with a key twice.
        if batch.num_rows > 1:  # find the row
            for index in range(batch.num_rows):
                yield from values(batch.slice(index, 1))
        elif isinstance(error, BadRowError):
            yield None, error
        else:
            yield None, BadRowError("unreadable value", one_line(error))
    else:
        yield from ((row, None) for row in rows)


def python_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table or batch. Text of the type `arrow.json` becomes the value that it says.

    `datasets` has this type for columns with values of several types. ValueError if one cannot be read. A
    number in single precision is the shortest one that is rounded to it: 1.2, not 1.2000000476837158. Dates
    and times are text in the form of ISO 8601, and durations numbers of their unit.
    """
    rows: list[dict[str, Any]] = _as_written(table).to_pylist()
    for column in table.schema:
        if not _holds_json(column.type):
            continue
        for row in rows:
            row[column.name] = _without_json(row[column.name], column.type)
    return rows


def _as_written(table: Any) -> Any:
    """A table with numbers in single precision, dates and times as they are written, at any depth."""
    import pyarrow as pa

    for position, column in enumerate(table.schema):
        text = _with_types(column.type, pa.string(), pa.string())
        if text == column.type:
            continue
        read = _with_types(column.type, pa.float64(), pa.string())
        values_of_column = table.column(position).cast(text).cast(read)
        table = table.set_column(position, column.name, values_of_column)
    return table


def _with_types(kind: Any, number: Any, time: Any) -> Any:
    """An Arrow type with other ones for numbers in single precision, and for dates and times."""
    import pyarrow as pa

    types = pa.types
    if types.is_float32(kind):
        return number
    if types.is_duration(kind):
        return pa.int64()
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return time
    if types.is_map(kind):
        return pa.map_(kind.key_type, _with_types(kind.item_type, number, time))
    fields = [
        field.with_type(_with_types(field.type, number, time))
        for field in map(kind.field, range(kind.num_fields))
    ]
    if types.is_struct(kind):
        return pa.struct(fields)
    if types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(fields[0])
    return pa.list_(fields[0]) if types.is_list(kind) else kind


def _holds_json(kind: Any) -> bool:
    """Whether an Arrow type is `arrow.json`, or has it inside."""
    import pyarrow as pa

    inner = (kind.field(position).type for position in range(kind.num_fields))
    return isinstance(kind, pa.JsonType) or any(map(_holds_json, inner))


def _without_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, with JSON text in it read."""
    import pyarrow as pa

    if value is None or not _holds_json(kind):
        return value
    if isinstance(kind, pa.JsonType):
        return loads(value)
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {
            name: _without_json(value[name], type_) for name, type_ in fields.items()
        }
    if pa.types.is_map(kind):
        return [(key, _without_json(item, kind.item_type)) for key, item in value]
    return [_without_json(item, kind.value_type) for item in value]
