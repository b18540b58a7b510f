"""What the counts of an evaluation must satisfy, whatever decoded: from the records alone, so for any reader.

At temperature 0, a response that equals the target's has as many tokens as it. A cycle gains the drafted
tokens that it accepts and the bonus token, which only the last cycle may lack, and no more than its tree is
deep. The target, not the decoder, counts its forward passes: one for each cycle. All prompts that were to be
measured are. A drafter's drafts are the same in every process: some prompts are decoded again in another.

At temperatures above 0, the surprise -log p(x) of a sampled token x has the entropy of the target's own
distribution p as its mean. The sum of the differences over all tokens is a martingale of known variance: far
from 0, the tokens are not samples of p. Some wrong tokens have a large surprise, too greedy ones a small one.
So it is with the counts of first, second, later and rare choices (`sampled.py`), which tell what one moment
does not. The responses of both sides are as long, and sampled with the same seeds.

The baseline is compared with the target's own steps, with the stock model's `generate`, and with the first
evaluation of the same target on the same machine; the seconds of all decodings with the machine's clock.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, stdev
from typing import Final

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.again import PLAIN, repeated_prompts
from vlmdistill.pipelines.bench.records import (
    LABELS,
    Again,
    Baseline,
    Decoding,
    Evaluation,
    Heading,
    Measurement,
    PromptResult,
    Rank,
    RankCount,
    Stock,
    Turn,
)
from vlmdistill.pipelines.bench.sampled import prompt_seed
from vlmdistill.pipelines.bench.served_records import ServedEvaluation
from vlmdistill.pipelines.bench.statistics import (
    FEWEST,
    TOLERANCE,
    cpu_share_of,
    has_delays,
    is_busy,
    is_disturbed,
)
from vlmdistill.stores.errors import DataError

NAMED: Final = 3  # prompts that a finding names
ERRORS: Final = 4.0  # standard errors that a sum over samples may be off
ERRORS_OF_FEW: Final = 3.0  # likewise, besides a limit
NATS: Final = 10.0  # besides: the sum is skewed, a single rare token is no finding
TOKENS: Final = 3.0  # likewise, of counts
SLOW_STEP: Final = 1.1
"""Plain decoding's step over the target's own, in pairs: honest ones have 0.98 to 1.04."""
SLOW: Final = 1.15  # plain decoding over `generate`, and over earlier evaluations
SLOW_SHARED: Final = 1.5  # likewise, where other programs had a part of the CPU
FEW_STOCK: Final = 3
"""Responses of `generate` below which the spread of its speed is not known,"""
UNKNOWN_ERROR: Final = 0.15  # so that the logarithm of its mean has this error
SLOW_BESIDE: Final = 1.25
"""A plain step beside drafters over one in another process, in which none is loaded; besides
three unknown errors, and over the root of the evaluation's share of the CPU."""
STEPS: Final = 32  # of plain decoding that must be compared, at least
FEW_STEPS: Final = 8
"""Steps of a response below which they tell little: the first ones after a prefill take
longer, and other programs take slices of time that are longer than all of them."""
LONG_ENCODING: Final = 3.0  # likewise, of encoding,
ENCODING: Final = 0.05  # besides these CPU seconds of each prompt
LONG_OWN_STEP: Final = 2.0  # the target's own step over one of plain decoding,
OFTEN: Final = 0.1  # on more than this share of the prompts
SLOW_READS: Final = 1.5
"""A step over that of an earlier evaluation, which was not measured beside it."""
FAST_PACE: Final = 2.0
"""The calibrated step over plain decoding's: other programs can only slow it down."""
BETWEEN: Final = 0.003
"""Seconds that may pass between two decodings of a prompt, over the share of the CPU."""
OF_TURNS: Final = 0.005  # share of all prompts' time that two clocks differ by
ASLEEP: Final = 0.05  # share of the prompts during which a machine may sleep
BACKWARDS: Final = 1.0  # seconds that the machine's clock may be set back
PAUSE: Final = 0.1  # seconds that may pass between two prompts,
OF_PROMPT: Final = 0.05  # besides this share of the time that a prompt takes
NORMAL: Final = 1.4826  # standard deviation over the median of absolute deviations
MORE_CALLS: Final = 1.25
"""Calls for sampled prompts on a GPU in another process, over those of the evaluation."""
EQUAL: Final = 1e-6  # relative difference of numbers that are recorded twice
ROUNDED: Final = 1e-3  # sum of the probabilities of guesses, which are rounded
LEAKED: Final = 0.1
"""Share of the prompts that a drafter has seen, above which it is not ranked."""


def failures(evaluation: Evaluation) -> list[str]:
    """Contradictions within an evaluation, as sentences; none in a sound one."""
    texts = [*_wrong_prompts(evaluation)]
    for measurement in evaluation.temperatures:
        where = f" at temperature {measurement.temperature:g}"
        texts += _wrong_counts(evaluation, measurement, where)
        texts += _wrong_samples(measurement, where)
        texts += _wrong_clocks(measurement, where)
        texts += _wrong_seeds(evaluation, measurement, where)
    texts += _not_repeated(evaluation)
    texts += _wrong_calls(evaluation)
    texts += _other_target(evaluation)
    return texts


def _wrong_prompts(evaluation: Evaluation) -> Iterator[str]:
    """Prompts that were not measured though they should have been, or the reverse, or twice."""
    asked, measured = set(evaluation.asked), set(evaluation.keys)
    if missing := sorted(asked - measured):
        yield f"{len(missing)} of {len(asked)} prompts were not measured: {_some(missing)}"
    if others := sorted(measured - asked):
        yield f"{len(others)} prompts were measured that were not to be: {_some(others)}"
    counts = Counter(evaluation.keys)
    if repeated := sorted(key for key, count in counts.items() if count > 1):
        yield f"{len(repeated)} prompts are in the record more than once: {_some(repeated)}"


def _wrong_counts(
    evaluation: Evaluation, measurement: Measurement, where: str
) -> Iterator[str]:
    """Counts of a prompt that contradict each other; each contradiction is named once."""
    limits = _Limits(evaluation.max_new_tokens, _most_gained(evaluation))
    keys_of: dict[str, list[str]] = {}
    for prompt in measurement.prompts:
        texts = _contradictions(prompt, measurement.temperature, limits)
        for text in dict.fromkeys(texts):
            keys_of.setdefault(text, []).append(prompt.key)
    for text, keys in keys_of.items():
        yield f"{text}{where}, in {len(keys)} prompts: {_some(keys)}"


@dataclass(frozen=True)
class _Limits:
    """What a response and a cycle cannot exceed."""

    tokens: int  # of a response, unless the target has fewer positions left
    gained: int | None  # tokens of a cycle; None: not known


def _contradictions(
    prompt: PromptResult, temperature: float, limits: _Limits
) -> Iterator[str]:
    plain, drafted = prompt.plain, prompt.drafted
    if temperature == 0:
        yield from _contradictions_of_checks(prompt)
    if plain.finish == drafted.finish == "length" and plain.tokens != drafted.tokens:
        yield "responses that end at the same limit have different numbers of tokens"
    for whose, decoded in (("the drafter", drafted), ("plain decoding", plain)):
        yield from _contradictions_of_side(whose, decoded)
        if decoded.tokens > limits.tokens:
            yield f"the responses of {whose} have more tokens than the limit"
        limit = min(limits.tokens, prompt.room or 0)
        if decoded.finish == "length" and decoded.tokens < limit:
            yield f"the responses of {whose} end before an EOS and before the limit"
        if temperature > 0 and (decoded.surprise is None or not decoded.ranks):
            yield f"the sampled responses of {whose} were not compared with the target's distribution"
    if plain.accepted:
        yield "plain decoding accepted drafted tokens"
    yield from _contradictions_of_chains(drafted)
    gained = limits.gained
    if gained is not None and drafted.tokens - 1 > drafted.calls * gained:
        yield "the drafter gained more tokens than its tree is deep"
    if gained is not None and sum(drafted.chain_accepted) > drafted.accepted + gained:
        yield "acceptance by position does not agree with the accepted tokens"
    if drafted.sections and not _sections_add_up(drafted):
        yield "the sections of the response do not add up to it"


def _contradictions_of_checks(prompt: PromptResult) -> Iterator[str]:
    """The stock model can read a prompt or not, whoever responds to it."""
    plain, drafted = prompt.plain, prompt.drafted
    if (plain.check is None) != (drafted.check is None):
        yield "the stock model checked the response of one side alone"
    if plain.check == drafted.check == "identical":
        lengths = {plain.tokens, drafted.tokens}
        if prompt.stock:
            lengths.add(prompt.stock.tokens)
        if len(lengths) > 1:
            yield "identical responses have different numbers of tokens"


def _contradictions_of_chains(drafted: Decoding) -> Iterator[str]:
    """A position is verified after the one before it was accepted, and accepted after that."""
    reached = drafted.calls
    for tried, accepted in zip(
        drafted.chain_tried, drafted.chain_accepted, strict=True
    ):
        if tried > reached:
            yield "more chains were verified than there were calls, or than got so far"
        if accepted > tried:
            yield "more tokens of chains were accepted than verified"
        reached = accepted
    for guesses in drafted.probabilities:
        if max(guesses.accepted, guesses.chances - ROUNDED) > guesses.tried:
            yield "more guesses were accepted, or to be expected, than verified"


def _contradictions_of_side(whose: str, decoded: Decoding) -> Iterator[str]:
    gained = decoded.tokens - 1
    lacking_bonus = decoded.accepted + decoded.calls - gained
    if not 0 <= lacking_bonus <= min(decoded.calls, 1):
        yield f"the tokens of {whose} are not the accepted ones and one for each call"
    if decoded.finish == "broken":
        yield f"the responses of {whose} go on after an EOS, or end at neither an EOS nor the limit"
    if decoded.passes != decoded.calls:
        yield f"the target counts other forward passes than {whose}"


def _sections_add_up(drafted: Decoding) -> bool:
    calls = sum(section.calls for section in drafted.sections)
    tokens = sum(section.tokens for section in drafted.sections)
    accepted = sum(section.accepted for section in drafted.sections)
    expected = (drafted.calls, drafted.tokens - 1, drafted.accepted)
    return (calls, tokens, accepted) == expected


def _most_gained(evaluation: Evaluation) -> int | None:
    """The most tokens that a cycle can gain; None for a method with a tree of its own."""
    method = evaluation.drafter
    if method in catalogue.NAMES and not catalogue.load(method).shaped:
        return None
    try:
        return Tree.parse(evaluation.tree).depth + 2
    except DataError:
        return None


def _wrong_samples(measurement: Measurement, where: str) -> Iterator[str]:
    """Why sampled responses cannot be samples of the target's distribution."""
    for whose, off in surprises(measurement).items():
        if abs(off.nats) > ERRORS * off.error + NATS:
            yield (
                f"the responses of {whose}{where} are not samples of the target's distribution: their "
                f"surprise is off by {off.nats:.0f} nats, with a standard error of {off.error:.0f}"
            )
    for whose, decoded in _sides(measurement).items():
        for count in rank_counts(decoded):
            error = count.variance**0.5
            if abs(count.tokens - count.expected) > ERRORS * error + TOKENS:
                yield (
                    f"the responses of {whose}{where} are not samples of the target's distribution: "
                    f"{count.tokens} tokens are its {count.rank} choices, {count.expected:.0f} are "
                    f"expected, with a standard error of {error:.0f}"
                )
    errors = _length_difference(measurement)
    if measurement.temperature > 0 and errors > ERRORS:
        yield (
            f"the responses of the drafter and of plain decoding{where} differ in length by "
            f"{errors:.1f} standard errors"
        )


def _length_difference(measurement: Measurement) -> float:
    """How many standard errors the lengths of the two sides differ by.

    Both sides sample the same distribution, so each difference is as likely as its negative. With random
    signs a sum exceeds z standard errors with a probability of at most 2 exp(-z^2 / 2) (Hoeffding 1963).
    """
    differences = [
        prompt.drafted.tokens - prompt.plain.tokens for prompt in measurement.prompts
    ]
    error = sum(tokens**2 for tokens in differences) ** 0.5
    return abs(sum(differences)) / error if error else 0.0


def _wrong_clocks(measurement: Measurement, where: str) -> Iterator[str]:
    """Times that exclude each other."""
    for whose, decoded in _sides(measurement).items():
        elapsed = sum(response.seconds for response in decoded)
        allowed = (1 + TOLERANCE) * elapsed
        cpu_seconds = sum(response.cpu_seconds or 0.0 for response in decoded)
        delayed_seconds = sum(response.delayed_seconds or 0.0 for response in decoded)
        if cpu_seconds + delayed_seconds > allowed:
            yield (
                f"the thread of {whose}{where} ran and was delayed for more seconds than elapsed"
            )
        in_phases = sum(sum(astuple(response.phases)) for response in decoded)
        if in_phases > allowed:
            yield f"the phases of {whose}{where} have more seconds than elapsed"
        in_cycles = sum(response.cycle_seconds for response in decoded)
        # On a GPU another clock has the phases: its own.
        if cpu_seconds and in_phases > (1 + TOLERANCE) * in_cycles:
            yield f"the phases of {whose}{where} have more seconds than its cycles"
    if len({decoded.cpu_seconds is None for decoded in _decodings(measurement)}) > 1:
        yield f"some decodings{where} have no CPU seconds, and others have"
    with_delays_of_one_side = [
        prompt.key
        for prompt in measurement.prompts
        if has_delays([prompt.plain]) != has_delays([prompt.drafted])
    ]
    if with_delays_of_one_side:
        yield (
            f"of one side{where} it is recorded when other programs had the CPU, of the other not: "
            f"{_some(with_delays_of_one_side)}"
        )
    differing = [
        prompt.key for prompt in measurement.prompts if not _agrees_with_turn(prompt)
    ]
    if differing:
        yield f"the seconds of decodings{where} are recorded twice, and differ: {_some(differing)}"


def _decodings(measurement: Measurement) -> Iterator[Decoding | Stock]:
    """Of all prompts, those of the stock model included."""
    for prompt in measurement.prompts:
        yield prompt.plain
        yield prompt.drafted
        if prompt.stock is not None:
            yield prompt.stock


def _agrees_with_turn(prompt: PromptResult) -> bool:
    turn = prompt.turn
    plain = math.isclose(turn.seconds[turn.plain], prompt.plain.seconds, rel_tol=EQUAL)
    drafted = math.isclose(
        turn.seconds[turn.drafted], prompt.drafted.seconds, rel_tol=EQUAL
    )
    return plain and drafted


def _wrong_seeds(
    evaluation: Evaluation, measurement: Measurement, where: str
) -> Iterator[str]:
    """Responses not sampled with the seed of their prompt, which both sides share and no other prompt has."""
    if measurement.temperature == 0:
        return
    prompts = measurement.prompts
    seeds = [prompt.plain.seed for prompt in prompts]
    if evaluation.seed is not None:
        seeds = [prompt_seed(evaluation.seed, number) for number in range(len(prompts))]
    counts = Counter(seeds)
    counts[None] = len(prompts)  # which is none
    for whose, decoded in _sides(measurement).items():
        unexpected = []
        for prompt, response, seed in zip(prompts, decoded, seeds, strict=True):
            if response.seed != seed or counts[seed] > 1:
                unexpected.append(prompt.key)
        if unexpected:
            yield f"{whose}{where} sampled with other seeds than those of the prompts: {_some(unexpected)}"


def _not_repeated(evaluation: Evaluation) -> Iterator[str]:
    """No prompts were decoded again, or others than the times of all decodings choose."""
    if evaluation.not_again:
        return
    drawn, drawn_earlier = (
        {(prompt.temperature, prompt.key) for prompt in prompts}
        for prompts in (
            repeated_prompts(evaluation),
            repeated_prompts(evaluation, of_each_kind=False),
        )
    )
    if drawn and not evaluation.again:
        yield "no prompt was decoded again in a process that has seen no response"
    decoded_plainly = sum(bool(again.plain_response) for again in evaluation.again)
    if decoded_plainly < min(PLAIN, len(evaluation.again)):
        return  # a record of a version that chose otherwise
    repeated = {(again.temperature, again.key) for again in evaluation.again}
    if drawn and repeated and repeated not in (drawn, drawn_earlier):
        yield (
            "the prompts that were decoded again are not those that the times of all decodings choose: these "
            "times or the prompts were changed"
        )


def _wrong_calls(evaluation: Evaluation) -> Iterator[str]:
    """Prompts for which the process that decodes again needs another number of calls.

    A GPU may round otherwise in another process, and then samples other tokens: there, a sampled prompt
    counts only as one of many that all together need far more calls.
    """
    if evaluation.not_again:  # with these weights
        return
    differing = []
    sampled_calls, sampled_calls_again = 0, 0
    for again, prompt in _decoded_twice(evaluation):
        decoded = prompt.drafted
        if again.temperature and decoded.cpu_seconds is None:
            sampled_calls += decoded.calls
            sampled_calls_again += again.calls
        elif decoded.calls != again.calls:
            differing.append(again.key)
    if differing:
        yield (
            "a process that has seen no response needs other numbers of calls for the same prompts: "
            f"{_some(differing)}"
        )
    if sampled_calls_again > MORE_CALLS * sampled_calls:
        yield (
            f"a process that has seen no response needs {sampled_calls_again} calls for sampled prompts that "
            f"took {sampled_calls}"
        )


def _other_target(evaluation: Evaluation) -> Iterator[str]:
    """Plain decoding gives other tokens than in a process that has loaded no drafter yet.

    A GPU may round otherwise in another process, and then samples other tokens, or decides a near-tie.
    """
    differing = []
    for again, prompt in _decoded_twice(evaluation):
        if not (again.plain_response and prompt.plain.response):
            continue
        is_exact = prompt.plain.cpu_seconds is not None
        if not is_exact and (again.temperature or prompt.plain.check != "identical"):
            continue
        if again.plain_response != prompt.plain.response:
            differing.append(again.key)
    if differing:
        yield (
            "plain decoding gives other responses than in a process that has loaded no drafter: "
            f"{_some(differing)}"
        )


def _sides(measurement: Measurement) -> dict[str, list[Decoding]]:
    return {
        "the drafter": [prompt.drafted for prompt in measurement.prompts],
        "plain decoding": [prompt.plain for prompt in measurement.prompts],
    }


class Surprise:
    """How far the surprise of responses is from its mean."""

    def __init__(self, decoded: list[Decoding]) -> None:
        self.nats = sum(response.surprise or 0.0 for response in decoded)
        variance = sum(response.surprise_variance or 0.0 for response in decoded)
        self.error = variance**0.5
        self.tokens = sum(response.tokens for response in decoded)


def surprises(measurement: Measurement) -> dict[str, Surprise]:
    """The surprise of the drafter's responses and of plain decoding's; empty if it was not measured."""
    return {
        whose: Surprise(decoded)
        for whose, decoded in _sides(measurement).items()
        if all(response.surprise is not None for response in decoded)
    }


def rank_counts(decoded: Iterable[Decoding]) -> list[RankCount]:
    """The counts of all responses together, by rank."""
    counts_of: dict[Rank, list[RankCount]] = {}
    for response in decoded:
        for count in response.ranks:
            counts_of.setdefault(count.rank, []).append(count)
    return [
        RankCount(
            rank=rank,
            tokens=sum(count.tokens for count in counts),
            expected=sum(count.expected for count in counts),
            variance=sum(count.variance for count in counts),
        )
        for rank, counts in counts_of.items()
    ]


def doubts_of_run(evaluation: Evaluation) -> list[str]:
    """Why speedups of the run that measured an evaluation say little."""
    return [*slow_baseline(evaluation), *_odd_times(evaluation)]


def slow_baseline(evaluation: Evaluation) -> list[str]:
    """Warnings of a baseline that is slower than it has to be: speedups over it say little."""
    warnings = [*_slow_steps(evaluation), *_slow_target(evaluation)]
    for measurement in evaluation.temperatures:
        # Threads wait for each other in CPU seconds, too, and no drafter is ranked.
        share = cpu_share_of([prompt.plain for prompt in measurement.prompts])
        is_spinning = is_busy(share) and evaluation.threads > 1
        if not is_spinning and not is_disturbed(share):
            warnings += _slow_beside_drafters(evaluation, measurement)
            warnings += _slow_responses(measurement)
    return warnings


def _slow_steps(evaluation: Evaluation) -> Iterator[str]:
    """Plain decoding is slower than the target's own steps."""
    ratios = [
        calibration.step_ratio
        for calibration in evaluation.calibrations
        if calibration.step_ratio
    ]
    if ratios and min(ratios) > SLOW_STEP:
        yield f"a step of plain decoding takes {min(ratios):.2f} times as long as the target's own step"


def _slow_responses(measurement: Measurement) -> Iterator[str]:
    """The steps of plain decoding's responses are slower than the target's own right after them.

    On prompts of a kind, or on all.
    """
    groups = measurement.by(LABELS["kind"])
    if len(groups) > 1:
        groups["all"] = measurement
    for kind, group in groups.items():
        ratio = _Ratio.of_steps(group.prompts)
        if ratio.is_above(SLOW_STEP):
            yield (
                f"a step of plain decoding in the responses to {kind} prompts at temperature "
                f"{measurement.temperature:g} takes {ratio.pooled:.2f} times as long as the target's own "
                "step right after them"
            )


@dataclass(frozen=True)
class _Ratio:
    """The seconds of plain decoding's steps over those of the target's own."""

    pooled: float
    prompts: int
    spread: float  # standard deviation of the logarithm over prompts

    @classmethod
    def of_steps(cls, prompts: Iterable[PromptResult]) -> "_Ratio":
        """Of responses with `FEW_STEPS` or more, on a CPU without other programs.

        The spread is from the lower half of the logarithms, which a few slow responses leave as it is.
        """
        seconds, bare_seconds, logarithms = 0.0, 0.0, []
        for prompt in prompts:
            spent, calls = _decode_seconds(prompt.plain), prompt.plain.calls
            if prompt.bare_step and spent and calls >= FEW_STEPS:
                seconds += spent
                bare_seconds += calls * prompt.bare_step
                logarithms.append(math.log(spent / calls / prompt.bare_step))
        if not logarithms:
            return cls(0.0, 0, 0.0)
        middle = median(logarithms)
        below = [middle - value for value in logarithms if value <= middle]
        spread = NORMAL * median(below)
        return cls(seconds / bare_seconds, len(logarithms), spread)

    def is_above(self, limit: float) -> bool:
        """Whether it is, and not by chance."""
        if self.prompts < FEWEST:
            return False
        error = self.spread / self.prompts**0.5
        return self.pooled > limit * math.exp(ERRORS * error)


def _decode_seconds(decoded: Decoding) -> float:
    """After the prefill, without other programs, whose share of these seconds is that of all."""
    if not decoded.seconds:
        return decoded.decode_seconds
    return decoded.decode_seconds * decoded.own_seconds / decoded.seconds


def _slow_target(evaluation: Evaluation) -> Iterator[str]:
    """Plain decoding is slower than `generate`, or than in the first evaluation on this machine."""
    now, earlier = baseline(evaluation), evaluation.earlier
    if now.against_stock and now.against_stock < 1 / _slow(evaluation, now):
        yield f"plain decoding is slower than model.generate: {now.against_stock:.2f} times as fast"
        return
    if earlier is None:
        return
    if now.against_stock and earlier.against_stock:
        if now.against_stock * _slow(evaluation, now, earlier) < earlier.against_stock:
            yield (
                f"plain decoding is {now.against_stock:.2f} times as fast as model.generate, and was "
                f"{earlier.against_stock:.2f} times as fast on {earlier.measured}"
            )
    elif now.reads and earlier.reads and now.reads > SLOW_READS * earlier.reads:
        yield (
            f"a step of plain decoding takes as long as reading its weights {now.reads:.1f} times, and "
            f"took {earlier.reads:.1f} times on {earlier.measured}"
        )


def _slow(evaluation: Evaluation, *baselines: Baseline) -> float:
    """How many times as slow plain decoding must be to be in doubt: as `generate`, or as earlier."""
    least = SLOW_SHARED if _is_busy(evaluation) else SLOW
    error = math.hypot(*(baseline.error for baseline in baselines))
    return least * math.exp(ERRORS_OF_FEW * error)


def _slow_beside_drafters(
    evaluation: Evaluation, measurement: Measurement
) -> Iterator[str]:
    """Plain steps take longer than in a process that has loaded no drafter yet.

    The error is of machines, not of these steps: a drafter that slows some more than others could raise that.
    """
    temperature = measurement.temperature
    steps, seconds, seconds_alone, prompts = 0, 0.0, 0.0, 0
    for again, prompt in _decoded_twice(evaluation):
        calls = prompt.plain.calls
        is_compared = again.temperature == temperature and calls >= FEW_STEPS
        if is_compared and again.plain_step:
            prompts += 1
            steps += calls
            seconds += _decode_seconds(prompt.plain)
            seconds_alone += calls * again.plain_step
    if steps < STEPS:
        return
    slow = SLOW_BESIDE * math.exp(ERRORS_OF_FEW * UNKNOWN_ERROR / math.sqrt(prompts))
    # Beside other programs caches are theirs, too.
    slow /= math.sqrt(_cpu_share([measurement]) or 1.0)
    if seconds > slow * seconds_alone:
        yield (
            f"a step of plain decoding at temperature {temperature:g} takes "
            f"{seconds / seconds_alone:.2f} times as long as in a process that has loaded no drafter"
        )


def _decoded_twice(evaluation: Evaluation) -> Iterator[tuple[Again, PromptResult]]:
    """The prompts that another process has decoded again, with what the evaluation has of them."""
    prompt_of = {
        (measurement.temperature, prompt.key): prompt
        for measurement in evaluation.temperatures
        for prompt in measurement.prompts
    }
    for again in evaluation.again:
        prompt = prompt_of.get((again.temperature, again.key))
        if prompt is not None:
            yield again, prompt


def _long_encoding(evaluation: Evaluation) -> Iterator[str]:
    """Encoding takes far longer than in a process that has loaded no drafter: responses may be prepared."""
    encoding, allowed = 0.0, 0.0
    for again, prompt in _decoded_twice(evaluation):
        spent = prompt.turn.encoding
        if spent is not None and again.encoding is not None:
            encoding += spent
            allowed += LONG_ENCODING * again.encoding + ENCODING
    if encoding > allowed:
        yield (
            f"encoding prompts takes {encoding:.1f} CPU seconds, and far less in a process that has loaded "
            "no drafter: as if responses were prepared outside of the clock"
        )


def _odd_times(evaluation: Evaluation) -> Iterator[str]:
    """Times that do not fit the machine's clock or speed, or the order of decoding."""
    yield from _long_encoding(evaluation)
    for measurement in evaluation.temperatures:
        where = f" at temperature {measurement.temperature:g}"
        yield from _long_own_steps(measurement, where)
        yield from _fast_pace(evaluation, measurement, where)
        yield from _unaccounted_turns(measurement, where)
        yield from _repeated_turns(measurement, where)
        yield from _wrong_order(evaluation, measurement, where)


def _long_own_steps(measurement: Measurement, where: str) -> Iterator[str]:
    """The target's own steps, which no decoder's clock has, take far longer than those of plain decoding.

    Than the elapsed seconds, which are not less than those without other programs.
    """
    long, measured = 0, 0
    for prompt in measurement.prompts:
        plain = prompt.plain
        if prompt.bare_step is not None and plain.calls >= FEW_STEPS:
            measured += 1
            step = plain.decode_seconds / plain.calls
            long += prompt.bare_step > LONG_OWN_STEP * step
    if measured >= FEWEST and long > max(1, OFTEN * measured):
        yield (
            f"the target's own step{where} takes more than {LONG_OWN_STEP:g} times as long as one of plain "
            f"decoding on {long} of {measured} prompts: as if responses were prepared outside of the clock"
        )


def _fast_pace(
    evaluation: Evaluation, measurement: Measurement, where: str
) -> Iterator[str]:
    """Plain decoding is much faster than in the calibrations, which decode the first prompt."""
    steps = [
        calibration.plain_step
        for calibration in evaluation.calibrations
        if calibration.plain_step
    ]
    plain = measurement.prompts[0].plain
    if plain.calls < FEW_STEPS or not steps:
        return
    step = plain.decode_seconds / plain.calls
    if FAST_PACE * step < min(steps):
        yield (
            f"a step of plain decoding{where} takes {1e3 * step:.2f} ms on the first prompt, and took "
            f"{1e3 * min(steps):.2f} ms there when the machine was calibrated"
        )


def _unaccounted_turns(measurement: Measurement, where: str) -> Iterator[str]:
    """The decodings of a prompt do not fill the time from its beginning to its end.

    A machine that sleeps passes time on few prompts, which are left out.
    """
    every_turn = [prompt.turn for prompt in measurement.prompts]
    every_turn.sort(key=lambda turn: abs(_passed(turn) - _spent(turn)))
    asleep = 0
    if len(every_turn) >= FEWEST:
        asleep = max(1, int(ASLEEP * len(every_turn)))
    turns = every_turn[: len(every_turn) - asleep]
    passed, decoding = sum(map(_passed, turns)), sum(map(_spent, turns))
    decodings = sum(len(turn.seconds) for turn in turns)
    between = BETWEEN / (_cpu_share([measurement]) or 1.0)
    allowed = OF_TURNS * passed + between * decodings
    if abs(passed - decoding) > allowed:
        yield (
            f"the decodings{where} have {decoding:.1f} seconds, and {passed:.1f} passed by the machine's "
            "clock: something else ran between them, or times were changed"
        )


def _passed(turn: Turn) -> float:
    """By the machine's clock."""
    return turn.ended - turn.started


def _spent(turn: Turn) -> float:
    """By the clock of decodings."""
    return sum(turn.seconds) + (turn.other or 0.0)


def _repeated_turns(measurement: Measurement, where: str) -> Iterator[str]:
    """Much time passes between prompts, as if the fastest of several decodings were kept."""
    turns = [prompt.turn for prompt in measurement.prompts]
    if len(turns) < FEWEST or any(turn.other is None for turn in turns):
        return
    # The median passes over an evaluation that was interrupted.
    pause = median(after.started - before.ended for before, after in pairwise(turns))
    passed = median(map(_passed, turns))
    if pause > PAUSE + OF_PROMPT * passed:
        yield (
            f"{pause:.2f} seconds passed between two prompts{where}, each of which took {passed:.2f}: "
            "as if prompts were decoded several times, or times were changed"
        )


def _wrong_order(
    evaluation: Evaluation, measurement: Measurement, where: str
) -> Iterator[str]:
    """Decoders did not take turns as they should, or prompts do not follow each other.

    The order rotates with the prompts, and each decoder decodes once, or twice if the first time warms up:
    for the first prompt of each kind in each process.
    """
    prompts = measurement.prompts
    rounds = [_rounds(number, prompt.turn) for number, prompt in enumerate(prompts)]
    unexpected = [
        prompt.key
        for prompt, count in zip(prompts, rounds, strict=True)
        if count is None
    ]
    if unexpected:
        yield f"the decoders did not take turns{where}: {_some(unexpected)}"
    processes = max(1, len(evaluation.calibrations) - 1)
    kinds = {prompt.kind for prompt in prompts}
    if rounds.count(2) > len(kinds) * processes:
        yield f"prompts were decoded twice{where} that are not the first ones of their kind"
    turns = [prompt.turn for prompt in prompts]
    if any(
        after.started < before.ended - BACKWARDS for before, after in pairwise(turns)
    ):
        yield f"the prompts{where} were not decoded one after the other"


def _rounds(number: int, turn: Turn) -> int | None:
    """How often each decoder decoded prompt `number`; None: not equally often, or in another order."""
    for rounds in (1, 2):
        decoders, rest = divmod(len(turn.seconds), rounds)
        place_of_plain = rounds * (-number % decoders) + rounds - 1
        if not rest and turn.plain == place_of_plain:
            return rounds
    return None


def leaked(evaluation: Evaluation | ServedEvaluation) -> list[str]:
    """A finding if a drafter has seen so many prompts that its numbers say little of others."""
    leak = evaluation.leak
    if leak is None or len(leak.keys) <= LEAKED * len(evaluation.keys):
        return []
    seen, prompts = len(leak.keys), len(evaluation.keys)
    return [f"it has seen {seen} of {prompts} prompts in training"]


def unknown_training(evaluation: Evaluation) -> list[str]:
    """A finding if it is not known whether a drafter has seen the prompts in training."""
    leak = evaluation.leak
    if leak is None:
        if not evaluation.parameters and evaluation.weights is None:
            return []  # there was no training
        return [
            "it is not known what it was trained on: it may have seen these prompts"
        ]
    findings = []
    if leak.unknown:
        findings.append(
            f"{leak.unknown} of the {leak.samples} samples of its training are not prompts of this "
            "workspace, or their images cannot be read: they were not compared with these prompts"
        )
    samples = evaluation.training.samples
    if leak.samples < samples:
        findings.append(
            f"it was trained on {samples} samples and lists {leak.samples}: it may have seen these prompts"
        )
    return findings


def baseline(evaluation: Evaluation) -> Baseline:
    """How fast plain decoding was in an evaluation."""
    reads = []
    for calibration in evaluation.calibrations:
        if calibration.reads and not is_busy(calibration.cpu_share):
            reads.append(calibration.reads)
    return Baseline(
        measured=evaluation.measured,
        against_stock=against_stock(evaluation),
        error=_error_against_stock(evaluation),
        reads=min(reads, default=None),
    )


def first_baseline(reports: Path, evaluation: Evaluation) -> Baseline | None:
    """The baseline of the first evaluation under the same conditions whose times are not in doubt.

    Beside the last one, plain decoding might become slower little by little. None if there is none. Records
    that cannot be read are passed over.
    """
    conditions = Heading.of(evaluation).of_baseline
    before = []
    for file in records.files_in(reports):
        with suppress(DataError):
            heading = records.heading(file)
            if heading.of_baseline == conditions:
                before.append((heading.measured, file))
    for _, file in sorted(before):
        with suppress(DataError):
            past = records.read(file)
            if not _is_busy(past) and not doubts_of_run(past):
                return baseline(past)
    return None


def _is_busy(evaluation: Evaluation) -> bool:
    """Whether other programs had a part of the CPU: caches are theirs then, too."""
    return is_busy(_cpu_share(evaluation.temperatures))


def _cpu_share(temperatures: Iterable[Measurement]) -> float | None:
    """Of all decodings; None on a GPU."""
    sides = [
        side
        for measurement in temperatures
        for prompt in measurement.prompts
        for side in (prompt.plain, prompt.drafted)
    ]
    return cpu_share_of(sides)


def against_stock(evaluation: Evaluation) -> float | None:
    """How many times as fast plain decoding is as the stock model's `generate`; None: not measured.

    Without the seconds of other programs, which disturb the clock.
    """
    plain, stock = _beside_stock(evaluation)
    plain_pace = _pace(plain)
    stock_pace = _pace(stock)
    if not plain_pace or not stock_pace:
        return None
    return stock_pace / plain_pace


def _error_against_stock(evaluation: Evaluation) -> float:
    """The standard error of its logarithm over prompts."""
    plain, stock = _beside_stock(evaluation)
    logarithms = []
    for own, generated in zip(plain, stock, strict=True):
        pace, stock_pace = _pace([own]), _pace([generated])
        if pace and stock_pace:
            logarithms.append(math.log(stock_pace / pace))
    if len(logarithms) < FEW_STOCK:
        return UNKNOWN_ERROR
    return stdev(logarithms) / math.sqrt(len(logarithms))


def _beside_stock(evaluation: Evaluation) -> tuple[list[Decoding], list[Stock]]:
    """The responses of plain decoding and of `generate` to the prompts that both responded to.

    Of a single token there is nothing but the prefill, which is compared with the drafter's.
    """
    plain: list[Decoding] = []
    stock: list[Stock] = []
    for measurement in evaluation.temperatures:
        for prompt in measurement.prompts:
            if prompt.stock is not None and prompt.plain.calls:
                plain.append(prompt.plain)
                stock.append(prompt.stock)
    return plain, stock


def _pace(side: Sequence[Decoding | Stock]) -> float | None:
    """Seconds per token, without those of other programs."""
    tokens = sum(response.tokens for response in side)
    seconds = sum(response.own_seconds for response in side)
    return seconds / tokens if tokens else None


def _some(keys: list[str]) -> str:
    more = len(keys) - NAMED
    rest = f" and {more} more" if more > 0 else ""
    return ", ".join(keys[:NAMED]) + rest
