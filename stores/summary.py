"""Summaries of a store, from its records and index alone: no tensor is read."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from vlmdistill.stores.annexes import SAME_SAMPLE
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
    """The content, origin and size of a store, also per field and per dataset.

    `bytes` is the sum of the fields, `index_bytes`, `head_bytes` and `records_bytes` (the records, the
    ledger, and the tables of views, statistics and cache). Shards that no record names do not count.
    `shadowed` samples have a key that an earlier shard has too. A view says how many samples it keeps, and
    how many of these are in the store. `annexes` name their features and the number of samples that have
    them; sizes count them. With `needs`, the features that drafters read: also the bytes that each would
    read, and the features that it lacks.
    """
    tallies = [_tally(one) for one in (store, *store.annexes)]
    fields = _fields(tallies)
    facts: dict[str, Any] = {
        "path": store.path,
        **_counts(store, tallies[0]),
        **_sizes(store, tallies),
        "schema": store.record.schema,
        "provenance": store.provenance.to_dict(),
        "target": store.info.to_dict(),
        "fields": fields,
        "datasets": _datasets(store, fields),
        **_views(store),
        "runs": record_names(store.backend, STATS),
        "annexes": [_annex(store, annex) for annex in store.annexes],
    }
    if needs is not None:
        costs = {name: _cost(store, needs[name], fields) for name in sorted(needs)}
        facts["drafters"] = costs
    return facts


@dataclass
class _Tally:
    """The content of the shards of a store or annex, from their records."""

    store: Store
    records_bytes: int
    shards: int = 0
    disk: Counter[str] = field(default_factory=Counter)
    """Bytes by array, or by the name of a file next to the arrays."""
    rows: Counter[str] = field(default_factory=Counter)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def on_disk(self, specs: Collection[ArraySpec]) -> int:
        return sum(self.disk[spec.name] for spec in specs)


def _tally(store: Store) -> _Tally:
    backend = store.backend
    records_bytes = backend.size(STORE) or 0
    for folder in (COMMITS, VIEWS, STATS, CACHE, LEDGER):
        records_bytes += sum(backend.list_files(folder).values())
    tally = _Tally(store, records_bytes)
    for record in backend.map(store.commit, committed_shards(backend)):
        tally.shards += 1
        tally.rows.update(record.rows)
        for name, (size, _) in record.files.items():
            tally.disk[name.split("/")[0]] += size
        for name, (error, squares) in record.losses.items():
            sums = tally.losses.setdefault(name, [0.0, 0.0])
            sums[0] += error
            sums[1] += squares
    return tally


def _fields(tallies: Sequence[_Tally]) -> dict[str, dict[str, Any]]:
    """Bytes, rows and encoding of the tokens and of each feature, of a store and its annexes."""
    fields: dict[str, dict[str, Any]] = {
        "tokens": {
            # An annex has the tokens of its samples, too.
            "bytes": sum(tally.on_disk([TOKENS]) for tally in tallies),
            "rows": tallies[0].rows["text"],
        }
    }
    for tally in tallies:
        layout = tally.store.layout
        for feature in layout.features:
            facts = {
                "bytes": tally.on_disk(layout.arrays_of[feature]),
                "rows": tally.rows[feature.where],
                "encoding": layout.encoding.get(feature.name, "raw"),
            }
            if feature.name in tally.losses:
                error, squares = tally.losses[feature.name]
                relative = np.sqrt(error / squares) if squares else 0.0
                facts["relative_error"] = float(relative)
            fields.setdefault(feature.name, facts)
    return fields


def _counts(store: Store, own: _Tally) -> dict[str, int]:
    """Samples and shards; samples that are in several shards count once."""
    samples = len(store.index)
    shadowed = own.rows["sample"] - samples
    return {"samples": samples, "shadowed": shadowed, "shards": own.shards}


def _sizes(store: Store, tallies: Sequence[_Tally]) -> dict[str, int]:
    """Bytes in all, and of everything but the fields."""
    field_bytes = sum(tally.on_disk(tally.store.layout.arrays) for tally in tallies)
    shard_bytes = sum(tally.disk.total() for tally in tallies)
    sizes = {
        "index_bytes": shard_bytes - field_bytes,
        "head_bytes": store.record.head.entry[0],
        "records_bytes": sum(tally.records_bytes for tally in tallies),
    }
    return {"bytes": field_bytes + sum(sizes.values()), **sizes}


def _views(store: Store) -> dict[str, dict[str, int | None]]:
    """Of each view, the samples that it keeps, and those of them that are in the store."""
    kept: dict[str, int | None] = {}
    present: dict[str, int | None] = {}
    for name in record_names(store.backend, VIEWS):
        kept[name], present[name] = _kept(store, name)
    return {"views": kept, "views_there": present}


def _annex(store: Store, annex: Store) -> dict[str, Any]:
    """The features of an annex, and how many samples of the store have them."""
    complete = store.index.join(annex.index, SAME_SAMPLE, "semi")
    return {"features": [*annex.provenance.features], "samples": len(complete)}


def _kept(store: Store, view: str) -> tuple[int, int] | tuple[None, None]:
    """How many samples a view keeps, and how many of them are in the store; None if it cannot be read."""
    try:
        keys = view_keys(store.backend, view)
    except StoreError as error:
        log.warning(
            "the view '%s' cannot be read: %s. To do without it, remove %s and its copy in ledger/",
            view,
            error,
            f"{store.path}/{VIEWS}/{view}.json",
        )
        return None, None
    return len(keys), len(store.index.join(keys, on="key", how="semi"))


def _cost(
    store: Store, wanted: Collection[Feature], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The bytes that a drafter of these features would read, and the features that are missing."""
    present = sorted(feature.name for feature in set(wanted) & set(store.features))
    missing = sorted(feature.name for feature in set(wanted) - set(store.features))
    read = sum(fields[name]["bytes"] for name in ["tokens", *present])
    return {
        "features": present,
        "missing": missing,
        "bytes": read,
        "bytes_per_sample": read // max(1, len(store.index)),
    }


def _datasets(store: Store, fields: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Counts per dataset; its bytes are its share of each field's rows."""
    index = store.index.with_columns(span_count=pl.col("spans").list.len())
    count_columns = {
        "text": "text_tokens",
        "visual": "visual_tokens",
        "span": "span_count",
    }
    bytes_of = pl.lit(0.0)
    for name, facts in fields.items():
        where = "text" if name == "tokens" else Feature.parse(name).where
        column = count_columns[where]
        # An annex may lack samples, and any shard shadow some.
        rows = max(1, facts["rows"], index[column].sum())
        bytes_of += pl.col(column).sum() * (facts["bytes"] / rows)
    counts = [pl.col(name).sum() for name in COUNTS]
    grouped = index.group_by("dataset").agg(
        pl.len().alias("samples"), *counts, bytes_of.alias("bytes")
    )
    datasets = {}
    for row in grouped.sort("dataset").iter_rows(named=True):
        columns = ("samples", *COUNTS, "bytes")
        datasets[str(row["dataset"])] = {name: int(row[name]) for name in columns}
    return datasets


def stats(store: Store, view: str | None = None) -> dict[str, dict[str, Any]]:
    """Each numeric column of the index: count, mean, quantiles and a histogram of 24 equal bins.

    Token counts, numeric meta and the statistics of training runs, over a view or all samples. Infinities and
    NaN, as a diverged run leaves them, are only counted, as `not_finite`; a column of nothing else has None
    for its mean and the like. Where all values are equal they are in the middle bin.
    """
    rows = store.view(view)
    facts = {}
    for name, kind in rows.schema.items():
        internal = (reserved(name) or name.endswith(ROW)) and name not in COUNTS
        if internal or not kind.is_numeric():
            continue
        values = rows[name].drop_nulls().cast(pl.Float64).to_numpy()
        finite = values[np.isfinite(values)]
        if len(values):
            facts[name] = {
                "count": len(finite),
                "not_finite": len(values) - len(finite),
                **_spread(finite),
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
    small_quantiles = np.quantile(small, [0, 0.1, 0.5, 0.9, 1])
    mean = np.ldexp(small.mean(), exponent).item()
    quantiles = np.ldexp(small_quantiles, exponent).tolist()
    width = np.ptp(small)
    relative = np.full(len(small), 0.5)
    if width:
        relative = (small - small.min()) / width
    counts, _ = np.histogram(relative, BINS, range=(0, 1))
    histogram = {
        "from": quantiles[0],
        "to": quantiles[-1],
        "counts": counts.tolist(),
    }
    return {
        "mean": mean,
        **dict(zip(names, quantiles, strict=True)),
        "histogram": histogram,
    }
