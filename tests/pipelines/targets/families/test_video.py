"""The frame processors against the formulas of the stock ones, and against image processors."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests import tiny
from vlmdistill.pipelines.media.frames import Footage
from vlmdistill.pipelines.targets.families.video import (
    FrameProcessor,
    GridFrames,
    SquareFrames,
    TimedGridFrames,
)
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import DataError, TargetError

SMALL = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 20}}


def test_patches_are_in_the_order_of_the_formula() -> None:
    """Frames of a size that needs no resizing; the last one of an odd number is shown twice."""
    processor, frames_FHWC = GridFrames(SMALL), tiny.clip(5, 84, 56)
    out = processor(frames_FHWC)
    assert out["video_grid_thw"].tolist() == [[3, 4, 6]]
    mean, std = np.array(processor.stock["image_mean"]), np.array(processor.stock["image_std"])
    shown = (np.concatenate([frames_FHWC, frames_FHWC[-1:]]) / 255 - mean) / std
    rows = iter(out["pixel_values_videos"].view(-1, 3, 2, 14, 14).numpy())
    for pair in range(3):
        for block_y, block_x in np.ndindex(2, 3):  # 2x2 patches become one token
            for y, x in np.ndindex(2, 2):
                top, left = 28 * block_y + 14 * y, 28 * block_x + 14 * x
                patch_FHWC = shown[2 * pair : 2 * pair + 2, top : top + 14, left : left + 14]
                np.testing.assert_allclose(next(rows), patch_FHWC.transpose(3, 0, 1, 2), atol=1e-5)
    assert next(rows, None) is None


@pytest.mark.parametrize(("width", "height"), [(84, 56), (90, 64), (57, 130), (200, 31)])
def test_a_still_video_is_the_still_image(width: int, height: int) -> None:
    """Two equal frames have the patches of the image; resized, they may round differently by a level."""
    still_HWC = tiny.clip(1, width, height)[0]
    image = transformers.Qwen2VLImageProcessorPil(**SMALL)(still_HWC, return_tensors="pt")
    video = GridFrames(SMALL)(np.stack([still_HWC, still_HWC]))
    assert torch.equal(video["video_grid_thw"], image["image_grid_thw"])
    level = 1 / 255 / min(GridFrames.stock["image_std"])
    tolerance = 1e-5 if (width, height) == (84, 56) else 2 * level
    torch.testing.assert_close(video["pixel_values_videos"], image["pixel_values"], atol=tolerance, rtol=0)


def test_a_frame_of_onevision_is_its_overview_of_an_image() -> None:
    settings = {"size": {"height": 28, "width": 28}}
    frames_FHWC = tiny.clip(3, 50, 40)
    video = SquareFrames(settings)(frames_FHWC)["pixel_values_videos"][0]
    images = transformers.LlavaOnevisionImageProcessorPil(**settings, image_grid_pinpoints=[[28, 28]])
    for frame, image_HWC in zip(video, frames_FHWC, strict=True):
        overview = images(image_HWC, return_tensors="pt")["pixel_values"][0, 0]
        torch.testing.assert_close(frame, overview, atol=2 / 255 / 0.26, rtol=0)


def test_long_videos_are_processed_in_parts() -> None:
    frames_FHWC = tiny.clip(71, 60, 40)
    whole = GridFrames(SMALL)(frames_FHWC)
    rows = whole["video_grid_thw"][0, 1:].prod()
    for pair in (0, 15, 16, 35):
        part = GridFrames(SMALL)(frames_FHWC[2 * pair : 2 * pair + 2])["pixel_values_videos"]
        assert torch.equal(whole["pixel_values_videos"][pair * rows : (pair + 1) * rows], part)


@pytest.mark.parametrize(
    ("processor", "wanted", "indices"),
    [
        (GridFrames({}), {}, [0, 7, 15, 22, 30, 37, 45, 52]),  # 2 a second of 60 frames in 4 seconds
        (GridFrames({}), {"fps": 0.1}, [0, 15, 30, 45]),  # at least 4
        (GridFrames({"max_frames": 6}), {"fps": 15}, [0, 10, 20, 30, 40, 50]),
        (GridFrames({}), {"frames": 5}, [0, 15, 30, 45]),  # pairs
        (GridFrames({"fps": 1}), {}, [0, 15, 30, 45]),
        (TimedGridFrames({}), {}, [0, 8, 17, 25, 34, 42, 51, 59]),  # the first and the last
        (TimedGridFrames({}), {"frames": 3}, [0, 30, 59]),
        (SquareFrames({}), {"frames": 7}, [0, 8, 17, 25, 34, 42, 51]),
        (SquareFrames({}), {"fps": 1}, [0, 15, 30, 45]),
        (SquareFrames({"num_frames": 4}), {}, [0, 15, 30, 45]),
    ],
)
def test_frames_are_chosen_by_the_rule_of_the_family(
    processor: FrameProcessor, wanted: dict[str, Any], indices: list[int]
) -> None:
    assert processor.choose(Footage(60, 15.0), **wanted) == indices


def test_defaults_are_two_a_second_or_thirty_two() -> None:
    minute = Footage(1800, 30.0)
    assert [len(p({}).choose(minute)) for p in (GridFrames, TimedGridFrames, SquareFrames)] == [120, 120, 32]
    hour = Footage(108000, 30.0)
    assert [len(p({}).choose(hour)) for p in (GridFrames, TimedGridFrames, SquareFrames)] == [768, 768, 32]


@pytest.mark.parametrize("processor", [GridFrames({}), TimedGridFrames({}), SquareFrames({})])
def test_all_frames_of_short_videos_and_of_images_without_timestamps_are_taken(
    processor: FrameProcessor,
) -> None:
    for total in (1, 2, 3):
        for footage, wanted in ((Footage(total, 30.0), {}), (Footage(total, 30.0), {"frames": 50})):
            chosen = processor.choose(footage, **wanted)
            assert 1 <= len(chosen) <= total
            assert chosen == sorted(set(chosen))
    assert processor.choose(Footage(7, None), 2.0) == list(range(7))
    assert len(processor.choose(Footage(9, None), frames=4)) == 4
    assert processor.sample(tiny.clip(3, 28, 28), fps=4)[1].seconds == (0, 0.25, 0.5)


@pytest.mark.parametrize("processor", [GridFrames({}), TimedGridFrames({}), SquareFrames({})])
def test_a_higher_rate_than_the_videos_takes_all_frames(processor: FrameProcessor) -> None:
    for fps in (1000, 1e308):
        assert processor.choose(Footage(60, 15.0), fps) == list(range(60))


def test_invalid_sampling_is_refused() -> None:
    with pytest.raises(DataError, match="fps 1 or frames 2"):
        GridFrames({}).sample(tiny.clip(3, 28, 28), fps=1, frames=2)
    for wrong in ({"fps": 0}, {"fps": -1}, {"fps": math.inf}, {"fps": "2"}, {"frames": 0}, {"frames": 2.5}):
        ((name, value),) = wrong.items()
        with pytest.raises(DataError, match=f"{name} {value}"):
            GridFrames({}).sample(tiny.clip(3, 28, 28), **wrong)


def test_settings_that_would_change_pixels_are_refused() -> None:
    for wrong in ({"do_normalize": False}, {"do_center_crop": True}, {"resample": 1}):
        with pytest.raises(TargetError, match=r"do_normalize|crops|resample"):
            GridFrames(wrong)


@pytest.mark.parametrize(
    ("family", "file", "settings", "said"),
    [
        ("qwen3_vl", "video_preprocessor_config.json", {"merge_size": 1}, "merge_size of videos is 1"),
        (
            "qwen2_5_vl",
            "processor_config.json",
            {"video_processor": {"patch_size": 7}},
            "patch_size of videos",
        ),
        (
            "llava_onevision",
            "video_preprocessor_config.json",
            {"size": {"height": 56, "width": 28}},
            "height of",
        ),
        ("llava_onevision", "video_preprocessor_config.json", {"do_resize": False}, "do_resize false"),
    ],
)
def test_videos_processed_for_another_model_are_refused(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    file: str,
    settings: dict[str, Any],
    said: str,
) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / "copy")
    there = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**there, **settings}))
    with pytest.raises(TargetError, match=said):
        load(str(folder))
