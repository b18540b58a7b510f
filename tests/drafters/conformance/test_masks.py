"""What each draft depends on: every input is perturbed, and moves the rows that may see it and no others.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.synthetic import CASES, INFO, batch, build
from vlmdistill.drafters.core.batch import Batch, TokenIndex
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.losses import Scores, TargetRows
from vlmdistill.drafters.dflash import DFlash
from vlmdistill.drafters.eaglevlm import EagleVLM
from vlmdistill.drafters.training.unroll import supervised, unroll
from vlmdistill.drafters.wren import Wren
from vlmdistill.stores.schema import Feature

pytestmark = pytest.mark.slow

STAGE = Stage(name="test", hops=4, losses={"cross_entropy": 1.0})
TWO_TURNS, OTHER = "tvttrrrrrvvtrrrrr", "tvtrr"


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_draft_sees_all_that_precedes_it_and_nothing_else(
    name: str, settings: dict[str, Any]
) -> None:
    drafter = build(name, **settings).train()
    sample = batch([TWO_TURNS, OTHER], drafter.config.needs(INFO))
    before = drafts(drafter, sample)
    attended = list(Recorder.attended)
    if isinstance(drafter, Wren) and drafter.config.cell:
        assert attended == [0]
        attended = list(range(STAGE.hops))  # its cell reads every guess all the same
    assert all(valid_R.any() for _, valid_R in before)
    for what, changed in perturbed(sample):
        for hop, (old, new) in enumerate(
            zip(before, drafts(drafter, changed), strict=True)
        ):
            moved_R, valid_R = (old[0] != new[0]).any(-1), old[1]
            passes = [one for one in attended if one <= hop]
            seen_R = seeing(drafter, sample, what, passes)
            if isinstance(drafter, EagleVLM) and drafter.config.compressor == "select":
                seen_R &= moved_R  # what the gate leaves out is not seen
            assert moved_R[valid_R].tolist() == seen_R[valid_R].tolist(), (what, hop)


class Recorder(PackedKVCache):
    """Records the hops at which a drafter attends: the others only read what an earlier pass has guessed."""

    attended: list[int]

    def __init__(self, window: int, generator: torch.Generator | None) -> None:
        super().__init__(window, generator)
        Recorder.attended = []

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        self.attended.append(hop)
        return super().attend(query_QHd, tokens, hop)

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        self.attended.append(0)
        return super().attend_block(query_QHd, key_QKd, value_QKd, tokens)


Input = tuple[str | Feature, int]
"""`ids` or a feature, and the row of it."""


def perturbed(sample: Batch) -> Iterator[tuple[Input, Batch]]:
    """The sample with one input changed, for every input."""
    for token in range(len(sample.ids_T)):
        ids_T = sample.ids_T.clone()
        ids_T[token] = 3 + (ids_T[token] - 2) % (INFO.vocab_size - 3)
        yield ("ids", token), replace(sample, ids_T=ids_T)
    for feature, state_ND in sample.features.items():
        for row in range(len(state_ND)):
            other_ND = state_ND.clone()
            other_ND[row] = -other_ND[row].roll(1)
            yield (feature, row), sample.having({**sample.features, feature: other_ND})


def drafts(drafter: Drafter, sample: Batch) -> list[tuple[Tensor, Tensor]]:
    """For every hop the logits of each row, [R, V], and whether the response goes that far, [R]."""
    made: list[tuple[Tensor, Tensor]] = []
    loss = drafter.loss

    def record(states: Sequence[Tensor], rows: TargetRows, stage: Stage) -> Scores:
        logits = []
        for hop, state_RD in enumerate(states):
            last_R = rows.ids_T[(rows.token_R + hop).clamp(max=len(rows.ids_T) - 1)]
            logits.append(drafter.logits(state_RD, last_R, hop))
        made.extend(zip(logits, rows.valid_HR, strict=True))
        return loss(states, rows, stage)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(drafter, "loss", record)
        patch.setattr("vlmdistill.drafters.training.unroll.PackedKVCache", Recorder)
        unroll(drafter, sample, STAGE)
    return made


def seeing(drafter: Drafter, sample: Batch, what: Input, passes: list[int]) -> Tensor:
    """Which rows may depend on the input after passes at those hops, [R].

    A drafter that never attends makes every guess from the state of its entry alone.
    """
    kind, row = what
    token_R = supervised(sample).nonzero()[:, 0]
    segment_R, place_R = sample.segment_T[token_R], sample.position_T[token_R]
    if isinstance(kind, Feature) and kind.where != "text":
        segments, places = (
            sample.visual_tokens.segment_N,
            sample.visual_tokens.position_N,
        )
        if kind.where == "span":
            segments, places = sample.segment_M, sample.start_M + sample.length_M - 1
        return (segments[row] == segment_R) & (places[row] < place_R)
    own_R = sample.segment_T[row] == segment_R
    if kind == "ids":
        if isinstance(drafter, DFlash):  # its context are states alone
            return torch.eq(token_R, row)
        read = passes[-1] if passes else 0  # the guesses that the last pass has read
        return own_R & (row <= token_R + read) & bool(sample.position_T[row] and passes)
    assert isinstance(kind, Feature)
    everywhere = isinstance(drafter, DFlash) and drafter.config.context == "all"
    user = (
        int(sample.position_T[row]) + 1
        if everywhere
        else entry_with(sample, kind.source, row)
    )
    if (
        user is None or kind.source not in drafter.sources
    ):  # no other source is read, but learnt from
        return torch.zeros_like(own_R)
    return own_R & (user <= place_R if passes else user == place_R)


def entry_with(sample: Batch, source: str, row: int) -> int | None:
    """The position whose entry holds the state of a text token: the next one, or after an image or never.

    Where visual tokens are entries, the first of them holds the state before the image. Elsewhere none does
    when the last state of the image is there for the text after it; else that text has it.
    """
    place = int(sample.position_T[row])
    following = {
        int(p)
        for p in sample.position_T[sample.segment_T == sample.segment_T[row]]
        if p > place
    }
    held = {feature.where for feature in sample.features if feature.source == source}
    if place + 1 in following or {"visual", "embed"} <= held | {
        f.source for f in sample.features
    }:
        return place + 1
    return None if held & {"visual", "span"} else min(following, default=None)
