"""Views: which samples count, decided over the index alone, each drop with its reason.

A filter returns, per row, whether the sample stays. Filters apply in turn and a sample is
dropped for the first it fails. Columns come from the index: token counts, meta (see `measures`
for those made from text) and the statistics of training runs.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import xxhash

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.run_stats import unread
from vlmdistill.stores.index.tables import write_table
from vlmdistill.stores.manifest import ViewRecord, check_name
from vlmdistill.stores.schema import SCHEMA_VERSION
from vlmdistill.stores.store import Store
from vlmdistill.stores.suggestions import did_you_mean
from vlmdistill.stores.views.expressions import Filter, line_of, where
from vlmdistill.stores.views.text_stats import BAND, SKETCH


def _bound(column: str, reason: str, keep: Callable[[pl.Expr], pl.Expr]) -> Filter:
    def check(rows: pl.DataFrame) -> pl.Series:
        if column not in rows.columns:
            raise StoreError(
                f"'{reason}' needs the column '{column}', which this store's samples do not have: "
                "`vlmdistill features` records it, or give it in the meta of each sample"
            )
        try:
            return rows.select(keep(pl.col(column)))[column]
        except pl.exceptions.PolarsError as error:
            raise StoreError(
                f"'{reason}' cannot be computed from the column '{column}': {line_of(error)}"
            ) from error

    return Filter(reason, check)


def min_words(least: str = "6") -> Filter:
    """Responses over five words (HiViS, both stages)."""
    return _bound(
        "words", f"fewer than {least} words", lambda words: words >= _number(least)
    )


def max_code(share: str = "0.05") -> Filter:
    """Little code: the share of programming symbols and keywords (HiViS, stage 2)."""
    return _bound(
        "code_ratio", f"more than {share} code", lambda ratio: ratio <= _number(share)
    )


def max_repetition(share: str = "0.3") -> Filter:
    """No degenerate loops: the share of word n-grams that were there before."""
    return _bound(
        "repetition",
        f"more than {share} repetition",
        lambda ratio: ratio <= _number(share),
    )


def max_tokens(most: str = "2048") -> Filter:
    """Samples whose expanded sequence is at most this long."""
    limit = _number(most)
    return Filter(
        f"more than {most} tokens",
        lambda rows: (rows["text_tokens"] + rows["visual_tokens"]) <= limit,
    )


def unique(text: str = "") -> Filter:
    """One of each group of near-duplicate responses: the first by key that shares no band of its sketch.

    A sample without a sketch counts as unique and stays.
    """
    if text:
        raise StoreError(
            f"the filter unique takes no value: write unique, not unique={text}"
        )

    def first(sketch: pl.Expr) -> pl.Expr:
        bands = [
            sketch.str.slice(at, BAND).is_first_distinct()
            for at in range(0, SKETCH, BAND)
        ]
        return sketch.is_null() | pl.all_horizontal(bands)

    return _bound("sketch", "near-duplicate answer", first)


def mix(shares: str) -> Filter:
    """A dataset mix such as `llava:0.5,sharegpt:0.5`: as many samples as the shares allow.

    Datasets not named are dropped. Which samples stay depends on a hash of their keys alone.
    """
    how = f"cannot read the mix '{shares}': write it as llava:0.5,sharegpt:0.5"
    wanted = dict[str, float]()
    for part in shares.split(","):
        name, _, share = part.strip().rpartition(":")
        if not name or name in wanted or not (value := _finite(share)) or value < 0:
            raise StoreError(how)
        wanted[name] = value
    largest = max(wanted.values())
    wanted = {name: share / largest for name, share in wanted.items()}

    def keep(rows: pl.DataFrame) -> pl.Series:
        held = dict(rows["dataset"].value_counts().iter_rows())
        missing = sorted(set(wanted) - set(held))
        if missing:
            raise StoreError(
                f"the mix names '{missing[0]}'. Datasets left: {', '.join(sorted(held)) or 'none'}"
            )
        whole = min(held[name] / share for name, share in wanted.items())
        quota = {name: round(share * whole) for name, share in wanted.items()}
        lots = pl.Series(
            "lot",
            [xxhash.xxh3_64_intdigest(key.encode()) for key in rows["key"]],
            pl.UInt64,
        )
        turn = pl.col("lot").rank("ordinal").over("dataset")
        allowed = pl.col("dataset").replace_strict(
            quota, default=0, return_dtype=pl.Int64
        )
        return rows.select("dataset", lots).select((turn <= allowed).alias("keep"))[
            "keep"
        ]

    return Filter(f"over the mix {shares}", keep)


FILTERS: Sequence[Callable[..., Filter]] = (
    min_words,
    max_code,
    max_repetition,
    max_tokens,
    unique,
    mix,
)
NAMED = {make.__name__: make for make in FILTERS}


def named(text: str) -> Filter:
    """A named filter, `name` or `name=value`; StoreError with the names there are."""
    name, equals, value = text.partition("=")
    if name not in NAMED or (name == "mix" and not equals):
        near = did_you_mean(text.partition("=")[0], NAMED)
        raise StoreError(
            f"'{text}' is no filter{near}: use one of {', '.join(NAMED)}, as in min_words=6"
        )
    return NAMED[name](value) if equals else NAMED[name]()


def _number(text: str) -> float:
    value = _finite(text)
    if value is None:
        raise StoreError(f"'{text}' is not a number, as in min_words=6")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def filter_store(
    store: Store,
    name: str,
    *,
    expressions: Sequence[str] = (),
    filters: Sequence[str | Filter] = (),
    base: str | None = None,
) -> ViewRecord:
    """Make the view `name` of the samples that pass every named filter, then every expression.

    `base` starts from another view. No tensor is touched. The view keeps the key of every sample
    looked at with the reason it was dropped for, null when it was not; where a value is
    missing, the reason says so.
    """
    check_name(name, "view")
    if name == base:
        raise StoreError(
            f"the view '{name}' would be made from itself: give the new view another name"
        )
    rows = store.view(base).with_columns(pl.selectors.float().fill_nan(None))
    steps = [item if isinstance(item, Filter) else named(item) for item in filters]
    lost = unread(store.backend, rows.columns) if expressions else {}
    steps += [where(text, rows.columns, lost) for text in expressions]
    reasons: list[str] = []
    dropped: dict[str, int] = {}
    reason = np.full(len(rows), -1, np.int64)  # of each row, -1 while it is kept
    at, left = (
        np.arange(len(rows)),
        rows,
    )  # the rows that are left: a column of numbers could meet a name
    for step in steps:
        kept = step.keep(left)
        unknown, stay = kept.is_null().to_numpy(), kept.fill_null(False).to_numpy()
        for why, gone in (
            (step.reason, ~stay & ~unknown),
            (f"unknown: {step.reason}", unknown),
        ):
            if why == step.reason or gone.any():
                reason[at[gone]] = len(reasons)
                reasons.append(why)
                dropped[why] = dropped.get(why, 0) + int(gone.sum())
        at, left = at[stay], left.filter(stay)
    each = pl.Series([*reasons, None], dtype=pl.String).gather(
        np.where(reason < 0, len(reasons), reason)
    )
    table = rows.select("key").with_columns(each.alias("reason").cast(pl.Categorical))
    record = ViewRecord(
        schema=SCHEMA_VERSION,
        name=name,
        base=base,
        filters=tuple(step.reason for step in steps),
        rows=len(rows),
        kept=len(left),
        dropped=dropped,
    )
    write_table(store.backend, record, table)
    return record
