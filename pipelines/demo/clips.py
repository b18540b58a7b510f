"""Clips: eight seconds of a board whose shapes appear, vanish and move.

A clip has four phases of two seconds, with at most one event between two phases. The
sampling rate determines the number of visual tokens: nine per temporal patch of two frames.
Rotary time counts whole seconds (`tokens_per_second` is 1), so a higher rate does not
change the range of rotary positions. A strip at the bottom of each cell, colored by phase,
makes the time of a frame visible in its pixels, as the rulers do for the position of a
cell.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    LOOKS,
    SIZES,
    Item,
    Scene,
    draw,
    first_in,
)

SECONDS = 8
PHASES = 4
STAMPS = ("start", "two", "four", "six")  # the second at which a phase begins
PATCH_TOKENS = len(CELLS)  # visual tokens of a temporal patch, which is two frames
# The color of the strip in each phase.
PHASE_INKS = ((255, 255, 255), (255, 220, 0), (0, 220, 160), (230, 0, 90))


@dataclass(frozen=True)
class Event:
    """An event at the start of `phase`: `item` appears (no `source`), vanishes (no `to`) or moves.

    `item` is in its state before the event, or as it appears; `source` and `to` index `CELLS`.
    """

    phase: int
    item: Item
    source: int | None
    to: int | None


@dataclass(frozen=True)
class Clip:
    """A background, the items at the start in reading order, and one to three events in order."""

    background: str
    items: tuple[Item, ...]
    events: tuple[Event, ...]

    def scene(self, phase: int) -> Scene:
        """The board in a phase, 0 to 3."""
        item_in = {item.cell: item for item in self.items}
        for event in self.events:
            if event.phase > phase:
                continue
            if event.source is not None:
                del item_in[event.source]
            if event.to is not None:
                item_in[event.to] = replace(event.item, cell=event.to)
        items = tuple(item_in[cell] for cell in sorted(item_in))
        return Scene(self.background, items)

    def changes(self, phase: int) -> tuple[list[Item], list[Item]]:
        """The items that appear at the start of a phase, and the vanishing ones in their old cells."""
        come: list[Item] = []
        gone: list[Item] = []
        for event in self.events:
            if event.phase != phase:
                continue
            if event.to is not None:
                come.append(replace(event.item, cell=event.to))
            if event.source is not None:
                gone.append(event.item)
        return come, gone

    def moves(self, phase: int) -> bool:
        """Whether the event of a phase is a move."""
        return all(self.changes(phase))


def random_clip(rng: random.Random, split: str | None = None) -> Clip:
    """Draw a clip, see `scenes.first_in`: three to five items at the start, then one to three events.

    All choices are uniform.
    """
    return first_in(split, lambda: _any_clip(rng))


def _any_clip(rng: random.Random) -> Clip:
    looks = rng.sample(LOOKS, 8)
    count = rng.randint(3, 5)
    cells = sorted(rng.sample(range(len(CELLS)), count))
    items = tuple(Item(cell, rng.choice(SIZES), *looks.pop()) for cell in cells)
    clip = Clip(rng.choice(list(BACKGROUNDS)), items, ())
    events = rng.randint(1, 3)
    for phase in sorted(rng.sample(range(1, PHASES), events)):
        present = clip.scene(PHASES - 1).items
        taken = {item.cell for item in present}
        free = [cell for cell in range(len(CELLS)) if cell not in taken]
        kind = rng.choice(("appear", "vanish", "move"))
        item = rng.choice(present)
        to = rng.choice(free)
        if kind == "appear":
            new_item = Item(to, rng.choice(SIZES), *looks.pop())
            event = Event(phase, new_item, None, to)
        elif kind == "move":
            event = Event(phase, item, item.cell, to)
        else:
            event = Event(phase, item, item.cell, None)
        clip = replace(clip, events=(*clip.events, event))
    return clip


def phases(frames: int) -> list[int]:
    """The phase of each of `frames` frames, sampled evenly from the start of the clip."""
    return [frame * PHASES // frames for frame in range(frames)]


def frame(clip: Clip, phase: int) -> Image.Image:
    """The frame of a phase, as an 84 x 84 RGB image."""
    come, gone = clip.changes(phase)
    scene = clip.scene(phase)
    return draw(scene, PHASE_INKS[phase], come, gone, moved=clip.moves(phase))


def frames(clip: Clip, count: int) -> Sequence[Image.Image]:
    """`count` frames, sampled evenly; all frames of a phase are the same image."""
    drawn = [frame(clip, phase) for phase in range(PHASES)]
    return [drawn[phase] for phase in phases(count)]


def patches_for(tokens: int) -> int:
    """The number of temporal patches closest to `tokens` visual tokens, a multiple of the phases."""
    per_phase = round(tokens / (PATCH_TOKENS * PHASES))
    return PHASES * max(per_phase, 1)
