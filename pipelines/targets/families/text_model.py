"""The text model inside of a vision-language model, and its scaling of embeddings and logits.

Shapes: N rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmdistill.stores.errors import TargetError


def text_model(model: Any) -> Any:
    """The text model inside of a vision-language model, or of its skeleton.

    TargetError if it has no list of layers.
    """
    text = model.get_decoder()
    if not isinstance(getattr(text, "layers", None), nn.ModuleList):
        raise TargetError(
            f"{type(model).__name__} has no list of text layers: this model is not supported"
        )
    return text


def embed_scale(text: Any) -> float:
    """The factor of a text model's embeddings: Gemma scales in their module, Granite after it."""
    in_module = getattr(text.get_input_embeddings(), "scalar_embed_scale", 1.0)
    after_module = getattr(text.config, "embedding_multiplier", 1.0)
    return float(in_module) * float(after_module)


@dataclass(frozen=True)
class LogitRule:
    """How a model turns the output of its LM head into logits."""

    scale: float = 1.0  # Cohere, Granite
    limit: float | None = None  # a soft one: Gemma

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """The logits [N, V] of the LM head's output."""
        return self.limited(logits_NV * self.scale)

    def limited(self, logits_NV: Tensor) -> Tensor:
        """Scaled logits within the soft limit."""
        if self.limit is None:
            return logits_NV
        return torch.tanh(logits_NV / self.limit) * self.limit


def logit_rules(config: Any) -> list[LogitRule]:
    """The rules that a text model's configuration allows for: not every class heeds it."""
    factor = getattr(config, "logit_scale", None) or 1
    divisor = getattr(config, "logits_scaling", None) or 1
    scales = {1.0, float(factor), 1 / float(divisor)}
    limits = {None, getattr(config, "final_logit_softcapping", None)}
    return [LogitRule(scale, limit) for scale in scales for limit in limits]
