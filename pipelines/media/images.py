"""Read images with Pillow, upright and in RGB."""

import base64
import contextlib
import io
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vlmdistill.stores.errors import DataError

# The errors of decoders on damaged or unusual files.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)
KINDS = {
    "image": "apng avif bmp dib gif heic heif ico jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm svg tga tif tiff "
    "webp",
    "video": "3gp avi flv m1v m2ts m4v mkv mov mp4 mpe mpeg mpg mts ogv qt vob webm wmv",
}
PLAIN_FORMATS = ("PNG", "JPEG", "WEBP")  # that all servers read
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


def kind_of(name: str) -> str:
    """Whether a file is an image or a video, by its ending; empty for all others."""
    ending = Path(name).suffix[1:].lower()
    return next((kind for kind, endings in KINDS.items() if ending in endings.split()), "")


@contextlib.contextmanager
def large_images() -> Iterator[None]:
    """Suppress Pillow's warning about large images, which names no file; at twice the limit it is an error.

    Use it around threads, not in them: warning filters belong to the process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def upright(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """A copy in `mode`, rotated as its EXIF metadata says, without metadata; raises one of BROKEN.

    16-bit pixels are scaled to 8 bits. Transparent pixels keep their hidden color, often black.
    """
    image.load()
    turn = _turn(image)
    picture = _eight_bits(image).convert(mode)
    picture.info = {}  # else the next reader might rotate it again
    return picture if turn is None else picture.transpose(turn)


def _eight_bits(image: Image.Image) -> Image.Image:
    # `convert` would clip brighter pixels at 255.
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):  # scaled to 16 by Pillow
        grey_HW = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((grey_HW + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are 32-bit numbers of unknown range (mode {image.mode}): convert it to 8 or 16 bits"
        )
    return image


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The rotation of EXIF; None if the metadata is unreadable."""
    # `ImageOps.exif_transpose` rewrites the metadata, which fails for unusual tags.
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except BROKEN:
        return None


def data_url(file: str | Path) -> str:
    """An image as a data URL that any reader shows as `upright` does; MediaError if it cannot be read.

    The file's own bytes if they need no rotation and no conversion, else a PNG.
    """
    try:
        with large_images(), Image.open(file) as image:
            kind = image.format or ""
            if kind in PLAIN_FORMATS and image.mode == "RGB" and _turn(image) is None:
                data = Path(file).read_bytes()
            else:
                kind, buffer = "PNG", io.BytesIO()
                upright(image).save(buffer, kind)
                data = buffer.getvalue()
    except FileNotFoundError:
        raise MediaError(f"image {file} does not exist") from None
    except BROKEN as error:
        raise MediaError(f"image {file} cannot be read: {error}") from None
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
