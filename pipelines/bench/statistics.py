"""The metrics of a measurement and their intervals over prompts.

All metrics are pooled over prompts:

- `tau`: tokens per verification call of the target, bonus counted (MSD, Sparrow);
- `accepted`: accepted draft tokens per call, bonus not counted (ViSpec's tau);
- `alpha[n]`: acceptance rate of the n-th token of the most likely chain, of the cycles that verified it and
  accepted all before it;
- `calibration[n]`: expected calibration error of the chance that the drafter tells of the n-th token: the
  mean over its tenths, by their guesses, of the difference between the chance and the share accepted;
- `speedup`: plain over speculative seconds per token, by the clock outside the decoders, vision and prefill
  included;
- `decode_speedup`: the same for the cycles after the prefill;
- `cycle_cost`: seconds of a cycle over seconds of a step of plain decoding: about tau / `decode_speedup`;
- `cpu_speedup`: the speedup in CPU seconds of the decoding thread, which other programs disturb less;
- `prefill_share`: the share of the prefill in the speculative seconds;
- `budget`: the speculative seconds by phase, which add up to all of them.

The first token comes from the prefill, not from a call: `tau` and `accepted` exclude it.

Intervals are 95% t intervals of the logarithm of a rate over prompts, by the jackknife within kinds of
prompts: images and texts differ by far more than prompts of one kind do, and an evaluation fixes how many of
each it has. Each kind adds its variance; the degrees of freedom are Welch's and Satterthwaite's (1946).
Drafters are compared on the same prompts, so that the difficulty of a prompt cancels.

Shapes: P prompts, R weightings of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmdistill.pipelines.bench.records import (
    BINS,
    Calibration,
    Chains,
    Decoding,
    Measurement,
    Phases,
    PromptResult,
    ResponsePart,
)

FEWEST = 6  # prompts for an interval
FEWEST_OF_KIND = (
    4  # prompts of each of its kinds: with three, too few intervals hold the truth
)
FEWEST_SEEDS = 5  # for an interval over seeds
TOLERANCE = 0.02  # share of the elapsed seconds that the cycles may leave unaccounted
TOLERANCE_SHARED = 0.08  # the same where other programs had a part of the CPU
CHEAP = 0.9  # share of plain decoding's seconds on a prompt below which a drafter's did less work,
MOST_PROMPTS = 0.9  # if so for this share of the prompts
DRIFT = 1.25  # between the calibrations of one evaluation, above which they differ
BUSY = (
    0.9  # share of the elapsed seconds below which the CPU was not this program's alone
)

Floats = npt.NDArray[np.float64]
Rate = Literal[
    "tau", "accepted", "speedup", "decode_speedup", "cycle_cost", "cpu_speedup"
]

OF_CYCLES: frozenset[Rate] = frozenset(
    ("tau", "accepted", "decode_speedup", "cycle_cost")
)
"""Rates that do not exist where nothing was drafted: every response ended with its first token."""


@dataclass(frozen=True)
class Interval:
    """A 95% interval over prompts."""

    low: float
    high: float


@dataclass(frozen=True)
class Checks:
    """Counts of responses at temperature 0 by their comparison with the stock model."""

    identical: int
    near_tie: int
    different: int

    @property
    def total(self) -> int:
        """The number of compared responses."""
        return self.identical + self.near_tie + self.different


@dataclass(frozen=True, kw_only=True)
class Budget(Phases):
    """The seconds of all responses by phase (`drafters.decoding.clock.Phase`), in sum `Figures.seconds`."""

    other: float  # Python between the phases, and what the cycles do not account for
    plain_step: float  # seconds of a step of plain decoding
    ideal: (
        float  # decode speedup if a cycle took as long as its drafting and a plain step
    )


@dataclass(frozen=True)
class PartRates:
    """A drafter on one part of the responses."""

    part: str
    prompts: int  # whose responses have it
    calls: int
    tau: float
    accepted: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The metrics of one drafter at one temperature, see the top of the file."""

    prompts: int
    tau: float
    accepted: float
    alpha: tuple[float, ...]
    calibration: tuple[float, ...]  # empty: the drafter told no chances
    speedup: float
    decode_speedup: float
    cycle_cost: float
    cpu_speedup: float | None  # None on a GPU
    intervals: dict[Rate, Interval]  # empty for fewer than `FEWEST` prompts
    prefill_share: float
    tokens: int
    plain_tokens: int
    calls: int
    seconds: float
    plain_seconds: float
    tokens_per_second: float
    plain_tokens_per_second: float
    budget: Budget | None  # None if a prompt was measured without phases
    # drafted tokens that the response has and that were not accepted: 0 unless acceptance is broken
    missed: int
    cpu_share: float | None  # of the elapsed seconds, both decoders; None on a GPU
    accounted: float  # share of the elapsed seconds that the cycles account for
    plain_accounted: float
    lossless: Checks
    plain_lossless: Checks
    parts: tuple[
        PartRates, ...
    ]  # by context, and by thinking and answer, where there are several
    doubts: tuple[
        str, ...
    ] = ()  # why the speedup may not be one: no verdict rests on it
    warnings: tuple[str, ...] = ()  # all problems of these metrics, doubts included


def figures(measurement: Measurement) -> Figures:
    """Compute the metrics of a measurement."""
    prompts = measurement.prompts
    plain, own = [one.plain for one in prompts], [one.drafted for one in prompts]
    whole, left = rates(measurement), _left_out(prompts)
    seconds, plain_seconds = (sum(one.seconds for one in side) for side in (own, plain))
    tokens, plain_tokens = (sum(one.tokens for one in side) for side in (own, plain))
    found = Figures(
        prompts=len(prompts),
        tau=whole["tau"],
        accepted=whole["accepted"],
        alpha=alpha(own),
        calibration=_calibration(own),
        speedup=whole["speedup"],
        decode_speedup=whole["decode_speedup"],
        cycle_cost=whole["cycle_cost"],
        cpu_speedup=whole.get("cpu_speedup"),
        intervals=left.intervals(whole, _rates(prompts, left.weight_PP))
        if left
        else {},
        prefill_share=_ratio(sum(one.prefill_seconds for one in own), seconds),
        tokens=tokens,
        plain_tokens=plain_tokens,
        calls=sum(one.calls for one in own),
        seconds=seconds,
        plain_seconds=plain_seconds,
        tokens_per_second=_ratio(tokens, seconds),
        plain_tokens_per_second=_ratio(plain_tokens, plain_seconds),
        budget=_budget(prompts, whole["tau"]),
        missed=sum(one.missed for one in own),
        cpu_share=cpu_share_of([*own, *plain]),
        accounted=_accounted(own),
        plain_accounted=_accounted(plain),
        lossless=_checks(own),
        plain_lossless=_checks(plain),
        parts=tuple(_parts(prompts)),
    )
    doubts = (*_doubts(found), *_cheaper(prompts))
    return replace(found, doubts=doubts, warnings=(*doubts, *_warnings(found)))


def rates(measurement: Measurement) -> dict[Rate, float]:
    """The rates alone, without intervals."""
    prompts = measurement.prompts
    return {
        rate: float(one[0])
        for rate, one in _rates(prompts, np.ones((1, len(prompts)))).items()
    }


def advantage(
    one: Measurement, other: Measurement, rate: Rate = "speedup"
) -> Interval | None:
    """The interval of the ratio of two drafters' rates on the same prompts.

    None for too few prompts. If the interval contains 1, they do not differ significantly.
    """
    if (left := _left_out(one.prompts)) is None:
        return None
    whole_1P = np.ones((1, len(one.prompts)))
    ratio_1, ratio_P = (
        _over(*(_rates(at.prompts, weight)[rate] for at in (one, other)))
        for weight in (whole_1P, left.weight_PP)
    )
    return left.intervals({rate: float(ratio_1[0])}, {rate: ratio_P}).get(rate)


@dataclass(frozen=True)
class Difference:
    """The mean difference of two settings' rates, with its 95% interval over seeds and prompts."""

    mean: float
    interval: Interval | None  # None for fewer than `FEWEST_SEEDS` seeds

    @property
    def text(self) -> str:
        """The mean, and the interval in parentheses."""
        within = (
            f" ({self.interval.low:+.2f} to {self.interval.high:+.2f})"
            if self.interval
            else ""
        )
        return f"{self.mean:+.2f}{within}"


def difference(
    ones: Sequence[Measurement], others: Sequence[Measurement], rate: Rate = "tau"
) -> Difference:
    """Compare two settings that were each trained with the same seeds: a measurement for each seed.

    Each seed gives a difference of pooled rates. Their t interval has the luck of training; the interval
    of their mean over prompts has the luck of the prompts (left out for too few). Half widths add as standard
    errors do. Noise that both contain counts twice, so the interval is rather too wide.
    """
    left = _left_out(ones[0].prompts)
    whole_1P = np.ones((1, len(ones[0].prompts)))
    weight_RP = whole_1P if left is None else np.concatenate([whole_1P, left.weight_PP])
    between_SR = np.array(
        [
            _rates(one.prompts, weight_RP)[rate]
            - _rates(other.prompts, weight_RP)[rate]
            for one, other in zip(ones, others, strict=True)
        ]
    )
    mean_R, seeds = between_SR.mean(axis=0), len(ones)
    mean = float(mean_R[0])
    if seeds < FEWEST_SEEDS:
        return Difference(mean, None)
    training = _student(seeds - 1) * float(between_SR[:, 0].std(ddof=1)) / seeds**0.5
    half = math.hypot(training, left.half(mean_R[1:]) if left else 0.0)
    return Difference(mean, Interval(mean - half, mean + half))


def _rates(prompts: Sequence[PromptResult], weight_RP: Floats) -> dict[Rate, Floats]:
    """The rates [R] if prompt p counts `weight_RP[r, p]` times."""

    def totals(value: Callable[[PromptResult], float]) -> Floats:
        sums_R: Floats = weight_RP @ np.array(
            [value(one) for one in prompts], dtype=np.float64
        )
        return sums_R

    calls_R = totals(lambda one: one.drafted.calls)
    gained_R = totals(lambda one: one.drafted.tokens - 1)
    pace_R = _over(
        totals(lambda one: one.drafted.seconds), totals(lambda one: one.drafted.tokens)
    )
    plain_pace_R = _over(
        totals(lambda one: one.plain.seconds), totals(lambda one: one.plain.tokens)
    )
    decode_R = _over(totals(lambda one: one.drafted.decode_seconds), gained_R)
    plain_decode_R = _over(
        totals(lambda one: one.plain.decode_seconds),
        totals(lambda one: one.plain.tokens - 1),
    )
    found: dict[Rate, Floats] = {
        "tau": _over(gained_R, calls_R),
        "accepted": _over(totals(lambda one: one.drafted.accepted), calls_R),
        "speedup": _over(plain_pace_R, pace_R),
        "decode_speedup": _over(plain_decode_R, decode_R),
        "cycle_cost": _over(
            _over(totals(lambda one: one.drafted.decode_seconds), calls_R),
            plain_decode_R,
        ),
    }
    if all(
        None not in (one.drafted.cpu_seconds, one.plain.cpu_seconds) for one in prompts
    ):
        own_R = totals(lambda one: one.drafted.cpu_seconds or 0)
        plain_R = totals(lambda one: one.plain.cpu_seconds or 0)
        own_R = _over(own_R, totals(lambda one: one.drafted.tokens))
        plain_R = _over(plain_R, totals(lambda one: one.plain.tokens))
        found["cpu_speedup"] = _over(plain_R, own_R)
    return found


@dataclass(frozen=True)
class _LeftOut:
    """Weightings that leave each prompt out in turn, the others of its kind counting as much more."""

    weight_PP: Floats
    kinds: tuple[npt.NDArray[np.intp], ...]
    sizes: tuple[
        float, ...
    ]  # of each kind: as many prompts of equal length say as much (Kish 1965)

    def half(self, value_P: Floats) -> float:
        """Half of the 95% interval of a statistic with these values."""
        variance = free = 0.0
        for at_K, size in zip(self.kinds, self.sizes, strict=True):
            count = len(at_K)
            part = (count - 1) ** 2 / count * float(value_P[at_K].var(ddof=1))
            variance, free = variance + part, free + part**2 / max(1.0, size - 1)
        return _student(variance**2 / free) * variance**0.5 if free else 0.0

    def intervals(
        self, whole: Mapping[Rate, float], left: Mapping[Rate, Floats]
    ) -> dict[Rate, Interval]:
        """Of the rates that are never 0, by the values of all prompts and with each left out."""
        found = {}
        for rate, value_P in left.items():
            if (value_P > 0).all():
                center, half = whole[rate], self.half(np.log(value_P))
                found[rate] = Interval(
                    center * math.exp(-half), center * math.exp(half)
                )
        return found


def _left_out(prompts: Sequence[PromptResult]) -> _LeftOut | None:
    """None for too few prompts."""
    kind_P = np.array([one.kind for one in prompts])
    kinds = tuple(np.flatnonzero(kind_P == kind) for kind in np.unique(kind_P))
    if len(prompts) < FEWEST or min(map(len, kinds)) < FEWEST_OF_KIND:
        return None
    weight_PP = np.ones((len(prompts), len(prompts)))
    for at_K in kinds:
        weight_PP[np.ix_(at_K, at_K)] = len(at_K) / (len(at_K) - 1)
    np.fill_diagonal(weight_PP, 0)
    tokens_P = np.array([one.drafted.tokens for one in prompts], dtype=np.float64)
    sizes = tuple(
        float(tokens_P[at_K].sum() ** 2 / (tokens_P[at_K] ** 2).sum()) for at_K in kinds
    )
    return _LeftOut(weight_PP, kinds, sizes)


@lru_cache(maxsize=1024)
def _student(free: float) -> float:
    """The 97.5% quantile of Student's t, by bisection of its integral; degrees of freedom from 1 on."""
    free = max(1.0, free)
    scale = math.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(
        math.pi * free
    )
    low, high = 1.9, 12.8
    while high - low > 1e-6:
        middle = (low + high) / 2
        x_N = np.linspace(0, middle, 4001)
        mass = scale * np.trapezoid((1 + x_N**2 / free) ** (-(free + 1) / 2), x_N)
        low, high = (middle, high) if mass < 0.475 else (low, middle)
    return high


def alpha(decoded: Sequence[Chains]) -> tuple[float, ...]:
    """The acceptance rate by position, pooled."""
    tried = [
        sum(column)
        for column in zip_longest(*(one.chain_tried for one in decoded), fillvalue=0)
    ]
    kept = [
        sum(column)
        for column in zip_longest(*(one.chain_accepted for one in decoded), fillvalue=0)
    ]
    return tuple(_ratio(above, below) for above, below in zip(kept, tried, strict=True))


def _parts(prompts: Sequence[PromptResult]) -> Iterator[PartRates]:
    """By length of context, and by thinking and answer, where the responses have several of these."""
    found = [(one.key, part) for one in prompts for part in one.drafted.parts]
    cuts: list[dict[str, list[tuple[str, ResponsePart]]]] = [{}, {}]
    for key, part in sorted(
        found, key=lambda one: (one[1].context, not one[1].thinking)
    ):
        cuts[0].setdefault(f"context from {part.context}", []).append((key, part))
        cuts[1].setdefault("thinking" if part.thinking else "answer", []).append(
            (key, part)
        )
    for cut in cuts:
        for name, some in cut.items() if len(cut) > 1 or "thinking" in cut else ():
            calls = sum(part.calls for _, part in some)
            yield PartRates(
                part=name,
                prompts=len({key for key, _ in some}),
                calls=calls,
                tau=_ratio(sum(part.tokens for _, part in some), calls),
                accepted=_ratio(sum(part.accepted for _, part in some), calls),
            )


def _calibration(decoded: Sequence[Decoding]) -> tuple[float, ...]:
    """Expected calibration error by position, with the tenths of all responses together."""
    bins: dict[tuple[int, int], list[float]] = {}
    for one in (one for response in decoded for one in response.told):
        tenth = min(int(BINS * one.chances / one.tried), BINS - 1) if one.tried else 0
        sums = bins.setdefault((one.position, tenth), [0.0, 0.0, 0.0])
        for at, value in enumerate((one.tried, one.accepted, one.chances)):
            sums[at] += value
    positions = 1 + max((position for position, _ in bins), default=-1)
    tried, gaps = [0.0] * positions, [0.0] * positions
    for (position, _), (count, accepted, chances) in bins.items():
        tried[position] += count
        gaps[position] += abs(chances - accepted)
    return tuple(_ratio(gap, count) for gap, count in zip(gaps, tried, strict=True))


def _checks(decoded: Sequence[Decoding]) -> Checks:
    counts = Counter(one.check for one in decoded)
    return Checks(counts["identical"], counts["near_tie"], counts["different"])


def _accounted(decoded: Sequence[Decoding]) -> float:
    inside = sum(one.prefill_seconds + one.decode_seconds for one in decoded)
    outside = sum(one.seconds for one in decoded)
    return inside / outside if outside else 1.0


def cpu_share_of(decoded: Sequence[Decoding]) -> float | None:
    """The share of the elapsed seconds in which this program had the CPU; None on a GPU."""
    known = [one.cpu_seconds for one in decoded if one.cpu_seconds is not None]
    return (
        _ratio(sum(known), sum(one.seconds for one in decoded))
        if len(known) == len(decoded)
        else None
    )


def _doubts(found: Figures) -> Iterator[str]:
    """What says that the speedup is not one."""
    for whose, checks in (
        ("", found.lossless),
        (" of plain decoding", found.plain_lossless),
    ):
        if checks.different:
            yield (
                f"{checks.different} of {checks.total} responses{whose} differ from the target's by more "
                "than a near-tie: do not rely on these numbers"
            )
    if found.accounted > 1 + tolerance(found.cpu_share):
        yield _unaccounted("the", found.accounted)
    if abs(1 - found.plain_accounted) > tolerance(found.cpu_share):
        yield _unaccounted("plain decoding's", found.plain_accounted)
    if found.missed:
        yield (
            f"{found.missed} drafted tokens agree with the responses and were not accepted: acceptance is "
            "broken"
        )


def _cheaper(prompts: Sequence[PromptResult]) -> Iterator[str]:
    """The vision encoder and the target's layers work on a prompt in the same way for both sides."""
    if len(prompts) < FEWEST:
        return
    shown = [one for one in prompts if one.kind != "text"]
    parts: dict[str, list[tuple[float, float]]] = {
        "first cycle": [
            (one.drafted.prefill_seconds, one.plain.prefill_seconds) for one in prompts
        ],
        "prefill": [
            (one.drafted.phases.prefill, one.plain.phases.prefill)
            for one in prompts
            if one.drafted.phases and one.plain.phases
        ],
        "vision encoder": [
            (one.drafted.phases.vision, one.plain.phases.vision)
            for one in shown
            if one.drafted.phases and one.plain.phases
        ],
    }
    for name, pairs in parts.items():
        ratios = [own / plain for own, plain in pairs if plain]
        if len(ratios) >= FEWEST and np.quantile(ratios, MOST_PROMPTS) < CHEAP:
            yield (
                f"the drafter's {name} takes {np.median(ratios):.0%} of the time that plain decoding's "
                "takes for the same work"
            )


def _warnings(found: Figures) -> Iterator[str]:
    """What makes the numbers less than they seem, though the speedup is one."""
    if not found.calls:
        yield "nothing was drafted: no response has more than its first token"
    if found.accounted < 1 - tolerance(found.cpu_share):
        yield _unaccounted("the", found.accounted)
    if found.cpu_share is not None and found.cpu_share < BUSY:
        yield (
            f"the CPU was this program's for {found.cpu_share:.0%} of the time: other programs may have "
            "slowed it down"
        )


def tolerance(cpu_share: float | None) -> float:
    """Of the elapsed seconds: other programs may take the CPU between two cycles, too."""
    shared = cpu_share is not None and cpu_share < BUSY
    return TOLERANCE_SHARED if shared else TOLERANCE


def _unaccounted(whose: str, share: float) -> str:
    return (
        f"{whose} cycles account for {share:.1%} of the elapsed seconds: speedup includes all seconds, "
        "decode_speedup and prefill_share only those of the cycles"
    )


def drift(calibrations: Sequence[Calibration]) -> list[str]:
    """A warning for each speed of the machine that differs by more than `DRIFT` during an evaluation."""
    found = []
    for name in ("plain_step", "small_product", "large_product", "bandwidth"):
        values = [value for one in calibrations if (value := getattr(one, name))]
        if values and (most := max(values) / min(values)) > DRIFT:
            found.append(
                f"the machine's speed changed while it was measured: {name.replace('_', ' ')} by a factor of "
                f"{most:.2f}"
            )
    return found


def _budget(prompts: Sequence[PromptResult], tau: float) -> Budget | None:
    spent = [one.drafted.phases for one in prompts if one.drafted.phases is not None]
    if len(spent) < len(prompts):
        return None
    phases = {
        name: sum(getattr(one, name) for one in spent)
        for name in Phases.__dataclass_fields__
    }
    step = _ratio(
        sum(one.plain.decode_seconds for one in prompts),
        sum(one.plain.calls for one in prompts),
    )
    drafting = _ratio(phases["draft"], sum(one.drafted.calls for one in prompts))
    other = sum(one.drafted.seconds for one in prompts) - sum(phases.values())
    return Budget(
        **phases,
        other=other,
        plain_step=step,
        ideal=tau * _ratio(step, step + drafting),
    )


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _over(above_R: Floats, below_R: Floats) -> Floats:
    return np.divide(above_R, below_R, out=np.zeros_like(above_R), where=below_R > 0)
