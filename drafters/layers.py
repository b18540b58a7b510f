"""Parts that drafters are built of: norms, rotary positions and the one decoder layer.

Shapes: N entries, R rows whose output is wanted, D hidden, H query heads, K key heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.memory import Memory, Places
from vlmdistill.stores.schema import TargetInfo


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as the targets do."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        x32_ND = x_ND.float()
        scale_N1 = torch.rsqrt(x32_ND.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32_ND * scale_N1).to(x_ND.dtype)


def rotate(x_NHd: Tensor, position_N: Tensor, theta: float) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama and Qwen; angles in float32."""
    half = x_NHd.shape[-1] // 2
    steps = torch.arange(half, device=x_NHd.device, dtype=torch.float32)
    angle_N1d = position_N.float()[:, None, None] * theta ** (-steps / half)
    cos, sin = angle_N1d.cos().to(x_NHd.dtype), angle_N1d.sin().to(x_NHd.dtype)
    low, high = x_NHd[..., :half], x_NHd[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer of the target's shape, attending through a `Memory`.

    As in EAGLE, the input norm is absent unless asked for: the input is a projection, not a residual
    stream. Only the wanted rows get a query, an MLP and an output; every entry gets a key and a value.
    """

    def __init__(
        self,
        *,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        theta: float,
        eps: float,
        bias: bool,
        input_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.theta = heads, kv_heads, head_dim, theta
        self.input_norm = RMSNorm(hidden, eps) if input_norm else nn.Identity()
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.post_attention_norm = RMSNorm(hidden, eps)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def remember(
        self, x_ND: Tensor, position_N: Tensor, places: Places, memory: Memory, hop: int = 0
    ) -> None:
        """Write keys and values without asking for an output: all that visual entries need."""
        normed_ND = self.input_norm(x_ND)
        key_NKd = self.k_proj(normed_ND).unflatten(-1, (self.kv_heads, self.head_dim))
        value_NKd = self.v_proj(normed_ND).unflatten(-1, (self.kv_heads, self.head_dim))
        memory.update(rotate(key_NKd, position_N, self.theta), value_NKd, places, hop)

    def forward(self, x_ND: Tensor, position_N: Tensor, places: Places, memory: Memory, hop: int) -> Tensor:
        """[N, D] -> [R, D]: remember all entries, then answer for the wanted rows."""
        self.remember(x_ND, position_N, places, memory, hop)
        if places.rows_R is not None:
            x_ND, position_N = x_ND[places.rows_R], position_N[places.rows_R]
        query_RHd = self.q_proj(self.input_norm(x_ND)).unflatten(-1, (self.heads, self.head_dim))
        mixed_RHd = memory.attend(rotate(query_RHd, position_N, self.theta), places, hop)
        x_RD = x_ND + self.o_proj(mixed_RHd.flatten(1))
        normed_RD = self.post_attention_norm(x_RD)
        gated = F.silu(self.gate_proj(normed_RD)) * self.up_proj(normed_RD)
        out_RD: Tensor = x_RD + self.down_proj(gated)
        return out_RD


def layer_like(info: TargetInfo, *, kv_heads: str, input_norm: bool = False) -> DecoderLayer:
    """A fresh layer of the target's shape; `kv_heads` is "all" (one per query head) or "target"."""
    return DecoderLayer(
        hidden=info.hidden_size,
        intermediate=info.intermediate_size,
        heads=info.num_heads,
        kv_heads=info.num_heads if kv_heads == "all" else info.num_kv_heads,
        head_dim=info.head_dim,
        theta=info.rope_theta,
        eps=info.rms_norm_eps,
        bias=info.attention_bias,
        input_norm=input_norm,
    )
