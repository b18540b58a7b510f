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

seeds = st.integers(0, 2**32)


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
def test_a_split_has_only_its_own_scenes(split: str) -> None:
    rng = random.Random(0)
    assert {split_of(random_scene(rng, split)) for _ in range(50)} == {split}


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="drafter, evaluation, target"):
        random_scene(random.Random(0), "test")


def test_responses_vary() -> None:
    scene = random_scene(random.Random(3))
    for task in wording.TASKS:
        assert len({wording.response(scene, task, random.Random(seed)) for seed in range(20)}) > 10
