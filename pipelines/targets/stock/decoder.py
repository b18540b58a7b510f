"""Decodes one sequence with the stock text model of any layers: the fallback of `fused_decoder`.

A layer caches either keys and values, from which rejected rows are cut, or a recurrent
state (linear attention, convolution), which cannot be rolled back. Such a state is saved
before each pass. Committed rows are run again from it, unless the pass is committed whole;
a tree is run path by path, since a state has one past.

Shapes: N tokens of a pass, S cached and new positions, K committed rows, D hidden width.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import cache_utils

from vlmdistill.drafters.core.transfer import place
from vlmdistill.pipelines.targets.text_layers import cache_argument, tapped
from vlmdistill.stores.errors import TargetError

State = list[dict[str, Any]]  # of each layer that has one
CHUNKED, SLIDING, FULL = "chunked_attention", "sliding_attention", "full_attention"


class StockDecoder:
    """One sequence: its committed prefix, and forward passes of the stock text model after it."""

    def __init__(self, text: Any, axes: int):
        self.text = text
        self.next_rope = 0  # of the token at depth 1
        self.passes = 0  # of `extend`, in all sequences
        self._axes = axes  # of a rotary position
        self._kinds = layer_kinds(text.config)
        self._recurrent = bool(self._kinds - {FULL, SLIDING, CHUNKED})
        self.start(0, 0)

    def start(self, length: int, next_rope: int) -> transformers.DynamicCache:
        """An empty cache; the caller runs a prompt of `length` into it."""
        self.cache = whole_cache(self.text.config)
        self.length = length
        self.next_rope = next_rope
        self._written: Tensor | None = None  # the tokens of a pass before `commit`
        self._saved: State = []
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
        self._rewind()
        if visible_NN is None or _is_chain(visible_NN):
            return self._run(ids_N, depth_N, None, sources)
        if not self._recurrent:
            return self._run(ids_N, depth_N, visible_NN, sources)
        return self._run_paths(ids_N, depth_N, visible_NN, sources)

    def _run_paths(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor,
        sources: Collection[str],
    ) -> dict[str, Tensor]:
        """A tree path by path, from the root to each leaf: states by source [N, D]."""
        count = len(ids_N)
        states: dict[str, Tensor] = {}
        for leaf in _leaves(visible_NN):
            path = torch.nonzero(visible_NN[leaf]).flatten()
            path = path[depth_N[path].argsort()]
            self._rewind()
            path_states = self._run(ids_N[path], depth_N[path], None, sources)
            for source, rows in path_states.items():
                if source not in states:
                    states[source] = rows.new_empty(count, rows.shape[1])
                states[source][path] = rows
        self._rewind()
        self._written = ids_N
        return states

    def commit(self, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        written_N = self._written
        assert written_N is not None, "a forward pass comes first"
        count = len(rows)
        row_K = torch.tensor(rows)
        in_order = list(rows) == list(range(count))
        is_whole_pass = in_order and count == len(written_N) == self._beyond
        if self._recurrent and not is_whole_pass:
            self._rewind()
            ids_K = written_N[place(row_K, written_N.device)]
            depth_K = torch.arange(1, count + 1, device=written_N.device)
            self._run(ids_K, depth_K, None, ())
        elif not in_order:
            self._select(row_K)
        self.length += count
        self.next_rope += count
        self._cut()
        self._written = None

    def _select(self, row_K: Tensor) -> None:
        """Keep these rows of the last pass in the layers that attend, in this order."""
        position_S = torch.cat([torch.arange(self.length), row_K + self.length])
        for layer in self._attending():
            kept_S = place(position_S, layer.keys.device)
            layer.keys = layer.keys.index_select(-2, kept_S)
            layer.values = layer.values.index_select(-2, kept_S)

    @property
    def _beyond(self) -> int:
        """Positions in the cache that are not committed."""
        lengths = [layer.get_seq_length() for layer in self._attending()]
        return max(lengths, default=self.length) - self.length

    def _run(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor | None,
        sources: Collection[str],
    ) -> dict[str, Tensor]:
        """A pass of the stock text model: states by source [N, D]."""
        self._saved = [_copied(layer) for layer in self._stateful()]
        self._written = ids_N
        masks = None if visible_NN is None else self._masks(visible_NN)
        rope = (depth_N + (self.next_rope - 1))[None]
        if self._axes > 1:
            rope = rope.expand(self._axes, 1, -1)
        caching = {cache_argument(self.text): self.cache, "use_cache": True}
        with (
            watched(self.text.layers, sources) as watched_states,
            torch.inference_mode(),
        ):
            output = self.text(
                input_ids=ids_N[None],
                attention_mask=masks,
                position_ids=rope,
                **caching,
            )
        states = {source: state_1ND[0] for source, state_1ND in watched_states.items()}
        states["hidden"] = output.last_hidden_state[0]
        return states

    def _rewind(self) -> None:
        """Forget the last pass, unless it is committed."""
        if self._written is None:
            return
        self._cut()
        for layer, state in zip(self._stateful(), self._saved, strict=True):
            for name, value in state.items():
                setattr(layer, name, value)
        self._written = None

    def _cut(self) -> None:
        """Drop the keys and values that are not committed."""
        for layer in self._attending():
            layer.keys = layer.keys[..., : self.length, :]
            layer.values = layer.values[..., : self.length, :]

    def _attending(self) -> Iterator[Any]:
        """The layers of the cache that have keys and values."""
        for layer in self.cache.layers:
            is_attention = isinstance(layer, cache_utils.DynamicLayer)
            if is_attention and layer.keys is not None:
                yield layer

    def _stateful(self) -> Iterator[Any]:
        """The layers of the cache that have a recurrent state."""
        for layer in self.cache.layers:
            if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
                yield layer

    def _masks(self, visible_NN: Tensor) -> Any:
        """Additive masks [1, 1, N, S] in the model's dtype: one, or one per kind of layer."""
        config = self.text.config
        dtype = self.text.dtype
        # The position of each token: behind the prefix and its ancestors in the tree.
        query_N1 = visible_NN.sum(1, keepdim=True) + (self.length - 1)
        prefix_S = torch.arange(self.length, device=query_N1.device)
        key_S = torch.cat([prefix_S, query_N1[:, 0]])
        tree_NS = F.pad(visible_NN, (self.length, 0), value=True)
        masks = dict[str, Tensor]()
        for kind in self._kinds:
            open_NS = tree_NS
            if kind == SLIDING:
                open_NS = tree_NS & (query_N1 - key_S < config.sliding_window)
            elif kind == CHUNKED:
                size = config.attention_chunk_size
                open_NS = tree_NS & (query_N1 // size == key_S // size)
            mask_NS = torch.zeros(open_NS.shape, dtype=dtype, device=key_S.device)
            mask_NS.masked_fill_(~open_NS, torch.finfo(dtype).min)
            masks[kind] = mask_NS[None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


def _is_chain(visible_NN: Tensor) -> bool:
    """Whether each token sees all tokens before it."""
    return torch.equal(visible_NN, torch.ones_like(visible_NN).tril())


def _leaves(visible_NN: Tensor) -> list[int]:
    """The tokens of a tree that no other token sees."""
    itself_NN = torch.eye(len(visible_NN), dtype=torch.bool, device=visible_NN.device)
    descendants_NN = visible_NN & ~itself_NN
    is_leaf_N = ~descendants_NN.any(0)
    leaves: list[int] = torch.nonzero(is_leaf_N).flatten().tolist()
    return leaves


def layer_kinds(config: Any) -> set[str]:
    """The kinds of layers of a text model, as a cache tells them apart."""
    kinds, _ = cache_utils.get_layer_types_and_kwargs(config)
    return set(kinds) - {"dummy"}


def whole_cache(config: Any) -> transformers.DynamicCache:
    """A cache that keeps all keys and values, and can be rolled back.

    Layers that attend to a window keep those before it, too. TargetError for layers
    whose cache this project cannot roll back.
    """
    cache = transformers.DynamicCache(config=config)
    supported = [
        cache_utils.DynamicLayer,
        cache_utils.LinearAttentionLayer,
        cache_utils.LinearAttentionAndFullAttentionLayer,
    ]
    if hasattr(cache_utils, "DummyLayer"):  # since transformers 5.23
        supported.append(cache_utils.DummyLayer)
    for number, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            cache.layers[number] = cache_utils.DynamicLayer()
        elif type(layer) not in supported:
            kind = type(layer).__name__
            raise TargetError(
                f"layers with a cache of type {kind} cannot be rolled back after a draft"
            )
    return cache


@contextmanager
def watched(layers: Any, sources: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """The inputs of layers in the last forward pass inside the block, by source."""
    states: dict[str, Tensor] = {}

    def watch(names: list[str]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            states.update(dict.fromkeys(names, state.clone()))

        return hook

    handles = []
    for number, names in tapped(sources, len(layers)).items():
        hook = watch(names)
        handle = layers[number].register_forward_pre_hook(hook, with_kwargs=True)
        handles.append(handle)
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _copied(layer: Any) -> dict[str, Any]:
    """A copy of a layer's recurrent state, which a pass changes in place."""
    copied: dict[str, Any] = {}
    for name in ("conv_states", "recurrent_states", "has_previous_state"):
        values = dict(getattr(layer, name))
        for number, value in values.items():
            if torch.is_tensor(value):
                values[number] = value.clone()
        copied[name] = values
    return copied
