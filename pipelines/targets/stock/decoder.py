"""Decodes one sequence with the stock text model, whatever its layers are: the fallback of `fused_decoder`.

What a layer keeps of the past is either keys and values, from which rejected rows are cut, or a state that
cannot be rolled back (linear attention, convolution). Such a state is saved before each pass. Committed rows
are run again from it, unless all rows of the pass are; a tree is run path by path, for a state has one past.

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
        self.cache, self.length, self.next_rope = (
            whole_cache(self.text.config),
            length,
            next_rope,
        )
        self._written: Tensor | None = (
            None  # the tokens of the last pass, as far as they are not committed
        )
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
        if visible_NN is None or torch.equal(
            visible_NN, torch.ones_like(visible_NN).tril()
        ):
            return self._run(ids_N, depth_N, None, sources)  # a chain
        if not self._recurrent:
            return self._run(ids_N, depth_N, visible_NN, sources)
        states: dict[str, Tensor] = {}
        ancestors = visible_NN & ~torch.eye(
            len(ids_N), dtype=torch.bool, device=ids_N.device
        )
        for leaf in torch.nonzero(~ancestors.any(0)).flatten().tolist():
            path = torch.nonzero(visible_NN[leaf]).flatten()
            path = path[depth_N[path].argsort()]
            self._rewind()
            for source, rows in self._run(
                ids_N[path], depth_N[path], None, sources
            ).items():
                states.setdefault(source, rows.new_empty(len(ids_N), rows.shape[1]))[
                    path
                ] = rows
        self._rewind()
        self._written = ids_N
        return states

    def commit(self, rows: Sequence[int]) -> None:
        """See `Target.commit`."""
        written, count = self._written, len(rows)
        assert written is not None, "a forward pass comes first"
        in_order = list(rows) == list(range(count))
        row_K = torch.tensor(rows)
        if self._recurrent and not (in_order and count == len(written) == self._beyond):
            self._rewind()
            depth_K = torch.arange(1, count + 1, device=written.device)
            self._run(written[place(row_K, written.device)], depth_K, None, ())
        elif not in_order:
            for layer in self._attending():
                kept = torch.cat([torch.arange(self.length), row_K + self.length])
                kept = place(kept, layer.keys.device)
                layer.keys = layer.keys.index_select(-2, kept)
                layer.values = layer.values.index_select(-2, kept)
        self.length += count
        self.next_rope += count
        self._cut()
        self._written = None

    @property
    def _beyond(self) -> int:
        """Positions in the cache that are not committed."""
        return (
            max(
                (layer.get_seq_length() for layer in self._attending()),
                default=self.length,
            )
            - self.length
        )

    def _run(
        self,
        ids_N: Tensor,
        depth_N: Tensor,
        visible_NN: Tensor | None,
        sources: Collection[str],
    ) -> dict[str, Tensor]:
        self._saved = [_copied(layer) for layer in self._stateful()]
        self._written = ids_N
        rope_1N = (depth_N + (self.next_rope - 1))[None]
        with watched(self.text.layers, sources) as states, torch.inference_mode():
            out = self.text(
                input_ids=ids_N[None],
                attention_mask=None if visible_NN is None else self._masks(visible_NN),
                position_ids=rope_1N
                if self._axes == 1
                else rope_1N.expand(self._axes, 1, -1),
                use_cache=True,
                **{cache_argument(self.text): self.cache},
            )
        return {
            name: state[0]
            for name, state in {**states, "hidden": out.last_hidden_state}.items()
        }

    def _rewind(self) -> None:
        """Forget the last pass as far as it is not committed."""
        if self._written is not None:
            self._cut()
            for layer, state in zip(self._stateful(), self._saved, strict=True):
                for name, value in state.items():
                    setattr(layer, name, value)
            self._written = None

    def _cut(self) -> None:
        for layer in self._attending():
            layer.keys = layer.keys[..., : self.length, :]
            layer.values = layer.values[..., : self.length, :]

    def _attending(self) -> Iterator[Any]:
        layers = (
            one
            for one in self.cache.layers
            if isinstance(one, cache_utils.DynamicLayer)
        )
        return (layer for layer in layers if layer.keys is not None)

    def _stateful(self) -> Iterator[Any]:
        kind = cache_utils.LinearAttentionCacheLayerMixin
        return (layer for layer in self.cache.layers if isinstance(layer, kind))

    def _masks(self, visible_NN: Tensor) -> Any:
        """Additive masks [1, 1, N, S] in the model's dtype: one, or one per kind of layer."""
        row_N = visible_NN.sum(1) + (
            self.length - 1
        )  # the position of each token: its ancestors are visible
        column_S = torch.cat([torch.arange(self.length, device=row_N.device), row_N])
        far_NS = row_N[:, None] - column_S
        open_NS = F.pad(visible_NN, (self.length, 0), value=True)
        config, masks = self.text.config, dict[str, Tensor]()
        for kind in self._kinds:
            seen_NS = open_NS
            if kind == SLIDING:
                seen_NS = open_NS & (far_NS < config.sliding_window)
            elif kind == CHUNKED:
                size = config.attention_chunk_size
                seen_NS = open_NS & (row_N[:, None] // size == column_S // size)
            closed_NS = torch.zeros(
                seen_NS.shape, dtype=self.text.dtype, device=row_N.device
            )
            closed_NS.masked_fill_(~seen_NS, torch.finfo(self.text.dtype).min)
            masks[kind] = closed_NS[None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


def layer_kinds(config: Any) -> set[str]:
    """The kinds of layers of a text model, as a cache tells them apart."""
    return {
        kind
        for kind in cache_utils.get_layer_types_and_kwargs(config)[0]
        if kind != "dummy"
    }


def whole_cache(config: Any) -> transformers.DynamicCache:
    """A cache that keeps all keys and values, also of layers that attend to a window, to be rolled back.

    TargetError for layers whose cache this project cannot roll back.
    """
    cache = transformers.DynamicCache(config=config)
    known = [cache_utils.DynamicLayer, cache_utils.LinearAttentionLayer]
    if hasattr(cache_utils, "DummyLayer"):  # since transformers 5.23
        known.append(cache_utils.DummyLayer)
    for number, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            cache.layers[number] = cache_utils.DynamicLayer()
        elif type(layer) not in (
            *known,
            cache_utils.LinearAttentionAndFullAttentionLayer,
        ):
            kind = type(layer).__name__
            raise TargetError(
                f"layers with a cache of type {kind} cannot be rolled back after a draft"
            )
    return cache


@contextmanager
def watched(layers: Any, sources: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """The inputs of the layers that `sources` name, as the passes inside run: the last pass's, by source."""
    states: dict[str, Tensor] = {}

    def watch(names: list[str]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.update(
                dict.fromkeys(
                    names, (args[0] if args else kwargs["hidden_states"]).clone()
                )
            )

        return hook

    taps = tapped(sources, len(layers))
    handles = [
        layers[k].register_forward_pre_hook(watch(names), with_kwargs=True)
        for k, names in taps.items()
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _copied(layer: Any) -> dict[str, Any]:
    """The state of a layer, as a pass changes it in place."""
    names = ("conv_states", "recurrent_states", "has_previous_state")
    return {
        name: {
            number: value.clone() if torch.is_tensor(value) else value
            for number, value in getattr(layer, name).items()
        }
        for name in names
    }
