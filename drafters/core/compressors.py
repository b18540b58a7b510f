"""Compressors: what the visual tokens of a span become, and where it stands.

Shapes: U visual tokens, M visual spans, C entries of the longest span, K visual tokens of a
group, X groups or queries of all spans, Q queries of a span, H heads, d head width, D hidden.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core.transfer import place, place_all
from vlmdistill.stores.schema import TargetInfo


class Compressor(nn.Module, ABC):
    """The visual tokens of each span as fewer entries."""

    @abstractmethod
    def forward(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """The entries of each span, [M, C, D]; any values where a span has fewer.

        `span_U` is the span of each visual token; it is on the CPU if it is known there.
        """

    @abstractmethod
    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """Their positions in the expanded sequence, [M, C]; -1 where a span has fewer."""


class GroupCompressor(Compressor):
    """One entry for each group of `size` neighbours.

    It is the middle one (prune), their mean (pool), or a convolution whose stride and kernel
    are the group (convolve).
    """

    def __init__(
        self, width: int, size: int, kind: Literal["prune", "pool", "convolve"]
    ) -> None:
        super().__init__()
        self.size = size
        self.kind = kind
        self.linear: nn.Linear | None = None
        if kind == "convolve":
            self.linear = nn.Linear(size * width, width)

    def forward(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """The entries of each span, [M, C, D].

        The last group of a span may be smaller; zeros complete it.
        """
        # Which tokens are read follows from the spans alone: it is worked out where they are.
        length_M = torch.bincount(span_U, minlength=spans)
        middle_MC = self.places(torch.zeros_like(length_M), length_M)
        is_entry_MC = middle_MC >= 0
        span_X, entry_X = is_entry_MC.nonzero().unbind(1)
        first_M = length_M.cumsum(0) - length_M
        first_X = first_M[span_X]
        place_2X = place_all([span_X, entry_X], read_UD.device)
        if self.kind == "prune":
            row_X = first_X + middle_MC[span_X, entry_X]
            out_XD = read_UD[place(row_X, read_UD.device)]
        else:
            offset_K = torch.arange(self.size, device=span_U.device)
            offset_XK = self.size * entry_X[:, None] + offset_K
            inside_XK = offset_XK < length_M[span_X, None]
            row_XK = first_X[:, None] + offset_XK
            out_XD = self._combine(read_UD, row_XK, inside_XK)
        width = read_UD.shape[-1]
        out_MCD = read_UD.new_zeros(*middle_MC.shape, width)
        return out_MCD.index_put(tuple(place_2X), out_XD)

    def _combine(self, read_UD: Tensor, row_XK: Tensor, inside_XK: Tensor) -> Tensor:
        """The convolution or mean of the rows of each group that are inside its span: [X, D]."""
        last = max(0, len(read_UD) - 1)
        row_XK = row_XK.clamp(max=last)
        row_XK, inside_XK = place_all([row_XK, inside_XK], read_UD.device)
        group_XKD = read_UD[row_XK] * inside_XK[..., None]
        if self.linear is not None:
            out_XD: Tensor = self.linear(group_XKD.flatten(1))
            return out_XD
        return group_XKD.sum(1) / inside_XK.sum(1, keepdim=True)

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The middle of each group, [M, C]; -1 where a span has fewer groups."""
        longest = int(length_M.max()) if len(length_M) else 0
        count = -(-longest // self.size)  # rounded up
        first_C = self.size * torch.arange(count, device=start_M.device)
        length_M1 = length_M[:, None]
        middle_MC = torch.minimum(first_C + self.size // 2, length_M1 - 1)
        place_MC = start_M[:, None] + middle_MC
        return torch.where(first_C < length_M1, place_MC, -1)


class QueryCompressor(Compressor):
    """Learnable queries that attend over one span of visual embeddings.

    Without order, norm or residual.
    """

    def __init__(self, info: TargetInfo, queries: int) -> None:
        super().__init__()
        self.heads = info.num_heads
        self.head_dim = info.head_dim
        width = self.heads * self.head_dim
        query_QHd = torch.empty(queries, self.heads, self.head_dim)
        self.query_QHd = nn.Parameter(query_QHd)
        nn.init.normal_(self.query_QHd, std=self.head_dim**-0.5)
        self.kv_proj = nn.Linear(info.hidden_size, 2 * width, bias=info.attention_bias)
        self.o_proj = nn.Linear(width, info.hidden_size, bias=False)

    def forward(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """The output of each query on each span of visual tokens: [M, Q, D]."""
        heads = (self.heads, self.head_dim)
        kv_UX = self.kv_proj(read_UD)
        key_UX, value_UX = kv_UX.chunk(2, -1)
        key_UHd = key_UX.unflatten(-1, heads)
        value_UHd = value_UX.unflatten(-1, heads)
        mixed_MQX = attend_spans(self.query_QHd, key_UHd, value_UHd, span_U, spans)
        out_MQD: Tensor = self.o_proj(mixed_MQX)
        return out_MQD

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """Spread evenly over each span, [M, Q]; -1 if it has fewer tokens than queries."""
        return spread(start_M, length_M, length_M, len(self.query_QHd))


def attend_spans(
    query_QHd: Tensor, key_UHd: Tensor, value_UHd: Tensor, span_U: Tensor, spans: int
) -> Tensor:
    """Attention of every query over each span of visual tokens: [M, Q, H * d].

    All queries attend to all visual tokens, masked to their own span: no padding is needed.
    """
    queries = len(query_QHd)
    span_U = place(span_U, query_QHd.device)
    span_X = torch.arange(spans, device=span_U.device).repeat_interleave(queries)
    query_XHd = query_QHd.repeat(spans, 1, 1)
    query_1HXd = _heads_first(query_XHd)
    key_1HUd = _heads_first(key_UHd)
    value_1HUd = _heads_first(value_UHd)
    same_span_XU = span_X[:, None] == span_U
    mixed_1HXd = nn.functional.scaled_dot_product_attention(
        query_1HXd, key_1HUd, value_1HUd, attn_mask=same_span_XU
    )
    mixed_XHd = mixed_1HXd[0].transpose(0, 1)
    width = query_QHd[0].numel()
    return mixed_XHd.reshape(spans, queries, width)


def _heads_first(state_NHd: Tensor) -> Tensor:
    """[N, H, d] -> [1, H, N, d]."""
    return state_NHd.transpose(0, 1)[None]


def spread(start_M: Tensor, length_M: Tensor, count_M: Tensor, most: int) -> Tensor:
    """Positions of `count_M` entries spread evenly over each span, at most `most`.

    [M, C]; -1 where a span has fewer.
    """
    entry_C = torch.arange(most, device=start_M.device)
    count_M1 = count_M[:, None].clamp(max=most)
    middle_C = 2 * entry_C + 1  # of an entry's share, in halves
    offset_MC = middle_C * length_M[:, None] // (2 * count_M1)
    place_MC = start_M[:, None] + offset_MC
    return torch.where(entry_C < count_M1, place_MC, -1)
