"""Per-sample statistics of training runs, kept next to the samples.

They only ever add columns: a run whose statistics cannot be read is left out with a warning, and a view
that needs them says so.
"""

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.arrow import frame_of
from vlmdistill.stores.index.tables import read_table, reserved, write_table
from vlmdistill.stores.manifest import STATS, RunRecord, check_name, record_names
from vlmdistill.stores.schema import SCHEMA_VERSION

log = logging.getLogger("vlmdistill.stores")


@dataclass(frozen=True)
class RunStats:
    """The statistics of a run: `key` and its columns."""

    order: int  # a number, not a clock, which may jump
    name: str
    frame: pl.DataFrame

    @functools.cached_property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The types of its columns: polars makes them anew at each look."""
        return dict(self.frame.schema)

    @functools.cached_property
    def columns(self) -> Mapping[str, str]:
        """Its columns, and the names they have in the index."""
        return {
            column: f"{self.name}.{column}" for column in self.schema if column != "key"
        }


def write_stats(
    backend: Backend,
    run: str,
    table: Mapping[str, Sequence[Any]] | pl.DataFrame,
    meta: Collection[str] = (),
) -> None:
    """Keep `table` (a `key` column and others) as the statistics of `run`; see `Store.write_stats`.

    `meta`: the columns of the index that came with the samples.
    """
    check_name(run, "run")
    frame = table if isinstance(table, pl.DataFrame) else pl.DataFrame(table)
    if "key" not in frame.columns or frame.schema["key"] != pl.String:
        raise StoreError(
            "statistics need a text column 'key' that says which sample each row is of"
        )
    if frame["key"].null_count() or frame["key"].is_duplicated().any():
        raise StoreError(
            "statistics have two rows for one key, or a row for none: merge them before writing"
        )
    others, lost = _runs(backend)
    _check(
        RunStats(0, run, frame), [other for other in others if other.name != run], meta
    )
    order = 1 + max([other.order for other in others if other.name != run], default=0)
    for name, why in lost.items():
        if name != run:
            log.warning(why)
    write_table(
        backend,
        RunRecord(schema=SCHEMA_VERSION, name=run, order=order),
        frame.sort("key"),
    )


def _check(new: RunStats, others: Sequence[RunStats], meta: Collection[str]) -> None:
    """StoreError when a column of a run would meet another of the index, or is of another kind elsewhere."""
    for column, name in new.columns.items():
        if reserved(column) or reserved(name):
            raise StoreError(
                f"the statistics column '{column}' is the index's own: rename it"
            )
        if "." in column:
            raise StoreError(
                f"the statistics column '{column}' has a dot, as after a run's name: rename it"
            )
        if name in meta:
            raise StoreError(
                f"samples came with a column '{name}': rename the run '{new.name}' or '{column}'"
            )
        mine = _kind(new, column)
        for other in others:
            theirs = _kind(other, column)
            if mine and theirs and mine != theirs:
                what = f"the statistics column '{column}' is {mine}, and {theirs} in the run '{other.name}'"
                raise StoreError(f"{what}: give it the same type or another name")


def join_stats(backend: Backend, index: pl.DataFrame) -> pl.DataFrame:
    """The index with each run's columns as `<run>.<column>`, and plain from the latest run with a value.

    A column that came with the samples keeps its name. Where runs disagree on the kind of a column, the
    plain one has the values of the runs that agree with the latest. What is left out is logged.
    """
    runs, lost = _runs(backend)
    for why in lost.values():
        log.warning(why)
    own, there = set(index.columns), set(index.columns)
    parts, keys = [index], index.select("key")
    latest: dict[str, list[RunStats]] = {}
    for run in runs:
        names = {
            column: name for column, name in run.columns.items() if name not in there
        }
        there.update(names.values())
        for column in sorted(run.columns.keys() - names.keys()):
            log.warning(
                "statistics are left out: the index has a column '%s' already",
                run.columns[column],
            )
        part = run.frame.select("key", *names).rename(names)
        parts.append(
            keys.join(part, on="key", how="left", maintain_order="left").drop("key")
        )
        for column in names.keys() - own:
            latest.setdefault(column, []).insert(0, run)
    index = pl.concat(parts, how="horizontal")
    plain = []
    for column, of in sorted(latest.items()):
        kinds = [_kind(run, column) for run in of]
        kind = next(filter(None, kinds), None)
        alike = [
            run.columns[column]
            for run, its in zip(of, kinds, strict=True)
            if its in (None, kind)
        ]
        plain.append(pl.coalesce(alike).alias(column))
    return index.with_columns(plain)


def unread(backend: Backend, columns: Collection[str]) -> dict[str, str]:
    """The runs whose statistics cannot be read and so are not among the `columns` of an index, and why."""
    joined = {column.rpartition(".")[0] for column in columns}
    return _runs(
        backend, [run for run in record_names(backend, STATS) if run not in joined]
    )[1]


def _runs(
    backend: Backend, names: Sequence[str] | None = None
) -> tuple[list[RunStats], dict[str, str]]:
    """The runs that can be read, the latest last, and of the others why not and what to do."""
    runs, lost = list[RunStats](), dict[str, str]()
    for name in record_names(backend, STATS) if names is None else names:
        try:
            record, table = read_table(backend, RunRecord, name)
        except StoreError as error:
            what = f"the statistics of the run '{name}' are left out: {error}"
            where = f"{backend.url}/{STATS}/{name}.json"
            lost[name] = (
                f"{what}. To do without them, remove {where} and its copy in ledger/"
            )
            continue
        runs.append(RunStats(record.order, name, frame_of(table)))
    return sorted(runs, key=lambda run: (run.order, run.name)), lost


def _kind(run: RunStats, column: str) -> str | None:
    """What kind of values a run has in a column; None when it has none."""
    kind = run.schema.get(column, pl.Null())
    if kind == pl.Null:
        return None
    return "a number" if kind.is_numeric() else str(kind)
