"""The interface of a family of vision-language models: what differs between families.

Shapes: L positions of one expanded prompt, A rotary axes (1, or 3 for M-RoPE), U visual tokens,
D hidden width.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers.utils import is_torchvision_available

from vlmdistill.drafters.core.transfer import place
from vlmdistill.pipelines.targets.families.video import (
    FrameProcessor,
    concatenated,
    settings,
)
from vlmdistill.stores.errors import TargetError

Inputs = Mapping[str, Tensor]
Fact = tuple[str, Any, Any]  # its name, the processor's value, the model's value
IMAGE, VIDEO = 1, 2  # kinds of a position; 0 is text


@dataclass(frozen=True)
class Visual:
    """The vision tower's output for the language model, in reading order."""

    embed_UD: Tensor  # replaces the embeddings of the placeholders
    deepstack: tuple[Tensor, ...] = ()
    """Each [U, D]: added to the output of layers 0, 1, ..."""


class Family(abc.ABC):
    """One family: its processor, its visual tokens and their positions, its vision tower."""

    text_types: ClassVar[tuple[str, ...]] = ()
    """The `model_type` of text models that the decoder can fuse."""
    processor_class: str  # in transformers
    image_processors: ClassVar[tuple[str, ...]] = ()
    """Names of classes without the suffix of a backend; empty: any."""
    frame_processor: ClassVar[type[FrameProcessor] | None] = None
    """The rules for videos; None: images only."""
    oldest_transformers: ClassVar[str] = "5.23"
    """The oldest version with which this project has run the family."""
    mrope: bool = False  # visual tokens have (time, height, width) positions
    host_inputs: ClassVar[tuple[str, ...]] = ()
    """Visual inputs that are read on the CPU."""

    def __init__(self, model_type: str, name: str) -> None:
        self.model_type = model_type
        self.name = name

    @abc.abstractmethod
    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """The facts on which a model's configuration and its processor have to agree.

        TargetError for a setting of either that is not supported.
        """

    @abc.abstractmethod
    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """Encode and project all images of a batch, each once."""

    def encode_videos(self, model: Any, inputs: Inputs) -> Visual:
        """Encode and project all videos of a batch, each once, a few frames at a time."""
        raise TargetError(f"{self.name} does not support video")

    def load_processor(self, folder: Path) -> Any:
        """Load the processor of a local checkpoint; raises the errors of transformers."""
        has_torchvision = is_torchvision_available()
        base = getattr(transformers, self.processor_class)
        if not has_torchvision:
            base = _without_video_processor(base)
        try:
            processor = base.from_pretrained(folder, local_files_only=True)
        except (AttributeError, TypeError) as error:
            if has_torchvision or "video_processor" not in str(error):
                raise
            raise TargetError(
                f"a {self.processor_class} needs a video processor, which needs "
                "torchvision: install it"
            ) from None
        if self.frame_processor is not None:
            # Always this project's own: features must not depend on whether torchvision is installed.
            processor.video_processor = self.frame_processor(settings(folder))
            processor.skip_tensor_conversion = [
                *processor.skip_tensor_conversion,
                "pixel_values_videos",
            ]
        return processor

    def image_lengths(
        self, config: Any, processor: Any, inputs: Mapping[str, Any], images: int
    ) -> list[int] | None:
        """The number of visual tokens of each image of a prompt.

        `inputs` is the processor's output for the prompt. None if the numbers are not
        known: then images without a token between them count as one.
        """
        placeholder = processor.tokenizer.convert_ids_to_tokens(config.image_token_id)
        lengths = []
        for index in range(images):
            text = processor.replace_image_token(inputs, image_idx=index)
            lengths.append(text.count(placeholder))
        return lengths

    def accepts(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The processor's outputs for one prompt that the model takes."""
        return inputs

    def kind_inputs(self, model: Any) -> tuple[str, ...]:
        """The model's inputs that tell the kind of each position."""
        return ("mm_token_type_ids",) if self.mrope else ()

    def one_batch(self, samples: Sequence[Inputs]) -> bool:
        """Whether `collate` can batch these prompts."""
        return True

    def collate(self, samples: Sequence[Inputs]) -> Inputs:
        """Batch the visual inputs of several prompts; a prompt may have none."""
        rows: dict[str, list[Tensor]] = {}
        for sample in samples:
            for name, value in sample.items():
                rows.setdefault(name, []).append(value)
        return {name: concatenated(values) for name, values in rows.items()}

    def join_videos(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The processor's output for one prompt, with its videos in one tensor."""
        return inputs

    def video_runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """The length of each contiguous run of visual tokens that the videos of a prompt have."""
        return []

    def stock_inputs(self, inputs: Inputs) -> Inputs | None:
        """Visual inputs as the stock model takes them; None if it cannot take them in one batch."""
        return inputs

    def rope(self, model: Any, ids_L: Tensor, kind_L: Tensor, inputs: Inputs) -> Tensor:
        """The rotary positions of a prompt [A, L]; `kind_L` is 0 at text, 1 at image, 2 at video tokens.

        M-RoPE positions are by the model's own rule.
        """
        if not self.mrope or not inputs:
            axes = 3 if self.mrope else 1
            return torch.arange(len(kind_L)).expand(axes, -1)
        rule = model.model.get_rope_index
        arguments = signature(rule).parameters
        accepted = {name: inputs[name] for name in inputs if name in arguments}
        rope_3BL, _ = rule(
            input_ids=ids_L[None], mm_token_type_ids=kind_L[None], **accepted
        )
        rope_3L: Tensor = rope_3BL[:, 0]
        return rope_3L

    def visual_ids(self, config: Any) -> tuple[int, ...]:
        """The ids of the image placeholder and, if the family has one, of the video placeholder."""
        image_id = getattr(config, "image_token_id", None)
        video_id = getattr(config, "video_token_id", None)
        return tuple(int(i) for i in (image_id, video_id) if i is not None)


def _without_video_processor(base: Any) -> Any:
    """A processor class that loads without a video processor, which needs torchvision even for images."""

    class ImageProcessorOnly(base):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            names = super().get_attributes()
            return [name for name in names if name != "video_processor"]

    return ImageProcessorOnly


def disagreement(facts: Sequence[Fact]) -> str | None:
    """The first fact on which processor and model differ, in words."""
    for name, processor, model in facts:
        if processor != model:
            return f"{name} is {processor} in the processor and {model} in the model"
    return None


def placeholders(config: Any, processor: Any, kinds: Sequence[str]) -> list[Fact]:
    """The ids of the placeholders of images and videos."""
    facts: list[Fact] = []
    for kind in kinds:
        token = getattr(processor, f"{kind}_token")
        in_processor = processor.tokenizer.convert_tokens_to_ids(token)
        in_model = getattr(config, f"{kind}_token_id")
        facts.append((f"the {kind} placeholder", in_processor, in_model))
    return facts


def encode_visual(family: Family, model: Any, inputs: Inputs, kind_U: Tensor) -> Visual:
    """All images and videos of a batch, in reading order.

    `kind_U` are the kinds of its visual tokens, on the CPU.
    TargetError if the vision tower's number of tokens of a kind differs from the placeholders'.
    """
    rows: list[Tensor] = []  # of each kind among the visual tokens
    visuals: list[Visual] = []
    for kind, encode, name in (
        (IMAGE, family.encode_images, "pixel_values"),
        (VIDEO, family.encode_videos, "pixel_values_videos"),
    ):
        row_N = (kind_U == kind).nonzero().flatten()
        if not len(row_N):
            continue
        visual = encode(model, inputs) if name in inputs else Visual(torch.empty(0, 0))
        if len(visual.embed_UD) != len(row_N):
            raise TargetError(
                "the processor does not match the model: "
                f"{len(row_N)} placeholders for {len(visual.embed_UD)} visual tokens"
            )
        rows.append(row_N)
        visuals.append(visual)
    if len(visuals) == 1:
        return visuals[0]
    return _in_reading_order(rows, visuals, len(kind_U))


def _in_reading_order(
    rows: Sequence[Tensor], visuals: Sequence[Visual], tokens: int
) -> Visual:
    """Images and videos in one: `rows` are the positions of each among `tokens`."""
    device = visuals[0].embed_UD.device
    placed = [place(row_N, device) for row_N in rows]

    def merged(values: Sequence[Tensor]) -> Tensor:
        merged_UD = values[0].new_empty(tokens, values[0].shape[1])
        for row_N, value_ND in zip(placed, values, strict=True):
            merged_UD.index_copy_(0, row_N, value_ND)
        return merged_UD

    embed_UD = merged([visual.embed_UD for visual in visuals])
    levels = zip(*(visual.deepstack for visual in visuals), strict=True)
    return Visual(embed_UD, tuple(merged(level) for level in levels))
