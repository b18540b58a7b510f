"""Multi-step self-feedback: the drafter's losses on its own states, hop after hop.

Shapes: T text tokens, E entries, R rows (entries whose first draft is supervised), D hidden.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core.batch import Batch, Entries
from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.losses import Score, TargetRows
from vlmdistill.drafters.core.transfer import place

RUN = 16
"""Neighbours among the positions that `Stage.anchors` draws: rows of a run share the kernels of attention."""


@dataclass(frozen=True)
class Unrolled:
    """The score of every hop, and the sample of every supervised row."""

    total: Tensor  # weighted loss of all hops; differentiable
    scores: list[Score]
    segment_R: Tensor


class Unroll(nn.Module):
    """`unroll` as a module, as DeepSpeed needs it."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config

    def forward(
        self, batch: Batch, stage: Stage, generator: torch.Generator | None = None
    ) -> Unrolled:
        """See `unroll`."""
        noise, detach = self.config.noise, self.config.detach
        return unroll(self.drafter, batch, stage, generator, noise=noise, detach=detach)


def unroll(
    drafter: Drafter,
    batch: Batch,
    stage: Stage,
    generator: torch.Generator | None = None,
    *,
    noise: float = 0.0,
    detach: bool = False,
) -> Unrolled:
    """Draft `stage.hops` tokens after every response position, and score each hop.

    Row r is the decoder after committing the entry of r: hop 0 reads the target's states up to there, hop n
    the row's own state of hop n - 1 and the response token n positions later.

    Args:
        drafter: What is trained.
        batch: Samples with the features that the drafter needs, on its device and in its dtype.
        stage: How many hops, and which losses. With `anchors`, at most that many positions of a sample are
            drawn by the `generator`; without a generator, the same at each call.
        generator: Draws noise for the input states (see `with_noise`), not for the states that the loss
            compares with; None: no noise.
        noise: Width of that noise.
        detach: Cut the gradient between hops.

    Returns:
        `total`, the differentiable loss summed over all rows R, `segment_R`, the sample of each row, and
        `scores`, by hop.

    Raises:
        DataError: The batch lacks a feature.

    Example:
        >>> losses = vlmdistill.unroll(drafter, batch, config.schedule[0])
        >>> (losses.total / len(losses.segment_R)).backward()
    """
    batch = batch.only(drafter.config.needs(drafter.info))
    inputs = batch if generator is None else with_noise(batch, noise, generator)
    # Which rows there are hangs on tokens alone: it is known on the CPU, if they have come from there.
    known, device = batch.readable, batch.ids_T.device
    supervised_T, last = supervised(known), len(known.ids_T) - 1
    entries, token_E = drafter.entries(inputs)
    token_E = place(token_E, known.ids_T.device)
    rows_R = supervised_T[token_E].nonzero()[:, 0]
    if stage.anchors:
        segment_R = known.segment_T[token_E[rows_R]]
        rows_R = rows_R[_drawn(segment_R, stage.anchors, generator)]
    token_R = token_E[rows_R]
    hop_H1 = torch.arange(stage.hops, device=token_R.device)[:, None]
    next_HR = place(known.ids_T[(token_R + hop_H1 + 1).clamp(max=last)], device)
    hidden_TD = batch.feature("hidden", "text")
    cache = PackedKVCache(drafter.config.attention_window, generator)
    drafter.condition(inputs, cache)

    tokens = entries.tokens.with_rows(rows_R)
    entries, rows = replace(entries, tokens=tokens), tokens.at_rows()
    rotary_R = entries.rotary_N[place(rows_R, device)]
    states = []
    for hop in range(stage.hops):
        state_RD = drafter.step(entries, cache)
        states.append(state_RD)
        entries = Entries(
            ids_N=next_HR[hop],
            hidden_ND=state_RD.detach() if detach else state_RD,
            rotary_N=rotary_R + hop + 1,
            tokens=rows,
            hop=hop + 1,
        )
    ahead_HR = token_R + hop_H1
    inside_HR = supervised_T[ahead_HR.clamp(max=last)] & (ahead_HR <= last)
    middle_TD = (
        batch.feature(source, "text") if (source := drafter.middle_source) else None
    )
    targets = TargetRows(
        hidden_TD, known.ids_T, token_R, inside_HR.cumprod(0).bool(), middle_TD
    )
    scores = drafter.loss(states, targets, stage)
    return Unrolled(scores.total, scores.hops, rows.segment_N)


def _drawn(
    segment_R: Tensor, anchors: int, generator: torch.Generator | None
) -> Tensor:
    """The indices of at most `anchors` rows of each sample, in random runs of `RUN`, ascending.

    `segment_R` is sorted. A generator of another device gives its seed to a generator of this device.
    """
    device = segment_R.device
    seed = generator.initial_seed() if generator else 0
    if generator is None or generator.device.type != device.type:
        generator = torch.Generator(device).manual_seed(seed)
    draw_R = torch.rand(
        len(segment_R), generator=generator, device=device, dtype=torch.float64
    )
    first_R = torch.searchsorted(segment_R, segment_R)
    place_R = torch.arange(len(segment_R), device=device) - first_R
    run_R = first_R + place_R // RUN * RUN
    order_R = (segment_R + draw_R[run_R]).argsort(stable=True)
    return order_R[place_R < anchors].sort().values


def rows_of(batch: Batch, stage: Stage) -> int:
    """The number of positions that `unroll` trains."""
    known = batch.readable
    count_B = torch.bincount(known.segment_T[supervised(known)])
    if stage.anchors:
        count_B = count_B.clamp(max=stage.anchors)
    return int(count_B.sum())


def with_noise(batch: Batch, width: float, generator: torch.Generator) -> Batch:
    """Uniform noise of `width` at 512 tokens on the last-layer states, less on longer samples (EAGLE's code).

    The noise is (U[0, 1) - 0.5) * width * 512 / length. The length of a sample counts its visual tokens only
    if the batch has their states.
    """
    known = batch.readable
    samples = int(known.segment_T.max()) + 1
    length_B = torch.bincount(known.segment_T, minlength=samples)
    if any(feature.where == "visual" for feature in batch.features):
        length_B = length_B.index_add(0, known.segment_M, known.length_M)
    segments = {
        "text": known.segment_T,
        "visual": known.visual_tokens.segment_N,
        "span": known.segment_M,
    }
    noisy = {}
    for feature, state_ND in sorted(
        batch.features.items(), key=itemgetter(0)
    ):  # the order fixes the draws
        if feature.source == "hidden" and width:
            scale_N = width * 512 / length_B[segments[feature.where]]
            scale_N1 = place(scale_N, state_ND.device)[:, None]
            draw_ND = torch.rand(
                state_ND.shape, generator=generator, device=state_ND.device
            )
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


@torch.no_grad()
def agreement(
    engine: nn.Module, batches: Iterable[Batch], probe: Stage, device: torch.device
) -> Tensor:
    """By hop, the rows that agree with the target, that count, and that agree at all hops so far: [3, H].

    Whole numbers, so that their sums are the same on all ranks, and all decide the same.
    """
    sums_3H = torch.zeros(3, probe.hops, dtype=torch.float64, device=device)
    engine.eval()
    for batch in batches:
        scores = engine(batch, probe).scores
        count_HR = torch.stack([score.count_R for score in scores])
        agree_HR = torch.stack([score.agree_R for score in scores]) & count_HR
        sums_3H += torch.stack([agree_HR, count_HR, agree_HR.cumprod(0).bool()]).sum(-1)
    engine.train()
    return sums_3H
