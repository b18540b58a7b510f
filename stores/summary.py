"""What is in a store, from its records and index alone: no tensor is read."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from vlmdistill.stores.annexes import SAME
from vlmdistill.stores.arrays import ArraySpec
from vlmdistill.stores.commits import LEDGER
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.tables import ROW, reserved, view_keys
from vlmdistill.stores.layout import TOKENS
from vlmdistill.stores.manifest import (
    CACHE,
    COMMITS,
    STATS,
    STORE,
    VIEWS,
    committed_shards,
    record_names,
)
from vlmdistill.stores.schema import Array, Feature
from vlmdistill.stores.store import Store

BINS = 24
COUNTS = ("text_tokens", "visual_tokens", "response_tokens")
log = logging.getLogger("vlmdistill.stores")


def info(
    store: Store, needs: Mapping[str, Collection[Feature]] | None = None
) -> dict[str, Any]:
    """What a store holds, from what, how big, per field and per dataset.

    `bytes` is the sum of the fields, `index_bytes`, `head_bytes` and `records_bytes` (the records, the
    ledger, and the tables of views, statistics and cache). Shards that no record names do not count.
    `shadowed` samples have a key that an earlier shard has too. A view says what it keeps, and how much of
    that is there. `annexes` name their features and the number of samples that have them; sizes count them.
    `needs` maps drafters to the features they read: then also what each would read, or lacks.
    """
    index = store.index
    backend, parts = store.backend, (store, *store.annexes)
    tallies = [_tally(one) for one in parts]
    fields: dict[str, dict[str, Any]] = {
        "tokens": {
            "bytes": sum(
                tally.on_disk([TOKENS]) for tally in tallies
            ),  # an annex has them, too
            "rows": tallies[0].rows["text"],
        }
    }
    for one, tally in zip(parts, tallies, strict=True):
        for feature in one.layout.features:
            about = {
                "bytes": tally.on_disk(one.layout.parts[feature]),
                "rows": tally.rows[feature.where],
                "encoding": one.layout.encoding.get(feature.name, "raw"),
            }
            if sums := tally.losses.get(feature.name):
                error, squares = sums
                about["relative_error"] = (
                    float(np.sqrt(error / squares)) if squares else 0.0
                )
            fields.setdefault(feature.name, about)
    arrays = [
        tally.on_disk(one.layout.arrays)
        for one, tally in zip(parts, tallies, strict=True)
    ]
    sizes = {
        "index_bytes": sum(tally.disk.total() for tally in tallies) - sum(arrays),
        "head_bytes": store.record.head.entry[0],
        "records_bytes": sum(tally.records_bytes for tally in tallies),
    }
    views = {name: _kept(store, name) for name in record_names(backend, VIEWS)}
    facts: dict[str, Any] = {
        "path": store.path,
        "samples": len(index),
        "shadowed": tallies[0].rows["sample"] - len(index),
        "shards": tallies[0].shards,
        "bytes": sum(arrays) + sum(sizes.values()),
        **sizes,
        "schema": store.record.schema,
        "provenance": store.provenance.to_dict(),
        "target": store.info.to_dict(),
        "fields": fields,
        "datasets": _datasets(store, fields),
        "views": {name: counts[0] for name, counts in views.items()},
        "views_there": {name: counts[1] for name, counts in views.items()},
        "runs": record_names(backend, STATS),
        "annexes": [
            {
                "features": [*one.provenance.features],
                "samples": len(index.join(one.index, SAME, "semi")),
            }
            for one in parts[1:]
        ],
    }
    if needs is not None:
        facts["drafters"] = {
            name: _cost(store, wanted, fields) for name, wanted in sorted(needs.items())
        }
    return facts


@dataclass
class _Tally:
    """What the shards of a store hold, from their records."""

    shards: int = 0
    records_bytes: int = 0
    disk: Counter[str] = field(
        default_factory=Counter
    )  # array, or file next to the arrays -> bytes
    rows: Counter[str] = field(default_factory=Counter)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def on_disk(self, specs: Collection[ArraySpec]) -> int:
        return sum(self.disk[spec.name] for spec in specs)


def _tally(store: Store) -> _Tally:
    backend = store.backend
    small = [
        sum(backend.list_files(folder).values())
        for folder in (COMMITS, VIEWS, STATS, CACHE, LEDGER)
    ]
    tally = _Tally(records_bytes=(backend.size(STORE) or 0) + sum(small))
    for record in backend.map(store.commit, committed_shards(backend)):
        tally.shards += 1
        for name, (size, _) in record.files.items():
            tally.disk[name.split("/")[0]] += size
        tally.rows.update(record.rows)
        for name, sums in record.losses.items():
            before = tally.losses.get(name, [0.0, 0.0])
            tally.losses[name] = [a + b for a, b in zip(before, sums, strict=True)]
    return tally


def _kept(store: Store, view: str) -> tuple[int, int] | tuple[None, None]:
    """How many samples a view keeps, and how many of them are there; None when that cannot be read."""
    try:
        keys = view_keys(store.backend, view)
    except StoreError as error:
        what = f"the view '{view}' cannot be read: {error}"
        where = f"{store.path}/{VIEWS}/{view}.json"
        log.warning(f"{what}. To do without it, remove {where} and its copy in ledger/")
        return None, None
    return len(keys), len(store.index.join(keys, on="key", how="semi"))


def _cost(
    store: Store, wanted: Collection[Feature], fields: Mapping[str, Any]
) -> dict[str, Any]:
    missing = sorted(feature.name for feature in set(wanted) - set(store.features))
    held = sorted(feature.name for feature in set(wanted) & set(store.features))
    read = sum(fields[name]["bytes"] for name in ["tokens", *held])
    samples = max(1, len(store.index))
    return {
        "features": held,
        "missing": missing,
        "bytes": read,
        "bytes_per_sample": read // samples,
    }


def _datasets(store: Store, fields: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Counts per dataset; its bytes are its share of each field's rows."""
    index = store.index.with_columns(span_count=pl.col("spans").list.len())
    columns = {"text": "text_tokens", "visual": "visual_tokens", "span": "span_count"}
    bytes_of = pl.lit(0.0)
    for name, about in fields.items():
        column = columns["text" if name == "tokens" else Feature.parse(name).where]
        rows = max(
            1, about["rows"], index[column].sum()
        )  # an annex may lack samples, and any shard shadow some
        bytes_of += pl.col(column).sum() * (about["bytes"] / rows)
    counts = [pl.col(name).sum() for name in COUNTS]
    grouped = index.group_by("dataset").agg(
        pl.len().alias("samples"), *counts, bytes_of.alias("bytes")
    )
    return {
        str(row["dataset"]): {
            name: int(row[name]) for name in ("samples", *COUNTS, "bytes")
        }
        for row in grouped.sort("dataset").iter_rows(named=True)
    }


def stats(store: Store, view: str | None = None) -> dict[str, dict[str, Any]]:
    """Each numeric column of the index: count, mean, quantiles and a histogram of 24 equal bins.

    Token counts, numeric meta and the statistics of training runs, over a view or all samples. Infinities and
    NaN, as a diverged run leaves them, are only counted, as `not_finite`; None where there is nothing else.
    Where all values are equal they are in the middle bin.
    """
    rows = store.view(view)
    facts = {}
    for name, kind in rows.schema.items():
        own = reserved(name) or name.endswith(ROW)
        if not kind.is_numeric() or (own and name not in COUNTS):
            continue
        given = rows[name].drop_nulls().cast(pl.Float64).to_numpy()
        values = given[np.isfinite(given)]
        if len(given):
            facts[name] = {
                "count": len(values),
                "not_finite": len(given) - len(values),
                **_spread(values),
            }
    return facts


def _spread(values: Array) -> dict[str, Any]:
    """Mean, quantiles and histogram of finite values; each None when there are no values."""
    names = ("min", "p10", "p50", "p90", "max")
    if not len(values):
        return dict.fromkeys(("mean", *names, "histogram"))
    # A power of two keeps every digit, and below 1 no sum or difference overflows.
    exponent = np.frexp(np.abs(values).max())[1]
    small = np.ldexp(values, -exponent)
    mean, *quantiles = np.ldexp(
        [small.mean(), *np.quantile(small, [0, 0.1, 0.5, 0.9, 1])], exponent
    ).tolist()
    least, width = small.min(), np.ptp(small)
    relative = (small - least) / width if width else np.full(len(small), 0.5)
    counts, _ = np.histogram(relative, BINS, range=(0, 1))
    return {
        "mean": mean,
        **dict(zip(names, quantiles, strict=True)),
        "histogram": {
            "from": quantiles[0],
            "to": quantiles[-1],
            "counts": counts.tolist(),
        },
    }
