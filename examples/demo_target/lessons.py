"""The training data of the demo target: the recipe, and batches of probes and conversations."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.demo_target import probes
from examples.demo_target.model import IMAGE_TOKENS, Visuals, patches
from examples.demo_target.slides import Slides, distinct, random_slides
from examples.demo_target.text import conversation
from vlmdistill.pipelines.demo import chats, narration, wording
from vlmdistill.pipelines.demo.clips import PHASES, SECONDS, Clip, random_clip
from vlmdistill.pipelines.demo.scenes import Scene, draw, random_scene


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training settings; the defaults are those of the shipped checkpoint `demo-small`, images only."""

    vision_steps: int = 250
    """Steps of the vision tower, 32 temporal patches each."""
    steps: int = 3200
    """Steps of the language model."""
    tokens: int = 1600
    """Tokens per step, padding included."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    scan: tuple[float, float] = (0.08, 0.12)
    """Shares of the steps between which probes of items replace probes of single facts."""
    talk: tuple[float, float] = (0.17, 0.27)
    """Shares of the steps between which conversations replace probes."""
    rest: float = 0.06
    """Share of probes that stays to the end."""
    chats: float = 0.25
    """Share of the conversations, and of the probes of items, without an image or video."""
    clips: float = 0.0
    """Share of videos among images and videos; twice that for the first probes."""
    crowd: float = 0.5
    """Share of videos with weighted tokens, which simulate lengths up to `longest`, after probes."""
    longest: int = 3000
    """Temporal patches."""
    polish_steps: int = 2000
    """Steps of a second run over all of it, from a fresh learning rate."""
    polish_rate: float = 2e-3
    fact_weight: float = 3.0
    """Weight of the words that depend on the image or video, in that run's loss."""


CLIPS = Recipe(
    vision_steps=600,
    steps=2600,
    learning_rate=2.5e-3,
    scan=(0.18, 0.22),
    talk=(0.22, 0.34),
    rest=0.15,
    clips=0.45,
    chats=0.2,
    polish_steps=2600,
    polish_rate=2e-3,
)
"""Videos as well as images."""

GROWN = Recipe(vision_steps=0, steps=0, polish_steps=400, polish_rate=2.5e-4)
"""Of a model that `grow` makes of a trained one."""


@dataclass(frozen=True)
class Batch:
    """Right-padded samples, the positions with a loss, and the next token of each.

    Shapes: B samples, T tokens, N positions (flat, of B x T).
    """

    ids_BT: Tensor
    keep_N: Tensor
    target_N: Tensor
    visuals: Visuals | None


@dataclass(frozen=True)
class Sample:
    """A conversation and its image or video."""

    text: str
    shown: Scene | Clip | Slides | None = None
    patches: int = 1
    """Temporal patches of a clip."""
    copies: float = 1.0
    """The weight of each visual token."""


_Row = tuple[list[int], Sample]


def lessons(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rng: random.Random, done: float
) -> Iterator[Batch]:
    """About eight batches of similar lengths; `done` is the finished share of the run."""
    start, end = (
        tokenizer.convert_tokens_to_ids(token)
        for token in ("<|im_start|>", "<|im_end|>")
    )
    head = [start, *tokenizer.encode("assistant\n")]
    drawn: list[_Row] = []
    while sum(len(ids) for ids, _ in drawn) < 8 * recipe.tokens:
        few = [_sample(rng, recipe, done) for _ in range(8)]
        encoded = tokenizer([sample.text for sample in few]).input_ids
        drawn += zip(encoded, few, strict=True)
    made: list[Batch] = []
    rows: list[_Row] = []
    for row in sorted(drawn, key=lambda row: -len(row[0])):
        if rows and (len(rows) + 1) * len(rows[0][0]) > recipe.tokens:
            made.append(_batch(rows, head, end))
            rows = []
        rows.append(row)
    made.append(_batch(rows, head, end))
    rng.shuffle(made)
    yield from made


def _sample(rng: random.Random, recipe: Recipe, done: float) -> Sample:
    talks = _ramp(done, recipe.talk)
    probe = rng.random() < 1 - talks * (1 - recipe.rest)
    look = probe and rng.random() >= _ramp(done, recipe.scan)
    if not look and rng.random() < recipe.chats:
        rounds = (
            [probes.described_items(random_scene(rng, "target"), rng)]
            if probe
            else chats.chat(rng, "target")
        )
        return Sample(conversation(rounds))
    if rng.random() < recipe.clips * (1 + look):
        return _clip_sample(rng, recipe, probe=probe, look=look, long=talks > 0)
    scene = random_scene(rng, "target")
    if probe:
        rounds = (
            probes.scene_facts(scene, rng) if look else [probes.scene_items(scene, rng)]
        )
    else:
        rounds = wording.rounds(scene, rng)
    return Sample(conversation(rounds, image_tokens=IMAGE_TOKENS), scene)


def _clip_sample(
    rng: random.Random, recipe: Recipe, *, probe: bool, look: bool, long: bool
) -> Sample:
    count = PHASES if look else _patches(rng, long=long)
    copies = 1.0
    if long and rng.random() < recipe.crowd:
        copies = math.exp(rng.uniform(0, math.log(recipe.longest / count)))
    shown: Clip | Slides
    if probe and rng.random() < 0.6:
        shown = random_slides(rng)
        rounds = [probes.slide_changes(shown, rng)]
    elif look:
        shown = random_slides(rng)
        rounds = probes.slide_facts(shown, rng)
    else:
        shown = random_clip(rng, "target")
        rounds = (
            [probes.clip_items_or_events(shown, rng)]
            if probe
            else narration.rounds(shown, rng)
        )
    return Sample(
        conversation(rounds, video_tokens=count * IMAGE_TOKENS), shown, count, copies
    )


def _patches(rng: random.Random, *, long: bool) -> int:
    """How many temporal patches a clip has: mostly few, for all of them cost."""
    luck = rng.random()
    if luck < 0.55:
        return PHASES
    if luck < 0.75:
        return 2 * PHASES
    if luck < 0.92 or not long:
        return rng.randint(PHASES, 5 * PHASES)
    if luck < 0.99:
        return rng.randint(5 * PHASES, 10 * PHASES)
    return 16 * PHASES if luck < 0.998 else 64 * PHASES


def _ramp(done: float, ends: tuple[float, float]) -> float:
    """How far `done` is from the first end to the second, from 0 to 1."""
    return min(max((done - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)


def _batch(rows: Sequence[_Row], head: list[int], end: int) -> Batch:
    T = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), T), end)
    keep: list[int] = []
    target: list[int] = []
    for index, (ids, _) in enumerate(rows):
        ids_BT[index, : len(ids)] = torch.tensor(ids)
        for t in _response_positions(ids, head, end):
            keep.append(index * T + t)
            target.append(ids[t + 1])
    return Batch(
        ids_BT,
        torch.tensor(keep),
        torch.tensor(target),
        visuals([sample for _, sample in rows]),
    )


def visuals(samples: Sequence[Sample]) -> Visuals | None:
    """What the samples show, a frame that is shown again drawn once; None if they show nothing."""
    pairs: list[tuple[Image.Image, Image.Image]] = []
    which: list[int] = []
    for sample in samples:
        match sample.shown:
            case Clip() | Slides() as clip:
                shown, nth = distinct(clip, sample.patches)
                which += [len(pairs) + index for index in nth]
                pairs += shown
            case Scene() as scene:
                image = draw(scene)
                which.append(len(pairs))
                pairs.append((image, image))
            case None:
                pass
    if not pairs:
        return None
    copies_B = torch.tensor([sample.copies for sample in samples])
    return Visuals(
        patches([first for first, _ in pairs], [then for _, then in pairs]),
        torch.tensor(which),
        torch.tensor([SECONDS / sample.patches for sample in samples]),
        copies_B if (copies_B > 1).any() else None,
    )


def _response_positions(ids: list[int], head: list[int], end: int) -> Iterator[int]:
    """Positions whose next token belongs to a response, its end token included."""
    t = 0
    while t < len(ids):
        if ids[t : t + len(head)] == head:
            t += len(head) - 1
            while ids[t] != end:
                yield t
                t += 1
        t += 1
