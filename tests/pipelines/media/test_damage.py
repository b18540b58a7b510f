"""Damaged images and videos: one line for each, and no error of this project's code among them."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import tiny
from tests.thorough import count
from vlmdistill.pipelines.media import frames, images
from vlmdistill.pipelines.media.images import MediaError, read_image
from vlmdistill.pipelines.media.resolver import BadRowError, MediaResolver

MUTATIONS = count(25, 600)  # of each file
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "TGA",
    "ICO",
    "AVIF",
    "JPEG2000",
)
ANIMATED = ("GIF", "WEBP", "PNG", "TIFF", "AVIF")


def stored(kind: str, *more: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    tiny.picture(31, 24).save(
        file,
        kind,
        **options,
        **({"save_all": True, "append_images": more} if more else {}),
    )
    return file.getvalue()


def whole() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    made = {kind: stored(kind) for kind in FORMATS}
    made |= {
        f"{kind} turned": stored(kind, exif=exif)
        for kind in ("JPEG", "PNG", "WEBP", "AVIF")
    }
    made |= {
        f"{kind} moving": stored(kind, *map(tiny.picture, (31, 31), (24, 24), (1, 2)))
        for kind in ANIMATED
    }
    return made | {"TIFF LZW": stored("TIFF", compression="tiff_lzw")}


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy that is cut, or with bytes changed, removed or inserted, most of them near the start."""
    made, way = bytearray(data), rng.random()
    if way < 0.2:
        return bytes(made[: rng.randrange(len(made))])
    near = rng.random() < 0.6
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(min(len(made), 200) if near else len(made))
        if way < 0.7:
            made[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif way < 0.85:
            del made[at : min(at + 8, len(made) - 1)]
        else:
            made[at:at] = rng.randbytes(8)
    return bytes(made)


def resolved(path: Path) -> str:
    return MediaResolver(None, path.parent).resolve(
        {"type": "image", "media": str(path)}, path.parent
    )


READ: list[Callable[[Path], object]] = [
    read_image,
    resolved,
    images.data_url,
    frames.probe,
]


WHOLE = whole()


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_image_is_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 50_000
    )  # a header may ask for gigabytes
    rng, path, refused = (
        random.Random(name),
        tmp_path / f"a.{name.split()[0].lower()}",
        0,
    )
    for _ in range(MUTATIONS):
        path.write_bytes(damaged(WHOLE[name], rng))
        for read in READ:
            try:
                read(path)
            except (MediaError, BadRowError):
                refused += 1
    assert refused


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "mpg"])
def test_a_damaged_video_is_read_or_refused(suffix: str, tmp_path: Path) -> None:
    fps = 25 if suffix == "mpg" else 10
    data = tiny.film(
        tmp_path / f"whole.{suffix}", tiny.clip(6, 32, 32), fps=fps
    ).read_bytes()
    rng, path, refused = random.Random(suffix), tmp_path / f"a.{suffix}", 0
    for _ in range(MUTATIONS):
        path.write_bytes(damaged(data, rng))
        try:
            clip = frames.read(path, lambda footage: range(0, footage.total, 2))
            assert clip.frames_FHWC.shape[3:] == (3,)
        except MediaError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    "error", [TypeError, AttributeError, KeyError, RuntimeError, ZeroDivisionError]
)
def test_a_mistake_of_this_code_is_no_damaged_file(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.picture(31, 24).convert("L").save(tmp_path / "a.png")

    def mistaken(*_: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(images, "_eight_bits", mistaken)
        for read in READ:
            with pytest.raises(error):
                read(tmp_path / "a.png")
    film = tiny.film(tmp_path / "a.mp4", tiny.clip(4, 32, 32))
    with pytest.raises(error):
        frames.read(film, mistaken)
