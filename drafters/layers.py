"""Parts that drafters are built of: rotary positions and the one decoder layer.

Shapes: N entries, R rows whose output is wanted, X places of a group after each row, J = X + 1 queries
of a row, Q = R * J, D hidden, M width of the MLP, H query heads, K key heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.memory import Memory, Places
from vlmdistill.stores.schema import TargetInfo


class Rotary:
    """Rotary positions in the half-split layout of Llama and Qwen; angles in float32."""

    def __init__(self, head_dim: int, theta: float) -> None:
        half = head_dim // 2
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        # Kept apart from casts of the module: a frequency in half precision turns by a wrong angle.
        self._tables = (frequency.float().repeat(2), torch.tensor([-1.0, 1.0]).repeat_interleave(half))

    def __call__(self, position_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The factors of `turn` at those positions, each [N, 1, d]; the sine has the sign of its half."""
        if self._tables[0].device != position_N.device:
            self._tables = (self._tables[0].to(position_N.device), self._tables[1].to(position_N.device))
        frequency_d, sign_d = self._tables
        angle_N1d = position_N[:, None, None] * frequency_d
        return angle_N1d.cos().to(dtype), angle_N1d.sin().mul_(sign_d).to(dtype)


def turn(x_NHd: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Turn every head by its entry's angle."""
    cos_N1d, sin_N1d = factors
    return torch.addcmul(x_NHd * cos_N1d, x_NHd.roll(x_NHd.shape[-1] // 2, -1), sin_N1d)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer of the target's shape, attending through a `Memory`.

    As in EAGLE, the input norm is absent unless asked for: the input is a projection, not a residual
    stream. Only the wanted rows get a query, an MLP and an output; every entry gets a key and a value.
    Queries, keys and values may read more than what is carried on: `inputs` wide, beside a residual.
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
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        inputs = hidden if inputs is None else inputs
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.input_norm = nn.RMSNorm(inputs, eps) if input_norm else None
        self.qkv_proj = nn.Linear(inputs, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.post_attention_norm = nn.RMSNorm(hidden, eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.rotary = Rotary(head_dim, theta)

    def remember(
        self, x_ND: Tensor, position_N: Tensor, places: Places, memory: Memory, hop: int = 0
    ) -> None:
        """Write keys and values without asking for an output: all that visual entries need."""
        kv_NHd = self._project(x_ND, self.heads)
        key_NKd = turn(kv_NHd[:, : self.kv_heads], self.rotary(position_N, x_ND.dtype))
        memory.update(key_NKd, kv_NHd[:, self.kv_heads :], places, hop)

    def forward(
        self,
        x_ND: Tensor,
        position_N: Tensor,
        places: Places,
        memory: Memory,
        hop: int,
        residual_ND: Tensor | None = None,
    ) -> Tensor:
        """[N, D] -> [R, D]: remember all entries, then answer for the wanted rows.

        The output is added to `residual_ND`, which is the input itself unless given.
        """
        rows_R, heads = places.rows_R, self.heads
        residual_ND = x_ND if residual_ND is None else residual_ND
        if rows_R is None:
            qkv_NHd = self._project(x_ND, 0)
            turned = heads + self.kv_heads
            qk_NHd = turn(qkv_NHd[:, :turned], self.rotary(position_N, x_ND.dtype))
            memory.update(qk_NHd[:, heads:], qkv_NHd[:, turned:], places, hop)
            query_RHd = qk_NHd[:, :heads]
        else:
            self.remember(x_ND, position_N, places, memory, hop)
            x_ND, position_N, residual_ND = x_ND[rows_R], position_N[rows_R], residual_ND[rows_R]
            query_RHd = self._project(x_ND, 0, heads)
            query_RHd = turn(query_RHd, self.rotary(position_N, x_ND.dtype))
        return self._finish(residual_ND, memory.attend(query_RHd, places, hop))

    def ahead(
        self, x_ND: Tensor, group_XD: Tensor, position_N: Tensor, places: Places, memory: Memory, hop: int
    ) -> Tensor:
        """[N, D] -> [R, X + 1, D]: remember all entries, answer for the wanted rows and X places after each.

        `group_XD` stands at the places after every wanted row; the j-th of them sees what the row sees and
        those before it, and none is remembered.
        """
        self.remember(x_ND, position_N, places, memory, hop)
        if places.rows_R is not None:
            x_ND, position_N = x_ND[places.rows_R], position_N[places.rows_R]
        rows, queries = len(x_ND), len(group_XD) + 1
        x_RJD = torch.cat([x_ND[:, None], group_XD.expand(rows, -1, -1)], dim=1)
        offset_J = torch.arange(queries, device=x_ND.device)
        factors = self.rotary((position_N[:, None] + offset_J).flatten(), x_ND.dtype)
        x_QD = x_RJD.flatten(0, 1)
        qkv_QHd, turned = self._project(x_QD, 0), self.heads + self.kv_heads
        qk_QHd = turn(qkv_QHd[:, :turned], factors)
        key_RJKd, value_RJKd = (
            part.view(rows, queries, self.kv_heads, self.head_dim)
            for part in (qk_QHd[:, self.heads :], qkv_QHd[:, turned:])
        )
        mixed_QHd = memory.attend(
            qk_QHd[:, : self.heads], places, hop, group=(key_RJKd[:, 1:], value_RJKd[:, 1:])
        )
        return self._finish(x_QD, mixed_QHd).view(rows, queries, -1)

    def _finish(self, residual_RD: Tensor, mixed_RHd: Tensor) -> Tensor:
        """What follows attention: its output projection, then the MLP."""
        # Weights instead of module calls: on a small model half of a draft step is the calls' overhead.
        norm, weight_out = self.post_attention_norm, self.o_proj.weight
        x_RD = residual_RD + F.linear(mixed_RHd.flatten(1), weight_out)
        normed_RD = F.rms_norm(x_RD, norm.normalized_shape, norm.weight, norm.eps)
        gate_RM, up_RM = F.linear(normed_RD, self.gate_up_proj.weight).chunk(2, dim=-1)
        return x_RD + F.linear(F.silu(gate_RM) * up_RM, self.down_proj.weight)

    def _project(self, x_ND: Tensor, first: int, last: int | None = None) -> Tensor:
        """The heads [first, last) of query, key and value, in this order."""
        last = self.heads + 2 * self.kv_heads if last is None else last
        if self.input_norm is not None:
            x_ND = self.input_norm(x_ND)
        chosen = slice(first * self.head_dim, last * self.head_dim)
        weight, bias = self.qkv_proj.weight[chosen], self.qkv_proj.bias
        heads_NX = F.linear(x_ND, weight, None if bias is None else bias[chosen])
        # Every size is spelled out: a batch without images has no rows here, from which none can be inferred.
        return heads_NX.view(len(x_ND), last - first, self.head_dim)


def layer_like(
    info: TargetInfo, *, kv_heads: str, input_norm: bool = False, inputs: int | None = None
) -> DecoderLayer:
    """A fresh layer of the target's shape; `kv_heads` is "all" (one per query head) or "target".

    `inputs` is the width that queries, keys and values read, the hidden one unless given.
    """
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
        inputs=inputs,
    )
