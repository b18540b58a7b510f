import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from examples.demo_target.evaluation import (
    evaluate_clips,
    evaluate_loaded,
    load,
    responses,
)
from examples.demo_target.scoring import CLIP_FACTS, FACTS
from tests.thorough import count
from vlmdistill.pipelines.demo import chats
from vlmdistill.pipelines.demo.scenes import draw, random_scene
from vlmdistill.pipelines.targets.embedded import EMBEDDED

pytestmark = pytest.mark.slow

FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # several threads only get in each other's way at this size
    yield
    torch.set_num_threads(threads)
    logging.enable_progress_bar()


@pytest.fixture(scope="module", params=EMBEDDED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def scores(name: str) -> dict[str, Any]:
    return evaluate_loaded(*load(EMBEDDED[name]), n=count(12, 24), seed=1, more=False)


@pytest.fixture(scope="module")
def of_clips() -> dict[str, Any]:
    return evaluate_clips(
        *load(EMBEDDED["demo-video"]), n=count(10, 20), seed=1, lengths=(36, 504)
    )


@pytest.mark.parametrize("folder", EMBEDDED.values())
def test_the_folder_is_complete_and_small(folder: Path) -> None:
    of_videos = (
        {"video_preprocessor_config.json"}
        if folder == EMBEDDED["demo-video"]
        else set()
    )
    assert {path.name for path in folder.iterdir()} == FILES | of_videos
    limit = 30_000_000 if folder == EMBEDDED["demo"] else 12_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit


@pytest.mark.parametrize("kind", FACTS)
def test_nine_in_ten_facts_of_images_are_correct(
    scores: dict[str, Any], kind: str
) -> None:
    assert scores["facts"][kind] >= 0.9


def test_responses_are_long_and_depend_on_the_image(scores: dict[str, Any]) -> None:
    assert 60 <= scores["tokens"]["mean"] <= 200
    assert scores["swap"] >= 0.9


@pytest.mark.parametrize("kind", CLIP_FACTS)
@pytest.mark.parametrize("tokens", [36, 504])
def test_nine_in_ten_facts_of_clips_are_correct_at_every_sampling_rate(
    of_clips: dict[str, Any], tokens: int, kind: str
) -> None:
    least = (
        0.75 if kind == "position" else 0.9
    )  # at the end it forgets some of what has changed
    assert of_clips["lengths"][tokens][kind] >= least


def test_responses_depend_on_the_clip(of_clips: dict[str, Any]) -> None:
    assert of_clips["swap"] >= 0.9


def test_text_only_prompts_get_a_complete_response(name: str) -> None:
    model, tokenizer, processor = load(EMBEDDED[name])
    rng = random.Random(0)
    talks = [(chats.chat(rng, "evaluation")[0][0],) for _ in range(8)]
    generated = responses(model, tokenizer, processor, talks, max_new_tokens=256)
    assert all(40 <= len(ids) < 256 for ids in generated)


def test_sampling_varies_and_unusual_prompts_get_a_response() -> None:
    model, tokenizer, processor = load(EMBEDDED["demo-small"])
    image = draw(random_scene(random.Random(5), "evaluation"))
    torch.manual_seed(0)
    prompt = "Describe the image. Please answer with at least 1000 words."
    generated = responses(
        model,
        tokenizer,
        processor,
        [(prompt,)] * 4,
        [image] * 4,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    assert len({tuple(ids) for ids in generated}) == 4
    odd = responses(model, tokenizer, processor, [("What is this? 日本語",)], [image])
    assert re.search(r"[a-z]+ [a-z]+", tokenizer.decode(odd[0]))
