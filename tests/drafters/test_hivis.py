"""HiViS: nothing of an image is read, every guess knows its number, and failed rows stop counting."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import INFO, LAYOUTS, batch, built, cut
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.losses import Scores, TargetRows
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.drafters.hivis import HiViS
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.views.expressions import where

ROOT = Path(__file__).parents[2]
HIDDEN = Feature("hidden", "text")
FIRST, SECOND = HiViS.Training().schedule


def build(**settings: object) -> HiViS:
    """With sequential embeddings as after some training: zeros would hide them."""
    drafter = built(HiViS, **settings)
    with torch.no_grad():
        drafter.sequence.weight[1:].normal_()
    return drafter


def sample(*layouts: str, **settings: object) -> Batch:
    return batch(layouts, HiViS.Config(**settings).needs(INFO))  # type: ignore[arg-type]


def watch(drafter: HiViS) -> SimpleNamespace:
    """What every step adds to the output of `fc` and what it returns, from now on."""
    seen = SimpleNamespace(added=[], states=[])
    projected: list[Tensor] = []
    drafter.block.fc.register_forward_hook(
        lambda module, inputs, output: projected.append(output)
    )
    drafter.block.layer.register_forward_pre_hook(
        lambda module, inputs: seen.added.append((inputs[0] - projected[-1]).detach())
    )
    drafter.block.layer.register_forward_hook(
        lambda module, inputs, output: seen.states.append(output)
    )
    return seen


def expect_guess(drafter: HiViS, added_ND: Tensor, number: int) -> None:
    row_D = drafter.sequence.weight[number].detach()
    torch.testing.assert_close(
        added_ND, row_D.expand_as(added_ND), rtol=1e-4, atol=1e-5
    )


def test_nothing_of_an_image_is_needed() -> None:
    assert (
        HiViS.Config().needs(INFO)
        == HiViS.Config().needs(INFO, decoding=True)
        == {HIDDEN}
    )


def test_the_first_token_after_an_image_follows_the_last_text_before_it() -> None:
    one = sample("tvvvttrr")
    entries, token_E = build().entries(one)
    assert token_E.tolist() == [1, 2, 3, 4]
    torch.testing.assert_close(entries.hidden_ND, one.features[HIDDEN][:4])
    assert entries.rotary_N.tolist() == [0, 1, 2, 3]
    one = sample("tvvvttrr", last_visual=True)
    entries, _ = build(last_visual=True).entries(one)
    torch.testing.assert_close(entries.hidden_ND[0], one.feature("hidden", "span")[0])
    # Where an image opens the sample, no text state precedes the text.
    assert build().entries(sample("vvttrr"))[1].tolist() == [1, 2, 3]


def test_an_image_of_any_size_costs_and_changes_nothing() -> None:
    """Neither states nor losses nor noise: only the text counts."""
    drafter, small = build(), sample("ttvvttrrrrrr", "tvttrrrr")
    large = replace(
        small,
        position_T=small.position_T + 50 * (small.text_tokens.span_N >= 0),
        rope_T=small.rope_T + 7,
        length_M=small.length_M + 50,
    )
    totals = []
    for one in (small, large):
        seen = watch(drafter)
        scores = unroll(drafter, one, SECOND, torch.Generator().manual_seed(0)).scores
        totals.append(
            (torch.stack([score.total for score in scores]), torch.cat(seen.states))
        )
    assert torch.equal(totals[0][0], totals[1][0])
    assert torch.equal(totals[0][1], totals[1][1])


@pytest.mark.parametrize("threshold", [0, 1, 3])
def test_every_guess_has_its_number_in_training_and_in_drafting(threshold: int) -> None:
    """A drafted chain, drafted again in training: the same embeddings and states at every hop."""
    drafter = build(threshold=threshold)
    one = sample(LAYOUTS["one image"])
    prompt = int((~one.response_T).sum())
    drafting = watch(drafter)
    draft = TreeDrafter(drafter, cut(one, prompt))
    draft.commit(
        one.ids_T[prompt : prompt + 1], one.features[HIDDEN][prompt - 1 : prompt]
    )
    chain = draft.grow(Tree.parse("chain-6"))

    ids_T = one.ids_T.clone()
    ids_T[prompt : prompt + 7] = chain.ids_N
    training = watch(drafter)
    unroll(drafter, replace(one, ids_T=ids_T), Stage(name="long", hops=6))
    for hop in range(6):
        number = min(hop, threshold)
        expect_guess(drafter, drafting.added[hop], number)
        expect_guess(drafter, training.added[hop], number)
        torch.testing.assert_close(
            drafting.states[hop][0], training.states[hop][0], rtol=1e-4, atol=1e-5
        )

    again = watch(drafter)
    draft.commit(
        ids_T[prompt + 1 : prompt + 4], one.features[HIDDEN][prompt : prompt + 3]
    )
    expect_guess(
        drafter, again.added[0], 0
    )  # what was guessed is certain now, with the target's states


def test_committed_tokens_keep_the_bias_alone_and_stage_1_moves_no_other_embedding() -> (
    None
):
    drafter = build()
    for stage, moves in ((FIRST, []), (SECOND, [1, 2, 3])):
        total = unroll(
            drafter, sample(*LAYOUTS.values()), replace(stage, keep_top=0)
        ).total
        (grad_ND,) = torch.autograd.grad(total, [drafter.sequence.weight])
        assert grad_ND.abs().sum(-1).nonzero()[:, 0].tolist() == moves
    assert drafter.sequence.weight[0].eq(0).all()
    with pytest.raises(DataError, match="threshold=-1"):
        HiViS.Config(threshold=-1)


def test_the_failing_step_and_all_after_it_do_not_count() -> None:
    """Counted without the filter, by the definition of eq. 7, then with it."""
    drafter, one = build(), sample(*LAYOUTS.values(), *LAYOUTS.values())
    hits: list[Tensor] = []
    plain_loss = drafter.loss

    def record(states: Sequence[Tensor], rows: TargetRows, stage: Stage) -> Scores:
        for hop, state_RD in enumerate(states):
            token_R = (rows.token_R + hop).clamp(max=len(rows.hidden_TD) - 1)
            best_R = drafter.logits(
                rows.hidden_TD[token_R], rows.ids_T[token_R]
            ).argmax(-1)
            last_R = rows.ids_T[token_R]
            hits.append(
                (
                    drafter.logits(state_RD, last_R).topk(9).indices == best_R[:, None]
                ).any(-1)
            )
        return plain_loss(states, rows, stage)

    drafter.loss = record  # type: ignore[method-assign]
    free = unroll(drafter, one, replace(SECOND, keep_top=0)).scores
    drafter.loss = plain_loss  # type: ignore[method-assign]
    filtered = unroll(drafter, one, replace(SECOND, keep_top=9)).scores
    alive_R, recovered = torch.ones_like(hits[0]), 0
    for hop, (all_of, kept) in enumerate(zip(free, filtered, strict=True)):
        recovered += int((hits[hop] & ~alive_R & all_of.count_R).sum())
        alive_R = alive_R & hits[hop]
        counted_R = alive_R & all_of.count_R
        assert torch.equal(kept.count_R, counted_R)
        torch.testing.assert_close(kept.total, all_of.loss_R[counted_R].sum())
        if hop < 3:
            assert counted_R.any()
    assert recovered  # rows that would have been right again


def test_the_documented_views_keep_what_the_paper_keeps() -> None:
    rows = pl.DataFrame(
        {
            "visual_tokens": [9, 9, 0, 0, 9],
            "words": [5, 6, 1, 80, 80],
            "code_ratio": [0.0, 0.0, 0.0, 0.3, 0.3],
        }
    )
    kept = []
    for command in re.findall(
        r"store filter STORE --name hivis.*", (ROOT / "docs" / "papers.md").read_text()
    ):
        kept.append(pl.Series([True] * len(rows)))
        for expression in re.findall(r'--where "(.*?)"', command):
            kept[-1] = kept[-1] & where(expression, rows.columns).keep(rows)
    assert [view.to_list() for view in kept] == [
        [False, True, True, True, True],
        [False, True, True, False, True],
    ]
