"""A folder to work in, and commands that fail in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmdistill.cli.main import main


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a file of three dialogues."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMDISTILL_RUNS", raising=False)
    rows = [{"conversations": [{"from": "human", "value": f"Question {i}"}]} for i in range(3)]
    (tmp_path / "talks.json").write_text(json.dumps(rows))
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
