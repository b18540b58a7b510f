"""EagleVLM: what each compressor leaves of an image, and what the gate chooses by.

Shapes: U visual tokens, M visual spans, C entries of a span, D hidden.
"""

from typing import Any

import pytest
import torch

from tests.drafters.synthetic import INFO, LAYOUTS, batch, build, written
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.compressors import GroupCompressor
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.eaglevlm import EagleVLM
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.errors import DataError, TrainingError

WIDTH = INFO.hidden_size
BRANCHES = ("prune", "pool", "convolve", "resample", "text alone")


def drafter(**settings: Any) -> EagleVLM:
    built = build("eaglevlm", **settings)
    assert isinstance(built, EagleVLM)
    return built.eval()


def sample(*layouts: str) -> Batch:
    return batch(layouts, EagleVLM.Config().needs(INFO))


def choose(one: EagleVLM, branch: str) -> None:
    """Have the gate prefer a branch, whatever it reads."""
    assert one.gate is not None
    with torch.no_grad():
        one.gate.weight.zero_()
        one.gate.bias.zero_()[BRANCHES.index(branch)] = 50.0


def test_groups_of_neighbours_become_their_middle_their_mean_or_a_convolution() -> None:
    length_M = torch.tensor([5, 1, 6])
    read_UD, span_U = (
        torch.randn(12, WIDTH),
        torch.arange(3).repeat_interleave(length_M),
    )
    groups = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10, 11]]
    places = [[11, 14], [30, -1], [51, 54]]
    zeros = torch.zeros(3, WIDTH)
    for kind in ("prune", "pool", "convolve"):
        one = GroupCompressor(WIDTH, 3, kind)
        assert one.places(torch.tensor([10, 30, 50]), length_M).tolist() == places
        out_MCD = one(read_UD, span_U, 3)
        got = [
            out_MCD[0, 0],
            out_MCD[0, 1],
            out_MCD[1, 0],
            out_MCD[2, 0],
            out_MCD[2, 1],
        ]
        for rows, value_D in zip(groups, got, strict=True):
            if one.linear is not None:
                conv = torch.nn.Conv1d(WIDTH, WIDTH, 3, stride=3)
                conv.weight.data = one.linear.weight.data.view(
                    WIDTH, 3, WIDTH
                ).transpose(1, 2)
                conv.bias = one.linear.bias
                padded_KD = torch.cat([read_UD[rows], zeros[len(rows) :]])
                expected_D = conv(padded_KD.T[None])[0, :, 0]
            else:
                middle = rows[min(1, len(rows) - 1)]
                expected_D = (
                    read_UD[middle] if kind == "prune" else read_UD[rows].mean(0)
                )
            torch.testing.assert_close(value_D, expected_D)


@pytest.mark.parametrize(
    ("branch", "settings", "positions"),
    [
        ("prune", {"ratio": 4}, [2 + 2, 2 + 6, 2 + 8, 15]),
        ("pool", {"ratio": 5}, [2 + 2, 2 + 7, 15]),
        ("convolve", {"kernel": 8}, [2 + 4, 2 + 8, 15]),
        ("resample", {"queries": 2}, [2 + 2, 2 + 6, 14, 15]),
        ("text alone", {}, []),
    ],
)
def test_the_gate_leaves_the_entries_of_one_compressor(
    branch: str, settings: dict[str, int], positions: list[int]
) -> None:
    one, packed = drafter(**settings), sample("tt" + 9 * "v" + "ttt" + "vv" + "trrr")
    choose(one, branch)
    ((x_XD, rotary_X, tokens),) = written(one, packed)
    assert torch.equal(rotary_X, tokens.position_N - 1)
    assert tokens.position_N.tolist() == positions
    if branch != "text alone":
        alone = drafter(compressor=branch, **settings)
        alone.load_state_dict(
            {
                name.replace(
                    f"compressors.{BRANCHES.index(branch)}", "compressors.0"
                ): value
                for name, value in one.state_dict().items()
                if not name.startswith(("gate", "compressors"))
                or name.startswith(f"compressors.{BRANCHES.index(branch)}")
            }
        )
        torch.testing.assert_close(x_XD, written(alone, packed)[0][0], rtol=0, atol=0)


def test_the_gate_reads_the_last_token_of_the_question_alone() -> None:
    one, packed = drafter(compressor="weigh"), sample(*LAYOUTS.values())
    ((before_XD, _, tokens),) = written(one, packed)
    response_T, segment_T = packed.response_T, packed.segment_T
    asked = [
        int((response_T & (segment_T == one)).nonzero()[0]) - 1
        for one in range(len(LAYOUTS))
    ]
    (feature,) = [name for name in packed.features if name.where == "text"]
    for row in range(len(packed.ids_T)):
        states = dict(packed.features)
        states[feature] = states[feature].clone()
        states[feature][row] += 1.0
        ((after_XD, _, _),) = written(one, packed.having(states))
        moved = (after_XD != before_XD).any(1)
        expected = (
            tokens.segment_N == packed.segment_T[row]
            if row in asked
            else torch.zeros_like(moved)
        )
        assert moved.tolist() == expected.tolist()


def test_training_draws_a_branch_for_each_sample_and_decoding_takes_the_best() -> None:
    one = drafter(ratio=5, kernel=4)
    packed = sample(*["tt" + 9 * "v" + "t" + 4 * "v" + "trrr"] * 40)
    # By branch: the entries of both images.
    entries = {
        "prune": 2 + 1,
        "pool": 2 + 1,
        "convolve": 3 + 1,
        "resample": 2 + 2,
        "text alone": 0,
    }
    ((x_XD, _, tokens),) = written(one, packed, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens.segment_N, minlength=40).tolist()
    assert set(counts) == set(entries.values())
    ((again_XD, _, _),) = written(one, packed, torch.Generator().manual_seed(0))
    assert torch.equal(x_XD, again_XD)
    choose(one, "convolve")
    assert torch.bincount(written(one, packed)[0][2].segment_N).tolist() == [4] * 40


@pytest.mark.parametrize("compressor", ["select", "weigh"])
def test_the_gate_learns(compressor: str) -> None:
    one, packed = drafter(compressor=compressor), sample(*LAYOUTS.values())
    total = unroll(
        one, packed, Stage(name="one"), torch.Generator().manual_seed(0)
    ).total
    assert one.gate is not None
    (grad,) = torch.autograd.grad(total, [one.gate.weight])
    assert grad.abs().sum() > 0


def test_without_an_image_every_parameter_is_still_part_of_the_gradient() -> None:
    """Ranks must reduce the same parameters, whatever samples each has."""
    one = drafter()
    assert one.gate is not None
    total = unroll(one, sample("ttrrr"), Stage(name="one"), torch.Generator()).total
    for grad in torch.autograd.grad(
        total, [*one.compressors.parameters(), *one.gate.parameters()]
    ):
        assert grad.eq(0).all()


def test_settings_are_those_of_the_paper_and_wrong_ones_are_named() -> None:
    paper = catalogue.config("eaglevlm")
    assert paper.tree == Tree.parse("60-7-10")
    (stage,) = paper.schedule
    assert stage.losses == {"regression": 1.0, "cross_entropy": 0.1}
    for setting in ("ratio=0", "kernel=0", "queries=0"):
        with pytest.raises(DataError, match=setting):
            override(paper, [setting])
    with pytest.raises(DataError, match="compressor"):
        override(paper, ["compressor=squeeze"])


@pytest.mark.parametrize("compressor", ["select", "weigh"])
def test_a_gate_is_not_served(compressor: str) -> None:
    with pytest.raises(
        TrainingError, match=f"compressor={compressor}.*compressor=pool"
    ):
        drafter(compressor=compressor).published()
