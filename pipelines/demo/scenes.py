"""Scenes: boards of nine cells that contain a few shapes, drawn at 84 x 84 pixels.

A cell is 28 pixels wide, one merged visual token of Qwen2.5-VL, so an image is nine visual
tokens. The vision tower of Qwen2.5-VL has no absolute positions: two rulers in each cell,
colored by row and by column, make the position of a cell visible in its pixels. Fills are
bright and backgrounds dark, so brightness alone identifies a shape.
"""

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from PIL import Image, ImageDraw

CELLS = (
    "northwest",
    "north",
    "northeast",
    "west",
    "centre",
    "east",
    "southwest",
    "south",
    "southeast",
)
SIZES = ("large", "small")
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
COLOURS = {
    "red": (255, 48, 48),
    "orange": (255, 150, 0),
    "yellow": (255, 255, 40),
    "green": (40, 235, 70),
    "blue": (90, 150, 255),
    "purple": (190, 90, 255),
    "pink": (255, 150, 205),
    "white": (255, 255, 255),
}
LOOKS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
BACKGROUNDS = {
    "black": (0, 0, 0),
    "navy": (0, 0, 96),
    "maroon": (96, 0, 16),
    "olive": (64, 68, 0),
}

SPLITS = ("target",) * 6 + ("drafter",) * 2 + ("evaluation",) * 2
"""The use of a scene: to train the target, to train drafters, or for evaluation only."""

CELL_PIXELS = 28
SIDE_PIXELS = 3 * CELL_PIXELS
_RULER = 2
_ROW_INKS = ((255, 255, 255), (0, 200, 255), (255, 120, 0))
_COLUMN_INKS = ((255, 0, 255), (0, 255, 0), (120, 120, 255))
_COME_INK = (255, 255, 255)
_GONE_INK = (255, 0, 0)
_MOVED_INK = (0, 255, 255)
_MIDDLE = (CELL_PIXELS + _RULER) // 2  # of a cell, beside the rulers
_RADIUS = {"large": 11, "small": 7}

Colour = tuple[int, int, int]
Drawn = TypeVar("Drawn")


@dataclass(frozen=True, order=True)
class Item:
    """One shape in one cell; `cell` indexes `CELLS` in reading order."""

    cell: int
    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """A background and items in reading order, no two alike in both colour and shape."""

    background: str
    items: tuple[Item, ...]


def split_of(shown: object) -> str:
    """The split of a scene or a clip, a stable hash of its content: none is in two splits."""
    content = repr(shown).encode()
    return SPLITS[zlib.crc32(content) % len(SPLITS)]


def first_in(split: str | None, draw_one: Callable[[], Drawn]) -> Drawn:
    """The first draw that is in `split`, one of `SPLITS`; any draw for None."""
    if split is not None and split not in SPLITS:
        splits = ", ".join(sorted(set(SPLITS)))
        raise ValueError(f"split must be one of {splits}, not {split!r}")
    drawn = draw_one()
    while split is not None and split_of(drawn) != split:
        drawn = draw_one()
    return drawn


def random_scene(rng: random.Random, split: str | None = None) -> Scene:
    """Draw a scene of four to seven items, see `first_in`: all choices are uniform and independent."""

    def draw_one() -> Scene:
        count = rng.randint(4, 7)
        cells = sorted(rng.sample(range(len(CELLS)), count))
        looks = rng.sample(LOOKS, count)
        background = rng.choice(list(BACKGROUNDS))
        items = [
            Item(cell, rng.choice(SIZES), *look)
            for cell, look in zip(cells, looks, strict=True)
        ]
        return Scene(background, tuple(items))

    return first_in(split, draw_one)


def draw(
    scene: Scene,
    clock: Colour | None = None,
    come: Sequence[Item] = (),
    gone: Sequence[Item] = (),
    *,
    moved: bool = False,
) -> Image.Image:
    """Render a scene, or a moment of a video, as an 84 x 84 RGB image.

    In a moment, `clock` is the color of a strip at the bottom of each cell. Items that
    have just `come` have a white bar on the right; those that have just `gone` have a red
    bar and are hollow. If an item has `moved`, both its cells have a bar on the left, too.
    """
    background = BACKGROUNDS[scene.background]
    image = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), background)
    pen = ImageDraw.Draw(image)
    for cell in range(len(CELLS)):
        _draw_rulers(pen, cell, clock)
    for item in scene.items:
        _draw_item(pen, item, COLOURS[item.colour])
    for item in gone:
        _draw_item(pen, item, COLOURS[item.colour])
        _draw_item(pen, item, background, less=3)
    for items, ink in ((come, _COME_INK), (gone, _GONE_INK)):
        for item in items:
            _draw_bars(pen, item.cell, ink, moved=moved)
    return image


def _corner(cell: int) -> tuple[int, int]:
    """The pixel at the top left of a cell."""
    row, column = divmod(cell, 3)
    return column * CELL_PIXELS, row * CELL_PIXELS


def _draw_rulers(pen: ImageDraw.ImageDraw, cell: int, clock: Colour | None) -> None:
    """The rulers at the top and left of a cell, and the strip at its bottom."""
    row, column = divmod(cell, 3)
    x, y = _corner(cell)
    right = x + CELL_PIXELS - 1
    bottom = y + CELL_PIXELS - 1
    row_ruler = (x, y, right, y + _RULER - 1)
    pen.rectangle(row_ruler, fill=_ROW_INKS[row])
    column_ruler = (x, y + _RULER, x + _RULER - 1, bottom)
    pen.rectangle(column_ruler, fill=_COLUMN_INKS[column])
    if clock:
        strip = (x + _RULER, bottom - _RULER + 1, right, bottom)
        pen.rectangle(strip, fill=clock)


def _draw_bars(
    pen: ImageDraw.ImageDraw, cell: int, ink: Colour, *, moved: bool
) -> None:
    """The bar on the right of a cell, and that on the left if its item has moved."""
    x, y = _corner(cell)
    top = y + _RULER
    bottom = y + CELL_PIXELS - _RULER - 1
    right = x + CELL_PIXELS
    pen.rectangle((right - _RULER, top, right - 1, bottom), fill=ink)
    if moved:
        start = x + _RULER
        pen.rectangle((start, top, start + _RULER - 1, bottom), fill=_MOVED_INK)


def _draw_item(
    pen: ImageDraw.ImageDraw, item: Item, ink: Colour, less: int = 0
) -> None:
    """Draw an item around the center (x, y), its radius `less` pixels smaller."""
    left, top = _corner(item.cell)
    x = left + _MIDDLE
    y = top + _MIDDLE
    r = _RADIUS[item.size] - less
    match item.shape:
        case "circle":
            pen.ellipse(_box(x, y, r, r), fill=ink)
        case "square":
            pen.rectangle(_box(x, y, r - 1, r - 1), fill=ink)
        case "triangle":
            corners = [(x, y - r), (x + r, y + r), (x - r, y + r)]
            pen.polygon(corners, fill=ink)
        case "diamond":
            corners = [(x, y - r), (x + r, y), (x, y + r), (x - r, y)]
            pen.polygon(corners, fill=ink)
        case "cross":
            pen.rectangle(_box(x, y, r, r // 3), fill=ink)
            pen.rectangle(_box(x, y, r // 3, r), fill=ink)
        case _:
            pen.polygon(_star(x, y, r), fill=ink)


def _box(x: int, y: int, width: int, height: int) -> tuple[int, int, int, int]:
    """The rectangle around (x, y) with these half sides."""
    return x - width, y - height, x + width, y + height


def _star(x: int, y: int, radius: int) -> list[tuple[float, float]]:
    """The corners of a star of five points, its inner radius half the outer one."""
    corners: list[tuple[float, float]] = []
    for corner in range(10):
        distance = radius if corner % 2 == 0 else radius / 2
        angle = math.pi * corner / 5
        corner_x = x + distance * math.sin(angle)
        corner_y = y - distance * math.cos(angle)
        corners.append((corner_x, corner_y))
    return corners
