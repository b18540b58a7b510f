"""Runs in the engine: what vLLM 0.32 lacks for a capture, models and a scheduler that verifies no drafts.

The method `extract_hidden_states` drafts each token once more. To verify that costs a position in each step.
And vLLM on a CPU loses temperature and top-p when it verifies drafts (`expand_batch_to_tokens`).

Three models lack the interface by which layers are captured. Their text models capture (`EagleModelMixin`),
and their `forward` returns what the text model returns.
"""

from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsEagle, SupportsEagle3
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
)
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.v1.core.sched.scheduler import Scheduler


class UndraftedScheduler(Scheduler):
    """vLLM's own, but for the drafts."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Leave them."""


class CapturedQwen2VL(Qwen2VLForConditionalGeneration, SupportsEagle, SupportsEagle3):
    """Qwen2-VL."""


class CapturedLlavaNext(
    LlavaNextForConditionalGeneration, SupportsEagle, SupportsEagle3
):
    """LLaVA-NeXT."""


class CapturedLlavaOnevision(
    LlavaOnevisionForConditionalGeneration, SupportsEagle, SupportsEagle3
):
    """LLaVA-OneVision."""


def register_models() -> None:
    """Put the models in the place of those that they extend."""
    for model in (CapturedQwen2VL, CapturedLlavaNext, CapturedLlavaOnevision):
        ModelRegistry.register_model(model.__base__.__name__, model)
