"""Read frames of a video: a file, a folder of images, an animated image, an array or a list of images.

The caller chooses the frames: it gets their number and rate, and `read` decodes only the chosen ones.

Shapes: F frames, H height, W width, C colors (red, green, blue).
"""

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmdistill.pipelines.media.images import (
    MediaError,
    decoding,
    kind_of,
    open_image,
    upright,
)
from vlmdistill.pipelines.media.urls import at_hand, is_url
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.schema import Array

SIGN = r"(?:(?<=[_=])|^)-"  # elsewhere a minus separates
NUMBER = re.compile(rf"((?:{SIGN})?\d+(?:\.\d+)?)")
WHOLE_NUMBER = re.compile(rf"((?:{SIGN})?\d+)")
FRACTION = re.compile(r"\d\.(\d+)")
GIF_MILLISECONDS = 100  # of a frame without a duration, as in browsers


@dataclass(frozen=True)
class Footage:
    """The frames of a video to choose from."""

    total: int  # frames
    fps: float | None  # average; None for separate images


class NoDecoderError(MediaError):
    """PyAV, which decodes video files, is not installed."""


Choose = Callable[[Footage], Sequence[int]]  # the indices to decode, in order


@dataclass(frozen=True)
class SampledFrames:
    """The decoded frames, and the video that they come from."""

    frames_FHWC: Array  # uint8
    indices: tuple[int, ...]
    footage: Footage


def read(source: Any, choose: Choose) -> SampledFrames:
    """Decode the frames that `choose` returns, from a path, an array [F, H, W, C] or a list of images.

    MediaError if the video is missing or unreadable, has no frames or frames of several sizes, or needs PyAV.
    """
    if isinstance(source, str | Path):
        return _path(Path(source).expanduser(), choose)
    if isinstance(source, list | tuple):
        return _images(source, f"a video of {len(source)} images", choose)
    try:
        array = np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MediaError(
            f"a video cannot be a {type(source).__name__}: {error}"
        ) from None
    if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8:
        raise MediaError(
            f"a video as an array is uint8 [frames, height, width, 3], not {array.dtype} {list(array.shape)}"
        )
    indices = _chosen(Footage(len(array), None), choose, "a video as an array")
    return SampledFrames(array[list(indices)], indices, Footage(len(array), None))


def probe(path: Path) -> Footage:
    """The number and rate of the frames, after decoding the first; MediaError as `read`."""
    return read(path, lambda footage: [0]).footage


def files(path: Path) -> list[Path]:
    """The files of a video: itself, or the images of a folder, sorted by the numbers in their names.

    Hidden files are ignored. Numbers may have a fraction, as times in seconds have, and a sign.
    """
    if not path.is_dir():
        return [path]
    visible = [file for file in path.iterdir() if not file.name.startswith(".")]
    frames = [file for file in visible if kind_of(file.name) == "image"]
    number = WHOLE_NUMBER if _counts_in_parts(frames) else NUMBER
    return sorted(frames, key=lambda file: (_name_parts(file.stem, number), file.name))


def _counts_in_parts(frames: Sequence[Path]) -> bool:
    """Whether digits behind a dot are numbers of their own: `scene_1.9.png` comes before `scene_1.10.png`.

    Fractions of one width have the same order either way. Of several widths, no fraction ends with a zero.
    """
    fractions = [found for file in frames for found in FRACTION.findall(file.stem)]
    widths = {len(fraction) for fraction in fractions}
    return len(widths) > 1 and any(
        len(fraction) > 1 and fraction.endswith("0") for fraction in fractions
    )


def _name_parts(name: str, number: re.Pattern[str]) -> list[tuple[bool, Decimal, str]]:
    """The numbers and the texts of a name, as they are compared: numbers come first."""
    parts = []
    for part in number.split(name):
        if number.fullmatch(part):
            parts.append((False, Decimal(part), ""))
        elif part:
            parts.append((True, Decimal(0), part))
    return parts


def digest(path: Path) -> str:
    """The hash of an image or a video, by the content of its files."""
    from blake3 import blake3

    hasher = blake3()
    for file in files(path):
        hasher.update_mmap(regular(file))
    return str(hasher.hexdigest()[:32])


def media_file(part: Mapping[str, Any]) -> Path:
    """The file of an image or a video. The copy of a URL is fetched again if it is not what was imported."""
    path, imported = part["path"], part.get("digest")
    stale = is_url(path) and (imported is None or digest(at_hand(path)) != imported)
    return at_hand(path, again=stale)


def check_unchanged(part: Mapping[str, Any]) -> None:
    """MediaError if an image or a video was imported with a prompt, and is no longer the same."""
    if "digest" in part and digest(at_hand(part["path"])) != part["digest"]:
        raise MediaError(
            f"{part['path']} has changed since it was imported: restore it, or import it again"
        )


def _path(path: Path, choose: Choose) -> SampledFrames:
    if path.is_dir():
        return _images(files(path), str(path), choose)
    if not path.exists():
        raise MediaError(f"video {path} does not exist")
    try:
        with open_image(path) as image:
            if image.format != "MPEG":  # which Pillow identifies but cannot decode
                return _animation(image, path, choose)
    except OSError as error:
        if kind_of(path.name) == "image":
            raise MediaError(f"video {path} cannot be read: {error}") from None
    return _film(path, choose)


def _chosen(footage: Footage, choose: Choose, what: str) -> tuple[int, ...]:
    if not footage.total:
        raise MediaError(f"{what} has no frames")
    return tuple(int(index) for index in choose(footage))


def _stacked(frames: Iterable[Array], most: int, what: str) -> Array:
    """The frames, at most so many, as one array, filled as they come: a list would take as much again."""
    frames_FHWC, count = np.empty((0, 0, 0, 3), np.uint8), 0
    for count, frame in enumerate(frames, 1):
        if count == 1:
            frames_FHWC = np.empty((most, *frame.shape), np.uint8)
        if frame.shape != frames_FHWC.shape[1:]:
            (height, width), (h, w) = frames_FHWC.shape[1:3], frame.shape[:2]
            raise MediaError(
                f"{what}: frame {count - 1} is {w}x{h}, the first {width}x{height}"
            )
        frames_FHWC[count - 1] = frame
    return frames_FHWC[:count]


def _images(images: Sequence[Any], what: str, choose: Choose) -> SampledFrames:
    """Images as frames, without a frame rate."""
    footage = Footage(len(images), None)
    indices = _chosen(footage, choose, what)
    frames = (_image(images[index], what) for index in indices)
    return SampledFrames(_stacked(frames, len(indices), what), indices, footage)


def _image(source: Any, what: str) -> Array:
    try:
        if isinstance(source, str | Path):
            with open_image(source) as image:
                return _pixels(image)
        with decoding():
            image = (
                source
                if isinstance(source, Image.Image)
                else Image.fromarray(np.asarray(source))
            )
        return _pixels(image)
    except OSError as error:
        name = (
            source if isinstance(source, str | Path) else f"a {type(source).__name__}"
        )
        raise MediaError(f"{what}: {name} cannot be read: {error}") from None


def _pixels(image: Image.Image) -> Array:
    return np.asarray(upright(image))


def _animation(image: Image.Image, path: Path, choose: Choose) -> SampledFrames:
    """An animated GIF, WebP or PNG; a still image is a video of one frame."""
    milliseconds = 0.0
    with decoding():
        total = int(getattr(image, "n_frames", 1))
        for number in range(total):
            image.seek(number)
            image.load()  # a WebP has the duration only after this
            milliseconds += image.info.get("duration") or GIF_MILLISECONDS
    footage = Footage(total, 1000 * total / milliseconds if total > 1 else None)
    indices = _chosen(footage, choose, f"video {path}")

    def frames() -> Iterator[Array]:
        for index in indices:
            with decoding():
                image.seek(index)
            yield _pixels(image)

    return SampledFrames(
        _stacked(frames(), len(indices), f"video {path}"), indices, footage
    )


def _film(path: Path, choose: Choose) -> SampledFrames:
    """A video file, decoded up to the last chosen frame."""
    try:
        import av
    except ImportError:
        raise NoDecoderError(
            f"reading the video {path} needs PyAV: pip install 'vlmdistill[video]'"
        ) from None
    try:
        stream, footage = _count(av, path)
        indices = _chosen(footage, choose, f"video {path}")
        frames_FHWC, seen = _decode(av, path, stream, indices)
        if len(frames_FHWC) < len(
            set(indices)
        ):  # the header promised more frames than can be decoded
            footage = Footage(seen, footage.fps)
            indices = _chosen(footage, choose, f"video {path}")
            frames_FHWC, seen = _decode(av, path, stream, indices)
    except OSError as error:
        raise MediaError(f"video {path} cannot be read: {error}") from None
    if (distinct := sorted(set(indices))) != list(indices):
        frames_FHWC = frames_FHWC[np.searchsorted(distinct, indices)]
    return SampledFrames(frames_FHWC, indices, footage)


def _count(av: Any, path: Path) -> tuple[int, Footage]:
    """The index of the stream that is the film, and the number of its frames.

    They are counted by the packets, since headers may be wrong or missing.
    """
    with decoding(), av.open(str(regular(path))) as container:
        if not container.streams.video:
            raise OSError("it holds no video stream")
        streams = [
            stream for stream in container.streams.video if not _is_picture(av, stream)
        ]
        if not streams:
            raise OSError("it holds no video stream, only a picture such as cover art")
        packets: dict[int, list[tuple[int | None, ...]]] = {
            stream.index: [] for stream in streams
        }
        for packet in container.demux(streams):
            if packet.size:
                packets[packet.stream.index].append(
                    (packet.pts, packet.duration, packet.dts)
                )
        # The first stream may be a preview; the best one by FFmpeg's rules may be one, too.
        best = container.streams.best("video")
        order = sorted(
            streams, key=lambda stream: best is None or stream.index != best.index
        )
        film = next(
            (stream for stream in order if len(packets[stream.index]) > 1), order[0]
        )
        header = film.average_rate or film.guessed_rate
        index, tick = (
            film.index,
            film.time_base,
        )  # the stream is freed with the container
    its = packets[index]
    return index, Footage(len(its), _rate(its, tick, float(header) if header else None))


def _is_picture(av: Any, stream: Any) -> bool:
    """Whether a video stream is cover art or thumbnails, by what its container says."""
    kinds = av.stream.Disposition
    return bool(
        stream.disposition
        & (kinds.attached_pic | kinds.timed_thumbnails | kinds.still_image)
    )


def _rate(
    packets: Sequence[tuple[int | None, ...]], tick: Any, header: float | None
) -> float | None:
    """Average frames per second: the header's rate, unless the times of the packets contradict it.

    A Matroska header has one rate even if the rate varies. A packet is pts, duration and dts, in ticks.
    """
    times = [(pts, duration or 0) for pts, duration, _ in packets if pts is not None]
    order = [dts for _, _, dts in packets if dts is not None]
    if len(times) < max(2, len(packets)) or order != sorted(
        order
    ):  # no times, or times that restart
        return header
    first, (last, shown) = min(times)[0], max(times)
    shown = shown or (last - first) // (len(times) - 1)
    seconds = float((last + shown - first) * tick)
    rounding = max(2 * float(tick), 0.01 * seconds)
    if seconds <= 0 or (header and abs(len(packets) / header - seconds) <= rounding):
        return header
    return len(packets) / seconds


def _matrix(av: Any, frame: Any) -> tuple[int, ...]:
    """How a frame is displayed: the matrix of ISO/IEC 14496-12, 6.2.2, by rows."""
    data = frame.side_data.get(av.sidedata.sidedata.Type.DISPLAYMATRIX)
    return struct.unpack("9i", bytes(data)) if data else (1, 0, 0, 0, 1, 0, 0, 0, 1)


def _turned(frame_HWC: Array, matrix: Sequence[int]) -> Array:
    """A frame upright, and mirrored where its matrix says so."""
    right, down = (
        matrix[:2],
        matrix[3:5],
    )  # where steps to the right and down lead on the display
    if right[0] * down[1] < right[1] * down[0]:
        frame_HWC, right = frame_HWC[:, ::-1], (-right[0], -right[1])
    clockwise = math.degrees(math.atan2(right[1], right[0]))
    return np.rot90(frame_HWC, -round(clockwise / 90))


def _decode(
    av: Any, path: Path, index: int, indices: Sequence[int]
) -> tuple[Array, int]:
    """The frames of a stream at these indices, each once, in order and upright, and how many were decoded."""
    wanted, seen = set(indices), 0

    def frames() -> Iterator[Array]:
        nonlocal seen
        with decoding(), av.open(str(regular(path))) as container:
            stream = container.streams[index]
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                seen += 1
                if seen - 1 in wanted:
                    yield _turned(frame.to_ndarray(format="rgb24"), _matrix(av, frame))
                if seen > max(wanted, default=0):
                    break

    return _stacked(frames(), len(wanted), f"video {path}"), seen
