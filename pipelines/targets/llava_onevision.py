"""LLaVA-OneVision: tiles for a single image, one overview each for several, pooled frames, 1-D positions.

Shapes: U visual tokens, D hidden width, F frames, C colours, H height, W width.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmdistill.pipelines.targets.family import (
    LLAMA_LIKE,
    Family,
    Inputs,
    Visual,
    concatenate,
    disagreement,
    grid_of,
    pad_tiles,
    square,
    video_placeholder,
)
from vlmdistill.pipelines.targets.processors import onevision_without_video
from vlmdistill.pipelines.targets.video import SquareFrames, settings, side_by_side

FRAMES = 8  # that the vision tower is given at once: it keeps the states of all its layers


class LlavaOnevision(Family):
    """LLaVA-OneVision."""

    name = "llava-onevision"
    model_type = "llava_onevision"
    text_types = LLAMA_LIKE
    image_processors = ("LlavaOnevisionImageProcessor",)
    grids = False

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return onevision_without_video(folder)

    def mismatch(self, config: Any, processor: Any) -> str | None:
        """The same tiles, tokens per tile and selection of vision features."""
        vision, strategy = config.vision_config, config.vision_feature_select_strategy
        size = processor.image_processor.size
        tokens = (vision.image_size // vision.patch_size) ** 2
        return disagreement(
            ("num_image_tokens", processor.num_image_tokens, tokens),
            *square(vision, size.get("height"), size.get("width")),
            ("vision_aspect_ratio", processor.vision_aspect_ratio, config.vision_aspect_ratio),
            grid_of(config, processor),
            ("vision_feature_select_strategy", processor.vision_feature_select_strategy, strategy),
            ("the height of frames", processor.video_processor.height, vision.image_size),
            ("the width of frames", processor.video_processor.width, vision.image_size),
            video_placeholder(config, processor),
        )

    def frames(self, folder: Path) -> SquareFrames:
        """Frames of the vision tower's own size."""
        return SquareFrames(settings(folder))

    def runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A quarter of the patches of each frame, and a newline after the last."""
        side = math.ceil(math.isqrt(processor.num_image_tokens) / 2)
        lengths = inputs["video_frames"].tolist() if "video_frames" in inputs else []
        return [count * side**2 + 1 for count in lengths]

    def unify(self, inputs: dict[str, Any]) -> Inputs:
        """Videos of any lengths lie side by side [F, C, H, W]; `video_frames` tells where each ends."""
        videos = inputs.get("pixel_values_videos")
        if videos is None:
            return inputs
        lengths = torch.tensor([len(video) for video in videos])
        return {**inputs, "pixel_values_videos": side_by_side(list(videos)), "video_frames": lengths}

    def stock(self, inputs: Inputs) -> Inputs | None:
        """The stock model takes videos of one length only."""
        lengths = set(inputs["video_frames"].tolist()) if "video_frames" in inputs else set()
        if len(lengths) > 1:
            return None
        rest = {name: value for name, value in inputs.items() if name != "video_frames"}
        if lengths:
            rest["pixel_values_videos"] = torch.unflatten(inputs["pixel_values_videos"], 0, (-1, *lengths))
        return rest

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Tiles [images, tiles, 3, h, w], padded; `batch_num_images` tells which prompts have several."""
        return concatenate(pad_tiles(samples))

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All tiles in one batch; the model drops those that are padding."""
        out = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_sizes"], batch_num_images=inputs["batch_num_images"]
        )
        return Visual(torch.cat(tuple(out.pooler_output)))

    def watch(self, model: Any, inputs: Inputs) -> Visual:
        """All videos, some frames at a time; the model ends each part with a newline, a video has one."""
        shown: list[Tensor] = []
        for video_FCHW in torch.split(inputs["pixel_values_videos"], inputs["video_frames"].tolist()):
            for part_FCHW in torch.split(video_FCHW, FRAMES):
                part_UD = model.model.get_video_features(part_FCHW[None]).pooler_output[0]
                shown.append(part_UD[:-1])
            shown.append(part_UD[-1:])
        return Visual(torch.cat(shown))
