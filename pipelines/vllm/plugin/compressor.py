"""The visual tokens of an image as a few entries, and as a vector joined to later states; no vLLM needed.

Shapes: L visual tokens of an image, Q queries, H heads, d head width, D hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core.serving import Compression


class Compressor(nn.Module):
    """Learned queries that attend over the visual tokens of one image."""

    def __init__(self, compression: Compression, width: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        heads, size = (compression.heads, head_dim) if compression.heads else (1, width)
        queries = compression.entries + compression.joined
        self.query_QHd = nn.Parameter(torch.zeros(queries, heads, size), requires_grad=False)
        self.kv_proj: nn.Linear | None = None
        self.o_proj: nn.Linear | None = None
        if compression.heads:
            self.kv_proj = nn.Linear(width, 2 * heads * size, bias=bias)
            self.o_proj = nn.Linear(heads * size, width, bias=False)

    def forward(self, x_LD: Tensor) -> Tensor:
        """What each query reads, [Q, D]."""
        heads, size = self.query_QHd.shape[1:]
        key_LX, value_LX = (x_LD, x_LD) if self.kv_proj is None else self.kv_proj(x_LD).chunk(2, -1)
        mixed_1HQd = F.scaled_dot_product_attention(
            self.query_QHd.transpose(0, 1)[None],
            key_LX.unflatten(-1, (heads, size)).transpose(0, 1)[None],
            value_LX.unflatten(-1, (heads, size)).transpose(0, 1)[None],
        )
        out_QX = mixed_1HQd[0].transpose(0, 1).flatten(1)
        return out_QX if self.o_proj is None else self.o_proj(out_QX)
