"""Video processors that need no torchvision: from a video to sampled frames and pixel tensors.

They compute what the stock video processors of transformers compute, from the same files: each family's rules
for sampling and sizes, bicubic resizing of 8-bit frames with antialiasing, then
`(x - mean / scale) / (std / scale)`.

Shapes: F frames, H height, W width, C colors, T temporal patches, P patches, E values of a patch.
"""

import abc
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    smart_resize as smart_resize_all,
)
from transformers.video_utils import VideoMetadata

from vlmdistill.pipelines.media.frames import Footage, read
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import Array

CHUNK = 32  # frames resized at once
RESAMPLING = {
    2: "bilinear",
    3: "bicubic",
}  # Pillow's numbers, as in configuration files


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video are sampled."""

    indices: tuple[int, ...]
    total: int  # frames of the video
    fps: float  # of the video; for images without timestamps, the assumed rate

    @property
    def seconds(self) -> tuple[float, ...]:
        """The time of each frame, as the stock processors compute it."""
        return tuple(index / self.fps for index in self.indices)

    @property
    def metadata(self) -> VideoMetadata:
        """The same in the form of transformers."""
        return VideoMetadata(
            total_num_frames=self.total,
            fps=self.fps,
            duration=self.total / self.fps,
            frames_indices=list(self.indices),
        )


class FrameProcessor(abc.ABC):
    """One family's rules for video; replaces the `video_processor` of a stock processor.

    `settings` come from the checkpoint's files; missing ones have the defaults of the stock class.
    """

    stock: ClassVar[Mapping[str, Any]]
    model_input_names: ClassVar[list[str]]

    def __init__(self, settings: Mapping[str, Any]):
        known = {name: value for name, value in settings.items() if value is not None}
        values = {"resample": 3, "rescale_factor": 1 / 255, **self.stock, **known}
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not values.get(name, True):
                raise TargetError(
                    f"a video processor with {name} false is not supported"
                )
        if values.get("do_center_crop") or values["resample"] not in RESAMPLING:
            raise TargetError(
                "a video processor that crops, or with a resample other than 2 or 3, is not supported"
            )
        self.mode = RESAMPLING[values["resample"]]
        scale = 1.0 / values["rescale_factor"]
        self._mean_C11 = torch.tensor(values["image_mean"])[:, None, None] * scale
        self._std_C11 = torch.tensor(values["image_std"])[:, None, None] * scale
        self.fps: float | None = values.get("fps")
        self.num_frames: int | None = values.get("num_frames")
        self.min_frames: int = values.get("min_frames", 1)
        self.max_frames: int = values.get("max_frames", 2**31)
        self._read(values)

    @abc.abstractmethod
    def _read(self, values: Mapping[str, Any]) -> None:
        """Read the settings of the family."""

    def count(self, footage: Footage, fps: float | None, frames: int | None) -> int:
        """How many frames to sample by `fps` per second or by a number of `frames`; one of them is given.

        By `fps`, the number is within the limits of frames.
        """
        if frames is not None:
            return frames
        return min(max(int(at_rate(footage, fps)), self.min_frames), self.max_frames)

    @abc.abstractmethod
    def indices(self, total: int, count: int) -> list[int]:
        """The indices of `count` frames out of `total`."""

    @abc.abstractmethod
    def __call__(
        self, videos: Any, video_metadata: Sequence[VideoMetadata] = (), **_: Any
    ) -> dict[str, Any]:
        """The pixel tensors of videos uint8 [F, H, W, C], which may be in nested lists."""

    def sample(
        self, source: Any, fps: float | None = None, frames: int | None = None
    ) -> tuple[Array, FrameSampling]:
        """Sample a video (see `frames.read`) by `fps` or by a number of `frames`: uint8 [F, H, W, C].

        All frames of a shorter video are taken. Images without timestamps (a folder, a list, an array) count
        as sampled already, at `fps` per second; `frames` takes fewer of them. Raises DataError on invalid
        settings, and what `frames.read` raises.
        """
        if fps is not None and frames is not None:
            raise DataError(
                f"a video is sampled by fps or by frames, not by both: give fps {fps} or frames {frames}"
            )
        timed = fps is None or (isinstance(fps, int | float) and 0 < fps < math.inf)
        counted = frames is None or (isinstance(frames, int) and frames > 0)
        if not (timed and counted):
            raise DataError(
                f"a video cannot be sampled by fps {fps} or frames {frames}: give more than 0"
            )
        clip = read(source, lambda footage: self.choose(footage, fps, frames))
        rate = clip.footage.fps or fps or self.fps or 2.0
        return clip.frames_FHWC, FrameSampling(clip.indices, clip.footage.total, rate)

    def choose(
        self, footage: Footage, fps: float | None = None, frames: int | None = None
    ) -> list[int]:
        """The indices of the frames that `sample` takes."""
        if fps is None and frames is None:
            fps, frames = (
                (None, self.num_frames) if self.num_frames else (self.fps, None)
            )
        if footage.fps is None and frames is None:
            count = min(footage.total, self.max_frames)
        else:
            count = self.count(footage, fps, frames)
        return self.indices(footage.total, max(1, min(count, footage.total)))

    def resized(self, frames_FHWC: Tensor, height: int, width: int) -> Tensor:
        """Frames resized and normalized, float32 [F, C, height, width]."""
        frames_FCHW = frames_FHWC.permute(0, 3, 1, 2)
        if frames_FCHW.shape[2:] != (height, width):
            frames_FCHW = torch.nn.functional.interpolate(
                frames_FCHW,
                (height, width),
                mode=self.mode,
                align_corners=False,
                antialias=True,
            )
        return frames_FCHW.to(torch.float32).sub_(self._mean_C11).div_(self._std_C11)


class GridFrames(FrameProcessor):
    """Qwen2-VL and Qwen2.5-VL: pairs of frames of any size, a limit of pixels per frame."""

    stock: ClassVar[Mapping[str, Any]] = {
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "fps": 2.0,  # as in qwen-vl-utils; the stock class has no default
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 128000,
    }
    model_input_names: ClassVar[list[str]] = ["pixel_values_videos", "video_grid_thw"]

    def _read(self, values: Mapping[str, Any]) -> None:
        size = values["size"]
        self.min_pixels: int = (
            values.get("min_pixels") or size.get("shortest_edge") or size["min_pixels"]
        )
        self.max_pixels: int = (
            values.get("max_pixels") or size.get("longest_edge") or size["max_pixels"]
        )
        self.patch_size: int = values["patch_size"]
        self.temporal_patch_size: int = values["temporal_patch_size"]
        self.merge_size: int = values["merge_size"]
        self.max_video_tokens: int = values["max_video_tokens"]
        self.capped = bool(values.get("cap_pixels_per_frame"))

    def count(self, footage: Footage, fps: float | None, frames: int | None) -> int:
        """A multiple of the temporal patch; by `fps`, within the limits of frames."""
        step, total = self.temporal_patch_size, footage.total
        if frames is not None:
            return min(round(frames / step), total // step) * step or min(step, total)
        wanted = at_rate(footage, fps)
        most = min(self.max_frames, total) // step * step
        return math.floor(min(max(wanted, self.min_frames), most) / step) * step

    def indices(self, total: int, count: int) -> list[int]:
        """From the first one in equal steps, rounded down in single precision."""
        return torch.arange(0, total, total / count).int().tolist()[:count]

    def pixels(self, count: int) -> int:
        """The most pixels of a frame if there are `count` frames."""
        if not self.capped:
            return self.max_pixels
        budget = int(self.max_video_tokens * self._factor**2 * 0.9)
        return max(
            min(self.max_pixels, budget * self.temporal_patch_size // count),
            int(self.min_pixels * 1.05),
        )

    @property
    def _factor(self) -> int:
        return self.patch_size * self.merge_size

    def target_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that the frames are resized to."""
        size: tuple[int, int] = smart_resize(
            height,
            width,
            factor=self._factor,
            min_pixels=self.min_pixels,
            max_pixels=self.pixels(count),
        )
        return size

    def __call__(
        self, videos: Any, video_metadata: Sequence[VideoMetadata] = (), **_: Any
    ) -> dict[str, Any]:
        """Patches of all videos [P, E], and the grid (time, height, width) of each."""
        made = [self._patches(video) for video in flat(videos)]
        return {
            "pixel_values_videos": concatenated([patches_PE for patches_PE, _ in made]),
            "video_grid_thw": torch.tensor([grid for _, grid in made]),
            "video_metadata": list(video_metadata),
        }

    def _patches(self, frames_FHWC: Tensor) -> tuple[Tensor, list[int]]:
        step, patch, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        count, height, width, _ = frames_FHWC.shape
        if lacking := -count % step:  # repeat the last frame
            frames_FHWC = torch.cat(
                [frames_FHWC, frames_FHWC[-1:].expand(lacking, -1, -1, -1)]
            )
        height, width = self.target_size(count, height, width)
        grid = [len(frames_FHWC) // step, height // patch, width // patch]
        all_PE = torch.empty(math.prod(grid), 3 * step * patch * patch)
        part = math.ceil(CHUNK / step) * step
        rows = grid[1] * grid[2] * part // step
        for number, start in enumerate(range(0, len(frames_FHWC), part)):
            frames_FCHW = self.resized(frames_FHWC[start : start + part], height, width)
            cut = frames_FCHW.view(
                -1,
                step,
                3,
                grid[1] // merge,
                merge,
                patch,
                grid[2] // merge,
                merge,
                patch,
            ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
            patches_PE = cut.reshape(-1, all_PE.shape[1])
            all_PE[number * rows : number * rows + len(patches_PE)] = patches_PE
        return all_PE, grid


class TimedGridFrames(GridFrames):
    """Qwen3-VL: one limit of pixels for all frames; samples include the first and the last frame."""

    stock: ClassVar[Mapping[str, Any]] = {
        **GridFrames.stock,
        "image_mean": IMAGENET_STANDARD_MEAN,
        "image_std": IMAGENET_STANDARD_STD,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "patch_size": 16,
        "max_video_tokens": 768,
    }

    count = FrameProcessor.count  # not in pairs

    def indices(self, total: int, count: int) -> list[int]:
        """From the first to the last one in equal steps."""
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def pixels(self, count: int) -> int:
        """The most pixels of all frames together."""
        if not self.capped:
            return self.max_pixels
        frame = min(self.max_video_tokens * self._factor**2, self.max_pixels // count)
        return max(frame, int(self.min_pixels * 1.05)) * count

    def target_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Both limits count the pixels of all frames."""
        size: tuple[int, int] = smart_resize_all(
            max(
                count, self.temporal_patch_size
            ),  # the stock rule refuses a single frame
            height,
            width,
            temporal_factor=self.temporal_patch_size,
            factor=self._factor,
            min_pixels=self.min_pixels,
            max_pixels=self.pixels(count),
        )
        return size


class SquareFrames(FrameProcessor):
    """LLaVA-OneVision: 32 frames, resized to the square of the vision tower."""

    stock: ClassVar[Mapping[str, Any]] = {
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
        "size": {"height": 384, "width": 384},
        "num_frames": 32,  # of the paper (arXiv 2408.03326); the stock class has no default
    }
    model_input_names: ClassVar[list[str]] = ["pixel_values_videos"]

    def _read(self, values: Mapping[str, Any]) -> None:
        size = values["size"]
        if not {"height", "width"} <= size.keys():
            raise TargetError(
                f"a video processor with the size {dict(size)} is not supported: give height and width"
            )
        self.height: int = size["height"]
        self.width: int = size["width"]

    def indices(self, total: int, count: int) -> list[int]:
        """From the first one in equal steps, rounded down."""
        return [index * total // count for index in range(count)]

    def __call__(
        self, videos: Any, video_metadata: Sequence[VideoMetadata] = (), **_: Any
    ) -> dict[str, Any]:
        """All videos [videos, F, C, height, width]; a list of them if they differ in F."""
        resized: list[Tensor] = []
        for frames_FHWC in flat(videos):
            out_FCHW = torch.empty(len(frames_FHWC), 3, self.height, self.width)
            for start in range(0, len(frames_FHWC), CHUNK):
                part = frames_FHWC[start : start + CHUNK]
                out_FCHW[start : start + CHUNK] = self.resized(
                    part, self.height, self.width
                )
            resized.append(out_FCHW)
        equal = len({len(out_FCHW) for out_FCHW in resized}) == 1
        return {
            "pixel_values_videos": concatenated([video[None] for video in resized])
            if equal
            else resized,
            "video_metadata": list(video_metadata),
        }


def at_rate(footage: Footage, fps: float | None) -> float:
    """The number of frames at `fps` per second, at most all of them."""
    return min(footage.total, footage.total / (footage.fps or 1.0) * (fps or 1.0))


def concatenated(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension; a single tensor, such as a long video, is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def flat(videos: Any) -> list[Tensor]:
    """The videos of nested lists in one list, as tensors uint8 [F, H, W, C]."""
    if isinstance(videos, list | tuple):
        return [video for part in videos for video in flat(part)]
    return [torch.from_numpy(np.ascontiguousarray(videos))]


def settings(folder: Path) -> dict[str, Any]:
    """A checkpoint's video settings, from the file that the stock processor would read them from."""
    files = {
        name: json.loads((folder / name).read_text(encoding="utf-8"))
        for name in (
            "processor_config.json",
            "video_preprocessor_config.json",
            "preprocessor_config.json",
        )
        if (folder / name).is_file()
    }
    nested = files.pop("processor_config.json", {}).get("video_processor")
    return nested or next(iter(files.values()), {})
