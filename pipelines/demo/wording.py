"""Questions about a scene, and reference responses.

The wording varies in two ways. Some of it follows from the image or the text so far (the verb from the shape,
the form of a sentence from the row, the remark from the color) and can be learned. The rest is drawn from
`rng`, so that sampling at temperature 1 gives different responses to one question.
"""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from vlmdistill.pipelines.demo.scenes import CELLS, Item, Scene


class Words(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The words of `words.toml`."""

    numbers: tuple[str, ...]
    rows: tuple[str, ...]
    suffixes: tuple[str, ...]
    moods: tuple[str, ...]
    deeds: tuple[str, ...]
    sizes: dict[str, tuple[str, ...]]
    verbs: dict[str, str]
    moves: dict[str, str]
    traits: dict[str, str]
    uses: dict[str, tuple[str, ...]]
    remarks: dict[str, tuple[str, ...]]
    scene_prompts: dict[str, tuple[str, ...]]
    clip_prompts: dict[str, tuple[str, ...]]


WORDS = msgspec.toml.decode(
    Path(__file__).with_name("words.toml").read_bytes(), type=Words
)
NUMBERS, ROWS, SIZE_WORDS, VERBS, REMARKS = (
    WORDS.numbers,
    WORDS.rows,
    WORDS.sizes,
    WORDS.verbs,
    WORDS.remarks,
)
TASKS = tuple(WORDS.scene_prompts)  # the kinds of questions


def ask(scene: Scene, task: str, rng: random.Random) -> tuple[str, str]:
    """A question of the kind `task` about the scene and a reference response."""
    item = rng.choice(scene.items)
    prompt = rng.choice(WORDS.scene_prompts[task]).format(
        target=f"{item.colour} {item.shape}"
    )
    return with_suffix(prompt, rng), response(scene, task, rng, item)


def response(
    scene: Scene, task: str, rng: random.Random, item: Item | None = None
) -> str:
    """A reference response; `item` is the one that a `where` question names."""
    if task == "where":
        return _where(scene, rng, item or scene.items[0])
    return _RESPONSES[task](scene, rng)


def with_suffix(prompt: str, rng: random.Random) -> str:
    """The prompt, sometimes with a please or a request for a long response, as in evaluation sets."""
    if rng.random() < 0.1:
        prompt = (
            f"Please {prompt[0].lower()}{prompt[1:]}"
            if not prompt.endswith("?")
            else f"Hello! {prompt}"
        )
    return f"{prompt} {rng.choice(WORDS.suffixes)}" if rng.random() < 0.3 else prompt


def rounds(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """A conversation about the scene: one or two rounds of different tasks."""
    return [
        ask(scene, task, rng)
        for task in rng.sample(TASKS, 2 if rng.random() < 0.15 else 1)
    ]


def an(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def look(item: Item, rng: random.Random) -> str:
    """The item as a noun phrase without article, such as `big red circle`."""
    return f"{rng.choice(SIZE_WORDS[item.size])} {item.colour} {item.shape}"


def sentence(item: Item, rng: random.Random, *, remark: float = 0.5) -> str:
    """A sentence about an item, with a remark on its color at the given rate."""
    verb, cell, phrase = VERBS[item.shape], CELLS[item.cell], look(item, rng)
    tail = f", {rng.choice(REMARKS[item.colour])}" if rng.random() < remark else ""
    match item.cell // 3:
        case 0:
            start = rng.choice(("In the", "In the", "Up in the"))
            return f"{start} {cell} {verb} a {phrase}{tail}."
        case 1:
            start = rng.choice(("Look at the", "Look at the", "Then go to the"))
            return f"{start} {cell}, where a {phrase} {verb}{tail}."
        case _:
            start = rng.choice(("The", "The", "Below, the"))
            return f"{start} {cell} holds a {phrase} that {verb} there{tail}."


def _opening(scene: Scene, rng: random.Random) -> str:
    ground, number = scene.background, NUMBERS[len(scene.items)]
    return rng.choice(
        (
            f"The image shows a board with {an(ground)} background. There are {number} shapes on it.",
            f"This picture has {an(ground)} background and contains {number} shapes in total.",
            f"On {an(ground)} background I can see {number} shapes.",
        )
    )


def _closing(scene: Scene, rng: random.Random, sentences: int = 1) -> str:
    items = scene.items
    first, last = items[0], items[-1]
    large = sum(item.size == "large" for item in items)
    most = "Large and small are equally common here."
    if 2 * large != len(items):
        most = f"Most of them are {'large' if 2 * large > len(items) else 'small'}."
    choices = (
        f"The other {NUMBERS[len(CELLS) - len(items)]} cells are empty.",
        f"It starts with the {first.colour} {first.shape} and ends with the {last.colour} {last.shape}.",
        most,
    )
    return " ".join(rng.sample(choices, sentences))


def _describe(scene: Scene, rng: random.Random) -> str:
    body = [sentence(item, rng) for item in scene.items]
    return " ".join([_opening(scene, rng), *body, _closing(scene, rng, 2)])


def _reverse(scene: Scene, rng: random.Random) -> str:
    body = [sentence(item, rng) for item in reversed(scene.items)]
    head = f"I start at the end. {_opening(scene, rng)}"
    return " ".join([head, *body, "That was the start of the picture."])


def _list(scene: Scene, rng: random.Random) -> str:
    head = f"Here are all {NUMBERS[len(scene.items)]} shapes on the {scene.background} background:"
    found = rng.choice(("there is", "you find"))
    lines = [
        f"{n}. In the {_found(item, rng, found)}."
        for n, item in enumerate(scene.items, 1)
    ]
    return "\n".join([head, *lines, f"This is the whole list. {_closing(scene, rng)}"])


def _rows(scene: Scene, rng: random.Random) -> str:
    parts = [_opening(scene, rng), "I will go row by row."]
    for row, name in enumerate(ROWS):
        items = [item for item in scene.items if item.cell // 3 == row]
        found = ", ".join(f"in the {_found(item, rng)}" for item in items)
        parts.append(
            f"The {name} row has {found}." if items else f"The {name} row is empty."
        )
    return " ".join([*parts, _closing(scene, rng)])


def _found(item: Item, rng: random.Random, verb: str = "") -> str:
    """The cell, then the item: the other order takes far longer to learn."""
    return f"{CELLS[item.cell]} {verb} a {look(item, rng)}".replace("  ", " ")


def _sizes(scene: Scene, rng: random.Random) -> str:
    parts = [
        _opening(scene, rng),
        rng.choice(("I sort them by size.", "By size they fall into two groups.")),
    ]
    for size in rng.sample(("large", "small"), 2):
        items = [item for item in scene.items if item.size == size]
        some = ", ".join(f"in the {_found(item, rng)}" for item in items)
        parts.append(
            f"These are {size}: {some}." if items else f"None of them is {size}."
        )
    return " ".join(
        [
            *parts,
            rng.choice(("Nothing else is on the board.", "That is all I can see.")),
        ]
    )


def _where(scene: Scene, rng: random.Random, item: Item) -> str:
    others = [
        sentence(other, rng, remark=0.35) for other in scene.items if other != item
    ]
    found = rng.choice(("I have found it:", "It is easy to find:"))
    there = f"in the {CELLS[item.cell]} {VERBS[item.shape]}"
    parts = [
        f"You ask about the {item.colour} {item.shape}. {found} {there} a {look(item, rng)}."
    ]
    total = f"Together these are {NUMBERS[len(scene.items)]} shapes on {an(scene.background)} background."
    return " ".join(
        [*parts, rng.choice(("Here is the rest.", "Now the others.")), *others, total]
    )


def _count(scene: Scene, rng: random.Random) -> str:
    number = NUMBERS[len(scene.items)]
    parts = [f"Let me count what is on the {scene.background} background."]
    for i, item in enumerate(scene.items, 1):
        parts.append(f"Number {NUMBERS[i]} in the {_found(item, rng, 'is')}.")
    return " ".join([*parts, f"So there are {number} shapes.", _closing(scene, rng)])


def _story(scene: Scene, rng: random.Random) -> str:
    number = NUMBERS[len(scene.items)]
    parts = [
        f"Once upon a time {number} shapes lived on a board with {an(scene.background)} background."
    ]
    for item in scene.items:
        mood, deed = rng.choice(WORDS.moods), rng.choice(WORDS.deeds)
        parts.append(
            f"In the {CELLS[item.cell]} lived a {mood} one, a {look(item, rng)}, that {deed}."
        )
    return " ".join(
        [
            *parts,
            rng.choice(
                ("They were good friends.", "They all lived happily ever after.")
            ),
        ]
    )


_RESPONSES: dict[str, Callable[[Scene, random.Random], str]] = {
    "describe": _describe,
    "list": _list,
    "rows": _rows,
    "sizes": _sizes,
    "reverse": _reverse,
    "count": _count,
    "story": _story,
}
