"""The Qwen-VL families: images of any resolution, 2x2 patches merged into a token, M-RoPE.

Shapes: L positions of one prompt, U visual tokens, P patches, E values of a patch, G images and videos.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vlmdistill.pipelines.targets.families.family import Fact, Family, Inputs, Visual, placeholders
from vlmdistill.pipelines.targets.families.video import GridFrames, TimedGridFrames
from vlmdistill.stores.errors import TargetError

PATCHES = 16384  # that the vision tower encodes at once, unless one pair of frames has more


class QwenVLFamily(Family):
    """What the Qwen-VL families share."""

    image_processors = ("Qwen2VLImageProcessor",)
    frame_processor = GridFrames
    mrope = True

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The same patches, merged alike, for images and videos."""
        vision, size = config.vision_config, dict(processor.image_processor.size or {})
        if not {"shortest_edge", "longest_edge"} <= {*size}:
            raise TargetError(f"the size of images is {size} and needs shortest_edge and longest_edge")
        facts = placeholders(config, processor, ["image", "video"])
        for part, kind in ((processor.image_processor, ""), (processor.video_processor, " of videos")):
            facts += [
                (f"patch_size{kind}", part.patch_size, vision.patch_size),
                (f"temporal_patch_size{kind}", part.temporal_patch_size, vision.temporal_patch_size),
                (f"merge_size{kind}", part.merge_size, vision.spatial_merge_size),
            ]
        return facts

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A video is one run."""
        return [time * frame for time, frame in _video_sizes(processor, inputs)]

    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """All images, packed."""
        return _encode_packed(model, inputs["pixel_values"], inputs["image_grid_thw"])

    def encode_videos(self, model: Any, inputs: Inputs) -> Visual:
        """All videos, packed."""
        return _encode_packed(model, inputs["pixel_values_videos"], inputs["video_grid_thw"])


class Qwen2VL(QwenVLFamily):
    """Qwen2-VL."""

    text_types = ("qwen2_vl_text",)
    processor_class = "Qwen2VLProcessor"


class Qwen25VL(QwenVLFamily):
    """Qwen2.5-VL: windowed attention in the vision tower."""

    text_types = ("qwen2_5_vl_text",)
    processor_class = "Qwen2_5_VLProcessor"


class Qwen3VL(QwenVLFamily):
    """Qwen3-VL: interleaved M-RoPE, and deepstack.

    Features of earlier vision layers are added after text layers 0, 1, ...: at visual positions, the input
    of layer k is not the output of layer k-1.
    """

    text_types = ("qwen3_vl_text",)
    processor_class = "Qwen3VLProcessor"
    frame_processor = TimedGridFrames

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A pair of frames is one run: the text between two pairs is the time of the second."""
        return [frame for time, frame in _video_sizes(processor, inputs) for _ in range(time)]


def _video_sizes(processor: Any, inputs: Inputs) -> list[tuple[int, int]]:
    """Temporal patches of each video, and visual tokens of one temporal patch."""
    merged = processor.video_processor.merge_size**2
    grids = inputs["video_grid_thw"].tolist() if "video_grid_thw" in inputs else []
    return [(time, height * width // merged) for time, height, width in grids]


def _encode_packed(model: Any, pixels_PE: Tensor, grid_G3: Tensor) -> Visual:
    parts = [model.model.get_image_features(*chunk) for chunk in _chunks(pixels_PE, grid_G3)]
    embed_UD = torch.cat([image for out in parts for image in out.pooler_output])
    levels = zip(*(getattr(out, "deepstack_features", None) or () for out in parts), strict=True)
    return Visual(embed_UD, tuple(torch.cat([part for out in level for part in out]) for level in levels))


def _chunks(pixels_PE: Tensor, grid_G3: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut patches and their grids into chunks of about `PATCHES`, between images or temporal patches.

    A patch attends only within its own temporal patch, so the cuts change nothing.
    """
    taken: list[list[int]] = []
    start = size = 0
    for time, height, width in grid_G3.tolist():
        while time:
            fitting = (PATCHES - size) // (height * width)
            if fitting <= 0 and taken:
                yield pixels_PE[start : start + size], grid_G3.new_tensor(taken)
                taken, start, size = [], start + size, 0
                continue
            some = min(time, max(1, fitting))
            taken.append([some, height, width])
            size, time = size + some * height * width, time - some
    yield pixels_PE[start : start + size], grid_G3.new_tensor(taken)
