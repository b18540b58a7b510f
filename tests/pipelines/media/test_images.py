"""Pictures: upright and in RGB, whatever the file says about itself."""

import base64
import io
import struct
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from tests import tiny
from vlmdistill.pipelines.media import frames, images, resolver
from vlmdistill.pipelines.media.images import (
    MediaError,
    read_image,
    require_whole,
    upright,
)
from vlmdistill.pipelines.media.resolver import MediaResolver
from vlmdistill.stores.schema import Array

TURNED = {
    1: 0,
    3: 2,
    6: 3,
    8: 1,
}  # orientation -> quarter turns counter-clockwise that make it upright


def held(orientation: int, *more: bytes) -> bytes:
    """An EXIF block with the tag of orientation, and entries as they are."""
    entries = (struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0), *more)
    return (
        b"Exif\0\0MM\0*\0\0\0\x08"
        + struct.pack(">H", len(entries))
        + b"".join(entries)
        + bytes(4)
    )


ODD = struct.pack(
    ">HHI4s", 0x0128, 2, 4, b"cm \0"
)  # a unit of resolution in words, where a number belongs


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", TURNED)
def test_a_picture_is_turned_once(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    path = tmp_path / f"a.{suffix}"
    tiny.picture(40, 24).save(path, exif=held(orientation))
    with Image.open(path) as image:
        shown = upright(image)
    with Image.open(path) as image:
        stored = np.asarray(image.convert("RGB"))
    turned = (
        stored if suffix == "tif" else np.rot90(stored, TURNED[orientation])
    )  # Pillow turns a TIFF itself
    assert shown.size == ((40, 24) if orientation in (1, 3) else (24, 40))
    for picture in (shown, upright(shown)):
        np.testing.assert_array_equal(np.asarray(picture), turned)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "block", [held(6, ODD), b"Exif\0\0nonsense", b"", held(6)[:17], held(99)]
)
def test_odd_metadata_are_no_reason_to_refuse_a_picture(
    tmp_path: Path, block: bytes
) -> None:
    path = tmp_path / "a.jpg"
    tiny.picture(40, 24).save(path, exif=block)
    with Image.open(path) as image:
        assert upright(image).size == ((24, 40) if ODD in block else (40, 24))


def test_a_folder_of_frames_is_turned_like_its_pictures(tmp_path: Path) -> None:
    for number in range(3):
        tiny.picture(40, 24, number).save(tmp_path / f"{number}.jpg", exif=held(6, ODD))
    clip = frames.read(tmp_path, lambda footage: range(footage.total))
    assert clip.frames_FHWC.shape == (3, 40, 24, 3)


def clear(mode: str) -> Image.Image:
    """A picture whose left half is transparent, with black behind it."""
    alpha_HW = np.full((24, 40), 255, np.uint8)
    alpha_HW[:, :20] = 0
    alpha_HW[:, 18:22] = 100
    picture = tiny.picture(40, 24)
    picture.paste((0, 0, 0), (0, 0, 20, 24))
    picture.putalpha(Image.fromarray(alpha_HW))
    if mode == "P":
        return picture.quantize(16)
    return picture.convert(mode)


def sent(path: Path) -> Array:
    """The pixels that a server sees which does not know transparency."""
    content = base64.b64decode(images.data_url(path).partition(",")[2])
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image)[..., :3]


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("RGBA", "png"), ("LA", "png"), ("P", "png"), ("RGBA", "gif"), ("RGBA", "webp")],
)
def test_transparent_pixels_are_what_the_processors_of_transformers_make_of_them(
    tmp_path: Path, mode: str, suffix: str
) -> None:
    clear(mode).save(tmp_path / f"a.{suffix}", lossless=True)
    with Image.open(tmp_path / f"a.{suffix}") as image:
        theirs = convert_to_rgb(image, return_numpy=True)
        ours = np.asarray(upright(image))
    np.testing.assert_array_equal(ours, theirs)
    assert (ours[:, :18] == 255).all()
    np.testing.assert_array_equal(
        np.asarray(read_image(tmp_path / f"a.{suffix}")), ours
    )
    np.testing.assert_array_equal(sent(tmp_path / f"a.{suffix}"), ours)


def test_one_colour_may_be_transparent(tmp_path: Path) -> None:
    picture = tiny.picture(40, 24)
    picture.paste((1, 2, 3), (0, 0, 20, 24))
    picture.save(tmp_path / "a.png", transparency=(1, 2, 3))
    shown = np.asarray(read_image(tmp_path / "a.png"))
    assert (shown[:, :20] == 255).all()
    np.testing.assert_array_equal(sent(tmp_path / "a.png"), shown)


def sixteen_bit_png(colours: int, pixels: list[int], transparent: list[int]) -> bytes:
    """A PNG of one row with a transparent colour, which Pillow cannot write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(name + data).to_bytes(4)
        return len(data).to_bytes(4) + name + data + checksum

    width = len(pixels) // colours
    kind = {1: 0, 3: 2}[colours]  # grey or RGB
    header = struct.pack(">IIBBBBB", width, 1, 16, kind, 0, 0, 0)
    row = b"\0" + struct.pack(f">{len(pixels)}H", *pixels)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"tRNS", struct.pack(f">{colours}H", *transparent)),
            chunk(b"IDAT", zlib.compress(row)),
            chunk(b"IEND", b""),
        ]
    )


@pytest.mark.parametrize("colours", [1, 3])
def test_one_colour_of_sixteen_bits_may_be_transparent(
    tmp_path: Path, colours: int
) -> None:
    dark, clear_colour = [0x1234] * colours, [0x8000] * colours
    content = sixteen_bit_png(colours, [*dark, *clear_colour], clear_colour)
    (tmp_path / "a.png").write_bytes(content)
    shown = np.asarray(read_image(tmp_path / "a.png"))
    assert shown.tolist() == [[[0x12] * 3, [255] * 3]]


@pytest.mark.parametrize("suffix", ["png", "tif", "jp2", "pgm"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, suffix: str) -> None:
    grey_HW = np.linspace(0, 65535, 40 * 24).astype(np.uint16).reshape(24, 40)
    Image.fromarray(grey_HW).save(tmp_path / f"a.{suffix}")
    with Image.open(tmp_path / f"a.{suffix}") as image:
        shown = np.asarray(upright(image))
    np.testing.assert_array_equal(
        shown, np.round(grey_HW[..., None] / 257).repeat(3, -1)
    )
    np.testing.assert_array_equal(
        frames.read([grey_HW], lambda _: [0]).frames_FHWC[0], shown
    )


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_numbers_without_a_black_and_a_white_are_refused(
    tmp_path: Path, dtype: type
) -> None:
    Image.fromarray(np.eye(8, dtype=dtype)).save(tmp_path / "a.tif")
    for read in (frames.probe, read_image):
        with pytest.raises(MediaError, match=r"a\.tif .*mode "):
            read(tmp_path / "a.tif")


def test_heic_photos_are_read_with_pillow_heif(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    photo = tmp_path / "photo.heic"
    pillow_heif.from_pillow(Image.new("RGB", (64, 48), (200, 30, 40))).save(photo)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pillow_heif", None)
        with pytest.raises(
            MediaError, match=r"photo.heic cannot be read: .*vlmdistill\[heic\]"
        ):
            read_image(photo)
    assert read_image(photo).size == (64, 48)
    red, green, blue = np.asarray(read_image(photo))[20, 20].tolist()
    assert max(abs(red - 200), abs(green - 30), abs(blue - 40)) < 8
    assert images.data_url(photo).startswith("data:image/png")


def test_no_frame_of_an_animation_is_read_as_an_image(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "red")
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    with pytest.raises(MediaError, match="2 pages or frames"):
        read_image(tmp_path / "a.gif")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16"])
def test_a_picture_is_converted_a_few_rows_at_once(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    if mode == "I;16":
        picture = Image.fromarray(rng.integers(0, 2**16, (31, 47), np.uint16))
    else:
        picture = Image.fromarray(rng.integers(0, 256, (31, 47, 4), np.uint8))
        picture = picture.convert(mode)
    at_once = upright(picture)
    monkeypatch.setattr(images, "STRIP", 100)
    converted: list[int] = []
    on_white = images._on_white

    def counted(image: Image.Image) -> Image.Image:
        converted.append(image.width * image.height)
        return on_white(image)

    monkeypatch.setattr(images, "_on_white", counted)
    np.testing.assert_array_equal(np.asarray(upright(picture)), np.asarray(at_once))
    require_whole(picture)
    assert max(converted) <= 100
    assert sum(converted) == 2 * 31 * 47


def test_large_pictures_of_an_import_are_decoded_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "LARGE", 100)
    for number in range(6):
        tiny.picture(40, 30, seed=number).save(tmp_path / f"{number}.png")
    running = threading.Semaphore(1)
    overlaps: list[bool] = []

    def decoded(_: Image.Image) -> None:
        alone = running.acquire(blocking=False)
        overlaps.append(not alone)
        time.sleep(0.01)
        if alone:
            running.release()

    monkeypatch.setattr(resolver, "require_whole", decoded)
    names = [f"{number}.png" for number in range(6)]
    parts = [({"type": "image", "media": name}, [tmp_path]) for name in names]
    MediaResolver(None, tmp_path / "kept").check_all(parts)
    assert overlaps == [False] * 6


@pytest.mark.parametrize("side", [8200, 13400])
def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path, side: int) -> None:
    Image.new("1", (side, side)).save(tmp_path / "large.png")
    with pytest.raises(MediaError, match="too many: make them at most 67108864"):
        read_image(tmp_path / "large.png")
