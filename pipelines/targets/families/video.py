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
# Pillow's numbers, as in configuration files.
RESAMPLING = {2: "bilinear", 3: "bicubic"}
# Of these files, the stock processor reads the first that exists.
SETTINGS = ("video_preprocessor_config.json", "preprocessor_config.json")


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
        values: dict[str, Any] = {"resample": 3, "rescale_factor": 1 / 255}
        values |= self.stock
        for name, value in settings.items():
            if value is not None:
                values[name] = value
        _check_supported(values)
        self.mode = RESAMPLING[values["resample"]]
        scale = 1.0 / values["rescale_factor"]
        mean_C = torch.tensor(values["image_mean"]) * scale
        std_C = torch.tensor(values["image_std"]) * scale
        self._mean_C11 = mean_C[:, None, None]
        self._std_C11 = std_C[:, None, None]
        self.fps: float | None = values.get("fps")
        self.num_frames: int | None = values.get("num_frames")
        self.min_frames: int = values.get("min_frames", 1)
        self.max_frames: int = values.get("max_frames", 2**31)
        self._read(values)

    @abc.abstractmethod
    def _read(self, values: Mapping[str, Any]) -> None:
        """Read the settings of the family."""

    def count(self, footage: Footage, fps: float | None, frames: int | None) -> int:
        """The number of frames to sample: `frames`, or `fps` per second within the limits.

        One of the two is None.
        """
        if frames is not None:
            return frames
        wanted = max(int(at_rate(footage, fps)), self.min_frames)
        return min(wanted, self.max_frames)

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

        All frames of a shorter video are taken. Images without timestamps (a folder, a
        list, an array) count as sampled already, at `fps` per second; `frames` takes
        fewer of them. DataError on invalid settings, and the errors of `frames.read`.
        """
        _check_sampling(fps, frames)
        clip = read(source, lambda footage: self.choose(footage, fps, frames))
        rate = clip.footage.fps or fps or self.fps or 2.0
        return clip.frames_FHWC, FrameSampling(clip.indices, clip.footage.total, rate)

    def choose(
        self, footage: Footage, fps: float | None = None, frames: int | None = None
    ) -> list[int]:
        """The indices of the frames that `sample` takes."""
        if fps is None and frames is None:  # the checkpoint's setting
            if self.num_frames:
                frames = self.num_frames
            else:
                fps = self.fps
        if footage.fps is None and frames is None:
            count = min(footage.total, self.max_frames)
        else:
            count = self.count(footage, fps, frames)
        possible = max(1, min(count, footage.total))
        return self.indices(footage.total, possible)

    def resized(self, frames_FHWC: Tensor, height: int, width: int) -> Tensor:
        """Frames resized and normalized, float32 [F, C, height, width]."""
        # Sizes change in 8 bits, as in the stock processors; then the values are floats.
        frames_FCHW = frames_FHWC.permute(0, 3, 1, 2)
        if frames_FCHW.shape[2:] != (height, width):
            frames_FCHW = torch.nn.functional.interpolate(
                frames_FCHW,
                (height, width),
                mode=self.mode,
                align_corners=False,
                antialias=True,
            )
        values_FCHW = frames_FCHW.to(torch.float32)
        return values_FCHW.sub_(self._mean_C11).div_(self._std_C11)


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
        fewest = values.get("min_pixels") or size.get("shortest_edge")
        most = values.get("max_pixels") or size.get("longest_edge")
        self.min_pixels: int = fewest or size["min_pixels"]
        self.max_pixels: int = most or size["max_pixels"]
        self.patch_size: int = values["patch_size"]
        self.temporal_patch_size: int = values["temporal_patch_size"]
        self.merge_size: int = values["merge_size"]
        self.max_video_tokens: int = values["max_video_tokens"]
        self.capped = bool(values.get("cap_pixels_per_frame"))

    def count(self, footage: Footage, fps: float | None, frames: int | None) -> int:
        """A multiple of the temporal patch; by `fps`, within the limits of frames."""
        step = self.temporal_patch_size
        total = footage.total
        if frames is not None:
            patches = min(round(frames / step), total // step)
            return patches * step or min(step, total)
        wanted = max(at_rate(footage, fps), self.min_frames)
        most = min(self.max_frames, total) // step * step
        return math.floor(min(wanted, most) / step) * step

    def indices(self, total: int, count: int) -> list[int]:
        """From the first one in equal steps, rounded down in single precision."""
        steps = torch.arange(0, total, total / count)
        indices: list[int] = steps.int().tolist()
        return indices[:count]

    def pixels(self, count: int) -> int:
        """The most pixels of a frame if there are `count` frames."""
        if not self.capped:
            return self.max_pixels
        budget = int(self.max_video_tokens * self._factor**2 * 0.9)
        share = budget * self.temporal_patch_size // count
        least = int(self.min_pixels * 1.05)
        return max(min(self.max_pixels, share), least)

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
        patches: list[Tensor] = []
        grids: list[list[int]] = []
        for frames_FHWC in flat(videos):
            patches_PE, grid = self._patches(frames_FHWC)
            patches.append(patches_PE)
            grids.append(grid)
        return {
            "pixel_values_videos": concatenated(patches),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": list(video_metadata),
        }

    def _patches(self, frames_FHWC: Tensor) -> tuple[Tensor, list[int]]:
        """The patches of a video [P, E], and its grid (time, height, width) of patches."""
        step = self.temporal_patch_size
        patch = self.patch_size
        count, height, width, _ = frames_FHWC.shape
        if lacking := -count % step:  # repeat the last frame
            last_FHWC = frames_FHWC[-1:].expand(lacking, -1, -1, -1)
            frames_FHWC = torch.cat([frames_FHWC, last_FHWC])
        height, width = self.target_size(count, height, width)
        grid = [len(frames_FHWC) // step, height // patch, width // patch]
        patch_values = 3 * step * patch * patch
        video_PE = torch.empty(math.prod(grid), patch_values)

        # Chunk by chunk: the float32 frames of a long video take too much memory at once.
        chunk_frames = math.ceil(CHUNK / step) * step
        end = 0
        for chunk_FHWC in torch.split(frames_FHWC, chunk_frames):
            resized_FCHW = self.resized(chunk_FHWC, height, width)
            chunk_PE = self._cut(resized_FCHW, grid)
            start, end = end, end + len(chunk_PE)
            video_PE[start:end] = chunk_PE
        return video_PE, grid

    def _cut(self, frames_FCHW: Tensor, grid: list[int]) -> Tensor:
        """Resized frames as patches [P, E], in the order in which the tower merges them."""
        step, patch, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        _, rows, columns = grid
        # Axes: time, frame, color, then block, merged patch and pixel of both sides.
        sides = (rows // merge, merge, patch, columns // merge, merge, patch)
        blocks = frames_FCHW.view(-1, step, 3, *sides)
        ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(-1, 3 * step * patch * patch)


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
        steps = np.linspace(0, total - 1, count)
        return [int(index) for index in steps.round()]

    def pixels(self, count: int) -> int:
        """The most pixels of all frames together."""
        if not self.capped:
            return self.max_pixels
        most = self.max_video_tokens * self._factor**2
        frame_pixels = min(most, self.max_pixels // count)
        return max(frame_pixels, int(self.min_pixels * 1.05)) * count

    def target_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Both limits count the pixels of all frames."""
        # The stock rule refuses a single frame.
        frames = max(count, self.temporal_patch_size)
        size: tuple[int, int] = smart_resize_all(
            frames,
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
                f"a video processor with the size {dict(size)} is not supported: "
                "give height and width"
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
        resized = [self._squares(frames_FHWC) for frames_FHWC in flat(videos)]
        pixels: Tensor | list[Tensor] = resized
        lengths = {len(video_FCHW) for video_FCHW in resized}
        if len(lengths) == 1:
            pixels = concatenated([video_FCHW[None] for video_FCHW in resized])
        return {
            "pixel_values_videos": pixels,
            "video_metadata": list(video_metadata),
        }

    def _squares(self, frames_FHWC: Tensor) -> Tensor:
        """The resized frames of a video [F, C, height, width], a few at a time."""
        video_FCHW = torch.empty(len(frames_FHWC), 3, self.height, self.width)
        for start in range(0, len(frames_FHWC), CHUNK):
            chunk_FHWC = frames_FHWC[start : start + CHUNK]
            chunk_FCHW = self.resized(chunk_FHWC, self.height, self.width)
            video_FCHW[start : start + CHUNK] = chunk_FCHW
        return video_FCHW


def _check_supported(values: Mapping[str, Any]) -> None:
    """TargetError for settings of a stock video processor that are not supported here."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not values.get(name, True):
            raise TargetError(f"a video processor with {name} false is not supported")
    if values.get("do_center_crop") or values["resample"] not in RESAMPLING:
        raise TargetError(
            "a video processor that crops, or with a resample other than 2 or 3, "
            "is not supported"
        )


def _check_sampling(fps: float | None, frames: int | None) -> None:
    """DataError unless at most one of both is set, and above 0."""
    if fps is not None and frames is not None:
        raise DataError(
            "a video is sampled by fps or by frames, not by both: "
            f"give fps {fps} or frames {frames}"
        )
    is_rate = isinstance(fps, int | float) and 0 < fps < math.inf
    is_count = isinstance(frames, int) and frames > 0
    if not (fps is None or is_rate) or not (frames is None or is_count):
        raise DataError(
            f"a video cannot be sampled by fps {fps} or frames {frames}: "
            "give more than 0"
        )


def at_rate(footage: Footage, fps: float | None) -> float:
    """The number of frames at `fps` per second, at most all of them."""
    seconds = footage.total / (footage.fps or 1.0)
    return min(footage.total, seconds * (fps or 1.0))


def concatenated(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension; a single tensor, such as a long video, is not copied."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat(list(rows))


def flat(videos: Any) -> list[Tensor]:
    """The videos of nested lists in one list, as tensors uint8 [F, H, W, C]."""
    if isinstance(videos, list | tuple):
        return [video for part in videos for video in flat(part)]
    return [torch.from_numpy(np.ascontiguousarray(videos))]


def settings(folder: Path) -> dict[str, Any]:
    """A checkpoint's video settings, from the file that the stock processor would read them from."""
    files = [folder / name for name in SETTINGS]
    stored = [_read_json(file) for file in files if file.is_file()]
    in_one = folder / "processor_config.json"
    if in_one.is_file() and (nested := _read_json(in_one).get("video_processor")):
        return dict(nested)
    return stored[0] if stored else {}


def _read_json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return value
