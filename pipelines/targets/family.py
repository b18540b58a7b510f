"""What differs between families of vision-language models; everything else is common code.

Shapes: L positions of one expanded prompt, A rotary axes (1, or 3 for M-RoPE), U visual tokens,
D hidden width, P patches, E values of a patch, G images and videos on grids.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlmdistill.pipelines.targets.video import FrameProcessor, side_by_side
from vlmdistill.stores.errors import TargetError

Inputs = Mapping[str, Tensor]
IMAGE, VIDEO = 1, 2  # kinds of a position; 0 is text
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # text models whose blocks decoding and drafters have
PATCHES = 16384  # that a vision tower is given at once, where it treats frames one by one


@dataclass(frozen=True)
class Visual:
    """What the vision tower hands to the language model, in reading order."""

    embed_UD: Tensor  # stands at the placeholders, at the input of layer 0
    deepstack: tuple[Tensor, ...] = ()  # each [U, D]: added to the output of layers 0, 1, ...


class Family(abc.ABC):
    """One family: how its processor loads, where its tokens stand, how images and videos are seen."""

    name: ClassVar[str]
    model_type: ClassVar[str]  # of config.json
    text_types: ClassVar[tuple[str, ...]]  # the model_type of the text models that are served
    image_processors: ClassVar[tuple[str, ...]]  # their classes, without the suffix of a backend
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

    def frames(self, folder: Path) -> FrameProcessor | None:
        """What a checkpoint makes of video; None where the family has none."""
        return None

    def watch(self, model: Any, inputs: Inputs) -> Visual:
        """Encode and project all videos of a batch, each once, some frames at a time."""
        raise TargetError(f"{self.name} has no video")

    def unify(self, inputs: dict[str, Any]) -> Inputs:
        """What the processor gives for one prompt, as tensors that can be put side by side."""
        return inputs

    def runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """How many visual tokens stand side by side, for each part of the videos of a prompt."""
        return []

    def stock(self, inputs: Inputs) -> Inputs | None:
        """Visual inputs as the stock model takes them; None where it cannot take them in one batch."""
        return inputs

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


def square(vision: Any, height: Any, width: Any) -> list[tuple[str, Any, Any]]:
    """The facts on which a processor and a vision tower for images of one size have to agree."""
    return [("the image height", height, vision.image_size), ("the image width", width, vision.image_size)]


def classes(vision: Any, processor: Any) -> tuple[str, Any, Any]:
    """The fact that says how many tokens of a vision tower are no patch."""
    mine = processor.num_additional_image_tokens
    theirs = {"clip_vision_model": 1, "siglip_vision_model": 0}.get(vision.model_type, mine)
    return ("num_additional_image_tokens", mine, theirs)


def grid_of(config: Any, processor: Any) -> tuple[str, Any, Any]:
    """The fact that says into which tiles an image may be cut."""
    mine, theirs = (
        [list(size) for size in part.image_grid_pinpoints] for part in (processor.image_processor, config)
    )
    return ("image_grid_pinpoints", mine or "empty", theirs)


def video_placeholder(config: Any, processor: Any) -> tuple[str, Any, Any]:
    """The fact on which a processor and a model have to agree before a video can be placed."""
    mine = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
    return ("the video placeholder", mine, config.video_token_id)


def perceive(family: Family, model: Any, inputs: Inputs, kind_U: Tensor) -> Visual:
    """All images and videos of a batch, in reading order; `kind_U` are the kinds of its visual tokens.

    TargetError when the vision tower gives another number of tokens of a kind.
    """
    parts: list[tuple[Tensor, Visual]] = []
    for kind, look, name in (
        (IMAGE, family.see, "pixel_values"),
        (VIDEO, family.watch, "pixel_values_videos"),
    ):
        chosen_U = kind_U == kind
        expected = int(chosen_U.sum())
        if not expected:
            continue
        visual = look(model, inputs) if name in inputs else Visual(torch.empty(0, 0))
        if len(visual.embed_UD) != expected:
            raise TargetError(
                "the processor does not match the model: "
                f"{expected} placeholders for {len(visual.embed_UD)} visual tokens"
            )
        parts.append((chosen_U, visual))
    if len(parts) == 1:
        return parts[0][1]

    def mixed(values: Sequence[Tensor]) -> Tensor:
        whole_UD = values[0].new_empty(len(kind_U), values[0].shape[1])
        for (chosen_U, _), value in zip(parts, values, strict=True):
            whole_UD[chosen_U] = value
        return whole_UD

    levels = zip(*(visual.deepstack for _, visual in parts), strict=True)
    return Visual(mixed([visual.embed_UD for _, visual in parts]), tuple(mixed(level) for level in levels))


def concatenate(samples: Sequence[Inputs]) -> dict[str, Tensor]:
    """Every input of the samples, one after the other along the first dimension."""
    rows: dict[str, list[Tensor]] = {}
    for sample in samples:
        for name, value in sample.items():
            rows.setdefault(name, []).append(value)
    return {name: side_by_side(values) for name, values in rows.items()}


def pad_tiles(samples: Sequence[Inputs]) -> list[Inputs]:
    """Give `pixel_values` [images, tiles, 3, h, w] of all samples the same number of tiles."""
    name = "pixel_values"
    tiles = max((sample[name].shape[1] for sample in samples if name in sample), default=0)
    padded: list[Inputs] = []
    for sample in samples:
        if name in sample:
            pixels = sample[name]
            empty = pixels.new_zeros(len(pixels), tiles - pixels.shape[1], *pixels.shape[2:])
            sample = {**sample, name: torch.cat([pixels, empty], 1)}
        padded.append(sample)
    return padded


def grid_rope(model: Any, kind_L: Tensor, inputs: Inputs) -> Tensor:
    """M-RoPE positions [3, L] of the Qwen families, by the model's own rule."""
    if not inputs:
        return torch.arange(len(kind_L)).expand(3, -1)
    grids = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
    # The ids are read for their shape and device alone.
    position_3BL, _ = model.model.get_rope_index(kind_L[None], mm_token_type_ids=kind_L[None], **grids)
    rope_3L: Tensor = position_3BL[:, 0]
    return rope_3L


class GridFamily(Family):
    """What the Qwen families share: patches on a grid, merged into tokens, at M-RoPE positions."""

    grids = True
    image_processors = ("Qwen2VLImageProcessor",)

    def mismatch(self, config: Any, processor: Any) -> str | None:
        """Patches have to be cut and merged as the vision tower expects them."""
        vision, parts = config.vision_config, (processor.image_processor, processor.video_processor)
        size = dict(processor.image_processor.size or {})
        if not {"shortest_edge", "longest_edge"} <= {*size}:
            return f"the size of images is {size}, and has to have shortest_edge and longest_edge"
        facts = [
            fact
            for part, of in zip(parts, ("", " of videos"), strict=True)
            for fact in (
                (f"patch_size{of}", part.patch_size, vision.patch_size),
                (f"temporal_patch_size{of}", part.temporal_patch_size, vision.temporal_patch_size),
                (f"merge_size{of}", part.merge_size, vision.spatial_merge_size),
            )
        ]
        return disagreement(*facts, video_placeholder(config, processor))

    def rope(self, model: Any, kind_L: Tensor, inputs: Inputs) -> Tensor:
        """M-RoPE: text advances by one on all three axes, an image by its longer side."""
        return grid_rope(model, kind_L, inputs)

    def runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """All tokens of a video stand side by side."""
        merged = processor.video_processor.merge_size**2
        return [int(grid.prod()) // merged for grid in inputs.get("video_grid_thw", ())]

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Patches of all images lie side by side, as do those of videos; grids say where each begins."""
        return concatenate(samples)

    def see(self, model: Any, inputs: Inputs) -> Visual:
        """All images, packed."""
        return self._packed(model, inputs["pixel_values"], inputs["image_grid_thw"])

    def watch(self, model: Any, inputs: Inputs) -> Visual:
        """All videos, packed."""
        return self._packed(model, inputs["pixel_values_videos"], inputs["video_grid_thw"])

    def _packed(self, model: Any, pixels_PE: Tensor, grid_G3: Tensor) -> Visual:
        parts = [
            model.model.get_image_features(chunk_PE, chunk_G3)
            for chunk_PE, chunk_G3 in chunks(pixels_PE, grid_G3)
        ]
        embed_UD = torch.cat([image for out in parts for image in out.pooler_output])
        levels = zip(*(getattr(out, "deepstack_features", None) or () for out in parts), strict=True)
        return Visual(embed_UD, tuple(torch.cat([part for out in level for part in out]) for level in levels))


def chunks(pixels_PE: Tensor, grid_G3: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut patches and their grids into parts of about `PATCHES`, between images or temporal patches.

    No patch attends beyond its own temporal patch: the cuts change nothing.
    """
    taken: list[list[int]] = []
    start = size = 0
    for time, height, width in grid_G3.tolist():
        while time:
            fitting = (PATCHES - size) // (height * width)
            if not fitting and taken:
                yield pixels_PE[start : start + size], grid_G3.new_tensor(taken)
                taken, start, size = [], start + size, 0
                continue
            some = min(time, max(1, fitting))
            taken.append([some, height, width])
            size, time = size + some * height * width, time - some
    yield pixels_PE[start : start + size], grid_G3.new_tensor(taken)
