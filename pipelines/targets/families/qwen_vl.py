"""The Qwen-VL families: images of any resolution, 2x2 patches merged into a token, M-RoPE.

Shapes: L positions of one prompt, U visual tokens, P patches, E values of a patch, G images and videos.
"""

from collections.abc import Iterator, Sequence
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

PATCHES = 16384  # encoded at once, unless a single pair of frames has more


class QwenVLFamily(Family):
    """The common part of the Qwen-VL families."""

    image_processors = ("Qwen2VLImageProcessor",)
    frame_processor = GridFrames
    oldest_transformers = "5.17"
    mrope = True
    host_inputs = ("image_grid_thw", "video_grid_thw")

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The same patches, merged alike, for images and videos."""
        size = dict(processor.image_processor.size or {})
        if not {"shortest_edge", "longest_edge"} <= size.keys():
            raise TargetError(
                f"the size of images is {size} and needs shortest_edge and longest_edge"
            )
        vision = config.vision_config
        return [
            *placeholders(config, processor, ["image", "video"]),
            *_patch_facts(vision, processor.image_processor),
            *_patch_facts(vision, processor.video_processor, " of videos"),
        ]

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A video is one run."""
        return [
            time * frame_tokens
            for time, frame_tokens in _video_sizes(processor, inputs)
        ]

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
        embeds: list[Tensor] = []
        deepstacks: list[Sequence[Tensor]] = []
        with packed_attention(tower.config):
            for chunk_PE, chunk_G3 in _chunks(pixels_PE, grid_G3.cpu()):
                inputs = self.tower_inputs(tower, chunk_G3)
                output = tower(chunk_PE, grid_thw=chunk_G3, return_dict=True, **inputs)
                embeds.append(output.pooler_output)
                deepstacks.append(getattr(output, "deepstack_features", None) or ())
        levels = zip(*deepstacks, strict=True)
        deepstack = tuple(torch.cat(level) for level in levels)
        return Visual(torch.cat(embeds), deepstack)

    def tower_inputs(self, tower: Any, grid_G3: Tensor) -> dict[str, Tensor]:
        """Inputs that the vision tower would else compute from the grids, waiting for the GPU.

        Bounds of sequences stay on the CPU, where `packed_attention` reads them.
        """
        merge = tower.spatial_merge_size
        position_P2 = vision_utils.get_vision_position_ids(grid_G3, merge)
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
        inputs = super().tower_inputs(tower, grid_G3)
        inputs["window_index"] = place(window_index, tower.device)
        inputs["cu_window_seqlens"] = _where_read(bounds, tower)
        return inputs


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
        inputs = super().tower_inputs(tower, grid_G3)
        inputs["interp_indices"] = place(index, tower.device)
        inputs["interp_weights"] = place(weight, tower.device)
        return inputs

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """A pair of frames is one run: the text between two pairs is the time of the second."""
        runs: list[int] = []
        for time, frame_tokens in _video_sizes(processor, inputs):
            runs += [frame_tokens] * time
        return runs


def _patch_facts(vision: Any, part: Any, kind: str = "") -> list[Fact]:
    """The sizes of patches, in the vision tower and in a part of the processor."""
    frames = part.temporal_patch_size
    return [
        (f"patch_size{kind}", part.patch_size, vision.patch_size),
        (f"temporal_patch_size{kind}", frames, vision.temporal_patch_size),
        (f"merge_size{kind}", part.merge_size, vision.spatial_merge_size),
    ]


def _video_sizes(processor: Any, inputs: Inputs) -> list[tuple[int, int]]:
    """Temporal patches of each video, and visual tokens of one temporal patch."""
    if "video_grid_thw" not in inputs:
        return []
    patches_per_token = processor.video_processor.merge_size**2
    grids = inputs["video_grid_thw"].tolist()
    return [
        (time, height * width // patches_per_token) for time, height, width in grids
    ]


def _where_read(bounds: Tensor, tower: Any) -> Tensor:
    """Bounds of sequences where the tower's attention reads them: FlashAttention on its device."""
    on_device = tower.config._attn_implementation == "flash_attention_2"
    return place(bounds, tower.device) if on_device else bounds


def _chunks(pixels_PE: Tensor, grid_G3: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut patches and their grids into chunks of about `PATCHES`, between images or temporal patches.

    A patch attends only within its own temporal patch, so the cuts change nothing.
    """
    chunk: list[list[int]] = []  # its grids
    start = 0
    patches = 0  # in the chunk
    for time, height, width in grid_G3.tolist():
        while time:
            fitting = (PATCHES - patches) // (height * width)
            if fitting <= 0 and chunk:
                yield pixels_PE[start : start + patches], grid_G3.new_tensor(chunk)
                chunk = []
                start += patches
                patches = 0
                continue
            added = min(time, max(1, fitting))
            chunk.append([added, height, width])
            patches += added * height * width
            time -= added
    yield pixels_PE[start : start + patches], grid_G3.new_tensor(chunk)
