"""Qwen2.5-VL: as Qwen2-VL, with windowed attention in the vision tower."""

from pathlib import Path
from typing import Any

from vlmdistill.pipelines.targets.family import GridFamily
from vlmdistill.pipelines.targets.processors import without_video
from vlmdistill.pipelines.targets.video import GridFrames, settings


class Qwen25VL(GridFamily):
    """Qwen2.5-VL."""

    name = "qwen2.5-vl"
    model_type = "qwen2_5_vl"
    text_types = ("qwen2_5_vl_text",)

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen2_5_VLProcessor", folder)

    def frames(self, folder: Path) -> GridFrames:
        """Pairs of frames, of any size."""
        return GridFrames(settings(folder))
