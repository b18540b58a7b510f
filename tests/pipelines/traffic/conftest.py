"""Lines of logs as servers write them, for the embedded target."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.targets.loading import load_encoder
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.traffic.harvest import Harvest, harvest
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.workspace.workspace import Workspace

NOW = 1.76e9  # seconds since 1970
ANSWER = "There are {} red circles on the black board, and a small star in the north."
REASONING = "I look at the board in the north."


@pytest.fixture(scope="session")
def encoder() -> TargetModel:
    return load_encoder("demo-small")


def data_url(seed: int) -> str:
    return tiny.data_url(tiny.picture(84, 84, seed))


def asked(question: str, image: str | None = None, **more: Any) -> dict[str, Any]:
    """The body of a request."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if image:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {
        "model": "demo-small",
        "messages": [{"role": "user", "content": content}],
        **more,
    }


def said(
    text: str, finish: str = "stop", usage: dict[str, int] | None = None, **choice: Any
) -> dict[str, Any]:
    """The body of a response."""
    message = {"role": "assistant", "content": text}
    found: dict[str, Any] = {
        "choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}]
    }
    return found if usage is None else {**found, "usage": usage}


def exchange(number: int, **more: Any) -> dict[str, Any]:
    """A line of a log, of its own question, with tokens from the text alone."""
    question = f"What do you see on board number {number}?"
    line = {
        "time": NOW + number,
        "request": asked(question),
        "response": said(ANSWER.format(number)),
    }
    return {**line, **more}


def write(file: Path, lines: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def thought(answer: str, **fields: Any) -> dict[str, Any]:
    """The body of a response whose message has other fields, too."""
    response = said(answer)
    response["choices"][0]["message"].update(fields)
    return response


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.of("demo-small", tmp_path / "runs")


def taken(workspace: Workspace, lines: list[Any], **how: Any) -> Harvest:
    """The harvest of one log, with a policy."""
    file = write(workspace.root.parents[1] / "log.jsonl", lines)
    return harvest(workspace, [str(file)], Policy(**how))


def workspace_of(target: TargetModel) -> Workspace:
    """A workspace beside a target, whose responses are of the target's mode of thinking."""
    workspace = Workspace.of(str(target.folder), target.folder.parent / "runs")
    workspace.responses.mkdir(parents=True)
    sampling = asdict(SamplingSettings(thinking=target.thinking))
    settings = {"sampling": sampling, "filters": asdict(Filters())}
    dataset.write_settings(workspace.responses, settings)
    return workspace
