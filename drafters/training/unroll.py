"""Multi-step self-feedback: the drafter's losses on its own states, hop after hop.

Shapes: T text tokens, E entries, R rows (entries whose first draft is supervised), D hidden.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core.batch import Batch, Entries
from vlmdistill.drafters.core.capabilities import MiddleState
from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.losses import Score, TargetRows
from vlmdistill.drafters.core.transfer import place
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature

RUN = 16
"""`Stage.anchors` draws positions in runs of so many neighbours, which share the kernels of attention."""


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
        drafter: The drafter to train.
        batch: Samples with the features that the drafter needs, on its device and in its dtype.
        stage: How many hops, and which losses. With `anchors`, the `generator` draws at most that many
            positions of each sample; without a generator, the same positions at each call.
        generator: Draws noise for the input states (see `with_noise`), but not for the states that the loss
            compares with; None: no noise.
        noise: Width of that noise.
        detach: Cut the gradient between hops.

    Returns:
        `total`, the differentiable loss summed over all rows R, `segment_R`, the sample of each row, and
        `scores`, by hop.

    Raises:
        DataError: The batch lacks a feature, or is on another device or in another dtype than the drafter.

    Example:
        >>> losses = vlmdistill.unroll(drafter, batch, config.schedule[0])
        >>> (losses.total / len(losses.segment_R)).backward()
    """
    batch = batch.only(drafter.config.needs(drafter.info))
    _check_dtype(drafter, batch)
    inputs = batch if generator is None else with_noise(batch, noise, generator)
    # Which rows there are depends on the tokens only: the CPU knows it, if the batch has come from there.
    readable = batch.readable
    device = batch.ids_T.device
    supervised_T = supervised(readable)
    last = len(readable.ids_T) - 1

    # Hop 0 takes all entries; only rows are scored and go on.
    entries, token_E = drafter.entries(inputs)
    token_E = place(token_E, readable.ids_T.device)
    rows_R = supervised_T[token_E].nonzero()[:, 0]
    if stage.anchors:
        segment_R = readable.segment_T[token_E[rows_R]]
        rows_R = rows_R[_drawn(segment_R, stage.anchors, generator)]
    token_R = token_E[rows_R]
    hop_H1 = torch.arange(stage.hops, device=token_R.device)[:, None]
    next_token_HR = (token_R + hop_H1 + 1).clamp(max=last)
    next_ids_HR = place(readable.ids_T[next_token_HR], device)
    cache = PackedKVCache(drafter.config.attention_window, generator)
    drafter.condition(inputs, cache)
    tokens = entries.tokens.with_rows(rows_R)
    entries = replace(entries, tokens=tokens)
    rows = tokens.at_rows()
    rotary_R = entries.rotary_N[place(rows_R, device)]
    states: list[Tensor] = []
    for hop in range(stage.hops):
        state_RD = drafter.step(entries, cache)
        # The next hop reads the row's own state and the token of the response.
        entries = Entries(
            ids_N=next_ids_HR[hop],
            hidden_ND=state_RD.detach() if detach else state_RD,
            rotary_N=rotary_R + hop + 1,
            tokens=rows,
            hop=hop + 1,
        )
        states.append(state_RD)

    # Rows whose hop is beyond the response are not scored.
    token_HR = token_R + hop_H1
    inside_HR = supervised_T[token_HR.clamp(max=last)] & (token_HR <= last)
    middle_TD = None
    if isinstance(drafter, MiddleState):
        middle_TD = batch.feature(drafter.middle_source, "text")
    targets = TargetRows(
        batch.feature("hidden", "text"),
        readable.ids_T,
        token_R,
        inside_HR.cumprod(0).bool(),
        middle_TD,
    )
    scores = drafter.loss(states, targets, stage)
    return Unrolled(scores.total, scores.hops, rows.segment_N)


def _check_dtype(drafter: Drafter, batch: Batch) -> None:
    """DataError if the features are not on the drafter's device, or not in its dtype without autocast."""
    weight = drafter.embed_VD
    for feature in sorted(batch.features):
        states = batch.features[feature]
        if states.device == weight.device and _computes_together(states, weight):
            continue
        move = f"batch.to({str(weight.device)!r}, {weight.dtype})"
        raise DataError(
            f"{feature.name} of the batch is {_place_of(states)}, and the drafter {_place_of(weight)}: move "
            f"the batch with `{move}`"
        )


def _computes_together(states: Tensor, weight: Tensor) -> bool:
    """Whether dtypes are the same, or autocast makes them so."""
    device = weight.device.type
    return states.dtype == weight.dtype or torch.is_autocast_enabled(device)


def _place_of(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} on {tensor.device}"


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
    readable = batch.readable
    count_B = torch.bincount(readable.segment_T[supervised(readable)])
    if stage.anchors:
        count_B = count_B.clamp(max=stage.anchors)
    return int(count_B.sum())


def with_noise(batch: Batch, width: float, generator: torch.Generator) -> Batch:
    """Uniform noise of `width` at 512 tokens on the last-layer states, less on longer samples (EAGLE's code).

    The noise is (U[0, 1) - 0.5) * width * 512 / length. The length of a sample counts its visual tokens only
    if the batch has their states.
    """
    readable = batch.readable
    length_B = torch.bincount(readable.segment_T)
    if any(feature.where == "visual" for feature in batch.features):
        length_B = length_B.index_add(0, readable.segment_M, readable.length_M)
    segments = {
        "text": readable.segment_T,
        "visual": readable.visual_tokens.segment_N,
        "span": readable.segment_M,
    }
    noisy: dict[Feature, Tensor] = {}
    # Sorted, since the order fixes the draws.
    for feature in sorted(batch.features):
        state_ND = batch.features[feature]
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
    is_response = batch.response_T[1:]
    same_sample = batch.segment_T[1:] == batch.segment_T[:-1]
    adjacent = batch.position_T[1:] == batch.position_T[:-1] + 1
    followed_T = torch.zeros_like(batch.response_T)
    followed_T[:-1] = is_response & same_sample & adjacent
    return batch.response_T & followed_T
