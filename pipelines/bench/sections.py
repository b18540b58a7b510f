"""The parts of a response: by the length of the context before each cycle, and reasoning apart from answer.

Reasoning is what stands between the tags <think> and </think>, the first of which may be the prompt's.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.pipelines.bench.records import ResponsePart

FIRST = 512  # tokens of context: below it is one range; each later range is as long as all before it
BEGIN, END = "<think>", "</think>"
TAIL = 16  # tokens of a prompt in which its tag is


def context_range(length: int) -> int:
    """The least context of the range that a length is in."""
    return 0 if length < FIRST else 1 << (length.bit_length() - 1)


def reasoning(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens of a response are reasoning, its tags included; 0 without tags."""

    def text(part: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(list(part), skip_special_tokens=False)
        return decoded

    if END in text(ids):
        return (
            bisect_left(range(len(ids)), True, key=lambda n: END in text(ids[: n + 1]))
            + 1
        )
    begun = text(prompt_ids[-TAIL:]).rstrip().endswith(BEGIN) or text(
        ids
    ).lstrip().startswith(BEGIN)
    return len(ids) if begun else 0


def parts(
    cycles: Sequence[Cycle], prompt: int, thought: int
) -> tuple[ResponsePart, ...]:
    """The cycles of a response by part; `prompt` tokens are before it, `thought` of its own are reasoning."""
    counts = Counter[tuple[int, bool, str]]()
    at = 0
    for number, cycle in enumerate(cycles):
        if number:  # the first one is the prefill's
            where = context_range(prompt + at), at < thought
            counts[(*where, "calls")] += 1
            counts[(*where, "tokens")] += len(cycle.ids)
            counts[(*where, "accepted")] += cycle.accepted
        at += len(cycle.ids)
    return tuple(
        ResponsePart(
            context=context,
            thinking=thinking,
            **{
                name: counts[context, thinking, name]
                for name in ("calls", "tokens", "accepted")
            },
        )
        for context, thinking in sorted(
            {(context, thinking) for context, thinking, _ in counts}
        )
    )
