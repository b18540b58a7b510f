"""Builds an embedded target, from scratch or from a smaller one: tokenizer, model, scores and model card."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

from examples.demo_target.evaluation import (
    LENGTHS,
    evaluate,
    evaluate_clips,
    evaluate_loaded,
    load,
)
from examples.demo_target.growth import grow
from examples.demo_target.lessons import CLIPS, GROWN, Recipe
from examples.demo_target.model import (
    IMAGE_MEAN,
    IMAGE_STD,
    IMAGE_TOKENS,
    MAX_POSITIONS,
    MERGE,
    PATCH,
    config,
    new_model,
)
from examples.demo_target.scoring import CLIP_FACTS, FACTS
from examples.demo_target.text import SPECIALS, VOCABULARY, train_tokenizer
from examples.demo_target.training import Course, Progress, train, train_grown
from vlmdistill.drafters.training import cpu
from vlmdistill.pipelines.demo.scenes import SIDE_PIXELS
from vlmdistill.pipelines.targets.embedded import EMBEDDED

__all__ = ["CLIPS", "RECIPES", "Recipe", "build", "evaluate"]

RECIPES = {"demo-small": Recipe(), "demo": GROWN, "demo-video": CLIPS}
"""By embedded target."""
STATE = "training.pt"
"""The file with the state of an unfinished build."""


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

    It is scored on `scenes` scenes and, if the recipe has clips, on `clips` clips at several `lengths` in
    visual tokens, by responses of at most `max_new_tokens`. The tokenizer is trained on `texts`
    conversations. The same seed, sizes, recipe and number of threads give the same model on the same machine.
    An interrupted build resumes from `out` and repeats about `save_every` steps at most. ValueError on a
    `hidden` that is not a multiple of 64, and on fewer than two `layers`. TargetError if `out` has an
    unfinished build with another seed or recipe.
    """
    if layers < 2:
        raise ValueError(
            f"layers must be at least 2, not {layers}: a head is wired in each of the first two"
        )
    if hidden % 64:
        raise ValueError(
            f"hidden must be a multiple of 64, not {hidden}: heads are 64 wide"
        )
    recipe = recipe or Recipe()
    began = time.process_time()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(
        True
    )  # denormal gradients would slow down matrix products a hundredfold
    try:
        torch.manual_seed(seed)
        tokenizer = train_tokenizer(seed, texts=texts)
        tokens = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
        settings = config(tokens, vocabulary=VOCABULARY, layers=layers, hidden=hidden)
        model = new_model(settings, tokenizer)
        ends = [tokens["<|im_end|>"], tokens["<|endoftext|>"]]
        start = tokens["<|endoftext|>"]
        model.generation_config = GenerationConfig(
            bos_token_id=start, pad_token_id=start, eos_token_id=ends
        )
        model.train()
        out.mkdir(parents=True, exist_ok=True)
        train(Course(model, tokenizer, recipe, seed, progress, out / STATE, save_every))
        seconds = time.process_time() - began
        model.eval().save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name, settings in {
            "preprocessor": _PREPROCESSOR,
            "video_preprocessor": _VIDEO,
        }.items():
            (out / f"{name}_config.json").write_text(
                json.dumps(settings, indent=2) + "\n"
            )
        loaded = load(out)
        scores = evaluate_loaded(
            *loaded, n=scenes, seed=0, max_new_tokens=max_new_tokens
        )
        if recipe.clips:
            scores["clips"] = evaluate_clips(
                *loaded, n=clips, lengths=lengths, max_new_tokens=max_new_tokens
            )
        video = " demo-video" if recipe.clips else ""
        origin = f"trained from scratch by `python -m examples.demo_target{video}`"
        text = card(
            scores,
            recipe,
            model=model,
            origin=origin,
            seed=seed,
            threads=threads,
            seconds=seconds,
        )
        (out / "README.md").write_text(f"{text}\n{_TAUGHT}", encoding="utf-8")
        (out / STATE).unlink(missing_ok=True)
        return scores
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


def build_grown(
    out: Path,
    *,
    base: Path = EMBEDDED["demo-small"],
    seed: int = 0,
    recipe: Recipe = GROWN,
    threads: int = 1,
    scenes: int = 192,
    max_new_tokens: int = 256,
    save_every: int = 100,
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Make a target of twice the width and layers of `base`, polish it, and write it in bfloat16.

    Before it is polished, it computes what `base` computes. See `build`.
    """
    began, before = time.process_time(), torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        small, tokenizer, _ = load(base)
        model = grow(small, seed).train()
        out.mkdir(parents=True, exist_ok=True)
        with cpu.tuned():
            train_grown(
                Course(
                    model, tokenizer, recipe, seed, progress, out / STATE, save_every
                )
            )
        seconds = time.process_time() - began
        for part in (
            model.config,
            model.config.text_config,
            model.config.vision_config,
        ):
            part.dtype = torch.bfloat16
        model.eval().bfloat16().save_pretrained(out)
        for file in _SAME:
            shutil.copy(base / file, out)
        scores = evaluate_loaded(
            *load(out), n=scenes, seed=0, max_new_tokens=max_new_tokens
        )
        origin = f"grown from `{base.name}` by `python -m examples.demo_target demo`"
        text = card(
            scores,
            recipe,
            model=model,
            origin=origin,
            seed=seed,
            threads=threads,
            seconds=seconds,
        )
        (out / "README.md").write_text(f"{text}\n{_GROWN}", encoding="utf-8")
        (out / STATE).unlink(missing_ok=True)
        return scores
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


_SAME = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)
_LIMITS = """## Limits

Images and frames of videos are scaled down to at most 84 x 84 pixels. The target understands only images and
videos of these boards. Scenes and clips are split by a hash of their content, so those of the evaluation are
new to the target. Text-only questions, except those to imagine a picture, are few, and all occur in training.
"""
_TAUGHT = f"""\
The vision tower is trained first: it maps a cell to the sum of the embeddings of the words for it. Two heads
of the language model are set by hand to look words up (`wiring.py`) and stay frozen.

The language model then learns single facts of cells, whole items, and conversations, mixed in gradually; a
second run polishes it, with more weight on the words that depend on the image.

{_LIMITS}"""
_GROWN = f"""\
Every state is held twice, each second layer is new, and before training the logits are those of the smaller
target (`growth.py`); more steps of the run that polished it then use the room. It exists because a step of
the smaller target costs about as much in calls as in products, as no target of practical size does.

{_LIMITS}"""
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
    model: Qwen2_5_VLForConditionalGeneration,
    origin: str,
    seed: int,
    threads: int,
    seconds: float,
) -> str:
    """The model card of a checkpoint with these scores, up to its recipe; `seconds` of CPU time."""
    rows = {"all image tasks": scores["facts"], **scores["tasks"]}
    rows |= {
        "second round": scores["second_round"],
        "imagined, no image": scores["text_only"],
    }
    film = ""
    if clips := scores.get("clips"):
        lengths = {
            f"{tokens:,} ({row['n']} clips)": row
            for tokens, row in clips["lengths"].items()
        }
        counts = clips["tokens"]
        film = f"""
The same on {clips["n"]} held-out clips of {next(iter(clips["lengths"]))} visual tokens. Position, colour,
shape and size are facts about the start or the end; event, path and item are what happens after two, four and
six seconds, in which cells, and to which shape.

{_table("task", clips["tasks"], CLIP_FACTS)}

A response has {counts["least"]} to {counts["most"]} tokens, {counts["mean"]:.0f} on average.
Another clip changes {clips["swap"]:.1%} of the responses.

The same clips at higher and higher sampling rates, all tasks together:

{_table("visual tokens", lengths, CLIP_FACTS)}

Most training videos are short. Long ones are simulated by weighted tokens: attending to n equal tokens is
attending to one whose score is higher by log n. Clips have eight seconds; the color of a strip in each frame
shows its time.
"""
    text, dtype = model.config.text_config, str(model.dtype).removeprefix("torch.")
    videos = (
        "about a video of eight seconds in which shapes appear, vanish and move, "
        if clips
        else ""
    )
    knobs = "\n".join(f"- `{name}`: {value}" for name, value in asdict(recipe).items())
    tokens = scores["tokens"]
    return f"""# vlmdistill demo target

A small `Qwen2_5_VLForConditionalGeneration` ({text.num_hidden_layers} layers, hidden {text.hidden_size},
one vision block, {dtype}), {origin}
on boards of nine cells that contain shapes. It responds to questions about an 84 x 84 image of such a board,
{videos}and to text-only
questions about shapes and colors, in one or two rounds and in English.

Its only use is to compare drafters for speculative decoding.

## Scores

Share of correct facts in greedy responses on {scores["n"]} held-out scenes:

{_table("task", rows, FACTS)}

A response has {tokens["least"]} to {tokens["most"]} tokens, {tokens["mean"]:.0f} on average.
Another image changes {scores["swap"]:.1%} of the responses.
{film}
## Recipe

Seed {seed}, {threads} thread(s), {seconds / 60:.0f} minutes of CPU time.
`lessons.py` in `examples/demo_target` explains the settings:

{knobs}
"""


def _table(corner: str, rows: dict[str, dict[str, float]], kinds: Sequence[str]) -> str:
    """Shares by row and kind in Markdown; a dash for a missing one."""
    lines = [f"| {corner} | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name, row in rows.items():
        cells = (f"{row[kind]:.3f}" if kind in row else "-" for kind in kinds)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
