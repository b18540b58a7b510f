"""The families of vision-language models: six are described here, others are found.

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
    """Where the class of a family is, and whether the family reads videos."""

    model_type: str  # in config.json
    name: str
    module: str
    kind: str  # the name of the class in `module`
    videos: bool = True

    def load(self) -> "Family":
        """The family; TargetError if transformers has no model of that type."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        family_class = getattr(module, self.kind)
        family: Family = family_class(self.model_type, self.name)
        return family


_DESCRIBED = (
    FamilyEntry("llava", "llava-1.5", "llava", "Llava", videos=False),
    FamilyEntry("llava_next", "llava-next", "llava", "LlavaNext", videos=False),
    FamilyEntry("llava_onevision", "llava-onevision", "llava", "LlavaOnevision"),
    FamilyEntry("qwen2_vl", "qwen2-vl", "qwen_vl", "Qwen2VL"),
    FamilyEntry("qwen2_5_vl", "qwen2.5-vl", "qwen_vl", "Qwen25VL"),
    FamilyEntry("qwen3_vl", "qwen3-vl", "qwen_vl", "Qwen3VL"),
)
FAMILIES = MappingProxyType({family.model_type: family for family in _DESCRIBED})
"""Families with a description, by their `model_type`."""

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
"""Families without a description that `make test-families` takes through the whole flow.

Others are checked on loading.
"""


def entry(model_type: str) -> FamilyEntry:
    """The family of a `model_type`: described here, or else to be found from the model."""
    if described := FAMILIES.get(model_type):
        return described
    return FamilyEntry(model_type, model_type, "found", "Found", videos=False)
