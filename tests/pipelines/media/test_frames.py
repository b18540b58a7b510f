"""Frames of a video: the same out of every form of source, and one line for each that cannot be used."""

import io
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from vlmdistill.pipelines.media import frames
from vlmdistill.pipelines.media.frames import Footage
from vlmdistill.stores.errors import DataError

MOVING = tiny.clip(12, 48, 32)


def every(step: int) -> Any:
    def choose(footage: Footage) -> Sequence[int]:
        return range(0, footage.total, step)

    return choose


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "mpg"])
def test_a_file_gives_the_frames_that_are_chosen(tmp_path: Path, suffix: str) -> None:
    """Compression changes colours a little; the frames of another moment are far off."""
    fps = 25 if suffix == "mpg" else 10
    clip = frames.read(tiny.film(tmp_path / f"a.{suffix}", MOVING, fps=fps), every(5))
    assert clip.footage == Footage(12, fps)
    assert clip.indices == (0, 5, 10)
    for frame, index in zip(clip.frames_FHWC.astype(int), clip.indices, strict=True):
        off = [np.abs(frame - other).mean() for other in MOVING.astype(int)]
        assert np.argmin(off) == index
        assert off[index] < 20


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_the_rate_is_that_of_the_frames_and_not_of_the_header(
    tmp_path: Path, suffix: str
) -> None:
    """Ten frames in a second, then one a second; the header of the one file says 10 a second for all."""
    path = tmp_path / f"a.{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "mpeg4", rate=10, width=48, height=32, pix_fmt="yuv420p"
        )
        stream.codec_context.time_base = Fraction(1, 1000)
        for frame_HWC, time in zip(
            tiny.clip(16, 48, 32),
            (*range(0, 1000, 100), *range(1900, 7000, 1000)),
            strict=True,
        ):
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")
            frame.pts, frame.time_base = time, stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert frames.probe(path) == Footage(16, 16 / 7)


def test_the_rate_does_not_depend_on_freed_memory(tmp_path: Path) -> None:
    """The C library fills what is freed: a rate read after the file is closed would be another."""
    path = tiny.film(tmp_path / "a.mp4", MOVING, fps=10)
    script = f"""
from pathlib import Path
from {frames.__name__} import probe
print({{probe(Path({str(path)!r})).fps for _ in range(20)}})
"""
    command = [sys.executable, "-c", script]
    for byte in ("90", "165"):
        filled = {**os.environ, "MALLOC_PERTURB_": byte}
        done = subprocess.run(
            command, env=filled, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "{10.0}"


def test_a_clock_that_ticks_coarsely_is_no_other_rate(tmp_path: Path) -> None:
    """Matroska counts milliseconds: two frames of 1/60 s stand at 0 and 17."""
    assert frames.probe(tiny.film(tmp_path / "a.mkv", MOVING[:2], fps=60)) == Footage(
        2, 60
    )


def test_a_film_held_sideways_is_turned_upright(tmp_path: Path) -> None:
    for rotation in (90, 180, -90):
        path = tiny.film(tmp_path / f"{rotation}.mp4", MOVING, rotation=rotation)
        upright = np.rot90(MOVING, rotation // 90, (1, 2)).astype(int)
        assert np.abs(frames.read(path, every(1)).frames_FHWC - upright).mean() < 10


@pytest.mark.parametrize(
    ("matrix", "displayed"),
    [
        ((-1, 0, 0, 1), MOVING[:, :, ::-1]),
        ((1, 0, 0, -1), MOVING[:, ::-1]),
        ((0, 1, 1, 0), MOVING.transpose(0, 2, 1, 3)),
        ((0, -1, -1, 0), MOVING[:, ::-1, ::-1].transpose(0, 2, 1, 3)),
    ],
)
def test_a_mirrored_film_is_shown_as_players_show_it(
    tmp_path: Path, matrix: tuple[int, ...], displayed: np.ndarray[Any, Any]
) -> None:
    path = tiny.film(tmp_path / "a.mp4", MOVING)
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 44  # the matrix of the first version of this box
    right, down = (
        [number << 16 for number in pair] for pair in (matrix[:2], matrix[2:])
    )
    content[at : at + 36] = struct.pack(">9i", *right, 0, *down, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    shown = frames.read(path, every(1)).frames_FHWC
    assert np.abs(shown - displayed.astype(int)).mean() < 10


def boxed(kind: bytes, content: bytes) -> bytes:
    """A box of an MP4 file."""
    return struct.pack(">I4s", 8 + len(content), kind) + content


def add_cover(path: Path) -> None:
    """Put cover art before the tracks of an MP4 file, as programs that edit tags do."""
    buffer = io.BytesIO()
    tiny.picture(20, 30).save(buffer, "JPEG")
    art = boxed(b"covr", boxed(b"data", struct.pack(">II", 13, 0) + buffer.getvalue()))
    handler = boxed(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    tags = boxed(b"udta", boxed(b"meta", bytes(4) + handler + boxed(b"ilst", art)))
    data = path.read_bytes()
    start = data.index(b"moov") - 4
    assert data.index(b"mdat") < start, "offsets into the film stay as they are"
    size = struct.unpack(">I", data[start : start + 4])[0]
    index = boxed(b"moov", tags + data[start + 8 : start + size])
    path.write_bytes(data[:start] + index + data[start + size :])


def test_cover_art_is_not_the_film(tmp_path: Path) -> None:
    path = tiny.film(tmp_path / "a.mp4", MOVING)
    plain = frames.read(path, every(5))
    add_cover(path)
    with av.open(str(path)) as container:
        assert [stream.width for stream in container.streams.video] == [20, 48]
    tagged = frames.read(path, every(5))
    assert tagged.footage == plain.footage
    assert np.array_equal(tagged.frames_FHWC, plain.frames_FHWC)


def test_a_file_of_sound_and_cover_art_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), "fltp", "mono"
        )
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    add_cover(path)
    with pytest.raises(DataError, match=r"a\.mp4"):
        frames.probe(path)


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_a_still_preview_is_not_the_film(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    with av.open(str(path), "w") as container:
        preview = container.add_stream(
            "mpeg4", rate=10, width=96, height=64, pix_fmt="yuv420p"
        )
        film = container.add_stream(
            "mpeg4", rate=10, width=48, height=32, pix_fmt="yuv420p"
        )
        for stream, pictures in ((preview, tiny.clip(1, 96, 64)), (film, MOVING)):
            for frame_HWC in pictures:
                container.mux(
                    stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24"))
                )
            container.mux(stream.encode())
    clip = frames.read(path, every(5))
    assert clip.footage == Footage(12, 10)
    assert clip.frames_FHWC.shape == (3, 32, 48, 3)


def test_a_folder_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for number, frame in enumerate(MOVING):
        Image.fromarray(frame).save(tmp_path / f"frame_{number}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / "._frame_0.png").write_bytes(
        b"\0\5\x16\7what macOS notes beside a file"
    )
    clip = frames.read(tmp_path, every(1))
    np.testing.assert_array_equal(clip.frames_FHWC, MOVING)
    assert clip.footage == Footage(12, None)


def test_digits_that_are_no_numbers_are_letters(tmp_path: Path) -> None:
    for name in ("10.png", "²1.png", "9.png"):
        tiny.picture(30, 20).save(tmp_path / name)
    assert [file.name for file in frames.files(tmp_path)] == [
        "9.png",
        "10.png",
        "²1.png",
    ]


@pytest.mark.parametrize("suffix", ["webp", "png", "gif"])
def test_an_animated_image(tmp_path: Path, suffix: str) -> None:
    first, *rest = [Image.fromarray(frame) for frame in MOVING]
    path = tmp_path / f"a.{suffix}"
    more: dict[str, Any] = {"lossless": True} if suffix == "webp" else {}
    first.save(path, save_all=True, append_images=rest, duration=200, **more)
    clip = frames.read(path, every(4))
    assert clip.footage == Footage(12, 5.0)
    off = np.abs(clip.frames_FHWC.astype(int) - MOVING[::4]).mean()
    assert off < 8 if suffix == "gif" else off == 0  # a GIF has 256 colours


def test_arrays_tensors_and_lists(tmp_path: Path) -> None:
    images = [Image.fromarray(frame) for frame in MOVING]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    for source in (
        MOVING,
        torch.from_numpy(MOVING),
        images,
        list(MOVING),
        [str(tmp_path / f"{number}.png") for number in range(12)],
    ):
        clip = frames.read(source, every(3))
        np.testing.assert_array_equal(clip.frames_FHWC, MOVING[::3])
        assert clip.footage == Footage(12, None)


def test_a_still_image_is_a_video_of_one_frame(tmp_path: Path) -> None:
    tiny.picture(30, 20).save(tmp_path / "a.png")
    assert frames.probe(tmp_path / "a.png") == Footage(1, None)


def test_a_file_that_was_cut_gives_what_is_left(tmp_path: Path) -> None:
    """A Matroska file can be read from its beginning, wherever it ends."""
    whole = tiny.film(tmp_path / "whole.mkv", tiny.clip(40, 64, 48))
    (tmp_path / "cut.mkv").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    clip = frames.read(tmp_path / "cut.mkv", every(1))
    assert 1 < clip.footage.total == len(clip.frames_FHWC) < 40


def broken(folder: Path) -> dict[str, Any]:
    """Unusable sources by a part of their error that names the source and the problem."""
    whole = tiny.film(folder / "whole.mp4", MOVING)
    (folder / "cut.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("hello")
    (folder / "cut.gif").write_bytes(b"GIF89a")
    (folder / "bare").mkdir()
    (folder / "mixed").mkdir()
    for number, width in enumerate((30, 40)):
        tiny.picture(width, 20).save(folder / "mixed" / f"{number}.png")
    return {
        "nowhere.mp4": folder / "nowhere.mp4",
        "cut.mp4": folder / "cut.mp4",
        "empty.mp4": folder / "empty.mp4",
        "text.mp4": folder / "text.mp4",
        "cut.gif": folder / "cut.gif",
        "/bare ": folder / "bare",
        "40x20, the first 30x20": folder / "mixed",
        "0 images": [],
        "array has no frames": MOVING[:0],
        "not float64": MOVING / 255,
        "not uint8 [12, 32, 48]": MOVING[..., 0],
        "a.png": [folder / "a.png"],
    }


def test_an_unusable_source_is_named_in_one_line(tmp_path: Path) -> None:
    for part, source in broken(tmp_path).items():
        with pytest.raises(DataError) as caught:
            frames.read(source, every(1))
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_without_pyav_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.film(tmp_path / "a.mp4", MOVING)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"vlmdistill\[video\]"):
        frames.read(path, every(1))


@pytest.mark.parametrize(
    "names",
    [
        ["t_0.0", "t_0.25", "t_0.5", "t_0.75", "t_1.0"],
        ["t_9.5", "t_10.25"],
        ["scene_1.9", "scene_1.10", "scene_1.11"],
        ["frame_9", "frame_10"],
        ["frame_01", "frame_1", "frame_02"],
        ["frame_-2", "frame_-1", "frame_0", "frame_1"],
        ["-1.5", "-1.25", "0.5"],
        ["clip-1", "clip-2", "clip-10"],
        ["a.0009", "a.0010"],
    ],
)
def test_frames_are_in_the_order_of_times_and_numbers(
    tmp_path: Path, names: list[str]
) -> None:
    for name in reversed(names):
        (tmp_path / f"{name}.jpg").touch()
    assert [file.stem for file in frames.files(tmp_path)] == names


def test_a_frame_is_no_animation(tmp_path: Path) -> None:
    first, second = tiny.picture(30, 20), tiny.picture(30, 20, seed=2)
    first.save(tmp_path / "0.gif", save_all=True, append_images=[second])
    with pytest.raises(DataError, match=r"0\.gif.*2 "):
        frames.read(tmp_path, every(1))
