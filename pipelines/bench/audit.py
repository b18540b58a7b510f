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

The baseline is compared with the target's own steps, with the stock model's `generate`, and with the last
evaluation of the same target on the same machine; the seconds of all decodings with the machine's clock.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import (
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
from vlmdistill.pipelines.bench.statistics import (
    BUSY,
    TOLERANCE,
    cpu_share_of,
    tolerance,
)
from vlmdistill.stores.errors import DataError

NAMED: Final = 3  # prompts that a finding names
ERRORS: Final = 4.0  # standard errors that a sum over samples may be off
NATS: Final = 10.0  # besides: the sum is skewed, a single rare token is no finding
TOKENS: Final = 3.0  # likewise, of counts
SLOW_STEP: Final = 1.1
"""Plain decoding's step over the target's own, in pairs: honest ones have 0.98 to 1.04."""
SLOW: Final = 1.15  # plain decoding over `generate`, and over earlier evaluations
SLOW_READS: Final = 1.5
"""A step over that of an earlier evaluation, which was not measured beside it."""
SLOW_SAMPLING: Final = 1.3
"""Plain decoding's step beside a verification, over the same at temperature 0."""
FAST_PACE: Final = 2.0
"""The calibrated step over plain decoding's: other programs can only slow it down."""
BETWEEN: Final = 0.01  # seconds that may pass between two decodings of a prompt
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
    texts += _wrong_calls(evaluation)
    return texts


def _wrong_prompts(evaluation: Evaluation) -> Iterator[str]:
    """Prompts that were not measured though they should have been, or the reverse, or twice."""
    asked, measured = set(evaluation.asked), set(evaluation.keys)
    if missing := sorted(asked - measured):
        yield f"{len(missing)} of {len(asked)} prompts were not measured: {_some(missing)}"
    if asked and (others := sorted(measured - asked)):
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

    tokens: int  # of a response
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
        if cpu_seconds > allowed:
            yield f"the thread of {whose}{where} has more CPU seconds than elapsed"
        in_phases = sum(sum(astuple(response.phases)) for response in decoded)
        if in_phases > allowed:
            yield f"the phases of {whose}{where} have more seconds than elapsed"
    differing = [
        prompt.key for prompt in measurement.prompts if not _agrees_with_turn(prompt)
    ]
    if differing:
        yield f"the seconds of decodings{where} are recorded twice, and differ: {_some(differing)}"


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
    """Responses that were not sampled with the seed of their prompt, which both sides share."""
    if measurement.temperature == 0:
        return
    for whose, decoded in _sides(measurement).items():
        unexpected = []
        for number, response in enumerate(decoded):
            if response.seed != prompt_seed(evaluation.seed, number):
                unexpected.append(measurement.prompts[number].key)
        if unexpected:
            yield f"{whose}{where} sampled with other seeds than those of the prompts: {_some(unexpected)}"


def _wrong_calls(evaluation: Evaluation) -> Iterator[str]:
    """Prompts for which the process that decodes again needs another number of calls."""
    calls_of: dict[str, int] = {}
    for measurement in evaluation.temperatures:
        if measurement.temperature == 0:
            for prompt in measurement.prompts:
                calls_of[prompt.key] = prompt.drafted.calls
    differing = [
        again.key
        for again in evaluation.again
        if again.calls != calls_of.get(again.key, again.calls)
    ]
    if differing:
        yield (
            "a process that has seen no response needs other numbers of calls for the same prompts: "
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
    return [*_slow_steps(evaluation), *_slow_target(evaluation)]


def _slow_steps(evaluation: Evaluation) -> Iterator[str]:
    """Plain decoding is slower than the target's own steps."""
    ratios = [
        calibration.step_ratio
        for calibration in evaluation.calibrations
        if calibration.step_ratio
    ]
    if ratios and min(ratios) > SLOW_STEP:
        yield f"a step of plain decoding takes {min(ratios):.2f} times as long as the target's own step"


def _slow_target(evaluation: Evaluation) -> Iterator[str]:
    """Plain decoding is slower than `generate`, or than in the last evaluation on this machine."""
    now, earlier = baseline(evaluation), evaluation.earlier
    if now.against_stock and now.against_stock < 1 / SLOW:
        yield f"plain decoding is slower than model.generate: {now.against_stock:.2f} times as fast"
        return
    if earlier is None or _is_busy(evaluation):
        return
    if now.against_stock and earlier.against_stock:
        if now.against_stock * SLOW < earlier.against_stock:
            yield (
                f"plain decoding is {now.against_stock:.2f} times as fast as model.generate, and was "
                f"{earlier.against_stock:.2f} times as fast on {earlier.measured}"
            )
    elif now.reads and earlier.reads and now.reads > SLOW_READS * earlier.reads:
        yield (
            f"a step of plain decoding takes as long as reading its weights {now.reads:.1f} times, and "
            f"took {earlier.reads:.1f} times on {earlier.measured}"
        )


def _odd_times(evaluation: Evaluation) -> Iterator[str]:
    """Times that do not fit the machine's clock or speed, or the order of decoding."""
    yield from _slow_at_temperature(evaluation)
    for measurement in evaluation.temperatures:
        where = f" at temperature {measurement.temperature:g}"
        yield from _fast_pace(evaluation, measurement, where)
        yield from _unaccounted_turns(measurement, where)
        yield from _fixed_order(measurement, where)


def _slow_at_temperature(evaluation: Evaluation) -> Iterator[str]:
    """A step of plain decoding beside a cycle's verification.

    Sampling is less work for one token than for several, so that the step is no larger a part of the
    verification than at temperature 0. Other programs may disturb one side alone.
    """
    parts = {}
    for measurement in evaluation.temperatures:
        sides = [
            side
            for prompt in measurement.prompts
            for side in (prompt.plain, prompt.drafted)
        ]
        cpu_share = cpu_share_of(sides)
        if cpu_share is None or cpu_share >= BUSY:
            parts[measurement.temperature] = _step_of_verification(measurement)
    greedy = parts.pop(0.0, None)
    for temperature, part in parts.items():
        if greedy and part and part > SLOW_SAMPLING * greedy:
            yield (
                f"beside a verification, a step of plain decoding takes {part / greedy:.2f} times as long at "
                f"temperature {temperature:g} as at 0"
            )


def _step_of_verification(measurement: Measurement) -> float | None:
    """Seconds of a step of plain decoding over those of a verification with its acceptance."""
    plain_calls = sum(prompt.plain.calls for prompt in measurement.prompts)
    calls = sum(prompt.drafted.calls for prompt in measurement.prompts)
    plain_seconds = sum(prompt.plain.decode_seconds for prompt in measurement.prompts)
    phases = [prompt.drafted.phases for prompt in measurement.prompts]
    seconds = sum(phase.verify + phase.accept for phase in phases)
    if not plain_calls or not calls or not seconds:
        return None
    return plain_seconds / plain_calls / (seconds / calls)


def _fast_pace(
    evaluation: Evaluation, measurement: Measurement, where: str
) -> Iterator[str]:
    """Plain decoding is much faster than in the calibrations."""
    steps = [
        calibration.plain_step
        for calibration in evaluation.calibrations
        if calibration.plain_step
    ]
    calls = sum(prompt.plain.calls for prompt in measurement.prompts)
    seconds = sum(prompt.plain.decode_seconds for prompt in measurement.prompts)
    if calls and steps and FAST_PACE * seconds / calls < min(steps):
        yield (
            f"a step of plain decoding{where} takes {1e3 * seconds / calls:.2f} ms, and took "
            f"{1e3 * min(steps):.2f} ms when the machine was calibrated"
        )


def _unaccounted_turns(measurement: Measurement, where: str) -> Iterator[str]:
    """The decodings of a prompt do not fill the time from its beginning to its end."""
    turns = [prompt.turn for prompt in measurement.prompts]
    passed = sum(turn.ended - turn.started for turn in turns)
    decoding = sum(sum(turn.seconds) for turn in turns)
    decodings = sum(len(turn.seconds) for turn in turns)
    sides = [
        side
        for prompt in measurement.prompts
        for side in (prompt.plain, prompt.drafted)
    ]
    allowed = tolerance(cpu_share_of(sides)) * passed + BETWEEN * decodings
    if abs(passed - decoding) > allowed:
        yield (
            f"the decodings{where} have {decoding:.1f} seconds, and {passed:.1f} passed by the machine's "
            "clock: something else ran between them, or times were changed"
        )


def _fixed_order(measurement: Measurement, where: str) -> Iterator[str]:
    """The order of two decoders is the same for all prompts.

    It rotates with the prompts: with k decoders, each of the two comes first at least once in k prompts.
    """
    turns: Sequence[Turn] = [prompt.turn for prompt in measurement.prompts]
    decodings = max(len(turn.seconds) for turn in turns)
    if len(turns) < 2 * decodings:
        return
    plain_came_first = {turn.plain < turn.drafted for turn in turns}
    if plain_came_first == {True}:
        yield f"plain decoding came before the drafter on each prompt{where}: the order should rotate"
    if plain_came_first == {False}:
        yield f"the drafter came before plain decoding on each prompt{where}: the order should rotate"


def leaked(evaluation: Evaluation) -> list[str]:
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
        if not evaluation.parameters:
            return []  # there was no training
        return [
            "it is not known what it was trained on: it may have seen these prompts"
        ]
    if leak.unknown:
        return [
            f"{leak.unknown} of the {leak.samples} samples of its training are not prompts of this "
            "workspace: their media and texts were not compared with these prompts"
        ]
    return []


def baseline(evaluation: Evaluation) -> Baseline:
    """How fast plain decoding was in an evaluation."""
    reads = []
    for calibration in evaluation.calibrations:
        cpu_share = calibration.cpu_share
        undisturbed = cpu_share is None or cpu_share >= BUSY
        if calibration.reads and undisturbed:
            reads.append(calibration.reads)
    return Baseline(
        measured=evaluation.measured,
        against_stock=against_stock(evaluation),
        reads=min(reads, default=None),
    )


def last_baseline(reports: Path, evaluation: Evaluation) -> Baseline | None:
    """The baseline of the last evaluation under the same conditions whose times are not in doubt.

    None if there is none. Records that cannot be read are passed over.
    """
    conditions = Heading.of(evaluation).of_baseline
    before = []
    for file in records.files_in(reports):
        with suppress(DataError):
            heading = records.heading(file)
            if heading.of_baseline == conditions:
                before.append((heading.measured, file))
    for _, file in sorted(before, reverse=True):
        with suppress(DataError):
            past = records.read(file)
            if not _is_busy(past) and not doubts_of_run(past):
                return baseline(past)
    return None


def _is_busy(evaluation: Evaluation) -> bool:
    """Whether other programs had a part of the CPU: caches are theirs then, too, and CPU seconds differ."""
    sides = [
        side
        for measurement in evaluation.temperatures
        for prompt in measurement.prompts
        for side in (prompt.plain, prompt.drafted)
    ]
    cpu_share = cpu_share_of(sides)
    return cpu_share is not None and cpu_share < BUSY


def against_stock(evaluation: Evaluation) -> float | None:
    """How many times as fast plain decoding is as the stock model's `generate`; None: not measured.

    In CPU seconds where both have them: other programs disturb the clock.
    """
    plain: list[Decoding] = []
    stock: list[Stock] = []
    for measurement in evaluation.temperatures:
        for prompt in measurement.prompts:
            if prompt.stock is not None:
                plain.append(prompt.plain)
                stock.append(prompt.stock)
    plain_pace = _pace(plain, stock)
    stock_pace = _pace(stock, plain)
    if not plain_pace or not stock_pace:
        return None
    return stock_pace / plain_pace


def _pace(
    side: Sequence[Decoding | Stock], other_side: Sequence[Decoding | Stock]
) -> float | None:
    """Seconds per token of one side, in CPU seconds if both sides have them."""
    tokens = sum(response.tokens for response in side)
    both_sides = [*side, *other_side]
    if all(response.cpu_seconds is not None for response in both_sides):
        seconds = sum(response.cpu_seconds or 0.0 for response in side)
    else:
        seconds = sum(response.seconds for response in side)
    return seconds / tokens if tokens else None


def _some(keys: list[str]) -> str:
    more = len(keys) - NAMED
    rest = f" and {more} more" if more > 0 else ""
    return ", ".join(keys[:NAMED]) + rest
