"""What is supervised, what each hop sees, and what the losses are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import INFO, LAYOUTS, TRAINED, batch, build
from vlmdistill.drafters.base import Batch, Drafter, Stage
from vlmdistill.drafters.losses import TERMS, Rows, score
from vlmdistill.drafters.training.unroll import supervised, unroll, with_noise
from vlmdistill.stores.schema import Feature

HIDDEN = Feature("hidden", "text")
STAGE = Stage(name="test", hops=3, losses={"cross_entropy": 1.0})
ANCHOR_ALONE = {"medusa"}  # neither attends nor feeds back: each draft comes from one state


def test_supervision_starts_at_the_first_drafted_token_and_ends_with_the_response() -> None:
    sample = batch(["ttvvttrrrrtttrrr", "ttrr"], [HIDDEN])
    # Entries of the response tokens that another token of the same response follows.
    assert supervised(sample).nonzero()[:, 0].tolist() == [4, 5, 6, 11, 12, 16]


@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_of_text_alone_is_trained_on(name: str) -> None:
    drafter = build(name)
    sample = batch(["ttrrrr", "tttrrrrr"], drafter.needs(drafter.config, INFO))
    total = torch.stack([score.total for score in unroll(drafter, sample, STAGE).scores]).sum()
    gradients = torch.autograd.grad(total, list(drafter.parameters()), allow_unused=True)
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_a_later_hop_counts_only_while_it_stays_inside_the_response() -> None:
    drafter = build("eagle2")
    sample = batch(["ttrrrr"], drafter.needs(drafter.config, INFO))
    counted = [score.count_R.tolist() for score in unroll(drafter, sample, STAGE).scores]
    assert counted == [[True, True, True], [True, True, False], [True, False, False]]


@pytest.mark.parametrize("name", TRAINED)
def test_a_row_sees_the_target_up_to_its_anchor_and_nothing_after(name: str) -> None:
    drafter = build(name).eval()
    sample = batch(["tvvttrrrrrr"], drafter.needs(drafter.config, INFO))
    # The state before the image belongs to the entry that follows it: the first visual one where visual
    # tokens are entries, or the next text token, unless the image's last state is held for that one.
    visual, span = (
        all(Feature(source, where) in sample.features for source in drafter.sources)
        for where in ("visual", "span")
    )
    entered = visual and Feature("embed", "visual") in sample.features
    first = 1 if (visual or span) and not entered else 0
    for source, by_hop in gradients(drafter, sample).items():
        for row, touched in ((row, touched) for by_row in by_hop for row, touched in enumerate(by_row)):
            # Row r drafts after response token r, whose entry holds the state before it: text token 2 + r.
            anchor = 2 + row
            seen = range(anchor if name in ANCHOR_ALONE else first, anchor + 1)
            assert touched.nonzero()[:, 0].tolist() == (list(seen) if source in drafter.sources else [])


def gradients(drafter: Drafter, sample: Batch) -> dict[str, list[list[Tensor]]]:
    """By source, for every hop and row: which text states its draft depends on, [T] (bool)."""
    states = {
        feature: state.clone().requires_grad_()
        for feature, state in sample.features.items()
        if feature.where == "text"
    }
    inputs = sample.having({**sample.features, **states})
    drafter.config = replace(drafter.config, detach=False)  # a cut would hide what a hop has from the last
    kept: list[Tensor] = []

    def record(rows: Rows, stage: Stage) -> object:
        kept.append(rows.state_RD)
        return score(rows, drafter.logits, drafter.lm_head_VD, stage.losses)

    drafter.loss = record  # type: ignore[method-assign, assignment]
    unroll(drafter, inputs, STAGE)
    seen: dict[str, list[list[Tensor]]] = {feature.source: [] for feature in states}
    for state_RD in kept:
        for by_hop in seen.values():
            by_hop.append([])
        for row in range(len(state_RD)):
            grads = torch.autograd.grad(
                state_RD[row].sum(), list(states.values()), retain_graph=True, materialize_grads=True
            )
            for by_hop, grad in zip(seen.values(), grads, strict=True):
                by_hop[-1].append(grad.abs().sum(-1) > 0)
    return seen


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
