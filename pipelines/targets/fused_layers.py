"""The target's text layers for decoding: fused projections, few kernels, no module calls.

The stock modules spend more than half of a small model's step on overhead. `FusedLayers` does the same
arithmetic with the same weights for a few tokens after a cached prefix.

Shapes: N tokens (B sequences of one token in a batch), S cached and new positions, D hidden width, M width of
the MLP, H heads of queries, keys and values, G key heads and then value heads, d head width, P rotary
positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core.layers import rms_norm
from vlmdistill.pipelines.targets.target_kv_cache import BatchKVCache, CacheShape
from vlmdistill.stores.errors import TargetError

MANY_KEYS = 1024
"""From so many keys on, masked rows attend by `attend_few_rows` on a GPU; below, its launches cost more."""
Attend = Callable[[int, Tensor], Tensor]
"""The attention of layer i: from queries, keys and values [N, H, d] to [N, D]."""


class FusedLayers:
    """The text layers of a target, as one function of a few tokens.

    The query, key and value matrices of a layer are fused, and so are gate and up. The stock modules become
    views of the fused matrices, so that no weight is in memory twice. TargetError on quantized weights.
    """

    def __init__(self, text: Any):
        attention = text.layers[0].self_attn
        self.width = int(attention.head_dim)
        self.kv_heads = attention.k_proj.weight.shape[0] // self.width
        self.heads = attention.q_proj.weight.shape[0] // self.width
        self.scale = float(attention.scaling)
        self.embed_VD: Tensor = text.embed_tokens.weight
        self.norm = (text.norm.weight, float(text.norm.variance_epsilon))
        self.rotary = text.rotary_emb
        self.act = text.layers[0].mlp.act_fn
        self.layers = [_fuse(layer, self.width) for layer in text.layers]
        self.shape = CacheShape(len(self.layers), self.kv_heads, self.width)
        self._make_rotary_table(1024)

    def ensure_rotary_table(self, last: int) -> None:
        """Extend the table of rotary factors to position `last`."""
        if last >= len(self.cos_P1d):
            self._make_rotary_table(last + 1024)

    def _make_rotary_table(self, positions: int) -> None:
        """The sine includes the sign of the rotated half."""
        rope_3P = torch.arange(positions, device=self.embed_VD.device).expand(3, 1, -1)
        mrope = hasattr(self.rotary, "mrope_section")
        cos_1Pd, sin_1Pd = self.rotary(
            self.embed_VD[:1], rope_3P if mrope else rope_3P[0]
        )
        self.cos_P1d, self.sin_P1d = cos_1Pd[0][:, None], sin_1Pd[0][:, None].clone()
        self.sin_P1d[..., : self.width // 2].neg_()

    def attend(
        self,
        cache: Sequence[Tensor],
        rows: Tensor | slice,
        end: int | None,
        mask_NS: Tensor | None,
        weight_S: Tensor | None = None,
    ) -> Attend:
        """N tokens of one sequence: written to `rows` of each layer's cache, attending to rows before `end`.

        `mask_NS` is additive, in the model's dtype; None attends to all. Each layer adds the mean over heads
        and tokens of its attention weights to `weight_S`.
        """
        shared = (
            self.heads // self.kv_heads
        )  # heads that share keys are treated as more tokens
        mask = mask_NS if mask_NS is None else mask_NS.repeat(shared, 1)

        def attend(layer: int, qkv_NHd: Tensor) -> Tensor:
            rows_GSd = cache[layer][:, :end]
            rows_GSd[:, rows] = qkv_NHd[:, self.heads :].transpose(0, 1)
            count = len(qkv_NHd)
            query = qkv_NHd[:, : self.heads].view(
                count, self.kv_heads, shared, self.width
            )
            query = query.permute(1, 2, 0, 3).reshape(
                1, self.kv_heads, shared * count, self.width
            )
            if weight_S is not None:
                score_GNS = (
                    query[0] @ rows_GSd[: self.kv_heads].transpose(1, 2)
                ).float() * self.scale
                weight_GNS = (score_GNS if mask is None else score_GNS + mask).softmax(
                    -1
                )
                weight_S.add_(weight_GNS.mean((0, 1)))
            keys, values = (
                rows_GSd[None, : self.kv_heads],
                rows_GSd[None, self.kv_heads :],
            )
            if mask is not None and cache[layer].is_cuda and keys.shape[2] >= MANY_KEYS:
                mixed = attend_few_rows(query[0], keys[0], values[0], mask, self.scale)
            else:
                mixed = F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, scale=self.scale
                )
            mixed = mixed.view(self.kv_heads, shared, count, self.width)
            return mixed.permute(2, 0, 1, 3).reshape(count, -1)

        return attend

    def attend_batch(self, cache: BatchKVCache) -> Attend:
        """One token more of each sequence; each layer writes their keys and values into `cache`."""
        position_B, mask_BS = cache.append()
        count, end = mask_BS.shape
        index_B = torch.arange(count, device=position_B.device)

        def attend(layer: int, qkv_BHd: Tensor) -> Tensor:
            rows_BGSd = cache.rows_YBGSd[layer, :count]
            rows_BGSd[index_B, :, position_B] = qkv_BHd[:, self.heads :]
            mixed = F.scaled_dot_product_attention(
                qkv_BHd[:, : self.heads].view(count, self.kv_heads, -1, self.width),
                rows_BGSd[:, : self.kv_heads, :end],
                rows_BGSd[:, self.kv_heads :, :end],
                attn_mask=mask_BS[:, None, None],
                scale=self.scale,
            )
            return mixed.reshape(count, -1)

        return attend

    def run(
        self,
        ids_N: Tensor,
        rope_N: Tensor | slice,
        last: int,
        attend: Attend,
        taps: dict[int, list[str]],
    ) -> dict[str, Tensor]:
        """States by source [N, D]; `rope_N` are rotary positions up to `last`."""
        self.ensure_rotary_table(last)
        cos_N1d, sin_N1d = self.cos_P1d[rope_N], self.sin_P1d[rope_N]
        hidden_ND = F.embedding(ids_N, self.embed_VD)
        count, width = hidden_ND.shape[0], self.width
        rotated, half = self.heads + self.kv_heads, width // 2
        states: dict[str, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in taps:
                states |= dict.fromkeys(taps[number], hidden_ND)
            normed_ND = rms_norm(hidden_ND, layer.norm_in, layer.eps)
            qkv_NHd = F.linear(normed_ND, layer.qkv, layer.qkv_bias).view(
                count, -1, width
            )
            qk_NHd = qkv_NHd[:, :rotated]
            if layer.norm_qk_Hd is not None:
                qk_NHd.copy_(
                    F.rms_norm(qk_NHd, (width,), None, layer.eps) * layer.norm_qk_Hd
                )
            rolled_NHd = qk_NHd.roll(half, -1)
            qk_NHd.mul_(cos_N1d).addcmul_(rolled_NHd, sin_N1d)
            mixed_ND = attend(number, qkv_NHd)
            hidden_ND = torch.addmm(
                _plus(hidden_ND, layer.out_bias), mixed_ND, layer.out_t
            )
            normed_ND = rms_norm(hidden_ND, layer.norm_mlp, layer.eps)
            gate_NM, up_NM = F.linear(
                normed_ND, layer.gate_up, layer.gate_up_bias
            ).chunk(2, -1)
            residual_ND = _plus(hidden_ND, layer.down_bias)
            hidden_ND = torch.addmm(
                residual_ND, self.act(gate_NM).mul_(up_NM), layer.down_t
            )
        states["hidden"] = rms_norm(hidden_ND, *self.norm)
        return states


def attend_few_rows(
    query_GNd: Tensor, key_GSd: Tensor, value_GSd: Tensor, mask_NS: Tensor, scale: float
) -> Tensor:
    """Masked attention as two products of matrices, for few queries and many keys on a GPU: [G, N, d].

    With a mask, PyTorch's kernels read all keys of a head in one block, so that a GPU of 132 processors has
    work for as many of them as there are heads. Products spread over the keys. Without a mask, PyTorch's
    flash kernel spreads over them as well, and is faster.
    """
    half = query_GNd.dtype.itemsize == 2
    key_GdS = key_GSd.transpose(1, 2)
    score_GNS = (
        torch.bmm(query_GNd, key_GdS, out_dtype=torch.float32)
        if half
        else query_GNd @ key_GdS
    )
    score_GNS = score_GNS * scale + mask_NS
    return torch.bmm(score_GNS.softmax(-1).to(value_GSd.dtype), value_GSd)


def _plus(states_ND: Tensor, bias_D: Tensor | None) -> Tensor:
    return states_ND if bias_D is None else states_ND + bias_D


@dataclass(slots=True)
class _Layer:
    """The weights of one fused layer."""

    qkv: Tensor
    qkv_bias: Tensor | None
    norm_qk_Hd: (
        Tensor | None
    )  # Qwen3 normalizes queries and keys; one weight per head here
    out_t: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down_t: Tensor
    down_bias: Tensor | None
    norm_in: Tensor
    norm_mlp: Tensor
    eps: float


def _fuse(layer: Any, width: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    out, down = attention.o_proj, mlp.down_proj
    inner = (attention.q_proj, attention.k_proj, attention.v_proj)
    for module in (*inner, out, mlp.gate_proj, mlp.up_proj, down):
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise TargetError(
                f"decoding needs plain weights, not {kind}: load the model unquantized"
            )
    qkv, qkv_bias = _merge(inner)
    gate_up, gate_up_bias = _merge((mlp.gate_proj, mlp.up_proj))
    norm_qk_Hd = None
    if hasattr(attention, "q_norm"):
        queries, keys = (module.weight.shape[0] // width for module in inner[:2])
        norm_qk_Hd = torch.stack(
            [attention.q_norm.weight] * queries + [attention.k_norm.weight] * keys
        )
    return _Layer(
        qkv=qkv,
        qkv_bias=qkv_bias,
        norm_qk_Hd=norm_qk_Hd,
        out_t=out.weight.t(),
        out_bias=out.bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down_t=down.weight.t(),
        down_bias=down.bias,
        norm_in=layer.input_layernorm.weight,
        norm_mlp=layer.post_attention_layernorm.weight,
        eps=float(layer.input_layernorm.variance_epsilon),
    )


def _merge(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix and one bias for several projections of the same input, which become views of it."""
    weight = torch.cat([module.weight for module in modules])
    bias = (
        torch.cat([module.bias for module in modules])
        if modules[0].bias is not None
        else None
    )
    row = 0
    for module in modules:
        rows = slice(row, row := row + module.out_features)
        module.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[rows], requires_grad=False)
    return weight, bias
