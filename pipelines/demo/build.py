"""Build an embedded target: tokenizer, model, scores and model card, from nothing but this package."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from vlmdistill.pipelines.demo.evaluation import LENGTHS, evaluate, evaluate_clips, evaluate_loaded, load
from vlmdistill.pipelines.demo.lessons import CLIPS, Recipe
from vlmdistill.pipelines.demo.model import (
    IMAGE_MEAN,
    IMAGE_STD,
    IMAGE_TOKENS,
    MAX_POSITIONS,
    MERGE,
    PATCH,
    config,
    new_model,
)
from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS
from vlmdistill.pipelines.demo.scoring import CLIP_FACTS, FACTS
from vlmdistill.pipelines.demo.text import SPECIALS, VOCABULARY, train_tokenizer
from vlmdistill.pipelines.demo.training import Course, Progress, train

__all__ = ["CLIPS", "RECIPES", "Recipe", "build", "evaluate"]

RECIPES = {"demo": Recipe(), "demo-video": CLIPS}
"""By embedded target."""
STATE = "training.pt"
"""Where an unfinished build keeps its state."""


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
    clips: int = 100,
    lengths: Sequence[int] = LENGTHS,
    max_new_tokens: int = 256,
    save_every: int = 200,
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Train the demo target, write it to the folder `out` and return its scores.

    It is scored on `scenes` scenes and, where the recipe has any, on `clips` clips in several `lengths` of
    visual tokens, by answers of at most `max_new_tokens`. The tokenizer learns from `texts` conversations.
    The same seed, sizes, recipe and number of threads give the same model on the same machine. A build that
    was stopped goes on from `out`, from at most some `save_every` steps before. ValueError: a `hidden` that
    is no multiple of 64, fewer than two `layers`, or an unfinished build in `out` of another seed or recipe.
    """
    if layers < 2:
        raise ValueError(f"layers must be at least 2, not {layers}: a head is wired in each of the first two")
    if hidden % 64:
        raise ValueError(f"hidden must be a multiple of 64, not {hidden}: heads are 64 wide")
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
        model = new_model(settings, tokenizer)
        ends = [tokens["<|im_end|>"], tokens["<|endoftext|>"]]
        start = tokens["<|endoftext|>"]
        model.generation_config = GenerationConfig(bos_token_id=start, pad_token_id=start, eos_token_id=ends)
        model.train()
        out.mkdir(parents=True, exist_ok=True)
        train(Course(model, tokenizer, recipe, seed, progress, out / STATE, save_every))
        seconds = time.process_time() - began
        model.eval().save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name, settings in {"preprocessor": _PREPROCESSOR, "video_preprocessor": _VIDEO}.items():
            (out / f"{name}_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        loaded = load(out)
        scores = evaluate_loaded(*loaded, n=scenes, seed=0, max_new_tokens=max_new_tokens)
        if recipe.clips:
            scores["clips"] = evaluate_clips(*loaded, n=clips, lengths=lengths, max_new_tokens=max_new_tokens)
        sizes = {"layers": layers, "hidden": hidden, "seed": seed, "threads": threads}
        (out / "README.md").write_text(card(scores, recipe, **sizes, seconds=seconds), encoding="utf-8")
        return scores
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


_LEAST, _MOST = 4 * (MERGE * PATCH) ** 2, SIDE_PIXELS**2
_SHARED = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": IMAGE_MEAN,
    "image_std": IMAGE_STD,
    "processor_class": "Qwen2_5_VLProcessor",
}
_PREPROCESSOR = {
    "min_pixels": _LEAST,
    "max_pixels": _MOST,
    **_SHARED,
    "image_processor_type": "Qwen2VLImageProcessor",
}
_VIDEO = {
    "size": {"shortest_edge": _LEAST, "longest_edge": _MOST},
    "fps": 2.0,
    "min_frames": 4,
    "max_frames": 2 * MAX_POSITIONS // IMAGE_TOKENS,
    **_SHARED,
    "video_processor_type": "Qwen2VLVideoProcessor",
}


def card(
    scores: dict[str, Any],
    recipe: Recipe,
    *,
    seed: int,
    layers: int,
    hidden: int,
    threads: int,
    seconds: float,
) -> str:
    """The model card of a checkpoint with these scores, which took so many seconds of CPU time."""
    rows = {"all image tasks": scores["facts"], **scores["tasks"]}
    rows |= {"second round": scores["second_round"], "imagined, no image": scores["text_only"]}
    film = ""
    if clips := scores.get("clips"):
        lengths = {f"{tokens:,} ({row['n']} clips)": row for tokens, row in clips["lengths"].items()}
        told = clips["tokens"]
        film = f"""
The same on {clips["n"]} held-out clips of {next(iter(clips["lengths"]))} visual tokens. Position to size are
those of the shapes at the start or the end; event, path and item are what happens after two, four and six
seconds, in which cells and to which shape.

{_table("answers", clips["tasks"], CLIP_FACTS)}

An answer has {told["least"]} to {told["most"]} tokens, {told["mean"]:.0f} on average.
Another clip changes {clips["swap"]:.1%} of the answers.

The same clips, sampled more and more often, all tasks together:

{_table("visual tokens", lengths, CLIP_FACTS)}

Most of the videos of the training are short. What long ones are like is learnt from tokens that stand for
many: attention to a token that is there n times is attention to one whose score is greater by log n. Clips
have eight seconds; each frame tells its time by the colour of a strip.
"""
    video = " demo-video" if clips else ""
    videos = "about a video of eight seconds in which shapes appear, vanish and move, " if clips else ""
    knobs = "\n".join(f"- `{name}`: {value}" for name, value in asdict(recipe).items())
    tokens = scores["tokens"]
    return f"""# vlmdistill demo target

A small `Qwen2_5_VLForConditionalGeneration` ({layers} layers, hidden {hidden}, one vision block, fp32),
trained from scratch by `vlmdistill target build-demo{video}`
on boards of nine cells that hold shapes. It answers questions about an 84 x 84 image of such a board,
{videos}and text-only
questions about shapes and colours, in one or two rounds and in English. It is the ground on which drafters
for speculative decoding are compared, and has no other use.

## Scores

Share of the facts right in greedy answers on {scores["n"]} held-out scenes, seen by no training:

{_table("answers", rows, FACTS)}

An answer has {tokens["least"]} to {tokens["most"]} tokens, {tokens["mean"]:.0f} on average.
Another image changes {scores["swap"]:.1%} of the answers.
{film}
## Recipe

Seed {seed}, {threads} thread(s), {seconds / 60:.0f} minutes of CPU time. `lessons.py` explains the knobs:

{knobs}

The vision tower is trained first: it turns a cell into the sum of the embeddings of the words for it. Two
heads of the language model are wired to look words up (`wiring.py`) and stay as they are. It then learns to
say one fact a cell, whole items, and conversations, mixed in gradually; a second run polishes it, with more
weight on the words that an image decides.

## Limits

Images are scaled down to at most 84 x 84 pixels, and so are the frames of videos; images and videos other
than these boards are beyond it. Scenes and clips are split by a hash of their content, so those of the
evaluation are new to the target; text-only questions other than to imagine a picture are few, and training
saw them all.
"""


def _table(corner: str, rows: dict[str, dict[str, float]], kinds: Sequence[str]) -> str:
    """Shares by row and kind in Markdown; a dash where a row has none."""
    lines = [f"| {corner} | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name, row in rows.items():
        cells = (f"{row[kind]:.3f}" if kind in row else "-" for kind in kinds)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
