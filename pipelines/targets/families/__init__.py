"""The families of vision-language models: six that are described here, all others are found.

Light to import, so that an unsupported model fails before torch loads.
"""

import importlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.families.family import Family


@dataclass(frozen=True)
class FamilyEntry:
    """A family: its name, where its class is, and whether it reads videos."""

    name: str
    module: str
    kind: str
    videos: bool = True

    def load(self) -> "Family":
        """The family; TargetError if transformers has no model of that type."""
        made = getattr(importlib.import_module(f"{__name__}.{self.module}"), self.kind)
        family: Family = made(self.name) if self.module == "found" else made()
        return family


FAMILIES = MappingProxyType(
    {
        "llava": FamilyEntry("llava-1.5", "llava", "Llava", videos=False),
        "llava_next": FamilyEntry("llava-next", "llava", "LlavaNext", videos=False),
        "llava_onevision": FamilyEntry("llava-onevision", "llava", "LlavaOnevision"),
        "qwen2_vl": FamilyEntry("qwen2-vl", "qwen_vl", "Qwen2VL"),
        "qwen2_5_vl": FamilyEntry("qwen2.5-vl", "qwen_vl", "Qwen25VL"),
        "qwen3_vl": FamilyEntry("qwen3-vl", "qwen_vl", "Qwen3VL"),
    }
)
"""Those with a description, by the `model_type` of config.json."""

SHOWN = (
    "aya_vision",
    "cohere2_vision",
    "gemma3",
    "gemma4",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "minicpmv4_6",
    "mistral3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "smolvlm",
)
"""Those without one that `make test-families` takes through the whole flow. Others are checked on loading."""


def entry(model_type: str) -> FamilyEntry:
    """The family of a `model_type`: described here, or else to be found from the model."""
    return FAMILIES.get(model_type) or FamilyEntry(model_type, "found", "Found", videos=False)
