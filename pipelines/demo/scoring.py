"""Score a free answer about a scene by its facts."""

import re

from vlmdistill.pipelines.demo.scenes import BACKGROUNDS, CELLS, COLOURS, SHAPES, Scene
from vlmdistill.pipelines.demo.wording import NUMBERS, SIZE_WORDS

FACTS = ("position", "colour", "shape", "size", "count", "background")

_SIZE_OF = {word: size for size, words in SIZE_WORDS.items() for word in words}
_EVENT = re.compile(
    rf"\b(?:(?P<cell>{'|'.join(sorted(CELLS, key=len, reverse=True))})"
    rf"|(?P<size>{'|'.join(_SIZE_OF)}) (?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}))\b",
    re.IGNORECASE,
)
_COUNT = re.compile(rf"\b({'|'.join(NUMBERS)}) shapes\b", re.IGNORECASE)
_BACKGROUND = re.compile(rf"\b({'|'.join(BACKGROUNDS)})\b", re.IGNORECASE)

Claim = tuple[str, str, str]
"""Size, colour and shape as an answer states them."""


def claims(text: str) -> dict[str, set[Claim]]:
    """What the text says of each cell: within a sentence the n-th item belongs to the n-th cell."""
    found: dict[str, set[Claim]] = {}
    for sentence in re.split(r"[.!?\n]", text):
        cells: list[str] = []
        items: list[Claim] = []
        for event in _EVENT.finditer(sentence):
            if event["cell"]:
                cells.append(event["cell"].lower())
            else:
                size, colour, shape = (event[kind].lower() for kind in ("size", "colour", "shape"))
                items.append((_SIZE_OF[size], colour, shape))
        for cell, item in zip(cells, items, strict=False):
            found.setdefault(cell, set()).add(item)
    return found


def score(text: str, scene: Scene, task: str = "describe") -> dict[str, tuple[int, int]]:
    """Right and total facts of an answer, by kind (`FACTS`).

    Every task asks for every item, so the totals are the scene's: one position, colour, shape and size
    an item, one count, one background. What is said of a cell counts only if it is said of that cell
    throughout; an item left out is wrong in all four kinds, and an item put into an empty cell adds one
    wrong position.
    """
    del task  # every task covers the whole scene
    found = claims(text)
    right = dict.fromkeys(FACTS, 0)
    for item in scene.items:
        said = found.pop(CELLS[item.cell], set())
        right["position"] += bool(said)
        for index, kind in enumerate(("size", "colour", "shape")):
            right[kind] += {claim[index] for claim in said} == {getattr(item, kind)}
    numbers = {word.lower() for word in _COUNT.findall(text)}
    grounds = {word.lower() for word in _BACKGROUND.findall(text)}
    right["count"] = int(numbers == {NUMBERS[len(scene.items)]})
    right["background"] = int(grounds == {scene.background})
    total = dict.fromkeys(FACTS, len(scene.items)) | {"count": 1, "background": 1}
    total["position"] += len(found)
    return {kind: (right[kind], total[kind]) for kind in FACTS}
