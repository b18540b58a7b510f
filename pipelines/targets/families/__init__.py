"""The supported families of vision-language models.

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
        """The family."""
        family: Family = getattr(importlib.import_module(f"{__name__}.{self.module}"), self.kind)()
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
"""By the `model_type` of config.json."""
