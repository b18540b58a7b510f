"""Trains the demo target: first the vision tower, then the language model.

The vision tower learns to map a cell to the sum of the embeddings of the words for it, and is then frozen.
The language model learns probes about single facts of cells, then about whole items and events, then
conversations; each stage is mixed in gradually. In another order, a model of this size learns only the
language.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from examples.demo_target.lessons import Batch, Recipe, lessons
from examples.demo_target.model import logits, patches, visual_tokens
from examples.demo_target.slides import frame, random_slides
from examples.demo_target.wiring import cell_words, meanings, wired
from vlmdistill.pipelines.demo.clips import PHASES, random_clip
from vlmdistill.pipelines.demo.narration import APPEARS, SAME, VANISHES
from vlmdistill.pipelines.demo.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    SHAPES,
    draw,
    random_scene,
)
from vlmdistill.pipelines.demo.wording import NUMBERS, SIZE_WORDS
from vlmdistill.stores.errors import TargetError

Progress = Callable[[str, int, int, float], None]
"""Called as (stage, step, steps, loss)."""

KINDS = (SAME, "all", APPEARS, VANISHES, "there")
"""The words that tell what happens: a move begins with "there is a move"."""

_OVER = (-2.0, -1.0)


@dataclass(frozen=True)
class Course:
    """A model in training, and where its state is kept so that a build that was killed goes on."""

    model: Qwen2_5_VLForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    recipe: Recipe
    seed: int
    progress: Progress
    state: Path
    save_every: int = 200
    """Steps between two writes of the state, at the least."""

    def _load(self) -> dict[str, Any]:
        if not self.state.exists():
            return {"run": "", "step": 0, "round": 0}
        saved: dict[str, Any] = torch.load(self.state, weights_only=True)
        if saved["made by"] != self._maker():
            raise TargetError(
                f"{self.state} is of an unfinished build with another seed or recipe: "
                "finish that one, or remove the file"
            )
        self.model.load_state_dict(saved["model"])
        return saved

    def _save(
        self, run: str, step: int, nth_round: int, optimiser: torch.optim.Optimizer
    ) -> None:
        position = {
            "made by": self._maker(),
            "run": run,
            "step": step,
            "round": nth_round,
        }
        part = self.state.with_suffix(".part")
        torch.save(
            {
                **position,
                "model": self.model.state_dict(),
                "optimiser": optimiser.state_dict(),
            },
            part,
        )
        part.replace(self.state)

    def _maker(self) -> str:
        text = self.model.config.text_config
        return f"seed {self.seed}, {text.num_hidden_layers} x {text.hidden_size}, {self.recipe}"


def train(course: Course) -> None:
    """Train the vision tower, then the language model on probes and conversations, then polish it.

    Most tokens of a response are a choice of words, whose noise hides the few that depend on the image: the
    first run leaves a tenth to a fifth of the facts wrong. The polishing one weights them. A course whose
    state was saved goes on from there and ends with the same weights as one that was never stopped.
    """
    recipe, model = course.recipe, course.model
    saved = course._load()
    if not saved["run"]:
        _warm_vision(course)
    model.model.visual.requires_grad_(False)
    if saved["run"] != "polish":
        weight_V = torch.ones(model.get_output_embeddings().out_features)
        _run(
            course,
            recipe,
            ("language", recipe.steps, recipe.learning_rate),
            weight_V,
            saved,
        )
        saved = {"run": "", "step": 0, "round": 0}
    _polish(course, saved)


def train_grown(course: Course) -> None:
    """Only polish: a model that `grow` made knows the tasks."""
    course.model.model.visual.requires_grad_(False)
    _polish(course, course._load())


def _polish(course: Course, saved: dict[str, Any]) -> None:
    recipe = course.recipe
    weight_V = torch.ones(course.model.get_output_embeddings().out_features)
    synonyms = (word for words in SIZE_WORDS.values() for word in words)
    for word in (*synonyms, *COLOURS, *SHAPES, *BACKGROUNDS, *CELLS, *NUMBERS, *KINDS):
        weight_V[course.tokenizer.encode(f" {word}")] = recipe.fact_weight
    settled = replace(recipe, scan=_OVER, talk=_OVER)
    _run(
        course,
        settled,
        ("polish", recipe.polish_steps, recipe.polish_rate),
        weight_V,
        saved,
    )


def _warm_vision(course: Course) -> None:
    """Train the vision tower so that a visual token is the sum of the embeddings of the words for its cell.

    The language model then finds "northwest" in an image as it finds it in a text. A temporal patch of a
    video also has the word for its phase; one whose frames differ is the mean of both.
    """
    model, recipe = course.model, course.recipe
    rng = random.Random(f"demo vision {course.seed}")
    meaning = meanings(model, course.tokenizer)
    weights = list(model.model.visual.parameters())
    optimiser = torch.optim.AdamW(
        weights, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True
    )
    for step in range(recipe.vision_steps):
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * _pace(
            step, recipe.vision_steps
        )
        shown = [
            _pair(rng, moving=recipe.clips > 0 and index % 2 == 1)
            for index in range(32)
        ]
        images, then = ([pair[side][0] for pair in shown] for side in (0, 1))
        seen_NH = visual_tokens(model, patches(images, then)).flatten(0, 1)
        said_2NH = [
            torch.stack(
                [_sum(meaning, words) for pair in shown for words in pair[side][1]]
            )
            for side in (0, 1)
        ]
        said_NH = (said_2NH[0] + said_2NH[1]) / 2
        loss = (
            F.mse_loss(seen_NH, said_NH) / said_NH.var()
        )  # the share of the meaning that is missed
        _step(optimiser, weights, loss)
        course.progress("vision", step + 1, recipe.vision_steps, loss.item())


def _sum(meaning: dict[str, Tensor], words: Sequence[str]) -> Tensor:
    return torch.stack([meaning[word] for word in words]).sum(0)


def _pair(rng: random.Random, *, moving: bool) -> list[tuple[Any, list[list[str]]]]:
    """The two frames of a temporal patch: each an image and the words for its cells."""
    if not moving:
        scene = random_scene(rng, "target")
        return [(draw(scene), cell_words(scene))] * 2
    clip = random_slides(rng) if rng.random() < 0.5 else random_clip(rng, "target")
    phase = rng.randrange(PHASES)
    then = min(phase + (rng.random() < 0.25), PHASES - 1)
    return [(frame(clip, at), cell_words(clip, at)) for at in (phase, then)]


def _run(
    course: Course,
    recipe: Recipe,
    run: tuple[str, int, float],
    weight_V: Tensor,
    saved: dict[str, Any],
) -> None:
    """One run (its name, steps and peak learning rate) of a fresh optimiser, or the rest of it."""
    name, steps, rate = run
    model = course.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    kept = [
        (weight, at, weight.detach()[at].clone())
        for weight, at in wired(model, course.tokenizer)
    ]
    groups = [
        {
            "params": [w for w in weights if w.ndim > 1],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    step = safe = saved["step"]
    if saved["run"] == name:
        optimiser.load_state_dict(saved["optimiser"])
    for nth_round in itertools.count(saved["round"]):
        rng = random.Random(f"demo {name} {course.seed} {nth_round}")
        for batch in itertools.islice(
            lessons(course.tokenizer, recipe, rng, step / steps), steps - step
        ):
            for group in optimiser.param_groups:
                group["lr"] = rate * _pace(step, steps)
            loss = _loss(model, batch, weight_V)
            _step(optimiser, weights, loss)
            with torch.no_grad():
                for weight, at, value in kept:
                    weight[at] = value
            step += 1
            course.progress(name, step, steps, loss.item())
        if step == steps:
            return
        if step - safe >= course.save_every:
            course._save(name, step, nth_round + 1, optimiser)
            safe = step


def _loss(
    model: Qwen2_5_VLForConditionalGeneration, batch: Batch, weight_V: Tensor
) -> Tensor:
    logits_NV = logits(model, batch.ids_BT, batch.visuals, batch.keep_N)
    return F.cross_entropy(logits_NV, batch.target_N, weight=weight_V)


def _step(
    optimiser: torch.optim.Optimizer, weights: list[nn.Parameter], loss: Tensor
) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimiser.step()
    optimiser.zero_grad()


def _pace(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: up over 100 steps, down to zero along a cosine."""
    return (
        min((step + 1) / min(100, steps), 1.0)
        * 0.5
        * (1 + math.cos(math.pi * step / steps))
    )
