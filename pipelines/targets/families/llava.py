"""The LLaVA families: square crops or tiles, one rotary axis.

Shapes: U visual tokens, D hidden width, F frames, C colors, H height, W width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlmdistill.pipelines.targets.families.family import (
    Fact,
    Family,
    Inputs,
    Visual,
    placeholders,
)
from vlmdistill.pipelines.targets.families.video import SquareFrames, concatenated
from vlmdistill.stores.errors import TargetError

FRAMES = (
    8  # that the vision tower encodes at once: it keeps the states of all its layers
)


class LlavaFamily(Family):
    """What the LLaVA families share."""

    text_types = (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
    )  # whose blocks the decoder can fuse
    image_inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """All crops or tiles in one batch; the model drops tiles that are padding."""
        out = model.model.get_image_features(
            **{name: inputs[name] for name in self.image_inputs}
        )
        return Visual(torch.cat(tuple(out.pooler_output)))


class Llava(LlavaFamily):
    """LLaVA-1.5: one square crop per image, a fixed number of visual tokens."""

    processor_class = "LlavaProcessor"
    oldest_transformers = "5.17"
    image_processors = (
        "CLIPImageProcessor",
        "LlavaImageProcessor",
        "SiglipImageProcessor",
    )

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """As many placeholders as patches, crops of the vision tower's size."""
        image = processor.image_processor
        shape = (
            image.crop_size if image.do_center_crop else image.size
        )  # SigLIP resizes to a square
        return _crop_facts(config, processor, shape)


class TiledFamily(LlavaFamily):
    """LLaVA families that cut an image into tiles."""

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Tiles [images, tiles, 3, h, w], padded to the largest number of tiles."""
        name = "pixel_values"
        tiles = max(
            (sample[name].shape[1] for sample in samples if name in sample), default=0
        )
        padded: list[Inputs] = []
        for sample in samples:
            if name in sample:
                pixels = sample[name]
                empty = pixels.new_zeros(
                    len(pixels), tiles - pixels.shape[1], *pixels.shape[2:]
                )
                sample = {**sample, name: torch.cat([pixels, empty], 1)}
            padded.append(sample)
        return super().collate(padded)


class LlavaNext(TiledFamily):
    """LLaVA-NeXT (1.6): an overview and a grid of tiles per image, padding cut off."""

    processor_class = "LlavaNextProcessor"
    oldest_transformers = "5.17"
    image_processors = ("LlavaNextImageProcessor",)
    image_inputs = ("pixel_values", "image_sizes")

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The same tiles, patches and selection of vision features."""
        if (
            config.vision_feature_select_strategy == "full"
            and _extra_tokens(config, processor)[2]
        ):
            raise TargetError(
                "the stock model cannot merge tiles with vision_feature_select_strategy 'full'"
            )
        return [
            *_crop_facts(config, processor, processor.image_processor.crop_size),
            _tile_grids(config, processor),
        ]


class LlavaOnevision(TiledFamily):
    """LLaVA-OneVision: tiles for a single image, one overview each for several, pooled frames."""

    processor_class = "LlavaOnevisionProcessor"
    image_processors = ("LlavaOnevisionImageProcessor",)
    frame_processor = SquareFrames
    image_inputs = ("pixel_values", "image_sizes", "batch_num_images")

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The same tiles, frames, tokens per tile and selection of vision features."""
        vision, video = config.vision_config, processor.video_processor
        tokens = (vision.image_size // vision.patch_size) ** 2
        return [
            *placeholders(config, processor, ["image", "video"]),
            ("num_image_tokens", processor.num_image_tokens, tokens),
            *_size_facts(config, processor.image_processor.size),
            (
                "vision_aspect_ratio",
                processor.vision_aspect_ratio,
                config.vision_aspect_ratio,
            ),
            _tile_grids(config, processor),
            _strategy(config, processor),
            ("the height of frames", video.height, vision.image_size),
            ("the width of frames", video.width, vision.image_size),
        ]

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A quarter of the patches of each frame, and a newline after the last."""
        side = math.ceil(math.isqrt(processor.num_image_tokens) / 2)
        lengths = inputs["video_frames"].tolist() if "video_frames" in inputs else []
        return [count * side**2 + 1 for count in lengths]

    def join_videos(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Videos of any lengths as one tensor [F, C, H, W]; `video_frames` holds their lengths."""
        videos = inputs.get("pixel_values_videos")
        if videos is None:
            return inputs
        lengths = torch.tensor([len(video) for video in videos])
        return {
            **inputs,
            "pixel_values_videos": concatenated(list(videos)),
            "video_frames": lengths,
        }

    def stock_inputs(self, inputs: Inputs) -> Inputs | None:
        """The stock model takes only videos of one length in a batch."""
        lengths = (
            set(inputs["video_frames"].tolist()) if "video_frames" in inputs else set()
        )
        if len(lengths) > 1:
            return None
        rest = {name: value for name, value in inputs.items() if name != "video_frames"}
        if lengths:
            rest["pixel_values_videos"] = torch.unflatten(
                inputs["pixel_values_videos"], 0, (-1, *lengths)
            )
        return rest

    def encode_videos(self, model: Any, inputs: Inputs) -> Visual:
        """The model ends each call with a newline token; of a video's calls, only the last one's is kept."""
        parts: list[Tensor] = []
        for video_FCHW in torch.split(
            inputs["pixel_values_videos"], inputs["video_frames"].tolist()
        ):
            for part_FCHW in torch.split(video_FCHW, FRAMES):
                part_UD = model.model.get_video_features(part_FCHW[None]).pooler_output[
                    0
                ]
                parts.append(part_UD[:-1])
            parts.append(part_UD[-1:])
        return Visual(torch.cat(parts))


def _crop_facts(config: Any, processor: Any, shape: Mapping[str, Any]) -> list[Fact]:
    """LLaVA-1.5 and LLaVA-NeXT: the number of placeholders follows from patches and crop size."""
    return [
        *placeholders(config, processor, ["image"]),
        ("patch_size", processor.patch_size, config.vision_config.patch_size),
        *_size_facts(config, shape),
        _strategy(config, processor),
        _extra_tokens(config, processor),
    ]


def _size_facts(config: Any, shape: Mapping[str, Any]) -> list[Fact]:
    """The image size, of vision towers that take one size only."""
    size = config.vision_config.image_size
    return [
        (f"the image {side}", shape.get(side), size) for side in ("height", "width")
    ]


def _strategy(config: Any, processor: Any) -> Fact:
    name = "vision_feature_select_strategy"
    return (name, getattr(processor, name), getattr(config, name))


def _extra_tokens(config: Any, processor: Any) -> Fact:
    """The number of the vision tower's tokens that are not patches: CLIP has a class token."""
    mine = processor.num_additional_image_tokens
    theirs = {"clip_vision_model": 1, "siglip_vision_model": 0}.get(
        config.vision_config.model_type, mine
    )
    return ("num_additional_image_tokens", mine, theirs)


def _tile_grids(config: Any, processor: Any) -> Fact:
    """The grids of tiles that an image may be cut into."""
    mine, theirs = (
        [list(size) for size in part.image_grid_pinpoints]
        for part in (processor.image_processor, config)
    )
    return ("image_grid_pinpoints", mine or "empty", theirs)
