"""Slides: synthetic videos from which the target learns time, and the frames of slides and clips."""

import random
from dataclasses import dataclass

from PIL import Image

from vlmdistill.pipelines.demo import clips
from vlmdistill.pipelines.demo.clips import PHASE_INKS, PHASES, Clip, phases
from vlmdistill.pipelines.demo.scenes import (
    CELLS,
    COLOURS,
    SHAPES,
    SIZES,
    Item,
    Scene,
    draw,
    random_scene,
)


@dataclass(frozen=True)
class Slides:
    """Four unrelated boards, one per phase, with items that appear and vanish in each.

    In a clip, most of the board never changes, so a model can ignore time; here it cannot. Few events happen
    in a clip; here, items appear and vanish in nearly every phase.
    """

    scenes: tuple[Scene, ...]
    come: tuple[Item | None, ...]
    """The item that has just appeared in each phase, if any."""
    gone: tuple[Item | None, ...]
    """The item that has just vanished in each phase, if any; its cell is now free."""

    def scene(self, phase: int) -> Scene:
        """The board in a phase, 0 to 3."""
        return self.scenes[phase]

    def changes(self, phase: int) -> tuple[list[Item], list[Item]]:
        """The items that appear at the start of a phase, and those that vanish, in their old cells."""
        come, gone = (
            [item] if item else [] for item in (self.come[phase], self.gone[phase])
        )
        return come, gone

    def moves(self, phase: int) -> bool:
        """Always False: slides have no moves."""
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
            cell = rng.choice(
                sorted(set(range(len(CELLS))) - {item.cell for item in items})
            )
            gone[phase] = Item(
                cell, rng.choice(SIZES), rng.choice(list(COLOURS)), rng.choice(SHAPES)
            )
    return Slides(scenes, tuple(come), tuple(gone))


def frame(shown: Clip | Slides, phase: int) -> Image.Image:
    """The frame of a phase of a clip or of slides, as an 84 x 84 RGB image."""
    if isinstance(shown, Clip):
        return clips.frame(shown, phase)
    come, gone = shown.changes(phase)
    return draw(shown.scene(phase), PHASE_INKS[phase], come, gone)


def distinct(
    clip: Clip | Slides, patches: int
) -> tuple[list[tuple[Image.Image, Image.Image]], list[int]]:
    """The distinct temporal patches of a clip sampled `patches` times, and which of them each one is."""
    at = phases(2 * patches)
    pairs = list(zip(at[::2], at[1::2], strict=True))
    drawn = [frame(clip, phase) for phase in range(PHASES)]
    kinds = {pair: nth for nth, pair in enumerate(dict.fromkeys(pairs))}
    return [(drawn[one], drawn[two]) for one, two in kinds], [
        kinds[pair] for pair in pairs
    ]
