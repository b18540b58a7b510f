"""Attention within packed sequences, one kernel call for all sequences of a length.

A vision tower packs the windows of its images into one row of patches. Without
FlashAttention, transformers calls its kernel window by window: some 100 calls per
layer for an image of a megapixel, each of a few microseconds of work.

Shapes: L patches of all sequences, W sequences of one length, N patches of a sequence,
H heads, d head width.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from vlmdistill.drafters.core.transfer import place

STOCK = "sdpa"
PACKED = "vlmdistill_flash"
"""transformers passes the bounds of sequences to names that contain `flash` only."""


@contextmanager
def packed_attention(config: Any) -> Iterator[None]:
    """Within it, a vision tower with PyTorch's attention attends to packed sequences.

    Other implementations stay as they are; `config` is the tower's own.
    """
    if config._attn_implementation != STOCK:
        yield
        return
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = STOCK


@dataclass(frozen=True)
class SequencesOfOneLength:
    """Where the sequences of one length are among all patches."""

    length: int  # N
    rows: slice | Tensor  # of all of them [W * N]

    def select(self, state_1HLd: Tensor) -> Tensor:
        """Their states: [W, H, N, d]."""
        state_LHd = state_1HLd[0].transpose(0, 1)
        rows_RHd = state_LHd[self.rows]
        state_WNHd = rows_RHd.reshape(-1, self.length, *rows_RHd.shape[1:])
        return state_WNHd.transpose(1, 2)


def attend_packed(
    module: Any,
    query_1HLd: Tensor,
    key_1HLd: Tensor,
    value_1HLd: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface: [1, L, H, d].

    `cu_seq_lens_q` are the bounds of the sequences, int32 on the CPU.
    """
    bounds = tuple(cu_seq_lens_q.tolist())
    mixed_LHd = torch.empty_like(query_1HLd[0].transpose(0, 1))
    for group in sequences_by_length(bounds, query_1HLd.device):
        mixed_WHNd = F.scaled_dot_product_attention(
            group.select(query_1HLd),
            group.select(key_1HLd),
            group.select(value_1HLd),
            scale=scaling,
        )
        mixed_LHd[group.rows] = mixed_WHNd.transpose(1, 2).flatten(0, 1)
    return mixed_LHd[None], None


@lru_cache(maxsize=16)  # every layer asks again
def sequences_by_length(
    bounds: tuple[int, ...], device: torch.device
) -> list[SequencesOfOneLength]:
    """Sequences between each two of `bounds`, grouped by length."""
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for start, end in pairwise(bounds):
        if end > start:
            starts[end - start].append(start)
    if len(starts) == 1:
        (length,) = starts
        return [SequencesOfOneLength(length, slice(0, bounds[-1]))]
    groups = []
    for length, starts_of_length in starts.items():
        start_W1 = torch.tensor(starts_of_length)[:, None]
        row_R = (start_W1 + torch.arange(length)).flatten()
        groups.append(SequencesOfOneLength(length, place(row_R, device)))
    return groups


AttentionInterface.register(PACKED, attend_packed)
