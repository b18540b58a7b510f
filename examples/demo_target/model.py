"""The demo target's architecture, and a batched forward pass for its training.

`logits` computes what `Qwen2_5_VLForConditionalGeneration` computes, from the same parameters, for
right-padded batches of 84 x 84 images and videos. On a CPU it is faster: the stock vision tower loops over
temporal patches, and encodes equal ones again.

Shapes: B samples, T tokens, V vocabulary, H hidden, I distinct temporal patches (two frames, or an image
twice), S temporal patches, P = 36 patches, M = 9 merged tokens a temporal patch, C = 1176 values a patch
(3 colors x 2 frames x 14 x 14 pixels).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from examples.demo_target.wiring import wire
from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS

HEAD = 64
"""Width of a head: enough for positions and for words."""
PATCH = 14
MERGE = 2
GRID = SIDE_PIXELS // PATCH
IMAGE_TOKENS = (GRID // MERGE) ** 2
TOKENS_PER_SECOND = 1
"""Rotary time of a second of video: a clip of eight seconds ends before the words that ask about it do."""
MAX_POSITIONS = 32768
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def config(
    tokens: dict[str, int], *, vocabulary: int, layers: int, hidden: int
) -> Qwen2_5_VLConfig:
    """The configuration, `layers` deep and `hidden` wide; `tokens` maps special tokens to ids."""
    end, stop = tokens["<|endoftext|>"], tokens["<|im_end|>"]
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // HEAD,
            "num_key_value_heads": hidden // HEAD,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [8, 12, 12],
            },
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "bos_token_id": end,
            "eos_token_id": stop,
            "pad_token_id": end,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "tokens_per_second": TOKENS_PER_SECOND,
            "window_size": 112,
            "fullatt_block_indexes": [0],
            "initializer_range": 0.05,
        },
        tie_word_embeddings=True,
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
        bos_token_id=end,
        eos_token_id=stop,
        pad_token_id=end,
    )


def new_model(
    settings: Qwen2_5_VLConfig, tokenizer: PreTrainedTokenizerFast
) -> Qwen2_5_VLForConditionalGeneration:
    """A fresh model, wired."""
    model = Qwen2_5_VLForConditionalGeneration(settings)
    layers = model.model.language_model.layers
    with torch.no_grad():
        for layer in layers:  # the deeper, the less each adds at first
            layer.self_attn.o_proj.weight.mul_((2 * len(layers)) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * len(layers)) ** -0.5)
    wire(model, tokenizer)
    return model


@dataclass(frozen=True)
class Visuals:
    """What the samples of a batch show, in their order."""

    patches_IPC: Tensor
    """Distinct temporal patches."""
    which_S: Tensor
    """The distinct one that each temporal patch of the batch is."""
    seconds_B: Tensor
    """Seconds of a temporal patch of the sample's video, fp32; of no effect on an image."""
    copies_B: Tensor | None = None
    """The weight of each sample's visual tokens; None: 1."""


def patches(
    images: Sequence[Image.Image], then: Sequence[Image.Image] | None = None
) -> Tensor:
    """Temporal patches `[I, P, C]`, equal to what the image processor makes of images.

    `then` holds the second frames; a still image fills both frames.
    """
    pairs = [images, then or images]
    raw = np.stack(
        [[np.asarray(image, dtype=np.float32) for image in side] for side in pairs],
        axis=1,
    )
    mean, std = (
        np.array(values, dtype=np.float32) for values in (IMAGE_MEAN, IMAGE_STD)
    )
    side = GRID // MERGE
    tiles = ((raw / np.float32(255) - mean) / std).reshape(
        len(images), 2, side, MERGE, PATCH, side, MERGE, PATCH, 3
    )
    tiles = tiles.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return torch.from_numpy(tiles.reshape(len(images), GRID * GRID, -1))


def positions(ids_BT: Tensor, visual: Sequence[int], seconds_B: Tensor) -> Tensor:
    """M-RoPE positions `[3, B, T]` of sequences with at most one 84 x 84 image or video each.

    `visual` are the placeholders of images and videos, `seconds_B` the seconds of a temporal patch.
    """
    B, T = ids_BT.shape
    side = GRID // MERGE
    visual_BT = torch.isin(ids_BT, torch.tensor(visual))
    plain_T = torch.arange(T)
    first_B1 = torch.where(visual_BT.any(1), visual_BT.int().argmax(1), T)[:, None]
    count_B1 = visual_BT.sum(1, keepdim=True)
    after_BT = plain_T >= first_B1 + count_B1
    plain_BT = plain_T.expand(B, T) - after_BT * (count_B1 - side)
    nth_BT = plain_T - first_B1
    time_BT = (nth_BT // IMAGE_TOKENS * (TOKENS_PER_SECOND * seconds_B)[:, None]).long()
    cell_BT = nth_BT % IMAGE_TOKENS
    offsets = (time_BT, cell_BT // side, cell_BT % side)
    return torch.stack(
        [torch.where(visual_BT, first_B1 + offset, plain_BT) for offset in offsets]
    )


def _rms(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _gated(mlp: Any, x: Tensor) -> Tensor:
    mixed: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return mixed


def visual_tokens(
    model: Qwen2_5_VLForConditionalGeneration, patches_IPC: Tensor
) -> Tensor:
    """Visual embeddings `[I, M, H]`."""
    tower = model.model.visual
    x = F.linear(patches_IPC, tower.patch_embed.proj.weight.flatten(1))
    images, count, width = x.shape
    index = torch.arange(GRID * GRID)
    group, inner = index // MERGE**2, index % MERGE**2
    rows = group // (GRID // MERGE) * MERGE + inner // MERGE
    columns = group % (GRID // MERGE) * MERGE + inner % MERGE
    inv_freq = tower.rotary_pos_emb.inv_freq
    angles = torch.cat((rows[:, None] * inv_freq, columns[:, None] * inv_freq), -1)[
        :, None
    ]
    cos, sin = angles.cos(), angles.sin()
    for block in tower.blocks:
        heads = block.attn.num_heads
        q, k, v = (
            block.attn.qkv(_rms(x, block.norm1))
            .view(images, count, 3, heads, -1)
            .unbind(2)
        )
        q, k, v = (
            part.transpose(1, 2)
            for part in (_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(images, count, width))
        x = x + _gated(block.mlp, _rms(x, block.norm2))
    merged: Tensor = tower.merger.mlp(
        _rms(x, tower.merger.ln_q).view(images, count // MERGE**2, -1)
    )
    return merged


def logits(
    model: Qwen2_5_VLForConditionalGeneration,
    ids_BT: Tensor,
    visuals: Visuals | None,
    keep_N: Tensor,
) -> Tensor:
    """Next-token logits `[N, V]` at the flat positions `keep_N` of a right-padded batch."""
    text, (B, T) = model.model.language_model, ids_BT.shape
    visual = (model.config.image_token_id, model.config.video_token_id)
    x = text.embed_tokens(ids_BT)
    seconds_B, mask_B1TT = torch.ones(B), None
    if visuals is not None:
        visual_BT = torch.isin(ids_BT, torch.tensor(visual))
        seen = visual_tokens(model, visuals.patches_IPC)[visuals.which_S]
        x = x.masked_scatter(visual_BT[..., None], seen)
        seconds_B = visuals.seconds_B
        if visuals.copies_B is not None:
            mask_B1TT = _crowd(visual_BT, visuals.copies_B)
    freqs = positions(ids_BT, visual, seconds_B)[..., None] * text.rotary_emb.inv_freq
    sections = freqs.split(text.rotary_emb.mrope_section, dim=-1)
    angles = torch.cat([section[axis] for axis, section in enumerate(sections)], -1)[
        :, :, None
    ]
    cos, sin = angles.cos(), angles.sin()
    for layer in text.layers:
        attention, size = layer.self_attn, layer.self_attn.head_dim
        h = _rms(x, layer.input_layernorm)
        q, k, v = (
            p(h).view(B, T, -1, size)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k, v = (
            part.transpose(1, 2)
            for part in (_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        )
        causal = mask_B1TT is None
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1TT, is_causal=causal, enable_gqa=True
        )
        x = x + attention.o_proj(mixed.transpose(1, 2).reshape(B, T, -1))
        x = x + _gated(layer.mlp, _rms(x, layer.post_attention_layernorm))
    scores: Tensor = model.lm_head(_rms(x.flatten(0, 1)[keep_N], text.norm))
    return scores


def _crowd(visual_BT: Tensor, copies_B: Tensor) -> Tensor:
    """A causal mask `[B, 1, T, T]` in which a visual key weighs as much as so many copies of it.

    Tokens that are alike share their attention: n keys with the same score weigh as one whose score is
    greater by log n. So a few frames can teach what thousands will look like, at the price of a few.
    """
    T = visual_BT.shape[1]
    causal_TT = torch.full((T, T), -torch.inf).triu(1)
    return causal_TT + (visual_BT * copies_B.log()[:, None])[:, None, None]
