"""How the demo target is trained: see first, then speak.

The vision tower learns to turn a cell into the sum of the embeddings of the words for it, and is then
frozen. The language model answers probes of one fact a cell, then of whole items, then conversations; each
stage is mixed in gradually. A few layers learn the first stages and the others, which add nothing until
then, join them: seeing takes many steps rather than much depth. Without that order a model of this size
learns the language alone.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from vlmdistill.pipelines.demo import chats, wording
from vlmdistill.pipelines.demo.model import IMAGE_TOKENS, first_layers, logits, patches, visual_tokens
from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    SHAPES,
    SIZES,
    Scene,
    draw,
    random_scene,
)
from vlmdistill.pipelines.demo.text import conversation

Progress = Callable[[str, int, int, float], None]
"""Called as (stage, step, steps, loss)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast; the defaults made the shipped checkpoint."""

    vision_steps: int = 250
    """Steps of the vision tower, 32 images each."""
    steps: int = 3200
    """Steps of the language model."""
    tokens: int = 1600
    """Tokens a step, padding included."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    first: int = 4
    """Layers that learn the first stages."""
    deepen: float = 0.25
    """Share of the steps after which all layers learn."""
    scan: tuple[float, float] = (0.08, 0.12)
    """Shares of the steps between which probes of items replace probes of single facts."""
    talk: tuple[float, float] = (0.17, 0.27)
    """Shares of the steps between which conversations replace probes."""
    rest: float = 0.06
    """Share of probes that stays to the end."""
    chats: float = 0.25
    """Share of the conversations, and of the probes of items, that have no image."""
    polish_steps: int = 2000
    """Steps of a second run over all of it, from a fresh learning rate."""
    polish_rate: float = 2e-3
    fact_weight: float = 3.0
    """Weight, in that run's loss, of the words for sizes, colours and shapes: few of all tokens."""


_Sample = tuple[list[int], Scene | None]
"""Token ids and, if they are about an image, its scene."""


@dataclass(frozen=True)
class _Batch:
    ids_BT: Tensor
    keep_N: Tensor
    target_N: Tensor
    patches_IPC: Tensor | None


def warm_vision(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
    progress: Progress,
) -> None:
    """Train the vision tower so that a visual token is the sum of the embeddings of the words for its cell.

    The language model then finds "northwest" in an image as it finds it in a text.
    """
    table_VH = model.get_input_embeddings().weight.detach()
    nouns = (*CELLS, *SIZES, *COLOURS, *SHAPES, *BACKGROUNDS, "empty")
    meaning = {noun: table_VH[tokenizer.encode(f" {noun}")].sum(0) for noun in nouns}
    weights = list(model.model.visual.parameters())
    optimiser = torch.optim.AdamW(weights, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)
    for step in range(recipe.vision_steps):
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * _pace(step, recipe.vision_steps)
        scenes = [random_scene(rng, "target") for _ in range(32)]
        seen_NH = visual_tokens(model, patches([draw(scene) for scene in scenes])).flatten(0, 1)
        said_NH = torch.stack(
            [sum(meaning[word] for word in words) for scene in scenes for words in _words(scene)]
        )
        loss = F.mse_loss(seen_NH, said_NH) / said_NH.var()  # the share of the meaning that is missed
        _step(optimiser, weights, loss)
        progress("vision", step + 1, recipe.vision_steps, loss.item())


def train(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
    progress: Progress,
) -> None:
    """Train the language model on probes and conversations, then polish it.

    Most tokens of an answer are a choice of words, whose noise drowns the few that an image decides: the
    first run leaves a tenth to a fifth of the facts wrong. The second one weights them.
    """
    model.model.visual.requires_grad_(False)
    size = model.get_output_embeddings().out_features
    weight_V = torch.ones(size)
    _run(model, tokenizer, recipe, rng, ("language", recipe.steps, recipe.learning_rate), weight_V, progress)
    for noun in (*SIZES, *COLOURS, *SHAPES):
        weight_V[tokenizer.encode(f" {noun}")] = recipe.fact_weight
    settled = replace(recipe, deepen=0.0, scan=(-2.0, -1.0), talk=(-2.0, -1.0))
    polish = ("polish", recipe.polish_steps, recipe.polish_rate)
    _run(model, tokenizer, settled, rng, polish, weight_V, progress)


def _run(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
    run: tuple[str, int, float],
    weight_V: Tensor,
    progress: Progress,
) -> None:
    """One run (its name, steps and peak learning rate) of a fresh optimiser."""
    name, steps, rate = run
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    start = first_layers(model, recipe.first)
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    batches = _batches(tokenizer, recipe, rng)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * _pace(step, steps)
        batch = next(batches)
        only = start if step < recipe.deepen * steps else None
        logits_NV = logits(model, batch.ids_BT, batch.patches_IPC, batch.keep_N, only=only)
        loss = F.cross_entropy(logits_NV, batch.target_N, weight=weight_V)
        _step(optimiser, weights, loss)
        progress(name, step + 1, steps, loss.item())


def _step(optimiser: torch.optim.Optimizer, weights: list[nn.Parameter], loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimiser.step()
    optimiser.zero_grad()


def _pace(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: up over 100 steps, down to zero along a cosine."""
    return min((step + 1) / min(100, steps), 1.0) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _words(scene: Scene) -> list[list[str]]:
    """The words for each cell: its place, the background, and what it holds."""
    words = [[cell, scene.background] for cell in CELLS]
    for item in scene.items:
        words[item.cell] += [item.size, item.colour, item.shape]
    return [known if len(known) > 2 else [*known, "empty"] for known in words]


def _batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rng: random.Random) -> Iterator[_Batch]:
    """Endless batches of near-equal lengths: samples are drawn for some eight steps and sorted by length."""
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    head = [start, *tokenizer.encode("assistant\n")]
    step = 0
    rows: list[_Sample] = []
    while True:
        drawn = rows  # the longest ones of the last round did not fill a batch
        while sum(len(ids) for ids, _ in drawn) < 8 * recipe.tokens:
            few = [_sample(rng, recipe, step / recipe.steps) for _ in range(8)]
            encoded = tokenizer([text for text, _ in few]).input_ids
            drawn += [(ids, scene) for ids, (_, scene) in zip(encoded, few, strict=True)]
        made: list[_Batch] = []
        rows = []
        for sample in sorted(drawn, key=lambda sample: len(sample[0])):
            if rows and (len(rows) + 1) * len(sample[0]) > recipe.tokens:
                made.append(_batch(rows, head, end))
                rows = []
            rows.append(sample)
        rng.shuffle(made)
        yield from made
        step += len(made)


def _sample(rng: random.Random, recipe: Recipe, done: float) -> tuple[str, Scene | None]:
    scene = random_scene(rng, "target")
    if rng.random() < 1 - _ramp(done, recipe.talk) * (1 - recipe.rest):
        if rng.random() >= _ramp(done, recipe.scan):
            return conversation(wording.look_probes(scene, rng), image_tokens=IMAGE_TOKENS), scene
        if rng.random() < recipe.chats:
            return conversation([chats.told_probe(scene, rng)]), None
        return conversation([wording.scan_probe(scene, rng)], image_tokens=IMAGE_TOKENS), scene
    if rng.random() < recipe.chats:
        return conversation(chats.chat(rng, "target")), None
    return conversation(wording.rounds(scene, rng), image_tokens=IMAGE_TOKENS), scene


def _ramp(done: float, ends: tuple[float, float]) -> float:
    """How far `done` is from the first end to the second, from 0 to 1."""
    return min(max((done - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)


def _batch(rows: Sequence[_Sample], head: list[int], end: int) -> _Batch:
    T = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), T), end)
    keep: list[int] = []
    target: list[int] = []
    for place, (ids, _) in enumerate(rows):
        ids_BT[place, : len(ids)] = torch.tensor(ids)
        for t in _answer_positions(ids, head, end):
            keep.append(place * T + t)
            target.append(ids[t + 1])
    images = [draw(scene) for _, scene in rows if scene is not None]
    return _Batch(ids_BT, torch.tensor(keep), torch.tensor(target), patches(images) if images else None)


def _answer_positions(ids: list[int], head: list[int], end: int) -> Iterator[int]:
    """Positions whose next token belongs to an answer, its end token included."""
    t = 0
    while t < len(ids):
        if ids[t : t + len(head)] == head:
            t += len(head) - 1
            while ids[t] != end:
                yield t
                t += 1
        t += 1
