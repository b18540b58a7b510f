"""Deletion by age: nothing of a forgotten request is in any file of the workspace, and the rest is whole."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.made_up import evaluation, measured, shown
from tests.pipelines.traffic.conftest import ANSWER, asked, data_url, said, write
from tests.stores.samples import make, sample
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.traffic.forget import forget
from vlmdistill.pipelines.traffic.harvest import MEDIA, harvest
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store

DAY = 86400
NOW = time.time()
OLD, NEW = NOW - 40 * DAY, NOW - DAY


def lines(word: str, when: float, seed: int) -> list[dict[str, Any]]:
    """Three requests, two of them with an image, that name a word."""
    return [
        {
            "time": when + number,
            "request": asked(f"Is {word} on board {number}?", data_url(seed + number) if number else None),
            "response": said(ANSWER.format(f"{word} and {number}")),
        }
        for number in range(3)
    ]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Old and new traffic, a prompt that is none, a store with samples of both times, and an evaluation."""
    here = Workspace.of("demo", tmp_path / "runs")
    own = [{"messages": [{"role": "user", "content": "Mine?"}]}]
    import_prompts([str(write(tmp_path / "own.jsonl", own))], here.prompts)
    write(tmp_path / "log" / "1.jsonl", lines("Zebedee", OLD, 0))
    write(tmp_path / "log" / "2.jsonl", lines("Florence", NEW, 10))
    assert harvest(here, [str(tmp_path / "log")]).kept == 6
    store = make(Path(here.features))
    with store.writer("a") as writer:
        for number, when in enumerate((OLD, OLD, NEW)):
            writer.add(sample(number, time=int(when)))
    return here


def holding(folder: Path, content: bytes) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and content in file.read_bytes()]


def raw(workspace: Workspace, word: str) -> list[str]:
    """Files that name a word, those that are compressed included."""
    found = holding(workspace.root, word.encode())
    if any(word in str(vars(one)) for one in prompt_table.read(workspace.prompts)):
        found.append("prompts")
    if any(word in row.text for row in dataset.read(workspace.responses)):
        found.append("responses")
    return found


def test_what_is_too_old_is_in_no_file_and_all_else_is(workspace: Workspace) -> None:
    keys = {one.key: one.time for one in prompt_table.read(workspace.prompts)}
    old = next(key for key, when in keys.items() if when and when < NEW - DAY)
    showing = evaluation("hawk", measured(shown=(shown(old, prompt="Is Zebedee there?"),)))
    file = records.new_file(workspace.reports, "hawk")
    records.write(showing, file)
    (workspace.reports / "index.html").write_text("Zebedee")
    state = sample(0).features[Feature("hidden", "text")].tobytes()[:64]
    images = [one.read_bytes() for one in (workspace.root / MEDIA).iterdir()]
    assert holding(workspace.root, state)
    assert len(images) == 4
    assert raw(workspace, "Zebedee")
    tried = forget(workspace, 30 * DAY, dry_run=True)
    assert raw(workspace, "Zebedee")
    done = forget(workspace, 30 * DAY)
    assert replace(tried, dry_run=False, bytes=done.bytes, before=done.before) == done
    assert (done.samples, done.responses, done.prompts, done.media, done.reports) == (2, 3, 3, 2, 1)
    assert not raw(workspace, "Zebedee")
    assert not holding(workspace.root, state)
    assert sum(bool(holding(workspace.root, image)) for image in images) == 2
    assert raw(workspace, "Florence")
    assert {one.time is None for one in prompt_table.read(workspace.prompts)} == {True, False}
    assert len(prompt_table.read(workspace.prompts)) == 4
    assert Store.open(workspace.features).keys() == {"k0002"}
    assert not verify(workspace.features).damage
    left = records.read(file)
    assert [at.shown for at in left.temperatures] == [()] * len(left.temperatures)
    assert [at.prompts for at in left.temperatures] == [at.prompts for at in showing.temperatures]
    assert forget(workspace, 30 * DAY).prompts == 0


def test_stopped_before_the_prompts_are_written_it_is_done_by_the_next_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prompt_table, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            forget(workspace, 30 * DAY)
    assert forget(workspace, 30 * DAY).prompts == 3
    assert not raw(workspace, "Zebedee")


def test_the_command_says_what_it_deleted(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], failing: Callable[..., str]
) -> None:
    where = ["--model", "demo", "--runs", str(workspace.root.parent)]
    assert main(["forget", "--older-than", "1w", "--dry-run", *where]) == 0
    assert "prompts    3" in capsys.readouterr().out
    assert "30d" in failing("forget", "--older-than", "a while", *where)
