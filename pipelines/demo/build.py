"""Build the demo target: tokenizer, model, scores and model card, from nothing but this package."""

import json
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from vlmdistill.pipelines.demo.evaluation import evaluate
from vlmdistill.pipelines.demo.model import IMAGE_MEAN, IMAGE_STD, MERGE, PATCH, config, new_model
from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS
from vlmdistill.pipelines.demo.text import SPECIALS, VOCABULARY, train_tokenizer
from vlmdistill.pipelines.demo.training import Progress, Recipe, train, warm_vision

__all__ = ["CHECKPOINT", "Recipe", "build", "evaluate"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The shipped checkpoint."""


def _silent(stage: str, step: int, steps: int, loss: float) -> None:
    pass


def build(
    out: Path,
    *,
    seed: int = 0,
    layers: int = 10,
    hidden: int = 128,
    recipe: Recipe | None = None,
    threads: int = 1,
    texts: int = 4000,
    scenes: int = 192,
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Train the demo target, write it to the folder `out` and return its scores on `scenes` scenes.

    The tokenizer learns from `texts` conversations. A `hidden` that is no multiple of 64 is a ValueError.
    The same seed, sizes, recipe and number of threads give the same model on the same machine.
    """
    if hidden % 64:
        raise ValueError(
            f"hidden must be a multiple of 64, not {hidden}: heads are 32 wide and share keys in pairs"
        )
    recipe = recipe or Recipe()
    began = time.process_time()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # vanishing gradients would otherwise slow matrix products a hundredfold
    try:
        torch.manual_seed(seed)
        tokenizer = train_tokenizer(seed, texts=texts)
        tokens = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
        settings = config(tokens, vocabulary=VOCABULARY, layers=layers, hidden=hidden)
        model = new_model(settings, first=recipe.first)
        ends = [tokens["<|im_end|>"], tokens["<|endoftext|>"]]
        start = tokens["<|endoftext|>"]
        model.generation_config = GenerationConfig(bos_token_id=start, pad_token_id=start, eos_token_id=ends)
        model.train()
        warm_vision(model, tokenizer, recipe, random.Random(f"demo vision {seed}"), progress)
        train(model, tokenizer, recipe, random.Random(f"demo training {seed}"), progress)
        seconds = time.process_time() - began
        out.mkdir(parents=True, exist_ok=True)
        model.eval().save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2) + "\n")
        scores = evaluate(out, n=scenes)
        sizes = {"layers": layers, "hidden": hidden, "seed": seed, "threads": threads}
        card = _card(scores, recipe, **sizes, seconds=seconds)
        (out / "README.md").write_text(card, encoding="utf-8")
        return scores
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


_PREPROCESSOR = {
    "min_pixels": 4 * (MERGE * PATCH) ** 2,
    "max_pixels": SIDE_PIXELS**2,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": IMAGE_MEAN,
    "image_std": IMAGE_STD,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}


def _card(
    scores: dict[str, Any],
    recipe: Recipe,
    *,
    seed: int,
    layers: int,
    hidden: int,
    threads: int,
    seconds: float,
) -> str:
    """The model card."""
    kinds = list(scores["facts"])
    rows = {"all image tasks": scores["facts"], **scores["tasks"]}
    rows |= {"second round": scores["second_round"], "imagined, no image": scores["text_only"]}
    table = [f"| answers | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name, row in rows.items():
        table.append(f"| {name} | {' | '.join(f'{row[kind]:.3f}' for kind in kinds)} |")
    lines = "\n".join(table)
    knobs = "\n".join(f"- `{name}`: {value}" for name, value in asdict(recipe).items())
    tokens = scores["tokens"]
    return f"""# vlmdistill demo target

A small `Qwen2_5_VLForConditionalGeneration` ({layers} layers, hidden {hidden}, one vision block, fp32),
trained from scratch by `vlmdistill target build-demo` on boards of nine cells that hold four to seven
shapes. It answers questions about such an 84 x 84 image, and text-only questions about shapes and
colours, in one or two rounds and in English. It is the ground on which drafters for speculative decoding
are compared, and has no other use.

## Scores

Share of the facts right in greedy answers on {scores["n"]} held-out scenes, seen by no training:

{lines}

An answer has {tokens["least"]} to {tokens["most"]} tokens, {tokens["mean"]:.0f} on average.
Another image changes {scores["swap"]:.1%} of the answers.

## Recipe

Seed {seed}, {threads} thread(s), {seconds / 60:.0f} minutes of CPU time. `training.py` explains the knobs:

{knobs}

The vision tower is trained first: it turns a cell into the sum of the embeddings of the words for it. The
language model then learns to say one fact a cell, whole items, and conversations, mixed in gradually; a
second run polishes it, with more weight on the words that an image decides.

## Limits

Images are scaled down to at most 84 x 84 pixels; images other than these boards are beyond it. Scenes are
split by a hash of their content, so evaluation scenes are new to the target; text-only questions other than
to imagine a picture are few, and training saw them all.
"""
