"""Trainings and evaluations under way on the page."""

import json
from pathlib import Path
from typing import Any

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, measured
from tests.pipelines.report.html_page import Page, make
from tests.pipelines.report.test_agreement import beside_others
from vlmdistill.pipelines.bench.records import Measurement, Training
from vlmdistill.pipelines.bench.unfinished import Decoded, Unfinished
from vlmdistill.pipelines.report.page import plot
from vlmdistill.pipelines.workspace.workspace import Workspace


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


def decode(workspace: Workspace, at: Measurement) -> None:
    """An evaluation of 48 prompts with two drafters, so far."""
    writer = Unfinished(workspace.reports, {"made": "up"})
    for number, one in enumerate(at.prompts):
        results = {"sparrow": one, "wren": one}
        writer.add(
            Decoded(
                number=number,
                temperature=0,
                threads=1,
                trees=dict.fromkeys(results, "chain-4"),
                results=results,
                shown={},
                of=48,
            )
        )


def drawn(page: Page) -> list[str]:
    return [label for label in page.attributes("aria-label", "svg") if label]


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
    workspace: Workspace, save: Save
) -> None:
    save("sparrow")
    decode(workspace, measured(count=12))
    page = Page(make(workspace).page)
    assert "12 of 48 prompts decoded" in page.text
    rows = [row for row in page.rows if row.get("prompts") == "12"]
    assert [row[""].strip() for row in rows] == ["sparrow", "wren"]
    assert all(row["speedup so far"].startswith("1.50\u00d7") for row in rows)
    under_way = page.source[page.source.index('id="under-way"') :]
    assert 'class="answer"' not in under_way[: under_way.index("</section>")]


def test_speedups_under_way_beside_other_programs_are_in_doubt(
    workspace: Workspace, save: Save
) -> None:
    save("msd")
    decode(workspace, beside_others(0.3))
    page = Page(make(workspace).page)
    rows = [row for row in page.rows if "speedup so far" in row]
    names = [row[""].strip() for row in rows]
    assert names == ["sparrow (in doubt)", "wren (in doubt)"]
