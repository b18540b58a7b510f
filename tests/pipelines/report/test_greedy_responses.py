"""A target that has changed between two evaluations: nothing of the earlier one is relied on, anywhere."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, measured, responding
from tests.pipelines.report.html_page import Page
from vlmdistill.pipelines.bench.records import Measurement, Training, write
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.changes import compare
from vlmdistill.pipelines.report.comparison import rank
from vlmdistill.pipelines.report.latex import latex
from vlmdistill.pipelines.report.page import make, read
from vlmdistill.pipelines.report.results import DrafterResult
from vlmdistill.pipelines.report.seeds import over_seeds
from vlmdistill.pipelines.workspace.workspace import Workspace

DOUBT = "in a later run: the target has changed"


def first_ones(response: str, count: int, **changes: Any) -> Measurement:
    """With such a response of plain decoding to so many prompts; "usual" to the others."""
    usual, own = responding("usual", **changes), responding(response, **changes)
    return replace(own, prompts=(*own.prompts[:count], *usual.prompts[count:]))


def doubted(workspace: Workspace, drafter: str) -> list[bool]:
    """Whether the counts of its last evaluation are in doubt: in the report, `status` and `explain`."""
    of_status = selection.last_of_each(workspace.reports)[drafter]
    in_report = selection.latest(workspace.reports, workspace.model).drafter_results
    of_report = [result for result in in_report if result.drafter == drafter]
    return [_doubted(results) for results in (of_report, of_status)]


def _doubted(results: list[DrafterResult]) -> bool:
    (is_doubted,) = {DOUBT in str(result.wrong_counts) for result in results}
    for result in results:
        assert is_doubted == (DOUBT in str(result.no_speedup))
        assert is_doubted == result.count_label.endswith(" (in doubt)")
    return is_doubted


@pytest.mark.parametrize(
    ("later", "count", "is_doubted"),
    [
        ({}, 24, True),
        ({}, 25, True),
        ({}, 12, True),
        ({"threads": 2}, 24, True),
        ({"hardware": "another CPU"}, 24, True),
        ({"compiled": True}, 24, True),
        ({"max_new_tokens": 128}, 24, False),
        ({"thinking": "on"}, 24, False),
        ({"dtype": "bfloat16"}, 24, False),
    ],
)
def test_counts_of_a_target_that_has_changed_are_in_doubt(
    later: dict[str, Any],
    count: int,
    is_doubted: bool,
    workspace: Workspace,
    save: Save,
) -> None:
    """Whatever else the later run was asked, if greedy responses do not depend on it."""
    save("eagle2", responding("before"), measured="2025-05-05 05:05:05")
    save("sparrow", responding("now", count=count, shown=()), **later)
    assert doubted(workspace, "eagle2") == [is_doubted, is_doubted]
    assert doubted(workspace, "sparrow") == [False, False]
    assert ("eagle2 (in doubt)" in Page(make(workspace).page).text) == is_doubted


def test_a_run_between_is_not_forgotten(workspace: Workspace, save: Save) -> None:
    """The last run of the other drafter has no greedy response."""
    save("eagle2", responding("before"), measured="2025-05-05 05:05:05")
    save("sparrow", responding("now"), stem="a")
    sampled = measured(1.0, shown=())
    save("sparrow", sampled, stem="b", measured="2026-02-02 03:04:05")
    assert doubted(workspace, "eagle2") == [True, True]


@pytest.mark.parametrize(
    ("dtype", "later", "different", "is_doubted"),
    [
        ("float32", {}, 4, False),
        ("float32", {}, 5, True),
        ("float32", {"hardware": "another"}, 12, False),
        ("float32", {"hardware": "another"}, 13, True),
        ("bfloat16", {}, 12, False),
        ("bfloat16", {}, 13, True),
        ("bfloat16", {"threads": 2}, 24, False),
    ],
)
def test_rounding_is_no_change_of_the_target(
    dtype: str,
    later: dict[str, Any],
    different: int,
    is_doubted: bool,
    workspace: Workspace,
    save: Save,
) -> None:
    """In half precision, other threads change most responses."""
    before = first_ones("rounded", different)
    save("eagle2", before, measured="2025-05-05 05:05:05", dtype=dtype)
    save("sparrow", responding("usual"), dtype=dtype, **later)
    assert doubted(workspace, "eagle2") == [is_doubted, is_doubted]


def test_a_later_run_that_fails_its_audits_puts_none_in_doubt(
    workspace: Workspace, save: Save
) -> None:
    """Its drafter may have changed the target in memory."""
    save("eagle2", responding("before"), measured="2025-05-05 05:05:05")
    save("sparrow", responding("broken", passes=31))
    lossy = responding("lossy", own=["different"] * 24)
    save("hass", lossy, measured="2026-02-02 03:04:05")
    assert doubted(workspace, "eagle2") == [False, False]
    save("wren", responding("now"), measured="2026-01-01 03:04:05")
    assert doubted(workspace, "eagle2") == [True, True]


def test_two_workspaces_of_different_targets_do_not_compare(tmp_path: Path) -> None:
    def side(name: str, response: str) -> Path:
        file = tmp_path / name / "reports" / "sparrow.json"
        write(evaluation("sparrow", responding(response)), file)
        return tmp_path / name

    before, after = side("a", "before"), side("b", "now")
    assert [drafter.name for drafter in compare(before, before).drafters] == ["sparrow"]
    for changes in (compare(before, after), compare(after, before)):
        assert changes.refused == {"sparrow": ["other responses of plain decoding"]}
        assert changes.drafters == []


def test_a_seed_of_another_target_is_in_no_mean(workspace: Workspace) -> None:
    evaluations = [
        evaluation(
            f"good.s{seed}",
            responding(response),
            drafter="good",
            training=Training(steps=300, samples=4200, seed=seed),
            measured=f"2026-01-0{1 + seed} 03:04:05",
        )
        for seed, response in enumerate(("before", "now", "now"))
    ]
    for some, is_known in ((evaluations[1:], True), (evaluations, False)):
        (ranking,) = rank(some)
        (compared,) = over_seeds(ranking.results)
        (drafter,) = compared.drafters
        assert compared.known(drafter, "tau") == is_known
    for of_seed in evaluations:
        write(of_seed, workspace.reports / f"{of_seed.name}.json")
    _, _, table = latex(read(workspace)).partition(r"\toprule")
    (row,) = re.findall(r"^good \(3 seeds\).*$", table, re.MULTILINE)
    assert not re.search(r"\d\.\d", row)
