"""Runs the stock text layers one by one, so that the input of each layer can be kept without hooks.

Shapes: B samples, L positions, A rotary axes, D hidden width, U visual tokens, G key heads, d head width.
"""

from collections.abc import Collection
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from vlmdistill.stores.errors import TargetError


class LayerCache(Protocol):
    """The interface of a KV cache that the stock attention layers call."""

    def update(
        self, key_BGLd: Tensor, value_BGLd: Tensor, layer: int, /, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a layer; return the ones that it attends to.

        From transformers 5.24 on, layers also pass the arguments of their own call.
        """
        ...


def tapped(sources: Collection[str], layers: int) -> dict[int, list[str]]:
    """The sources by the layer whose input they are; TargetError for a layer that does not exist."""
    taps: dict[int, list[str]] = {}
    for source in sorted(set(sources) - {"hidden"}):
        layer = 0 if source == "embed" else int(source.removeprefix("layer"))
        if layer >= layers:
            raise TargetError(
                f"the target has layers 0 to {layers - 1}: {source} cannot be captured"
            )
        taps.setdefault(layer, []).append(source)
    return taps


def cache_argument(module: Any) -> str:
    """The name of the KV cache in a stock module's forward pass: transformers 5.24 renamed it."""
    arguments = signature(type(module).forward).parameters
    return "cache" if "cache" in arguments else "past_key_values"


@dataclass(frozen=True)
class LayerInputs:
    """The input of layer 0: a right-padded batch with visual embeddings at visual positions."""

    hidden_BLD: Tensor
    rope_ABL: Tensor
    visual_U: Tensor  # the rows of visual positions in the flattened batch [B * L]
    deepstack: tuple[Tensor, ...] = ()
    """Each [U, D]: added at visual positions after layer 0, 1, ..."""


def run_layers(
    text: Any,
    inputs: LayerInputs,
    *,
    eager: bool,
    sources: Collection[str],
    cache: LayerCache | None,
) -> dict[str, Tensor]:
    """Run the stock layers of text model `text`: states by source, [B, L, D].

    Eager attention needs an explicit causal mask, the other kernels do not.
    """
    hidden_BLD, rope_ABL = inputs.hidden_BLD, inputs.rope_ABL
    taps = tapped(sources, len(text.layers))
    position = rope_ABL if len(rope_ABL) == 3 else rope_ABL[0]
    rotary = text.rotary_emb(hidden_BLD, position)
    mask = None
    if eager:
        length = hidden_BLD.shape[1]
        closed = torch.finfo(hidden_BLD.dtype).min
        closed_LL = hidden_BLD.new_full((length, length), closed)
        mask = closed_LL.triu(1)[None, None]
    caching = {cache_argument(text.layers[0]): cache, "use_cache": True}
    states: dict[str, Tensor] = {}
    for number, layer in enumerate(text.layers):
        states |= dict.fromkeys(taps.get(number, ()), hidden_BLD)
        hidden_BLD = layer(
            hidden_BLD, attention_mask=mask, position_embeddings=rotary, **caching
        )
        if number < len(inputs.deepstack):
            flat_ND = hidden_BLD.flatten(0, 1)
            added_ND = flat_ND.index_add(0, inputs.visual_U, inputs.deepstack[number])
            hidden_BLD = added_ND.view_as(hidden_BLD)
    states["hidden"] = text.norm(hidden_BLD)
    return states
