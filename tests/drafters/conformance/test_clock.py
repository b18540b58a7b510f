"""The seconds of the cycles add up to the seconds that pass outside: no work escapes the clock."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests import tiny
from tests.drafters.synthetic import untrained
from tests.ticks import Ticks
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import clock as clocks
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticks]:
    with Ticks() as clock:
        monkeypatch.setattr(clocks, "time", clock)
        yield clock


def unaccounted(cycles: Iterator[Cycle], clock: Ticks) -> float:
    """The seconds of each call for a cycle that are not in that cycle."""
    escaped = 0.0
    for number in itertools.count():
        before = clock.now
        cycle = next(cycles, None)
        passed = clock.now - before
        if cycle is None:
            assert number > 3
            return escaped + passed
        assert cycle.seconds > 0
        escaped += passed - cycle.seconds
    raise AssertionError


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", catalogue.NAMES)
def test_every_operation_of_a_proposer_is_in_a_cycle(
    name: str, temperature: float, target: VisionLanguageTarget, ticks: Ticks
) -> None:
    prompt = target.encode(tiny.message("what is there", tiny.picture(56, 84)))
    cycles = speculate(
        target,
        untrained(name, target),
        prompt,
        tree=Tree.parse("8-2-2"),
        max_new_tokens=20,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    assert unaccounted(cycles, ticks) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_operation_of_plain_decoding_is_in_a_cycle(
    temperature: float, target: VisionLanguageTarget, ticks: Ticks
) -> None:
    prompt = target.encode(tiny.message("what is there", tiny.picture(56, 84)))
    generator = torch.Generator().manual_seed(0)
    cycles = plain(target, prompt, max_new_tokens=20, temperature=temperature, generator=generator)
    assert unaccounted(cycles, ticks) == 0
