"""Scores greedy responses of the demo target on held-out scenes and clips, by facts."""

import random
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from examples.demo_target.model import GRID, IMAGE_TOKENS
from examples.demo_target.model import patches as temporal_patches
from examples.demo_target.scoring import CLIP_FACTS, FACTS, score, score_clip
from examples.demo_target.slides import distinct
from examples.demo_target.text import placeholder
from vlmdistill.pipelines.demo import narration, wording
from vlmdistill.pipelines.demo.chats import imagine
from vlmdistill.pipelines.demo.clips import (
    PHASES,
    SECONDS,
    Clip,
    patches_for,
    random_clip,
)
from vlmdistill.pipelines.demo.scenes import Scene, draw, random_scene


def load(
    checkpoint: Path,
) -> tuple[
    Qwen2_5_VLForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
]:
    """The model, tokenizer and image processor of a checkpoint folder."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    ).eval()
    return (
        model,
        AutoTokenizer.from_pretrained(checkpoint),
        Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
    )


@torch.inference_mode()
def responses(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    talks: Sequence[Sequence[str]],
    images: Sequence[Image.Image] | None = None,
    *,
    clips: Sequence[Clip] | None = None,
    patches: int = PHASES,
    max_new_tokens: int = 256,
    **sampling: Any,
) -> list[list[int]]:
    """New token ids for each talk, without end and padding; greedy unless `sampling` says otherwise.

    A talk is a question, or a question, its response, the next question, and so on. Images are 84 x 84 pixels
    and belong to the first question; so do clips, `patches` temporal patches each.
    """
    shown: dict[str, Any] = {}
    seen = ""
    if images is not None:
        seen, shown = (
            placeholder(image_tokens=IMAGE_TOKENS),
            dict(processor(list(images), return_tensors="pt")),
        )
    elif clips is not None:
        seen, shown = (
            placeholder(video_tokens=IMAGE_TOKENS * patches),
            _film(clips, patches),
        )
    prompts = [
        tokenizer.apply_chat_template(
            [
                {
                    "role": "assistant" if turn % 2 else "user",
                    "content": text if turn else seen + text,
                }
                for turn, text in enumerate(talk)
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for talk in talks
    ]
    batch = dict(
        tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    )
    ids, config = batch["input_ids"], model.config
    batch["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (
        ids == config.video_token_id
    ).int()
    sampling = {"do_sample": False, **sampling}
    output = model.generate(**batch, **shown, max_new_tokens=max_new_tokens, **sampling)
    ends = set(model.generation_config.eos_token_id)
    return [_until(row, ends) for row in output[:, ids.shape[1] :].tolist()]


def _film(clips: Sequence[Clip], patches: int) -> dict[str, Tensor]:
    """The model inputs of clips, each with `patches` temporal patches."""
    pixels = []
    for clip in clips:
        pairs, which = distinct(clip, patches)
        pixels.append(temporal_patches(*zip(*pairs, strict=True))[which].flatten(0, 1))
    return {
        "pixel_values_videos": torch.cat(pixels),
        "video_grid_thw": torch.tensor([[patches, GRID, GRID]] * len(clips)),
        "second_per_grid_ts": torch.full((len(clips),), SECONDS / patches),
    }


def _until(ids: list[int], ends: set[int]) -> list[int]:
    stop = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


def evaluate(checkpoint: Path, n: int = 96, seed: int = 0) -> dict[str, Any]:
    """Score greedy responses on `n` scenes of the evaluation split.

    Returns `n`, `facts` (share correct by kind, over all tasks), `tasks` (the same by task), `second_round`
    (the same for a second question about the image), `text_only` (the same for pictures described in
    words), `tokens` (least, mean and most tokens of a response) and `swap` (share of the responses that
    change with another image).
    """
    return evaluate_loaded(*load(checkpoint), n=n, seed=seed)


def evaluate_loaded(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    *,
    n: int,
    seed: int,
    swap: bool = True,
    more: bool = True,
    max_new_tokens: int = 256,
) -> dict[str, Any]:
    """`evaluate` of a model in memory; `swap` and `more` (second round, text only) can be omitted."""
    rng = random.Random(f"demo evaluation {seed}")
    scenes = [random_scene(rng, "evaluation") for _ in range(n)]
    tasks = [wording.TASKS[index % len(wording.TASKS)] for index in range(n)]
    asked = [
        wording.ask(scene, task, rng) for scene, task in zip(scenes, tasks, strict=True)
    ]
    questions = [(question,) for question, _ in asked]
    images = [draw(scene) for scene in scenes]
    say = partial(responses, model, tokenizer, processor, max_new_tokens=max_new_tokens)
    generated = say(questions, images)
    texts = tokenizer.batch_decode(generated)
    counts = [len(ids) for ids in generated]
    result: dict[str, Any] = {
        "n": n,
        "facts": _shares(texts, scenes, tasks),
        "tasks": {
            task: _shares(texts, scenes, tasks, only=task)
            for task in dict.fromkeys(tasks)
        },
        "tokens": {
            "least": min(counts),
            "mean": statistics.fmean(counts),
            "most": max(counts),
        },
    }
    if swap:
        others = say(questions, images[1:] + images[:1])
        result["swap"] = statistics.fmean(
            a != b for a, b in zip(generated, others, strict=True)
        )
    if more:
        some = slice(max(n // 3, 1))
        later = tasks[1:] + tasks[:1]
        talks = [
            (*first, wording.ask(scene, task, rng)[0])
            for first, scene, task in zip(
                asked[some], scenes[some], later[some], strict=True
            )
        ]
        generated = say(talks, images[some])
        result["second_round"] = _shares(
            tokenizer.batch_decode(generated), scenes[some], later[some]
        )
        generated = say([imagine(scene, rng)[:1] for scene in scenes[some]])
        result["text_only"] = _shares(
            tokenizer.batch_decode(generated),
            scenes[some],
            ["describe"] * len(generated),
        )
    return result


def _shares(
    texts: Sequence[str],
    scenes: Sequence[Scene],
    tasks: Sequence[str],
    *,
    only: str | None = None,
) -> dict[str, float]:
    rows = zip(texts, scenes, tasks, strict=True)
    scores = [
        score(text, scene, task) for text, scene, task in rows if only in (None, task)
    ]
    return {
        kind: sum(s[kind][0] for s in scores) / sum(s[kind][1] for s in scores)
        for kind in FACTS
    }


LENGTHS = (36, 144, 504, 1512, 6012, 25020)
"""Visual tokens of a clip in the evaluation; the shortest is a temporal patch a phase."""
_BATCH_TOKENS = 6000


def evaluate_clips(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    *,
    n: int,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    max_new_tokens: int = 256,
) -> dict[str, Any]:
    """Score greedy responses on `n` clips of the evaluation split, by task, and by length in visual tokens.

    Returns `n`, `tasks` (share right by kind, at the first of the lengths), `lengths` (how many clips, `n`,
    and the shares), `tokens` (least, mean and most tokens of a response) and `swap` (share of the responses
    that change when the clip is another one). Long clips are costly: of them there are fewer.
    """
    rng = random.Random(f"demo clip evaluation {seed}")
    clips = [random_clip(rng, "evaluation") for _ in range(n)]
    tasks = [narration.TASKS[index % len(narration.TASKS)] for index in range(n)]
    questions = [
        (narration.ask(clip, task, rng)[0],)
        for clip, task in zip(clips, tasks, strict=True)
    ]
    result: dict[str, Any] = {"n": n, "lengths": {}}

    def generated(some: int, length: int, shift: int = 0) -> list[list[int]]:
        shown = clips[shift:] + clips[:shift]
        size = max(_BATCH_TOKENS // length, 1)
        parts = [
            slice(start, min(start + size, some)) for start in range(0, some, size)
        ]
        say = partial(
            responses, model, tokenizer, processor, max_new_tokens=max_new_tokens
        )
        generated = (
            say(questions[part], clips=shown[part], patches=patches_for(length))
            for part in parts
        )
        return [ids for some_ids in generated for ids in some_ids]

    for length in lengths:
        some = min(max(n * 500 // max(length, 500), len(narration.TASKS)), n)
        found = generated(some, length)
        texts = tokenizer.batch_decode(found)
        scores = [score_clip(*row) for row in zip(texts, clips, tasks, strict=False)]
        result["lengths"][length] = {"n": some, **_clip_shares(scores)}
        if length == lengths[0]:
            counts = [len(ids) for ids in found]
            result["tokens"] = {
                "least": min(counts),
                "mean": statistics.fmean(counts),
                "most": max(counts),
            }
            result["tasks"] = {
                task: _clip_shares(
                    [
                        score
                        for score, its in zip(scores, tasks, strict=True)
                        if its == task
                    ]
                )
                for task in dict.fromkeys(tasks)
            }
            others = generated(some, length, 1)
            result["swap"] = statistics.fmean(
                a != b for a, b in zip(found, others, strict=True)
            )
    return result


def _clip_shares(scores: Sequence[dict[str, tuple[int, int]]]) -> dict[str, float]:
    """Share right by kind; kinds that none of the tasks asks for are left out."""
    sums = {
        kind: [sum(score[kind][side] for score in scores) for side in (0, 1)]
        for kind in CLIP_FACTS
    }
    return {kind: right / total for kind, (right, total) in sums.items() if total}
