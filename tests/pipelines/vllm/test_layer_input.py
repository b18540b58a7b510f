"""A pass of a served drafter, recorded as a CUDA graph records it, repeats with other values."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.pipelines.vllm.plugin.layer_input import LayerInput

ROWS, LONGEST = 6, 40
SERVED: list[tuple[str, dict[str, object]]] = [
    ("eagle2", {}),
    ("msd", {}),
    ("sparrow", {}),
    ("hivis", {}),
    ("vispec", {}),
    ("eaglevlm", {"compressor": "pool", "ratio": 3}),
    ("specflash", {"ratio": 2}),
    ("wren", {}),
]


def change(block: LayerInput, inputs: tuple[Tensor, ...], guess: int) -> None:
    """Other values in the same memory: inputs, weights, and all that a step sets."""
    drafter = block.drafter
    position_N, hidden_ND, embed_ND = inputs
    position_N.random_(LONGEST)
    for values in (hidden_ND, embed_ND, *drafter.parameters()):
        values.data.normal_()
    block.guess_1.fill_(guess)
    block.shift(torch.randint(LONGEST, (ROWS - 1,)))
    if drafter.visual == "raw":
        block.mark_raw(torch.rand(ROWS) > 0.5)
    if drafter.compresses is not None:
        block.carries_N.zero_()
        block.carry(torch.randperm(ROWS)[:2], torch.randn(2, INFO.hidden_size))
    if drafter.joins:
        block.joined_ND.normal_()


@torch.no_grad()
@pytest.mark.parametrize(("name", "settings"), SERVED, ids=lambda value: str(value))
def test_a_recorded_pass_reads_what_changes_from_memory(
    name: str, settings: dict[str, object]
) -> None:
    torch.manual_seed(0)
    drafter = synthetic.build(name, **settings).eval()
    assert isinstance(drafter, EagleDrafter)
    block = LayerInput(drafter, ROWS, LONGEST)
    width = INFO.hidden_size
    inputs = (
        torch.zeros(ROWS).long(),
        torch.zeros(ROWS, width),
        torch.zeros(ROWS, width),
    )
    change(block, inputs, guess=0)
    recorded = make_fx(lambda: block.entries(*inputs))()
    before = [value.clone() for value in recorded()]
    for guess in (0, 1, 3):
        change(block, inputs, guess)
        again = recorded()
        torch.testing.assert_close(again, block.entries(*inputs), rtol=0, atol=0)
        assert not any(map(torch.equal, before, again))


@torch.no_grad()
def test_guesses_are_never_visual_tokens() -> None:
    """What marks rows of the first pass is still there when the guesses are drafted."""
    for name in ("msd", "vispec"):
        drafter = synthetic.build(name).eval()
        assert isinstance(drafter, EagleDrafter)
        marked, plain = (LayerInput(drafter, ROWS, LONGEST) for _ in range(2))
        inputs = (torch.arange(ROWS), *torch.randn(2, ROWS, INFO.hidden_size))
        change(marked, tuple(value.clone() for value in inputs), guess=1)
        if drafter.joins:
            plain.joined_ND.copy_(marked.joined_ND)
        plain.guess_1.fill_(1)
        _, found_ND = marked.entries(*inputs)
        _, expected_ND = plain.entries(*inputs)
        torch.testing.assert_close(found_ND, expected_ND)


def test_rows_that_a_graph_pads_stay_within_the_positions() -> None:
    drafter = synthetic.build("sparrow").eval()
    assert isinstance(drafter, EagleDrafter)
    block = LayerInput(drafter, ROWS, LONGEST)
    state_ND = torch.randn(ROWS, INFO.hidden_size)
    block.shift(torch.tensor([-5, 3, LONGEST]))
    position_N = torch.tensor([0, 1, 2, 7, 8, 9])
    rotary_N, _ = block.entries(position_N, state_ND, state_ND)
    assert rotary_N.tolist() == [0, 4, LONGEST - 1, 7, 8, 9]
    block.shift(None)
    rotary_N, _ = block.entries(position_N, state_ND, state_ND)
    assert rotary_N.tolist() == position_N.tolist()
