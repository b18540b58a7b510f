"""Scores a response about a scene or a clip by its facts."""

import re

from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip, Event
from vlmdistill.pipelines.demo.narration import APPEARS, SAME, VANISHES
from vlmdistill.pipelines.demo.scenes import BACKGROUNDS, CELLS, COLOURS, SHAPES, Scene
from vlmdistill.pipelines.demo.wording import NUMBERS, SIZE_WORDS

FACTS = ("position", "colour", "shape", "size", "count", "background")
CLIP_FACTS = (*FACTS[:4], "event", "path", "item", "background")
"""As of a scene; then what happens when (nothing, appears, vanishes, moves), in which cells, to what."""

_SIZE_OF = {word: size for size, words in SIZE_WORDS.items() for word in words}
_EVENT = re.compile(
    rf"\b(?:(?P<cell>{'|'.join(sorted(CELLS, key=len, reverse=True))})"
    rf"|(?P<size>{'|'.join(_SIZE_OF)}) (?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}))\b",
    re.IGNORECASE,
)
_COUNT = re.compile(rf"\b({'|'.join(NUMBERS)}) shapes\b", re.IGNORECASE)
_BACKGROUND = re.compile(rf"\b({'|'.join(BACKGROUNDS)})\b", re.IGNORECASE)
_STAMP = re.compile(rf"\bat second ({'|'.join(STAMPS[1:])})\b", re.IGNORECASE)
_VERB = re.compile(rf"\b(?:{SAME}|still|{APPEARS}|{VANISHES})\b", re.IGNORECASE)
_KINDS = {
    (SAME,): "nothing",
    ("still",): "nothing",
    (APPEARS,): "appears",
    (VANISHES,): "vanishes",
    (VANISHES, APPEARS): "moves",
}

Claim = tuple[str, str, str]
"""Size, color and shape as a response states them."""
Happening = tuple[str, tuple[str, ...], Claim]
"""Kind (nothing, appears, vanishes, moves; empty if none of them), cells, and the item."""


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
                size, colour, shape = (
                    event[kind].lower() for kind in ("size", "colour", "shape")
                )
                items.append((_SIZE_OF[size], colour, shape))
        for cell, item in zip(cells, items, strict=False):
            found.setdefault(cell, set()).add(item)
    return found


def score(
    text: str, scene: Scene, task: str = "describe"
) -> dict[str, tuple[int, int]]:
    """Correct and total facts of a response, by kind (`FACTS`).

    Every task asks for every item, so the totals are the scene's: one position, color, shape and size
    per item, one count, one background. Statements about a cell count only if they do not contradict each
    other. A missing item is wrong in all four kinds; an item in an empty cell adds one wrong position.
    """
    del task  # every task covers the whole scene
    numbers = {word.lower() for word in _COUNT.findall(text)}
    result = _score_items(text, scene)
    result["count"] = (int(numbers == {NUMBERS[len(scene.items)]}), 1)
    return result | {"background": _score_background(text, scene.background)}


def _score_items(text: str, scene: Scene) -> dict[str, tuple[int, int]]:
    found = claims(text)
    kinds = ("position", "colour", "shape", "size")
    right = dict.fromkeys(kinds, 0)
    for item in scene.items:
        said = found.pop(CELLS[item.cell], set())
        right["position"] += bool(said)
        for index, kind in enumerate(("size", "colour", "shape")):
            right[kind] += {claim[index] for claim in said} == {getattr(item, kind)}
    count = len(scene.items)
    return {
        kind: (right[kind], count + len(found) * (kind == "position")) for kind in kinds
    }


def _score_background(text: str, background: str) -> tuple[int, int]:
    return int({word.lower() for word in _BACKGROUND.findall(text)} == {background}), 1


def happenings(text: str) -> dict[str, list[Happening]]:
    """The events in the text by time, from sentences that name a second."""
    found: dict[str, list[Happening]] = {}
    for sentence in re.split(r"[.!?\n]", text):
        if not (stamp := _STAMP.search(sentence)):
            continue
        parts = list(_EVENT.finditer(sentence))
        cells = tuple(part["cell"].lower() for part in parts if part["cell"])
        items = [
            (
                _SIZE_OF[part["size"].lower()],
                part["colour"].lower(),
                part["shape"].lower(),
            )
            for part in parts
            if not part["cell"]
        ]
        kind = _KINDS.get(tuple(verb.lower() for verb in _VERB.findall(sentence)), "")
        happening = (kind, cells, items[0] if items else ("", "", ""))
        found.setdefault(stamp[1].lower(), []).append(happening)
    return found


def score_clip(text: str, clip: Clip, task: str) -> dict[str, tuple[int, int]]:
    """Correct and total facts of a response about a video, by kind (`CLIP_FACTS`), as far as the task asks.

    Items count as in `score`, separately for the start and the end. Events count by phase: the kind, which
    may be nothing; and, if there is or should be an event, the cells and the item. A phase without a
    statement, or with two, is wrong.
    """
    total = dict.fromkeys(CLIP_FACTS, (0, 0))
    sentences = [
        part for part in re.split(r"(?<=[.!?\n])", text) if not _STAMP.search(part)
    ]
    for when, phase, tasks in (("start", 0, _AT_START), ("end", PHASES - 1, _AT_END)):
        if task in tasks:
            at = "".join(part for part in sentences if f"at the {when}" in part.lower())
            of_phase = _score_items(at, clip.scene(phase))
            total |= {
                kind: _sum(total[kind], right) for kind, right in of_phase.items()
            }
    if task in _OF_EVENTS:
        stated, real = happenings(text), {event.phase: event for event in clip.events}
        for phase in range(1, PHASES):
            said = stated.get(STAMPS[phase], [])
            one = said[0] if len(said) == 1 else ("", (), ("", "", ""))
            true = (
                _real(real[phase]) if phase in real else ("nothing", (), ("", "", ""))
            )
            total["event"] = _sum(total["event"], (int(one[0] == true[0]), 1))
            if phase in real or one[0] not in ("", "nothing"):
                for index, kind in ((1, "path"), (2, "item")):
                    right = phase in real and one[index] == true[index]
                    total[kind] = _sum(total[kind], (int(right), 1))
    return total | {"background": _score_background(text, clip.background)}


_AT_START, _AT_END, _OF_EVENTS = (
    ("watch", "start", "compare"),
    ("end", "compare"),
    ("watch", "events"),
)


def _sum(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
    return one[0] + two[0], one[1] + two[1]


def _real(event: Event) -> Happening:
    cells = tuple(CELLS[cell] for cell in (event.source, event.to) if cell is not None)
    kind = (
        "appears"
        if event.source is None
        else "vanishes"
        if event.to is None
        else "moves"
    )
    return kind, cells, (event.item.size, event.item.colour, event.item.shape)
