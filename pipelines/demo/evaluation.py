"""Greedy answers of the demo target on held-out scenes, scored by fact."""

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from vlmdistill.pipelines.demo import wording
from vlmdistill.pipelines.demo.chats import imagine
from vlmdistill.pipelines.demo.model import IMAGE_TOKENS
from vlmdistill.pipelines.demo.scenes import Scene, draw, random_scene
from vlmdistill.pipelines.demo.scoring import FACTS, score


def load(
    checkpoint: Path,
) -> tuple[Qwen2_5_VLForConditionalGeneration, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil]:
    """The model, tokenizer and image processor of a checkpoint folder."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint).eval()
    return (
        model,
        AutoTokenizer.from_pretrained(checkpoint),
        Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
    )


@torch.inference_mode()
def answers(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    talks: Sequence[Sequence[str]],
    images: Sequence[Image.Image] | None = None,
    *,
    max_new_tokens: int = 256,
    **sampling: Any,
) -> list[list[int]]:
    """New token ids for each talk, without end and padding; greedy unless `sampling` says otherwise.

    A talk is a question, or a question, its answer, the next question and so on. Images are 84 x 84 pixels
    and belong to the first question.
    """
    image = "" if images is None else f"<|vision_start|>{'<|image_pad|>' * IMAGE_TOKENS}<|vision_end|>"
    prompts = [
        tokenizer.apply_chat_template(
            [
                {"role": "assistant" if turn % 2 else "user", "content": text if turn else image + text}
                for turn, text in enumerate(talk)
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for talk in talks
    ]
    batch = dict(tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left"))
    batch["mm_token_type_ids"] = (batch["input_ids"] == model.config.image_token_id).int()
    if images is not None:
        batch |= dict(processor(images=list(images), return_tensors="pt"))
    sampling = {"do_sample": False, **sampling}
    output = model.generate(**batch, max_new_tokens=max_new_tokens, **sampling)
    ends = set(model.generation_config.eos_token_id)
    return [_until(row, ends) for row in output[:, batch["input_ids"].shape[1] :].tolist()]


def _until(ids: list[int], ends: set[int]) -> list[int]:
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


def evaluate(checkpoint: Path, n: int = 96, seed: int = 0) -> dict[str, Any]:
    """Score greedy answers on `n` scenes of the evaluation split.

    Returns `n`, `facts` (share right by kind, over all tasks), `tasks` (the same by task), `second_round`
    (the same for a second question about the image), `text_only` (the same for pictures told in words),
    `tokens` (least, mean and most tokens an answer) and `swap` (share of the answers that change when the
    image is another one).
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
) -> dict[str, Any]:
    """`evaluate` of a model in memory; `swap` and `more` (second round, text only) may be left out."""
    rng = random.Random(f"demo evaluation {seed}")
    scenes = [random_scene(rng, "evaluation") for _ in range(n)]
    tasks = [wording.TASKS[index % len(wording.TASKS)] for index in range(n)]
    asked = [wording.ask(scene, task, rng) for scene, task in zip(scenes, tasks, strict=True)]
    questions = [(question,) for question, _ in asked]
    images = [draw(scene) for scene in scenes]
    told = answers(model, tokenizer, processor, questions, images)
    texts = tokenizer.batch_decode(told)
    counts = [len(ids) for ids in told]
    result: dict[str, Any] = {
        "n": n,
        "facts": _shares(texts, scenes, tasks),
        "tasks": {task: _shares(texts, scenes, tasks, only=task) for task in dict.fromkeys(tasks)},
        "tokens": {"least": min(counts), "mean": statistics.fmean(counts), "most": max(counts)},
    }
    if swap:
        others = answers(model, tokenizer, processor, questions, images[1:] + images[:1])
        result["swap"] = statistics.fmean(a != b for a, b in zip(told, others, strict=True))
    if more:
        some = slice(max(n // 3, 1))
        later = tasks[1:] + tasks[:1]
        talks = [
            (*first, wording.ask(scene, task, rng)[0])
            for first, scene, task in zip(asked[some], scenes[some], later[some], strict=True)
        ]
        told = answers(model, tokenizer, processor, talks, images[some])
        result["second_round"] = _shares(tokenizer.batch_decode(told), scenes[some], later[some])
        told = answers(model, tokenizer, processor, [imagine(scene, rng)[:1] for scene in scenes[some]])
        result["text_only"] = _shares(tokenizer.batch_decode(told), scenes[some], ["describe"] * len(told))
    return result


def _shares(
    texts: Sequence[str], scenes: Sequence[Scene], tasks: Sequence[str], *, only: str | None = None
) -> dict[str, float]:
    rows = zip(texts, scenes, tasks, strict=True)
    scores = [score(text, scene, task) for text, scene, task in rows if only in (None, task)]
    return {kind: sum(s[kind][0] for s in scores) / sum(s[kind][1] for s in scores) for kind in FACTS}
