"""What no verdict rests on has none in any format: page, table, LaTeX, CSV, JSON and status agree."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import (
    PLAIN,
    TIMED,
    in_sequence,
    measured,
    shown,
    with_cpu_share,
)
from tests.pipelines.bench.test_plants import (
    calibration,
    changed,
    drafted,
    drops_bonus,
)
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.records import Leak, Measurement, PromptResult
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.report.results import Results
from vlmdistill.pipelines.report.tables import COLUMNS, divided, result_rows
from vlmdistill.pipelines.workspace.workspace import Workspace

Plant = Callable[[Save, Measurement], object]


def of_two_sets(at: Measurement) -> Measurement:
    """The first half of the prompts is of another set."""
    half = len(at.prompts) // 2
    prompts = [
        replace(one, dataset="a" if number < half else "b")
        for number, one in enumerate(at.prompts)
    ]
    return replace(at, prompts=tuple(prompts))


def missed_in_one_set(one: PromptResult) -> PromptResult:
    return drops_bonus(one) if one.dataset == "a" else one


def slower_plain(one: PromptResult) -> PromptResult:
    seconds = 1.2 * one.plain.seconds
    decode_seconds = seconds - one.plain.prefill_seconds
    plain = replace(one.plain, seconds=seconds, decode_seconds=decode_seconds)
    return replace(one, plain=plain)


def beside(save: Save, at: Measurement) -> None:
    """Two records of a run have other plain decoding."""
    save("wren", at)
    save("msd", in_sequence(changed(at, slower_plain)))


def responding(at: Measurement, response: str) -> Measurement:
    return changed(
        at, lambda one: replace(one, plain=replace(one.plain, response=response))
    )


def other_target(save: Save, at: Measurement) -> None:
    """A later run, whose baseline is slow, has other responses of plain decoding."""
    save("wren", responding(at, "before"))
    slow = {"calibrations": (calibration(step_ratio=1.5),)}
    save("msd", responding(at, "now"), measured="2026-02-02 03:04:05", **slow)


PLANTS: dict[str, Plant] = {
    "counts": lambda save, at: save(
        "wren", changed(at, lambda one: drafted(one, passes=5))
    ),
    "baseline": lambda save, at: save(
        "wren", at, calibrations=(calibration(step_ratio=1.5),)
    ),
    "training": lambda save, at: save(
        "wren", at, leak=Leak(samples=9, prompts=tuple(f"k{n}" for n in range(20)))
    ),
    "one set": lambda save, at: save("wren", changed(at, missed_in_one_set)),
    "lossy": lambda save, at: save(
        "wren", changed(at, lambda one: drafted(one, check="different"))
    ),
    "beside": beside,
    "target": other_target,
}


OF_SPEED = ("baseline", "beside")
"""Plants that leave the counts as they are."""


class Formats:
    """What each format says of wren."""

    def __init__(self, workspace: Workspace, capsys: Any) -> None:
        where = ("--runs", str(workspace.root.parent))
        Path(workspace.drafter("wren")).mkdir(parents=True)

        def said(*command: str) -> str:
            capsys.readouterr()
            assert main([*command, *where]) == 0
            return str(capsys.readouterr().out)

        self.answer = answers(read(workspace).groups[0])[0]
        code = said("report", "--format", "latex").splitlines()
        (self.latex,) = (line for line in code if line.startswith("wren"))
        rows = csv.DictReader(io.StringIO(said("report", "--format", "csv")))
        self.csv = [row for row in rows if row["drafter"] == "wren"]
        facts = json.loads(said("report", "--format", "json"))
        self.json = [row for row in facts["rows"] if row["name"] == "wren"]
        page = read(workspace)
        charts = page.views[0].charts
        self.charts = [
            series.name
            for drawn in charts.values()
            for chart in drawn
            for series in chart.series
            if series.name.startswith("wren")
        ]
        self.speeds = [row[0] for row in result_rows(page.groups[0].results)]
        self.parts = [row[0] for row in divided(page.groups[0].results)]
        self.page = page.html
        (self.status,) = json.loads(said("status", "--json"))["drafters"]


@pytest.mark.parametrize("plant", PLANTS)
def test_no_format_has_a_verdict_that_another_withdraws(
    plant: str, workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = shown(pieces=TIMED, plain=PLAIN)
    PLANTS[plant](save, of_two_sets(measured(noise=0.05, shown=(timed,))))
    found = Formats(workspace, capsys)
    assert found.answer.level == "none"
    assert not found.answer.columns
    assert "textbf" not in found.latex
    assert ("dag" in found.latex) == (plant not in OF_SPEED)
    assert "1.5" not in found.latex  # the speedup
    assert all(row["not_ranked"] for row in [*found.csv, *found.json])
    assert found.status["speedup"] is None
    counts = ("wren (in doubt)", "wren") if plant in OF_SPEED else ("wren (in doubt)",)
    assert set(found.charts) == {*counts}
    assert "wren (in doubt)" in found.speeds
    assert {"wren (in doubt)", "msd (in doubt)"} >= {*found.parts}
    assert "</svg> wren (in doubt)" in found.page
    # The table of acceptance has counts alone.
    assert ("</svg> wren</th>" in found.page) == (plant in OF_SPEED)
    assert ("</svg> wren <small>T" in found.page) == (plant in OF_SPEED)
    assert "<option>wren (in doubt), T = 0</option>" in found.page
    assert (found.status["tau"] is None) == (plant not in OF_SPEED)


def test_all_formats_have_the_verdict_of_an_honest_evaluation(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save("wren", of_two_sets(measured(noise=0.05)))
    found = Formats(workspace, capsys)
    assert found.answer.level == "sure"
    assert found.latex.count("textbf") == 6
    assert not any(row["not_ranked"] for row in [*found.csv, *found.json])
    assert {*found.charts, *found.speeds, *found.parts} == {"wren"}
    assert "(in doubt)" not in found.page
    assert found.status["speedup"] == pytest.approx(1.5, rel=0.02)


def beside_others(share: float, own_share: float | None = None) -> Measurement:
    """A measurement that had this share of the CPU, of which the drafter had its own."""
    return with_cpu_share(of_two_sets(measured(noise=0.05)), share, own_share)


def test_no_speedup_beside_other_programs_is_bold(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save("wren", beside_others(0.3))
    found = Formats(workspace, capsys)
    assert found.answer.level == "none"
    assert found.latex.count("textbf") == 3  # tau
    assert "1.5" not in found.latex
    assert all(row["not_ranked"] for row in [*found.csv, *found.json])
    assert found.status["speedup"] is None
    shown = Results(selection.read(workspace.reports).drafter_results)
    assert "most of the CPU" in shown._repr_html_()
    assert "most of the CPU" in repr(shown[0])


def test_in_no_format_do_seconds_of_other_programs_count(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    """With them it is 1.5."""
    save("wren", beside_others(0.72, 0.8))
    found = Formats(workspace, capsys)
    assert found.latex.count("textbf") == 6
    for row in [*found.json, found.status]:
        assert row["speedup"] == pytest.approx(1.35, rel=0.02)
    assert {*found.charts} == {"wren", "wren (busy CPU)"}
    results = read(workspace).groups[0].results
    table = dict(zip(COLUMNS, result_rows(results)[0], strict=True))
    assert table["drafter"] == "wren (busy CPU)"
    parts = divided(results)
    shown = Results(selection.read(workspace.reports).drafter_results)
    assert main(["status", "--runs", str(workspace.root.parent)]) == 0
    assert main(["eval", "--list", "--runs", str(workspace.root.parent)]) == 0
    printed = capsys.readouterr().out
    tables = [table["speedup"], str(parts)]
    for text in [found.latex, printed, shown._repr_html_(), repr(shown[0]), *tables]:
        assert re.search(r"\b1\.(3[2-9]|40)\b", text)
        without_intervals = re.sub(r"\([^)]*\)", "", text)
        assert not re.search(r"\b1\.(4[5-9]|5[0-5])\b", without_intervals)
    page = found.page.partition("<h2")[2]
    assert not re.search(r"\b1\.(4[5-9]|5[0-4])\u00d7", page)
