"""Score a free answer about a scene or a clip by its facts."""

import re

from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip, Event
from vlmdistill.pipelines.demo.scenes import BACKGROUNDS, CELLS, COLOURS, SHAPES, Scene
from vlmdistill.pipelines.demo.wording import NUMBERS, SIZE_WORDS

FACTS = ("position", "colour", "shape", "size", "count", "background")
CLIP_FACTS = (*FACTS[:4], "event", "time", "path", "item", "count", "background")
"""As of a scene; then what an event is (appears, vanishes, moves), when, in which cells, to which item."""

_SIZE_OF = {word: size for size, words in SIZE_WORDS.items() for word in words}
_EVENT = re.compile(
    rf"\b(?:(?P<cell>{'|'.join(sorted(CELLS, key=len, reverse=True))})"
    rf"|(?P<size>{'|'.join(_SIZE_OF)}) (?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}))\b",
    re.IGNORECASE,
)
_COUNT = re.compile(rf"\b({'|'.join(NUMBERS)}) shapes\b", re.IGNORECASE)
_BACKGROUND = re.compile(rf"\b({'|'.join(BACKGROUNDS)})\b", re.IGNORECASE)
_STAMP = re.compile(rf"\bafter ({'|'.join(STAMPS[1:])}) seconds\b", re.IGNORECASE)
_VERBS = {
    "appears": re.compile(r"\b(?:gets|appears)\b"),
    "vanishes": re.compile(r"\b(?:loses|disappears)\b"),
    "moves": re.compile(r"\b(?:sends|to the)\b"),
}
_TALLY = re.compile(
    rf"\b(?:(?:{'|'.join(NUMBERS)})\b(?= shapes\b| things?\b)"
    rf"|(?:become|ends with|before and) (?:{'|'.join(NUMBERS)})\b)",
    re.IGNORECASE,
)

Claim = tuple[str, str, str]
"""Size, colour and shape as an answer states them."""
Happening = tuple[str, str, tuple[str, ...], Claim]
"""Kind (`appears`, `vanishes` or `moves`), time as a word, cells, and the item."""


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
    numbers = {word.lower() for word in _COUNT.findall(text)}
    told = _score_items(text, scene)
    told["count"] = (int(numbers == {NUMBERS[len(scene.items)]}), 1)
    return told | {"background": _score_background(text, scene.background)}


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
    return {kind: (right[kind], count + len(found) * (kind == "position")) for kind in kinds}


def _score_background(text: str, background: str) -> tuple[int, int]:
    return int({word.lower() for word in _BACKGROUND.findall(text)} == {background}), 1


def happenings(text: str) -> list[Happening]:
    """The events that the text tells, in its order: sentences that say after how many seconds."""
    found = []
    for sentence in re.split(r"[.!?\n]", text):
        if not (stamp := _STAMP.search(sentence)):
            continue
        told = list(_EVENT.finditer(sentence))
        cells = tuple(part["cell"].lower() for part in told if part["cell"])
        items = [
            (_SIZE_OF[part["size"].lower()], part["colour"].lower(), part["shape"].lower())
            for part in told
            if not part["cell"]
        ]
        verbs = [kind for kind, verb in _VERBS.items() if verb.search(sentence)]
        found.append(
            (verbs[0] if verbs else "", stamp[1].lower(), cells, items[0] if items else ("", "", ""))
        )
    return found


def score_clip(text: str, clip: Clip, task: str) -> dict[str, tuple[int, int]]:
    """Right and total facts of an answer about a video, by kind (`CLIP_FACTS`), of what the task asks for.

    Items count as in `score`, those at the start apart from those at the end. The n-th event told is
    compared with the n-th that happens; one left out or made up is wrong in all four kinds. Counts are the
    shapes at the start and at the end and, where a task tells it, how many things happen.
    """
    total = dict.fromkeys(CLIP_FACTS, (0, 0))
    sentences = re.split(r"(?<=[.!?\n])", text)
    still = "".join(part for part in sentences if not _STAMP.search(part))
    before, _, after = still.partition("This is how it ends.") if task == "compare" else (still, "", still)
    if task in ("watch", "start", "compare"):
        total |= _score_items(before, clip.scene(0))
    if task in ("end", "compare"):
        last = _score_items(after, clip.scene(PHASES - 1))
        total |= {kind: (total[kind][0] + last[kind][0], total[kind][1] + last[kind][1]) for kind in last}
    numbers = [found[0].split()[-1].lower() for found in _TALLY.finditer(text)]
    true = [NUMBERS[len(clip.scene(phase).items)] for phase in (0, PHASES - 1)]
    if task in ("watch", "events", "compare"):
        true.append(NUMBERS[len(clip.events)])
    total["count"] = (sum(a == b for a, b in zip(numbers, true, strict=False)), len(true))
    if task in ("watch", "events"):
        told, real = happenings(text), [_real(event) for event in clip.events]
        pairs = list(zip(told, real, strict=False))
        for index, kind in enumerate(("event", "time", "path", "item")):
            total[kind] = (sum(a[index] == b[index] for a, b in pairs), max(len(told), len(real)))
    return total | {"background": _score_background(text, clip.background)}


def _real(event: Event) -> Happening:
    cells = tuple(CELLS[cell] for cell in (event.source, event.to) if cell is not None)
    kind = "appears" if event.source is None else "vanishes" if event.to is None else "moves"
    return kind, STAMPS[event.phase], cells, (event.item.size, event.item.colour, event.item.shape)
