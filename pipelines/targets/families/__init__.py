"""The supported families of vision-language models."""

from types import MappingProxyType

from vlmdistill.pipelines.targets.families.llava import Llava, LlavaNext, LlavaOnevision
from vlmdistill.pipelines.targets.families.qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL

FAMILIES = MappingProxyType(
    {
        family.model_type: family
        for family in (Llava(), LlavaNext(), LlavaOnevision(), Qwen2VL(), Qwen25VL(), Qwen3VL())
    }
)
"""By the `model_type` of config.json."""
