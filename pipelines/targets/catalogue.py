"""The families served and the published models known by a short name."""

from types import MappingProxyType

from vlmdistill.pipelines.targets.llava import Llava
from vlmdistill.pipelines.targets.llava_next import LlavaNext
from vlmdistill.pipelines.targets.llava_onevision import LlavaOnevision
from vlmdistill.pipelines.targets.qwen2_5_vl import Qwen25VL
from vlmdistill.pipelines.targets.qwen2_vl import Qwen2VL
from vlmdistill.pipelines.targets.qwen3_vl import Qwen3VL

FAMILIES = MappingProxyType(
    {
        family.model_type: family
        for family in (Llava(), LlavaNext(), LlavaOnevision(), Qwen2VL(), Qwen25VL(), Qwen3VL())
    }
)

HUB = MappingProxyType(
    {
        "llava-1.5-7b": "llava-hf/llava-1.5-7b-hf",
        "llava-1.5-13b": "llava-hf/llava-1.5-13b-hf",
        "llava-next-7b": "llava-hf/llava-v1.6-vicuna-7b-hf",
        "llava-next-13b": "llava-hf/llava-v1.6-vicuna-13b-hf",
        "llava-onevision-7b": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "qwen2-vl-7b": "Qwen/Qwen2-VL-7B-Instruct",
        "qwen2.5-vl-3b": "Qwen/Qwen2.5-VL-3B-Instruct",
        "qwen2.5-vl-7b": "Qwen/Qwen2.5-VL-7B-Instruct",
        "qwen2.5-vl-32b": "Qwen/Qwen2.5-VL-32B-Instruct",
        "qwen3-vl-4b": "Qwen/Qwen3-VL-4B-Instruct",
        "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
    }
)
