"""Qwen2-VL: any resolution, 2x2 patches merged into a token, M-RoPE."""

from pathlib import Path
from typing import Any

from vlmdistill.pipelines.targets.family import GridFamily
from vlmdistill.pipelines.targets.processors import without_video
from vlmdistill.pipelines.targets.video import GridFrames, settings


class Qwen2VL(GridFamily):
    """Qwen2-VL."""

    name = "qwen2-vl"
    model_type = "qwen2_vl"
    text_types = ("qwen2_vl_text",)

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen2VLProcessor", folder)

    def frames(self, folder: Path) -> GridFrames:
        """Pairs of frames, of any size."""
        return GridFrames(settings(folder))
