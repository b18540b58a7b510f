"""SpecVLM: which visual tokens stay, and that the target on what stays is the target.

Shapes: U visual tokens, L positions of a prompt, T text tokens, D hidden.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.pipelines.targets.stock import Stock
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.drafters.specvlm import SpecVLM, kept
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

Checkpoint = Callable[..., Path]
SEVERAL = tiny.message(
    "compare", tiny.picture(84, 56, seed=1), tiny.picture(140, 84, seed=2)
)


@pytest.mark.parametrize("drop", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_as_many_tokens_stay_as_the_share_allows(count: int, drop: float) -> None:
    weight_U = torch.rand(count, generator=torch.Generator().manual_seed(0))
    assert int(kept(weight_U, drop, 0.4).sum()) == int(count * (1 - drop))
    assert kept(torch.zeros(0), drop, 0.4).shape == (0,)


def test_the_tokens_of_the_first_two_fifths_of_the_attention_stay_then_others_evenly() -> (
    None
):
    weight_U = torch.full((20,), 1.0)
    weight_U[[3, 11, 12]] = torch.tensor(
        [4.0, 6.0, 5.0]
    )  # of 32 in all: the first two hold 11, three 15
    keep_U = kept(weight_U, 0.7, 0.4)
    assert int(keep_U.sum()) == 6
    assert keep_U[[3, 11, 12]].all()
    others = [token for token in range(20) if token not in (3, 11, 12)]
    assert keep_U.nonzero()[:, 0].tolist() == sorted(
        [3, 11, 12, others[0], others[8], others[16]]
    )
    # No more of them than there is room for, the likeliest first.
    assert kept(weight_U, 0.88, 0.4).nonzero()[:, 0].tolist() == [11, 12]
    # The first token that reaches the share is the last of the first stage.
    assert kept(weight_U, 0.85, 11 / 32).nonzero()[:, 0].tolist() == [others[0], 11, 12]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_attention_is_that_of_the_stock_model(
    family: str, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family)
    target = load(str(folder))
    stock = Stock(folder, target, "eager")
    prompt = target.encode(SEVERAL)
    target.prefill(prompt)
    with torch.inference_mode():
        weights = stock.model(
            **stock.inputs(SEVERAL), output_attentions=True
        ).attentions
    mean_LL = torch.stack(weights)[:, 0].mean((0, 1))
    last = int(prompt.visual_L.nonzero()[-1])
    expected_U = mean_LL[last + 1 :].mean(0)[prompt.visual_L]
    torch.testing.assert_close(target.attention(), expected_U, rtol=1e-4, atol=1e-6)


def said_after(reader: Any, ids: list[int]) -> Tensor:
    """States after tokens that follow the prompt, [N, D]."""
    depth_N = torch.arange(1, len(ids) + 1)
    with torch.inference_mode():
        state_ND: Tensor = reader.extend(torch.tensor(ids), depth_N, None, ("hidden",))[
            "hidden"
        ]
    return state_ND


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_second_reader_of_everything_is_the_target(
    family: str, checkpoint: Checkpoint
) -> None:
    target = load(str(checkpoint(family)))
    prompt = target.encode(SEVERAL)
    target.prefill(prompt)
    everything_U = torch.ones(int(prompt.visual_L.sum()), dtype=torch.bool)
    second = target.without(everything_U)
    expected_ND = said_after(target, [21, 22, 23])
    torch.testing.assert_close(
        said_after(second, [21, 22, 23]), expected_ND, rtol=1e-4, atol=1e-5
    )
    # The two go on apart: what one commits the other has not read.
    second.commit([0, 1])
    torch.testing.assert_close(said_after(target, [21, 22, 23]), expected_ND)
    torch.testing.assert_close(
        said_after(second, [23]), expected_ND[2:], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_a_second_reader_reads_the_prompt_as_if_some_tokens_were_not_there(
    family: str, checkpoint: Checkpoint
) -> None:
    """Against the stock model with those masked: every other token stays where it stood."""
    folder = checkpoint(family)
    target = load(str(folder))
    stock = Stock(folder, target)
    prompt = target.encode(SEVERAL)
    target.prefill(prompt)
    keep_U = (
        torch.rand(
            int(prompt.visual_L.sum()), generator=torch.Generator().manual_seed(0)
        )
        < 0.5
    )
    second = target.without(keep_U)
    inputs, more = stock.inputs(SEVERAL), torch.tensor([[21, 22]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(
            inputs["mm_token_type_ids"], (0, 2)
        )
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, : prompt.length][prompt.visual_L] = keep_U.long()
    next_AN = (prompt.next_rope + torch.arange(2)).expand(len(prompt.rope_AL), -1)
    rope_AL = torch.cat([prompt.rope_AL, next_AN], 1)
    place = rope_AL[:, None] if len(rope_AL) > 1 else rope_AL
    with torch.inference_mode():
        out = stock.model(**inputs, position_ids=place, output_hidden_states=True)
    expected_ND = out.hidden_states[-1][0, -2:]
    torch.testing.assert_close(
        said_after(second, [21, 22]), expected_ND, rtol=1e-4, atol=2e-5
    )
    assert not torch.allclose(said_after(target, [21, 22]), expected_ND, atol=1e-3)


@pytest.fixture(params=["qwen2_5_vl", "llava"])
def target(
    request: pytest.FixtureRequest, checkpoint: Checkpoint
) -> VisionLanguageTarget:
    return load(str(checkpoint(request.param)))


def test_a_target_that_keeps_everything_drafts_its_own_answer(
    target: VisionLanguageTarget,
) -> None:
    prompt = target.encode(SEVERAL)
    expected = [
        token
        for cycle in plain(target, prompt, max_new_tokens=21)
        for token in cycle.ids
    ]
    drafter = SpecVLM(SpecVLM.Config(drop=0.0), target.info, target.head).eval()
    cycles = list(
        speculate(
            target, drafter, prompt, tree=Tree.parse("chain-4"), max_new_tokens=21
        )
    )
    assert [token for cycle in cycles for token in cycle.ids] == expected
    assert {len(cycle.ids) for cycle in cycles[1:-1]} == {5}


def test_a_prompt_without_images_is_drafted_from_whole(
    target: VisionLanguageTarget,
) -> None:
    prompt = target.encode(tiny.message("tell"))
    drafter = SpecVLM(SpecVLM.Config(), target.info, target.head).eval()
    cycles = list(
        speculate(
            target, drafter, prompt, tree=Tree.parse("chain-3"), max_new_tokens=13
        )
    )
    assert {len(cycle.ids) for cycle in cycles[1:-1]} == {4}
