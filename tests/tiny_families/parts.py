"""What checkpoints of several families have in common."""

from typing import Any

from tests.tiny import HIDDEN, IMAGE_TEXT, NORMED, QWEN_IDS, QWEN_SPECIALS, grid

SQUARE = {"height": 28, "width": 28}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VIT = {**SMALL, "image_size": 28, "patch_size": 7}
SIGLIP = {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False}
PATCHES = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 16,
}
QWEN3: dict[str, Any] = {
    "processed": "Qwen3VL",
    "image_processor": {
        **grid(16),
        **NORMED,
        "image_processor_type": "Qwen2VLImageProcessor",
    },
    "tokens": QWEN_SPECIALS,
    "image": IMAGE_TEXT,
    "named": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "ids": QWEN_IDS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
