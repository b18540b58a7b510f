"""What is said about a clip: questions about its video and reference answers.

As in `wording`, some of the choices follow from what is seen (the verb of a move from the shape) and the
rest is drawn from `rng`. Things are told in the order time, kind, cell, item, the first three side by side:
each is then found by the two words before it (`wiring`). A move is something that vanishes in one cell and
appears in another. Every answer names the background; how it does so depends on what was asked.
"""

import random
from collections.abc import Callable

from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip, Event, Slides
from vlmdistill.pipelines.demo.scenes import CELLS, Item
from vlmdistill.pipelines.demo.wiring import APPEARS, CHANGES, END, MOVE, SAME, VANISHES
from vlmdistill.pipelines.demo.wording import REMARKS, VERBS, an, look, with_suffix

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

KINDS = (SAME, "all", APPEARS, VANISHES, "there")
"""The words that tell what happens: a move begins with "there is a move"."""

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


def look_probes(slides: Slides, rng: random.Random) -> list[tuple[str, str]]:
    """Terse questions for the first stage of training: nine times a phase, a cell and one fact of it."""
    told = []
    for kind in rng.sample(("size", "colour", "shape"), 3):
        facts = []
        for cell in rng.sample(range(len(CELLS)), len(CELLS)):
            phase = rng.randrange(PHASES)
            held = {item.cell: getattr(item, kind) for item in slides.scene(phase).items}
            facts.append(f"{STAMPS[phase]} {CELLS[cell]} {held.get(cell, 'empty')}")
        told.append((f"Scan the {kind}s.", f"{', '.join(facts)}."))
    return told


def find_probe(slides: Slides, rng: random.Random) -> tuple[str, str]:
    """The other way round: a phase and a kind of change, in any order, then the cell and its item."""
    kinds = (APPEARS, slides.come), (VANISHES, slides.gone)
    asked = [(phase, verb, items[phase]) for phase in range(1, PHASES) for verb, items in kinds]
    facts = [
        f"{_second(phase)} {verb} {f'{CELLS[item.cell]} {_terse(item)}' if item else SAME}"
        for phase, verb, item in rng.sample(asked, len(asked))
    ]
    return "Scan the changes.", f"{', '.join(facts)}."


def scan_probe(clip: Clip, rng: random.Random) -> tuple[str, str]:
    """A terse question for the second stage: the events, phase by phase, or the items of a phase."""
    if rng.random() < 0.5:
        happened = {event.phase: event for event in clip.events}
        facts = [_happened(phase, happened.get(phase)) for phase in range(1, PHASES)]
        return "Scan the events.", f"{clip.background}, {', '.join(facts)}."
    phase = rng.choice((0, PHASES - 1))
    held = clip.scene(phase).items
    facts = [f"{_stamp(phase, rng)} {CELLS[item.cell]} {_terse(item)}" for item in held]
    return f"Scan the {'end' if phase else 'start'}.", f"{clip.background}, {', '.join(facts)}."


def _stamp(phase: int, rng: random.Random) -> str:
    """The word for a phase; the last is the end as well."""
    return rng.choice((STAMPS[phase], END)) if phase == PHASES - 1 else STAMPS[phase]


def _second(phase: int) -> str:
    """When something happens."""
    return f"{CHANGES} {STAMPS[phase]}"


def _terse(item: Item) -> str:
    return f"{item.size} {item.colour} {item.shape}"


def _happened(phase: int, event: Event | None) -> str:
    return f"{_changes(phase, event)} {_terse(event.item)}" if event else f"{_second(phase)} {SAME}"


def _changes(phase: int, event: Event) -> str:
    """What vanishes where, and what appears: the time beside each verb."""
    when = _second(phase)
    match event.source, event.to:
        case None, int(to):
            return f"{when} {APPEARS} {CELLS[to]}"
        case int(source), None:
            return f"{when} {VANISHES} {CELLS[source]}"
        case int(source), int(to):
            away, back = f"{when} {VANISHES} {CELLS[source]}", f"{when} {APPEARS} {CELLS[to]}"
            return f"{when} there is a {MOVE}: at {away} and at {back}"
    raise ValueError(f"nothing happens in {event}")


def _then(phase: int, event: Event | None, rng: random.Random) -> str:
    """A sentence about what happens at the start of a phase."""
    if event is None:
        return f"At {_second(phase)} {rng.choice((f'{SAME} happens', 'all is still'))}."
    item = event.item
    tail = f", {rng.choice(REMARKS[item.colour])}" if rng.random() < 0.35 else ""
    if event.source is not None and event.to is not None:
        tail += f". It {MOVES[item.shape]}"
    return f"At {_changes(phase, event)} a {look(item, rng)}{tail}."


def _opening(clip: Clip, rng: random.Random) -> str:
    ground = an(clip.background)
    return rng.choice(
        (
            f"The video shows a board with {ground} background.",
            f"On {ground} background I can see shapes for eight seconds.",
        )
    )


def _items(clip: Clip, phase: int, rng: random.Random) -> list[str]:
    """Sentences about the items at the start or at the end."""
    when = f"At the {END if phase else STAMPS[0]}"
    told = []
    for item in clip.scene(phase).items:
        place = f"{CELLS[item.cell]} {rng.choice((VERBS[item.shape], 'holds'))}"
        tail = f", {rng.choice(REMARKS[item.colour])}" if rng.random() < 0.3 else ""
        told.append(f"{when} {place} a {look(item, rng)}{tail}.")
    return told


def _events(clip: Clip, rng: random.Random) -> list[str]:
    happened = {event.phase: event for event in clip.events}
    return [_then(phase, happened.get(phase), rng) for phase in range(1, PHASES)]


def _watch(clip: Clip, rng: random.Random) -> str:
    end = rng.choice(("Then the video ends.", "That is all I can see."))
    return " ".join([_opening(clip, rng), *_items(clip, 0, rng), *_events(clip, rng), end])


def _list_events(clip: Clip, rng: random.Random) -> str:
    lines = [f"{n}. {told}" for n, told in enumerate(_events(clip, rng), 1)]
    end = rng.choice(("These are all events.", "Nothing else changes on the board."))
    head = f"This clip has {an(clip.background)} background. I go through it in steps of two seconds."
    return "\n".join([head, *lines, end])


def _start(clip: Clip, rng: random.Random) -> str:
    head = f"The video starts on {an(clip.background)} background."
    return " ".join([head, *_items(clip, 0, rng), "That was the start of the video."])


def _end(clip: Clip, rng: random.Random) -> str:
    head = f"The video ends on {an(clip.background)} background."
    return " ".join([head, *_items(clip, PHASES - 1, rng), "That was the end of the video."])


def _compare(clip: Clip, rng: random.Random) -> str:
    between = rng.choice(("Then things change.", "Now I look at the end."))
    start, end = (_items(clip, phase, rng) for phase in (0, PHASES - 1))
    head = f"I compare two boards, both with {an(clip.background)} background."
    return " ".join([head, *start, between, *end, "That is the whole video."])


_ANSWERS: dict[str, Callable[[Clip, random.Random], str]] = {
    "watch": _watch,
    "events": _list_events,
    "start": _start,
    "end": _end,
    "compare": _compare,
}
