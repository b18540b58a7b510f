"""A log of requests to the embedded target, and a workspace with a drafter that knows nothing yet."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.drafters import synthetic
from tests.pipelines.traffic.conftest import asked, data_url, said, write
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.demo import scenes
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace

TASKS = (
    "Describe the image.",
    "List the shapes in the image.",
    "How many shapes are in the image?",
)


@pytest.fixture(scope="module")
def target() -> VisionLanguageTarget:
    return load("demo-small")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, target: VisionLanguageTarget) -> Path:
    """72 requests about scenes and 24 about shapes, with the responses of the target."""
    folder = tmp_path_factory.mktemp("log")
    rng, lines = random.Random(1), []
    questions: list[tuple[str, Any]] = [
        (
            f"{rng.choice(TASKS)}{' Please.' * (number % 2)}",
            scenes.draw(scenes.random_scene(rng, "drafter")),
        )
        for number in range(72)
    ]
    for number in range(24):
        item = rng.choice(scenes.random_scene(rng).items)
        questions.append(
            (f"Tell me a story about {number} {item.colour} {item.shape}s.", None)
        )
    for start in range(0, len(questions), 32):
        some = questions[start : start + 32]
        encoded = [target.encode(_messages(question, one)) for question, one in some]
        answers = target.generate(
            encoded, max_new_tokens=40, temperature=0.0, top_p=1.0, seed=0
        )
        for at, ((question, one), response) in enumerate(
            zip(some, answers, strict=True), start
        ):
            if one:
                one.save(folder / f"{at}.png")
            request = asked(question, f"{at}.png" if one else None)
            body = said(
                response.text,
                response.finish,
                token_ids=[int(token) for token in response.ids],
            )
            lines.append({"time": 1.7e9 + at, "request": request, "response": body})
    write(folder / "log.jsonl", lines)
    return folder


def _messages(question: str, image: Any) -> list[dict[str, Any]]:
    shown = [{"type": "image", "image": image}] if image else []
    return [{"role": "user", "content": [*shown, {"type": "text", "text": question}]}]


@pytest.fixture
def workspace(tmp_path: Path, target: VisionLanguageTarget) -> Workspace:
    """With eight old prompts to evaluate, and `hawk`, a drafter of random weights."""
    return fresh(tmp_path, target)


def fresh(tmp_path: Path, target: VisionLanguageTarget, old: int = 8) -> Workspace:
    here = Workspace.of("demo-small", tmp_path / "runs")
    rows = [
        {"messages": asked("Which shapes do you see?", data_url(number))["messages"]}
        for number in range(old)
    ]
    import_prompts(
        [str(write(tmp_path / "old.jsonl", rows))],
        here.prompts,
        choices=Choices(split="eval"),
    )
    file = synthetic.save("eagle2", here.drafter("hawk"), target=target) / "config.json"
    found = json.loads(file.read_text())
    for stage in found["config"][
        "stages"
    ]:  # as of a training on a view that this workspace does not have
        stage["view"] = "filtered"
    file.write_text(json.dumps(found))
    return here
