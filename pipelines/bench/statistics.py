"""The metrics of a measurement and their intervals over prompts.

All metrics are pooled over prompts:

- `tau`: tokens per verification call of the target, bonus counted (MSD, Sparrow);
- `accepted`: accepted draft tokens per call, bonus not counted (ViSpec's tau);
- `alpha[n]`: acceptance rate of the n-th token of the most likely chain, of the cycles that verified it and
  accepted all before it;
- `calibration[n]`: expected calibration error of the probability that the drafter gives the n-th token: the
  mean over its tenths, by their guesses, of the difference between probability and share accepted;
- `speedup`: plain over speculative seconds per token, by the clock outside the decoders, vision and prefill
  included. Seconds in which other programs had the CPU do not count; those in which a decoder sleeps do;
- `decode_speedup`: the same for the cycles after the prefill;
- `cycle_cost`: seconds of a cycle over seconds of a step of plain decoding: about tau / `decode_speedup`;
- `prefill_share`: the share of the prefill in the speculative seconds;
- `budget`: the speculative seconds by phase, which add up to all of them.

The first token comes from the prefill, not from a call: `tau` and `accepted` exclude it. Where no
response has a second token, nothing was drafted and the rates of `OF_CYCLES` do not exist.

Intervals are 95% t intervals of the logarithm of a rate over prompts, by the jackknife within kinds of
prompts: images and texts differ by far more than prompts of one kind do, and an evaluation fixes how many of
each it has. Each kind adds its variance; the degrees of freedom are Welch's and Satterthwaite's (1946).
Drafters are compared on the same prompts, so that the difficulty of a prompt cancels.

Shapes: P prompts, R weightings of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vlmdistill.pipelines.bench.records import (
    BINS,
    Calibration,
    Chains,
    Decoding,
    DecodingCounts,
    Measurement,
    Phases,
    ProbabilityBin,
    PromptResult,
    ResponseSection,
)

FEWEST = 6  # prompts for an interval
FEWEST_OF_KIND = 4
"""Prompts of each kind: with three, too few intervals hold the truth."""
FEWEST_SEEDS = 5  # for an interval over seeds
TOLERANCE = 0.02  # share of the elapsed seconds that the cycles may leave unaccounted
TOLERANCE_SHARED = 0.08  # the same where other programs had a part of the CPU
OUTSIDE = 0.001  # besides: seconds of each response, for the begin and end of a decoder
CHEAP = (0.9, 0.5, 0.25)
"""Shares of plain decoding's seconds below which a drafter did less work on a prompt,"""
CHANCE = 1e-4
"""if so on so many prompts that chance is excluded: as many are expected on which plain
decoding took as much less time. Or, where no other program had a part of the CPU,"""
MOST_PROMPTS = 0.9  # on this share of `FEWEST` prompts or more.
SHORT = 16  # tokens of a response up to which it may well equal another prompt's
COPIES = 0.1  # share of the prompts whose responses equal each other
DRIFT = 1.25  # ratio of two calibrations of one evaluation above which they differ
BUSY = 0.9  # share of the elapsed seconds below which other programs had the CPU for the rest
MOSTLY = 0.5  # likewise, below which speeds are those of other programs
UNEVEN, UNEVEN_SHARED = 0.95, 0.9
"""The share that other programs leave a drafter, over what they leave plain decoding, below
which they run beside the drafter more: on a quiet CPU, and on one that others use."""
WAITING = 0.8
"""The share of its time in which a drafter runs, over plain decoding's, below which others
work for it;"""
SLEEPING = 0.95  # the inverse, below which plain decoding sleeps.
FEW_ROUNDED, MANY_ROUNDED = 0.1, 0.5
"""Shares of greedy responses that rounding may change in another process, in float32 and
in half precision."""
FEWEST_DIFFERENT = 5  # greedy responses that show another target

Floats = npt.NDArray[np.float64]
Rate = Literal["tau", "accepted", "speedup", "decode_speedup", "cycle_cost"]

OF_CYCLES: frozenset[Rate] = frozenset(
    ("tau", "accepted", "decode_speedup", "cycle_cost")
)
"""Rates that do not exist where nothing was drafted."""


class Pair(Protocol):
    """A prompt decoded by both sides: what a rate is computed from."""

    @property
    def kind(self) -> str:
        """The kind of the prompt: prompts of one kind vary less than those of several."""

    @property
    def plain(self) -> DecodingCounts:
        """Plain decoding."""

    @property
    def drafted(self) -> DecodingCounts:
        """Speculative decoding."""


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
    """The seconds of all responses by phase, in sum `Figures.seconds`."""

    other: float
    """Python between the phases, and what the cycles do not account for."""
    plain_step: float  # seconds of a step of plain decoding
    ideal: float
    """Decode speedup if a cycle took as long as its drafting and a plain step."""


@dataclass(frozen=True)
class SectionRates:
    """A drafter on one section of the responses."""

    section: str
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
    calibration: tuple[float, ...]  # empty: the drafter gives no probabilities
    speedup: float
    decode_speedup: float
    cycle_cost: float
    intervals: dict[Rate, Interval]  # empty for fewer than `FEWEST` prompts
    prefill_share: float
    tokens: int
    plain_tokens: int
    calls: int
    seconds: float
    plain_seconds: float
    tokens_per_second: float
    plain_tokens_per_second: float
    budget: Budget
    missed: int
    """Drafted tokens that the response has and no cycle accepted: 0 unless acceptance
    is broken."""
    cpu_share: float | None
    """The share of plain decoding's elapsed seconds that other programs left it. None on a
    GPU."""
    own_cpu_share: float | None  # of the drafter
    has_delays: bool
    """Whether it is known when other programs had the CPU."""
    is_uneven: bool
    """Whether they had it beside the drafter more than beside plain decoding."""
    accounted: float  # share of the elapsed seconds that the cycles account for
    plain_accounted: float
    lossless: Checks
    plain_lossless: Checks
    sections: tuple[SectionRates, ...]
    """By context, and by thinking and answer, where there are several."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the speedup: no verdict rests on it."""
    warnings: tuple[str, ...] = ()  # all problems of these metrics, doubts included

    @property
    def least_cpu_share(self) -> float | None:
        """Of the decoder that had less of the CPU, for whatever reason."""
        if self.cpu_share is None or self.own_cpu_share is None:
            return None
        return min(self.cpu_share, self.own_cpu_share)


def figures(measurement: Measurement) -> Figures:
    """Compute the metrics of a measurement."""
    prompts = measurement.prompts
    plain = [prompt.plain for prompt in prompts]
    drafted = [prompt.drafted for prompt in prompts]
    rate_values, intervals = rates_with_intervals(prompts)
    tokens = sum(response.tokens for response in drafted)
    plain_tokens = sum(response.tokens for response in plain)
    seconds = sum(response.seconds for response in drafted)
    plain_seconds = sum(response.seconds for response in plain)
    prefill_seconds = sum(response.prefill_seconds for response in drafted)
    unjudged = Figures(
        prompts=len(prompts),
        tau=rate_values["tau"],
        accepted=rate_values["accepted"],
        alpha=alpha(drafted),
        calibration=_calibration(drafted),
        speedup=rate_values["speedup"],
        decode_speedup=rate_values["decode_speedup"],
        cycle_cost=rate_values["cycle_cost"],
        intervals=intervals,
        prefill_share=_ratio(prefill_seconds, seconds),
        tokens=tokens,
        plain_tokens=plain_tokens,
        calls=sum(response.calls for response in drafted),
        seconds=seconds,
        plain_seconds=plain_seconds,
        tokens_per_second=_ratio(tokens, seconds),
        plain_tokens_per_second=_ratio(plain_tokens, plain_seconds),
        budget=_budget(prompts, rate_values["tau"]),
        missed=sum(response.missed for response in drafted),
        cpu_share=cpu_share_of(plain),
        own_cpu_share=cpu_share_of(drafted),
        has_delays=has_delays([*plain, *drafted]),
        is_uneven=_is_uneven(prompts),
        accounted=_accounted(drafted),
        plain_accounted=_accounted(plain),
        lossless=_checks(drafted),
        plain_lossless=_checks(plain),
        sections=tuple(_sections(prompts)),
    )
    doubts = (*_doubts(unjudged), *_cheaper(prompts), *_asleep(prompts))
    of_responses = (*_at_last_position(prompts), *_equal_responses(prompts))
    warnings = (*doubts, *_warnings(unjudged), *_held_up(prompts), *of_responses)
    return replace(unjudged, doubts=doubts, warnings=warnings)


def as_facts(rated: Figures) -> dict[str, Any]:
    """The metrics by name; if nothing was drafted, those of cycles are None."""
    undefined = () if rated.calls else OF_CYCLES
    return {**asdict(rated), **dict.fromkeys(undefined)}


def rates(measurement: Measurement) -> dict[Rate, float]:
    """The rates alone, without intervals."""
    return _pooled_rates(measurement.prompts)


def rates_with_intervals(
    pairs: Sequence[Pair],
) -> tuple[dict[Rate, float], dict[Rate, Interval]]:
    """The rates, and the intervals of those that are never 0; none for few prompts."""
    pooled = _pooled_rates(pairs)
    jackknife = _Jackknife.of(pairs)
    if jackknife is None:
        return pooled, {}
    leaving_one_out = _rates(pairs, jackknife.weight_PP)
    return pooled, jackknife.intervals(pooled, leaving_one_out)


def _pooled_rates(pairs: Sequence[Pair]) -> dict[Rate, float]:
    rates_1 = _rates(pairs, np.ones((1, len(pairs))))
    return {rate: float(value_1[0]) for rate, value_1 in rates_1.items()}


def advantage(
    measurement: Measurement, other: Measurement, rate: Rate = "speedup"
) -> Interval | None:
    """The interval of the ratio of two drafters' rates on the same prompts.

    None for too few prompts. If the interval contains 1, they do not differ significantly.
    """
    jackknife = _Jackknife.of(measurement.prompts)
    if jackknife is None:
        return None
    whole_1P = np.ones((1, len(measurement.prompts)))

    def ratio_of(weight_RP: Floats) -> Floats:
        rate_R = _rates(measurement.prompts, weight_RP)[rate]
        other_rate_R = _rates(other.prompts, weight_RP)[rate]
        return _over(rate_R, other_rate_R)

    pooled = {rate: float(ratio_of(whole_1P)[0])}
    leaving_one_out = {rate: ratio_of(jackknife.weight_PP)}
    return jackknife.intervals(pooled, leaving_one_out).get(rate)


@dataclass(frozen=True)
class Difference:
    """The mean difference of two settings' rates, with its 95% interval over seeds and prompts."""

    mean: float
    interval: Interval | None  # None for fewer than `FEWEST_SEEDS` seeds

    @property
    def text(self) -> str:
        """The mean, and the interval in parentheses."""
        if self.interval is None:
            return f"{self.mean:+.2f}"
        low, high = self.interval.low, self.interval.high
        return f"{self.mean:+.2f} ({low:+.2f} to {high:+.2f})"


def difference(
    measurements: Sequence[Measurement],
    baselines: Sequence[Measurement],
    rate: Rate = "tau",
) -> Difference:
    """Compare two settings that were each trained with the same seeds: a measurement for each seed.

    Each seed gives a difference of pooled rates. Their t interval has the luck of training; the interval
    of their mean over prompts has the luck of the prompts (left out for too few). Half widths add as standard
    errors do. Noise that both contain counts twice, so the interval is rather too wide.

    Shape S: seeds.
    """
    jackknife = _Jackknife.of(measurements[0].prompts)
    weight_RP = np.ones((1, len(measurements[0].prompts)))
    if jackknife is not None:
        weight_RP = np.concatenate([weight_RP, jackknife.weight_PP])
    differences = []
    for measurement, baseline in zip(measurements, baselines, strict=True):
        rate_R = _rates(measurement.prompts, weight_RP)[rate]
        baseline_rate_R = _rates(baseline.prompts, weight_RP)[rate]
        differences.append(rate_R - baseline_rate_R)
    difference_SR = np.array(differences)
    mean_R = difference_SR.mean(axis=0)
    mean, seeds = float(mean_R[0]), len(measurements)
    if seeds < FEWEST_SEEDS:
        return Difference(mean, None)
    error_of_seeds = float(difference_SR[:, 0].std(ddof=1)) / seeds**0.5
    half_of_seeds = _student(seeds - 1) * error_of_seeds
    half_of_prompts = jackknife.half(mean_R[1:]) if jackknife else 0.0
    half = math.hypot(half_of_seeds, half_of_prompts)
    return Difference(mean, Interval(mean - half, mean + half))


def _rates(pairs: Sequence[Pair], weight_RP: Floats) -> dict[Rate, Floats]:
    """The rates [R] if prompt p counts `weight_RP[r, p]` times."""

    def plain(value: Callable[[DecodingCounts], float]) -> Floats:
        return _weighted(weight_RP, [value(pair.plain) for pair in pairs])

    def drafted(value: Callable[[DecodingCounts], float]) -> Floats:
        return _weighted(weight_RP, [value(pair.drafted) for pair in pairs])

    calls_R = drafted(lambda counts: counts.calls)
    tokens_R = drafted(lambda counts: counts.tokens)
    plain_tokens_R = plain(lambda counts: counts.tokens)
    gained_R = drafted(lambda counts: counts.tokens - 1)
    accepted_R = drafted(lambda counts: counts.accepted)
    # Seconds per token, and per token after the first.
    pace_R = _over(drafted(lambda counts: counts.undisturbed_seconds), tokens_R)
    plain_pace_R = _over(
        plain(lambda counts: counts.undisturbed_seconds), plain_tokens_R
    )
    decode_seconds_R = drafted(lambda counts: counts.undisturbed_decode_seconds)
    decode_pace_R = _over(decode_seconds_R, gained_R)
    plain_decode_pace_R = _over(
        plain(lambda counts: counts.undisturbed_decode_seconds),
        plain(lambda counts: counts.tokens - 1),
    )
    cycle_seconds_R = _over(decode_seconds_R, calls_R)
    return {
        "tau": _over(gained_R, calls_R),
        "accepted": _over(accepted_R, calls_R),
        "speedup": _over(plain_pace_R, pace_R),
        "decode_speedup": _over(plain_decode_pace_R, decode_pace_R),
        "cycle_cost": _over(cycle_seconds_R, plain_decode_pace_R),
    }


def _weighted(weight_RP: Floats, values: Sequence[float]) -> Floats:
    sums_R: Floats = weight_RP @ np.array(values, dtype=np.float64)
    return sums_R


@dataclass(frozen=True)
class _Jackknife:
    """Weightings that leave each prompt out in turn, the others of its kind counting as much more."""

    weight_PP: Floats
    kinds: tuple[npt.NDArray[np.intp], ...]  # the prompts of each kind
    sizes: tuple[float, ...]
    """Of each kind: as many prompts of equal length say as much (Kish 1965)."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "_Jackknife | None":
        """None if there are too few prompts."""
        kind_P = np.array([pair.kind for pair in pairs])
        kinds = tuple(np.flatnonzero(kind_P == kind) for kind in np.unique(kind_P))
        if len(pairs) < FEWEST or min(map(len, kinds)) < FEWEST_OF_KIND:
            return None
        tokens_P = np.array([pair.drafted.tokens for pair in pairs], dtype=np.float64)
        weight_PP = np.ones((len(pairs), len(pairs)))
        sizes = []
        for at_K in kinds:
            weight_PP[np.ix_(at_K, at_K)] = len(at_K) / (len(at_K) - 1)
            tokens_K = tokens_P[at_K]
            sizes.append(float(tokens_K.sum() ** 2 / (tokens_K**2).sum()))
        np.fill_diagonal(weight_PP, 0)
        return cls(weight_PP, kinds, tuple(sizes))

    def half(self, value_P: Floats) -> float:
        """Half of the 95% interval of a statistic with these values."""
        variance = 0.0
        welch = 0.0  # the sum over which the squared variance is the degrees of freedom
        for at_K, size in zip(self.kinds, self.sizes, strict=True):
            count = len(at_K)
            spread = float(value_P[at_K].var(ddof=1))
            kind_variance = (count - 1) ** 2 / count * spread
            variance += kind_variance
            welch += kind_variance**2 / max(1.0, size - 1)
        if not welch:
            return 0.0
        return _student(variance**2 / welch) * math.sqrt(variance)

    def intervals(
        self, pooled: Mapping[Rate, float], leaving_one_out: Mapping[Rate, Floats]
    ) -> dict[Rate, Interval]:
        """The intervals of the rates that are never 0.

        `pooled` are the rates of all prompts, `leaving_one_out` those with each prompt left out.
        """
        intervals = {}
        for rate, value_P in leaving_one_out.items():
            if (value_P > 0).all():
                half = self.half(np.log(value_P))
                low = pooled[rate] * math.exp(-half)
                high = pooled[rate] * math.exp(half)
                intervals[rate] = Interval(low, high)
        return intervals


@lru_cache(maxsize=1024)
def _student(freedom: float) -> float:
    """The 97.5% quantile of Student's t, by bisection of its integral.

    `freedom`: degrees of freedom, from 1 on.
    """
    freedom = max(1.0, freedom)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(math.pi * freedom)
    low, high = 1.9, 12.8
    while high - low > 1e-6:
        middle = (low + high) / 2
        x_N = np.linspace(0, middle, 4001)
        density_N = (1 + x_N**2 / freedom) ** (-(freedom + 1) / 2)
        if scale * np.trapezoid(density_N, x_N) < 0.475:
            low = middle
        else:
            high = middle
    return high


def alpha(decoded: Sequence[Chains]) -> tuple[float, ...]:
    """The acceptance rate by position, pooled."""
    tried = _sums_by_position([response.chain_tried for response in decoded])
    accepted = _sums_by_position([response.chain_accepted for response in decoded])
    pairs = zip(accepted, tried, strict=True)
    return tuple(_ratio(above, below) for above, below in pairs)


def _sums_by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _sections(prompts: Sequence[PromptResult]) -> Iterator[SectionRates]:
    """By length of context, and by thinking and answer, where the responses have several of these."""
    keyed = [
        (prompt.key, section)
        for prompt in prompts
        for section in prompt.drafted.sections
    ]
    keyed.sort(key=lambda one: (one[1].context, not one[1].thinking))
    by_context: dict[str, list[tuple[str, ResponseSection]]] = {}
    by_thinking: dict[str, list[tuple[str, ResponseSection]]] = {}
    for key, section in keyed:
        context = f"context from {section.context}"
        thinking = "thinking" if section.thinking else "answer"
        by_context.setdefault(context, []).append((key, section))
        by_thinking.setdefault(thinking, []).append((key, section))
    if len(by_context) > 1:
        for name, keyed_sections in by_context.items():
            yield _section_rates(name, keyed_sections)
    if "thinking" in by_thinking:
        for name, keyed_sections in by_thinking.items():
            yield _section_rates(name, keyed_sections)


def _section_rates(
    name: str, keyed_sections: Sequence[tuple[str, ResponseSection]]
) -> SectionRates:
    keys = {key for key, _ in keyed_sections}
    calls = sum(section.calls for _, section in keyed_sections)
    tokens = sum(section.tokens for _, section in keyed_sections)
    accepted = sum(section.accepted for _, section in keyed_sections)
    return SectionRates(
        section=name,
        prompts=len(keys),
        calls=calls,
        tau=_ratio(tokens, calls),
        accepted=_ratio(accepted, calls),
    )


def _calibration(decoded: Sequence[Decoding]) -> tuple[float, ...]:
    """Expected calibration error by position, with the tenths of all responses together."""
    pooled: dict[tuple[int, int], ProbabilityBin] = {}
    for response in decoded:
        for counts in response.probabilities:
            key = counts.position, _tenth(counts)
            pooled[key] = _added(pooled.get(key), counts)
    positions = 1 + max((position for position, _ in pooled), default=-1)
    tried = [0] * positions
    gaps = [0.0] * positions
    for counts in pooled.values():
        tried[counts.position] += counts.tried
        gaps[counts.position] += abs(counts.chances - counts.accepted)
    return tuple(_ratio(gap, count) for gap, count in zip(gaps, tried, strict=True))


def _tenth(counts: ProbabilityBin) -> int:
    if not counts.tried:
        return 0
    return min(int(BINS * counts.chances / counts.tried), BINS - 1)


def _added(before: ProbabilityBin | None, counts: ProbabilityBin) -> ProbabilityBin:
    if before is None:
        return counts
    return replace(
        counts,
        tried=before.tried + counts.tried,
        accepted=before.accepted + counts.accepted,
        chances=before.chances + counts.chances,
    )


def _checks(decoded: Sequence[Decoding]) -> Checks:
    counts = Counter(response.check for response in decoded)
    return Checks(counts["identical"], counts["near_tie"], counts["different"])


def _accounted(decoded: Sequence[Decoding]) -> float:
    inside = sum(response.cycle_seconds for response in decoded)
    outside = sum(response.seconds for response in decoded)
    return inside / outside if outside else 1.0


def cpu_share_of(decoded: Sequence[DecodingCounts]) -> float | None:
    """The share of the elapsed seconds that other programs left this one; None on a GPU.

    If it is not known of all when other programs had the CPU: the share in which this one had it.
    """
    if any(response.cpu_seconds is None for response in decoded):
        return None
    own_seconds = [response.cpu_seconds or 0.0 for response in decoded]
    if has_delays(decoded):
        own_seconds = [response.undisturbed_seconds for response in decoded]
    return _ratio(sum(own_seconds), sum(response.seconds for response in decoded))


def has_delays(decoded: Iterable[DecodingCounts]) -> bool:
    """Whether it is known when other programs had the CPU."""
    return all(response.delayed_seconds is not None for response in decoded)


def _is_uneven(prompts: Sequence[PromptResult]) -> bool:
    """Whether other programs had the CPU beside the drafter more than beside plain decoding.

    Than if they had left it the same share on each prompt.
    """
    sides = [side for prompt in prompts for side in (prompt.plain, prompt.drafted)]
    if not has_delays(sides):
        return False
    seconds, own_seconds, even_seconds = 0.0, 0.0, 0.0
    for prompt in prompts:
        seconds += prompt.drafted.seconds
        own_seconds += prompt.drafted.undisturbed_seconds
        plain_share = cpu_share_of([prompt.plain])
        even_seconds += (plain_share or 0.0) * prompt.drafted.seconds
    limit = UNEVEN_SHARED if is_busy(_ratio(even_seconds, seconds)) else UNEVEN
    return own_seconds < limit * even_seconds


def _running_share(decoded: Sequence[DecodingCounts]) -> float | None:
    """The share of the undisturbed seconds in which this program had the CPU; None on a GPU."""
    if any(response.cpu_seconds is None for response in decoded):
        return None
    cpu_seconds = sum(response.cpu_seconds or 0.0 for response in decoded)
    return _ratio(
        cpu_seconds, sum(response.undisturbed_seconds for response in decoded)
    )


def _doubts(rated: Figures) -> Iterator[str]:
    """Reasons to doubt the speedup."""
    sides = (("", rated.lossless), (" of plain decoding", rated.plain_lossless))
    for whose, checks in sides:
        if checks.different:
            yield (
                f"{checks.different} of {checks.total} responses{whose} differ from the target's by more "
                "than a near-tie: do not rely on these numbers"
            )
    allowed = tolerance(rated.least_cpu_share)
    if rated.accounted > 1 + allowed:
        yield _unaccounted("the", rated.accounted)
    least = _least_accounted(rated, rated.plain_seconds)
    if not least <= rated.plain_accounted <= 1 + allowed:
        yield _unaccounted("plain decoding's", rated.plain_accounted)
    if rated.missed:
        yield (
            f"{rated.missed} drafted tokens agree with the responses and were not accepted: acceptance is "
            "broken"
        )


def _cheaper(prompts: Sequence[PromptResult]) -> Iterator[str]:
    """Work on a prompt that took a drafter less time than plain decoding, though both sides do the same."""
    sides = [side for prompt in prompts for side in (prompt.plain, prompt.drafted)]
    is_shared = is_busy(cpu_share_of(sides))
    first_cycle, prefill, vision = [], [], []
    for prompt in prompts:
        plain, drafted = prompt.plain, prompt.drafted
        first_cycle.append((drafted.prefill_seconds, plain.prefill_seconds))
        prefill.append((drafted.phases.prefill, plain.phases.prefill))
        if prompt.kind != "text":
            vision.append((drafted.phases.vision, plain.phases.vision))
    works = {
        "first cycle": first_cycle,
        "prefill": prefill,
        "vision encoder": vision,
    }
    for work, seconds in works.items():
        ratio_P = np.array([own / plain for own, plain in seconds if plain])
        for share in CHEAP:
            if is_often_below(ratio_P, share, is_shared=is_shared):
                yield (
                    f"on {(ratio_P < share).sum()} of {len(ratio_P)} prompts, the drafter's {work} takes "
                    f"less than {share:.0%} of the time that plain decoding's takes for the same work"
                )
                break


def _asleep(prompts: Sequence[PromptResult]) -> Iterator[str]:
    """One side sleeps while it decodes, and the other does not."""
    plain = _RunningShares.of([prompt.plain for prompt in prompts])
    own = _RunningShares.of([prompt.drafted for prompt in prompts])
    if plain is None or own is None:
        return
    if own.is_far_below(plain, WAITING):
        yield (
            f"the drafter ran for {own.pooled:.0%} of its time, and plain decoding for {plain.pooled:.0%}: "
            "it waits for work that no CPU seconds count"
        )
    if plain.is_far_below(own, SLEEPING):
        yield (
            f"plain decoding ran for {plain.pooled:.0%} of its time, and the drafter for {own.pooled:.0%}: "
            "it sleeps, which makes it slower"
        )


@dataclass(frozen=True)
class _RunningShares:
    """The share of its undisturbed seconds in which a side ran: of all responses, and of each."""

    pooled: float
    share_P: Floats
    is_exact: bool
    """Whether other programs, which have the CPU by chance, are left out."""

    @classmethod
    def of(cls, decoded: Sequence[Decoding]) -> "_RunningShares | None":
        """None on a GPU."""
        pooled = _running_share(decoded)
        if pooled is None:
            return None
        shares = [_running_share([response]) for response in decoded]
        return cls(pooled, np.array(shares, dtype=np.float64), has_delays(decoded))

    def is_far_below(self, other: "_RunningShares", limit: float) -> bool:
        """Whether it is below this part of the other's, and not by chance."""
        if self.pooled >= limit * other.pooled:
            return False
        if self.is_exact:
            return True
        if is_busy(other.pooled):
            return False
        is_known_P = other.share_P > 0
        ratio_P = self.share_P[is_known_P] / other.share_P[is_known_P]
        return is_often_below(ratio_P, limit, is_shared=False)


def differ_beyond_rounding(different: int, compared: int, *, is_exact: bool) -> bool:
    """Whether so many greedy responses of two processes differ that they are of different targets.

    `is_exact`: both compute in float32.
    """
    share = FEW_ROUNDED if is_exact else MANY_ROUNDED
    return different >= FEWEST_DIFFERENT and different > share * compared


def is_often_below(ratio_P: Floats, share: float, *, is_shared: bool) -> bool:
    """Whether one side's numbers, over the other's, are below a share more often than by chance.

    A sign test: the order of the sides rotates, so that by chance a ratio is as often above the inverse.
    """
    below = int((ratio_P < share).sum())
    above = int((ratio_P > 1 / share).sum())
    if _coin_tail(below, below + above) < CHANCE:
        return True
    enough = len(ratio_P) >= FEWEST and not is_shared
    return enough and below >= MOST_PROMPTS * len(ratio_P)


def _coin_tail(heads: int, tosses: int) -> float:
    """The probability of at least so many heads in tosses of a coin."""
    ways = sum(math.comb(tosses, count) for count in range(heads, tosses + 1))
    return math.ldexp(ways, -tosses)


def _warnings(rated: Figures) -> Iterator[str]:
    """Reasons to read the numbers with care that do not put the speedup in doubt."""
    if not rated.calls:
        yield "nothing was drafted: no response has more than its first token"
    if rated.accounted < _least_accounted(rated, rated.seconds):
        yield _unaccounted("the", rated.accounted)
    least_share = rated.least_cpu_share
    if least_share is not None and is_busy(least_share):
        if rated.has_delays:
            yield (
                f"other programs had the CPU for {1 - least_share:.0%} of the time, which does not count; "
                "they may have slowed down the rest"
            )
        else:
            yield (
                f"this program had the CPU for {least_share:.0%} of the time: other programs may have slowed "
                "it down"
            )


def _held_up(prompts: Sequence[PromptResult]) -> Iterator[str]:
    """Both sides are without the CPU, and no other program has it."""
    sides = [side for prompt in prompts for side in (prompt.plain, prompt.drafted)]
    share = _running_share(sides)
    if has_delays(sides) and is_busy(share):
        yield (
            f"decoding ran for {share:.0%} of the time that other programs left it: it sleeps, or the "
            "machine holds it up"
        )


def _at_last_position(prompts: Sequence[PromptResult]) -> Iterator[str]:
    """Responses that end since the target has no position left for another token."""
    ended = 0
    for prompt in prompts:
        longest = max(prompt.plain.tokens, prompt.drafted.tokens)
        is_cut = "length" in (prompt.plain.finish, prompt.drafted.finish)
        ended += is_cut and longest == prompt.room
    if ended:
        yield f"responses to {ended} of {len(prompts)} prompts end at the target's last position"


def _equal_responses(prompts: Sequence[PromptResult]) -> Iterator[str]:
    """Greedy responses that equal another prompt's: the prompts may be copies of one."""
    counts = Counter(
        prompt.plain.response
        for prompt in prompts
        if prompt.plain.seed is None and prompt.plain.tokens > SHORT
    )
    del counts[""]  # not recorded
    equal = sum(count for count in counts.values() if count > 1)
    if equal > COPIES * len(prompts):
        yield (
            f"the responses to {equal} of {len(prompts)} prompts equal those to others: if these prompts are "
            "copies of each other, the intervals are too narrow"
        )


def is_busy(cpu_share: float | None) -> bool:
    """Whether other programs had a part of the CPU; not of a GPU, whose share is None."""
    return cpu_share is not None and cpu_share < BUSY


def is_disturbed(cpu_share: float | None) -> bool:
    """Whether other programs had most of the CPU."""
    return cpu_share is not None and cpu_share < MOSTLY


def tolerance(cpu_share: float | None) -> float:
    """Share of the elapsed seconds that clocks may differ by.

    Other programs may take the CPU between two cycles, too.
    """
    return TOLERANCE_SHARED if is_busy(cpu_share) else TOLERANCE


def _least_accounted(rated: Figures, seconds: float) -> float:
    """The least share of a side's seconds that its cycles account for, unless it works elsewhere."""
    outside = _ratio(OUTSIDE * rated.prompts, seconds)
    return 1 - tolerance(rated.least_cpu_share) - outside


def _unaccounted(whose: str, share: float) -> str:
    return (
        f"{whose} cycles account for {share:.1%} of the elapsed seconds: speedup includes all seconds, "
        "decode_speedup and prefill_share only those of the cycles"
    )


def drift(calibrations: Sequence[Calibration]) -> list[str]:
    """A warning for each speed of the machine that differs by more than `DRIFT` during an evaluation."""
    warnings = []
    for name in ("plain_step", "small_product", "large_product", "bandwidth"):
        speeds = [getattr(calibration, name) for calibration in calibrations]
        measured = [speed for speed in speeds if speed]
        if not measured:
            continue
        factor = max(measured) / min(measured)
        if factor > DRIFT:
            speed = name.replace("_", " ")
            warnings.append(
                f"the machine's speed changed while it was measured: {speed} by a factor of {factor:.2f}"
            )
    return warnings


def _budget(prompts: Sequence[PromptResult], tau: float) -> Budget:
    phases = {
        name: sum(getattr(prompt.drafted.phases, name) for prompt in prompts)
        for name in Phases.__dataclass_fields__
    }
    seconds = sum(prompt.drafted.seconds for prompt in prompts)
    calls = sum(prompt.drafted.calls for prompt in prompts)
    plain_seconds = sum(prompt.plain.decode_seconds for prompt in prompts)
    plain_calls = sum(prompt.plain.calls for prompt in prompts)
    plain_step = _ratio(plain_seconds, plain_calls)
    drafting = _ratio(phases["draft"], calls)
    return Budget(
        **phases,
        other=seconds - sum(phases.values()),
        plain_step=plain_step,
        ideal=tau * _ratio(plain_step, plain_step + drafting),
    )


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _over(above_R: Floats, below_R: Floats) -> Floats:
    return np.divide(above_R, below_R, out=np.zeros_like(above_R), where=below_R > 0)
