"""Divides a response into sections: by the length of the context, and reasoning apart from the answer.

Reasoning is what stands between the tags <think> and </think>, the first of which may be the prompt's.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.pipelines.bench.records import ResponseSection

FIRST = 512
"""Tokens of context: below it is one range; each later range is as long as all before it."""
BEGIN, END = "<think>", "</think>"
TAIL = 16  # tokens at the end of a prompt in which its tag is


def context_range(length: int) -> int:
    """The lower end of the range that a length is in."""
    if length < FIRST:
        return 0
    return 1 << (length.bit_length() - 1)


def reasoning(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens of a response are reasoning, its tags included; 0 without tags."""

    def text(token_ids: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return decoded

    def ends_within(count: int) -> bool:
        return END in text(ids[:count])

    response = text(ids)
    if END in response:
        return bisect_left(range(len(ids)), True, key=lambda n: ends_within(n + 1)) + 1
    begun_by_prompt = text(prompt_ids[-TAIL:]).rstrip().endswith(BEGIN)
    begun_by_response = response.lstrip().startswith(BEGIN)
    return len(ids) if begun_by_prompt or begun_by_response else 0


@dataclass
class _Counts:
    calls: int = 0
    tokens: int = 0
    accepted: int = 0


def sections(
    cycles: Sequence[Cycle], prompt: int, thought: int
) -> tuple[ResponseSection, ...]:
    """The cycles of a response by section.

    The prompt has `prompt` tokens; the first `thought` tokens of the response are reasoning.
    """
    counts_of: dict[tuple[int, bool], _Counts] = {}
    position = 0  # of the cycle's first token in the response
    for number, cycle in enumerate(cycles):
        if number:  # the first cycle is the prefill's
            key = context_range(prompt + position), position < thought
            counts = counts_of.setdefault(key, _Counts())
            counts.calls += 1
            counts.tokens += len(cycle.ids)
            counts.accepted += cycle.accepted
        position += len(cycle.ids)
    return tuple(
        ResponseSection(
            context=context,
            thinking=thinking,
            calls=counts.calls,
            tokens=counts.tokens,
            accepted=counts.accepted,
        )
        for (context, thinking), counts in sorted(counts_of.items())
    )
