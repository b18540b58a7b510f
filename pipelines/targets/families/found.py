"""A family without a description: its facts are found from the model and its processor.

transformers names the same things alike in all its models: the image placeholder (`image_token_id`), the
vision tower (`get_image_features`), the text model (`get_decoder`), the rotary rule (`get_rope_index`), the
text that a processor puts in an image's place (`replace_image_token`). `stock/check.py` proves what is found.

Shapes: U visual tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto, processing_auto

from vlmdistill.pipelines.targets.families import FAMILIES
from vlmdistill.pipelines.targets.families.family import Fact, Family, Inputs, Visual
from vlmdistill.stores.errors import TargetError

KINDS = ("mm_token_type_ids", "token_type_ids")  # 0 at text, 1 at image tokens
MODELS = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


class Found(Family):
    """Any model that transformers loads as image and text to text. Images only."""

    def __init__(self, model_type: str, name: str) -> None:
        if model_type not in MODELS:
            raise TargetError(
                f"model_type '{model_type}' is not supported: transformers {transformers.__version__} has no "
                f"vision-language model of that name, as it has {', '.join(FAMILIES)} and others"
            )
        super().__init__(model_type, name)
        named = processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type)
        self.processor_class = str(named or "AutoProcessor")

    @cached_property
    def mrope(self) -> bool:  # type: ignore[override]
        """Whether the model has a rule for positions in time, height and width."""
        base_name = modeling_auto.MODEL_MAPPING_NAMES.get(self.model_type)
        base = getattr(transformers, str(base_name), None)
        return hasattr(base, "get_rope_index")

    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """All images, by the model's own interface."""
        encode = model.model.get_image_features
        embed = encode(**_accepted(inputs, encode)).pooler_output
        if isinstance(embed, list | tuple):  # one tensor for each image
            embed = torch.cat(tuple(embed))
        return Visual(embed.flatten(0, -2))

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """Nothing: a processor's image token may stand for others, and the check runs both."""
        return []

    def image_lengths(
        self, config: Any, processor: Any, inputs: Mapping[str, Any], images: int
    ) -> list[int] | None:
        """By the processor, if it can tell from its output; else None."""
        try:
            return super().image_lengths(config, processor, inputs, images)
        except (AttributeError, KeyError, IndexError, NotImplementedError, TypeError):
            return None

    def accepts(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs that the forward pass or the vision tower has an argument for."""
        encode = model.model.get_image_features
        return _accepted(inputs, model.forward, model.model.forward, encode)

    def kind_inputs(self, model: Any) -> tuple[str, ...]:
        """By the arguments of the forward pass."""
        arguments = _arguments(model.forward, model.model.forward)
        return tuple(name for name in KINDS if name in arguments)

    def one_batch(self, samples: Sequence[Inputs]) -> bool:
        """Images of one size or number of tiles are concatenated, others take a pass each."""
        shapes = [_item_shapes(sample) for sample in samples if sample]
        return all(shape == shapes[0] for shape in shapes)


def _item_shapes(sample: Inputs) -> dict[str, torch.Size]:
    """The shape of one image's row of each input."""
    return {name: value.shape[1:] for name, value in sample.items()}


def _arguments(*functions: Callable[..., Any]) -> set[str]:
    """The names of the arguments of any of these functions."""
    names = set[str]()
    for function in functions:
        names.update(signature(function).parameters)
    return names


def _accepted(
    inputs: Mapping[str, Any], *functions: Callable[..., Any]
) -> dict[str, Any]:
    """The inputs that any of these functions has an argument for."""
    arguments = _arguments(*functions)
    return {name: value for name, value in inputs.items() if name in arguments}
