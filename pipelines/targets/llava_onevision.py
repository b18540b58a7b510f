"""LLaVA-OneVision: tiles for a single image, one overview each for several, 1-D positions.

Shapes: U visual tokens, D hidden width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlmdistill.pipelines.targets.family import Family, Inputs, Visual, concatenate, disagreement, pad_tiles
from vlmdistill.pipelines.targets.processors import onevision_without_video


class LlavaOnevision(Family):
    """LLaVA-OneVision."""

    name = "llava-onevision"
    model_type = "llava_onevision"
    grids = False

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return onevision_without_video(folder)

    def mismatch(self, config: Any, processor: Any) -> str | None:
        """The same tiles, tokens per tile and selection of vision features."""
        vision, strategy = config.vision_config, config.vision_feature_select_strategy
        pinpoints = [list(size) for size in processor.image_processor.image_grid_pinpoints]
        tokens = (vision.image_size // vision.patch_size) ** 2
        return disagreement(
            ("num_image_tokens", processor.num_image_tokens, tokens),
            ("image_grid_pinpoints", pinpoints, [list(size) for size in config.image_grid_pinpoints]),
            ("vision_feature_select_strategy", processor.vision_feature_select_strategy, strategy),
        )

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Tiles [images, tiles, 3, h, w], padded; `batch_num_images` tells which prompts have several."""
        return concatenate(pad_tiles(samples))

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All tiles in one batch; the model drops those that are padding."""
        out = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_sizes"], batch_num_images=inputs["batch_num_images"]
        )
        return Visual(torch.cat(tuple(out.pooler_output)))
