"""What the counts of an evaluation must satisfy, whatever decoded: from the records alone, so for any reader.

At temperature 0, a response that equals the target's has as many tokens as it. A cycle gains the drafted
tokens that it accepts and the target's own one, which only the last may lack, and no more than its tree is
deep. The target, not the decoder, counts its forward passes: one for each cycle. All prompts that were to be
measured are. What a drafter does does not depend on the process: some prompts are decoded again in another.

At temperatures above 0, the surprise -log p(x) of a sampled token x has the entropy of the target's own
distribution p as its mean. The sum of the differences over all tokens is a martingale of known variance: far
from 0, the tokens are not samples of p. Some wrong tokens have a large surprise, too greedy ones a small one.
So it is with the counts of first, second, later and rare choices (`sampled.py`), which tell what one moment
does not. The responses of both sides are as long.

The baseline is compared with the target's own steps, with the stock model's `generate`, and with the last
evaluation of the same target on the same machine.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
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
# of plain decoding's step to the target's own, in pairs: honest ones have 0.98 to 1.04
SLOW_STEP: Final = 1.1
SLOW: Final = 1.15  # of plain decoding to `generate`, and to earlier evaluations
LEAKED: Final = (
    0.1  # share of the prompts that a drafter has seen, above which it is not ranked
)
SLOW_READS: Final = 1.5  # of a step to an earlier one, which was not measured beside it
# of plain decoding's pace to the machine's own, which other programs can only slow down
FAST_PACE: Final = 2.0
BETWEEN: Final = 0.01  # seconds that may pass between two decodings of a prompt
EQUAL: Final = 1e-6  # relative difference of numbers that are recorded twice


def failures(evaluation: Evaluation) -> list[str]:
    """What cannot be true of an evaluation, as sentences; empty for a sound one."""
    found = []
    if missing := sorted(set(evaluation.asked) - set(evaluation.keys)):
        found.append(
            f"{len(missing)} of {len(evaluation.asked)} prompts were not measured: {_some(missing)}"
        )
    if evaluation.asked and (
        added := sorted(set(evaluation.keys) - set(evaluation.asked))
    ):
        found.append(
            f"{len(added)} prompts were measured that were not to be: {_some(added)}"
        )
    if twice := sorted(
        key for key, count in Counter(evaluation.keys).items() if count > 1
    ):
        found.append(
            f"{len(twice)} prompts are in the record more than once: {_some(twice)}"
        )
    limit = _most(evaluation)
    for at in evaluation.temperatures:
        wrong: dict[str, list[str]] = {}
        for prompt in at.prompts:
            for text in {*_prompt(prompt, at.temperature, limit)}:
                wrong.setdefault(text, []).append(prompt.key)
        where = f" at temperature {at.temperature:g}"
        found += [
            f"{text}{where}, in {len(keys)} prompts: {_some(keys)}"
            for text, keys in wrong.items()
        ]
        found += _sampled(at, where)
        found += _clocks(at, where)
        found += _seeds(at, where, evaluation.seed)
    greedy = [at for at in evaluation.temperatures if at.temperature == 0]
    calls = {one.key: one.drafted.calls for at in greedy for one in at.prompts}
    if other := [
        one.key
        for one in evaluation.again
        if one.calls != calls.get(one.key, one.calls)
    ]:
        found.append(
            "a process that has seen no response needs other numbers of calls for the same prompts: "
            f"{_some(other)}"
        )
    return found


def _sampled(at: Measurement, where: str) -> Iterator[str]:
    """What is wrong with sampled responses as samples of the target's distribution."""
    for whose, off in surprises(at).items():
        if abs(off.nats) > ERRORS * off.error + NATS:
            yield (
                f"the responses of {whose}{where} are not samples of the target's distribution: their "
                f"surprise is off by {off.nats:.0f} nats, with a standard error of {off.error:.0f}"
            )
    for whose, decoded in _sides(at).items():
        for counted in rank_counts(decoded):
            error = counted.variance**0.5
            if abs(counted.tokens - counted.expected) > ERRORS * error + TOKENS:
                yield (
                    f"the responses of {whose}{where} are not samples of the target's distribution: "
                    f"{counted.tokens} tokens are its {counted.rank} choices, {counted.expected:.0f} are "
                    f"expected, with a standard error of {error:.0f}"
                )
    if at.temperature > 0 and (beyond := _longer(at)) > ERRORS:
        yield (
            f"the responses of the drafter and of plain decoding{where} differ in length by "
            f"{beyond:.1f} standard errors"
        )


def _clocks(at: Measurement, where: str) -> Iterator[str]:
    """What one clock says that another one excludes."""
    for whose, decoded in _sides(at).items():
        elapsed = (1 + TOLERANCE) * sum(one.seconds for one in decoded)
        if sum(one.cpu_seconds or 0.0 for one in decoded) > elapsed:
            yield f"the thread of {whose}{where} has more CPU seconds than elapsed"
        spent = [astuple(one.phases) for one in decoded if one.phases]
        if sum(map(sum, spent)) > elapsed:
            yield f"the phases of {whose}{where} have more seconds than elapsed"
    changed = [
        prompt.key
        for prompt in at.prompts
        if (turn := prompt.turn)
        if not _same(turn.seconds[turn.plain], prompt.plain.seconds)
        or not _same(turn.seconds[turn.drafted], prompt.drafted.seconds)
    ]
    if changed:
        yield f"the seconds of decodings{where} are recorded twice, and differ: {_some(changed)}"


def _seeds(at: Measurement, where: str, seed: int) -> Iterator[str]:
    """Both sides sample a prompt with the same seed, and each prompt with another one."""
    if at.temperature == 0:
        return
    for whose, decoded in _sides(at).items():
        odd = [
            prompt.key
            for number, (prompt, response) in enumerate(
                zip(at.prompts, decoded, strict=True)
            )
            if response.seed not in (None, prompt_seed(seed, number))
        ]
        if odd:
            yield f"{whose}{where} sampled with other seeds than those of the prompts: {_some(odd)}"


def _longer(at: Measurement) -> float:
    """How many standard errors the lengths of the two sides differ by.

    Both sides sample the same distribution, so each difference is as likely as its negative. With random
    signs a sum exceeds z standard errors with a probability of at most 2 exp(-z^2 / 2) (Hoeffding 1963).
    """
    beyond = [prompt.drafted.tokens - prompt.plain.tokens for prompt in at.prompts]
    error = sum(tokens**2 for tokens in beyond) ** 0.5
    return abs(sum(beyond)) / error if error else 0.0


def _sides(at: Measurement) -> dict[str, list[Decoding]]:
    return {
        "the drafter": [prompt.drafted for prompt in at.prompts],
        "plain decoding": [prompt.plain for prompt in at.prompts],
    }


class Surprise:
    """How far the surprise of responses is from its mean."""

    def __init__(self, decoded: list[Decoding]) -> None:
        self.nats = sum(one.surprise or 0.0 for one in decoded)
        self.error = sum(one.surprise_variance or 0.0 for one in decoded) ** 0.5
        self.tokens = sum(one.tokens for one in decoded)


def surprises(at: Measurement) -> dict[str, Surprise]:
    """The surprise of the drafter's responses and of plain decoding's; empty if it was not measured."""
    return {
        name: Surprise(decoded)
        for name, decoded in _sides(at).items()
        if all(one.surprise is not None for one in decoded)
    }


def rank_counts(decoded: Iterable[Decoding]) -> list[RankCount]:
    """The counts of all responses together, by rank."""
    by_rank: dict[Rank, list[RankCount]] = {}
    for response in decoded:
        for counted in response.ranks:
            by_rank.setdefault(counted.rank, []).append(counted)
    return [
        RankCount(
            rank=rank,
            tokens=sum(counted.tokens for counted in counts),
            expected=sum(counted.expected for counted in counts),
            variance=sum(counted.variance for counted in counts),
        )
        for rank, counts in by_rank.items()
    ]


def doubts_of_run(evaluation: Evaluation) -> list[str]:
    """Why speedups of the run that measured an evaluation say little."""
    return [*slow_baseline(evaluation), *_odd_times(evaluation)]


def _odd_times(evaluation: Evaluation) -> Iterator[str]:
    """Times that do not fit the machine's clock or speed, or the order of decoding."""
    steps = [one.plain_step for one in evaluation.calibrations if one.plain_step]
    for at in evaluation.temperatures:
        where = f" at temperature {at.temperature:g}"
        calls = sum(prompt.plain.calls for prompt in at.prompts)
        decoding = sum(prompt.plain.decode_seconds for prompt in at.prompts)
        if calls and steps and FAST_PACE * decoding / calls < min(steps):
            yield (
                f"a step of plain decoding{where} takes {1e3 * decoding / calls:.2f} ms, and took "
                f"{1e3 * min(steps):.2f} ms when the machine was calibrated"
            )
        turns = [prompt.turn for prompt in at.prompts if prompt.turn]
        yield from _unaccounted_turns(at, turns, where)
        yield from _fixed_order(turns, where)


def _fixed_order(turns: Sequence[Turn], where: str) -> Iterator[str]:
    """With k decoders, one of two comes first in at least one of k prompts in a row."""
    decodings = max((len(turn.seconds) for turn in turns), default=0)
    if not turns or len(turns) < 2 * decodings:
        return
    plain_first = [turn.plain < turn.drafted for turn in turns]
    order = "plain decoding came before the drafter"
    if not any(plain_first):
        order = "the drafter came before plain decoding"
    if all(plain_first) or not any(plain_first):
        yield f"{order} on each prompt{where}: the order should rotate"


def _unaccounted_turns(
    at: Measurement, turns: Sequence[Turn], where: str
) -> Iterator[str]:
    """The decodings of a prompt fill the time between its beginning and its end."""
    passed = sum(turn.ended - turn.started for turn in turns)
    decoding = sum(sum(turn.seconds) for turn in turns)
    decodings = sum(len(turn.seconds) for turn in turns)
    sides = [side for prompt in at.prompts for side in (prompt.plain, prompt.drafted)]
    allowed = tolerance(cpu_share_of(sides)) * passed + BETWEEN * decodings
    if abs(passed - decoding) > allowed:
        yield (
            f"the decodings{where} have {decoding:.1f} seconds, and {passed:.1f} passed by the machine's "
            "clock: something else ran between them, or times were changed"
        )


def slow_baseline(evaluation: Evaluation) -> list[str]:
    """Warnings of a baseline that is slower than it has to be: speedups over it say little."""
    return [*_slow_steps(evaluation), *_slow_target(evaluation)]


def _slow_steps(evaluation: Evaluation) -> Iterator[str]:
    """Against the target's own steps."""
    ratios = [one.step_ratio for one in evaluation.calibrations if one.step_ratio]
    if ratios and min(ratios) > SLOW_STEP:
        yield f"a step of plain decoding takes {min(ratios):.2f} times as long as the target's own step"


def _slow_target(evaluation: Evaluation) -> Iterator[str]:
    """Against `generate`, and against the last evaluation on this machine."""
    now, earlier = baseline(evaluation), evaluation.earlier
    if now.against_stock and now.against_stock < 1 / SLOW:
        yield f"plain decoding is slower than model.generate: {now.against_stock:.2f} times as fast"
    elif earlier is None:
        return
    elif now.against_stock and earlier.against_stock:
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


def leaked(evaluation: Evaluation) -> list[str]:
    """That a drafter has seen many of the prompts in training, so that its numbers say little of others."""
    leak = evaluation.leak
    if leak is None or len(leak.keys) <= LEAKED * len(evaluation.keys):
        return []
    return [
        f"it has seen {len(leak.keys)} of {len(evaluation.keys)} prompts in training"
    ]


def unknown_training(evaluation: Evaluation) -> list[str]:
    """What is not known of the samples that a drafter was trained on."""
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
    """What plain decoding compares with in an evaluation."""
    reads = [
        one.reads
        for one in evaluation.calibrations
        if one.reads and (one.cpu_share is None or one.cpu_share >= BUSY)
    ]
    return Baseline(
        measured=evaluation.measured,
        against_stock=against_stock(evaluation),
        reads=min(reads, default=None),
    )


def last_baseline(reports: Path, evaluation: Evaluation) -> Baseline | None:
    """That of the last evaluation under the same conditions before this one, unless it was slow."""
    like = Heading.of(evaluation)
    headings = [(records.heading(file), file) for file in records.files_in(reports)]
    before = [
        (one.measured, file)
        for one, file in headings
        if one.of_baseline == like.of_baseline
    ]
    for _, file in sorted(before, reverse=True):
        past = records.read(file)
        if not doubts_of_run(past):
            return baseline(past)
    return None


def against_stock(evaluation: Evaluation) -> float | None:
    """How many times as fast plain decoding is as the stock model's `generate`; None: not measured.

    In CPU seconds where both have them: other programs disturb the clock.
    """
    pairs = [
        (one.plain, one.stock)
        for at in evaluation.temperatures
        for one in at.prompts
        if one.stock is not None
    ]
    tokens = (
        sum(plain.tokens for plain, _ in pairs),
        sum(stock.tokens for _, stock in pairs),
    )
    seconds = (
        sum(plain.seconds for plain, _ in pairs),
        sum(stock.seconds for _, stock in pairs),
    )
    if all(
        None not in (plain.cpu_seconds, stock.cpu_seconds) for plain, stock in pairs
    ):
        seconds = (
            sum(plain.cpu_seconds or 0.0 for plain, _ in pairs),
            sum(stock.cpu_seconds or 0.0 for _, stock in pairs),
        )
    if not all(tokens) or not all(seconds):
        return None
    return (seconds[1] / tokens[1]) / (seconds[0] / tokens[0])


def _most(evaluation: Evaluation) -> int | None:
    """The most tokens that a cycle can gain; None for a method with a tree of its own."""
    if (
        evaluation.drafter in catalogue.NAMES
        and not catalogue.load(evaluation.drafter).shaped
    ):
        return None
    try:
        return Tree.parse(evaluation.tree).depth + 2
    except DataError:
        return None


def _prompt(one: PromptResult, temperature: float, limit: int | None) -> Iterator[str]:
    plain, own = one.plain, one.drafted
    if temperature == 0 and plain.check == own.check == "identical":
        lengths = {plain.tokens, own.tokens} | (
            {one.stock.tokens} if one.stock else set()
        )
        if len(lengths) > 1:
            yield "identical responses have different numbers of tokens"
    if limit is not None and own.tokens - 1 > own.calls * limit:
        yield "the drafter gained more tokens than its tree is deep"
    if own.chain_tried and own.chain_tried[0] > own.calls:
        yield "more chains were verified than there were calls"
    for whose, decoded in (("the drafter", own), ("plain decoding", plain)):
        if (
            not 0
            <= decoded.accepted + decoded.calls - (decoded.tokens - 1)
            <= min(decoded.calls, 1)
        ):
            yield f"the tokens of {whose} are not the accepted ones and one for each call"
        if decoded.finish == "broken":
            yield f"the responses of {whose} go on after an EOS, or end at neither an EOS nor the limit"
        if decoded.passes is not None and decoded.passes != decoded.calls:
            yield f"the target counts other forward passes than {whose}"
    sums = tuple(
        sum(getattr(part, name) for part in own.parts)
        for name in ("calls", "tokens", "accepted")
    )
    if own.parts and sums != (own.calls, own.tokens - 1, own.accepted):
        yield "the parts of the response do not add up to it"
    if limit is not None and sum(own.chain_accepted) > own.accepted + limit:
        yield "acceptance by position does not agree with the accepted tokens"


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EQUAL)


def _some(keys: list[str]) -> str:
    more = len(keys) - NAMED
    return ", ".join(keys[:NAMED]) + (f" and {more} more" if more > 0 else "")
