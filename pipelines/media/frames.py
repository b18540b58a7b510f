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
    require_one_page,
    upright,
)
from vlmdistill.pipelines.media.urls import at_hand, is_url
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.schema import Array

SIGN = r"(?:(?<=[_=])|^)-"  # elsewhere a minus is a separator
NUMBER = re.compile(rf"((?:{SIGN})?\d+(?:\.\d+)?)")
WHOLE_NUMBER = re.compile(rf"((?:{SIGN})?\d+)")
FRACTION = re.compile(r"\d\.(\d+)")
SAMPLING = ("fps", "frames")  # what a part of a message may say about its video
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
    return _array(source, choose)


def _array(source: Any, choose: Choose) -> SampledFrames:
    """The frames of an array, or of an object that numpy can convert into one."""
    try:
        frames_FHWC = np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(source).__name__
        raise MediaError(f"a video cannot be a {kind}: {error}") from None
    is_rgb = frames_FHWC.ndim == 4 and frames_FHWC.shape[-1] == 3
    if not is_rgb or frames_FHWC.dtype != np.uint8:
        raise MediaError(
            "a video as an array is uint8 [frames, height, width, 3], not "
            f"{frames_FHWC.dtype} {list(frames_FHWC.shape)}"
        )
    footage = Footage(len(frames_FHWC), None)
    indices = _chosen(footage, choose, "a video as an array")
    return SampledFrames(frames_FHWC[list(indices)], indices, footage)


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
    places = places_of([file.stem for file in frames])
    return sorted(frames, key=lambda file: (places[file.stem], file.name))


Place = list[tuple[bool, Decimal, str]]
"""The numbers and the texts of a name, as they are compared: numbers come first."""


def places_of(stems: Sequence[str]) -> dict[str, Place]:
    """The places of names in their order, by name: that of the numbers in them."""
    number = WHOLE_NUMBER if _counts_in_parts(stems) else NUMBER
    return {stem: _name_parts(stem, number) for stem in stems}


def numbers_of(stems: Sequence[str]) -> dict[str, list[Decimal]]:
    """The numbers in names, by name."""
    return {
        stem: [number for is_text, number, _ in place if not is_text]
        for stem, place in places_of(stems).items()
    }


def _counts_in_parts(stems: Sequence[str]) -> bool:
    """Whether digits behind a dot are numbers of their own: `scene_1.9.png` comes before `scene_1.10.png`.

    Fractions of one width have the same order either way. Of several widths, no fraction ends with a zero.
    """
    fractions = [digits for stem in stems for digits in FRACTION.findall(stem)]
    widths = {len(fraction) for fraction in fractions}
    return len(widths) > 1 and any(
        len(fraction) > 1 and fraction.endswith("0") for fraction in fractions
    )


def _name_parts(name: str, number: re.Pattern[str]) -> Place:
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
    path = part["path"]
    if not is_url(path):
        return at_hand(path)
    imported = part.get("digest")
    is_stale = imported is None or digest(at_hand(path)) != imported
    return at_hand(path, again=is_stale)


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


def _chosen(footage: Footage, choose: Choose, name: str) -> tuple[int, ...]:
    if not footage.total:
        raise MediaError(f"{name} has no frames")
    return tuple(int(index) for index in choose(footage))


def _stacked(frames: Iterable[Array], most: int, name: str) -> Array:
    """The frames, at most so many, as one array, filled as they come: a list would take as much again."""
    frames_FHWC = np.empty((0, 0, 0, 3), np.uint8)
    count = 0
    for count, frame_HWC in enumerate(frames, 1):
        if count == 1:
            frames_FHWC = np.empty((most, *frame_HWC.shape), np.uint8)
        if frame_HWC.shape != frames_FHWC.shape[1:]:
            first_height, first_width = frames_FHWC.shape[1:3]
            height, width = frame_HWC.shape[:2]
            raise MediaError(
                f"{name}: frame {count - 1} is {width}x{height}, the first {first_width}x{first_height}"
            )
        frames_FHWC[count - 1] = frame_HWC
    return frames_FHWC[:count]


def _images(images: Sequence[Any], name: str, choose: Choose) -> SampledFrames:
    """Images as frames, without a frame rate."""
    footage = Footage(len(images), None)
    indices = _chosen(footage, choose, name)
    frames = (_image(images[index], name) for index in indices)
    return SampledFrames(_stacked(frames, len(indices), name), indices, footage)


def _image(source: Any, video_name: str) -> Array:
    is_file = isinstance(source, str | Path)
    try:
        if is_file:
            with open_image(source) as image:
                require_one_page(image)
                return _pixels(image)
        with decoding():
            is_image = isinstance(source, Image.Image)
            image = source if is_image else Image.fromarray(np.asarray(source))
        return _pixels(image)
    except OSError as error:
        name = source if is_file else f"a {type(source).__name__}"
        raise MediaError(f"{video_name}: {name} cannot be read: {error}") from None


def _pixels(image: Image.Image) -> Array:
    return np.asarray(upright(image))


def _animation(image: Image.Image, path: Path, choose: Choose) -> SampledFrames:
    """An animated GIF, WebP or PNG; a still image is a video of one frame."""
    name = f"video {path}"
    milliseconds = 0.0
    with decoding():
        total = int(getattr(image, "n_frames", 1))
        for number in range(total):
            image.seek(number)
            image.load()  # a WebP has the duration only after this
            milliseconds += image.info.get("duration") or GIF_MILLISECONDS
    footage = Footage(total, 1000 * total / milliseconds if total > 1 else None)
    indices = _chosen(footage, choose, name)

    def frames() -> Iterator[Array]:
        for index in indices:
            with decoding():
                image.seek(index)
            yield _pixels(image)

    return SampledFrames(_stacked(frames(), len(indices), name), indices, footage)


def _film(path: Path, choose: Choose) -> SampledFrames:
    """A video file, decoded up to the last chosen frame."""
    try:
        import av
    except ImportError:
        raise NoDecoderError(
            f"reading the video {path} needs PyAV: pip install 'vlmdistill[video]'"
        ) from None
    name = f"video {path}"
    try:
        stream, footage = _film_stream(av, path)
        indices = _chosen(footage, choose, name)
        frames_FHWC, decoded = _decode(av, path, stream, indices)
        if len(frames_FHWC) < len(set(indices)):
            # The header promised more frames than can be decoded.
            footage = Footage(decoded, footage.fps)
            indices = _chosen(footage, choose, name)
            frames_FHWC, decoded = _decode(av, path, stream, indices)
    except OSError as error:
        raise MediaError(f"{name} cannot be read: {error}") from None
    distinct = sorted(set(indices))
    if distinct != list(indices):
        frames_FHWC = frames_FHWC[np.searchsorted(distinct, indices)]
    return SampledFrames(frames_FHWC, indices, footage)


@dataclass(frozen=True)
class _Packet:
    """When a frame is shown and for how long, and when it is decoded, in ticks of its stream."""

    shown_at: int | None
    duration: int
    decoded_at: int | None


def _film_stream(av: Any, path: Path) -> tuple[int, Footage]:
    """The index of the stream that is the film, and its frames.

    They are counted by the packets, since headers may be wrong or missing.
    """
    with decoding(), av.open(str(regular(path))) as container:
        if not container.streams.video:
            raise OSError("it holds no video stream")
        all_streams = container.streams.video
        streams = [stream for stream in all_streams if not _is_picture(av, stream)]
        if not streams:
            raise OSError("it holds no video stream, only a picture such as cover art")
        packets: dict[int, list[_Packet]] = {stream.index: [] for stream in streams}
        for packet in container.demux(streams):
            if packet.size:
                times = _Packet(packet.pts, packet.duration or 0, packet.dts)
                packets[packet.stream.index].append(times)
        film = _longer_than_a_preview(container, streams, packets)
        header = film.average_rate or film.guessed_rate
        # Copied, since the stream is freed with the container.
        index, tick = film.index, film.time_base
    film_packets = packets[index]
    rate = _rate(film_packets, tick, float(header) if header else None)
    return index, Footage(len(film_packets), rate)


def _longer_than_a_preview(
    container: Any, streams: Sequence[Any], packets: Mapping[int, Sequence[_Packet]]
) -> Any:
    """The best stream by FFmpeg's rules, unless it is a preview of one frame; else the first other one."""
    best = container.streams.best("video")
    best_first = sorted(
        streams, key=lambda stream: best is None or stream.index != best.index
    )
    films = (stream for stream in best_first if len(packets[stream.index]) > 1)
    return next(films, best_first[0])


def _is_picture(av: Any, stream: Any) -> bool:
    """Whether a video stream is cover art or thumbnails, by what its container says."""
    kinds = av.stream.Disposition
    pictures = kinds.attached_pic | kinds.timed_thumbnails | kinds.still_image
    return bool(stream.disposition & pictures)


def _rate(packets: Sequence[_Packet], tick: Any, header: float | None) -> float | None:
    """Average frames per second: the header's rate, unless the times of the packets contradict it.

    A Matroska header has one rate even if the rate varies.
    """
    times = [
        (packet.shown_at, packet.duration)
        for packet in packets
        if packet.shown_at is not None
    ]
    decoding_order = [
        packet.decoded_at for packet in packets if packet.decoded_at is not None
    ]
    has_all_times = len(times) >= max(2, len(packets))
    if not has_all_times or decoding_order != sorted(decoding_order):
        return header  # no times, or times that restart
    first = min(times)[0]
    last, duration = max(times)
    duration = duration or (last - first) // (len(times) - 1)
    seconds = float((last + duration - first) * tick)
    rounding = max(2 * float(tick), 0.01 * seconds)
    if seconds <= 0:
        return header
    if header and abs(len(packets) / header - seconds) <= rounding:
        return header
    return len(packets) / seconds


def _matrix(av: Any, frame: Any) -> tuple[int, ...]:
    """How a frame is displayed: the matrix of ISO/IEC 14496-12, 6.2.2, by rows."""
    data = frame.side_data.get(av.sidedata.sidedata.Type.DISPLAYMATRIX)
    return struct.unpack("9i", bytes(data)) if data else (1, 0, 0, 0, 1, 0, 0, 0, 1)


def _turned(frame_HWC: Array, matrix: Sequence[int]) -> Array:
    """A frame upright, and mirrored where its matrix says so."""
    # Where steps to the right and down lead on the display.
    right_x, right_y = matrix[:2]
    down_x, down_y = matrix[3:5]
    is_mirrored = right_x * down_y < right_y * down_x
    if is_mirrored:
        frame_HWC = frame_HWC[:, ::-1]
        right_x, right_y = -right_x, -right_y
    clockwise = math.degrees(math.atan2(right_y, right_x))
    return np.rot90(frame_HWC, -round(clockwise / 90))


def _decode(
    av: Any, path: Path, index: int, indices: Sequence[int]
) -> tuple[Array, int]:
    """The frames of a stream at these indices, each once, in order and upright, and how many were decoded."""
    wanted = set(indices)
    last = max(wanted, default=0)
    decoded = 0

    def frames() -> Iterator[Array]:
        nonlocal decoded
        with decoding(), av.open(str(regular(path))) as container:
            stream = container.streams[index]
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                decoded += 1
                if decoded - 1 in wanted:
                    frame_HWC = frame.to_ndarray(format="rgb24")
                    yield _turned(frame_HWC, _matrix(av, frame))
                if decoded > last:
                    break

    return _stacked(frames(), len(wanted), f"video {path}"), decoded
