"""A folder to work in."""

import json
from pathlib import Path

import pytest


def dialogues(count: int, name: str = "talks.json") -> str:
    """Write a file of so many questions here; its name."""
    rows = [
        {"conversations": [{"from": "human", "value": f"Question {i}"}]}
        for i in range(count)
    ]
    Path(name).write_text(json.dumps(rows))
    return name


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a file of three dialogues."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMDISTILL_RUNS", raising=False)
    dialogues(3)
    return tmp_path
