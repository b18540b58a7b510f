"""A cycle of the decoders: no work escapes its clock, and it waits for the device once, for its tokens."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests import tiny
from tests.drafters.synthetic import untrained
from tests.ticks import Operations, Ticks
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import clock as clocks
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "multinomial", "_unique2")
"""Operations whose result has a size, or a value on the host, that the device must tell first."""


class Waits(Operations):  # type: ignore[no-untyped-call]
    """Writes down every operation for which a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def tell(self, func: Any, args: Sequence[Any]) -> None:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(
            at is not None and at.dtype == torch.bool for at in args[1]
        )
        if name in WAITING or by_mask:
            self.found.append(name)


def cycles(
    name: str | None, target: VisionLanguageTarget, temperature: float
) -> Iterator[Cycle]:
    """A response about a picture, with a drafter or plainly."""
    return decode(
        target,
        untrained(name, target) if name else None,
        target.encode(tiny.message("what is there", tiny.picture(56, 84))),
        tree=Tree.parse("8-2-2") if name else None,
        max_new_tokens=40,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [None, *catalogue.NAMES])
def test_every_operation_is_in_a_cycle(
    name: str | None,
    temperature: float,
    target: VisionLanguageTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Ticks() as clock:
        monkeypatch.setattr(clocks, "time", clock)
        made, escaped = cycles(name, target, temperature), 0.0
        for number in itertools.count():
            before = clock.now
            cycle = next(made, None)
            escaped += clock.now - before
            if cycle is None:
                assert number > 3
                break
            assert cycle.seconds > 0
            escaped -= cycle.seconds
    assert escaped == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "name", [None, *(name for name in catalogue.NAMES if name != "lookahead")]
)
def test_nothing_in_a_cycle_waits(
    name: str | None, temperature: float, target: VisionLanguageTarget
) -> None:
    made = cycles(name, target, temperature)
    next(made)  # the prefill
    with Waits() as waits:
        assert len(list(itertools.islice(made, 3))) == 3
    assert not waits.found


def test_an_operation_that_waits_is_found() -> None:
    values = torch.arange(4)
    with Waits() as waits:
        int(values[2])
        values[values > 1]
        torch.multinomial(values.float(), 1)
    assert {"_local_scalar_dense", "index", "multinomial"} <= set(waits.found)
