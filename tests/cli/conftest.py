"""A folder to work in, and commands that fail in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmdistill.cli.main import main


def dialogues(count: int, name: str = "talks.json") -> str:
    """Write a file of so many questions here; its name."""
    rows = [{"conversations": [{"from": "human", "value": f"Question {i}"}]} for i in range(count)]
    Path(name).write_text(json.dumps(rows))
    return name


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a file of three dialogues."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMDISTILL_RUNS", raising=False)
    dialogues(3)
    return tmp_path


@pytest.fixture
def failing(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that fails; the one line on stderr."""

    def fail(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.strip().splitlines()
        assert line.startswith("error: ")
        return line

    return fail
