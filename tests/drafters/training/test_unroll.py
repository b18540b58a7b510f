"""What is supervised, what each hop sees, and what the losses are."""

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import INFO, LAYOUTS, batch, build
from vlmdistill.drafters.base import Stage
from vlmdistill.drafters.losses import TERMS, Rows, score
from vlmdistill.drafters.training.unroll import supervised, unroll, with_noise
from vlmdistill.stores.schema import Feature

HIDDEN = Feature("hidden", "text")
STAGE = Stage(name="test", hops=3, losses={"cross_entropy": 1.0})


def test_supervision_starts_at_the_first_drafted_token_and_ends_with_the_response() -> None:
    sample = batch(["ttvvttrrrrtttrrr", "ttrr"], [HIDDEN])
    # Entries of the response tokens that another token of the same response follows.
    assert supervised(sample).nonzero()[:, 0].tolist() == [4, 5, 6, 11, 12, 16]


def test_a_later_hop_counts_only_while_it_stays_inside_the_response() -> None:
    drafter = build("eagle2")
    sample = batch(["ttrrrr"], drafter.needs(drafter.config, INFO))
    counted = [score.count_R.tolist() for score in unroll(drafter, sample, STAGE).scores]
    assert counted == [[True, True, True], [True, True, False], [True, False, False]]


def test_noise_touches_last_layer_states_alone_and_shrinks_with_length() -> None:
    sample = batch(["tt" + "v" * 400 + "trr", "ttrr"], [HIDDEN, Feature("embed", "visual")])
    noisy = with_noise(sample, 0.2, torch.Generator().manual_seed(0))
    assert torch.equal(
        noisy.features[Feature("embed", "visual")], sample.features[Feature("embed", "visual")]
    )
    moved_T = (noisy.features[HIDDEN] - sample.features[HIDDEN]).abs().amax(-1)
    bound_T = 0.1 * 512 / torch.tensor([405.0] * 5 + [4.0] * 4)
    assert (moved_T <= bound_T).all()
    assert (moved_T > bound_T / 2).all()


@pytest.mark.parametrize("term", ["regression", *TERMS])
def test_a_loss_in_chunks_has_the_gradient_of_the_loss_in_one_piece(term: str) -> None:
    torch.manual_seed(0)
    lm_head = torch.randn(23, 8, dtype=torch.float64)
    target, valid = torch.randn(7, 8, dtype=torch.float64), torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool()

    def loss(state: Tensor, chunk: int | None) -> Tensor:
        rows = Rows(state, target, valid, 0)
        logits = lambda state_ND, hop: state_ND @ lm_head.T  # noqa: E731
        return score(rows, logits, lm_head, {term: 1.0}, chunk_rows=chunk).total

    state = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    whole, parts = loss(state, None), loss(state, 2)
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(torch.autograd.grad(whole, state), torch.autograd.grad(parts, state))
    assert torch.autograd.grad(loss(state, 2), state)[0][2].eq(0).all()


def test_a_filtered_row_stops_counting_at_the_hop_that_fails() -> None:
    lm_head = torch.eye(4)
    target = torch.tensor([[9.0, 0, 0, 0], [9.0, 0, 0, 0]])
    state = torch.tensor([[5.0, 4.0, 3.0, 0], [0.0, 4.0, 5.0, 3.0]])
    rows = Rows(state, target, torch.ones(2).bool(), 0)
    logits = lambda state_ND, hop: state_ND  # noqa: E731
    kept = score(rows, logits, lm_head, {"cross_entropy": 1.0}, keep_top=3)
    assert kept.count_R.tolist() == [True, False]
    alone = Rows(state[:1], target[:1], torch.ones(1).bool(), 0)
    torch.testing.assert_close(kept.total, score(alone, logits, lm_head, {"cross_entropy": 1.0}).total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_before_each_token_is_that_of_its_predecessor(layout: str) -> None:
    everything = [Feature("hidden", where) for where in ("text", "visual", "span")]
    sample = batch([LAYOUTS[layout]], everything)
    kinds = LAYOUTS[layout]
    flow, text, visual = [], iter(sample.features[HIDDEN]), iter(sample.features[Feature("hidden", "visual")])
    for kind in kinds:
        flow.append(next(visual) if kind == "v" else next(text))
    states, found = sample.before("hidden")
    for token, position in enumerate(sample.position_T.tolist()):
        assert bool(found[token]) == (position > 0)
        if position:
            torch.testing.assert_close(states[token], flow[position - 1])
    spans = sample.having({f: s for f, s in sample.features.items() if f.where != "visual"})
    torch.testing.assert_close(spans.before("hidden")[0], states[: len(sample.ids_T)])
