"""Parts of drafters: rotary positions, the decoder layer, and EAGLE's block around it.

Shapes: N entries, R rows whose output is wanted, U visual tokens, D hidden, H query heads, K
key heads, d head width, M width of the MLP.
"""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core.batch import Batch, TokenIndex
from vlmdistill.drafters.core.kv_cache import KVCache
from vlmdistill.drafters.core.transfer import place
from vlmdistill.stores.schema import TargetInfo


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, [N, D].

    torch has no kernel of its own for a CPU. Without gradients, the fewest other kernels take
    half of its time.
    """
    width = x_ND.shape[-1]
    on_cpu = x_ND.is_cpu and x_ND.dtype == torch.float32
    if not on_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.rms_norm(x_ND, (width,), weight_D, eps)
    mean_N1 = F.linear(x_ND * x_ND, *_mean(width, eps))
    normed_ND = x_ND * mean_N1.rsqrt_()
    return normed_ND.mul_(weight_D)


@cache
def _mean(width: int, eps: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer that computes the mean of a row plus `eps`."""
    with torch.inference_mode(False):
        weight_1D = torch.full((1, width), 1 / width)
        return weight_1D, torch.full((1,), eps)


class RMSNorm(nn.RMSNorm):
    """`rms_norm` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class Rotary:
    """Rotary positions in the half-split layout of Llama and Qwen; angles in float32."""

    def __init__(self, head_dim: int, theta: float) -> None:
        half = head_dim // 2
        exponent_h = torch.arange(half, dtype=torch.float64) / half
        frequency_h = theta**-exponent_h
        sign_2 = torch.tensor([-1.0, 1.0])
        # Not buffers, which casts of the module would round: angles need float32.
        self._frequency_d = frequency_h.float().repeat(2)
        self._sign_d = sign_2.repeat_interleave(half)

    def __call__(self, rotary_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, each [N, 1, d], for `apply_rotary`.

        The sines of the first half of a head are negated.
        """
        if self._frequency_d.device != rotary_N.device:
            self._frequency_d = self._frequency_d.to(rotary_N.device)
            self._sign_d = self._sign_d.to(rotary_N.device)
        angle_N1d = rotary_N[:, None, None] * self._frequency_d
        sin_N1d = angle_N1d.sin().mul_(self._sign_d)
        cos_N1d = angle_N1d.cos()
        return cos_N1d.to(dtype), sin_N1d.to(dtype)


def apply_rotary(x_NHd: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate every head by the angle of its entry."""
    cos_N1d, sin_N1d = factors
    half = x_NHd.shape[-1] // 2
    swapped_NHd = x_NHd.roll(half, -1)
    return torch.addcmul(x_NHd * cos_N1d, swapped_NHd, sin_N1d)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer of the target's shape, which attends through a `KVCache`.

    As in EAGLE, there is no input norm by default: the input is a projection, not a residual
    stream. Only the wanted rows attend and get an MLP and an output; every entry gets a key
    and a value.
    """

    input_norm: nn.Module | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(
        self,
        info: TargetInfo,
        *,
        kv_heads: str,
        inputs: int | None = None,
        head_norms: bool = False,
    ) -> None:
        """Build the layer.

        Args:
            info: The target's sizes.
            kv_heads: "all": one for each query head; "target": as many as the target has.
            inputs: Width of what queries, keys and values read; the hidden width by default.
            head_norms: Norm the queries and keys of each head, as in Qwen3.
        """
        super().__init__()
        width = info.hidden_size
        mlp_width = info.intermediate_size
        self.heads = info.num_heads
        self.head_dim = info.head_dim
        self.kv_heads = info.num_heads if kv_heads == "all" else info.num_kv_heads
        inputs = width if inputs is None else inputs
        attention_width = self.heads * self.head_dim
        qkv_width = attention_width + 2 * self.kv_heads * self.head_dim
        # The order of modules is that of parameters in checkpoints of optimizers.
        self.register_module("input_norm", None)
        self.qkv_proj = nn.Linear(inputs, qkv_width, bias=info.attention_bias)
        self.o_proj = nn.Linear(attention_width, width, bias=False)
        self.post_attention_norm = RMSNorm(width, info.rms_norm_eps)
        self.gate_up_proj = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down_proj = nn.Linear(mlp_width, width, bias=False)
        for name in ("q_norm", "k_norm"):
            norm = RMSNorm(self.head_dim, info.rms_norm_eps) if head_norms else None
            self.register_module(name, norm)
        self.rotary = Rotary(self.head_dim, info.rope_theta)

    def write_kv(
        self,
        x_ND: Tensor,
        rotary_N: Tensor,
        tokens: TokenIndex,
        cache: KVCache,
        hop: int = 0,
    ) -> None:
        """Write keys and values without queries or an output: all that visual entries need."""
        if self.input_norm is not None:
            x_ND = self.input_norm(x_ND)
        first = self.heads * self.head_dim  # row of the projection behind the queries'
        weight = self.qkv_proj.weight
        bias = self.qkv_proj.bias
        kv_bias = None if bias is None else bias[first:]
        kv_ND = F.linear(x_ND, weight[first:], kv_bias)
        # All sizes are explicit: a batch without images has no rows to infer -1 from.
        kv_N2Kd = kv_ND.view(len(x_ND), 2, self.kv_heads, self.head_dim)
        key_NKd, value_NKd = kv_N2Kd.unbind(1)
        if self.k_norm is not None:
            key_NKd = self.k_norm(key_NKd)
        key_NKd = apply_rotary(key_NKd, self.rotary(rotary_N, x_ND.dtype))
        cache.update(key_NKd, value_NKd, tokens, hop)

    def forward(
        self,
        x_ND: Tensor,
        rotary_N: Tensor,
        tokens: TokenIndex,
        cache: KVCache,
        hop: int,
        residual_ND: Tensor | None = None,
    ) -> Tensor:
        """[N, D] -> [R, D]: write all entries to the cache, then attend from the wanted rows.

        The output is added to `residual_ND`; by default to the input.
        """
        residual_ND = x_ND if residual_ND is None else residual_ND
        query_NHd, key_NKd, value_NKd = self.qkv(x_ND, rotary_N)
        cache.update(key_NKd, value_NKd, tokens, hop)
        mixed_RHd = cache.attend(tokens.wanted(query_NHd), tokens, hop)
        return self.finish(tokens.wanted(residual_ND), mixed_RHd)

    def qkv(self, x_ND: Tensor, rotary_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, d], keys and values [N, K, d] of all entries, rotated."""
        if self.input_norm is not None:
            x_ND = self.input_norm(x_ND)
        rotated = self.heads + self.kv_heads
        heads = rotated + self.kv_heads
        shape = (len(x_ND), heads, self.head_dim)
        qkv_NXd = self.qkv_proj(x_ND).view(shape)
        qk_NXd = qkv_NXd[:, :rotated]
        value_NKd = qkv_NXd[:, rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query_NHd = self.q_norm(qk_NXd[:, : self.heads])
            key_NKd = self.k_norm(qk_NXd[:, self.heads :])
            qk_NXd = torch.cat([query_NHd, key_NKd], dim=1)
        qk_NXd = apply_rotary(qk_NXd, self.rotary(rotary_N, x_ND.dtype))
        query_NHd = qk_NXd[:, : self.heads]
        key_NKd = qk_NXd[:, self.heads :]
        return query_NHd, key_NKd, value_NKd

    def finish(self, residual_RD: Tensor, mixed_RHd: Tensor) -> Tensor:
        """The layer after attention: output projection and MLP."""
        mixed_RD: Tensor = self.o_proj(mixed_RHd.flatten(1))
        x_RD = residual_RD + mixed_RD
        gate_up_R2M = self.gate_up_proj(self.post_attention_norm(x_RD))
        gate_RM, up_RM = gate_up_R2M.chunk(2, dim=-1)
        hidden_RM = F.silu(gate_RM) * up_RM
        added_RD: Tensor = self.down_proj(hidden_RM)
        return x_RD + added_RD


class EagleBlock(nn.Module):
    """EAGLE's drafter (section 3): one decoder layer over a projection of [embedding ; state]."""

    def __init__(self, info: TargetInfo, *, kv_heads: str) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = DecoderLayer(info, kv_heads=kv_heads)

    def write_visual(self, embed_UD: Tensor, batch: Batch, cache: KVCache) -> None:
        """Write visual tokens as entries [visual embedding ; state before it], if there is one."""
        token_N, hidden_ND = batch.predecessors(["hidden"], "visual")
        tokens = batch.visual_tokens.only(token_N)
        embed_ND = embed_UD[place(token_N, embed_UD.device)]
        entry_N2D = torch.cat([embed_ND, hidden_ND], dim=-1)
        x_ND = self.fc(entry_N2D)
        self.layer.write_kv(x_ND, tokens.position_N - 1, tokens, cache)


LAYER_NAMES = {
    "self_attn.q_proj": "qkv_proj/0",
    "self_attn.k_proj": "qkv_proj/1",
    "self_attn.v_proj": "qkv_proj/2",
    "self_attn.o_proj": "o_proj",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "gate_up_proj/0",
    "mlp.up_proj": "gate_up_proj/1",
    "mlp.down_proj": "down_proj",
}
"""Modules of a decoder layer of Llama -> those of `DecoderLayer`; `/n`: rows of a fused one.

There is no input norm, see `DecoderLayer`.
"""


def layer_names(
    published: str, own: str, names: Mapping[str, str] = LAYER_NAMES
) -> Mapping[str, str]:
    """The `names` of the layer that is called `published` there and `own` here."""
    of_layer = {}
    for name, own_name in names.items():
        of_layer[f"{published}.{name}"] = f"{own}.{own_name}"
    return of_layer


EAGLE_NAMES = {"fc": "block.fc", **layer_names("layers.0", "block.layer")}
"""The modules of EAGLE's published drafters -> their names here."""
