"""The frame processors: which frames they sample, and what they refuse."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("processor", "wanted", "indices"),
    [
        (
            GridFrames({}),
            {},
            [0, 7, 15, 22, 30, 37, 45, 52],
        ),  # 2 a second of 60 frames in 4 seconds
        (GridFrames({}), {"fps": 0.1}, [0, 15, 30, 45]),  # at least 4
        (GridFrames({"max_frames": 6}), {"fps": 15}, [0, 10, 20, 30, 40, 50]),
        (GridFrames({}), {"frames": 5}, [0, 15, 30, 45]),  # pairs
        (GridFrames({"fps": 1}), {}, [0, 15, 30, 45]),
        (
            TimedGridFrames({}),
            {},
            [0, 8, 17, 25, 34, 42, 51, 59],
        ),  # the first and the last
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
    assert [
        len(p({}).choose(minute)) for p in (GridFrames, TimedGridFrames, SquareFrames)
    ] == [120, 120, 32]
    hour = Footage(108000, 30.0)
    assert [
        len(p({}).choose(hour)) for p in (GridFrames, TimedGridFrames, SquareFrames)
    ] == [768, 768, 32]


@pytest.mark.parametrize(
    "processor", [GridFrames({}), TimedGridFrames({}), SquareFrames({})]
)
def test_all_frames_of_short_videos_and_of_images_without_timestamps_are_taken(
    processor: FrameProcessor,
) -> None:
    for total in (1, 2, 3):
        for footage, wanted in (
            (Footage(total, 30.0), {}),
            (Footage(total, 30.0), {"frames": 50}),
        ):
            chosen = processor.choose(footage, **wanted)
            assert 1 <= len(chosen) <= total
            assert chosen == sorted(set(chosen))
    assert processor.choose(Footage(7, None), 2.0) == list(range(7))
    assert len(processor.choose(Footage(9, None), frames=4)) == 4
    assert processor.sample(tiny.clip(3, 28, 28), fps=4)[1].seconds == (0, 0.25, 0.5)


@pytest.mark.parametrize(
    "processor", [GridFrames({}), TimedGridFrames({}), SquareFrames({})]
)
def test_a_higher_rate_than_the_videos_takes_all_frames(
    processor: FrameProcessor,
) -> None:
    for fps in (1000, 1e308):
        assert processor.choose(Footage(60, 15.0), fps) == list(range(60))


def test_invalid_sampling_is_refused() -> None:
    with pytest.raises(DataError, match="fps 1 or frames 2"):
        GridFrames({}).sample(tiny.clip(3, 28, 28), fps=1, frames=2)
    for wrong in (
        {"fps": 0},
        {"fps": -1},
        {"fps": math.inf},
        {"fps": "2"},
        {"frames": 0},
        {"frames": 2.5},
    ):
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
        (
            "qwen3_vl",
            "video_preprocessor_config.json",
            {"merge_size": 1},
            "merge_size of videos is 1",
        ),
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
        (
            "llava_onevision",
            "video_preprocessor_config.json",
            {"do_resize": False},
            "do_resize false",
        ),
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
