import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdistill.pipelines.demo import chats, wording
from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    SHAPES,
    SIDE_PIXELS,
    SPLITS,
    Item,
    Scene,
    draw,
    random_scene,
    split_of,
)
from vlmdistill.pipelines.demo.scoring import FACTS, claims, score

seeds = st.integers(0, 2**32)
tasks = st.sampled_from(wording.TASKS)


@settings(deadline=None)
@given(seeds)
def test_a_seed_fixes_the_scene_the_picture_and_the_words(seed: int) -> None:
    one, two = random.Random(seed), random.Random(seed)
    scene = random_scene(one)
    assert scene == random_scene(two)
    assert draw(scene).tobytes() == draw(scene).tobytes()
    assert wording.rounds(scene, one) == wording.rounds(scene, two)
    assert chats.chat(one) == chats.chat(two)


@settings(deadline=None)
@given(seeds)
def test_a_scene_is_well_formed(seed: int) -> None:
    scene = random_scene(random.Random(seed))
    assert scene.background in BACKGROUNDS
    assert [item.cell for item in scene.items] == sorted({item.cell for item in scene.items})
    assert len({(item.colour, item.shape) for item in scene.items}) == len(scene.items)
    assert draw(scene).size == (SIDE_PIXELS, SIDE_PIXELS)


def test_every_item_and_background_looks_different() -> None:
    looks = {
        draw(Scene(background, (Item(cell, size, colour, shape),))).tobytes()
        for background in BACKGROUNDS
        for cell in range(len(CELLS))
        for size in ("large", "small")
        for colour in COLOURS
        for shape in SHAPES
    }
    assert len(looks) == len(BACKGROUNDS) * len(CELLS) * 2 * len(COLOURS) * len(SHAPES)


@pytest.mark.parametrize("split", sorted(set(SPLITS)))
def test_a_split_holds_only_its_own_scenes(split: str) -> None:
    rng = random.Random(0)
    assert {split_of(random_scene(rng, split)) for _ in range(50)} == {split}


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="drafter, evaluation, target"):
        random_scene(random.Random(0), "test")


@settings(deadline=None)
@given(seeds, tasks)
def test_a_reference_answer_has_every_fact_right(seed: int, task: str) -> None:
    rng = random.Random(seed)
    scene = random_scene(rng)
    _, answer = wording.ask(scene, task, rng)
    result = score(answer, scene, task)
    assert tuple(result) == FACTS
    assert all(right == total > 0 for right, total in result.values()), (answer, result)


@settings(deadline=None)
@given(seeds)
def test_an_imagined_picture_is_scored_like_a_described_one(seed: int) -> None:
    rng = random.Random(seed)
    scene = random_scene(rng)
    prompt, answer = chats.imagine(scene, rng)
    assert all(right == total for right, total in score(answer, scene).values())
    assert set(claims(prompt)) == {CELLS[item.cell] for item in scene.items}


@settings(deadline=None)
@given(seeds, tasks)
def test_an_answer_about_another_scene_scores_lower(seed: int, task: str) -> None:
    rng = random.Random(seed)
    scene, other = random_scene(rng), random_scene(rng)
    result = score(wording.ask(other, task, rng)[1], scene, task)
    assert scene == other or any(right < total for right, total in result.values())


def test_each_kind_of_mistake_lowers_its_own_kind() -> None:
    scene = Scene("navy", (Item(0, "large", "red", "circle"), Item(8, "small", "blue", "star")))
    text = "On a navy ground I see two shapes. In the northwest is a {}. The {} holds a little blue star."
    good = text.format("big red circle", "southeast")

    def wrong(answer: str) -> dict[str, int]:
        return {kind: total - right for kind, (right, total) in score(answer, scene).items() if right < total}

    assert wrong(good) == {}
    assert wrong(text.format("small red circle", "southeast")) == {"size": 1}
    assert wrong(text.format("big pink circle", "southeast")) == {"colour": 1}
    assert wrong(text.format("big red square", "southeast")) == {"shape": 1}
    assert wrong(good.replace("navy", "black")) == {"background": 1}
    assert wrong(good.replace("two", "three")) == {"count": 1}
    assert wrong(text.format("big red circle", "south")) == {
        "position": 2,
        "colour": 1,
        "shape": 1,
        "size": 1,
    }
    assert wrong(good + " A big pink star is in the west.") == {"position": 1}
    assert wrong(good + " A big pink circle is in the northwest.") == {"colour": 1}
    assert set(wrong("")) == set(FACTS)


def test_answers_vary() -> None:
    scene = random_scene(random.Random(3))
    for task in wording.TASKS:
        assert len({wording.answer(scene, task, random.Random(seed)) for seed in range(20)}) > 10
