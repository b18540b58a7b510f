"""Qwen3-VL: interleaved M-RoPE, and deepstack: features of earlier vision layers enter after layers 0, 1, ...

So at visual positions the input of layer k is more than the output of layer k-1.
"""

from pathlib import Path
from typing import Any

from vlmdistill.pipelines.targets.family import GridFamily, Inputs
from vlmdistill.pipelines.targets.processors import without_video
from vlmdistill.pipelines.targets.video import TimedGridFrames, settings


class Qwen3VL(GridFamily):
    """Qwen3-VL."""

    name = "qwen3-vl"
    model_type = "qwen3_vl"
    text_types = ("qwen3_vl_text",)

    def processor(self, folder: Path) -> Any:
        """Load it without a video processor where torchvision is missing."""
        return without_video("Qwen3VLProcessor", folder)

    def frames(self, folder: Path) -> TimedGridFrames:
        """Pairs of frames, of any size, with the time of each pair in the prompt."""
        return TimedGridFrames(settings(folder))

    def runs(self, processor: Any, inputs: Inputs) -> list[int]:
        """Between two pairs of frames stands the time of the second."""
        merged = processor.video_processor.merge_size**2
        grids = inputs["video_grid_thw"].tolist() if "video_grid_thw" in inputs else []
        return [height * width // merged for time, height, width in grids for _ in range(time)]
