"""Read images with Pillow, upright and in RGB."""

import base64
import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.input_files import regular

KINDS = {
    "image": "apng avif bmp dib gif heic heif ico jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm svg tga tif tiff "
    "webp",
    "video": "3gp avi flv m1v m2ts m4v mkv mov mp4 mpe mpeg mpg mts ogv qt vob webm wmv",
}
PLAIN_FORMATS = ("PNG", "JPEG", "WEBP")  # that all servers read
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")
PAGED = ("TIFF", "GIF", "WEBP", "PNG", "AVIF")  # that may hold several pictures
SUBFILE_TYPE = 254
"""Tag of TIFF 6.0, page 36: bit 0 says "a reduced-resolution version"."""
MAX_PIXELS = 64 * 1024**2
"""Of an image, 270 MB once decoded; a processor takes several times that."""
STRIP = 2**20  # pixels that are converted at once
ORIENTATION = 0x0112  # tag of EXIF 2.3, section 4.6.4
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class MediaError(DataError):
    """An image or a video cannot be read or processed on this machine; a retry may succeed."""


def of_the_web(name: object) -> MediaError:
    """The error of a URL that is not read."""
    return MediaError(
        f"{name} is not read: download it, or give a file or an s3://, gs:// or az:// URL"
    )


def kind_of(name: str) -> str:
    """Whether a file is an image or a video, by its ending; empty for all others."""
    ending = Path(name).suffix[1:].lower()
    for kind, endings in KINDS.items():
        if ending in endings.split():
            return kind
    return ""


def name_of(content: bytes) -> str:
    """The name of a file that is kept by its content: `frames.digest` of that file."""
    from blake3 import blake3

    return str(blake3(content).hexdigest()[:32])


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Turn whatever a decoder raises on a damaged or unusual file into an OSError.

    Decoders raise nearly anything, such as TypeError and IndexError. So the block may only call Pillow or
    PyAV: an error of this project's code would look like a damaged file.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Image.DecompressionBombError:  # it has twice as many as Pillow warns of
        raise OSError(
            f"its pixels are too many: make them at most {MAX_PIXELS}"
        ) from None
    except Exception as error:
        raise OSError(str(error) or type(error).__name__) from error


def open_image(file: Any, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Open an image, in one of Pillow's `formats` or any; OSError if it cannot be, or is too large."""
    image = _opened(file, formats)
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise OSError(
            f"{image.width} x {image.height} pixels are too many: make them at most {MAX_PIXELS}"
        )
    return image


def _opened(file: Any, formats: tuple[str, ...] | None) -> Image.Image:
    """Open an image of any size; OSError if that is impossible."""
    if isinstance(file, str | Path):
        file = regular(file)
    try:
        with decoding():
            return Image.open(file, formats=formats)
    except UnidentifiedImageError:
        if not _is_heif(file):
            raise
    try:
        import pillow_heif
    except ModuleNotFoundError:
        raise OSError(
            "HEIC and HEIF need a package: pip install 'vlmdistill[heic]'"
        ) from None
    pillow_heif.register_heif_opener()
    with decoding():
        return Image.open(file, formats=formats)


def _is_heif(file: Any) -> bool:
    """Whether a file that Pillow does not know has the brand of a HEIF image (ISO/IEC 23008-12, 10.2)."""
    if isinstance(file, str | Path):
        with Path(file).open("rb") as opened:
            return _is_heif(opened)
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    return head[4:8] == b"ftyp" and head[8:12] in HEIF_BRANDS


@contextlib.contextmanager
def large_images() -> Iterator[None]:
    """Suppress Pillow's warning about large images, which names no file; at twice the limit it is an error.

    Use it around threads, not in them: warning filters belong to the process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def upright(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """A copy in `mode`, rotated as its EXIF metadata says, without metadata; OSError if it is damaged.

    16-bit pixels are scaled to 8 bits. In RGB, transparent pixels are laid on white, as the processors of
    transformers and vLLM do.
    """
    with decoding():
        image.load()
    turn = _turn(image)
    picture = Image.new(mode, image.size)
    for top, strip in _strips(image, mode):
        picture.paste(strip, (0, top))
    return picture if turn is None else picture.transpose(turn)


def require_whole(image: Image.Image) -> None:
    """OSError if an image is damaged, or of a form that `upright` does not read. No copy is made."""
    with decoding():
        image.load()
    for _ in _strips(image, "RGB"):
        pass


def _strips(image: Image.Image, mode: str) -> Iterator[tuple[int, Image.Image]]:
    """The rows of a loaded image in `mode`, a few at a time, and where they begin.

    A conversion has several copies of its pixels, and a small file may have `MAX_PIXELS`.
    """
    # Pillow scales a PPM to 16 bits.
    is_ppm = image.mode == "I" and image.format == "PPM"
    height = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, height):
        with decoding():
            strip = image.crop((0, top, image.width, min(top + height, image.height)))
        bits = _eight_bits(strip, is_ppm)
        with decoding():
            yield top, _on_white(bits) if mode == "RGB" else bits.convert(mode)


def pages(image: Image.Image) -> int:
    """The number of pages of a TIFF file or of frames of an animation, of which `upright` copies the first.

    Small versions of the picture do not count: previews of a TIFF file, or what a phone adds to a JPEG.
    """
    if image.format not in PAGED:
        return 1
    with decoding():
        total = int(getattr(image, "n_frames", 1))
        if image.format != "TIFF":
            return total
        count = 0
        for number in range(total):
            image.seek(number)
            is_reduced = int(image.tag_v2.get(SUBFILE_TYPE, 0)) & 1  # type: ignore[attr-defined]
            count += not is_reduced
        image.seek(0)
    return max(count, 1)


def require_one_page(image: Image.Image) -> None:
    """OSError if a file has several pages or frames."""
    count = pages(image)
    if count > 1:
        raise OSError(
            f"it has {count} pages or frames, of which targets see the first: name it a video, or save each "
            "as an image"
        )


def _is_transparent(image: Image.Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _on_white(image: Image.Image) -> Image.Image:
    """An image in RGB. What hides behind transparent pixels, often black, is not seen."""
    if not _is_transparent(image):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _eight_bits(image: Image.Image, is_ppm: bool) -> Image.Image:
    # `convert` would clip brighter pixels at 255.
    if is_ppm or image.mode.startswith("I;16"):
        pixels_HW = np.asarray(image).astype(np.uint32)
        grey = Image.fromarray(((pixels_HW + 128) // 257).astype(np.uint8))
        transparent = image.info.get("transparency")
        if transparent is None:
            return grey
        opacity_HW = np.where(pixels_HW == transparent, 0, 255).astype(np.uint8)
        return Image.merge("LA", (grey, Image.fromarray(opacity_HW)))
    if image.mode in ("I", "F"):
        raise OSError(
            f"its pixels are 32-bit numbers of unknown range (mode {image.mode}): convert it to 8 or 16 bits"
        )
    return _with_eight_bit_transparency(image)


def _with_eight_bit_transparency(image: Image.Image) -> Image.Image:
    """A PNG of 16 bits a colour, whose pixels Pillow cuts to 8 bits, with its transparent colour cut, too."""
    colour = image.info.get("transparency")
    if not isinstance(colour, tuple) or max(colour) < 256:
        return image
    changed = image.copy()
    changed.info["transparency"] = tuple(value >> 8 for value in colour)
    return changed


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The rotation of EXIF; None if the metadata is unreadable."""
    # `ImageOps.exif_transpose` rewrites the metadata, which fails for unusual tags.
    try:
        with decoding():
            orientation = image.getexif().get(ORIENTATION, 1)
    except OSError:
        return None
    return TURNS.get(orientation)


@contextlib.contextmanager
def _naming(source: Any) -> Iterator[None]:
    """Turn an OSError into the MediaError that names the image."""
    try:
        yield
    except FileNotFoundError:
        if "://" in str(source):
            raise of_the_web(source) from None
        raise MediaError(f"image {source} does not exist") from None
    except OSError as error:
        raise MediaError(f"image {source} cannot be read: {error}") from None


def read_image(source: str | Path | Image.Image) -> Image.Image:
    """Load an image upright and in RGB; MediaError names a file that is missing or unreadable."""
    with _naming(source):
        if isinstance(source, Image.Image):
            return upright(source)
        with large_images(), open_image(source) as image:
            require_one_page(image)
            return upright(image)


def data_url(file: str | Path) -> str:
    """An image as a data URL that any reader shows as `upright` does; MediaError if it cannot be read.

    The file's own bytes if they need no rotation and no conversion, else a PNG.
    """
    with _naming(file), large_images(), open_image(file) as image:
        kind = image.format or ""
        plain = (
            image.mode == "RGB" and not _is_transparent(image) and _turn(image) is None
        )
        if kind in PLAIN_FORMATS and plain:
            data = Path(file).read_bytes()
        else:
            kind, buffer = "PNG", io.BytesIO()
            upright(image).save(buffer, kind)
            data = buffer.getvalue()
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
