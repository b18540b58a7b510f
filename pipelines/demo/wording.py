"""Questions about a scene, and reference responses.

The wording varies in two ways. Some of it follows from the image or the text so far (the
verb from the shape, the form of a sentence from the row, the remark from the color) and
can be learned. The rest is drawn from `rng`, so that sampling at temperature 1 gives
different responses to one question. The order of the draws is part of the data.
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


_FILE = Path(__file__).with_name("words.toml")
WORDS = msgspec.toml.decode(_FILE.read_bytes(), type=Words)
NUMBERS = WORDS.numbers
ROWS = WORDS.rows
SIZE_WORDS = WORDS.sizes
VERBS = WORDS.verbs
REMARKS = WORDS.remarks
TASKS = tuple(WORDS.scene_prompts)  # the kinds of questions


def ask(scene: Scene, task: str, rng: random.Random) -> tuple[str, str]:
    """A question of the kind `task` about the scene and a reference response."""
    item = rng.choice(scene.items)
    prompt = rng.choice(WORDS.scene_prompts[task])
    question = prompt.format(target=short_look(item))
    return with_suffix(question, rng), response(scene, task, rng, item)


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
        prompt = _polite(prompt)
    if rng.random() < 0.3:
        prompt = f"{prompt} {rng.choice(WORDS.suffixes)}"
    return prompt


def _polite(prompt: str) -> str:
    if prompt.endswith("?"):
        return f"Hello! {prompt}"
    first = prompt[0].lower()
    return f"Please {first}{prompt[1:]}"


def rounds(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """A conversation about the scene: one or two rounds of different tasks."""
    count = 2 if rng.random() < 0.15 else 1
    return [ask(scene, task, rng) for task in rng.sample(TASKS, count)]


def an(noun: str) -> str:
    """The noun with its indefinite article."""
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{article} {noun}"


def look(item: Item, rng: random.Random) -> str:
    """The item as a noun phrase without article, such as `big red circle`."""
    size = rng.choice(SIZE_WORDS[item.size])
    return f"{size} {short_look(item)}"


def short_look(item: Item) -> str:
    """The item as a noun phrase without article and size, such as `red circle`."""
    return f"{item.colour} {item.shape}"


def sentence(item: Item, rng: random.Random, *, remark: float = 0.5) -> str:
    """A sentence about an item, with a remark on its color at the given rate."""
    verb = VERBS[item.shape]
    cell = CELLS[item.cell]
    phrase = look(item, rng)
    tail = remark_on(item, rng, rate=remark)
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


def remark_on(item: Item, rng: random.Random, *, rate: float) -> str:
    """A remark on the color of an item as the end of a clause, at the given rate; else empty."""
    if rng.random() < rate:
        return f", {rng.choice(REMARKS[item.colour])}"
    return ""


_OPENINGS = (
    "The image shows a board with {background} background. "
    "There are {number} shapes on it.",
    "This picture has {background} background and contains {number} shapes in total.",
    "On {background} background I can see {number} shapes.",
)


def _opening(scene: Scene, rng: random.Random) -> str:
    opening = rng.choice(_OPENINGS)
    number = NUMBERS[len(scene.items)]
    return opening.format(background=an(scene.background), number=number)


def _closing(scene: Scene, rng: random.Random, sentences: int = 1) -> str:
    empty = NUMBERS[len(CELLS) - len(scene.items)]
    first = short_look(scene.items[0])
    last = short_look(scene.items[-1])
    choices = (
        f"The other {empty} cells are empty.",
        f"It starts with the {first} and ends with the {last}.",
        _most_common_size(scene),
    )
    return " ".join(rng.sample(choices, sentences))


def _most_common_size(scene: Scene) -> str:
    large = sum(item.size == "large" for item in scene.items)
    small = len(scene.items) - large
    if large == small:
        return "Large and small are equally common here."
    return f"Most of them are {'large' if large > small else 'small'}."


def _describe(scene: Scene, rng: random.Random) -> str:
    sentences = [sentence(item, rng) for item in scene.items]
    opening = _opening(scene, rng)
    return " ".join([opening, *sentences, _closing(scene, rng, 2)])


def _reverse(scene: Scene, rng: random.Random) -> str:
    sentences = [sentence(item, rng) for item in reversed(scene.items)]
    opening = f"I start at the end. {_opening(scene, rng)}"
    return " ".join([opening, *sentences, "That was the start of the picture."])


def _list(scene: Scene, rng: random.Random) -> str:
    number = NUMBERS[len(scene.items)]
    head = f"Here are all {number} shapes on the {scene.background} background:"
    verb = rng.choice(("there is", "you find"))
    lines = []
    for i, item in enumerate(scene.items, 1):
        place = _placed(item, rng, verb)
        lines.append(f"{i}. In the {place}.")
    end = f"This is the whole list. {_closing(scene, rng)}"
    return "\n".join([head, *lines, end])


def _rows(scene: Scene, rng: random.Random) -> str:
    sentences = [_opening(scene, rng), "I will go row by row."]
    for row, name in enumerate(ROWS):
        items = [item for item in scene.items if item.cell // 3 == row]
        if items:
            places = _all_placed(items, rng)
            sentences.append(f"The {name} row has {places}.")
        else:
            sentences.append(f"The {name} row is empty.")
    return " ".join([*sentences, _closing(scene, rng)])


def _placed(item: Item, rng: random.Random, verb: str = "") -> str:
    """The cell, then the item: the other order takes far longer to learn."""
    words = [CELLS[item.cell], verb, "a", look(item, rng)]
    return " ".join(filter(None, words))


def _all_placed(items: list[Item], rng: random.Random) -> str:
    return ", ".join(f"in the {_placed(item, rng)}" for item in items)


def _sizes(scene: Scene, rng: random.Random) -> str:
    sentences = [
        _opening(scene, rng),
        rng.choice(("I sort them by size.", "By size they fall into two groups.")),
    ]
    for size in rng.sample(("large", "small"), 2):
        items = [item for item in scene.items if item.size == size]
        if items:
            places = _all_placed(items, rng)
            sentences.append(f"These are {size}: {places}.")
        else:
            sentences.append(f"None of them is {size}.")
    end = rng.choice(("Nothing else is on the board.", "That is all I can see."))
    return " ".join([*sentences, end])


def _where(scene: Scene, rng: random.Random, item: Item) -> str:
    other_items = [other for other in scene.items if other != item]
    remaining = [sentence(other, rng, remark=0.35) for other in other_items]
    opening = rng.choice(("I have found it:", "It is easy to find:"))
    place = _placed(item, rng, VERBS[item.shape])
    question = f"You ask about the {short_look(item)}."
    answer = f"{question} {opening} in the {place}."
    link = rng.choice(("Here is the rest.", "Now the others."))
    number = NUMBERS[len(scene.items)]
    background = an(scene.background)
    total = f"Together these are {number} shapes on {background} background."
    return " ".join([answer, link, *remaining, total])


def _count(scene: Scene, rng: random.Random) -> str:
    number = NUMBERS[len(scene.items)]
    sentences = [f"Let me count what is on the {scene.background} background."]
    for i, item in enumerate(scene.items, 1):
        place = _placed(item, rng, "is")
        sentences.append(f"Number {NUMBERS[i]} in the {place}.")
    total = f"So there are {number} shapes."
    return " ".join([*sentences, total, _closing(scene, rng)])


def _story(scene: Scene, rng: random.Random) -> str:
    number = NUMBERS[len(scene.items)]
    board = f"a board with {an(scene.background)} background"
    sentences = [f"Once upon a time {number} shapes lived on {board}."]
    for item in scene.items:
        cell = CELLS[item.cell]
        mood = rng.choice(WORDS.moods)
        deed = rng.choice(WORDS.deeds)
        phrase = look(item, rng)
        sentences.append(f"In the {cell} lived a {mood} one, a {phrase}, that {deed}.")
    end = rng.choice(("They were good friends.", "They all lived happily ever after."))
    return " ".join([*sentences, end])


Response = Callable[[Scene, random.Random], str]

_RESPONSES: dict[str, Response] = {
    "describe": _describe,
    "list": _list,
    "rows": _rows,
    "sizes": _sizes,
    "reverse": _reverse,
    "count": _count,
    "story": _story,
}
