"""What checkpoints of families are made of, and what several have in common."""

from dataclasses import dataclass, field
from typing import Any

from tests.tiny import HIDDEN, QWEN_SPECIALS

SQUARE = {"height": 28, "width": 28}
IMAGE_IN_TEMPLATE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Parts:
    """What a family's checkpoint is made of."""

    model: str  # a class in transformers, without its `ForConditionalGeneration`
    tokens: str  # special ones, after those of the chat
    image: str  # what the chat template writes for one
    ids: dict[str, str]  # settings of the configuration that are ids, by their tokens
    processed: str = ""  # the processors' classes, without `ImageProcessor` and `Processor`; default: `model`
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)  # tokens that the tokenizer has as attributes


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
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
GRID = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 32**2, "longest_edge": 32**2 * 64},
}
QWEN3: dict[str, Any] = {
    "processed": "Qwen3VL",
    "image_processor": {**GRID, "image_processor_type": "Qwen2VLImageProcessor"},
    "tokens": " ".join(QWEN_SPECIALS[3:]),
    "image": IMAGE_IN_TEMPLATE,
    "named": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "ids": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
