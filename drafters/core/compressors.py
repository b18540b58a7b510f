"""Compressors: what the visual tokens of a span become, and where it stands.

Shapes: U visual tokens, M visual spans, C entries of the longest span, K visual tokens of a group, X groups
or queries of all spans, Q queries of a span, H heads, d head width, D hidden.
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

        `span_U` is the span of each visual token, on the CPU where it is known there.
        """

    @abstractmethod
    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """Their positions in the expanded sequence, [M, C]; -1: a span has fewer."""


class GroupCompressor(Compressor):
    """One entry for each `size` neighbours: the middle one, their mean, or a convolution of that stride."""

    def __init__(
        self, width: int, size: int, kind: Literal["prune", "pool", "convolve"]
    ) -> None:
        super().__init__()
        self.size, self.kind = size, kind
        self.linear = nn.Linear(size * width, width) if kind == "convolve" else None

    def forward(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """The entries of each span, [M, C, D]. The last group of a span may be smaller: zeros complete it."""
        length_M = torch.bincount(span_U, minlength=spans)
        position_MC = self.places(torch.zeros_like(length_M), length_M)
        span_X, entry_X = (position_MC >= 0).nonzero().unbind(1)
        first_M = length_M.cumsum(0) - length_M
        out_MCD = read_UD.new_zeros(*position_MC.shape, read_UD.shape[-1])
        place_2X = tuple(place_all([span_X, entry_X], read_UD.device))
        if self.kind == "prune":
            row_X = first_M[span_X] + position_MC[span_X, entry_X]
            out_XD = read_UD[place(row_X, read_UD.device)]
        else:
            offset_XK = self.size * entry_X[:, None] + torch.arange(
                self.size, device=span_U.device
            )
            inside_XK = offset_XK < length_M[span_X, None]
            row_XK = (first_M[span_X, None] + offset_XK).clamp(
                max=max(0, len(read_UD) - 1)
            )
            row_XK, inside_XK = place_all([row_XK, inside_XK], read_UD.device)
            group_XKD = read_UD[row_XK] * inside_XK[..., None]
            if self.linear is not None:
                out_XD = self.linear(group_XKD.flatten(1))
            else:
                out_XD = group_XKD.sum(1) / inside_XK.sum(1, keepdim=True)
        return out_MCD.index_put(place_2X, out_XD)

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The middle of each group, [M, C]; -1: a span has fewer groups."""
        count = -(-int(length_M.max()) // self.size) if len(length_M) else 0
        first_C = self.size * torch.arange(count, device=start_M.device)
        middle_MC = torch.minimum(first_C + self.size // 2, length_M[:, None] - 1)
        return torch.where(
            first_C < length_M[:, None], start_M[:, None] + middle_MC, -1
        )


class QueryCompressor(Compressor):
    """Learnable queries, attending over the visual embeddings of one span: no order, norm or residual."""

    def __init__(self, info: TargetInfo, queries: int) -> None:
        super().__init__()
        self.heads, self.head_dim = info.num_heads, info.head_dim
        width = info.num_heads * info.head_dim
        self.query_QHd = nn.Parameter(
            torch.empty(queries, info.num_heads, info.head_dim)
        )
        nn.init.normal_(self.query_QHd, std=info.head_dim**-0.5)
        self.kv_proj = nn.Linear(info.hidden_size, 2 * width, bias=info.attention_bias)
        self.o_proj = nn.Linear(width, info.hidden_size, bias=False)

    def forward(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """The output of each query on each span of visual tokens: [M, Q, D]."""
        key_UHd, value_UHd = (
            part.unflatten(-1, (self.heads, self.head_dim))
            for part in self.kv_proj(read_UD).chunk(2, -1)
        )
        out_MQD: Tensor = self.o_proj(
            attend_spans(self.query_QHd, key_UHd, value_UHd, span_U, spans)
        )
        return out_MQD

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """Spread evenly over each span, [M, Q]; -1: a span has fewer tokens than queries."""
        return spread(start_M, length_M, length_M, len(self.query_QHd))


def attend_spans(
    query_QHd: Tensor, key_UHd: Tensor, value_UHd: Tensor, span_U: Tensor, spans: int
) -> Tensor:
    """Attention of every query over the visual tokens of each span, heads side by side: [M, Q, H * d].

    All queries attend to all visual tokens, masked to their own span: no padding is needed.
    """
    queries, span_U = len(query_QHd), place(span_U, query_QHd.device)
    span_X = torch.arange(spans, device=span_U.device).repeat_interleave(queries)
    mixed_1HXd = nn.functional.scaled_dot_product_attention(
        query_QHd.repeat(spans, 1, 1).transpose(0, 1)[None],
        key_UHd.transpose(0, 1)[None],
        value_UHd.transpose(0, 1)[None],
        attn_mask=span_X[:, None] == span_U,
    )
    return mixed_1HXd[0].transpose(0, 1).reshape(spans, queries, query_QHd[0].numel())


def spread(start_M: Tensor, length_M: Tensor, count_M: Tensor, most: int) -> Tensor:
    """Positions of `count_M` entries spread evenly over each span, at most `most`: [M, C]; -1: no entry."""
    entry_C, count_M1 = (
        torch.arange(most, device=start_M.device),
        count_M[:, None].clamp(max=most),
    )
    place_MC = start_M[:, None] + (2 * entry_C + 1) * length_M[:, None] // (
        2 * count_M1
    )
    return torch.where(entry_C < count_M1, place_MC, -1)
