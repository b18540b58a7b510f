"""Runs in the engine: sequences with images or videos get our rotary positions instead of vLLM's.

vLLM 0.32 and transformers 5 differ after a Qwen2.5-VL video with more time steps than a frame has rows or
columns. `get_mrope_input_positions` of vLLM goes on after the last time step, `get_rope_index` of
transformers after the larger side of a frame.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models.interfaces import supports_mrope

MARK = "/"


def identifier(key: str, number: int) -> str:
    """The name by which vLLM knows an image or video of a sequence."""
    return f"{key}{MARK}{number}"


def take_positions(model: Any) -> None:
    """Let a model with M-RoPE take the positions of `set_positions` for sequences with images or videos."""
    if not supports_mrope(model):
        return
    stock = model.get_mrope_input_positions

    def positions(
        input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        if not mm_features:
            given: tuple[torch.Tensor, int] = stock(input_tokens, mm_features)
            return given
        rope_AL = model.given_positions[mm_features[0].identifier.rpartition(MARK)[0]]
        return rope_AL, int(rope_AL.max()) + 1 - len(input_tokens)

    model.get_mrope_input_positions = positions


def set_positions(model: Any, positions: Mapping[str, torch.Tensor]) -> None:
    """The rotary positions [A, L] of all sequences of the next run, by key."""
    model.given_positions = positions
