"""Fixtures for the tests of evaluations."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.made_up import evaluation
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.records import Measurement, write
from vlmdistill.pipelines.workspace.workspace import Workspace

Save = Callable[..., Path]


def held_out(model: str, folder: Path, contents: Sequence[Any]) -> Workspace:
    """A workspace of prompts to evaluate on, each a turn of such content."""
    rows = [
        {"messages": [{"role": "user", "content": content}]} for content in contents
    ]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = ("--split", "eval", "--model", model, "--runs", str(folder / "runs"))
    assert main(["prompts", str(folder / "asked.jsonl"), *where]) == 0
    return Workspace.of(model, folder / "runs")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.of("demo-small", tmp_path / "runs")


@pytest.fixture
def save(workspace: Workspace) -> Save:
    """Writes an evaluation into the workspace."""

    def made(
        name: str = "sparrow",
        /,
        *temperatures: Measurement,
        stem: str = "",
        **changes: Any,
    ) -> Path:
        file = workspace.reports / f"{stem or name}.json"
        write(evaluation(name, *temperatures, **changes), file)
        return file

    return made
