"""Trainings and evaluations under way on the page, and the page that follows them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, measured
from tests.pipelines.report.html_page import Page, make
from tests.pipelines.workspace.conftest import on, runs
from tests.pipelines.workspace.disks import On
from vlmdistill.pipelines.bench.records import Training, write
from vlmdistill.pipelines.bench.unfinished import Decoded, Unfinished
from vlmdistill.pipelines.report import live as live_report
from vlmdistill.pipelines.report.live import LiveReport, PageVersion
from vlmdistill.pipelines.report.page import plot
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, StoreError

__all__ = ["on", "runs"]


def train(
    workspace: Workspace, name: str, steps: int, *more: dict[str, Any] | str
) -> Path:
    """Figures of a run of 400 steps in two stages; `more` are further lines."""
    lines: list[dict[str, Any] | str] = [
        {
            "step": step,
            "stage": "text" if step <= 200 else "images",
            "total": 400,
            "train/loss": 8 / step,
            "train/agreement/hop0": step / 400,
            "train/tokens_per_second": 500,
        }
        for step in range(1, steps + 1)
    ]
    file = workspace.drafter(f"{name}.training") / "metrics.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(
            one if isinstance(one, str) else f"{json.dumps(one)}\n"
            for one in [*lines, *more]
        )
    )
    return file


def validation(step: int, *shares: float) -> dict[str, Any]:
    hops = {f"held_out/agreement/hop{hop}": share for hop, share in enumerate(shares)}
    return {
        "step": step,
        "stage": "text",
        **hops,
        "held_out/predicted_tau": 1 + sum(shares),
    }


def decode(workspace: Workspace, prompts: int) -> None:
    """An evaluation of 48 prompts with two drafters, so far."""
    writer = Unfinished(workspace.reports, {"made": "up"})
    for number, one in enumerate(measured(count=prompts).prompts):
        results = {"sparrow": one, "wren": one}
        writer.add(
            Decoded(
                number=number,
                temperature=0,
                threads=1,
                results=results,
                shown={},
                of=48,
            )
        )


def drawn(page: Page) -> list[str]:
    return [label for label in page.attributes("aria-label", "svg") if label]


def live(version: PageVersion, tmp_path: Path) -> Page:
    file = tmp_path / "live.html"
    file.write_text(version.html, encoding="utf-8")
    return Page(file)


def test_curves_of_a_training_and_how_far_it_is(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow")
    train(
        workspace,
        "wren",
        300,
        validation(200, 0.9, 0.5),
        validation(300, 0.95, 0.6),
        '{"step": 301, "tr',
    )
    page = Page(make(workspace).page)
    assert (
        "Step 300 of 400, stage images; predicted tau 2.55; 500 tokens/s." in page.text
    )
    (loss,) = [label for label in drawn(page) if label.startswith("Loss of wren")]
    assert "loss: 6.00 to 0.03" in loss  # means of two steps
    (agreement,) = [
        label for label in drawn(page) if label.startswith("Agreement of wren")
    ]
    assert (
        "token 1: 90% 95%. token 2: 50% 60%. token 1 of batches: 0% to 75%" in agreement
    )


def test_a_finished_training_is_shown_with_its_evaluation(
    workspace: Workspace, save: Save
) -> None:
    one = evaluation("sparrow", training=Training(steps=400, samples=9, history=()))
    save("sparrow", training=one.training)
    train(workspace, "sparrow", 400)
    folder = workspace.drafter("sparrow")
    folder.mkdir()
    facts = {
        "format": 3,
        "drafter": "sparrow",
        "config": {},
        "target": {},
        "provenance": {},
    }
    (folder / "config.json").write_text(
        json.dumps({**facts, "training": {"steps": 400}})
    )
    page = Page(make(workspace).page)
    assert "Under way" not in page.text
    assert "400 steps on 9 samples" in page.text
    assert (
        len([label for label in drawn(page) if "sparrow during training" in label]) == 2
    )
    train(workspace, "sparrow", 100)  # again, with other settings
    page = Page(make(workspace).page)
    assert "Under way" in page.text
    assert "400 steps on 9 samples" in page.text  # of the one that was evaluated


def test_long_trainings_and_odd_figures_are_drawn(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    save("sparrow")
    odd = [
        '{"step": 5, "train/loss": 1e999}\n',
        '{"step": "x"}\n',
        "[]\n",
        '{"step": 6, "train/loss": "high"}\n',
    ]
    train(
        workspace,
        "wren",
        2000,
        *odd,
        *['{"step": 7, "train/agreement/hop9": "x", "train/loss": 1}\n'],
    )
    page = make(workspace)
    assert page.page.stat().st_size < 100_000
    assert "nan" not in page.html
    plot(page, tmp_path / "plots")
    assert (tmp_path / "plots" / "loss-of-wren-during-training.svg").exists()


def test_an_evaluation_under_way_has_figures_and_no_verdict(
    workspace: Workspace, tmp_path: Path
) -> None:
    decode(workspace, 12)
    page = live(LiveReport(workspace).version(), tmp_path)
    assert "12 of 48 prompts decoded" in page.text
    rows = [row for row in page.rows if row.get("prompts") == "12"]
    assert [row[""].strip() for row in rows] == ["sparrow", "wren"]
    assert all(row["speedup so far"].startswith("1.50\u00d7") for row in rows)
    assert "answer" not in page.attributes("class")


def test_the_page_changes_when_its_files_do(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    report = LiveReport(workspace)
    empty = report.version()
    assert "no evaluations" in live(empty, tmp_path).text
    assert report.version() is empty
    train(workspace, "wren", 10)
    begun = report.version()
    decode(workspace, 1)
    running = report.version()
    save("sparrow")
    ended = report.version()
    assert len({one.tag for one in (empty, begun, running, ended)}) == 4
    assert "Use sparrow" in live(ended, tmp_path).text
    assert "no evaluations" not in ended.html
    assert not (workspace.reports / "index.html").exists()


def test_a_damaged_record_is_named_and_what_was_shown_stays(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    save("sparrow")
    report = LiveReport(workspace)
    report.version()
    (workspace.reports / "odd.json").write_text("{}")
    os.mkfifo(workspace.reports / "pipe.json")
    page = live(report.version(), tmp_path)
    assert "odd.json" in page.text or "pipe.json" in page.text
    assert "Use sparrow" in page.text


def test_a_live_page_shows_what_is_selected(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no evaluations"):
        LiveReport(workspace, ["drafter = 'wren'"])
    save("sparrow")
    save("wren")
    assert (
        "sparrow"
        not in live(
            LiveReport(workspace, ["drafter = 'wren'"]).version(), tmp_path
        ).text
    )
    with pytest.raises(StoreError):
        LiveReport(workspace, ["colour = 'red'"])


def test_a_workspace_at_a_url_is_looked_at_again(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = on("here")
    report = LiveReport(here)
    assert "no evaluations" in report.version().html
    there = on("there")
    write(evaluation("sparrow"), there.reports / "sparrow.json")
    there.close()
    assert "no evaluations" in report.version().html  # within the minute
    monkeypatch.setattr(live_report, "EVERY", 0.0)
    assert "Use sparrow" in report.version().html
