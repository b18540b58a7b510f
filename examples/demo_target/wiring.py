"""Initializes the demo target: two attention heads are set by hand and frozen, all else is trained.

The first head copies the previous token, the second looks up visual tokens by the words for them. A model of
this size learns neither in hundreds of steps, but both can be written down. The words for cells start with
orthogonal embeddings, so that a sum of them can be decoded. So does the placeholder of an image: every visual
token has this component and no word has it, so a head can prefer visual tokens to words. Then "two north"
finds the northern cell after two seconds, "second two" the cells that change at that time, and "two appears"
the cell in which something appears. If they were trained, the two heads would degrade before the rest of the
model learns to use them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from examples.demo_target.slides import Slides
from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip
from vlmdistill.pipelines.demo.narration import (
    APPEARS,
    CHANGES,
    END,
    MOVE,
    SAME,
    VANISHES,
)
from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    SHAPES,
    SIZES,
    Scene,
)

EMPTY = "empty"
NOUNS = (
    *(*CELLS, *STAMPS, END, CHANGES, APPEARS, VANISHES, SAME, EMPTY),
    *(*SIZES, *COLOURS, *SHAPES, *BACKGROUNDS, MOVE),
)
"""The words for visual content; those used as keys come first."""

_SEEN = "seen"
_BACK = (
    6.0  # of constant queries and keys: attention to the previous token is then near 1
)
_MATCH = 1.4  # of queries and keys of a word: two words that agree outweigh one by e^7
_PREFER = (
    30.0  # added to the query for visual tokens: it outweighs the words themselves
)
_COPY = 0.1  # of what is found, in units of what the norm makes of it


def meanings(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Tensor]:
    """What each of `NOUNS`, and to be seen, adds to a visual token: `[H]` each."""
    table_VH = model.get_input_embeddings().weight.detach()
    meaning = {noun: table_VH[tokenizer.encode(f" {noun}")].sum(0) for noun in NOUNS}
    meaning[EMPTY] = (
        3**0.5 * meaning[EMPTY]
    )  # it replaces three words: all cells have the same norm
    meaning[SAME] = 2**0.5 * meaning[SAME]  # for two
    return {**meaning, _SEEN: 1.5 * table_VH[model.config.image_token_id]}


def cell_words(
    shown: Scene | Clip | Slides, phase: int | None = None
) -> list[list[str]]:
    """The words for each cell: its position, the background, its item or the item that has just vanished.

    Of a video also the phase, and whether the cell has changed.
    """
    scene = shown if isinstance(shown, Scene) else shown.scene(phase or 0)
    come, gone = ([], []) if isinstance(shown, Scene) else shown.changes(phase or 0)
    held = {
        item.cell: [item.size, item.colour, item.shape]
        for item in (*scene.items, *gone)
    }
    words = [
        [_SEEN, name, scene.background, *held.get(cell, [EMPTY])]
        for cell, name in enumerate(CELLS)
    ]
    if phase is None:
        return words
    changed = {
        item.cell: verb
        for verb, items in ((APPEARS, come), (VANISHES, gone))
        for item in items
    }
    now = [STAMPS[phase], END] if phase == PHASES - 1 else [STAMPS[phase]]
    moved = [] if isinstance(shown, Scene) or not shown.moves(phase) else [MOVE]
    return [
        [
            *known,
            *now,
            *([CHANGES, changed[cell], *moved] if cell in changed else [SAME]),
        ]
        for cell, known in enumerate(words)
    ]


def wire(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Set a head of the first layer to copy the previous token, and one of the second to look up."""
    with torch.no_grad():
        axes_WH = _spread(model.get_input_embeddings().weight, _words(model, tokenizer))
        _look_back(model, axes_WH)
        _look_up(model, axes_WH)


def wired(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[Tensor, Any]]:
    """The weights that `wire` sets, each with an index: training must not change them."""
    found: list[tuple[Tensor, Any]] = [
        (model.get_input_embeddings().weight, torch.tensor(_words(model, tokenizer)))
    ]
    for layer in model.model.language_model.layers[:2]:
        attention = layer.self_attn
        own = slice(attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            found += [(projection.weight, own), (projection.bias, own)]
        found.append((attention.o_proj.weight, (slice(None), own)))
    return found


def _words(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    """The ids of the visual placeholders."""
    ids = [tokenizer.encode(f" {noun}") for noun in NOUNS]
    return [
        model.config.image_token_id,
        *(tokens[0] for tokens in ids if len(tokens) == 1),
    ]


def _spread(table_VH: Tensor, words: Sequence[int]) -> Tensor:
    """Turn the embeddings of words at right angles, as long as the others are; their directions `[W, H]`."""
    axes_HH = torch.linalg.qr(torch.randn(table_VH.shape[1], table_VH.shape[1]))[0]
    axes_WH: Tensor = axes_HH[: len(words)]
    table_VH[words] = axes_WH * table_VH.norm(dim=1).median()
    return axes_WH


def _look_back(model: Qwen2_5_VLForConditionalGeneration, axes_WH: Tensor) -> None:
    """Queries and keys are constant, and turned so that they agree one position apart."""
    text = model.model.language_model
    first = text.layers[0]
    attention = first.self_attn
    angles = text.rotary_emb.inv_freq[
        : text.rotary_emb.mrope_section[0]
    ]  # those that separate near positions
    half, size = attention.head_dim // 2, len(angles)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[: 2 * half] = 0
    attention.k_proj.bias[:size] = _BACK
    attention.q_proj.bias[:size] = _BACK * angles.cos()
    attention.q_proj.bias[half : half + size] = -_BACK * angles.sin()
    attention.o_proj.weight.zero_()  # nothing else of the layer blurs the words at first
    first.mlp.down_proj.weight.zero_()
    _copy(attention, axes_WH, _COPY / 2)


def _look_up(model: Qwen2_5_VLForConditionalGeneration, axes_WH: Tensor) -> None:
    """Queries and keys are the words, in the pairs that rotate least."""
    attention = model.model.language_model.layers[1].self_attn
    half = attention.head_dim // 2
    slow = [
        side + pair for pair in range(half - 1, half // 2 - 1, -1) for side in (0, half)
    ]
    own = min(len(slow), len(axes_WH))
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[: 2 * half] = 0
        projection.weight[slow[:own]] = _MATCH * axes_WH[:own]
        projection.bias[: 2 * half] = 0
    attention.q_proj.bias[slow[0]] = _PREFER
    _copy(attention, axes_WH, _COPY)


def _copy(attention: Any, axes_WH: Tensor, gain: float) -> None:
    """What the first head finds, it adds: the part of it that is words."""
    size = attention.head_dim
    values_DH = torch.zeros(size, axes_WH.shape[1])
    values_DH[: len(axes_WH)] = axes_WH[:size]
    attention.v_proj.weight[:size] = values_DH
    attention.o_proj.weight[:, :size] = gain * values_DH.T
