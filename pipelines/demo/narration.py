"""Questions about a clip, and reference responses.

As in `wording`, some choices follow from the video (the verb of a move from the shape) and
the others are drawn from `rng`. The order is time, kind, cell, item, with the first three
adjacent: the two preceding words then determine what to look up (`wiring.py` of
`examples/demo_target`). A move is a shape that vanishes in one cell and appears in another.
Every response names the background, in words that depend on the question.
"""

import random
from collections.abc import Callable
from functools import partial

from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip, Event
from vlmdistill.pipelines.demo.scenes import CELLS
from vlmdistill.pipelines.demo.wording import (
    VERBS,
    WORDS,
    an,
    look,
    remark_on,
    with_suffix,
)

CHANGES, APPEARS, VANISHES, SAME = "second", "appears", "vanishes", "nothing"
"""Of cells in which something appears or vanishes: "second" because one then says "at second two"."""
END = "end"
MOVE = "move"
"""The kind of both cells of a move: without it, a model that attends to one of the two misses the other."""
TASKS = tuple(WORDS.clip_prompts)  # the kinds of questions


def ask(clip: Clip, task: str, rng: random.Random) -> tuple[str, str]:
    """A question of the kind `task` about the clip and a reference response."""
    question = with_suffix(rng.choice(WORDS.clip_prompts[task]), rng)
    return question, response(clip, task, rng)


def response(clip: Clip, task: str, rng: random.Random) -> str:
    """A reference response."""
    return _RESPONSES[task](clip, rng)


def rounds(clip: Clip, rng: random.Random) -> list[tuple[str, str]]:
    """A conversation about the clip: one or two rounds of different tasks."""
    count = 2 if rng.random() < 0.15 else 1
    return [ask(clip, task, rng) for task in rng.sample(TASKS, count)]


def second(phase: int) -> str:
    """The time of an event in words."""
    return f"{CHANGES} {STAMPS[phase]}"


def changes(phase: int, event: Event) -> str:
    """The event in words: the time before each verb."""
    when = second(phase)
    match event.source, event.to:
        case None, int(to):
            return f"{when} {APPEARS} {CELLS[to]}"
        case int(source), None:
            return f"{when} {VANISHES} {CELLS[source]}"
        case int(source), int(to):
            vanishes = f"{when} {VANISHES} {CELLS[source]}"
            appears = f"{when} {APPEARS} {CELLS[to]}"
            return f"{when} there is a {MOVE}: at {vanishes} and at {appears}"
    raise ValueError(f"{event} has neither source nor target")


def _then(phase: int, event: Event | None, rng: random.Random) -> str:
    """A sentence about the start of a phase."""
    if event is None:
        stillness = rng.choice((f"{SAME} happens", "all is still"))
        return f"At {second(phase)} {stillness}."
    item = event.item
    tail = remark_on(item, rng, rate=0.35)
    if event.source is not None and event.to is not None:
        tail += f". It {WORDS.moves[item.shape]}"
    phrase = look(item, rng)
    return f"At {changes(phase, event)} a {phrase}{tail}."


def _opening(clip: Clip, rng: random.Random) -> str:
    opening = rng.choice(
        (
            "The video shows a board with {background} background.",
            "On {background} background I can see shapes for eight seconds.",
        )
    )
    return opening.format(background=an(clip.background))


def _items(clip: Clip, phase: int, rng: random.Random) -> list[str]:
    """Sentences about the items at the start or at the end."""
    when = f"At the {END if phase else STAMPS[0]}"
    sentences = []
    for item in clip.scene(phase).items:
        cell = CELLS[item.cell]
        verb = rng.choice((VERBS[item.shape], "holds"))
        tail = remark_on(item, rng, rate=0.3)
        phrase = look(item, rng)
        sentences.append(f"{when} {cell} {verb} a {phrase}{tail}.")
    return sentences


def _events(clip: Clip, rng: random.Random) -> list[str]:
    """Sentences about the starts of the phases after the first."""
    event_at = {event.phase: event for event in clip.events}
    return [_then(phase, event_at.get(phase), rng) for phase in range(1, PHASES)]


def _watch(clip: Clip, rng: random.Random) -> str:
    end = rng.choice(("Then the video ends.", "That is all I can see."))
    opening = _opening(clip, rng)
    items = _items(clip, 0, rng)
    events = _events(clip, rng)
    return " ".join([opening, *items, *events, end])


def _list_events(clip: Clip, rng: random.Random) -> str:
    events = _events(clip, rng)
    lines = [f"{number}. {event}" for number, event in enumerate(events, 1)]
    end = rng.choice(("These are all events.", "Nothing else changes on the board."))
    head = (
        f"This clip has {an(clip.background)} background. "
        "I go through it in steps of two seconds."
    )
    return "\n".join([head, *lines, end])


def _board(clip: Clip, rng: random.Random, phase: int, name: str) -> str:
    background = an(clip.background)
    head = f"The video {name}s on {background} background."
    items = _items(clip, phase, rng)
    end = f"That was the {name} of the video."
    return " ".join([head, *items, end])


def _compare(clip: Clip, rng: random.Random) -> str:
    between = rng.choice(("Then things change.", "Now I look at the end."))
    start = _items(clip, 0, rng)
    end = _items(clip, PHASES - 1, rng)
    head = f"I compare two boards, both with {an(clip.background)} background."
    return " ".join([head, *start, between, *end, "That is the whole video."])


Response = Callable[[Clip, random.Random], str]

_start: Response = partial(_board, phase=0, name="start")
_end: Response = partial(_board, phase=PHASES - 1, name="end")
_RESPONSES: dict[str, Response] = {
    "watch": _watch,
    "events": _list_events,
    "start": _start,
    "end": _end,
    "compare": _compare,
}
