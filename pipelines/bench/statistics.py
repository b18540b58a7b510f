"""The metrics of a measurement and their bootstrap intervals over prompts.

All metrics are pooled over prompts:

- `tau`: tokens per verification call of the target, bonus counted (MSD, Sparrow);
- `accepted`: accepted draft tokens per call, bonus not counted (ViSpec's tau);
- `alpha[n]`: acceptance rate of the n-th token of the most likely chain, of the cycles that verified it and
  accepted all before it;
- `speedup`: plain over speculative seconds per token, by the clock outside the decoders, vision and prefill
  included;
- `decode_speedup`: the same for the cycles after the prefill;
- `prefill_share`: the share of the prefill in the speculative seconds;
- `budget`: the speculative seconds by phase, which add up to all of them.

The first token comes from the prefill, not from a call: `tau` and `accepted` exclude it.

Intervals are 95% bootstrap intervals over prompts with expanded percentiles (Hesterberg 2015, "What Teachers
Should Know About the Bootstrap"), since plain percentiles are too narrow for few prompts. Drafters are
compared on the same resamples of the same prompts, so that the difficulty of a prompt cancels.

Shapes: R resamples, P prompts.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmdistill.pipelines.bench.records import Calibration, Decoding, Measurement, Phases, PromptResult

RESAMPLES = 2000
FEWEST = 6  # prompts for an interval: five agree by chance in more than 5% of cases
FEWEST_SEEDS = 5  # for an interval over seeds
TOLERANCE = 0.02  # share of the elapsed seconds that the cycles may leave unaccounted
DRIFT = 1.25  # between the calibrations of one evaluation, above which they differ
BUSY = 0.9  # share of the elapsed seconds below which the CPU was not this program's alone

Floats = npt.NDArray[np.float64]
Rate = Literal["tau", "accepted", "speedup", "decode_speedup"]


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
    ideal: float  # decode speedup if a cycle took as long as its drafting and a plain step


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The metrics of one drafter at one temperature, see the top of the file."""

    prompts: int
    tau: float
    accepted: float
    alpha: tuple[float, ...]
    speedup: float
    decode_speedup: float
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
    missed: (
        int  # drafted tokens that the response has and that were not accepted: 0 unless acceptance is broken
    )
    cpu_share: float | None  # of the elapsed seconds, both decoders; None on a GPU
    accounted: float  # share of the elapsed seconds that the cycles account for
    plain_accounted: float
    lossless: Checks
    plain_lossless: Checks
    warnings: tuple[str, ...]  # problems of these metrics


def figures(measurement: Measurement) -> Figures:
    """Compute the metrics of a measurement."""
    prompts = measurement.prompts
    plain, own = [one.plain for one in prompts], [one.drafted for one in prompts]
    rates = _rates(prompts, np.ones((1, len(prompts))))
    seconds, plain_seconds = (sum(one.seconds for one in side) for side in (own, plain))
    tokens, plain_tokens = (sum(one.tokens for one in side) for side in (own, plain))
    accounted, plain_accounted = _accounted(own), _accounted(plain)
    count = len(prompts)
    resampled = _rates(prompts, _resamples(count)) if count >= FEWEST else {}
    return Figures(
        prompts=count,
        tau=float(rates["tau"][0]),
        accepted=float(rates["accepted"][0]),
        alpha=_alpha(own),
        speedup=float(rates["speedup"][0]),
        decode_speedup=float(rates["decode_speedup"][0]),
        intervals={rate: _interval(value_R, count) for rate, value_R in resampled.items()},
        prefill_share=_ratio(sum(one.prefill_seconds for one in own), seconds),
        tokens=tokens,
        plain_tokens=plain_tokens,
        calls=sum(one.calls for one in own),
        seconds=seconds,
        plain_seconds=plain_seconds,
        tokens_per_second=_ratio(tokens, seconds),
        plain_tokens_per_second=_ratio(plain_tokens, plain_seconds),
        budget=_budget(prompts, float(rates["tau"][0])),
        missed=(missed := sum(one.missed for one in own)),
        cpu_share=(cpu_share := _cpu_share([*own, *plain])),
        accounted=accounted,
        plain_accounted=plain_accounted,
        lossless=(lossless := _checks(own)),
        plain_lossless=(plain_lossless := _checks(plain)),
        warnings=(
            *_different("", lossless),
            *_different(" of plain decoding", plain_lossless),
            *_unaccounted("the", accounted),
            *_unaccounted("plain decoding's", plain_accounted),
            *_rejected(missed),
            *_disturbed(cpu_share),
        ),
    )


def rates(measurement: Measurement) -> dict[Rate, float]:
    """The rates alone, without intervals."""
    prompts = measurement.prompts
    return {rate: float(one[0]) for rate, one in _rates(prompts, np.ones((1, len(prompts)))).items()}


def advantage(one: Measurement, other: Measurement, rate: Rate = "speedup") -> Interval | None:
    """The interval of the ratio of two drafters' rates, over the same resamples of their prompts.

    None for fewer than `FEWEST` prompts. If the interval contains 1, they do not differ significantly.
    """
    count = len(one.prompts)
    if count < FEWEST:
        return None
    weight_RP = _resamples(count)
    mine_R, its_R = (_rates(at.prompts, weight_RP)[rate] for at in (one, other))
    known_R = its_R > 0
    return _interval(mine_R[known_R] / its_R[known_R], count) if known_R.any() else None


@dataclass(frozen=True)
class Difference:
    """The mean difference of two settings' rates, with its 95% interval over seeds and prompts."""

    mean: float
    interval: Interval | None  # None for fewer than `FEWEST_SEEDS` seeds

    @property
    def text(self) -> str:
        """The mean, and the interval in parentheses."""
        within = f" ({self.interval.low:+.2f} to {self.interval.high:+.2f})" if self.interval else ""
        return f"{self.mean:+.2f}{within}"


def difference(ones: Sequence[Measurement], others: Sequence[Measurement], rate: Rate = "tau") -> Difference:
    """Compare two settings that were each trained with the same seeds: a measurement for each seed.

    Each seed gives a difference of pooled rates. Their t interval has the luck of training; the bootstrap
    interval of their mean has the luck of the prompts (left out for fewer than `FEWEST`). Half widths add as
    standard errors do. Noise that both contain counts twice, so the interval is rather too wide.
    """
    count = len(ones[0].prompts)
    weight_RP = np.concatenate([np.ones((1, count)), _resamples(count)])
    between_SR = np.array(
        [
            _rates(one.prompts, weight_RP)[rate] - _rates(other.prompts, weight_RP)[rate]
            for one, other in zip(ones, others, strict=True)
        ]
    )
    mean_R, seeds = between_SR.mean(axis=0), len(ones)
    mean = float(mean_R[0])
    if seeds < FEWEST_SEEDS:
        return Difference(mean, None)
    training = _student(seeds - 1) * float(between_SR[:, 0].std(ddof=1)) / seeds**0.5
    below = above = 0.0
    if count >= FEWEST:
        prompts = _interval(mean_R[1:], count)
        below, above = mean - prompts.low, prompts.high - mean
    return Difference(mean, Interval(mean - math.hypot(training, below), mean + math.hypot(training, above)))


def _rates(prompts: Sequence[PromptResult], weight_RP: Floats) -> dict[Rate, Floats]:
    """The rates [R] if prompt p counts `weight_RP[r, p]` times."""

    def totals(value: Callable[[PromptResult], float]) -> Floats:
        sums_R: Floats = weight_RP @ np.array([value(one) for one in prompts], dtype=np.float64)
        return sums_R

    calls_R = totals(lambda one: one.drafted.calls)
    gained_R = totals(lambda one: one.drafted.tokens - 1)
    pace_R = _over(totals(lambda one: one.drafted.seconds), totals(lambda one: one.drafted.tokens))
    plain_pace_R = _over(totals(lambda one: one.plain.seconds), totals(lambda one: one.plain.tokens))
    decode_R = _over(totals(lambda one: one.drafted.decode_seconds), gained_R)
    plain_decode_R = _over(
        totals(lambda one: one.plain.decode_seconds), totals(lambda one: one.plain.tokens - 1)
    )
    return {
        "tau": _over(gained_R, calls_R),
        "accepted": _over(totals(lambda one: one.drafted.accepted), calls_R),
        "speedup": _over(plain_pace_R, pace_R),
        "decode_speedup": _over(plain_decode_R, decode_R),
    }


@lru_cache(maxsize=4)
def _resamples(count: int) -> Floats:
    """How often each resample draws each of `count` prompts: the same for every measurement of that size."""
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return draws.astype(np.float64)


def _interval(value_R: Floats, count: int) -> Interval:
    """Percentiles, expanded so that the interval of a mean is as wide as Student's t interval."""
    tail = NormalDist().cdf(-_student(count - 1) * (count / (count - 1)) ** 0.5)
    low, high = np.quantile(value_R, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _student(free: int) -> float:
    """The 97.5% quantile of Student's t, by its expansion around the normal; 0.3% too small at 4."""
    z = NormalDist().inv_cdf(0.975)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2) + third


def _alpha(decoded: Sequence[Decoding]) -> tuple[float, ...]:
    tried = [sum(column) for column in zip_longest(*(one.chain_tried for one in decoded), fillvalue=0)]
    kept = [sum(column) for column in zip_longest(*(one.chain_accepted for one in decoded), fillvalue=0)]
    return tuple(_ratio(above, below) for above, below in zip(kept, tried, strict=True))


def _checks(decoded: Sequence[Decoding]) -> Checks:
    counts = Counter(one.check for one in decoded)
    return Checks(counts["identical"], counts["near_tie"], counts["different"])


def _different(whose: str, checks: Checks) -> list[str]:
    if not checks.different:
        return []
    return [
        f"{checks.different} of {checks.total} responses{whose} differ from the target's by more than a "
        "near-tie: do not rely on these numbers"
    ]


def _accounted(decoded: Sequence[Decoding]) -> float:
    inside = sum(one.prefill_seconds + one.decode_seconds for one in decoded)
    outside = sum(one.seconds for one in decoded)
    return inside / outside if outside else 1.0


def _unaccounted(whose: str, share: float) -> list[str]:
    if abs(1 - share) <= TOLERANCE:
        return []
    return [
        f"{whose} cycles account for {share:.1%} of the elapsed seconds: speedup includes all seconds, "
        "decode_speedup and prefill_share only those of the cycles"
    ]


def _rejected(missed: int) -> list[str]:
    if not missed:
        return []
    return [f"{missed} drafted tokens agree with the responses and were not accepted: acceptance is broken"]


def _cpu_share(decoded: Sequence[Decoding]) -> float | None:
    known = [one.cpu_seconds for one in decoded if one.cpu_seconds is not None]
    return _ratio(sum(known), sum(one.seconds for one in decoded)) if len(known) == len(decoded) else None


def _disturbed(share: float | None) -> list[str]:
    if share is None or share >= BUSY:
        return []
    return [
        f"the CPU was this program's for {share:.0%} of the time: its speeds may be those of other programs"
    ]


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
    phases = {name: sum(getattr(one, name) for one in spent) for name in Phases.__dataclass_fields__}
    step = _ratio(sum(one.plain.decode_seconds for one in prompts), sum(one.plain.calls for one in prompts))
    drafting = _ratio(phases["draft"], sum(one.drafted.calls for one in prompts))
    other = sum(one.drafted.seconds for one in prompts) - sum(phases.values())
    return Budget(**phases, other=other, plain_step=step, ideal=tau * _ratio(step, step + drafting))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _over(above_R: Floats, below_R: Floats) -> Floats:
    return np.divide(above_R, below_R, out=np.zeros_like(above_R), where=below_R > 0)
