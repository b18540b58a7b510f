"""Pictures: whatever Pillow opens, upright and in red, green and blue."""

import struct

import numpy as np
from PIL import Image

from vlmdistill.stores.errors import DataError

# What a decoder raises over a file that is damaged, or odd.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    NotImplementedError,
    struct.error,
    Image.DecompressionBombError,
)
ORIENTATION = 0x0112  # tag of EXIF 2.3, section 4.6.4: how the camera was held
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
    """An image or a video is missing or cannot be read, now and here: it may be mended."""


def upright(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """A copy in `mode`, turned as its metadata says and without any; one of BROKEN where that fails.

    16 bits are scaled to 8. Where it is transparent, RGB shows the colour that lies beneath, often black.
    """
    image.load()
    turn = _turn(image)
    picture = _eight_bits(image).convert(mode)
    picture.info = {}  # else whoever reads it next might turn it again
    return picture if turn is None else picture.transpose(turn)


def _eight_bits(image: Image.Image) -> Image.Image:
    # `convert` would cut off at 255 whatever is brighter.
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):  # scaled to 16 by Pillow
        grey_HW = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((grey_HW + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are 32-bit numbers (mode {image.mode}) without a black and a white: "
            "convert it to 8 or 16 bits"
        )
    return image


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How to turn it. Metadata that cannot be read say nothing, as to any viewer."""
    # Not by `ImageOps.exif_transpose`: it writes the metadata anew, which fails for tags of an odd kind.
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except BROKEN:
        return None
