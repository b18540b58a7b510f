"""SpecFLASH: what images are compressed to, and several tokens from one pass over placeholders.

Shapes: R rows, G places of a group, U visual tokens, X compressed tokens, D hidden.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import (
    INFO,
    LAYOUTS,
    batch,
    built,
    cut,
    head,
    plain_layer,
    written,
)
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch, TokenIndex
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.kv_cache import GrowingKVCache
from vlmdistill.drafters.core.losses import Scores, TargetRows
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.drafters.eagle2 import Eagle2
from vlmdistill.drafters.specflash import SpecFlash
from vlmdistill.drafters.training.unroll import supervised, unroll
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature

STATES = [Feature("hidden", "text"), Feature("hidden", "visual")]
EVERYTHING = [*STATES, Feature("embed", "visual")]


def hops(drafter: SpecFlash | Eagle2, one: Batch, count: int) -> list[Tensor]:
    """The logits of every hop's rows."""
    made: list[Tensor] = []
    loss = drafter.loss

    def record(states: Sequence[Tensor], rows: TargetRows, stage: Stage) -> Scores:
        made.extend(
            drafter.logits(state_RD, rows.token_R, hop)
            for hop, state_RD in enumerate(states)
        )
        return loss(states, rows, stage)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(drafter, "loss", record)
        unroll(
            drafter, one, Stage(name="test", hops=count, losses={"cross_entropy": 1.0})
        )
    return made


@pytest.mark.parametrize(
    ("length", "count"), [(576, 64), (324, 36), (1, 1), (9, 1), (10, 2), (5000, 64)]
)
def test_an_image_is_compressed_to_a_ninth_and_64_at_most(
    length: int, count: int
) -> None:
    ((_, _, tokens),) = written(
        built(SpecFlash), batch(["t" + length * "v" + "trr"], STATES)
    )
    order = tokens.position_N.tolist()
    assert len(order) == count
    # Each stands in the middle of its share of the span, which the text around it leaves as it is.
    middle = [1 + (place + 0.5) * length / count for place in range(count)]
    assert all(
        0 <= wanted - there < 1 for there, wanted in zip(order, middle, strict=True)
    )


def test_without_queries_no_image_enters() -> None:
    """The paper's C / N = 0: of an image, the text after it has the last state, as for every drafter."""
    drafter, text = built(SpecFlash, queries=0), "tvvvvtrrrr"
    assert drafter.compresses is None
    one, other = batch([text], STATES), batch([text], STATES)
    other.feature("hidden", "visual")[:-1].neg_()
    for mine, its in zip(hops(drafter, one, 4), hops(drafter, other, 4), strict=True):
        assert torch.equal(mine, its)


def test_compressed_tokens_stand_spread_over_their_own_image() -> None:
    one = batch(["tvvvvtvvvvvvttrr", "tvttrr"], STATES)
    ((x_XD, position_X, tokens),) = written(built(SpecFlash, ratio=2), one)
    assert tokens.position_N.tolist() == [2, 4, 7, 9, 11, 1]
    assert tokens.segment_N.tolist() == [0, 0, 0, 0, 0, 1]
    assert tokens.span_N.tolist() == [0, 0, 1, 1, 1, 2]
    # As of every entry, the rotary position is that of the state before it.
    assert torch.equal(position_X, tokens.position_N - 1)
    assert len(x_XD) == 6


def test_a_compressed_token_is_a_querys_mean_of_the_states_of_its_image() -> None:
    """Softmax(Q F^T / sqrt(D)) F, image by image."""
    drafter = built(SpecFlash, ratio=2)
    one = batch(["tvvvvtvvvvvvttrr", "tvttrr"], STATES)
    ((x_XD, _, _),) = written(drafter, one)
    hidden_UD, expected = one.feature("hidden", "visual"), []
    for first, last in ((0, 4), (4, 10), (10, 11)):
        own_UD = hidden_UD[first:last]
        query_CD = drafter.query_CD[: math.ceil((last - first) / 2)]
        expected.append(
            (query_CD @ own_UD.T / INFO.hidden_size**0.5).softmax(-1) @ own_UD
        )
    torch.testing.assert_close(x_XD, torch.cat(expected))


@pytest.mark.parametrize("kv_heads", ["all", "target"])
def test_one_token_a_pass_without_compression_is_eagle(kv_heads: str) -> None:
    drafter = built(SpecFlash, group=1, compress=False, kv_heads=kv_heads)
    eagle = Eagle2(Eagle2.Config(kv_heads=kv_heads), INFO, head()).eval()  # type: ignore[arg-type]
    shared = {
        key: value
        for key, value in drafter.state_dict().items()
        if key in eagle.state_dict()
    }
    eagle.load_state_dict(shared)
    one = batch(LAYOUTS.values(), EVERYTHING)
    for mine, theirs in zip(hops(drafter, one, 4), hops(eagle, one, 4), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert drafter.config.max_hops is None


@pytest.mark.parametrize(("group", "passes"), [(4, 1), (2, 2), (3, 2)])
def test_a_group_is_a_sequence_that_goes_on_with_placeholders(
    group: int, passes: int
) -> None:
    """Against a plain causal layer over [entries ; guesses of the groups before ; placeholders]."""
    drafter = built(SpecFlash, group=group, passes=passes)
    one = batch(["ttrrrrrrrrrr"], STATES)
    embed_TD, hidden_TD = drafter.embed_VD[one.ids_T], one.feature("hidden", "text")
    made = hops(drafter, one, group * passes)

    def entry(token: int, hidden_D: Tensor) -> Tensor:
        x_D: Tensor = drafter.block.fc(torch.cat([embed_TD[token], hidden_D]))
        return x_D

    for row, token in enumerate(supervised(one).nonzero()[:, 0].tolist()):
        if token + group * passes > len(one.ids_T):
            continue
        rows = [entry(place, hidden_TD[place - 1]) for place in range(1, token + 1)]
        for number in range(passes):
            x_SD = torch.stack(rows + [drafter.placeholder_D] * (group - 1))
            state_GD = plain_layer(drafter.block.layer, x_SD, torch.arange(len(x_SD)))[
                -group:
            ]
            for place, state_D in enumerate(state_GD):
                logits_V = made[number * group + place][row]
                torch.testing.assert_close(
                    logits_V, drafter.lm_head_VD @ state_D, rtol=1e-4, atol=1e-4
                )
            first = token + number * group + 1
            rows += [
                entry(first + n, state_GD[n])
                for n in range(group)
                if first + n < len(one.ids_T)
            ]


class Counting(GrowingKVCache):
    """Counts the passes."""

    passes = 0

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        self.passes += 1
        return super().attend(query_QHd, tokens, hop)


@pytest.mark.parametrize(
    ("settings", "tree", "levels", "passes"),
    [
        ({}, "chain-4", 4, 1),
        ({}, "chain-9", 4, 1),  # no more levels than it has places
        ({"passes": 2}, "chain-8", 8, 2),
        ({"passes": 3}, "chain-6", 6, 2),
        ({"passes": 2, "group": 3}, "60-5-3", 6, 2),
        ({"group": 1}, "chain-4", 4, 4),
    ],
)
def test_a_group_is_drafted_in_one_pass(
    settings: dict[str, int], tree: str, levels: int, passes: int
) -> None:
    drafter = built(SpecFlash, **settings)
    one = batch([LAYOUTS["one image"]], STATES)
    cache, prompt = Counting(), cut(one, 6)
    draft = TreeDrafter(drafter, prompt, cache)
    draft.commit(one.ids_T[6:7], prompt.feature("hidden", "text")[-1:])
    nodes = draft.grow(Tree.parse(tree))
    assert int(nodes.depth_N.max()) == 1 + levels
    assert cache.passes == passes


def test_every_stage_trains_every_token_that_is_drafted() -> None:
    paper = catalogue.config("specflash")
    assert [stage.hops for stage in paper.schedule] == [4]
    assert [
        stage.hops for stage in override(paper, ["group=3", "passes=2"]).schedule
    ] == [6]
    for settings in (["stages.*.hops=3"], ["group=1", "passes=2"]):
        with pytest.raises(DataError, match=settings[-1].split(".")[-1]):
            override(paper, settings)
