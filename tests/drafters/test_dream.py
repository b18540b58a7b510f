"""DREAM: a cross-attention over states, of the guesses above alone, and a middle state that learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.drafters.synthetic import INFO, LAYOUTS, batch, begun, build, head, save
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.config import DrafterConfig, Stage
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.dream import Dream
from vlmdistill.drafters.training.unroll import supervised, unroll
from vlmdistill.stores.errors import DataError, TrainingError


def sample(drafter: Drafter) -> Batch:
    return batch([LAYOUTS["several images"]], drafter.config.needs(INFO))


@torch.no_grad()
def test_a_guess_looks_at_the_guesses_above_it_alone() -> None:
    """Each node of a tree is as likely as where its branch is drafted alone."""
    drafter = build("dream").eval()
    one = sample(drafter)
    tree = begun(drafter, one, 10).grow(Tree.parse("20-3-3"))
    assert tree.chance_N is not None
    assert int(tree.depth_N.max()) > 3
    for node in range(1, len(tree.ids_N)):
        *above, last = tree.visible_NN[node].nonzero()[:, 0].tolist()
        draft = begun(drafter, one, 10)
        assert draft.state_1D is not None
        state_1D, position = draft.state_1D, draft.position
        for hop, parent in enumerate(above[1:], start=1):
            place_1, seen_1A = torch.tensor([position + hop]), torch.ones(1, hop).bool()
            tokens = TokenIndex(
                torch.zeros(1).long(), place_1, draft.span, None, seen_1A
            )
            rotary_1 = torch.tensor([draft.rotary + hop - 1])
            entries = Entries(
                tree.ids_N[parent : parent + 1], state_1D, rotary_1, tokens, hop
            )
            state_1D = drafter.step(entries, draft.cache)
        softmax_1V = drafter.logits(state_1D, tree.ids_N[above[-1:]]).softmax(-1)
        torch.testing.assert_close(
            softmax_1V[0, tree.ids_N[last]], tree.chance_N[node], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("middle", "layer"), [(0.0, 0), (0.25, 1), (0.75, 3), (1.0, 3)]
)
def test_the_second_layer_learns_the_state_of_its_own_token_at_every_hop(
    middle: float, layer: int
) -> None:
    drafter = build("dream", middle=middle)
    assert isinstance(drafter, Dream)
    assert drafter.middle_source == f"layer{layer}"
    one = sample(drafter)
    looked = []
    drafter.cross.register_forward_hook(
        lambda module, inputs, output: looked.append(output)
    )
    stage = Stage(name="test", hops=2, losses={"middle": 0.5})
    found = unroll(drafter, one, stage)
    token_R = supervised(one).nonzero()[:, 0]
    target_TD, count = one.feature(f"layer{layer}", "text"), len(token_R)
    of_rows = [
        looked[0][-len(one.ids_T) + 1 :][token_R - 1],
        looked[1],
    ]  # the text is last, without its first
    expected = [
        F.smooth_l1_loss(
            of_rows[hop][: count - hop], target_TD[token_R[hop:]], reduction="none"
        ).mean(-1)
        for hop in range(2)
    ]
    for hop, loss_R in enumerate(expected):
        torch.testing.assert_close(found.scores[hop].terms["middle"], loss_R.sum())
    total = 0.5 * (expected[0].sum() + expected[1].sum())
    torch.testing.assert_close(found.total, total)
    mine, theirs = (
        torch.autograd.grad(one, drafter.cross.kv_proj.weight, retain_graph=True)[0]
        for one in (found.total, total)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_only_a_drafter_with_a_middle_state_learns_from_a_middle_layer() -> None:
    paper = catalogue.config("eagle2")
    stages = (replace(paper.training.stages[0], losses={"middle": 1.0}),)
    with pytest.raises(
        DataError, match=r"stages\.text\.losses: this drafter has no middle state"
    ):
        DrafterConfig(paper.model, replace(paper.training, stages=stages), paper.tree)


@pytest.mark.parametrize("middle", [-0.1, 1.1])
def test_a_depth_outside_of_the_target_is_refused(middle: float) -> None:
    with pytest.raises(DataError, match=f"middle={middle}"):
        Dream.Config(middle=middle)


@torch.no_grad()
def test_at_first_the_states_change_nothing() -> None:
    """The gates of its second layer are closed, as in the official code."""
    drafter = Dream(Dream.Config(), INFO, head()).eval()
    one = sample(drafter)
    other = one.having(
        {
            key: state.flip(-1) if key.source == "hidden" else state
            for key, state in one.features.items()
        }
    )
    expected, got = (begun(drafter, each, 10).state_1D for each in (one, other))
    assert expected is not None
    assert got is not None
    assert torch.equal(got, expected)


def test_export_refuses_it_in_one_line(tmp_path: Path) -> None:
    save("dream", tmp_path / "dream")
    with pytest.raises(TrainingError, match=r"^dream cannot be exported: .*") as error:
        export(tmp_path / "dream", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
