"""Views: which samples count, decided over the index alone, each drop with its reason.

A filter returns, per row, whether the sample stays. Filters apply in turn and a sample is
dropped for the first it fails. Columns come from the index: token counts, meta (see `measures`
for those made from text) and the statistics of training runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    reason = f"fewer than {least} words"
    return _bound("words", reason, lambda words: words >= _number(least))


def max_code(share: str = "0.05") -> Filter:
    """Little code: the share of programming symbols and keywords (HiViS, stage 2)."""
    reason = f"more than {share} code"
    return _bound("code_ratio", reason, lambda ratio: ratio <= _number(share))


def max_repetition(share: str = "0.3") -> Filter:
    """No degenerate loops: the share of word n-grams that were there before."""
    reason = f"more than {share} repetition"
    return _bound("repetition", reason, lambda ratio: ratio <= _number(share))


def max_tokens(most: str = "2048") -> Filter:
    """Samples whose expanded sequence is at most this long."""
    limit = _number(most)

    def keep(rows: pl.DataFrame) -> pl.Series:
        return rows["text_tokens"] + rows["visual_tokens"] <= limit

    return Filter(f"more than {most} tokens", keep)


def unique(text: str = "") -> Filter:
    """One of each group of near-duplicate responses: the first by key that shares no band of its sketch.

    A sample without a sketch counts as unique and stays.
    """
    if text:
        raise StoreError(
            f"the filter unique takes no value: write unique, not unique={text}"
        )

    def first(sketch: pl.Expr) -> pl.Expr:
        bands = []
        for start in range(0, SKETCH, BAND):
            bands.append(sketch.str.slice(start, BAND).is_first_distinct())
        return sketch.is_null() | pl.all_horizontal(bands)

    return _bound("sketch", "near-duplicate answer", first)


def mix(shares: str) -> Filter:
    """A dataset mix such as `llava:0.5,sharegpt:0.5`: as many samples as the shares allow.

    Datasets not named are dropped. Which samples stay depends on a hash of their keys alone.
    """
    wanted = _shares(shares)

    def keep(rows: pl.DataFrame) -> pl.Series:
        available = dict(rows["dataset"].value_counts().iter_rows())
        missing = sorted(set(wanted) - set(available))
        if missing:
            names = ", ".join(sorted(available)) or "none"
            raise StoreError(f"the mix names '{missing[0]}'. Datasets left: {names}")
        # The scarcest dataset decides how large the mix can be.
        size = min(available[name] / share for name, share in wanted.items())
        quota = {name: round(share * size) for name, share in wanted.items()}
        hashes = [xxhash.xxh3_64_intdigest(key.encode()) for key in rows["key"]]
        lots = pl.Series("lot", hashes, pl.UInt64)
        rank = pl.col("lot").rank("ordinal").over("dataset")
        allowed = pl.col("dataset").replace_strict(
            quota, default=0, return_dtype=pl.Int64
        )
        drawn = rows.select("dataset", lots).select(keep=rank <= allowed)
        return drawn["keep"]

    return Filter(f"over the mix {shares}", keep)


def _shares(text: str) -> dict[str, float]:
    """The shares of a mix, of which the largest is 1; StoreError when they cannot be read."""
    shares = dict[str, float]()
    for entry in text.split(","):
        name, _, number = entry.strip().rpartition(":")
        share = _finite(number)
        if not name or name in shares or not share or share < 0:
            raise StoreError(
                f"cannot read the mix '{text}': write it as llava:0.5,sharegpt:0.5"
            )
        shares[name] = share
    largest = max(shares.values())
    return {name: share / largest for name, share in shares.items()}


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
        near = did_you_mean(name, NAMED)
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
    unreadable = unread(store.backend, rows.columns) if expressions else {}
    steps += [where(text, rows.columns, unreadable) for text in expressions]
    reasons = _apply(steps, rows)
    reason = reasons.of_rows.alias("reason").cast(pl.Categorical)
    table = rows.select("key").with_columns(reason)
    record = ViewRecord(
        schema=SCHEMA_VERSION,
        name=name,
        base=base,
        filters=tuple(step.reason for step in steps),
        rows=len(rows),
        kept=len(rows) - sum(reasons.counts.values()),
        dropped=reasons.counts,
    )
    write_table(store.backend, record, table)
    return record


@dataclass(frozen=True)
class _Reasons:
    """Why rows were dropped."""

    of_rows: pl.Series  # of each row, null where it is kept
    counts: dict[str, int]
    """The rows dropped for each reason, in the order of the filters."""


def _apply(steps: Sequence[Filter], rows: pl.DataFrame) -> _Reasons:
    """Apply filters in turn: a row is dropped for the first that it fails."""
    texts: list[str] = []
    counts: dict[str, int] = {}
    text_of_row = np.full(len(rows), -1, np.int64)  # -1 while it is kept
    remaining = rows
    # Their numbers are apart: a column of numbers could meet a name.
    numbers = np.arange(len(rows))
    for step in steps:
        verdict = step.keep(remaining)
        unknown = verdict.is_null().to_numpy()
        kept = verdict.fill_null(False).to_numpy()
        dropped = {step.reason: ~kept & ~unknown}
        if unknown.any():
            dropped[f"unknown: {step.reason}"] = unknown
        for text, mask in dropped.items():
            text_of_row[numbers[mask]] = len(texts)
            texts.append(text)
            counts[text] = counts.get(text, 0) + int(mask.sum())
        numbers = numbers[kept]
        remaining = remaining.filter(kept)
    text_or_null = pl.Series([*texts, None], dtype=pl.String)
    number_of_text = np.where(text_of_row < 0, len(texts), text_of_row)
    return _Reasons(text_or_null.gather(number_of_text), counts)
