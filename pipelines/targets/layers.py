"""The stock text layers one by one, so that the input of every layer is a value in hand and needs no hook.

Shapes: B samples, L positions, A rotary axes, D hidden width.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from vlmdistill.pipelines.targets.family import Visual
from vlmdistill.stores.errors import TargetError


def tapped(sources: Collection[str], layers: int) -> dict[int, list[str]]:
    """Which layers' inputs are asked for, by the sources' names; TargetError for one that is not there."""
    taps: dict[int, list[str]] = {}
    for source in sorted(set(sources) - {"hidden"}):
        layer = 0 if source == "embed" else int(source.removeprefix("layer"))
        if layer >= layers:
            raise TargetError(f"the target has layers 0 to {layers - 1}: {source} cannot be captured")
        taps.setdefault(layer, []).append(source)
    return taps


def causal(length: int, like: Tensor) -> Tensor:
    """The additive causal mask [1, 1, L, L] in the dtype of `like`."""
    mask_LL = torch.full((length, length), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return mask_LL.triu(1)[None, None]


def run_layers(
    text: Any,
    hidden_BLD: Tensor,
    rope_ABL: Tensor,
    *,
    mask: Tensor | None,
    sources: Collection[str],
    cache: Any = None,
    visual_BL: Tensor | None = None,
    visual: Visual | None = None,
) -> dict[str, Tensor]:
    """Run input embeddings through the stock layers of text model `text`: states by source, [B, L, D]."""
    taps = tapped(sources, len(text.layers))
    position = rope_ABL if len(rope_ABL) == 3 else rope_ABL[0]
    rotary = text.rotary_emb(hidden_BLD, position)
    deepstack = visual.deepstack if visual is not None else ()
    states: dict[str, Tensor] = {}
    for number, layer in enumerate(text.layers):
        states |= dict.fromkeys(taps.get(number, ()), hidden_BLD)
        hidden_BLD = layer(
            hidden_BLD, attention_mask=mask, position_embeddings=rotary, past_key_values=cache, use_cache=True
        )
        if number < len(deepstack):
            hidden_BLD = hidden_BLD.clone()
            hidden_BLD[visual_BL] += deepstack[number]
    states["hidden"] = text.norm(hidden_BLD)
    return states
