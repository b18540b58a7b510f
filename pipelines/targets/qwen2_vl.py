"""Qwen2-VL: any resolution, 2x2 patches merged into a token, M-RoPE.

Shapes: U visual tokens, D hidden width.
"""

from pathlib import Path
from typing import Any

import torch

from vlmdistill.pipelines.targets.family import GridFamily, Inputs, Visual
from vlmdistill.pipelines.targets.processors import without_video


class Qwen2VL(GridFamily):
    """Qwen2-VL."""

    name = "qwen2-vl"
    model_type = "qwen2_vl"

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen2VLProcessor", folder)

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All images in one packed pass."""
        out = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return Visual(torch.cat(tuple(out.pooler_output)))
