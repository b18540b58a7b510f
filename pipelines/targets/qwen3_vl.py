"""Qwen3-VL: interleaved M-RoPE, and deepstack: features of earlier vision layers enter after layers 0, 1, ...

So at visual positions the input of layer k is more than the output of layer k-1.

Shapes: U visual tokens, D hidden width.
"""

from pathlib import Path
from typing import Any

import torch

from vlmdistill.pipelines.targets.family import GridFamily, Inputs, Visual
from vlmdistill.pipelines.targets.processors import without_video


class Qwen3VL(GridFamily):
    """Qwen3-VL."""

    name = "qwen3-vl"
    model_type = "qwen3_vl"

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen3VLProcessor", folder)

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All images in one packed pass, with the deepstack features of each level."""
        out = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        deepstack = tuple(torch.cat(tuple(level)) for level in out.deepstack_features)
        return Visual(torch.cat(tuple(out.pooler_output)), deepstack)
