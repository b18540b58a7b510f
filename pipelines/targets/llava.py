"""LLaVA-1.5: one square crop per image, a fixed number of visual tokens, 1-D positions.

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
    square,
)


class Llava(Family):
    """LLaVA-1.5."""

    name = "llava-1.5"
    model_type = "llava"
    text_types = LLAMA_LIKE
    image_processors = ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")
    grids = False

    def processor(self, folder: Path) -> Any:
        """The stock processor."""
        return transformers.LlavaProcessor.from_pretrained(folder, local_files_only=True)

    def mismatch(self, config: Any, processor: Any) -> str | None:
        """As many placeholders as patches, of crops as large as the vision tower's."""
        vision, strategy = config.vision_config, config.vision_feature_select_strategy
        image = processor.image_processor
        shape = image.crop_size if image.do_center_crop else image.size  # SigLIP's are resized to a square
        return disagreement(
            ("patch_size", processor.patch_size, vision.patch_size),
            *square(vision, shape.get("height"), shape.get("width")),
            ("vision_feature_select_strategy", processor.vision_feature_select_strategy, strategy),
            classes(vision, processor),
        )

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Images [images, 3, h, w] one after the other."""
        return concatenate(samples)

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All images in one batch."""
        out = model.model.get_image_features(inputs["pixel_values"])
        return Visual(torch.cat(tuple(out.pooler_output)))
