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

FRAMES = 8  # encoded at once: the vision tower keeps the states of all its layers


class LlavaFamily(Family):
    """The common part of the LLaVA families."""

    text_types = ("llama", "mistral", "qwen2", "qwen3")
    image_inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """All crops or tiles in one batch; the model drops tiles that are padding."""
        arguments = {name: inputs[name] for name in self.image_inputs}
        output = model.model.get_image_features(**arguments)
        return Visual(torch.cat(tuple(output.pooler_output)))


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
        if image.do_center_crop:
            return _crop_facts(config, processor, image.crop_size)
        return _crop_facts(config, processor, image.size)  # SigLIP resizes to a square


class TiledFamily(LlavaFamily):
    """LLaVA families that cut an image into tiles."""

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Tiles [images, tiles, 3, h, w], padded to the largest number of tiles."""
        name = "pixel_values"
        counts = [sample[name].shape[1] for sample in samples if name in sample]
        tiles = max(counts, default=0)
        padded: list[Inputs] = []
        for sample in samples:
            if name in sample:
                sample = {**sample, name: _padded(sample[name], tiles)}
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
        selects_all = config.vision_feature_select_strategy == "full"
        if selects_all and _class_tokens(config, processor):
            raise TargetError(
                "the stock model cannot merge tiles with "
                "vision_feature_select_strategy 'full'"
            )
        facts = _crop_facts(config, processor, processor.image_processor.crop_size)
        return [*facts, _tile_grids(config, processor)]


class LlavaOnevision(TiledFamily):
    """LLaVA-OneVision: tiles for a single image, one overview each for several, pooled frames."""

    processor_class = "LlavaOnevisionProcessor"
    image_processors = ("LlavaOnevisionImageProcessor",)
    frame_processor = SquareFrames
    image_inputs = ("pixel_values", "image_sizes", "batch_num_images")

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The same tiles, frames, tokens per tile and selection of vision features."""
        video = processor.video_processor
        size = config.vision_config.image_size
        tokens = (size // config.vision_config.patch_size) ** 2
        facts = placeholders(config, processor, ["image", "video"])
        facts += _size_facts(config, processor.image_processor.size)
        return [
            *facts,
            ("num_image_tokens", processor.num_image_tokens, tokens),
            _same_setting("vision_aspect_ratio", config, processor),
            _tile_grids(config, processor),
            _same_setting("vision_feature_select_strategy", config, processor),
            ("the height of frames", video.height, size),
            ("the width of frames", video.width, size),
        ]

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A quarter of the patches of each frame, and a newline after the last."""
        side = math.ceil(math.isqrt(processor.num_image_tokens) / 2)
        return [frames * side**2 + 1 for frames in _video_lengths(inputs)]

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
        lengths = set(_video_lengths(inputs))
        if len(lengths) > 1:
            return None
        accepted = dict(inputs)
        accepted.pop("video_frames", None)
        if lengths:
            frames_FCHW = inputs["pixel_values_videos"]
            videos_GFCHW = torch.unflatten(frames_FCHW, 0, (-1, *lengths))
            accepted["pixel_values_videos"] = videos_GFCHW
        return accepted

    def encode_videos(self, model: Any, inputs: Inputs) -> Visual:
        """All videos, a few frames at a time.

        The model ends each call with a newline token; a video keeps only its last one.
        """
        encode = model.model.get_video_features
        frames_FCHW = inputs["pixel_values_videos"]
        parts: list[Tensor] = []
        for video_FCHW in torch.split(frames_FCHW, _video_lengths(inputs)):
            for part_FCHW in torch.split(video_FCHW, FRAMES):
                part_UD = encode(part_FCHW[None]).pooler_output[0]
                parts.append(part_UD[:-1])
            parts.append(part_UD[-1:])
        return Visual(torch.cat(parts))


def _padded(pixels: Tensor, tiles: int) -> Tensor:
    """Tiles [images, tiles, 3, h, w], filled up with empty ones."""
    images, present, *shape = pixels.shape
    empty = pixels.new_zeros(images, tiles - present, *shape)
    return torch.cat([pixels, empty], 1)


def _video_lengths(inputs: Inputs) -> list[int]:
    """The number of frames of each video of a prompt."""
    if "video_frames" not in inputs:
        return []
    lengths: list[int] = inputs["video_frames"].tolist()
    return lengths


def _crop_facts(config: Any, processor: Any, shape: Mapping[str, Any]) -> list[Fact]:
    """LLaVA-1.5 and LLaVA-NeXT: the number of placeholders follows from patches and crop size."""
    class_tokens = _class_tokens(config, processor)
    extra_tokens = processor.num_additional_image_tokens
    facts = placeholders(config, processor, ["image"])
    facts += _size_facts(config, shape)
    return [
        *facts,
        ("patch_size", processor.patch_size, config.vision_config.patch_size),
        _same_setting("vision_feature_select_strategy", config, processor),
        ("num_additional_image_tokens", extra_tokens, class_tokens),
    ]


def _size_facts(config: Any, shape: Mapping[str, Any]) -> list[Fact]:
    """The image size, of vision towers that take one size only."""
    size = config.vision_config.image_size
    return [
        ("the image height", shape.get("height"), size),
        ("the image width", shape.get("width"), size),
    ]


def _same_setting(name: str, config: Any, processor: Any) -> Fact:
    """A setting that the processor and the model both have."""
    return (name, getattr(processor, name), getattr(config, name))


def _class_tokens(config: Any, processor: Any) -> int:
    """The number of the vision tower's tokens that are not patches: CLIP has a class token.

    Of an unknown vision tower, the number that the processor assumes.
    """
    counts = {"clip_vision_model": 1, "siglip_vision_model": 0}
    assumed: int = processor.num_additional_image_tokens
    return counts.get(config.vision_config.model_type, assumed)


def _tile_grids(config: Any, processor: Any) -> Fact:
    """The grids of tiles that an image may be cut into."""
    name = "image_grid_pinpoints"
    in_processor = [
        list(size) for size in processor.image_processor.image_grid_pinpoints
    ]
    in_model = [list(size) for size in config.image_grid_pinpoints]
    return (name, in_processor or "empty", in_model)
