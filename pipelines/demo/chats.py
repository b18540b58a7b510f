"""Conversations without an image: invented pictures, stories, explanations of shapes and colors."""

import random
from collections.abc import Callable, Mapping, Sequence

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
    short_look,
    with_suffix,
)

Round = tuple[str, str]  # a question and its response


def chat(rng: random.Random, split: str | None = None) -> list[Round]:
    """A conversation without an image: one or two rounds of different kinds.

    `split` applies only to imagined pictures: the other kinds have too few questions to
    be split.
    """
    kinds = rng.sample(list(_KINDS), len(_KINDS))
    if rng.random() < 0.3:
        # An imagined picture comes first: it has by far the most different questions.
        kinds.sort(key="imagine".__ne__)
    count = 2 if rng.random() < 0.25 else 1
    rounds = []
    for kind in kinds[:count]:
        if kind == "imagine":
            question, reply = _imagine(rng, split)
        else:
            question, reply = _KINDS[kind](rng)
        rounds.append((with_suffix(question, rng), reply))
    return rounds


def imagine(scene: Scene, rng: random.Random) -> Round:
    """A question that describes a picture, and a response, scored like that to an image."""
    start = rng.choice(("Imagine a picture", "Describe a picture that you make up"))
    question = f"{start} {in_words(scene)}."
    return question, response(scene, "describe", rng)


def in_words(scene: Scene) -> str:
    """The background and all items of a scene as text."""
    items = []
    for item in scene.items:
        cell = CELLS[item.cell]
        items.append(f"in the {cell} a {item.size} {short_look(item)}")
    background = an(scene.background)
    return f"on {background} background: {'; '.join(items)}"


def _imagine(rng: random.Random, split: str | None = None) -> Round:
    return imagine(random_scene(rng, split), rng)


def _item(rng: random.Random) -> Item:
    """An item of random size, color and shape; its cell is not used."""
    size = rng.choice(("large", "small"))
    colour = _colour(rng)
    return Item(0, size, colour, rng.choice(SHAPES))


def _colour(rng: random.Random) -> str:
    return rng.choice(list(COLOURS))


def _background(rng: random.Random) -> str:
    """A random background, with its article."""
    return an(rng.choice(list(BACKGROUNDS)))


def _fill(sentences: Sequence[str], words: Mapping[str, str], joint: str = " ") -> str:
    """Sentences with their words filled in, as one text."""
    return joint.join(sentences).format_map(words)


# In each kind, the order of the draws is part of the data: a seed stands for it.


def _character(name: str, item: Item) -> dict[str, str]:
    """The words for a character of a tale."""
    words = {name: item.shape}
    words[f"{name}_look"] = short_look(item)
    words[f"a_{name}"] = an(short_look(item))
    words[f"{name}_verb"] = VERBS[item.shape]
    return words


def _tale(rng: random.Random) -> Round:
    hero, friend = _item(rng), _item(rng)
    while friend.shape == hero.shape:
        friend = _item(rng)
    words = _character("hero", hero) | _character("friend", friend)
    words["mood"], words["friend_mood"] = rng.sample(WORDS.moods, 2)
    words["deed"], words["later_deed"] = rng.sample(WORDS.deeds, 2)
    words["background"] = _background(rng)
    question = rng.choice(
        (
            "Tell me a story about {a_hero} and {a_friend}.",
            "Write a little story with {a_hero} and {a_friend}.",
        )
    )
    words["remark"] = rng.choice(REMARKS[hero.colour])
    words["friend_remark"] = rng.choice(REMARKS[friend.colour])
    meeting = rng.choice(
        (
            "The {friend} {later_deed}, and the {hero} listened.",
            "Together the {hero} and the {friend} {later_deed}.",
        )
    )
    friendship = rng.choice(
        ("They became good friends.", "From that day on they were never alone.")
    )
    words["place"] = rng.choice(CELLS[:4])
    words["friend_place"] = rng.choice(CELLS[4:])
    sentences = [
        "Once upon a time there was a {mood} {hero_look}, {remark}.",
        "It lived alone on {background} board and often {deed}.",
        "One day it met a {friend_mood} {friend_look}, {friend_remark}.",
        meeting,
        friendship,
        "In the end the {hero} {hero_verb} in the {place}"
        " and the {friend} {friend_verb} in the {friend_place}.",
    ]
    return question.format_map(words), _fill(sentences, words)


def _explain_shape(rng: random.Random) -> Round:
    shape = rng.choice(SHAPES)
    colour = _colour(rng)
    words = {
        "shape": shape,
        "verb": VERBS[shape],
        "trait": WORDS.traits[shape],
        "A_colour": an(colour).capitalize(),
    }
    question = rng.choice(
        (
            "What is a {shape}?",
            "Explain to me what a {shape} is.",
            "Tell me about the {shape}.",
        )
    )
    words["use"], words["other_use"] = rng.sample(WORDS.uses[shape], 2)
    opening = rng.choice(
        (
            "A {shape} is a simple flat shape.",
            "The {shape} is a shape that everybody knows.",
        )
    )
    words["remark"] = rng.choice(REMARKS[colour])
    closing = rng.choice(
        ("That is all about the {shape}.", "Now you know what a {shape} is.")
    )
    sentences = [
        opening,
        "{trait}",
        "You often find it in {use} and {other_use}.",
        "On a board a {shape} {verb} in its cell, and it can be large or small.",
        "{A_colour} {shape}, for example, is {remark}.",
        closing,
    ]
    return question.format_map(words), _fill(sentences, words)


def _explain_colour(rng: random.Random) -> Round:
    colour = _colour(rng)
    shape, other_shape = rng.sample(SHAPES, 2)
    words = {
        "colour": colour,
        "A_colour": an(colour).capitalize(),
        "shape": shape,
        "other_shape": other_shape,
        "verb": VERBS[shape],
    }
    question = rng.choice(
        (
            "What is {colour} like?",
            "Describe the colour {colour}.",
            "Tell me about the colour {colour}.",
        )
    )
    words["remark"], words["other_remark"] = rng.sample(REMARKS[colour], 2)
    words["background"] = _background(rng)
    words["praise"] = rng.choice(("look good", "be nice"))
    liking = rng.choice(
        ("Many people like this colour.", "It makes people feel happy.")
    )
    sentences = [
        "The colour {colour} is easy to know.",
        "It is {remark}, and it is {other_remark}.",
        "{A_colour} {shape} is pretty when it {verb} on {background} board.",
        "{A_colour} {other_shape} would {praise} beside it.",
        liking,
        "If you see something {remark}, you may call it {colour}.",
    ]
    return question.format_map(words), _fill(sentences, words)


def _draw(rng: random.Random) -> Round:
    item = _item(rng)
    words = {
        "size": item.size,
        "colour": item.colour,
        "shape": item.shape,
        "verb": VERBS[item.shape],
        "trait": WORDS.traits[item.shape],
    }
    words["cell"] = rng.choice(CELLS)
    words["background"] = _background(rng)
    question = rng.choice(
        (
            "How do I draw a {size} {colour} {shape} in the {cell}?",
            "Explain how to draw a {size} {colour} {shape} in the {cell}.",
        )
    )
    words["remark"] = rng.choice(REMARKS[item.colour])
    words["look"] = look(item, rng)
    closing = rng.choice(
        ("Now a {look} is in the {cell}.", "That is all, and it is easy.")
    )
    sentences = [
        "Take a board with {background} background.",
        "1. Find the cell in the {cell}.",
        "2. Think of the {shape}. {trait}",
        "3. Draw it {size}, so that it {verb} in the cell.",
        "4. Fill it with {colour}, {remark}.",
        closing,
    ]
    return question.format_map(words), _fill(sentences, words, joint="\n")


Kind = Callable[[random.Random], Round]

_KINDS: dict[str, Kind] = {
    "imagine": _imagine,
    "tale": _tale,
    "shape": _explain_shape,
    "colour": _explain_colour,
    "draw": _draw,
}
