"""Qwen2.5-VL: as Qwen2-VL, with windowed attention in the vision tower.

Shapes: U visual tokens, D hidden width.
"""

from pathlib import Path
from typing import Any

import torch

from vlmdistill.pipelines.targets.family import GridFamily, Inputs, Visual
from vlmdistill.pipelines.targets.processors import without_video


class Qwen25VL(GridFamily):
    """Qwen2.5-VL."""

    name = "qwen2.5-vl"
    model_type = "qwen2_5_vl"

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen2_5_VLProcessor", folder)

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All images in one packed pass."""
        out = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return Visual(torch.cat(tuple(out.pooler_output)))
