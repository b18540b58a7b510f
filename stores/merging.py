"""Views and statistics that travel with their samples, and what becomes of two of one name.

Each is a table of what one store says of samples, by key. Of a sample that only one of two stores
speaks of, its word counts. Of the others the source's counts when a store is copied, for a copy
follows; when stores are merged, what is there stays. A run of statistics is never replaced by an older
one. Views whose filters differ are not one view: they are never mixed.
"""

import polars as pl

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import STATS, VIEWS, Record, find_record, read_record
from vlmdistill.stores.place import Place
from vlmdistill.stores.store import Store
from vlmdistill.stores.tables import read_table, table_names, unlike, write_table

Names = tuple[str, ...]
Said = tuple[Record, pl.DataFrame]  # the facts of a table, and its rows


def bring_tables(source: Store, target: Store, shared: pl.DataFrame, *, keep: bool) -> tuple[Names, Names]:
    """Copy what the source says of the samples that both stores hold now, the keys `shared`.

    With `keep`, what the target says already stays. Returns the names, such as `views/long`, of those
    that were replaced, for some samples at least, and of those left as they are although the source
    says something else. StoreError, once all others are copied, when one is damaged.
    """
    replaced, left, lost = [], [], list[StoreError]()
    names = [(folder, name) for folder in (VIEWS, STATS) for name in table_names(source.place, folder)]
    for folder, name in names:
        try:
            found = _differing(source.place, target.place, folder, name)
        except StoreError as error:
            lost.append(error)
            continue
        if found is None:
            continue
        (record, theirs), there = found
        theirs = theirs.join(shared, on="key", how="semi", maintain_order="left")
        if there is None:
            _write(target.place, folder, name, theirs, record)
            continue
        older, mine = there
        follows = not keep and record.get("order", 0) >= older.get("order", 0)
        own = mine.join(shared, on="key", how="anti", maintain_order="left")
        if _one_kind(folder, (older, mine), (record, theirs)):
            more = theirs.join(mine.select("key"), on="key", how="anti", maintain_order="left")
            rows = pl.concat([theirs, own] if follows else [mine, more], how="diagonal_relaxed").sort("key")
        elif follows and not len(own):
            rows = theirs
        else:
            rows = mine
        if not _says(rows, theirs):
            left.append(f"{folder}/{name}")
        if not _says(rows, mine):
            replaced.append(f"{folder}/{name}")
        if not rows.equals(mine):
            first, second = (record, older) if follows else (older, record)
            _write(target.place, folder, name, rows, _joined(first, second))
    if lost:
        raise StoreError(f"all else is copied, but {lost[0]}")
    return tuple(replaced), tuple(left)


def _differing(source: Place, target: Place, folder: str, name: str) -> tuple[Said, Said | None] | None:
    """What both say under a name, of which the target may have none; None when it is the same."""
    record = f"{folder}/{name}.json"
    there = find_record(target, record)
    if there == read_record(source, record):
        return None
    return _read(source, folder, name), None if there is None else _read(target, folder, name)


def _read(place: Place, folder: str, name: str) -> Said:
    record, table = read_table(place, folder, name)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return record, frame.with_columns(pl.col(pl.Categorical).cast(pl.String)).sort("key")


def _write(place: Place, folder: str, name: str, rows: pl.DataFrame, facts: Record) -> None:
    if folder == VIEWS:
        counts = dict(rows["reason"].drop_nulls().value_counts().iter_rows())
        # All filters are told, and of the values that were missing those that were.
        reasons = [reason for reason in facts["dropped"] if reason in counts or reason in facts["filters"]]
        dropped = {reason: counts.get(reason, 0) for reason in reasons}
        facts = {**facts, "rows": len(rows), "kept": rows["reason"].null_count(), "dropped": dropped}
        rows = rows.with_columns(pl.col("reason").cast(pl.Categorical))
    write_table(place, folder, name, rows.to_arrow(compat_level=pl.CompatLevel.oldest()), facts)


def _joined(first: Record, second: Record) -> Record:
    """The facts of two tables in one: those of the first, the later order, the reasons of both."""
    facts = dict(first)
    if "order" in facts:
        facts["order"] = max(first["order"], second["order"])
    else:
        facts["dropped"] = {**first["dropped"], **second["dropped"]}
    return facts


def _one_kind(folder: str, one: Said, other: Said) -> bool:
    """Whether rows of two tables can stand in one: views of the same filters, columns of like types."""
    if folder == VIEWS:
        return all(one[0][fact] == other[0][fact] for fact in ("filters", "base"))
    return unlike([one[1].schema, other[1].schema]) is None


def _says(rows: pl.DataFrame, part: pl.DataFrame) -> bool:
    """Whether `rows` say of the samples of `part` what `part` says."""
    try:
        said = rows.join(part.select("key"), on="key", how="semi").sort("key")
        like = [pl.col(name).cast(kind) for name, kind in said.schema.items()]
        return said.equals(part.select(like).sort("key"))
    except pl.exceptions.PolarsError:  # other columns, or types that nothing is cast to
        return False
