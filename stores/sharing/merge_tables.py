"""Views and statistics that travel with their samples, and how tables with equal names are merged.

Each is a table with a row for a sample, by key. A row that only one of two stores has is kept. Otherwise the
source wins when a store is copied, and the destination when stores are merged. An older run never replaces
the statistics of a newer one. Views whose filters differ are never mixed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
from msgspec.structs import replace

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import RacedError, StoreError
from vlmdistill.stores.index.arrow import frame_of
from vlmdistill.stores.index.tables import read_table, unlike, write_table
from vlmdistill.stores.manifest import (
    STATS,
    TABLES,
    VIEWS,
    RunRecord,
    TableRecord,
    ViewRecord,
    find_record,
    read_record,
    record_names,
)
from vlmdistill.stores.retry import retried
from vlmdistill.stores.store import Store

Names = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A view or the statistics of a run: its record, and its rows sorted by key."""

    record: TableRecord
    rows: pl.DataFrame


def bring_tables(
    source: Store, target: Store, shared: pl.DataFrame, *, keep: bool
) -> tuple[Names, Names]:
    """Copy the views and statistics of the source, for the samples that both stores hold now.

    Args:
        source: The store to copy from.
        target: The store to copy to.
        shared: The keys of the samples that both hold.
        keep: Whether the target's values stay where both have one.

    Returns:
        The names, such as `views/long`, of tables whose values in the target were replaced, for some samples
        at least; and of those that stay as they are although the source has other values.

    Raises:
        StoreError: A table is damaged; all others are copied.
    """
    replaced = list[str]()
    differing = list[str]()
    errors = list[StoreError]()
    for folder in (VIEWS, STATS):
        for name in record_names(source.backend, folder):
            try:
                changed, differs = _bring(
                    source.backend, target.backend, folder, name, shared, keep
                )
            except StoreError as error:
                errors.append(error)
                continue
            if changed:
                replaced.append(f"{folder}/{name}")
            if differs:
                differing.append(f"{folder}/{name}")
    if errors:
        raise StoreError(f"all else is copied, but {errors[0]}")
    return tuple(replaced), tuple(differing)


@retried()
def _bring(
    source: Backend,
    target: Backend,
    folder: str,
    name: str,
    shared: pl.DataFrame,
    keep: bool,
) -> tuple[bool, bool]:
    """Bring a table; whether values in the target were replaced, and whether it differs from the source.

    The target's record is read again just before it is replaced: a table that another process has put there
    meanwhile is joined as well.
    """
    kind = TABLES[folder]
    file = f"{folder}/{name}.json"
    present = find_record(target, file, kind)
    if present == read_record(source, file, kind):
        return False, False
    brought = _read(source, kind, name)
    rows = brought.rows.join(shared, on="key", how="semi", maintain_order="left")
    brought = result = Table(brought.record, rows)
    own = _read(target, kind, name) if present else None
    if own:
        result = _merged(brought, own, shared, keep)
        if result.rows.equals(own.rows):
            return False, not _agrees(result.rows, brought.rows)

    def unchanged() -> bool:
        return find_record(target, file, kind) == present

    if not _write(target, result, unchanged):
        raise RacedError(
            f"{target.url}/{file} is being replaced by others all the time: run it again"
        )
    replaced = own is not None and not _agrees(result.rows, own.rows)
    return replaced, not _agrees(result.rows, brought.rows)


def _merged(brought: Table, own: Table, shared: pl.DataFrame, keep: bool) -> Table:
    """The table of the target after a merge with the rows that are brought."""
    brought_wins = not keep and _order(brought.record) >= _order(own.record)
    first, second = (brought, own) if brought_wins else (own, brought)
    record = _joined(first.record, second.record)
    of_others = own.rows.join(shared, on="key", how="anti", maintain_order="left")
    if _is_one_kind(own, brought):
        added = of_others
        if not brought_wins:
            own_keys = own.rows.select("key")
            added = brought.rows.join(
                own_keys, on="key", how="anti", maintain_order="left"
            )
        rows = pl.concat([first.rows, added], how="diagonal_relaxed")
        return Table(record, rows.sort("key"))
    # Tables of different kinds are not mixed: all rows are of one of them.
    replaces_all = brought_wins and not len(of_others)
    return Table(record, brought.rows if replaces_all else own.rows)


def _read(backend: Backend, kind: type[TableRecord], name: str) -> Table:
    record, table = read_table(backend, kind, name)
    as_text = pl.col(pl.Categorical).cast(pl.String)
    return Table(record, frame_of(table).with_columns(as_text).sort("key"))


def _write(backend: Backend, table: Table, unchanged: Callable[[], bool]) -> bool:
    """Replace a table, unless `unchanged` returns false."""
    record, rows = table.record, table.rows
    if isinstance(record, ViewRecord):
        reasons = rows["reason"]
        counts = dict(reasons.drop_nulls().value_counts().iter_rows())
        # All filters are listed, and of the missing values those that occurred.
        dropped = {}
        for reason in record.dropped:
            if reason in counts or reason in record.filters:
                dropped[reason] = counts.get(reason, 0)
        record = replace(
            record, rows=len(rows), kept=reasons.null_count(), dropped=dropped
        )
        rows = rows.with_columns(reasons.cast(pl.Categorical))
    return write_table(backend, record, rows, unchanged)


def _order(record: TableRecord) -> int:
    """The number of a run, which grows with time; 0 of a view."""
    return record.order if isinstance(record, RunRecord) else 0


def _joined(first: TableRecord, second: TableRecord) -> TableRecord:
    """The facts of two tables in one: facts of the first, the later order, the reasons of both."""
    if isinstance(first, RunRecord):
        return replace(first, order=max(_order(first), _order(second)))
    if isinstance(first, ViewRecord) and isinstance(second, ViewRecord):
        return replace(first, dropped={**first.dropped, **second.dropped})
    return first


def _is_one_kind(first: Table, second: Table) -> bool:
    """Whether the rows of two tables fit into one: views of the same filters, columns of like types."""
    one, other = first.record, second.record
    if isinstance(one, ViewRecord) and isinstance(other, ViewRecord):
        return (one.filters, one.base) == (other.filters, other.base)
    return unlike([first.rows.schema, second.rows.schema]) is None


def _agrees(rows: pl.DataFrame, part: pl.DataFrame) -> bool:
    """Whether `rows` have the same values as `part` for the samples of `part`."""
    try:
        same_keys = rows.join(part.select("key"), on="key", how="semi").sort("key")
        types = same_keys.schema
        cast = part.select(pl.col(name).cast(types[name]) for name in types)
        return same_keys.equals(cast.sort("key"))
    except pl.exceptions.PolarsError:
        # There are other columns, or types to which nothing is cast.
        return False
