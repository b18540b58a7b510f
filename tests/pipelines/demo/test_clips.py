import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdistill.pipelines.demo import narration
from vlmdistill.pipelines.demo.clips import (
    PHASES,
    Clip,
    Event,
    frame,
    frames,
    patches_for,
    random_clip,
)
from vlmdistill.pipelines.demo.scenes import CELLS, SIDE_PIXELS, Item

seeds = st.integers(0, 2**32)

STAR, CIRCLE = Item(8, "small", "blue", "star"), Item(0, "large", "red", "circle")
CLIP = Clip("navy", (CIRCLE, STAR), (Event(1, STAR, 8, 1), Event(3, CIRCLE, 0, None)))


@settings(deadline=None)
@given(seeds)
def test_a_seed_fixes_the_clip_the_frames_and_the_words(seed: int) -> None:
    one, two = random.Random(seed), random.Random(seed)
    clip = random_clip(one)
    assert clip == random_clip(two)
    assert [a.tobytes() for a in frames(clip, 8)] == [
        b.tobytes() for b in frames(clip, 8)
    ]
    assert narration.rounds(clip, one) == narration.rounds(clip, two)


@settings(deadline=None)
@given(seeds)
def test_a_clip_is_well_formed(seed: int) -> None:
    clip = random_clip(random.Random(seed))
    assert 1 <= len(clip.events) <= PHASES - 1
    assert [event.phase for event in clip.events] == sorted(
        {event.phase for event in clip.events}
    )
    for phase in range(PHASES):
        items = clip.scene(phase).items
        assert [item.cell for item in items] == sorted({item.cell for item in items})
        assert len({(item.colour, item.shape) for item in items}) == len(items)
        assert frame(clip, phase).size == (SIDE_PIXELS, SIDE_PIXELS)
    changes = {event.phase for event in clip.events}
    assert {
        phase
        for phase in range(1, PHASES)
        if clip.scene(phase) != clip.scene(phase - 1)
    } == changes


def test_only_the_frames_of_its_phase_show_a_change() -> None:
    assert [CLIP.changes(phase) for phase in range(PHASES)] == [
        ([], []),
        ([Item(1, "small", "blue", "star")], [STAR]),
        ([], []),
        ([], [CIRCLE]),
    ]
    still = Clip("navy", CLIP.scene(1).items, ())
    assert frame(CLIP, 1).tobytes() != frame(still, 1).tobytes()
    assert frame(CLIP, 2).tobytes() == frame(still, 2).tobytes()


def test_every_frame_shows_its_phase() -> None:
    still = Clip("black", (CIRCLE,), ())
    assert len({frame(still, phase).tobytes() for phase in range(PHASES)}) == PHASES


@pytest.mark.parametrize(
    ("tokens", "patches"), [(1, 4), (500, 56), (1500, 168), (25000, 2776)]
)
def test_a_length_is_met_in_whole_phases(tokens: int, patches: int) -> None:
    assert patches_for(tokens) == patches


def test_every_cell_can_change() -> None:
    rng = random.Random(0)
    cells = {
        cell
        for _ in range(100)
        for event in random_clip(rng).events
        for cell in (event.source, event.to)
    }
    assert cells == {None, *range(len(CELLS))}
