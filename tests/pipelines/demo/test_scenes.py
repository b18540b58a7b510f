import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdistill.pipelines.demo import chats, narration, wording
from vlmdistill.pipelines.demo.clips import random_clip
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
    assert [item.cell for item in scene.items] == sorted(
        {item.cell for item in scene.items}
    )
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


@pytest.mark.parametrize("random_one", [random_scene, random_clip])
def test_a_split_has_only_its_own(random_one: Callable[..., Any]) -> None:
    rng = random.Random(0)
    for split in sorted(set(SPLITS)):
        assert {split_of(random_one(rng, split)) for _ in range(50)} == {split}
    with pytest.raises(ValueError, match="drafter, evaluation, target"):
        random_one(rng, "test")


@pytest.mark.parametrize(
    ("random_one", "words"), [(random_scene, wording), (random_clip, narration)]
)
def test_responses_vary(random_one: Callable[..., Any], words: Any) -> None:
    shown = random_one(random.Random(3))
    for task in words.TASKS:
        assert (
            len(
                {words.response(shown, task, random.Random(seed)) for seed in range(20)}
            )
            > 10
        )
