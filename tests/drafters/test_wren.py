"""Wren: depths of the target at committed tokens, sequential embeddings at guesses, states of any length."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import INFO, batch, built
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.drafters.wren import Wren

STAGE = Stage(name="test", hops=3, losses={"cross_entropy": 1.0})


def sample(drafter: Wren) -> Batch:
    return batch(["tvvvttrrrrrr"], drafter.config.needs(INFO))


def states(drafter: Wren, one: Batch) -> list[Tensor]:
    """What the drafter returns at every hop."""
    seen: list[Tensor] = []
    drafter.block.layer.register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach())
    )
    unroll(drafter, one, STAGE)
    return seen


@pytest.mark.parametrize(
    ("threshold", "trained"), [(0, []), (1, [1]), (2, [1, 2]), (5, [1, 2])]
)
@pytest.mark.parametrize("depths", [True, False])
def test_only_guesses_train_a_sequential_embedding(
    depths: bool, threshold: int, trained: list[int]
) -> None:
    drafter = built(Wren, depths=depths, threshold=threshold)
    unroll(drafter, sample(drafter), STAGE).total.backward()  # type: ignore[no-untyped-call]
    gradient_GD = drafter.sequence.weight.grad
    found = (
        []
        if gradient_GD is None
        else gradient_GD.abs().sum(-1).nonzero()[:, 0].tolist()
    )
    assert found == trained


def test_the_depths_of_a_token_count_and_no_image_does() -> None:
    drafter, other = built(Wren), built(Wren)
    with torch.no_grad():
        other.depth_fc.weight.zero_()
    one = sample(drafter)
    assert not torch.allclose(states(drafter, one)[0], states(other, one)[0])
    assert len(drafter.sources) == 4
    assert {feature.where for feature in drafter.config.needs(INFO)} == {"text"}


def test_a_cell_makes_all_guesses_but_the_first() -> None:
    drafter, one = built(Wren, cell=2), sample(built(Wren))
    assert [len(states(each, one)) for each in (built(Wren), drafter)] == [
        STAGE.hops,
        1,
    ]  # passes of the layer
    unroll(drafter, one, replace(STAGE, hops=1)).total.backward()  # type: ignore[no-untyped-call]
    assert drafter.cell_in.weight.grad is None
    assert drafter.published().layers == built(Wren).published().layers == drafter.taps


def test_the_length_of_a_state_does_not_matter_when_normed() -> None:
    """A guess reads the drafter's own state, which may be longer than the target's."""
    drafter = built(Wren, depths=False)
    one = sample(drafter)
    longer = one.having({feature: 7 * state for feature, state in one.features.items()})
    for mine, theirs in zip(
        states(drafter, one), states(built(Wren, depths=False), longer), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
