"""Parts of drafters: rotary positions, the decoder layer, and EAGLE's block around it.

Shapes: N entries, R rows whose output is wanted, U visual tokens, D hidden, H query heads, K key heads,
d head width.
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

    torch has no kernel of its own for a CPU: without gradients, the fewest of others take half the time.
    """
    width = x_ND.shape[-1]
    on_cpu = x_ND.is_cpu and x_ND.dtype == torch.float32
    if not on_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.rms_norm(x_ND, (width,), weight_D, eps)
    scale_N1 = F.linear(x_ND * x_ND, *_mean(width, eps)).rsqrt_()
    return (x_ND * scale_N1).mul_(weight_D)


@cache
def _mean(width: int, eps: float) -> tuple[Tensor, Tensor]:
    """The product and the summand that make `eps` plus the mean of a row."""
    with torch.inference_mode(False):
        return torch.full((1, width), 1 / width), torch.full((1,), eps)


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
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        # Not buffers, which casts of the module would round: angles need float32.
        self._tables = (
            frequency.float().repeat(2),
            torch.tensor([-1.0, 1.0]).repeat_interleave(half),
        )

    def __call__(self, rotary_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The factors of `apply_rotary`, each [N, 1, d]; the sine has the sign of its half."""
        if self._tables[0].device != rotary_N.device:
            self._tables = (
                self._tables[0].to(rotary_N.device),
                self._tables[1].to(rotary_N.device),
            )
        frequency_d, sign_d = self._tables
        angle_N1d = rotary_N[:, None, None] * frequency_d
        return angle_N1d.cos().to(dtype), angle_N1d.sin().mul_(sign_d).to(dtype)


def apply_rotary(x_NHd: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate every head by its entry's angle."""
    cos_N1d, sin_N1d = factors
    return torch.addcmul(x_NHd * cos_N1d, x_NHd.roll(x_NHd.shape[-1] // 2, -1), sin_N1d)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer of the target's shape, attending through a `KVCache`.

    As in EAGLE, there is no input norm by default: the input is a projection, not a residual stream. Only
    the wanted rows attend and get an MLP and an output; every entry gets a key and a value. Queries, keys and
    values may read an input of another width (`inputs`) than the residual. With `head_norms` the queries and
    keys of each head are normed, as in Qwen3.
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
        """`kv_heads` is "all" (one per query head) or "target"; `inputs` is the hidden width unless given."""
        super().__init__()
        inputs = info.hidden_size if inputs is None else inputs
        self.heads, self.head_dim = info.num_heads, info.head_dim
        self.kv_heads = info.num_heads if kv_heads == "all" else info.num_kv_heads
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.register_module(
            "input_norm", None
        )  # first of the parameters, as in checkpoints of optimizers
        self.qkv_proj = nn.Linear(inputs, qkv, bias=info.attention_bias)
        self.o_proj = nn.Linear(
            self.heads * self.head_dim, info.hidden_size, bias=False
        )
        self.post_attention_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.gate_up_proj = nn.Linear(
            info.hidden_size, 2 * info.intermediate_size, bias=False
        )
        self.down_proj = nn.Linear(info.intermediate_size, info.hidden_size, bias=False)
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
        first = (
            self.heads * self.head_dim
        )  # row of the projection that is not of a query
        weight, bias = self.qkv_proj.weight[first:], self.qkv_proj.bias
        kv_ND = F.linear(x_ND, weight, None if bias is None else bias[first:])
        # All sizes are explicit: a batch without images has no rows from which -1 could be inferred.
        key_NKd, value_NKd = kv_ND.view(
            len(x_ND), 2, self.kv_heads, self.head_dim
        ).unbind(1)
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

        The output is added to `residual_ND`, which is the input itself unless given.
        """
        residual_ND = x_ND if residual_ND is None else residual_ND
        query_NHd, key_NKd, value_NKd = self.qkv(x_ND, rotary_N)
        cache.update(key_NKd, value_NKd, tokens, hop)
        if tokens.rows_R is not None:
            query_NHd, residual_ND = (
                query_NHd[tokens.rows_R],
                residual_ND[tokens.rows_R],
            )
        return self.finish(residual_ND, cache.attend(query_NHd, tokens, hop))

    def qkv(self, x_ND: Tensor, rotary_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, d], keys and values [N, K, d] of all entries, rotated."""
        if self.input_norm is not None:
            x_ND = self.input_norm(x_ND)
        rotated = self.heads + self.kv_heads
        qkv_NHd = self.qkv_proj(x_ND).view(
            len(x_ND), rotated + self.kv_heads, self.head_dim
        )
        qk_NHd = qkv_NHd[:, :rotated]
        if self.q_norm is not None and self.k_norm is not None:
            query_NHd, key_NKd = qk_NHd.split([self.heads, self.kv_heads], dim=1)
            qk_NHd = torch.cat([self.q_norm(query_NHd), self.k_norm(key_NKd)], dim=1)
        qk_NHd = apply_rotary(qk_NHd, self.rotary(rotary_N, x_ND.dtype))
        return qk_NHd[:, : self.heads], qk_NHd[:, self.heads :], qkv_NHd[:, rotated:]

    def finish(self, residual_RD: Tensor, mixed_RHd: Tensor) -> Tensor:
        """The layer after attention: output projection and MLP."""
        x_RD: Tensor = residual_RD + self.o_proj(mixed_RHd.flatten(1))
        gate_RM, up_RM = self.gate_up_proj(self.post_attention_norm(x_RD)).chunk(
            2, dim=-1
        )
        added_RD: Tensor = self.down_proj(F.silu(gate_RM) * up_RM)
        return x_RD + added_RD


class EagleBlock(nn.Module):
    """EAGLE's drafter (section 3): one decoder layer over a projection of [embedding ; state]."""

    def __init__(self, info: TargetInfo, *, kv_heads: str) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size)
        self.layer = DecoderLayer(info, kv_heads=kv_heads)

    def write_visual(self, embed_UD: Tensor, batch: Batch, cache: KVCache) -> None:
        """Write visual tokens as entries [visual embedding ; state before it], if there is one."""
        seen_N, hidden_ND = batch.predecessors(["hidden"], "visual")
        tokens = batch.visual_tokens.only(seen_N)
        seen_N = place(seen_N, embed_UD.device)
        x_ND = self.fc(torch.cat([embed_UD[seen_N], hidden_ND], dim=-1))
        self.layer.write_kv(x_ND, tokens.position_N - 1, tokens, cache)


def layer_names(theirs: str, ours: str) -> Mapping[str, str]:
    """The modules of a decoder layer of a Llama checkpoint by their names here; `/n`: rows of a fused one.

    There is no input norm, see `DecoderLayer`.
    """
    names = {
        "self_attn.q_proj": "qkv_proj/0",
        "self_attn.k_proj": "qkv_proj/1",
        "self_attn.v_proj": "qkv_proj/2",
        "self_attn.o_proj": "o_proj",
        "post_attention_layernorm": "post_attention_norm",
        "mlp.gate_proj": "gate_up_proj/0",
        "mlp.up_proj": "gate_up_proj/1",
        "mlp.down_proj": "down_proj",
    }
    return {f"{theirs}.{name}": f"{ours}.{here}" for name, here in names.items()}


EAGLE_NAMES = {"fc": "block.fc", **layer_names("layers.0", "block.layer")}
"""The modules of EAGLE's published drafters by their names here."""
