"""Views and statistics that travel with their samples, and how tables with equal names are merged.

Each is a table with a row for a sample, by key. A row that only one of two stores has is kept. Otherwise the
source wins when a store is copied, and the destination when stores are merged. An older run never replaces
the statistics of a newer one. Views whose filters differ are never mixed.
"""

from collections.abc import Callable

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
Said = tuple[TableRecord, pl.DataFrame]  # the facts of a table, and its rows


def bring_tables(
    source: Store, target: Store, shared: pl.DataFrame, *, keep: bool
) -> tuple[Names, Names]:
    """Copy what the source says of the samples that both stores hold now, the keys `shared`.

    With `keep`, what the target says already stays. Returns the names, such as `views/long`, of those
    that were replaced, for some samples at least, and of those left as they are although the source
    says something else. StoreError, once all others are copied, when one is damaged.
    """
    replaced, left, lost = [], [], list[StoreError]()
    for folder in (VIEWS, STATS):
        for name in record_names(source.backend, folder):
            try:
                changed, differs = _bring(
                    source.backend, target.backend, folder, name, shared, keep
                )
            except StoreError as error:
                lost.append(error)
                continue
            replaced += [f"{folder}/{name}"] * changed
            left += [f"{folder}/{name}"] * differs
    if lost:
        raise StoreError(f"all else is copied, but {lost[0]}")
    return tuple(replaced), tuple(left)


@retried()
def _bring(
    source: Backend,
    target: Backend,
    folder: str,
    name: str,
    shared: pl.DataFrame,
    keep: bool,
) -> tuple[bool, bool]:
    """Bring a table: whether the target now says something else than before, and than the source.

    It is looked at again just before it is replaced: what another process has put there meanwhile is joined
    as well.
    """
    kind, file = TABLES[folder], f"{folder}/{name}.json"
    there = find_record(target, file, kind)
    if there == read_record(source, file, kind):
        return False, False
    record, theirs = _read(source, kind, name)
    rows = theirs = theirs.join(shared, on="key", how="semi", maintain_order="left")
    mine = None
    if there:
        older, mine = _read(target, kind, name)
        record, rows = _together((record, theirs), (older, mine), shared, keep)
        if rows.equals(mine):
            return False, not _says(rows, theirs)
    if not _write(
        target, record, rows, lambda: find_record(target, file, kind) == there
    ):
        raise RacedError(
            f"{target.url}/{file} is being replaced by others all the time: run it again"
        )
    return mine is not None and not _says(rows, mine), not _says(rows, theirs)


def _together(said: Said, there: Said, shared: pl.DataFrame, keep: bool) -> Said:
    """What the target says once both have spoken."""
    (record, theirs), (older, mine) = said, there
    follows = not keep and _order(record) >= _order(older)
    own = mine.join(shared, on="key", how="anti", maintain_order="left")
    if _one_kind(there, said):
        more = theirs.join(
            mine.select("key"), on="key", how="anti", maintain_order="left"
        )
        rows = pl.concat(
            [theirs, own] if follows else [mine, more], how="diagonal_relaxed"
        ).sort("key")
    elif follows and not len(own):
        rows = theirs
    else:
        rows = mine
    first, second = (record, older) if follows else (older, record)
    return _joined(first, second), rows


def _read(backend: Backend, kind: type[TableRecord], name: str) -> Said:
    record, table = read_table(backend, kind, name)
    return record, frame_of(table).with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    ).sort("key")


def _write(
    backend: Backend,
    record: TableRecord,
    rows: pl.DataFrame,
    unchanged: Callable[[], bool],
) -> bool:
    """Replace a table, unless `unchanged` returns false."""
    if isinstance(record, ViewRecord):
        counts = dict(rows["reason"].drop_nulls().value_counts().iter_rows())
        # All filters are listed, and of the missing values those that occurred.
        reasons = [
            reason
            for reason in record.dropped
            if reason in counts or reason in record.filters
        ]
        dropped = {reason: counts.get(reason, 0) for reason in reasons}
        record = replace(
            record, rows=len(rows), kept=rows["reason"].null_count(), dropped=dropped
        )
        rows = rows.with_columns(pl.col("reason").cast(pl.Categorical))
    return write_table(backend, record, rows, unchanged)


def _order(record: TableRecord) -> int:
    return record.order if isinstance(record, RunRecord) else 0


def _joined(first: TableRecord, second: TableRecord) -> TableRecord:
    """The facts of two tables in one: facts of the first, the later order, the reasons of both."""
    if isinstance(first, RunRecord):
        return replace(first, order=max(_order(first), _order(second)))
    if isinstance(first, ViewRecord) and isinstance(second, ViewRecord):
        return replace(first, dropped={**first.dropped, **second.dropped})
    return first


def _one_kind(one: Said, other: Said) -> bool:
    """Whether rows of two tables can stand in one: views of the same filters, columns of like types."""
    mine, theirs = one[0], other[0]
    if isinstance(mine, ViewRecord) and isinstance(theirs, ViewRecord):
        return (mine.filters, mine.base) == (theirs.filters, theirs.base)
    return unlike([one[1].schema, other[1].schema]) is None


def _says(rows: pl.DataFrame, part: pl.DataFrame) -> bool:
    """Whether `rows` say of the samples of `part` what `part` says."""
    try:
        said = rows.join(part.select("key"), on="key", how="semi").sort("key")
        like = [pl.col(name).cast(kind) for name, kind in said.schema.items()]
        return said.equals(part.select(like).sort("key"))
    except pl.exceptions.PolarsError:  # other columns, or types that nothing is cast to
        return False
