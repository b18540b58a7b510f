"""A family that nobody described: what it needs is found from the model and its processor.

transformers names the same things alike in all its models: the image placeholder (`image_token_id`), the
vision tower (`get_image_features`), the text model (`get_decoder`), the rotary rule (`get_rope_index`), the
text that a processor puts in an image's place (`replace_image_token`). `stock/check.py` proves what is found.

Shapes: U visual tokens.
"""

from collections.abc import Mapping, Sequence
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
        self.processor_class = str(
            processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type) or "AutoProcessor"
        )

    @cached_property
    def mrope(self) -> bool:  # type: ignore[override]
        """Whether the model has a rule for positions in time, height and width."""
        base = modeling_auto.MODEL_MAPPING_NAMES.get(self.model_type)
        return hasattr(getattr(transformers, str(base), None), "get_rope_index")

    def encode_images(self, model: Any, inputs: Inputs) -> Visual:
        """All images, by the model's own interface."""
        known = signature(model.model.get_image_features).parameters
        out = model.model.get_image_features(
            **{k: v for k, v in inputs.items() if k in known}
        )
        embed = out.pooler_output
        rows = torch.cat(tuple(embed)) if isinstance(embed, list | tuple) else embed
        return Visual(rows.flatten(0, -2))

    def facts(self, config: Any, processor: Any) -> list[Fact]:
        """Nothing: a processor's image token may stand for others, and the check runs both."""
        return []

    def image_lengths(
        self, config: Any, processor: Any, inputs: Mapping[str, Any], images: int
    ) -> list[int] | None:
        """As the processor says, if it can say so afterwards."""
        try:
            return super().image_lengths(config, processor, inputs, images)
        except (AttributeError, KeyError, IndexError, NotImplementedError, TypeError):
            return None

    def accepts(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the forward pass or the vision tower has an argument for."""
        passes = (model.forward, model.model.forward, model.model.get_image_features)
        known = {name for one in passes for name in signature(one).parameters}
        return {name: value for name, value in inputs.items() if name in known}

    def kind_inputs(self, model: Any) -> tuple[str, ...]:
        """By the arguments of the forward pass."""
        known = {
            *signature(model.forward).parameters,
            *signature(model.model.forward).parameters,
        }
        return tuple(name for name in KINDS if name in known)

    def one_batch(self, samples: Sequence[Inputs]) -> bool:
        """Images of one size or number of tiles are concatenated, others take a pass each."""
        shapes = [
            {name: value.shape[1:] for name, value in one.items()}
            for one in samples
            if one
        ]
        return all(shape == shapes[0] for shape in shapes)
