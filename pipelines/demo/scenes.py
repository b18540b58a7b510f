"""Scenes: boards of nine cells that contain a few shapes, drawn at 84 x 84 pixels.

A cell is 28 pixels wide, one merged visual token of Qwen2.5-VL, so an image is nine visual tokens. The
vision tower of Qwen2.5-VL has no absolute positions: two rulers in each cell, colored by row and by column,
make the position of a cell visible in its pixels. Fills are bright and backgrounds dark, so brightness alone
identifies a shape.
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
BACKGROUNDS = {
    "black": (0, 0, 0),
    "navy": (0, 0, 96),
    "maroon": (96, 0, 16),
    "olive": (64, 68, 0),
}

SPLITS = ("target",) * 6 + ("drafter",) * 2 + ("evaluation",) * 2
"""What a scene is used for: to train the target, to train drafters, or for evaluation only."""

CELL_PIXELS = 28
SIDE_PIXELS = 3 * CELL_PIXELS
_RULER = 2
_ROW_INKS = ((255, 255, 255), (0, 200, 255), (255, 120, 0))
_COLUMN_INKS = ((255, 0, 255), (0, 255, 0), (120, 120, 255))
_COME_INK, _GONE_INK, _MOVED_INK = (255, 255, 255), (255, 0, 0), (0, 255, 255)
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
    return SPLITS[zlib.crc32(repr(shown).encode()) % len(SPLITS)]


def first_in(split: str | None, draw_one: Callable[[], Drawn]) -> Drawn:
    """The first draw that is in `split`, one of `SPLITS`; any draw for None."""
    if split is not None and split not in SPLITS:
        raise ValueError(
            f"split must be one of {', '.join(sorted(set(SPLITS)))}, not {split!r}"
        )
    one = draw_one()
    while split is not None and split_of(one) != split:
        one = draw_one()
    return one


def random_scene(rng: random.Random, split: str | None = None) -> Scene:
    """Draw a scene of four to seven items, see `first_in`: all choices are uniform and independent."""

    def draw_one() -> Scene:
        cells = sorted(rng.sample(range(len(CELLS)), rng.randint(4, 7)))
        looks = rng.sample(
            [(colour, shape) for colour in COLOURS for shape in SHAPES], len(cells)
        )
        items = (
            Item(cell, rng.choice(SIZES), *look)
            for cell, look in zip(cells, looks, strict=True)
        )
        return Scene(rng.choice(list(BACKGROUNDS)), tuple(items))

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

    In a moment, `clock` is the color of a strip at the bottom of each cell. Items that have just `come` have
    a white bar on the right; those that have just `gone` have a red bar and are hollow. If an item has
    `moved`, both its cells have a bar on the left, too.
    """
    image = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(image)
    for cell in range(len(CELLS)):
        row, column = divmod(cell, 3)
        x, y = _corner(cell)
        pen.rectangle((x, y, x + CELL_PIXELS - 1, y + _RULER - 1), fill=_ROW_INKS[row])
        pen.rectangle(
            (x, y + _RULER, x + _RULER - 1, y + CELL_PIXELS - 1),
            fill=_COLUMN_INKS[column],
        )
        if clock:
            low = y + CELL_PIXELS
            pen.rectangle(
                (x + _RULER, low - _RULER, x + CELL_PIXELS - 1, low - 1), fill=clock
            )
    for item in scene.items:
        _draw_item(pen, item, COLOURS[item.colour])
    for item in gone:
        _draw_item(pen, item, COLOURS[item.colour])
        _draw_item(pen, item, BACKGROUNDS[scene.background], less=3)
    for items, ink in ((come, _COME_INK), (gone, _GONE_INK)):
        for item in items:
            x, y = _corner(item.cell)
            top, low, right = y + _RULER, y + CELL_PIXELS - _RULER - 1, x + CELL_PIXELS
            pen.rectangle((right - _RULER, top, right - 1, low), fill=ink)
            if moved:
                pen.rectangle(
                    (x + _RULER, top, x + 2 * _RULER - 1, low), fill=_MOVED_INK
                )
    return image


def _corner(cell: int) -> tuple[int, int]:
    """The pixel at the top left of a cell."""
    row, column = divmod(cell, 3)
    return column * CELL_PIXELS, row * CELL_PIXELS


def _draw_item(
    pen: ImageDraw.ImageDraw, item: Item, ink: Colour, less: int = 0
) -> None:
    x, y = (edge + (CELL_PIXELS + _RULER) // 2 for edge in _corner(item.cell))
    r = _RADIUS[item.size] - less
    match item.shape:
        case "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=ink)
        case "square":
            s = r - 1
            pen.rectangle((x - s, y - s, x + s, y + s), fill=ink)
        case "triangle":
            pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=ink)
        case "diamond":
            pen.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=ink)
        case "cross":
            t = r // 3
            pen.rectangle((x - r, y - t, x + r, y + t), fill=ink)
            pen.rectangle((x - t, y - r, x + t, y + r), fill=ink)
        case _:  # a star of five points, its inner radius half the outer one
            corners = [
                (r if corner % 2 == 0 else r / 2, math.pi * corner / 5)
                for corner in range(10)
            ]
            pen.polygon(
                [(x + d * math.sin(a), y - d * math.cos(a)) for d, a in corners],
                fill=ink,
            )
