"""A cycle of the decoder waits for the device once, when it reads the tokens that were gained."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.drafters.synthetic import untrained
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "multinomial", "_unique2")
"""Operations whose result has a size, or a value on the host, that the device must tell first."""


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation for which a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(at is not None and at.dtype == torch.bool for at in args[1])
        if name in WAITING or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def found_in_cycles(cycles: Iterator[Cycle]) -> list[str]:
    next(cycles)  # the prefill
    with Waits() as waits:
        assert len(list(itertools.islice(cycles, 3))) == 3
    found: list[str] = waits.found
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in catalogue.NAMES if name != "lookahead"])
def test_nothing_in_a_cycle_waits(name: str, temperature: float, target: VisionLanguageTarget) -> None:
    prompt = target.encode(tiny.message("what is there", tiny.picture(56, 84)))
    cycles = speculate(
        target,
        untrained(name, target),
        prompt,
        tree=Tree.parse("8-2-2"),
        max_new_tokens=40,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    assert not found_in_cycles(cycles)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_in_a_plain_step_waits(temperature: float, target: VisionLanguageTarget) -> None:
    prompt = target.encode(tiny.message("what is there", tiny.picture(56, 84)))
    assert not found_in_cycles(plain(target, prompt, max_new_tokens=40, temperature=temperature))


def test_an_operation_that_waits_is_found() -> None:
    values: Tensor = torch.arange(4)
    with Waits() as waits:
        int(values[2])
        values[values > 1]
        torch.multinomial(values.float(), 1)
    assert {"_local_scalar_dense", "index", "multinomial"} <= set(waits.found)
