"""What the counts of an evaluation must satisfy, whatever decoded: from the records alone, so for any reader.

At temperature 0, a response that equals the target's has as many tokens as it. A cycle gains the drafted
tokens that it accepts and the target's own one, which only the last may lack, and no more than its tree is
deep. The target, not the decoder, counts its forward passes: one for each cycle. All prompts that were to be
measured are. What a drafter does does not depend on the process.

At temperatures above 0, the surprise -log p(x) of a sampled token x has the entropy of the target's own
distribution p as its mean. The sum of the differences over all tokens is a martingale of known variance: far
from 0, the tokens are not samples of p. Some wrong tokens have a large surprise, too greedy ones a small one.
"""

from collections.abc import Iterator
from typing import Final

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench.records import Decoding, Evaluation, Measurement, PromptResult
from vlmdistill.stores.errors import DataError

NAMED: Final = 3  # prompts that a finding names
TOO_GOOD: Final = 0.98  # acceptance above which a drafter is decoded again in another process
ERRORS: Final = 4.0  # standard errors that the surprise may be off
NATS: Final = 10.0  # besides: the sum is skewed, a single rare token is no finding
SLOW: Final = 1.15  # of plain decoding's step to the target's own


def failures(evaluation: Evaluation) -> list[str]:
    """What cannot be true of an evaluation, as sentences; empty for a sound one."""
    found = []
    if missing := sorted(set(evaluation.asked) - set(evaluation.keys)):
        found.append(f"{len(missing)} of {len(evaluation.asked)} prompts were not measured: {_some(missing)}")
    limit = _most(evaluation)
    for at in evaluation.temperatures:
        wrong: dict[str, list[str]] = {}
        for prompt in at.prompts:
            for text in {*_prompt(prompt, at.temperature, limit)}:
                wrong.setdefault(text, []).append(prompt.key)
        where = f" at temperature {at.temperature:g}"
        found += [f"{text}{where}, in {len(keys)} prompts: {_some(keys)}" for text, keys in wrong.items()]
        for whose, off in surprises(at).items():
            if abs(off.nats) > ERRORS * off.error + NATS:
                found.append(
                    f"the responses of {whose}{where} are not samples of the target's distribution: their "
                    f"surprise is off by {off.nats:.0f} nats, with a standard error of {off.error:.0f}"
                )
    greedy = [at for at in evaluation.temperatures if at.temperature == 0]
    calls = {one.key: one.drafted.calls for at in greedy for one in at.prompts}
    if other := [one.key for one in evaluation.again if one.calls != calls.get(one.key)]:
        found.append(
            "a process that has seen no response needs other numbers of calls for the same prompts: "
            f"{_some(other)}"
        )
    return found


class Surprise:
    """How far the surprise of responses is from its mean."""

    def __init__(self, decoded: list[Decoding]) -> None:
        self.nats = sum(one.surprise or 0.0 for one in decoded)
        self.error = sum(one.surprise_variance or 0.0 for one in decoded) ** 0.5
        self.tokens = sum(one.tokens for one in decoded)


def surprises(at: Measurement) -> dict[str, Surprise]:
    """The surprise of the drafter's responses and of plain decoding's; empty if it was not measured."""
    sides = {
        "the drafter": [one.drafted for one in at.prompts],
        "plain decoding": [one.plain for one in at.prompts],
    }
    return {
        name: Surprise(some) for name, some in sides.items() if all(one.surprise is not None for one in some)
    }


def slow_baseline(evaluation: Evaluation) -> list[str]:
    """Warnings of a baseline that is slower than it has to be: speedups over it say little."""
    found = []
    steps = [(one.plain_step, one.bare_step) for one in evaluation.calibrations]
    known = [plain / bare for plain, bare in steps if plain and bare]
    if known and min(known) > SLOW:
        found.append(
            f"a step of plain decoding takes {min(known):.2f} times as long as the target's own step"
        )
    if (stock := against_stock(evaluation)) is not None and stock < 1 / SLOW:
        found.append(f"plain decoding is slower than model.generate: {stock:.2f} times as fast")
    return found


def against_stock(evaluation: Evaluation) -> float | None:
    """How many times as fast plain decoding is as the stock model's `generate`; None: not measured."""
    pairs = [(one.plain, one.stock) for at in evaluation.temperatures for one in at.prompts]
    some = [(plain, stock) for plain, stock in pairs if stock is not None]
    tokens = sum(plain.tokens for plain, _ in some), sum(stock.tokens for _, stock in some)
    seconds = sum(plain.seconds for plain, _ in some), sum(stock.seconds for _, stock in some)
    return (seconds[1] / tokens[1]) / (seconds[0] / tokens[0]) if all(tokens) and all(seconds) else None


def too_good(at: Measurement) -> bool:
    """Nearly all drafted tokens are accepted: the drafter is very good, or knows the responses."""
    tried = sum(sum(one.drafted.chain_tried) for one in at.prompts)
    return sum(sum(one.drafted.chain_accepted) for one in at.prompts) > TOO_GOOD * tried


def _most(evaluation: Evaluation) -> int | None:
    """The most tokens that a cycle can gain; None for a method with a tree of its own."""
    if evaluation.drafter in catalogue.NAMES and not catalogue.load(evaluation.drafter).shaped:
        return None
    try:
        return Tree.parse(evaluation.tree).depth + 2
    except DataError:
        return None


def _prompt(one: PromptResult, temperature: float, limit: int | None) -> Iterator[str]:
    plain, own = one.plain, one.drafted
    if temperature == 0 and plain.check == own.check == "identical":
        lengths = {plain.tokens, own.tokens} | ({one.stock.tokens} if one.stock else set())
        if len(lengths) > 1:
            yield "identical responses have different numbers of tokens"
    if limit is not None and own.tokens - 1 > own.calls * limit:
        yield "the drafter gained more tokens than its tree is deep"
    if own.chain_tried and own.chain_tried[0] > own.calls:
        yield "more chains were verified than there were calls"
    for whose, decoded in (("the drafter", own), ("plain decoding", plain)):
        if not 0 <= decoded.accepted + decoded.calls - (decoded.tokens - 1) <= min(decoded.calls, 1):
            yield f"the tokens of {whose} are not the accepted ones and one for each call"
        if decoded.passes is not None and decoded.passes != decoded.calls:
            yield f"the target counts other forward passes than {whose}"
    sums = tuple(sum(getattr(part, name) for part in own.parts) for name in ("calls", "tokens", "accepted"))
    if own.parts and sums != (own.calls, own.tokens - 1, own.accepted):
        yield "the parts of the response do not add up to it"
    if limit is not None and sum(own.chain_accepted) > own.accepted + limit:
        yield "acceptance by position does not agree with the accepted tokens"


def _some(keys: list[str]) -> str:
    more = len(keys) - NAMED
    return ", ".join(keys[:NAMED]) + (f" and {more} more" if more > 0 else "")
