"""Probes: short questions and responses that the target is trained on before conversations."""

import random

from examples.demo_target.slides import Slides
from vlmdistill.pipelines.demo.chats import in_words
from vlmdistill.pipelines.demo.clips import PHASES, STAMPS, Clip, Event
from vlmdistill.pipelines.demo.narration import (
    APPEARS,
    END,
    SAME,
    VANISHES,
    changes,
    second,
)
from vlmdistill.pipelines.demo.scenes import CELLS, Item, Scene
from vlmdistill.pipelines.demo.wording import NUMBERS


def scene_facts(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """Short questions for the first stage of training: one fact of each of the nine cells."""
    pairs = []
    for kind in rng.sample(("size", "colour", "shape"), 3):
        held = {item.cell: getattr(item, kind) for item in scene.items}
        cells = rng.sample(range(len(CELLS)), len(CELLS))
        facts = " ".join(f"{CELLS[cell]} {held.get(cell, 'empty')}" for cell in cells)
        pairs.append((f"Scan the {kind}s.", f"{facts}."))
    return pairs


def scene_items(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A short question for the second stage: whole items, of all cells in any order or of shapes in order."""
    held = {
        item.cell: f"{item.size} {item.colour} {item.shape}" for item in scene.items
    }
    if rng.random() < 0.5:
        facts = ", ".join(f"{CELLS[cell]} {known}" for cell, known in held.items())
        return (
            "Scan the image.",
            f"{scene.background} {NUMBERS[len(held)]} shapes, {facts}.",
        )
    cells = rng.sample(range(len(CELLS)), len(CELLS))
    facts = ", ".join(f"{CELLS[cell]} {held.get(cell, 'empty')}" for cell in cells)
    return "Scan the cells.", f"{facts}."


def described_items(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A probe of the second stage about a picture that the question describes."""
    question, reply = scene_items(scene, rng)
    return f"{question} It is {in_words(scene)}.", reply


def slide_facts(slides: Slides, rng: random.Random) -> list[tuple[str, str]]:
    """Short questions for the first stage: nine times one fact of a cell in a phase."""
    pairs = []
    for kind in rng.sample(("size", "colour", "shape"), 3):
        facts = []
        for cell in rng.sample(range(len(CELLS)), len(CELLS)):
            phase = rng.randrange(PHASES)
            held = {
                item.cell: getattr(item, kind) for item in slides.scene(phase).items
            }
            facts.append(f"{STAMPS[phase]} {CELLS[cell]} {held.get(cell, 'empty')}")
        pairs.append((f"Scan the {kind}s.", f"{', '.join(facts)}."))
    return pairs


def slide_changes(slides: Slides, rng: random.Random) -> tuple[str, str]:
    """The inverse: a phase and a kind of change in any order, then the cell and its item."""
    kinds = (APPEARS, slides.come), (VANISHES, slides.gone)
    asked = [
        (phase, verb, items[phase])
        for phase in range(1, PHASES)
        for verb, items in kinds
    ]
    facts = [
        f"{second(phase)} {verb} {f'{CELLS[item.cell]} {_terse(item)}' if item else SAME}"
        for phase, verb, item in rng.sample(asked, len(asked))
    ]
    return "Scan the changes.", f"{', '.join(facts)}."


def clip_items_or_events(clip: Clip, rng: random.Random) -> tuple[str, str]:
    """A short question for the second stage: the events by phase, or the items of a phase."""
    if rng.random() < 0.5:
        happened = {event.phase: event for event in clip.events}
        facts = [_happened(phase, happened.get(phase)) for phase in range(1, PHASES)]
        return "Scan the events.", f"{clip.background}, {', '.join(facts)}."
    phase = rng.choice((0, PHASES - 1))
    held = clip.scene(phase).items
    facts = [f"{_stamp(phase, rng)} {CELLS[item.cell]} {_terse(item)}" for item in held]
    return (
        f"Scan the {'end' if phase else 'start'}.",
        f"{clip.background}, {', '.join(facts)}.",
    )


def _stamp(phase: int, rng: random.Random) -> str:
    """The word for a phase; the last is the end as well."""
    return rng.choice((STAMPS[phase], END)) if phase == PHASES - 1 else STAMPS[phase]


def _terse(item: Item) -> str:
    return f"{item.size} {item.colour} {item.shape}"


def _happened(phase: int, event: Event | None) -> str:
    return (
        f"{changes(phase, event)} {_terse(event.item)}"
        if event
        else f"{second(phase)} {SAME}"
    )
