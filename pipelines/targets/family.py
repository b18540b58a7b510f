"""What differs between families of vision-language models; everything else is common code.

Shapes: L positions of one expanded prompt, A rotary axes (1, or 3 for M-RoPE), U visual tokens,
D hidden width.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Visual:
    """What the vision tower hands to the language model for all images of a batch, in reading order."""

    embed_UD: Tensor  # stands at the placeholders, at the input of layer 0
    deepstack: tuple[Tensor, ...] = ()  # each [U, D]: added to the output of layers 0, 1, ...


class Family(abc.ABC):
    """One family: how its processor loads, where its tokens stand, how its images are batched and seen."""

    name: ClassVar[str]
    model_type: ClassVar[str]  # of config.json
    grids: ClassVar[bool]  # M-RoPE: visual tokens stand on a (time, height, width) grid

    @abc.abstractmethod
    def processor(self, folder: Path) -> Any:
        """Load the processor of a local checkpoint; raises what transformers raises."""

    @abc.abstractmethod
    def mismatch(self, config: Any, processor: Any) -> str | None:
        """The first fact on which a model's configuration and its processor disagree, in words."""

    @abc.abstractmethod
    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Batch the visual inputs of several prompts, some of which may have none."""

    @abc.abstractmethod
    def see(self, model: Any, inputs: Inputs) -> Visual:
        """Encode and project all images of a batch, each once."""

    def rope(self, model: Any, kind_L: Tensor, inputs: Inputs) -> Tensor:
        """The rotary positions of a prompt [A, L]; `kind_L` is 0 at text, 1 at image, 2 at video tokens."""
        return torch.arange(len(kind_L))[None]

    def visual_ids(self, config: Any) -> tuple[int, ...]:
        """The ids of the image placeholder and, where the family has one, of the video placeholder."""
        ids = (getattr(config, "image_token_id", None), getattr(config, "video_token_id", None))
        return tuple(int(i) for i in ids if i is not None)


def disagreement(*facts: tuple[str, Any, Any]) -> str | None:
    """The first of the facts (name, the processor's value, the model's value) that differs, in words."""
    for name, mine, theirs in facts:
        if mine != theirs:
            return f"{name} is {mine} in the processor and {theirs} in the model"
    return None


def concatenate(samples: Sequence[Inputs]) -> dict[str, Tensor]:
    """Every input of the samples, one after the other along the first dimension."""
    names = {name: None for sample in samples for name in sample}
    return {name: torch.cat([sample[name] for sample in samples if name in sample]) for name in names}


def pad_tiles(samples: Sequence[Inputs]) -> list[Inputs]:
    """Give `pixel_values` [images, tiles, 3, h, w] of all samples the same number of tiles."""
    tiles = max((sample["pixel_values"].shape[1] for sample in samples if sample), default=0)
    padded: list[Inputs] = []
    for sample in samples:
        if sample:
            pixels = sample["pixel_values"]
            empty = pixels.new_zeros(len(pixels), tiles - pixels.shape[1], *pixels.shape[2:])
            sample = {**sample, "pixel_values": torch.cat([pixels, empty], 1)}
        padded.append(sample)
    return padded


def grid_rope(model: Any, kind_L: Tensor, inputs: Inputs) -> Tensor:
    """M-RoPE positions [3, L] of the Qwen families, by the model's own rule."""
    if not inputs:
        return torch.arange(len(kind_L)).expand(3, -1)
    grids = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
    # The ids are read for their shape and device alone.
    position_3BL, _ = model.model.get_rope_index(kind_L[None], mm_token_type_ids=kind_L[None], **grids)
    rope_3L: Tensor = position_3BL[:, 0]
    return rope_3L


class GridFamily(Family):
    """What the Qwen families share: patches on a grid, merged into tokens, at M-RoPE positions."""

    grids = True

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
