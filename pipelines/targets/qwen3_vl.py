"""Qwen3-VL: interleaved M-RoPE, and deepstack: features of earlier vision layers enter after layers 0, 1, ...

So at visual positions the input of layer k is more than the output of layer k-1.

Shapes: L positions of one prompt, U visual tokens, D hidden width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmdistill.pipelines.targets.family import Family, Inputs, Visual, concatenate, disagreement, grid_rope
from vlmdistill.pipelines.targets.processors import without_video


class Qwen3VL(Family):
    """Qwen3-VL."""

    name = "qwen3-vl"
    model_type = "qwen3_vl"
    grids = True

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen3VLProcessor", folder)

    def mismatch(self, config: Any, processor: Any) -> str | None:
        """Patches have to be cut and merged as the vision tower expects them."""
        images, vision = processor.image_processor, config.vision_config
        return disagreement(
            ("patch_size", images.patch_size, vision.patch_size),
            ("temporal_patch_size", images.temporal_patch_size, vision.temporal_patch_size),
            ("merge_size", images.merge_size, vision.spatial_merge_size),
        )

    def rope(self, model: Any, kind_L: Tensor, inputs: Inputs) -> Tensor:
        """M-RoPE: text advances by one on all three axes, an image by its longer side."""
        return grid_rope(model, kind_L, inputs)

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Patches of all images lie side by side; the grids say where each begins."""
        return concatenate(samples)

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All images in one packed pass, with the deepstack features of each level."""
        out = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        deepstack = tuple(torch.cat(tuple(level)) for level in out.deepstack_features)
        return Visual(torch.cat(tuple(out.pooler_output)), deepstack)
