"""The frame processors against the video processors of transformers, which need torchvision.

Where torchvision can be imported, transformers uses it for images, too. So `make test` puts it into a
separate folder, and the comparison runs in a separate process.
"""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
TORCHVISION = ROOT / "build" / "torchvision"
SIZES = [(84, 56), (90, 64), (57, 130), (40, 40), (200, 31), (300, 500)]


@pytest.mark.skipif(
    not TORCHVISION.is_dir() and importlib.util.find_spec("torchvision") is None,
    reason="needs torchvision: `make test` installs it into build/torchvision",
)
def test_the_stock_processors_give_the_same_frames_and_pixels() -> None:
    paths = [str(path) for path in (*sys.path, TORCHVISION) if str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.targets.families.test_stock_video"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 3


def compare() -> None:
    """Compare each family over sizes, lengths and ways to sample; AssertionError where they differ."""
    import transformers

    from vlmdistill.pipelines.targets.families.video import (
        GridFrames,
        SquareFrames,
        TimedGridFrames,
    )

    small = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 20}}
    cap = {"cap_pixels_per_frame": True, "max_video_tokens": 60}
    timed = {"size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 80}}
    square = {"size": {"height": 28, "width": 28}}
    for stock, mine, settings in (
        (transformers.Qwen2VLVideoProcessor, GridFrames, (small, {**small, **cap})),
        (
            transformers.Qwen3VLVideoProcessor,
            TimedGridFrames,
            (timed, {**timed, **cap}),
        ),
        (
            transformers.LlavaOnevisionVideoProcessor,
            SquareFrames,
            (square, {**square, "resample": 2}),
        ),
    ):
        for given in settings:
            _same_pixels(stock(**given), mine(given))
        assert _same_frames(stock(), mine({})) > 500
        sys.stdout.write(f"{mine.__name__} equal\n")


def _same_pixels(stock: Any, mine: Any) -> None:
    import torch

    from tests import tiny

    for width, height in SIZES:
        for frames in (2, 4, 5, 33):
            video = tiny.clip(frames, width, height)
            expected = stock([video], do_sample_frames=False, return_tensors="pt")
            made = mine(video)
            assert made.keys() - {"video_metadata"} == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(made[name], value, atol=1e-6, rtol=0)


def _same_frames(stock: Any, mine: Any) -> int:
    """The number of videos of which both sample the same frames.

    Not compared: what a stock processor refuses, and short videos of which it repeats frames. By rounding,
    the stock processor of Qwen2-VL may take one frame more than it was asked for.
    """
    from transformers.video_utils import VideoMetadata

    from vlmdistill.pipelines.media.frames import Footage

    rng, same = random.Random(0), 0
    for _ in range(2000):
        total, rate = (
            rng.randint(1, rng.choice([8, 100, 3000])),
            rng.choice([8.0, 23.976, 25.0, 29.97, 60.0]),
        )
        fps, frames = rng.choice(
            [(rng.choice([0.1, 0.5, 2.0, 3.7]), None), (None, rng.randint(1, 64))]
        )
        metadata = VideoMetadata(
            total_num_frames=total, fps=rate, duration=total / rate
        )
        try:
            expected = [
                int(index)
                for index in stock.sample_frames(metadata, num_frames=frames, fps=fps)
            ]
        except (ValueError, ZeroDivisionError):  # too few frames
            continue
        chosen = mine.choose(Footage(total, rate), fps, frames)
        if len(set(expected)) == len(expected):
            assert chosen == expected[: len(chosen)], (total, rate, fps, frames)
            assert len(expected) - len(chosen) <= 1, (total, rate, fps, frames)
            same += 1
    return same


if __name__ == "__main__":
    compare()
