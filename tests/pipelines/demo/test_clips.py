import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdistill.pipelines.demo import narration
from vlmdistill.pipelines.demo.clips import (
    PHASES,
    Clip,
    Event,
    Slides,
    distinct,
    frame,
    frames,
    patches_for,
    phases,
    random_clip,
    random_slides,
    split_of,
)
from vlmdistill.pipelines.demo.scenes import CELL_PIXELS, CELLS, SIDE_PIXELS, SPLITS, Item, Scene
from vlmdistill.pipelines.demo.scoring import CLIP_FACTS, happenings, score_clip
from vlmdistill.pipelines.demo.wiring import MOVE, cell_words

seeds = st.integers(0, 2**32)
tasks = st.sampled_from(narration.TASKS)

STAR, CIRCLE = Item(8, "small", "blue", "star"), Item(0, "large", "red", "circle")
CLIP = Clip("navy", (CIRCLE, STAR), (Event(1, STAR, 8, 1), Event(3, CIRCLE, 0, None)))
TOLD = (
    "This clip has a navy background. At the start northwest floats a big red circle. "
    "At the start southeast holds a little blue star. "
    "At second two there is a move: at second two vanishes southeast and at second two appears north a small "
    "blue star. It flies. "
    "At second four nothing happens. At second six vanishes northwest a large red circle."
)


@settings(deadline=None)
@given(seeds)
def test_a_seed_fixes_the_clip_the_frames_and_the_words(seed: int) -> None:
    one, two = random.Random(seed), random.Random(seed)
    clip = random_clip(one)
    assert clip == random_clip(two)
    assert [a.tobytes() for a in frames(clip, 8)] == [b.tobytes() for b in frames(clip, 8)]
    assert narration.rounds(clip, one) == narration.rounds(clip, two)
    assert narration.scan_probe(clip, one) == narration.scan_probe(clip, two)
    shown = random_slides(one)
    assert shown == random_slides(two)
    assert narration.look_probes(shown, one) == narration.look_probes(shown, two)
    assert narration.find_probe(shown, one) == narration.find_probe(shown, two)


@settings(deadline=None)
@given(seeds)
def test_a_clip_is_well_formed(seed: int) -> None:
    clip = random_clip(random.Random(seed))
    assert 1 <= len(clip.events) <= PHASES - 1
    assert [event.phase for event in clip.events] == sorted({event.phase for event in clip.events})
    for phase in range(PHASES):
        items = clip.scene(phase).items
        assert [item.cell for item in items] == sorted({item.cell for item in items})
        assert len({(item.colour, item.shape) for item in items}) == len(items)
        assert frame(clip, phase).size == (SIDE_PIXELS, SIDE_PIXELS)
    changes = {event.phase for event in clip.events}
    assert {phase for phase in range(1, PHASES) if clip.scene(phase) != clip.scene(phase - 1)} == changes


def test_what_changes_is_told_by_the_frames_of_its_phase_alone() -> None:
    assert [CLIP.changes(phase) for phase in range(PHASES)] == [
        ([], []),
        ([Item(1, "small", "blue", "star")], [STAR]),
        ([], []),
        ([], [CIRCLE]),
    ]
    still = Clip("navy", CLIP.scene(1).items, ())
    assert frame(CLIP, 1).tobytes() != frame(still, 1).tobytes()
    assert frame(CLIP, 2).tobytes() == frame(still, 2).tobytes()


def test_each_cell_of_a_move_tells_that_it_is_one() -> None:
    held = CLIP.scene(1).items
    come, gone = CLIP.changes(1)
    kinds = [
        frame(Slides((Scene("navy", held),) * PHASES, (None, came, None, None), (None, went, None, None)), 1)
        for came, went in ((come[0], None), (None, gone[0]))
    ]
    moved = frame(CLIP, 1)
    for kind, cell in zip(kinds, (1, 8), strict=True):
        row, column = divmod(cell, 3)
        x, y = CELL_PIXELS * column, CELL_PIXELS * row
        box = (x, y, x + CELL_PIXELS, y + CELL_PIXELS)
        assert moved.crop(box).tobytes() != kind.crop(box).tobytes()
    assert {cell for cell, words in enumerate(cell_words(CLIP, 1)) if MOVE in words} == {1, 8}
    assert not any(MOVE in words for phase in (0, 2, 3) for words in cell_words(CLIP, phase))


def test_the_phase_can_be_seen_in_every_frame() -> None:
    still = Clip("black", (CIRCLE,), ())
    assert len({frame(still, phase).tobytes() for phase in range(PHASES)}) == PHASES


@pytest.mark.parametrize("split", sorted(set(SPLITS)))
def test_a_split_holds_only_its_own_clips(split: str) -> None:
    rng = random.Random(0)
    assert {split_of(random_clip(rng, split)) for _ in range(50)} == {split}


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="drafter, evaluation, target"):
        random_clip(random.Random(0), "test")


@pytest.mark.parametrize("count", [4, 7, 16, 300])
def test_a_sampling_shows_all_phases_in_order_and_draws_each_patch_once(count: int) -> None:
    assert set(phases(2 * count)) == set(range(PHASES))
    assert phases(2 * count) == sorted(phases(2 * count))
    pairs, which = distinct(CLIP, count)
    shown = [image for place in which for image in pairs[place]]
    assert [a.tobytes() for a in shown] == [b.tobytes() for b in frames(CLIP, 2 * count)]
    assert len(pairs) <= 2 * PHASES - 1


@pytest.mark.parametrize(("tokens", "patches"), [(1, 4), (500, 56), (1500, 168), (25000, 2776)])
def test_a_length_is_met_in_whole_phases(tokens: int, patches: int) -> None:
    assert patches_for(tokens) == patches


@settings(deadline=None)
@given(seeds, tasks)
def test_a_reference_answer_has_every_fact_right(seed: int, task: str) -> None:
    rng = random.Random(seed)
    clip = random_clip(rng)
    _, answer = narration.ask(clip, task, rng)
    result = score_clip(answer, clip, task)
    assert tuple(result) == CLIP_FACTS
    assert all(right == total for right, total in result.values()), (answer, result)
    assert result["background"] == (1, 1)  # at the least: a clip may end on an empty board


@settings(deadline=None)
@given(seeds, tasks)
def test_an_answer_about_another_clip_scores_lower(seed: int, task: str) -> None:
    rng = random.Random(seed)
    clip, other = random_clip(rng), random_clip(rng)
    result = score_clip(narration.answer(other, task, rng), clip, task)
    assert any(right < total for right, total in result.values())


def test_each_kind_of_mistake_lowers_its_own_kind() -> None:
    def wrong(told: str, task: str = "watch") -> dict[str, int]:
        result = score_clip(told, CLIP, task)
        return {kind: total - right for kind, (right, total) in result.items() if right < total}

    assert wrong(TOLD) == {}
    assert wrong(TOLD.replace("six vanishes", "six appears")) == {"event": 1}
    assert wrong(TOLD.replace("nothing happens", "appears")) == {"event": 1, "path": 1, "item": 1}
    assert wrong(TOLD.replace("appears north a", "appears south a")) == {"path": 1}
    assert wrong(TOLD.replace("north a small", "north a big")) == {"item": 1}
    assert wrong(TOLD.replace("northwest floats a big", "northwest floats a small")) == {"size": 1}
    assert wrong(TOLD.replace("navy", "black")) == {"background": 1}
    late = dict.fromkeys(("event", "path", "item"), 1)
    assert wrong(TOLD[: TOLD.index("At second six")]) == late
    assert wrong(TOLD.replace("four", "six")) == {**late, "event": 2}
    assert set(wrong("")) == set(CLIP_FACTS)


def test_what_happens_is_told_by_time() -> None:
    one, two = (
        f"At second {when} appears {cell} a big red star."
        for when, cell in (("two", "north"), ("six", "south"))
    )
    told = happenings(f"{two} {one}")
    assert told == happenings(f"{one} {two}")
    assert told == {
        when: [("appears", (cell,), ("large", "red", "star"))]
        for when, cell in (("two", "north"), ("six", "south"))
    }


def test_the_slides_of_training_change_in_every_way_and_show_it() -> None:
    rng = random.Random(0)
    slides = [random_slides(rng) for _ in range(50)]
    for one in slides:
        assert one.changes(0) == ([], [])
        for phase in range(1, PHASES):
            come, gone = one.changes(phase)
            assert set(come) <= set(one.scene(phase).items)
            assert not {item.cell for item in gone} & {item.cell for item in one.scene(phase).items}
            still = Slides(one.scenes, (None,) * PHASES, (None,) * PHASES)
            changed = frame(one, phase).tobytes() != frame(still, phase).tobytes()
            assert changed == bool(come or gone)
    kinds = {tuple(map(len, one.changes(phase))) for one in slides for phase in range(1, PHASES)}
    assert kinds == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_is_said_of_the_start_does_not_count_for_the_end() -> None:
    start = "At the {} in the northwest is a big red circle. At the {} in the southeast is a small blue star."
    end = "At the {} in the north is a small blue star."
    told = f"{start.format('start', 'start')} {end.format('end')}"
    assert score_clip(told, CLIP, "compare")["position"] == (3, 3)
    told = f"{start.format('end', 'end')} {end.format('start')}"
    assert score_clip(told, CLIP, "compare")["position"] == (0, 6)


def test_answers_vary() -> None:
    clip = random_clip(random.Random(3))
    for task in narration.TASKS:
        assert len({narration.answer(clip, task, random.Random(seed)) for seed in range(20)}) > 10


def test_every_cell_can_change() -> None:
    rng = random.Random(0)
    cells = {
        cell for _ in range(100) for event in random_clip(rng).events for cell in (event.source, event.to)
    }
    assert cells == {None, *range(len(CELLS))}
