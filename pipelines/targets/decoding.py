"""Decoding steps over the target's own weights: fused, and without a module call per operation.

The stock modules spend more than half of a small model's step on overhead. `FusedLayers` does the same
arithmetic for a few tokens after a cached prefix: the same weights, the projections made one.

Shapes: N tokens, S cached and new positions, K committed rows, D hidden width, V vocabulary, M width of
the MLP, H heads, G key/value heads, d head width, C capacity of the cache, Y layers, P rotary positions.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.pipelines.targets.folder import first_line
from vlmdistill.pipelines.targets.layers import tapped
from vlmdistill.stores.errors import TargetError

ROOM = 256  # positions that a cache grows by, at least


class Decoder:
    """One sequence: what is committed, and steps from there.

    The shapes of a `compiled` one's steps depend on how many tokens they are of and on the capacity of the
    cache, which it keeps from sequence to sequence, not on what is committed: `torch.compile` makes a program
    of them, and on a GPU a CUDA graph of each.
    """

    def __init__(self, text: Any, layers: "FusedLayers | None" = None, *, compiled: bool = False):
        self.layers = layers or FusedLayers(text)
        self.next_rope = 0  # of the token at depth 1
        self._written = 0
        self._closed = torch.finfo(self.layers.embed_VD.dtype).min  # what a mask adds
        self._step = compile_step(self.layers) if compiled else None
        self.cache = self.layers.prefix(even=compiled)

    def start(self, length: int, next_rope: int) -> "Prefix":
        """An empty cache with room for a prompt of `length`, counted as committed once it is written."""
        if self._step:
            self.cache.length = 0
        else:
            self.cache = self.layers.prefix()
        self.cache.reserve(length)
        self.next_rope, self._written = next_rope, 0
        return self.cache

    def extend(
        self, ids_N: Tensor, depth_N: Tensor, visible_NN: Tensor | None, sources: Collection[str]
    ) -> dict[str, Tensor]:
        """See `Target.extend`."""
        count = self._written = len(ids_N)
        taps = tapped(sources, len(self.layers.layers))
        if self._step:
            start = self.cache.length
            self.cache.reserve(start + count)
            self.layers.turn(self.next_rope + count)
            unused = self.cache.capacity - start - count
            mask_NC = F.pad(self._mask(count, visible_NN), (0, unused), value=self._closed)
            rows_N = torch.arange(start, start + count, device=ids_N.device)
            place_N = depth_N + (self.next_rope - 1)
            return self._step(ids_N, place_N, mask_NC, rows_N, self.cache.layers, taps)
        mask_NS: Tensor | None = None
        place: Tensor | slice = slice(self.next_rope, self.next_rope + 1)
        if count > 1:
            place = depth_N + (self.next_rope - 1)
            mask_NS = self._mask(count, visible_NN)
        attend = self.layers.attend(self.cache, count, mask_NS)
        return self.layers.run(ids_N, place, self.next_rope + count, attend, taps)

    def attention(self, ids_N: Tensor, place_N: Tensor, first: int) -> Tensor:
        """How much N tokens of the prefix, from index `first`, attend to each of its positions: float32 [S].

        Mean over the tokens, all heads and layers; the prefix is written again as it was.
        """
        whole, self.cache.length = self.cache.length, first
        weight_S = torch.zeros(whole, device=ids_N.device)
        mask_NS = self._mask(len(ids_N), None)
        try:
            attend = self.layers.attend(self.cache, len(ids_N), mask_NS, weight_S)
            self.layers.run(ids_N, place_N, int(place_N.max()) + 1, attend, {})
        finally:
            self.cache.length = whole
        return weight_S / len(self.layers.layers)

    def _mask(self, count: int, visible_NN: Tensor | None) -> Tensor:
        """Additive, in the model's dtype: the one form that all attention kernels read alike."""
        like = self.layers.embed_VD
        closed_NN = like.new_full((count, count), self._closed)
        mask_NN = closed_NN.triu_(1) if visible_NN is None else closed_NN.masked_fill_(visible_NN, 0)
        return F.pad(mask_NN, (self.cache.length, 0))

    def commit(self, rows_K: Tensor) -> None:
        """See `Target.commit`."""
        self.cache.keep(rows_K, self._written)
        self.next_rope += len(rows_K)
        self._written = 0


class Prefix:
    """The keys and values of one sequence: written once, never concatenated, rolled back for free.

    Rows beyond `length` are what the last forward pass wrote; they count only once committed. The capacity of
    an `even` one is a power of two, and what nobody wrote is zero: a step may look at all of it.
    """

    def __init__(self, layers: int, heads: int, width: int, like: Tensor, *, even: bool = False):
        self.length = 0
        self._even = even
        self._shape = (layers, 2 * heads, width)
        self._heads = heads
        self._like = like
        self._make(0)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in all."""
        if length > self.capacity:
            blocks = self._blocks
            self._make(max(length + ROOM, 2 * self.capacity))
            for new, old in zip(self._blocks, blocks, strict=True):
                new[..., : self.length, :] = old[..., : self.length, :]

    def _make(self, capacity: int) -> None:
        layers, heads, width = self._shape
        if self._even:  # compiled code copies what is written by way of a view
            self.capacity = 1 << (capacity - 1).bit_length()
            self.layers = tuple(self._like.new_zeros(heads, self.capacity, width) for _ in range(layers))
            self._blocks = self.layers
            _stays(*self.layers)
        else:
            self.capacity = capacity
            rows_YGCd = self._like.new_empty(layers, heads, capacity, width)  # G: keys, then values
            self.layers, self._blocks = tuple(rows_YGCd), (rows_YGCd,)

    def update(self, key_1GNd: Tensor, value_1GNd: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """The one call that stock attention layers make: store, and return all keys and values."""
        end = self.length + key_1GNd.shape[2]
        rows = self.layers[layer][None, :, :end]
        key, value = rows[:, : self._heads], rows[:, self._heads :]
        key[:, :, self.length :] = key_1GNd
        value[:, :, self.length :] = value_1GNd
        return key, value

    def keep(self, rows_K: Tensor, written: int) -> None:
        """Commit those of the `written` rows after the prefix, in that order."""
        count = len(rows_K)
        in_place = count == written == 1 or (
            not rows_K.is_cuda and rows_K.tolist() == list(range(count))  # a look would make a GPU wait
        )
        if not in_place:
            for block in self._blocks:
                new = block[..., self.length : self.length + written, :]
                new[..., :count, :] = new.index_select(-2, rows_K.to(new.device))
        self.length += count


Attend = Callable[[int, Tensor], Tensor]  # layer, and its qkv [N, H, d]: what is attended to, [N, D]


class FusedLayers:
    """Decoding steps over the target's own weights: N tokens, each after what `attend` lets it see.

    The query, key and value matrices of a layer are made one, and so are gate and up; the model's
    own modules become views of the fused matrices, so that no weight is held twice.
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
        self._rotate(1024)

    def prefix(self, *, even: bool = False) -> Prefix:
        """An empty cache of the right shape."""
        return Prefix(len(self.layers), self.kv_heads, self.width, self.embed_VD, even=even)

    def turn(self, last: int) -> None:
        """See to it that the tables of rotary factors reach the position `last`."""
        if last >= len(self.cos_P1d):
            self._rotate(2 * last)

    def _rotate(self, positions: int) -> None:
        """Tables of the rotary factors of text positions; the sign of the rotated half is in the sine."""
        place_3P = torch.arange(positions, device=self.embed_VD.device).expand(3, 1, -1)
        multi = hasattr(self.rotary, "mrope_section")
        cos_1Pd, sin_1Pd = self.rotary(self.embed_VD[:1], place_3P if multi else place_3P[0])
        self.cos_P1d, self.sin_P1d = cos_1Pd[0][:, None], sin_1Pd[0][:, None].clone()
        self.sin_P1d[..., : self.width // 2].neg_()

    def attend(
        self, cache: Prefix, count: int, mask_NS: Tensor | None, attention_S: Tensor | None = None
    ) -> Attend:
        """`count` tokens of one sequence, after those that `cache` holds; each layer writes theirs into it.

        `mask_NS` is additive, in the model's dtype, over the prefix and the N tokens; None attends to all.
        To `attention_S` each layer adds the mean over heads and tokens of its attention weights.
        """
        start, end = cache.length, cache.length + count
        cache.reserve(end)
        mask_NS = self._shared(mask_NS)

        def attend(number: int, qkv_NHd: Tensor) -> Tensor:
            rows_GSd = cache.layers[number][:, :end]
            rows_GSd[:, start:] = qkv_NHd[:, self.heads :].transpose(0, 1)
            return self._mix(qkv_NHd, rows_GSd, mask_NS, attention_S)

        return attend

    def attend_all(self, cache: Sequence[Tensor], rows_N: Tensor, mask_NC: Tensor) -> Attend:
        """As `attend`, over all C rows of a cache, of which `rows_N` are written: shapes stay the same."""

        shared_NC = self._shared(mask_NC)

        def attend(number: int, qkv_NHd: Tensor) -> Tensor:
            rows_GCd = cache[number]
            rows_GCd[:, rows_N] = qkv_NHd[:, self.heads :].transpose(0, 1)
            return self._mix(qkv_NHd, rows_GCd, shared_NC)

        return attend

    def _shared(self, mask_NS: Tensor | None) -> Tensor | None:
        """The heads that share keys are laid out as more tokens."""
        return mask_NS if mask_NS is None else mask_NS.repeat(self.heads // self.kv_heads, 1)

    def _mix(
        self, qkv_NHd: Tensor, rows_GSd: Tensor, mask_NS: Tensor | None, attention_S: Tensor | None = None
    ) -> Tensor:
        """Attention of N tokens to S rows of keys, then values: [N, D]; the mask is of `_shared` heads."""
        kv_heads, width, count = self.kv_heads, self.width, len(qkv_NHd)
        shared = self.heads // kv_heads
        query = qkv_NHd[:, : self.heads].view(count, kv_heads, shared, width).permute(1, 2, 0, 3)
        query = query.reshape(1, kv_heads, shared * count, width)
        if attention_S is not None:
            score_GNS = (query[0] @ rows_GSd[:kv_heads].transpose(1, 2)).float() * self.scale
            weight_GNS = (score_GNS if mask_NS is None else score_GNS + mask_NS).softmax(-1)
            attention_S.add_(weight_GNS.mean((0, 1)))
        mixed = F.scaled_dot_product_attention(
            query,
            rows_GSd[None, :kv_heads],
            rows_GSd[None, kv_heads:],
            attn_mask=mask_NS,
            scale=self.scale,
        )
        return mixed.view(kv_heads, shared, count, width).permute(2, 0, 1, 3).reshape(count, -1)

    def run(
        self,
        ids_N: Tensor,
        place_N: Tensor | slice,
        last: int,
        attend: Attend,
        taps: dict[int, list[str]],
    ) -> dict[str, Tensor]:
        """States by source [N, D]; `place_N` are rotary positions, none beyond `last`."""
        self.turn(last)
        cos_N1d, sin_N1d = self.cos_P1d[place_N], self.sin_P1d[place_N]
        hidden_ND = F.embedding(ids_N, self.embed_VD)
        count, width = hidden_ND.shape[0], self.width
        turned, half = self.heads + self.kv_heads, width // 2
        states: dict[str, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in taps:
                states |= dict.fromkeys(taps[number], hidden_ND)
            normed_ND = F.rms_norm(hidden_ND, layer.norm_in.shape, layer.norm_in, layer.eps)
            qkv_NHd = F.linear(normed_ND, layer.qkv, layer.qkv_bias).view(count, -1, width)
            qk_NHd = qkv_NHd[:, :turned]
            if layer.norm_qk_Hd is not None:
                qk_NHd.copy_(F.rms_norm(qk_NHd, (width,), None, layer.eps) * layer.norm_qk_Hd)
            rolled_NHd = qk_NHd.roll(half, -1)
            qk_NHd.mul_(cos_N1d).addcmul_(rolled_NHd, sin_N1d)
            mixed_ND = attend(number, qkv_NHd)
            hidden_ND = torch.addmm(_plus(hidden_ND, layer.out_bias), mixed_ND, layer.out_t)
            normed_ND = F.rms_norm(hidden_ND, layer.norm_mlp.shape, layer.norm_mlp, layer.eps)
            gate_NM, up_NM = F.linear(normed_ND, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            held_ND = _plus(hidden_ND, layer.down_bias)
            hidden_ND = torch.addmm(held_ND, self.act(gate_NM).mul_(up_NM), layer.down_t)
        weight_D, eps = self.norm
        states["hidden"] = F.rms_norm(hidden_ND, weight_D.shape, weight_D, eps)
        return states


def _plus(states_ND: Tensor, bias_D: Tensor | None) -> Tensor:
    return states_ND if bias_D is None else states_ND + bias_D


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], dict[int, list[str]]], dict[str, Tensor]]
"""Tokens [N], their rotary positions [N], an additive mask [N, C], the rows to write [N], the cache, taps."""


def compile_step(layers: FusedLayers) -> Step:
    """A step of `layers` as one compiled program; on a GPU it is replayed as a CUDA graph."""
    from torch._dynamo.exc import TorchDynamoException  # the compiler takes seconds to import

    for layer in layers.layers:
        _stays(
            *(weight for weight in map(partial(getattr, layer), layer.__slots__) if torch.is_tensor(weight))
        )
    _stays(layers.embed_VD, layers.norm[0], layers.cos_P1d, layers.sin_P1d)
    on_gpu = layers.embed_VD.is_cuda

    def step(
        ids_N: Tensor,
        place_N: Tensor,
        mask_NC: Tensor,
        rows_N: Tensor,
        cache: Sequence[Tensor],
        taps: dict[int, list[str]],
    ) -> dict[str, Tensor]:
        return layers.run(ids_N, place_N, 0, layers.attend_all(cache, rows_N, mask_NC), taps)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead" if on_gpu else None)

    def run(*given: Any) -> dict[str, Tensor]:
        try:
            return compiled(*given)
        except TorchDynamoException as error:
            why = first_line(getattr(error, "inner_exception", error))
            raise TargetError(f"the decoding steps do not compile ({why}): leave out --compile") from error

    return run


def _stays(*tensors: Tensor) -> None:
    """Where they lie is part of a CUDA graph: they are not copied for each replay."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


@dataclass(slots=True)
class _Layer:
    """The weights of one fused layer."""

    qkv: Tensor
    qkv_bias: Tensor | None
    norm_qk_Hd: Tensor | None  # Qwen3: queries and keys are normed, one weight for each head here
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
    for module in (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        out,
        mlp.gate_proj,
        mlp.up_proj,
        down,
    ):
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise TargetError(f"decoding needs plain weights, not {kind}: load the model unquantized")
    qkv, qkv_bias = _merge((attention.q_proj, attention.k_proj, attention.v_proj))
    gate_up, gate_up_bias = _merge((mlp.gate_proj, mlp.up_proj))
    norm_qk_Hd = None
    if hasattr(attention, "q_norm"):
        heads = [attention.q_norm.weight] * (attention.q_proj.weight.shape[0] // width)
        norm_qk_Hd = torch.stack(
            heads + [attention.k_norm.weight] * (attention.k_proj.weight.shape[0] // width)
        )
    return _Layer(
        qkv=qkv,
        qkv_bias=qkv_bias,
        out_t=out.weight.t(),
        out_bias=out.bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down_t=down.weight.t(),
        down_bias=down.bias,
        norm_in=layer.input_layernorm.weight,
        norm_mlp=layer.post_attention_layernorm.weight,
        norm_qk_Hd=norm_qk_Hd,
        eps=float(layer.input_layernorm.variance_epsilon),
    )


def _merge(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix and one bias for several projections of the same input, which become views of it."""
    weight = torch.cat([module.weight for module in modules])
    bias = torch.cat([module.bias for module in modules]) if modules[0].bias is not None else None
    row = 0
    for module in modules:
        rows = slice(row, row := row + module.out_features)
        module.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[rows], requires_grad=False)
    return weight, bias
