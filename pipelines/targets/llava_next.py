"""LLaVA-NeXT (1.6): an overview and a grid of tiles per image, padding cut off, 1-D positions.

Shapes: U visual tokens, D hidden width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from vlmdistill.pipelines.targets.family import (
    LLAMA_LIKE,
    Family,
    Inputs,
    Visual,
    classes,
    concatenate,
    disagreement,
    grid_of,
    pad_tiles,
    square,
)


class LlavaNext(Family):
    """LLaVA-NeXT."""

    name = "llava-next"
    model_type = "llava_next"
    text_types = LLAMA_LIKE
    image_processors = ("LlavaNextImageProcessor",)
    grids = False

    def processor(self, folder: Path) -> Any:
        """The stock processor."""
        return transformers.LlavaNextProcessor.from_pretrained(folder, local_files_only=True)

    def mismatch(self, config: Any, processor: Any) -> str | None:
        """The same tiles, patches and selection of vision features."""
        vision, strategy = config.vision_config, config.vision_feature_select_strategy
        tile = processor.image_processor.crop_size
        if strategy == "full" and classes(vision, processor)[2]:
            return "with vision_feature_select_strategy 'full' the stock model cannot put its tiles together"
        return disagreement(
            ("patch_size", processor.patch_size, vision.patch_size),
            *square(vision, tile["height"], tile["width"]),
            grid_of(config, processor),
            ("vision_feature_select_strategy", processor.vision_feature_select_strategy, strategy),
            classes(vision, processor),
        )

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Tiles [images, tiles, 3, h, w], padded to the largest number of tiles."""
        return concatenate(pad_tiles(samples))

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All tiles in one batch; the model drops those that are padding."""
        out = model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
        return Visual(torch.cat(tuple(out.pooler_output)))
