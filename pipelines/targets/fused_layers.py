"""The target's text layers for decoding: fused projections, few kernels, no module calls.

The stock modules spend more than half of a small model's step on overhead. `FusedLayers`
does the same arithmetic with the same weights for a few tokens after a cached prefix.

Shapes: N tokens (B sequences of one token in a batch), S cached and new positions, D
hidden width, M width of the MLP, H heads of queries, keys and values, G key heads and then
value heads, R query heads that share a key head, d head width, P rotary positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core.layers import rms_norm
from vlmdistill.pipelines.targets.packed_weights import PackedWeight, fewest_rows
from vlmdistill.pipelines.targets.target_kv_cache import BatchKVCache, CacheShape
from vlmdistill.stores.errors import TargetError

MANY_KEYS = 1024
"""From so many keys on, masked rows attend by `attend_few_rows` on a GPU.

With fewer keys, its launches cost more than it saves.
"""
Attend = Callable[[int, Tensor], Tensor]
"""The attention of layer i: from queries, keys and values [N, H, d] to [N, D]."""


class FusedLayers:
    """The text layers of a target, as one function of a few tokens.

    The query, key and value matrices of a layer are fused, and so are gate and up. The stock modules become
    views of the fused matrices, so that no weight is in memory twice, but for packed ones on a CPU
    (`packed_weights.py`). TargetError on quantized weights.
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
        matrices = [weight for layer in self.layers for weight in layer.matrices]
        self._packed_from = fewest_rows(matrices)
        self.shape = CacheShape(len(self.layers), self.kv_heads, self.width)
        self._make_rotary_table(1024)

    @cached_property
    def _packed_layers(self) -> list["_PackedLayer"]:
        """The same layers with packed weights."""
        return [_PackedLayer(layer) for layer in self.layers]

    def ensure_rotary_table(self, last: int) -> None:
        """Extend the table of rotary factors to position `last`."""
        if last >= len(self.cos_P1d):
            self._make_rotary_table(last + 1024)

    def _make_rotary_table(self, positions: int) -> None:
        """The sine includes the sign of the rotated half."""
        rope_1P = torch.arange(positions, device=self.embed_VD.device)[None]
        has_axes = hasattr(self.rotary, "mrope_section")
        rope = rope_1P.expand(3, 1, -1) if has_axes else rope_1P
        cos_1Pd, sin_1Pd = self.rotary(self.embed_VD[:1], rope)
        self.cos_P1d = cos_1Pd[0][:, None]
        self.sin_P1d = sin_1Pd[0][:, None].clone()
        self.sin_P1d[..., : self.width // 2].neg_()

    def attend(
        self,
        cache: Sequence[Tensor],
        rows: Tensor | slice,
        end: int | None,
        mask_NS: Tensor | None,
        weight_S: Tensor | None = None,
    ) -> Attend:
        """Attention of N tokens of one sequence, for `run`.

        Args:
            cache: The keys and values of each layer.
            rows: The positions of the cache that the tokens are written to.
            end: The tokens attend to positions before it.
            mask_NS: Additive, in the model's dtype; None attends to all.
            weight_S: Each layer adds its attention weights to it, as the mean over heads
                and tokens.
        """
        kv_heads, width = self.kv_heads, self.width
        # Heads that share keys are treated as more tokens: R * N in all.
        shared = self.heads // kv_heads
        mask = mask_NS if mask_NS is None else mask_NS.repeat(shared, 1)

        def attend(layer: int, qkv_NHd: Tensor) -> Tensor:
            rows_GSd = cache[layer][:, :end]
            rows_GSd[:, rows] = qkv_NHd[:, self.heads :].transpose(0, 1)
            count = len(qkv_NHd)
            query = qkv_NHd[:, : self.heads].view(count, kv_heads, shared, width)
            query = query.permute(1, 2, 0, 3)
            query = query.reshape(1, kv_heads, shared * count, width)
            keys = rows_GSd[None, :kv_heads]
            values = rows_GSd[None, kv_heads:]
            if weight_S is not None:
                product = query[0] @ keys[0].transpose(1, 2)
                score = product.float() * self.scale
                if mask is not None:
                    score = score + mask
                weight_S.add_(score.softmax(-1).mean((0, 1)))
            # The number of keys comes last: programs for a CPU do not depend on it.
            if mask is not None and cache[layer].is_cuda and keys.shape[2] >= MANY_KEYS:
                mixed = attend_few_rows(query[0], keys[0], values[0], mask, self.scale)
            else:
                mixed = F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, scale=self.scale
                )
            mixed = mixed.view(kv_heads, shared, count, width)
            return mixed.permute(2, 0, 1, 3).reshape(count, -1)

        return attend

    def attend_batch(self, cache: BatchKVCache) -> Attend:
        """Attention of one more token of each sequence, whose keys and values enter `cache`."""
        position_B, mask_BS = cache.append()
        mask = mask_BS[:, None, None]
        count, end = mask_BS.shape
        index_B = torch.arange(count, device=position_B.device)

        def attend(layer: int, qkv_BHd: Tensor) -> Tensor:
            rows_BGSd = cache.rows_YBGSd[layer, :count]
            rows_BGSd[index_B, :, position_B] = qkv_BHd[:, self.heads :]
            query_BHd = qkv_BHd[:, : self.heads]
            keys = rows_BGSd[:, : self.kv_heads, :end]
            values = rows_BGSd[:, self.kv_heads :, :end]
            mixed = F.scaled_dot_product_attention(
                query_BHd.view(count, self.kv_heads, -1, self.width),
                keys,
                values,
                attn_mask=mask,
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
        """Run the layers over N tokens: states by source [N, D].

        Args:
            ids_N: Token ids.
            rope_N: Rotary positions, at most `last`.
            last: The largest rotary position that the table of factors must have.
            attend: The attention, see `attend` and `attend_batch`.
            taps: The sources to keep, by the layer whose input they are.
        """
        self.ensure_rotary_table(last)
        cos_N1d, sin_N1d = self.cos_P1d[rope_N], self.sin_P1d[rope_N]
        hidden_ND = F.embedding(ids_N, self.embed_VD)
        count, width = hidden_ND.shape[0], self.width
        rotated, half = self.heads + self.kv_heads, width // 2
        states: dict[str, Tensor] = {}
        layers: Sequence[_Layer] = self.layers
        if count >= self._packed_from and not torch.compiler.is_compiling():
            layers = self._packed_layers
        for number, layer in enumerate(layers):
            if number in taps:
                states |= dict.fromkeys(taps[number], hidden_ND)

            # Attention: projections, rotary embedding in place, residual.
            normed_ND = rms_norm(hidden_ND, layer.norm_in, layer.eps)
            qkv = layer.project(normed_ND)
            qkv_NHd = qkv.view(count, -1, width)
            qk_NHd = qkv_NHd[:, :rotated]
            if layer.norm_qk_Hd is not None:
                scaled_NHd = F.rms_norm(qk_NHd, (width,), None, layer.eps)
                qk_NHd.copy_(scaled_NHd * layer.norm_qk_Hd)
            rolled_NHd = qk_NHd.roll(half, -1)
            qk_NHd.mul_(cos_N1d).addcmul_(rolled_NHd, sin_N1d)
            mixed_ND = attend(number, qkv_NHd)
            hidden_ND = layer.add_attention(hidden_ND, mixed_ND)

            # MLP.
            normed_ND = rms_norm(hidden_ND, layer.norm_mlp, layer.eps)
            gate_up = layer.widen(normed_ND)
            gate_NM, up_NM = gate_up.chunk(2, -1)
            inner_NM = self.act(gate_NM).mul_(up_NM)
            hidden_ND = layer.add_mlp(hidden_ND, inner_NM)
        states["hidden"] = rms_norm(hidden_ND, *self.norm)
        return states


def attend_few_rows(
    query_GNd: Tensor, key_GSd: Tensor, value_GSd: Tensor, mask_NS: Tensor, scale: float
) -> Tensor:
    """Masked attention as two matrix products, for few queries and many keys on a GPU: [G, N, d].

    With a mask, PyTorch's kernels read all keys of a head in one block: a GPU of 132
    processors then works on as many of them as there are heads. Matrix products spread
    over the keys. Without a mask, PyTorch's flash kernel does so, too, and is faster.
    """
    key_GdS = key_GSd.transpose(1, 2)
    if query_GNd.dtype.itemsize == 2:
        score_GNS = torch.bmm(query_GNd, key_GdS, out_dtype=torch.float32)
    else:
        score_GNS = query_GNd @ key_GdS
    weight_GNS = (score_GNS * scale + mask_NS).softmax(-1)
    return torch.bmm(weight_GNS.to(value_GSd.dtype), value_GSd)


def _plus(states_ND: Tensor, bias_D: Tensor | None) -> Tensor:
    return states_ND if bias_D is None else states_ND + bias_D


@dataclass(slots=True)
class _Layer:
    """The weights of one fused layer."""

    qkv: Tensor
    qkv_bias: Tensor | None
    norm_qk_Hd: Tensor | None  # of queries and keys, in Qwen3; repeated for each head
    out_t: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down_t: Tensor
    down_bias: Tensor | None
    norm_in: Tensor
    norm_mlp: Tensor
    eps: float

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """What N tokens are multiplied by: of queries, keys and values, output, MLP in and out."""
        return self.qkv, self.out_t.t(), self.gate_up, self.down_t.t()

    def project(self, normed_ND: Tensor) -> Tensor:
        """Queries, keys and values."""
        return F.linear(normed_ND, self.qkv, self.qkv_bias)

    def add_attention(self, hidden_ND: Tensor, mixed_ND: Tensor) -> Tensor:
        """The states after the attention's output projection."""
        residual_ND = _plus(hidden_ND, self.out_bias)
        return torch.addmm(residual_ND, mixed_ND, self.out_t)

    def widen(self, normed_ND: Tensor) -> Tensor:
        """The two inputs of the MLP's product."""
        return F.linear(normed_ND, self.gate_up, self.gate_up_bias)

    def add_mlp(self, hidden_ND: Tensor, inner_NM: Tensor) -> Tensor:
        """The states after the MLP's output projection."""
        residual_ND = _plus(hidden_ND, self.down_bias)
        return torch.addmm(residual_ND, inner_NM, self.down_t)


class _PackedLayer(_Layer):
    """A fused layer with packed weights."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__(*map(partial(getattr, layer), layer.__slots__))
        packed = [PackedWeight(weight) for weight in self.matrices]
        self._qkv, self._out, self._gate_up, self._down = packed

    def project(self, normed_ND: Tensor) -> Tensor:
        return self._qkv.times(normed_ND, self.qkv_bias)

    def add_attention(self, hidden_ND: Tensor, mixed_ND: Tensor) -> Tensor:
        return hidden_ND + self._out.times(mixed_ND, self.out_bias)

    def widen(self, normed_ND: Tensor) -> Tensor:
        return self._gate_up.times(normed_ND, self.gate_up_bias)

    def add_mlp(self, hidden_ND: Tensor, inner_NM: Tensor) -> Tensor:
        return hidden_ND + self._down.times(inner_NM, self.down_bias)


def _fuse(layer: Any, width: int) -> _Layer:
    attention = layer.self_attn
    mlp = layer.mlp
    out = attention.o_proj
    down = mlp.down_proj
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    for module in (*inputs, out, mlp.gate_proj, mlp.up_proj, down):
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise TargetError(
                f"decoding needs plain weights, not {kind}: load the model unquantized"
            )
    qkv, qkv_bias = _merge(inputs)
    gate_up, gate_up_bias = _merge((mlp.gate_proj, mlp.up_proj))
    return _Layer(
        qkv=qkv,
        qkv_bias=qkv_bias,
        norm_qk_Hd=_norm_of_queries_and_keys(attention, width),
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


def _norm_of_queries_and_keys(attention: Any, width: int) -> Tensor | None:
    """The weights of the norms [H, d] of all query heads and key heads; None without norms."""
    if not hasattr(attention, "q_norm"):
        return None
    query_heads = attention.q_proj.weight.shape[0] // width
    key_heads = attention.k_proj.weight.shape[0] // width
    weights = [attention.q_norm.weight] * query_heads
    weights += [attention.k_norm.weight] * key_heads
    return torch.stack(weights)


def _merge(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix and one bias for several projections of the same input.

    The weights of the modules become views of them.
    """
    weight = torch.cat([module.weight for module in modules])
    bias = None
    if modules[0].bias is not None:
        bias = torch.cat([module.bias for module in modules])
    end = 0
    for module in modules:
        start, end = end, end + module.out_features
        rows = slice(start, end)
        module.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[rows], requires_grad=False)
    return weight, bias
