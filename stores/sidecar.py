"""Per-sample statistics of training runs, kept beside the samples they speak of."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import STATS, check_name
from vlmdistill.stores.place import Place
from vlmdistill.stores.tables import read_table, reserved, table_names, write_table


def write_stats(place: Place, run: str, table: Mapping[str, Sequence[Any]] | pl.DataFrame) -> None:
    """Keep `table` (a `key` column and others) as the statistics of `run`; see `Store.write_stats`."""
    check_name(run, "run")
    frame = table if isinstance(table, pl.DataFrame) else pl.DataFrame(table)
    if "key" not in frame.columns or frame.schema["key"] != pl.String:
        raise StoreError("statistics need a text column 'key' that says which sample each row is of")
    if frame["key"].is_duplicated().any():
        raise StoreError("statistics have two rows for one key: merge them before writing")
    odd = [name for name in frame.columns if name != "key" and reserved(name)]
    if odd:
        raise StoreError(f"the statistics column '{odd[0]}' is the index's own: rename it")
    # Runs are ordered by a number, not by a clock, which may jump.
    known = {name: read_table(place, STATS, name)[0]["order"] for name in table_names(place, STATS)}
    order = 1 + max([order for name, order in known.items() if name != run], default=0)
    arrow = frame.sort("key").to_arrow(compat_level=pl.CompatLevel.oldest())
    write_table(place, STATS, run, arrow, {"run": run, "order": order})


def join_stats(place: Place, index: pl.DataFrame) -> pl.DataFrame:
    """The index with each run's columns as `<run>.<column>`, and plain from the latest run with a value."""
    runs = [(name, *read_table(place, STATS, name)) for name in table_names(place, STATS)]
    latest: dict[str, list[str]] = {}
    own = set(index.columns)  # these keep their plain names: they came with the samples
    for name, _, table in sorted(runs, key=lambda run: (run[1]["order"], run[0])):
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        columns = [column for column in frame.columns if column != "key"]
        renamed = frame.rename({column: f"{name}.{column}" for column in columns})
        index = index.join(renamed, on="key", how="left", maintain_order="left")
        for column in columns:
            if column in own:
                continue
            latest.setdefault(column, []).insert(0, f"{name}.{column}")
    return index.with_columns(pl.coalesce(names).alias(column) for column, names in latest.items())
