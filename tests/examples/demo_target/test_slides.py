import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo_target import probes
from examples.demo_target.slides import Slides, distinct, frame, random_slides
from examples.demo_target.wiring import cell_words
from tests.pipelines.demo.test_clips import CLIP
from vlmdistill.pipelines.demo.clips import PHASES, frames, phases, random_clip
from vlmdistill.pipelines.demo.narration import MOVE
from vlmdistill.pipelines.demo.scenes import CELL_PIXELS, Scene

seeds = st.integers(0, 2**32)


@settings(deadline=None)
@given(seeds)
def test_a_seed_fixes_the_slides_and_the_probes(seed: int) -> None:
    one, two = random.Random(seed), random.Random(seed)
    clip, shown = random_clip(one), random_slides(one)
    assert (clip, shown) == (random_clip(two), random_slides(two))
    assert probes.clip_items_or_events(clip, one) == probes.clip_items_or_events(
        clip, two
    )
    assert probes.slide_facts(shown, one) == probes.slide_facts(shown, two)
    assert probes.slide_changes(shown, one) == probes.slide_changes(shown, two)


def test_both_cells_of_a_move_are_marked() -> None:
    held = CLIP.scene(1).items
    come, gone = CLIP.changes(1)
    kinds = [
        frame(
            Slides(
                (Scene("navy", held),) * PHASES,
                (None, came, None, None),
                (None, went, None, None),
            ),
            1,
        )
        for came, went in ((come[0], None), (None, gone[0]))
    ]
    moved = frame(CLIP, 1)
    for kind, cell in zip(kinds, (1, 8), strict=True):
        row, column = divmod(cell, 3)
        x, y = CELL_PIXELS * column, CELL_PIXELS * row
        box = (x, y, x + CELL_PIXELS, y + CELL_PIXELS)
        assert moved.crop(box).tobytes() != kind.crop(box).tobytes()
    assert {
        cell for cell, words in enumerate(cell_words(CLIP, 1)) if MOVE in words
    } == {1, 8}
    assert not any(
        MOVE in words for phase in (0, 2, 3) for words in cell_words(CLIP, phase)
    )


@pytest.mark.parametrize("count", [4, 7, 16, 300])
def test_sampled_patches_cover_all_phases_in_order_without_duplicates(
    count: int,
) -> None:
    assert set(phases(2 * count)) == set(range(PHASES))
    assert phases(2 * count) == sorted(phases(2 * count))
    pairs, which = distinct(CLIP, count)
    shown = [image for place in which for image in pairs[place]]
    assert [a.tobytes() for a in shown] == [
        b.tobytes() for b in frames(CLIP, 2 * count)
    ]
    assert len(pairs) <= 2 * PHASES - 1


def test_training_slides_have_every_kind_of_change() -> None:
    rng = random.Random(0)
    slides = [random_slides(rng) for _ in range(50)]
    for one in slides:
        assert one.changes(0) == ([], [])
        for phase in range(1, PHASES):
            come, gone = one.changes(phase)
            assert set(come) <= set(one.scene(phase).items)
            assert not {item.cell for item in gone} & {
                item.cell for item in one.scene(phase).items
            }
            still = Slides(one.scenes, (None,) * PHASES, (None,) * PHASES)
            changed = frame(one, phase).tobytes() != frame(still, phase).tobytes()
            assert changed == bool(come or gone)
    kinds = {
        tuple(map(len, one.changes(phase)))
        for one in slides
        for phase in range(1, PHASES)
    }
    assert kinds == {(0, 0), (0, 1), (1, 0), (1, 1)}
