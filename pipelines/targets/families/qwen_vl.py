"""The Qwen-VL families: images of any resolution, 2x2 patches merged into a token, M-RoPE.

Shapes: L positions of one prompt, U visual tokens, P patches, E values of a patch, G images and videos.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from vlmdistill.drafters.core.transfer import place
from vlmdistill.pipelines.targets.families.family import (
    Fact,
    Family,
    Inputs,
    Visual,
    placeholders,
)
from vlmdistill.pipelines.targets.families.packed_attention import packed_attention
from vlmdistill.pipelines.targets.families.video import GridFrames, TimedGridFrames
from vlmdistill.stores.errors import TargetError

PATCHES = (
    16384  # that the vision tower encodes at once, unless one pair of frames has more
)


class QwenVLFamily(Family):
    """What the Qwen-VL families share."""

    image_processors = ("Qwen2VLImageProcessor",)
    frame_processor = GridFrames
    oldest_transformers = "5.17"
    mrope = True
    host_inputs = ("image_grid_thw", "video_grid_thw")

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The same patches, merged alike, for images and videos."""
        vision, size = config.vision_config, dict(processor.image_processor.size or {})
        if not {"shortest_edge", "longest_edge"} <= {*size}:
            raise TargetError(
                f"the size of images is {size} and needs shortest_edge and longest_edge"
            )
        facts = placeholders(config, processor, ["image", "video"])
        for part, kind in (
            (processor.image_processor, ""),
            (processor.video_processor, " of videos"),
        ):
            facts += [
                (f"patch_size{kind}", part.patch_size, vision.patch_size),
                (
                    f"temporal_patch_size{kind}",
                    part.temporal_patch_size,
                    vision.temporal_patch_size,
                ),
                (f"merge_size{kind}", part.merge_size, vision.spatial_merge_size),
            ]
        return facts

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A video is one run."""
        return [time * frame for time, frame in _video_sizes(processor, inputs)]

    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """All images, packed."""
        return self._encode(model, inputs["pixel_values"], inputs["image_grid_thw"])

    def encode_videos(self, model: Any, inputs: Inputs) -> Visual:
        """All videos, packed."""
        return self._encode(
            model, inputs["pixel_values_videos"], inputs["video_grid_thw"]
        )

    def _encode(self, model: Any, pixels_PE: Tensor, grid_G3: Tensor) -> Visual:
        tower = model.model.visual
        with packed_attention(tower.config):
            outputs = [
                tower(
                    chunk_PE,
                    grid_thw=chunk_G3,
                    return_dict=True,
                    **self.tower_inputs(tower, chunk_G3),
                )
                for chunk_PE, chunk_G3 in _chunks(pixels_PE, grid_G3.cpu())
            ]
        levels = zip(
            *(getattr(output, "deepstack_features", None) or () for output in outputs),
            strict=True,
        )
        return Visual(
            torch.cat([output.pooler_output for output in outputs]),
            tuple(torch.cat(level) for level in levels),
        )

    def tower_inputs(self, tower: Any, grid_G3: Tensor) -> dict[str, Tensor]:
        """What the vision tower would compute from the grids, without waiting for a GPU.

        Bounds of sequences stay on the CPU, where `packed_attention` reads them.
        """
        position_P2 = vision_utils.get_vision_position_ids(
            grid_G3, tower.spatial_merge_size
        )
        bounds = vision_utils.get_vision_cu_seqlens(grid_G3)
        return {
            "position_ids": place(position_P2, tower.device),
            "cu_seqlens": _where_read(bounds, tower),
        }


class Qwen2VL(QwenVLFamily):
    """Qwen2-VL."""

    text_types = ("qwen2_vl_text",)
    processor_class = "Qwen2VLProcessor"


class Qwen25VL(QwenVLFamily):
    """Qwen2.5-VL: windowed attention in the vision tower."""

    text_types = ("qwen2_5_vl_text",)
    processor_class = "Qwen2_5_VLProcessor"

    def tower_inputs(self, tower: Any, grid_G3: Tensor) -> dict[str, Tensor]:
        """Also the order of patches by window, and the bounds of windows."""
        window_index, bounds = vision_utils.get_vision_window_index(
            grid_G3, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        return {
            **super().tower_inputs(tower, grid_G3),
            "window_index": place(window_index, tower.device),
            "cu_window_seqlens": _where_read(bounds, tower),
        }


class Qwen3VL(QwenVLFamily):
    """Qwen3-VL: interleaved M-RoPE, and deepstack.

    Features of earlier vision layers are added after text layers 0, 1, ...: at visual positions, the input
    of layer k is not the output of layer k-1.
    """

    text_types = ("qwen3_vl_text",)
    processor_class = "Qwen3VLProcessor"
    frame_processor = TimedGridFrames

    def tower_inputs(self, tower: Any, grid_G3: Tensor) -> dict[str, Tensor]:
        """Also the weights that interpolate the learned positions."""
        index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_G3,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        return {
            **super().tower_inputs(tower, grid_G3),
            "interp_indices": place(index, tower.device),
            "interp_weights": place(weight, tower.device),
        }

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A pair of frames is one run: the text between two pairs is the time of the second."""
        return [
            frame
            for time, frame in _video_sizes(processor, inputs)
            for _ in range(time)
        ]


def _video_sizes(processor: Any, inputs: Inputs) -> list[tuple[int, int]]:
    """Temporal patches of each video, and visual tokens of one temporal patch."""
    merged = processor.video_processor.merge_size**2
    grids = inputs["video_grid_thw"].tolist() if "video_grid_thw" in inputs else []
    return [(time, height * width // merged) for time, height, width in grids]


def _where_read(bounds: Tensor, tower: Any) -> Tensor:
    """Bounds of sequences where the tower's attention reads them: FlashAttention on its device."""
    on_device = tower.config._attn_implementation == "flash_attention_2"
    return place(bounds, tower.device) if on_device else bounds


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
