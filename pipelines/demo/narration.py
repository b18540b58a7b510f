"""What is said about a clip: questions about its video and reference answers.

As in `wording`, some of the choices follow from what is seen (the verb of a move from the shape) and the
rest is drawn from `rng`. An event is told in the order time, cells, item: each is easier to find once the
one before it is said. Every answer names the background and how many shapes there are at the start and at
the end, in this order.
"""

import random
from collections.abc import Callable, Sequence

from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip, Event, Slides
from vlmdistill.pipelines.demo.scenes import CELLS, Item
from vlmdistill.pipelines.demo.wording import NUMBERS, REMARKS, an, look, sentence, with_suffix

TASKS = ("watch", "events", "start", "end", "compare")
"""What can be asked about a video."""

MOVES = {
    "circle": "rolls",
    "square": "slides",
    "triangle": "walks",
    "star": "flies",
    "cross": "jumps",
    "diamond": "glides",
}

_PROMPTS: dict[str, tuple[str, ...]] = {
    "watch": (
        "Describe the video.",
        "Describe this video in detail.",
        "What do you see in this video?",
        "What is shown in the clip?",
        "What does the video show?",
        "Can you describe the video for me?",
        "Write a detailed description of this video.",
        "Tell me what you see in the clip.",
    ),
    "events": (
        "What happens in the video?",
        "List all events in the video.",
        "Make a list of everything that happens in the clip.",
        "What changes in this video, and when?",
    ),
    "start": (
        "What is there at the start of the video?",
        "Describe the first frame of the video.",
        "How does the clip start?",
    ),
    "end": (
        "What is there at the end of the video?",
        "Describe the last frame of the video.",
        "How does the clip end?",
    ),
    "compare": (
        "Compare the start and the end of the video.",
        "Describe the board before and after.",
        "How does the clip start, and how does it end?",
    ),
}


def ask(clip: Clip, task: str, rng: random.Random) -> tuple[str, str]:
    """A question of the kind `task` about the clip and a reference answer to it."""
    return with_suffix(rng.choice(_PROMPTS[task]), rng), answer(clip, task, rng)


def answer(clip: Clip, task: str, rng: random.Random) -> str:
    """A reference answer."""
    return _ANSWERS[task](clip, rng)


def rounds(clip: Clip, rng: random.Random) -> list[tuple[str, str]]:
    """A conversation about the clip's video: one or two rounds, each of another task."""
    return [ask(clip, task, rng) for task in rng.sample(TASKS, 2 if rng.random() < 0.15 else 1)]


def look_probes(slides: Slides, rng: random.Random, *, last: bool) -> list[tuple[str, str]]:
    """Terse questions for the first stage of training: nine times a cell and one fact of it.

    They are about the start, or with `last` about the end.
    """
    told = []
    items = slides.scene(PHASES - 1 if last else 0).items
    for kind in rng.sample(("size", "colour", "shape"), 3):
        held = {item.cell: getattr(item, kind) for item in items}
        cells = rng.sample(range(len(CELLS)), len(CELLS))
        facts = " ".join(f"{CELLS[cell]} {held.get(cell, 'empty')}" for cell in cells)
        told.append((f"Scan the {kind}s at the {'end' if last else 'start'}.", f"{facts}."))
    return told


def event_probe(clip: Clip) -> tuple[str, str]:
    """A terse question for the first stage of training: the events, one a stamp."""
    return "Scan the events.", f"{clip.background}, {', '.join(_terse(clip))}."


def scan_probe(clip: Clip, rng: random.Random) -> tuple[str, str]:
    """A terse question for the second stage: the events, or whole items at the start or the end."""
    if rng.random() < 0.5:
        return event_probe(clip)
    last = rng.random() < 0.5
    held = {
        item.cell: f"{item.size} {item.colour} {item.shape}" for item in clip.scene((PHASES - 1) * last).items
    }
    facts = ", ".join(f"{CELLS[cell]} {known}" for cell, known in held.items())
    when = "end" if last else "start"
    return f"Scan the video at the {when}.", f"{clip.background} {NUMBERS[len(held)]} shapes, {facts}."


def _terse(clip: Clip) -> list[str]:
    facts = [f"{stamp} none" for stamp in STAMPS]
    for event in clip.events:
        cells = [CELLS[cell] for cell in (event.source, event.to) if cell is not None]
        kind = "gets" if event.source is None else "loses" if event.to is None else "sends to"
        told = f"{cells[0]} {kind} {' '.join(cells[1:])}".rstrip()
        item = f"{event.item.size} {event.item.colour} {event.item.shape}"
        facts[event.phase] = f"{STAMPS[event.phase]} {told} {item}"
    return facts[1:]


def _happening(event: Event, rng: random.Random, nth: int) -> str:
    item = event.item
    after = ("After", "First, after") if nth == 0 else ("After", "Then, after")
    when = f"{rng.choice(after)} {STAMPS[event.phase]} seconds"
    tail = f", {rng.choice(REMARKS[item.colour])}" if rng.random() < 0.35 else ""
    what = f"a {look(item, rng)}{tail}."
    if event.source is None and event.to is not None:
        told = rng.choice(("the {} gets", "in the {} appears")).format(CELLS[event.to])
    elif event.source is not None and event.to is None:
        told = rng.choice(("the {} loses", "from the {} disappears")).format(CELLS[event.source])
    else:
        assert event.source is not None
        assert event.to is not None
        way = rng.choice(("the {} sends to the {}", f"from the {{}} to the {{}} {MOVES[item.shape]}"))
        told = way.format(CELLS[event.source], CELLS[event.to])
    return f"{when} {told} {what}"


def _counts(clip: Clip) -> tuple[str, str]:
    return NUMBERS[len(clip.items)], NUMBERS[len(clip.scene(PHASES - 1).items)]


def _opening(clip: Clip, rng: random.Random) -> str:
    ground, (first, last) = clip.background, _counts(clip)
    return rng.choice(
        (
            f"The video shows a board with {an(ground)} background, {first} shapes before and {last} after.",
            f"This clip has {an(ground)} background. It starts with {first} shapes and ends with {last}.",
            f"On {an(ground)} background I can see {first} shapes that become {last}.",
        )
    )


def _things(clip: Clip) -> str:
    number = len(clip.events)
    return "One thing happens." if number == 1 else f"{NUMBERS[number].capitalize()} things happen."


def _items(items: Sequence[Item], rng: random.Random) -> list[str]:
    return [sentence(item, rng, remark=0.3) for item in items]


def _events(clip: Clip, rng: random.Random) -> list[str]:
    return [_happening(event, rng, nth) for nth, event in enumerate(clip.events)]


def _watch(clip: Clip, rng: random.Random) -> str:
    parts = [_opening(clip, rng), "This is how it starts.", *_items(clip.items, rng), _things(clip)]
    end = rng.choice(("Then the video ends.", "Nothing else happens.", "That is all I can see."))
    return " ".join([*parts, *_events(clip, rng), end])


def _list_events(clip: Clip, rng: random.Random) -> str:
    head = f"{_opening(clip, rng)} {_things(clip)}"
    lines = [f"{n}. {told}" for n, told in enumerate(_events(clip, rng), 1)]
    still = "Look at the board again before you go on." if len(lines) == 1 else "These are all events."
    return "\n".join([head, *lines, rng.choice((still, "Nothing else changes on the board."))])


def _start(clip: Clip, rng: random.Random) -> str:
    parts = [_opening(clip, rng), rng.choice(("I look at the start.", "This is how it starts."))]
    return " ".join([*parts, *_items(clip.items, rng), "That was the start of the video."])


def _end(clip: Clip, rng: random.Random) -> str:
    parts = [_opening(clip, rng), rng.choice(("I look at the end.", "This is how it ends."))]
    return " ".join([*parts, *_items(clip.scene(PHASES - 1).items, rng), "That was the end of the video."])


def _compare(clip: Clip, rng: random.Random) -> str:
    last = clip.scene(PHASES - 1).items
    parts = [_opening(clip, rng), "This is how it starts.", *_items(clip.items, rng)]
    return " ".join([*parts, "This is how it ends.", *_items(last, rng), _things(clip)])


_ANSWERS: dict[str, Callable[[Clip, random.Random], str]] = {
    "watch": _watch,
    "events": _list_events,
    "start": _start,
    "end": _end,
    "compare": _compare,
}
