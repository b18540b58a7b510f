"""The families served and the published models known by a short name."""

from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True)
class Published:
    """A published model: where it is, and how many parameters its configuration makes, a tied table once."""

    hub: str
    model_type: str
    parameters: int


REGISTRY = MappingProxyType(
    {
        "llava-1.5-7b": Published("llava-hf/llava-1.5-7b-hf", "llava", 7_063_427_072),
        "llava-1.5-13b": Published("llava-hf/llava-1.5-13b-hf", "llava", 13_351_494_656),
        "llava-next-7b": Published("llava-hf/llava-v1.6-vicuna-7b-hf", "llava_next", 7_063_431_168),
        "llava-next-13b": Published("llava-hf/llava-v1.6-vicuna-13b-hf", "llava_next", 13_351_499_776),
        "llava-onevision-7b": Published(
            "llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava_onevision", 8_030_807_584
        ),
        "qwen2-vl-7b": Published("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", 8_291_375_616),
        "qwen2.5-vl-3b": Published("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl", 3_754_622_976),
        "qwen2.5-vl-7b": Published("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", 8_292_166_656),
        "qwen2.5-vl-32b": Published("Qwen/Qwen2.5-VL-32B-Instruct", "qwen2_5_vl", 33_452_718_336),
        "qwen3-vl-4b": Published("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl", 4_437_815_808),
        "qwen3-vl-8b": Published("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl", 8_767_123_696),
    }
)

HUB = MappingProxyType({name: model.hub for name, model in REGISTRY.items()})


def shipped(name: str) -> Path | None:
    """The `config.json` of a registry name, or of its hub id, as published; None for any other.

    It holds what decides shapes, positions and tokens, and tells a target's sizes without its weights.
    """
    for short, hub in HUB.items():
        if name in (short, hub):
            return Path(__file__).with_name("configs") / f"{short}.json"
    return None
