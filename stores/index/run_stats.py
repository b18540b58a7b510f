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
    readable, unreadable = _runs(backend)
    previous = [past for past in readable if past.name != run]
    _check(RunStats(0, run, frame), previous, meta)
    latest = max((past.order for past in previous), default=0)
    for name, why in unreadable.items():
        if name != run:
            log.warning(why)
    record = RunRecord(schema=SCHEMA_VERSION, name=run, order=latest + 1)
    write_table(backend, record, frame.sort("key"))


def _check(new: RunStats, previous: Sequence[RunStats], meta: Collection[str]) -> None:
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
        kind = _kind(new, column)
        for past in previous:
            past_kind = _kind(past, column)
            if kind and past_kind and kind != past_kind:
                raise StoreError(
                    f"the statistics column '{column}' is {kind}, and {past_kind} in the run "
                    f"'{past.name}': give it the same type or another name"
                )


def join_stats(backend: Backend, index: pl.DataFrame) -> pl.DataFrame:
    """The index with each run's columns as `<run>.<column>`, and plain from the latest run with a value.

    A column that came with the samples keeps its name. Where runs disagree on the kind of a column, the
    plain one has the values of the runs that agree with the latest. Columns that are left out are logged.
    """
    runs, unreadable = _runs(backend)
    for why in unreadable.values():
        log.warning(why)
    used = set(index.columns)
    keys = index.select("key")
    frames = [index]
    runs_of: dict[str, list[RunStats]] = {}  # with a column, the latest first
    for run in runs:
        names = {
            column: name for column, name in run.columns.items() if name not in used
        }
        used.update(names.values())
        for column in sorted(run.columns.keys() - names.keys()):
            log.warning(
                "statistics are left out: the index has a column '%s' already",
                run.columns[column],
            )
        columns = run.frame.select("key", *names).rename(names)
        joined = keys.join(columns, on="key", how="left", maintain_order="left")
        frames.append(joined.drop("key"))
        for column in names.keys() - set(index.columns):
            runs_of.setdefault(column, []).insert(0, run)
    plain = [_plain(column, runs_of[column]) for column in sorted(runs_of)]
    return pl.concat(frames, how="horizontal").with_columns(plain)


def _plain(column: str, runs: Sequence[RunStats]) -> pl.Expr:
    """The value of the first of `runs` that has one, of those that agree with the first on its kind."""
    kinds = [_kind(run, column) for run in runs]
    kind = next(filter(None, kinds), None)
    alike = []
    for run, kind_of_run in zip(runs, kinds, strict=True):
        if kind_of_run in (None, kind):
            alike.append(run.columns[column])
    return pl.coalesce(alike).alias(column)


def unread(backend: Backend, columns: Collection[str]) -> dict[str, str]:
    """The runs whose statistics cannot be read and so are not among the `columns` of an index, and why."""
    joined = {column.rpartition(".")[0] for column in columns}
    absent = [run for run in record_names(backend, STATS) if run not in joined]
    _, unreadable = _runs(backend, absent)
    return unreadable


def _runs(
    backend: Backend, names: Sequence[str] | None = None
) -> tuple[list[RunStats], dict[str, str]]:
    """The runs that can be read, the latest last; of the others, why not and how to go on."""
    readable = list[RunStats]()
    unreadable = dict[str, str]()
    for name in record_names(backend, STATS) if names is None else names:
        try:
            record, table = read_table(backend, RunRecord, name)
        except StoreError as error:
            path = f"{backend.url}/{STATS}/{name}.json"
            unreadable[name] = (
                f"the statistics of the run '{name}' are left out: {error}. To do without them, remove "
                f"{path} and its copy in ledger/"
            )
            continue
        readable.append(RunStats(record.order, name, frame_of(table)))
    readable.sort(key=lambda run: (run.order, run.name))
    return readable, unreadable


def _kind(run: RunStats, column: str) -> str | None:
    """The kind of values that a run has in a column; None when it has none."""
    kind = run.schema.get(column, pl.Null())
    if kind == pl.Null:
        return None
    return "a number" if kind.is_numeric() else str(kind)
