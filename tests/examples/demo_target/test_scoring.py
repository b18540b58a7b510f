import random

from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo_target.scoring import (
    CLIP_FACTS,
    FACTS,
    claims,
    happenings,
    score,
    score_clip,
)
from tests.pipelines.demo.test_clips import CLIP
from vlmdistill.pipelines.demo import chats, narration, wording
from vlmdistill.pipelines.demo.clips import random_clip
from vlmdistill.pipelines.demo.scenes import CELLS, Item, Scene, random_scene

seeds = st.integers(0, 2**32)

TEXT = (
    "This clip has a navy background. At the start northwest floats a big red circle. "
    "At the start southeast holds a little blue star. "
    "At second two there is a move: at second two vanishes southeast and at second two appears north a small "
    "blue star. It flies. "
    "At second four nothing happens. At second six vanishes northwest a large red circle."
)


@settings(deadline=None)
@given(seeds, st.sampled_from(wording.TASKS))
def test_a_reference_response_about_a_scene_scores_full(seed: int, task: str) -> None:
    rng = random.Random(seed)
    scene = random_scene(rng)
    _, response = wording.ask(scene, task, rng)
    result = score(response, scene, task)
    assert tuple(result) == FACTS
    assert all(right == total > 0 for right, total in result.values()), (
        response,
        result,
    )


@settings(deadline=None)
@given(seeds)
def test_an_imagined_picture_is_scored_like_a_described_one(seed: int) -> None:
    rng = random.Random(seed)
    scene = random_scene(rng)
    prompt, response = chats.imagine(scene, rng)
    assert all(right == total for right, total in score(response, scene).values())
    assert set(claims(prompt)) == {CELLS[item.cell] for item in scene.items}


@settings(deadline=None)
@given(seeds, st.sampled_from(wording.TASKS))
def test_a_response_about_another_scene_scores_lower(seed: int, task: str) -> None:
    rng = random.Random(seed)
    scene, other = random_scene(rng), random_scene(rng)
    result = score(wording.ask(other, task, rng)[1], scene, task)
    assert scene == other or any(right < total for right, total in result.values())


def test_each_kind_of_mistake_about_a_scene_lowers_its_own_kind() -> None:
    scene = Scene(
        "navy", (Item(0, "large", "red", "circle"), Item(8, "small", "blue", "star"))
    )
    text = "On a navy ground I see two shapes. In the northwest is a {}. The {} holds a little blue star."
    good = text.format("big red circle", "southeast")

    def wrong(response: str) -> dict[str, int]:
        return {
            kind: total - right
            for kind, (right, total) in score(response, scene).items()
            if right < total
        }

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


@settings(deadline=None)
@given(seeds, st.sampled_from(narration.TASKS))
def test_a_reference_response_about_a_clip_scores_full(seed: int, task: str) -> None:
    rng = random.Random(seed)
    clip = random_clip(rng)
    _, response = narration.ask(clip, task, rng)
    result = score_clip(response, clip, task)
    assert tuple(result) == CLIP_FACTS
    assert all(right == total for right, total in result.values()), (response, result)
    assert result["background"] == (
        1,
        1,
    )  # at the least: a clip may end on an empty board


@settings(deadline=None)
@given(seeds, st.sampled_from(narration.TASKS))
def test_a_response_about_another_clip_scores_lower(seed: int, task: str) -> None:
    rng = random.Random(seed)
    clip, other = random_clip(rng), random_clip(rng)
    result = score_clip(narration.response(other, task, rng), clip, task)
    assert any(right < total for right, total in result.values())


def test_each_kind_of_mistake_about_a_clip_lowers_its_own_kind() -> None:
    def wrong(text: str, task: str = "watch") -> dict[str, int]:
        result = score_clip(text, CLIP, task)
        return {
            kind: total - right
            for kind, (right, total) in result.items()
            if right < total
        }

    assert wrong(TEXT) == {}
    assert wrong(TEXT.replace("six vanishes", "six appears")) == {"event": 1}
    assert wrong(TEXT.replace("nothing happens", "appears")) == {
        "event": 1,
        "path": 1,
        "item": 1,
    }
    assert wrong(TEXT.replace("appears north a", "appears south a")) == {"path": 1}
    assert wrong(TEXT.replace("north a small", "north a big")) == {"item": 1}
    assert wrong(
        TEXT.replace("northwest floats a big", "northwest floats a small")
    ) == {"size": 1}
    assert wrong(TEXT.replace("navy", "black")) == {"background": 1}
    late = dict.fromkeys(("event", "path", "item"), 1)
    assert wrong(TEXT[: TEXT.index("At second six")]) == late
    assert wrong(TEXT.replace("four", "six")) == {**late, "event": 2}
    assert set(wrong("")) == set(CLIP_FACTS)


def test_events_are_scored_by_time() -> None:
    one, two = (
        f"At second {when} appears {cell} a big red star."
        for when, cell in (("two", "north"), ("six", "south"))
    )
    text = happenings(f"{two} {one}")
    assert text == happenings(f"{one} {two}")
    assert text == {
        when: [("appears", (cell,), ("large", "red", "star"))]
        for when, cell in (("two", "north"), ("six", "south"))
    }


def test_statements_about_the_start_do_not_count_for_the_end() -> None:
    start = "At the {} in the northwest is a big red circle. At the {} in the southeast is a small blue star."
    end = "At the {} in the north is a small blue star."
    text = f"{start.format('start', 'start')} {end.format('end')}"
    assert score_clip(text, CLIP, "compare")["position"] == (3, 3)
    text = f"{start.format('end', 'end')} {end.format('start')}"
    assert score_clip(text, CLIP, "compare")["position"] == (0, 6)
