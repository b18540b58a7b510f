"""Decodes one sequence with the target: forward passes after a committed prefix, compiled if asked for.

Shapes: N tokens, S cached and new positions, C capacity of the cache, D hidden width.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.pipelines.targets.checkpoints.folder import first_line
from vlmdistill.pipelines.targets.fused_layers import FusedLayers
from vlmdistill.pipelines.targets.target_kv_cache import TargetKVCache, mark_static
from vlmdistill.pipelines.targets.text_layers import tapped
from vlmdistill.stores.errors import TargetError


class Decoder:
    """One sequence: its committed prefix, and forward passes over tokens after it.

    The shapes of a `compiled` step depend on the number of its tokens and on the capacity
    of the cache, not on the length of the prefix. `torch.compile` makes one program for
    each pair of both, on a GPU a CUDA graph. So the cache is kept between sequences.
    """

    def __init__(
        self, text: Any, layers: FusedLayers | None = None, *, compiled: bool = False
    ):
        self.layers = layers or FusedLayers(text)
        self.next_rope = 0  # of the token at depth 1
        self.passes = 0  # of `extend`, in all sequences
        self._written = 0
        self._closed = torch.finfo(self.layers.embed_VD.dtype).min  # what a mask adds
        self._step = compile_step(self.layers, text.config) if compiled else None
        self.cache = self._empty_cache()

    def _empty_cache(self) -> TargetKVCache:
        return TargetKVCache(
            self.layers.shape, self.layers.embed_VD, static=self._step is not None
        )

    def start(self, length: int, next_rope: int) -> TargetKVCache:
        """An empty cache with room for a prompt of `length`; the caller writes it and sets its length."""
        if self._step:
            self.cache.length = 0
        else:
            self.cache = self._empty_cache()
        self.cache.reserve(length)
        self.next_rope = next_rope
        self._written = 0
        return self.cache

    def extend(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor | None,
        sources: Collection[str],
    ) -> dict[str, Tensor]:
        """See `Target.extend`."""
        self.passes += 1
        count = self._written = len(ids_N)
        taps = tapped(sources, len(self.layers.layers))
        start = self.cache.length
        end = start + count
        self.cache.reserve(end)
        if self._step:
            unused = self.cache.capacity - end
            mask_NS = self._mask(start, count, visible_NN)
            mask_NC = F.pad(mask_NS, (0, unused), value=self._closed)
            rows_N = torch.arange(start, end, device=ids_N.device)
            rope_N = depth_N + (self.next_rope - 1)
            return self._step(ids_N, rope_N, mask_NC, rows_N, self.cache.layers, taps)
        last = self.next_rope + count
        mask: Tensor | None = None
        rope: Tensor | slice = slice(self.next_rope, last)
        if count > 1:
            mask = self._mask(start, count, visible_NN)
            rope = depth_N + (self.next_rope - 1)
        attend = self.layers.attend(self.cache.layers, slice(start, end), end, mask)
        return self.layers.run(ids_N, rope, last, attend, taps)

    def attention(self, ids_N: Tensor, rope_N: Tensor, first: int) -> Tensor:
        """The attention of the prefix's last N tokens to each position: float32 [S].

        It is the mean over the tokens, which begin at `first`, and over all heads and
        layers. The tokens' rows of the cache are written again, unchanged.
        """
        end = first + len(ids_N)
        weight_S = torch.zeros(end, device=ids_N.device)
        mask_NS = self._mask(first, len(ids_N), None)
        attend = self.layers.attend(
            self.cache.layers, slice(first, end), end, mask_NS, weight_S
        )
        last = int(rope_N.max()) + 1
        self.layers.run(ids_N, rope_N, last, attend, {})
        return weight_S / len(self.layers.layers)

    def _mask(self, start: int, count: int, visible_NN: Tensor | None) -> Tensor:
        """Additive [N, S], in the model's dtype: all attention kernels agree on this form."""
        like = self.layers.embed_VD
        closed_NN = like.new_full((count, count), self._closed)
        if visible_NN is None:
            return F.pad(closed_NN.triu_(1), (start, 0))
        return F.pad(closed_NN.masked_fill_(visible_NN, 0), (start, 0))

    def commit(self, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        self.cache.commit(rows, self._written)
        self.next_rope += len(rows)
        self._written = 0


CompiledStep = Callable[
    [Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], dict[int, list[str]]],
    dict[str, Tensor],
]
"""Token ids [N], rotary positions [N], an additive mask [N, C], rows to write [N], cache, taps."""


def compile_step(layers: FusedLayers, config: Any) -> CompiledStep:
    """A step of `layers` as one compiled program; on a GPU it is replayed as a CUDA graph.

    The table of rotary factors has all positions of the text model's `config` from the
    start: a larger table would compile again. The first call raises TargetError if the
    step does not compile.
    """
    # The compiler takes seconds to import.
    from torch._dynamo.exc import TorchDynamoException

    layers.ensure_rotary_table(config.max_position_embeddings)
    for layer in layers.layers:
        weights = map(partial(getattr, layer), layer.__slots__)
        mark_static(*(weight for weight in weights if torch.is_tensor(weight)))
    mark_static(layers.embed_VD, layers.norm[0], layers.cos_P1d, layers.sin_P1d)
    on_gpu = layers.embed_VD.is_cuda

    def step(
        ids_N: Tensor,
        rope_N: Tensor,
        mask_NC: Tensor,
        rows_N: Tensor,
        cache: Sequence[Tensor],
        taps: dict[int, list[str]],
    ) -> dict[str, Tensor]:
        attend = layers.attend(cache, rows_N, None, mask_NC)
        return layers.run(ids_N, rope_N, 0, attend, taps)

    mode = "reduce-overhead" if on_gpu else None
    compiled = torch.compile(step, fullgraph=True, mode=mode)

    def run(*inputs: Any) -> dict[str, Tensor]:
        try:
            return compiled(*inputs)
        except TorchDynamoException as error:
            reason = first_line(getattr(error, "inner_exception", error))
            raise TargetError(
                f"the decoding steps do not compile ({reason}): omit --compile"
            ) from error

    return run
