"""Clips: eight seconds of a board whose shapes appear, vanish and move.

A clip has four phases of two seconds, and at most one thing happens between two of them. How many visual
tokens it has is set by how often it is sampled: nine a temporal patch of two frames. Rotary time counts
whole seconds (`tokens_per_second` is 1), so a denser sampling shows more frames of the same time and leaves
its extent alone. A strip at the bottom of each cell, coloured by phase, makes the time of a frame readable
from its pixels, as the rulers do for the place of a cell.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    SHAPES,
    SIZES,
    SPLITS,
    Item,
    Scene,
    draw_moment,
    random_scene,
)

SECONDS = 8
PHASES = 4
STAMPS = ("start", "two", "four", "six")
"""The second at which a phase begins, as a word."""
PATCH_TOKENS = len(CELLS)
"""Visual tokens of a temporal patch, which is two frames."""

_PHASE_INKS = ((255, 255, 255), (255, 220, 0), (0, 220, 160), (230, 0, 90))


@dataclass(frozen=True)
class Event:
    """What happens at the start of `phase`: `item` appears (no `source`), vanishes (no `to`) or moves.

    `item` is as it was before, or as it appears; `source` and `to` index `CELLS`.
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
        held = {item.cell: item for item in self.items}
        for event in self.events:
            if event.phase <= phase:
                if event.source is not None:
                    del held[event.source]
                if event.to is not None:
                    held[event.to] = replace(event.item, cell=event.to)
        return Scene(self.background, tuple(held[cell] for cell in sorted(held)))

    def changes(self, phase: int) -> tuple[list[Item], list[Item]]:
        """The items that have just come in a phase, and those that have just gone, where they were."""
        now = [event for event in self.events if event.phase == phase]
        come = [replace(event.item, cell=event.to) for event in now if event.to is not None]
        return come, [event.item for event in now if event.source is not None]

    def moves(self, phase: int) -> bool:
        """Whether what has come in a phase is what has gone."""
        come, gone = self.changes(phase)
        return bool(come and gone)


@dataclass(frozen=True)
class Slides:
    """Four boards that have nothing to do with each other, one a phase, and what comes and goes in each.

    In a clip most of a board stays as it is, so that one may well ignore time; here one cannot. And little
    happens in a clip; here something comes in nearly every phase, and something goes.
    """

    scenes: tuple[Scene, ...]
    come: tuple[Item | None, ...]
    """The item of each phase's board that has just come, if one has."""
    gone: tuple[Item | None, ...]
    """The item that has just gone, if one has, where it was: a cell that is now free."""

    def scene(self, phase: int) -> Scene:
        """The board in a phase, 0 to 3."""
        return self.scenes[phase]

    def changes(self, phase: int) -> tuple[list[Item], list[Item]]:
        """The items that have just come in a phase, and those that have just gone, where they were."""
        come, gone = ([item] if item else [] for item in (self.come[phase], self.gone[phase]))
        return come, gone

    def moves(self, phase: int) -> bool:
        """Never: what comes has nothing to do with what goes."""
        return False


def random_slides(rng: random.Random) -> Slides:
    """Draw four scenes of the split `target`; a change of each kind happens in four phases of five."""
    scenes = tuple(random_scene(rng, "target") for _ in range(PHASES))
    come: list[Item | None] = [None] * PHASES
    gone: list[Item | None] = [None] * PHASES
    for phase in range(1, PHASES):
        items = scenes[phase].items
        if rng.random() < 0.8:
            come[phase] = rng.choice(items)
        if rng.random() < 0.8:
            cell = rng.choice(sorted(set(range(len(CELLS))) - {item.cell for item in items}))
            gone[phase] = Item(cell, rng.choice(SIZES), rng.choice(list(COLOURS)), rng.choice(SHAPES))
    return Slides(scenes, tuple(come), tuple(gone))


def split_of(clip: Clip) -> str:
    """The split a clip belongs to, a stable hash of what it shows, as for scenes."""
    return SPLITS[zlib.crc32(repr(clip).encode()) % len(SPLITS)]


def random_clip(rng: random.Random, split: str | None = None) -> Clip:
    """Draw a clip: three to five items at the start, then one to three events; all choices are uniform.

    With `split`, one of `SPLITS`, clips of the other splits are passed over.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(sorted(set(SPLITS)))}, not {split!r}")
    clip = _any_clip(rng)
    while split is not None and split_of(clip) != split:
        clip = _any_clip(rng)
    return clip


def _any_clip(rng: random.Random) -> Clip:
    looks = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], 8)
    cells = sorted(rng.sample(range(len(CELLS)), rng.randint(3, 5)))
    items = tuple(Item(cell, rng.choice(SIZES), *looks.pop()) for cell in cells)
    clip = Clip(rng.choice(list(BACKGROUNDS)), items, ())
    for phase in sorted(rng.sample(range(1, PHASES), rng.randint(1, 3))):
        held = clip.scene(PHASES - 1).items
        free = sorted(set(range(len(CELLS))) - {item.cell for item in held})
        kind = rng.choice(("appear", "vanish", "move"))
        item, to = rng.choice(held), rng.choice(free)
        match kind:
            case "appear":
                event = Event(phase, Item(to, rng.choice(SIZES), *looks.pop()), None, to)
            case "vanish":
                event = Event(phase, item, item.cell, None)
            case _:
                event = Event(phase, item, item.cell, to)
        clip = replace(clip, events=(*clip.events, event))
    return clip


def phases(frames: int) -> list[int]:
    """The phase of each of `frames` frames, sampled evenly from the start of the clip."""
    return [frame * PHASES // frames for frame in range(frames)]


def frame(clip: Clip | Slides, phase: int) -> Image.Image:
    """What a clip shows throughout a phase, as an 84 x 84 RGB image."""
    come, gone = clip.changes(phase)
    return draw_moment(clip.scene(phase), _PHASE_INKS[phase], come, gone, moved=clip.moves(phase))


def frames(clip: Clip, count: int) -> Sequence[Image.Image]:
    """`count` frames, sampled evenly; those of one phase are one image."""
    drawn = [frame(clip, phase) for phase in range(PHASES)]
    return [drawn[phase] for phase in phases(count)]


def distinct(clip: Clip | Slides, patches: int) -> tuple[list[tuple[Image.Image, Image.Image]], list[int]]:
    """The distinct temporal patches of a clip sampled `patches` times, and which of them each one is."""
    at = phases(2 * patches)
    pairs = list(zip(at[::2], at[1::2], strict=True))
    drawn = [frame(clip, phase) for phase in range(PHASES)]
    kinds = {pair: nth for nth, pair in enumerate(dict.fromkeys(pairs))}
    return [(drawn[one], drawn[two]) for one, two in kinds], [kinds[pair] for pair in pairs]


def patches_for(tokens: int) -> int:
    """Temporal patches that come closest to `tokens` visual tokens, whole phases each: at least four."""
    return PHASES * max(round(tokens / (PATCH_TOKENS * PHASES)), 1)
