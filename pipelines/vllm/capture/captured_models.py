"""Runs in the engine: models of vLLM 0.32 that lack the interface by which layers are captured, with it.

Their text models capture (`EagleModelMixin`), and their `forward` returns what the text model returns.
"""

from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsEagle, SupportsEagle3
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration


class CapturedQwen2VL(Qwen2VLForConditionalGeneration, SupportsEagle, SupportsEagle3):
    """Qwen2-VL."""


class CapturedLlavaNext(LlavaNextForConditionalGeneration, SupportsEagle, SupportsEagle3):
    """LLaVA-NeXT."""


class CapturedLlavaOnevision(LlavaOnevisionForConditionalGeneration, SupportsEagle, SupportsEagle3):
    """LLaVA-OneVision."""


def register() -> None:
    """Put them in the place of the models that they extend."""
    for model in (CapturedQwen2VL, CapturedLlavaNext, CapturedLlavaOnevision):
        ModelRegistry.register_model(model.__base__.__name__, model)
