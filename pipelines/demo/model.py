"""The demo target's architecture, and a batched forward pass for its training.

`logits` computes what `Qwen2_5_VLForConditionalGeneration` computes, from the same parameters, for
right-padded batches of 84 x 84 images. On a CPU it is faster: the stock vision tower loops over images.

Shapes: B samples, T tokens, V vocabulary, H hidden, I images, P = 36 patches, M = 9 merged tokens an image,
C = 1176 values a patch (3 colours x 2 frames x 14 x 14 pixels).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS

PATCH = 14
MERGE = 2
GRID = SIDE_PIXELS // PATCH
IMAGE_TOKENS = (GRID // MERGE) ** 2
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def config(tokens: dict[str, int], *, vocabulary: int, layers: int, hidden: int) -> Qwen2_5_VLConfig:
    """The configuration, `layers` deep and `hidden` wide; `tokens` maps special tokens to ids."""
    end, stop = tokens["<|endoftext|>"], tokens["<|im_end|>"]
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 64,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
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


def new_model(settings: Qwen2_5_VLConfig, *, first: int) -> Qwen2_5_VLForConditionalGeneration:
    """A fresh model whose layers add nothing yet, but for the `first_layers`."""
    model = Qwen2_5_VLForConditionalGeneration(settings)
    start = first_layers(model, first)
    with torch.no_grad():
        for place, layer in enumerate(model.model.language_model.layers):
            gain = (2 * first) ** -0.5 if place in start else 0.0
            layer.self_attn.o_proj.weight.mul_(gain)
            layer.mlp.down_proj.weight.mul_(gain)
    return model


def first_layers(model: Qwen2_5_VLForConditionalGeneration, first: int) -> tuple[int, ...]:
    """The `first` layers to be trained, spread evenly over the depth; the others join them later."""
    last = len(model.model.language_model.layers) - 1
    return tuple(sorted({round(place * last / max(first - 1, 1)) for place in range(first)}))


def patches(images: list[Image.Image]) -> Tensor:
    """Images as `[I, P, C]`, equal to what the image processor makes of them."""
    raw = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    mean, std = (np.array(values, dtype=np.float32) for values in (IMAGE_MEAN, IMAGE_STD))
    side = GRID // MERGE
    tiles = ((raw / np.float32(255) - mean) / std).reshape(
        len(images), side, MERGE, PATCH, side, MERGE, PATCH, 3
    )
    tiles = tiles.transpose(0, 1, 4, 2, 5, 7, 3, 6)[:, :, :, :, :, :, None]
    tiles = np.repeat(tiles, 2, axis=6)  # a still image fills both frames of a temporal patch
    return torch.from_numpy(tiles.reshape(len(images), GRID * GRID, -1))


def positions(ids_BT: Tensor, image_token: int) -> Tensor:
    """M-RoPE positions `[3, B, T]` of sequences with at most one 84 x 84 image each."""
    B, T = ids_BT.shape
    side = GRID // MERGE
    image_BT = ids_BT == image_token
    plain_T = torch.arange(T)
    first_B = torch.where(image_BT.any(1), image_BT.int().argmax(1), T)
    after_BT = plain_T >= (first_B + IMAGE_TOKENS)[:, None]
    plain_BT = plain_T.expand(B, T) - after_BT * (IMAGE_TOKENS - side)
    nth_BT = plain_T - first_B[:, None]
    offsets = (torch.zeros_like(nth_BT), nth_BT // side, nth_BT % side)
    return torch.stack([torch.where(image_BT, first_B[:, None] + offset, plain_BT) for offset in offsets])


def _rms(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _gated(mlp: Any, x: Tensor) -> Tensor:
    mixed: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return mixed


def visual_tokens(model: Qwen2_5_VLForConditionalGeneration, patches_IPC: Tensor) -> Tensor:
    """Visual embeddings `[I, M, H]`."""
    tower = model.model.visual
    x = F.linear(patches_IPC, tower.patch_embed.proj.weight.flatten(1))
    images, count, width = x.shape
    place = torch.arange(GRID * GRID)
    group, inner = place // MERGE**2, place % MERGE**2
    rows = group // (GRID // MERGE) * MERGE + inner // MERGE
    columns = group % (GRID // MERGE) * MERGE + inner % MERGE
    inv_freq = tower.rotary_pos_emb.inv_freq
    angles = torch.cat((rows[:, None] * inv_freq, columns[:, None] * inv_freq), -1)[:, None]
    cos, sin = angles.cos(), angles.sin()
    for block in tower.blocks:
        heads = block.attn.num_heads
        q, k, v = block.attn.qkv(_rms(x, block.norm1)).view(images, count, 3, heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(images, count, width))
        x = x + _gated(block.mlp, _rms(x, block.norm2))
    merged: Tensor = tower.merger.mlp(_rms(x, tower.merger.ln_q).view(images, count // MERGE**2, -1))
    return merged


def logits(
    model: Qwen2_5_VLForConditionalGeneration,
    ids_BT: Tensor,
    patches_IPC: Tensor | None,
    keep_N: Tensor,
    *,
    only: Sequence[int] | None = None,
) -> Tensor:
    """Next-token logits `[N, V]` at the flat positions `keep_N` of a right-padded batch.

    `only` names the layers to run; the model must be one whose other layers add nothing.
    """
    text, (B, T) = model.model.language_model, ids_BT.shape
    x = text.embed_tokens(ids_BT)
    if patches_IPC is not None:
        seen = visual_tokens(model, patches_IPC)
        x = x.masked_scatter((ids_BT == model.config.image_token_id)[..., None], seen)
    freqs = positions(ids_BT, model.config.image_token_id)[..., None] * text.rotary_emb.inv_freq
    sections = freqs.split(text.rotary_emb.mrope_section, dim=-1)
    angles = torch.cat([section[axis] for axis, section in enumerate(sections)], -1)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    layers = text.layers if only is None else [text.layers[place] for place in only]
    for layer in layers:
        attention, size = layer.self_attn, layer.self_attn.head_dim
        h = _rms(x, layer.input_layernorm)
        q, k, v = (p(h).view(B, T, -1, size) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k, v = (part.transpose(1, 2) for part in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(mixed.transpose(1, 2).reshape(B, T, -1))
        x = x + _gated(layer.mlp, _rms(x, layer.post_attention_layernorm))
    scores: Tensor = model.lm_head(_rms(x.flatten(0, 1)[keep_N], text.norm))
    return scores
