"""Acceptance by length of the context, and of thinking and answer apart."""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.pipelines.bench.made_up import drafted, measured
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.pipelines.bench.records import ResponseSection
from vlmdistill.pipelines.bench.sections import context_range, reasoning, sections
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.targets.embedded import EMBEDDED


def cycle(tokens: int) -> Cycle:
    """A cycle of so many tokens, all but the last of them drafted."""
    laps: Any = SimpleNamespace()
    return Cycle([7] * tokens, tokens - 1, (0, 0), [], 0.0, laps)


def test_ranges_double() -> None:
    assert [
        context_range(length) for length in (0, 511, 512, 1023, 1024, 4095, 4096)
    ] == [*(0, 0, 512, 512, 1024, 2048, 4096)]


def test_each_cycle_is_in_the_section_where_it_began() -> None:
    found = sections([cycle(1), cycle(4), cycle(3), cycle(2)], prompt=505, thought=6)
    assert found == (
        ResponseSection(context=0, thinking=True, calls=2, tokens=7, accepted=5),
        ResponseSection(context=512, thinking=False, calls=1, tokens=2, accepted=1),
    )
    assert sections([cycle(1)], prompt=10, thought=0) == ()


@pytest.mark.parametrize(
    ("prompt", "response", "thought"),
    [
        ("Why?", "<think>so</think> Thus.", "<think>so</think>"),
        ("Why?<think>\n", "so</think> Thus.", "so</think>"),
        ("Why?<think>\n", "so and so", "so and so"),
        ("Why?<think>\n\n</think>\n\n", "Thus.", ""),
        ("Why?", "Thus.", ""),
    ],
)
def test_reasoning_ends_with_its_tag(prompt: str, response: str, thought: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED["demo-small"])
    ids = tokenizer(response)["input_ids"]
    count = reasoning(tokenizer, tokenizer(prompt)["input_ids"], ids)
    assert thought in tokenizer.decode(ids[:count])
    assert thought not in tokenizer.decode(ids[: max(0, count - 1)]) or not thought


def test_rates_of_sections_are_pooled_and_audited() -> None:
    some = (
        ResponseSection(context=0, thinking=True, calls=20, tokens=80, accepted=60),
        ResponseSection(context=512, thinking=False, calls=12, tokens=24, accepted=12),
    )
    whole = measured(count=3, sections=some)
    found = {
        one.section: (one.prompts, one.calls, one.tau, one.accepted)
        for one in figures(whole).sections
    }
    assert found == {
        "context from 0": (3, 60, 4.0, 3.0),
        "context from 512": (3, 36, 2.0, 1.0),
        "thinking": (3, 60, 4.0, 3.0),
        "answer": (3, 36, 2.0, 1.0),
    }
    assert figures(measured(count=3)).sections == ()
    assert sum(section.tokens for section in some) == drafted().tokens - 1
