"""Conversations without an image: invented pictures, stories, explanations of shapes and colors."""

import random

from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    SHAPES,
    Item,
    Scene,
    random_scene,
)
from vlmdistill.pipelines.demo.wording import (
    REMARKS,
    VERBS,
    WORDS,
    an,
    look,
    response,
    with_suffix,
)


def chat(rng: random.Random, split: str | None = None) -> list[tuple[str, str]]:
    """A conversation without an image: one or two rounds of different kinds, as (question, response).

    `split` applies only to imagined pictures: the other kinds have too few questions to be split.
    """
    kinds = rng.sample(list(_KINDS), len(_KINDS))
    if rng.random() < 0.3:
        kinds.sort(key="imagine".__ne__)  # it has by far the most different questions
    kinds = kinds[: 2 if rng.random() < 0.25 else 1]
    rounds = (
        _KINDS[kind](rng) if kind != "imagine" else _imagine(rng, split)
        for kind in kinds
    )
    return [(with_suffix(prompt, rng), reply) for prompt, reply in rounds]


def imagine(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A question for a picture that it describes; the response can be scored like that to an image."""
    start = rng.choice(("Imagine a picture", "Describe a picture that you make up"))
    return f"{start} {in_words(scene)}.", response(scene, "describe", rng)


def in_words(scene: Scene) -> str:
    """The background and all items of a scene as text."""
    items = (
        f"in the {CELLS[item.cell]} a {item.size} {item.colour} {item.shape}"
        for item in scene.items
    )
    return f"on {an(scene.background)} background: {'; '.join(items)}"


def _imagine(rng: random.Random, split: str | None = None) -> tuple[str, str]:
    return imagine(random_scene(rng, split), rng)


def _item(rng: random.Random) -> Item:
    return Item(
        0, rng.choice(("large", "small")), rng.choice(list(COLOURS)), rng.choice(SHAPES)
    )


def _tale(rng: random.Random) -> tuple[str, str]:
    one, two = _item(rng), _item(rng)
    while two.shape == one.shape:
        two = _item(rng)
    mood, other = rng.sample(WORDS.moods, 2)
    deed, then = rng.sample(WORDS.deeds, 2)
    ground = rng.choice(list(BACKGROUNDS))
    prompt = rng.choice(
        ("Tell me a story about {} and {}.", "Write a little story with {} and {}.")
    )
    question = prompt.format(
        f"{an(one.colour)} {one.shape}", f"{an(two.colour)} {two.shape}"
    )
    sentences = [
        f"Once upon a time there was a {mood} {one.colour} {one.shape}, {rng.choice(REMARKS[one.colour])}.",
        f"It lived alone on {an(ground)} board and often {deed}.",
        f"One day it met a {other} {two.colour} {two.shape}, {rng.choice(REMARKS[two.colour])}.",
        rng.choice(
            (
                f"The {two.shape} {then}, and the {one.shape} listened.",
                f"Together the {one.shape} and the {two.shape} {then}.",
            )
        ),
        rng.choice(
            ("They became good friends.", "From that day on they were never alone.")
        ),
        f"In the end the {one.shape} {VERBS[one.shape]} in the {rng.choice(CELLS[:4])}"
        f" and the {two.shape} {VERBS[two.shape]} in the {rng.choice(CELLS[4:])}.",
    ]
    return question, " ".join(sentences)


def _shape(rng: random.Random) -> tuple[str, str]:
    shape = rng.choice(SHAPES)
    colour = rng.choice(list(COLOURS))
    prompt = rng.choice(
        ("What is a {}?", "Explain to me what a {} is.", "Tell me about the {}.")
    )
    uses = rng.sample(WORDS.uses[shape], 2)
    sentences = [
        rng.choice(
            (
                f"A {shape} is a simple flat shape.",
                f"The {shape} is a shape that everybody knows.",
            )
        ),
        WORDS.traits[shape],
        f"You often find it in {uses[0]} and {uses[1]}.",
        f"On a board a {shape} {VERBS[shape]} in its cell, and it can be large or small.",
        f"{an(colour).capitalize()} {shape}, for example, is {rng.choice(REMARKS[colour])}.",
        rng.choice(
            (f"That is all about the {shape}.", f"Now you know what a {shape} is.")
        ),
    ]
    return prompt.format(shape), " ".join(sentences)


def _colour(rng: random.Random) -> tuple[str, str]:
    colour = rng.choice(list(COLOURS))
    shape, other = rng.sample(SHAPES, 2)
    prompt = rng.choice(
        ("What is {} like?", "Describe the colour {}.", "Tell me about the colour {}.")
    )
    first, second = rng.sample(REMARKS[colour], 2)
    ground = rng.choice(list(BACKGROUNDS))
    sentences = [
        f"The colour {colour} is easy to know.",
        f"It is {first}, and it is {second}.",
        f"{an(colour).capitalize()} {shape} is pretty when it {VERBS[shape]} on {an(ground)} board.",
        f"{an(colour).capitalize()} {other} would {rng.choice(('look good', 'be nice'))} beside it.",
        rng.choice(("Many people like this colour.", "It makes people feel happy.")),
        f"If you see something {first}, you may call it {colour}.",
    ]
    return prompt.format(colour), " ".join(sentences)


def _draw(rng: random.Random) -> tuple[str, str]:
    item, cell, ground = _item(rng), rng.choice(CELLS), rng.choice(list(BACKGROUNDS))
    prompt = rng.choice(
        ("How do I draw a {} in the {}?", "Explain how to draw a {} in the {}.")
    )
    sentences = [
        f"Take a board with {an(ground)} background.",
        f"1. Find the cell in the {cell}.",
        f"2. Think of the {item.shape}. {WORDS.traits[item.shape]}",
        f"3. Draw it {item.size}, so that it {VERBS[item.shape]} in the cell.",
        f"4. Fill it with {item.colour}, {rng.choice(REMARKS[item.colour])}.",
        rng.choice(
            (
                f"Now a {look(item, rng)} is in the {cell}.",
                "That is all, and it is easy.",
            )
        ),
    ]
    return prompt.format(f"{item.size} {item.colour} {item.shape}", cell), "\n".join(
        sentences
    )


_KINDS = {
    "imagine": _imagine,
    "tale": _tale,
    "shape": _shape,
    "colour": _colour,
    "draw": _draw,
}
