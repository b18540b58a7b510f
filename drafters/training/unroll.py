"""Multi-step self-feedback: what the drafter makes of its own states, hop after hop.

Shapes: T text tokens, E entries, R rows (entries whose first draft is supervised), D hidden.
"""

from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, Entries, Stage
from vlmdistill.drafters.losses import Rows, Score
from vlmdistill.drafters.memory import PackedMemory


@dataclass(frozen=True)
class Unrolled:
    """The score of every hop, and the sample of every supervised row."""

    scores: list[Score]
    segment_R: Tensor


class Unroll(nn.Module):
    """`unroll` as a module, for an engine that wants to be called."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch, stage: Stage, generator: torch.Generator | None = None) -> Unrolled:
        """See `unroll`."""
        return unroll(self.drafter, batch, stage, generator)


def unroll(
    drafter: Drafter, batch: Batch, stage: Stage, generator: torch.Generator | None = None
) -> Unrolled:
    """Draft `stage.hops` tokens after every response position, and score each hop.

    Row r stands where the decoder stands after committing its entry: hop 0 has the target's states up to
    there, hop n the row's own state of hop n - 1 and the token that the response has n places on.
    Noise (`config.noise`) touches the input states alone, never what they are compared with.
    """
    batch = batch.only(drafter.needs(drafter.config, drafter.info))
    inputs = batch if generator is None else with_noise(batch, drafter.config.noise, generator)
    supervised_T, last = supervised(batch), len(batch.ids_T) - 1
    entries, token_E = drafter.entries(inputs)
    rows_R = supervised_T[token_E].nonzero()[:, 0]
    token_R = token_E[rows_R]
    hidden_TD = batch.feature("hidden", "text")
    memory = PackedMemory()
    drafter.condition(inputs, memory)

    places = entries.places.with_rows(rows_R)
    entries = Entries(entries.ids_N, entries.hidden_ND, entries.position_N, places)
    position_R = entries.position_N[rows_R]
    valid_R = torch.ones_like(rows_R, dtype=torch.bool)
    scores = []
    for hop in range(stage.hops):
        state_RD = drafter.step(entries, memory)
        ahead_R = (token_R + hop).clamp(max=last)
        valid_R = valid_R & supervised_T[ahead_R] & (token_R + hop <= last)
        score = drafter.loss(Rows(state_RD, hidden_TD[ahead_R], valid_R, hop), stage)
        scores.append(score)
        valid_R = score.kept_R
        entries = Entries(
            ids_N=batch.ids_T[(token_R + hop + 1).clamp(max=last)],
            hidden_ND=state_RD.detach() if drafter.config.detach else state_RD,
            position_N=position_R + hop + 1,
            places=places.at_rows(),
            hop=hop + 1,
        )
    return Unrolled(scores, places.at_rows().segment_N)


def with_noise(batch: Batch, width: float, generator: torch.Generator) -> Batch:
    """Uniform noise of `width` at 512 tokens on the last-layer states, less on longer samples (EAGLE's code).

    The amplitude is (U[0, 1) - 0.5) * width * 512 / length, the length of each sample being that of what is
    read: all of it, or its text where nothing is held of visual tokens.
    """
    samples = int(batch.segment_T.max()) + 1
    length_B = torch.bincount(batch.segment_T, minlength=samples)
    if any(feature.where == "visual" for feature in batch.features):
        length_B = length_B.index_add(0, batch.segment_M, batch.length_M)
    segments = {
        "text": batch.segment_T,
        "visual": batch.visual_places.segment_N,
        "span": batch.segment_M,
    }
    noisy = {}
    for feature, state_ND in sorted(
        batch.features.items(), key=itemgetter(0)
    ):  # the order decides who gets which draw
        if feature.source == "hidden" and width:
            scale_N1 = (width * 512 / length_B[segments[feature.where]])[:, None]
            draw_ND = torch.rand(state_ND.shape, generator=generator, device=state_ND.device)
            state_ND = state_ND + ((draw_ND - 0.5) * scale_N1).to(state_ND.dtype)
        noisy[feature] = state_ND
    return batch.having(noisy)


def supervised(batch: Batch) -> Tensor:
    """Tokens whose entry is trained: they and the next token are both of one response. [T] (bool)."""
    following_T = torch.zeros_like(batch.response_T)
    following_T[:-1] = (
        batch.response_T[1:]
        & (batch.segment_T[1:] == batch.segment_T[:-1])
        & (batch.position_T[1:] == batch.position_T[:-1] + 1)
    )
    return batch.response_T & following_T
