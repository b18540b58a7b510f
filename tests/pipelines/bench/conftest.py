"""Fixtures for the tests of evaluations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.made_up import evaluation
from vlmdistill.pipelines.bench.records import Measurement, write
from vlmdistill.pipelines.workspace.workspace import Workspace

Save = Callable[..., Path]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.of("demo", tmp_path / "runs")


@pytest.fixture
def save(workspace: Workspace) -> Save:
    """Writes an evaluation into the workspace."""

    def made(name: str = "sparrow", /, *temperatures: Measurement, stem: str = "", **changes: Any) -> Path:
        file = workspace.reports / f"{stem or name}.json"
        write(evaluation(name, *temperatures, **changes), file)
        return file

    return made
