"""Medusa: heads on one state, each a place further on, whatever is drafted between."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import INFO, LAYOUTS, batch, begun, head
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch, Head
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.medusa import Medusa
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.schema import Feature

HIDDEN = Feature("hidden", "text")


def build(tables: Head | None = None, **settings: Any) -> Medusa:
    return Medusa(Medusa.Config(**settings), INFO, tables or head()).eval()


def trained(**settings: Any) -> Medusa:
    """Heads that differ from each other and from the target's."""
    drafter = build(**settings)
    torch.manual_seed(0)
    for weight in drafter.heads.parameters():
        torch.nn.init.normal_(weight)
    return drafter


def grown(drafter: Medusa, one: Batch, token: int, tree: str) -> DraftTree:
    return begun(drafter, one, token).grow(Tree.parse(tree))


def best(drafter: Medusa, state_1D: Tensor, hop: int) -> int:
    return int(drafter.logits(state_1D, torch.zeros(1).long(), hop).argmax())


def test_an_untrained_head_is_the_targets_own() -> None:
    drafter = build()
    state_ND, last_N = torch.randn(6, INFO.hidden_size), torch.zeros(6).long()
    for hop in range(drafter.config.heads):
        assert torch.equal(
            drafter.logits(state_ND, last_N, hop), state_ND @ drafter.lm_head_VD.T
        )


def test_each_level_is_one_heads_guess_from_the_state_before_the_root() -> None:
    drafter = trained()
    one = batch([LAYOUTS["one image"]], [HIDDEN])
    chain = grown(drafter, one, 10, "chain-5").ids_N.tolist()
    root_1D = one.features[HIDDEN][9:10]
    assert chain == [
        int(one.ids_T[10]),
        *(best(drafter, root_1D, hop) for hop in range(5)),
    ]


def test_guesses_do_not_depend_on_what_was_drafted_or_on_the_root() -> None:
    drafter = trained()
    one = batch([LAYOUTS["one image"]], [HIDDEN])
    nodes = grown(drafter, one, 10, "40-3-3")
    ranked: dict[int, set[tuple[int, ...]]] = {}
    for node, depth in enumerate(nodes.depth_N.tolist()):
        children = (nodes.parent_N == node).nonzero()[:, 0]
        children = children[children != node]
        if len(children) == 3:  # whole families alone: others were cut by likelihood
            ranked.setdefault(depth, set()).add(tuple(nodes.ids_N[children].tolist()))
    assert set(ranked) == {1, 2, 3, 4}
    assert all(len(families) == 1 for families in ranked.values())

    other = Batch(**{**vars(one), "ids_T": (one.ids_T + 1) % INFO.vocab_size})
    again = grown(drafter, other, 10, "40-3-3")
    assert torch.equal(again.ids_N[1:], nodes.ids_N[1:])


@pytest.mark.parametrize(
    ("tree", "levels"), [("chain-9", 3), ("30-7-2", 3), ("8-1-2", 2)]
)
def test_a_tree_is_no_deeper_than_there_are_heads(tree: str, levels: int) -> None:
    nodes = grown(trained(heads=3), batch([LAYOUTS["one image"]], [HIDDEN]), 10, tree)
    assert int(nodes.depth_N.max()) == 1 + levels
    assert len(nodes.ids_N) <= Tree.parse(tree).total


def test_every_stage_trains_every_head() -> None:
    assert [stage.hops for stage in catalogue.config("medusa").schedule] == [5, 5]
    assert [
        stage.hops
        for stage in override(catalogue.config("medusa"), ["heads=3"]).schedule
    ] == [3, 3]


def test_head_n_is_compared_with_the_state_n_places_further_on() -> None:
    drafter = build()
    one = batch(["ttrrrrrr"], [HIDDEN])
    stage = Stage(name="test", hops=5, losses={"regression": 1.0})
    states_TD = one.features[HIDDEN]
    for hop, made in enumerate(unroll(drafter, one, stage).scores):
        # Token 2 + r is the root of row r, whose state stands at 1 + r; an untrained head hands it on.
        rows = 5 - hop
        expected = torch.nn.functional.smooth_l1_loss(
            states_TD[1 : 1 + rows],
            states_TD[2 + hop : 2 + hop + rows],
            reduction="none",
        ).mean(-1)
        torch.testing.assert_close(made.loss_R[:rows], expected)
        assert made.count_R.tolist() == [True] * rows + [False] * hop


@pytest.mark.slow
def test_every_head_learns_its_own_place() -> None:
    # One token per axis, so that a head, which can add but hardly take away, can reach every token.
    table_VD = torch.zeros(INFO.vocab_size, INFO.hidden_size)
    table_VD[: INFO.hidden_size] = 4 * torch.eye(INFO.hidden_size)
    drafter = build(Head(table_VD, table_VD), heads=3).train()
    one = batch([LAYOUTS["one image"]], [HIDDEN])
    stage = Stage(name="test", hops=3, losses={"cross_entropy": 1.0})
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.05)
    for _ in range(300):
        out = unroll(drafter, one, stage)
        optimizer.zero_grad()
        out.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert all(
        torch.equal(made.agree_R & made.count_R, made.count_R) for made in out.scores
    )
