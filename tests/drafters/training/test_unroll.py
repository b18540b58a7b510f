"""What is supervised, what each hop sees, and what the losses are."""

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import INFO, LAYOUTS, batch, build
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.losses import TERMS, TargetRows, score
from vlmdistill.drafters.training.unroll import supervised, unroll, with_noise
from vlmdistill.stores.schema import Feature

HIDDEN = Feature("hidden", "text")
STAGE = Stage(name="test", hops=3, losses={"cross_entropy": 1.0})


def test_supervision_starts_at_the_first_drafted_token_and_ends_with_the_response() -> (
    None
):
    sample = batch(["ttvvttrrrrtttrrr", "ttrr"], [HIDDEN])
    # Entries of the response tokens that another token of the same response follows.
    assert supervised(sample).nonzero()[:, 0].tolist() == [4, 5, 6, 11, 12, 16]


def test_a_later_hop_counts_only_while_it_stays_inside_the_response() -> None:
    drafter = build("eagle2")
    sample = batch(["ttrrrr"], drafter.config.needs(INFO))
    counted = [
        score.count_R.tolist() for score in unroll(drafter, sample, STAGE).scores
    ]
    assert counted == [[True, True, True], [True, True, False], [True, False, False]]


def test_noise_touches_last_layer_states_alone_and_shrinks_with_length() -> None:
    sample = batch(
        ["tt" + "v" * 400 + "trr", "ttrr"], [HIDDEN, Feature("embed", "visual")]
    )
    noisy = with_noise(sample, 0.2, torch.Generator().manual_seed(0))
    assert torch.equal(
        noisy.features[Feature("embed", "visual")],
        sample.features[Feature("embed", "visual")],
    )
    moved_T = (noisy.features[HIDDEN] - sample.features[HIDDEN]).abs().amax(-1)
    bound_T = 0.1 * 512 / torch.tensor([405.0] * 5 + [4.0] * 4)
    assert (moved_T <= bound_T).all()
    assert (moved_T > bound_T / 2).all()


@pytest.mark.parametrize("term", ["regression", *TERMS])
def test_a_loss_in_chunks_has_the_gradient_of_the_loss_in_one_piece(term: str) -> None:
    torch.manual_seed(0)
    lm_head = torch.randn(23, 8, dtype=torch.float64)
    target, valid = (
        torch.randn(7, 8, dtype=torch.float64),
        torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool(),
    )

    def loss(state: Tensor, chunk: int | None) -> Tensor:
        rows = TargetRows(target, torch.arange(7), torch.arange(7), valid[None])
        logits = lambda state_ND, last_N: state_ND @ lm_head.T  # noqa: E731
        return score(
            [state], rows, logits, lm_head, {term: 1.0}, chunk_rows=chunk
        ).total

    state = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    whole, parts = loss(state, None), loss(state, 2)
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(
        torch.autograd.grad(whole, state), torch.autograd.grad(parts, state)
    )
    assert torch.autograd.grad(loss(state, 2), state)[0][2].eq(0).all()


@pytest.mark.parametrize(("keep_top", "pace"), [(0, 0.0), (4, 0.0), (0, 0.5)])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_the_gradient_of_all_hops_is_that_of_the_formula(
    chunk: int | None, keep_top: int, pace: float
) -> None:
    """Written out hop by hop: the states of three hops, a head that is trained, and rows that drop out."""
    torch.manual_seed(1)
    hops, count = 3, 8
    lm_head, own = torch.randn(2, 11, 6, dtype=torch.float64)
    hidden = torch.randn(count, 6, dtype=torch.float64)
    states = [(hidden + torch.randn_like(hidden)).requires_grad_() for _ in range(hops)]
    own.requires_grad_()
    token = torch.arange(count)
    valid = torch.ones(hops, count).bool()
    valid[1, -1] = valid[2, -2:] = valid[:, 2] = False

    def logits(state_ND: Tensor, last_N: Tensor) -> Tensor:
        return torch.nn.functional.linear(state_ND, own)

    weights = {"regression": 1.0, "cross_entropy": 0.1, "top_k": 2.0}
    scores = score(
        states,
        TargetRows(hidden, token, token, valid),
        logits,
        lm_head,
        weights,
        parameters=[own],
        decay=0.5,
        pace=pace,
        chunk_rows=chunk,
        keep_top=keep_top,
    )

    slot = torch.ones(hops, count, dtype=torch.float64)
    if pace:  # D-PACE, row by row: the chance that the hops up to m are right, summed over m from the hop on
        for row in range(count):
            reached, product = [], 1.0
            for hop in range(hops):
                own_token = token[min(row + hop + 1, count - 1)]
                chance = logits(states[hop][row], token).softmax(-1)[own_token].item()
                product *= (0.5 + 0.5 * chance) if valid[hop, row] else 0.0
                reached.append(product)
            slot[:, row] = torch.tensor([sum(reached[hop:]) for hop in range(hops)])
        assert slot[0, 0] != slot[0, 1]
    naive, alive = torch.zeros((), dtype=torch.float64), torch.ones(count).bool()
    for hop, state in enumerate(states):
        alive = alive & valid[hop]
        target = hidden[(token + hop).clamp(max=count - 1)]
        best = (target @ lm_head.T).argmax(-1)
        kept = (logits(state, token).topk(4).indices == best[:, None]).any(-1) | (
            not keep_top
        )
        counted = alive & kept
        draft, likely = logits(state, token), (target @ lm_head.T).softmax(-1)
        losses = torch.nn.functional.smooth_l1_loss(
            state, target, reduction="none"
        ).mean(-1)
        losses = losses + 0.1 * torch.nn.functional.cross_entropy(
            draft, likely, reduction="none"
        )
        best = likely.topk(10).indices
        losses = losses - 2 * (likely * draft.log_softmax(-1)).gather(1, best).sum(-1)
        naive = naive + 0.5**hop * (slot[hop] * losses)[counted].sum()
        assert torch.equal(scores.hops[hop].count_R, counted)
        assert 0 < counted.sum() < count
        alive = alive & kept
    torch.testing.assert_close(scores.total, naive, rtol=1e-6, atol=1e-6)
    leaves = [*states, own]
    made = torch.autograd.grad(3 * scores.total, leaves)
    torch.testing.assert_close(
        made,
        tuple(3 * grad for grad in torch.autograd.grad(naive, leaves)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_filtered_row_stops_counting_at_the_hop_that_fails() -> None:
    lm_head = torch.eye(4)
    target = torch.tensor([[9.0, 0, 0, 0], [9.0, 0, 0, 0]])
    state = torch.tensor([[5.0, 4.0, 3.0, 0], [0.0, 4.0, 5.0, 3.0]])
    rows = TargetRows(target, torch.arange(2), torch.arange(2), torch.ones(1, 2).bool())
    logits = lambda state_ND, last_N: state_ND  # noqa: E731
    kept = score([state], rows, logits, lm_head, {"cross_entropy": 1.0}, keep_top=3)
    assert kept.hops[0].count_R.tolist() == [True, False]
    alone = TargetRows(
        target[:1], torch.arange(1), torch.arange(1), torch.ones(1, 1).bool()
    )
    one = score([state[:1]], alone, logits, lm_head, {"cross_entropy": 1.0})
    torch.testing.assert_close(kept.total, one.total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_before_each_token_is_that_of_its_predecessor(layout: str) -> None:
    everything = [Feature("hidden", where) for where in ("text", "visual", "span")]
    sample = batch([LAYOUTS[layout]], everything)
    kinds = LAYOUTS[layout]
    flow, text, visual = (
        [],
        iter(sample.features[HIDDEN]),
        iter(sample.features[Feature("hidden", "visual")]),
    )
    for kind in kinds:
        flow.append(next(visual) if kind == "v" else next(text))
    states, found = sample.before("hidden")
    for token, position in enumerate(sample.position_T.tolist()):
        assert bool(found[token]) == (position > 0)
        if position:
            torch.testing.assert_close(states[token], flow[position - 1])
    spans = sample.having(
        {f: s for f, s in sample.features.items() if f.where != "visual"}
    )
    torch.testing.assert_close(spans.before("hidden")[0], states[: len(sample.ids_T)])
