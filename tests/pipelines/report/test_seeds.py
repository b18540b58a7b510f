"""Drafters trained with several seeds: one row with mean, spread and a paired test, in every format."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import pytest

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, measured, with_cpu_share
from tests.pipelines.report.html_page import Page
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.records import (
    Evaluation,
    Leak,
    Measurement,
    Training,
)
from vlmdistill.pipelines.bench.statistics import difference, figures
from vlmdistill.pipelines.report.comparison import rank
from vlmdistill.pipelines.report.page import make
from vlmdistill.pipelines.report.seeds import OverSeeds, over_seeds
from vlmdistill.pipelines.workspace.workspace import Workspace

CALLS = {"good": (30, 31, 32, 31, 30), "bad": (36, 37, 37, 36, 36)}
LUCKY = (30, 40, 31, 36, 30)


def of_seed(calls: int) -> Measurement:
    """Decoding with so many calls: fewer are better."""
    return measured(calls=calls, accepted=104 - calls, passes=calls)


def trained(seed: int, **changes: Any) -> Training:
    return replace(Training(steps=300, samples=4200, seed=seed), **changes)


def of_drafter(name: str, seed: int, at: Measurement) -> Evaluation:
    return evaluation(f"{name}.s{seed}", at, drafter=name, training=trained(seed))


def compared(**calls: tuple[int, ...]) -> OverSeeds:
    """Drafters by the calls at each of their seeds."""
    evaluations = [
        of_drafter(name, seed, of_seed(count))
        for name, of_seeds in calls.items()
        for seed, count in enumerate(of_seeds)
    ]
    (ranking,) = rank(evaluations)
    (of_temperature,) = over_seeds(ranking.results)
    return of_temperature


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_no_speedup_is_the_best_beside_one_that_is_not_known(share: float) -> None:
    """At one seed other programs had most of the CPU."""
    evaluations = [
        replace(
            of_drafter("good", 0, with_cpu_share(measured(speedup=1.6), share)),
            measured="2026-01-01 00:00:00",
        ),
        of_drafter("good", 1, with_cpu_share(measured(speedup=1.6), 1.0)),
        of_drafter("bad", 0, with_cpu_share(measured(speedup=1.2), 1.0)),
        of_drafter("bad", 1, with_cpu_share(measured(speedup=1.2), 1.0)),
    ]
    (ranking,) = rank(evaluations)
    (found,) = over_seeds(ranking.results)
    best = found.best("speedup")
    assert (best.name if best else None) == ("good" if share == 1.0 else None)
    assert found.best("tau") is not None


def test_digits_that_are_no_number_are_no_seed() -> None:
    """Python reads no number of so many digits."""
    names = ("good.s1", "good.s" + 5000 * "1")
    (ranking,) = rank([evaluation(name, of_seed(30)) for name in names])
    assert over_seeds(ranking.results) == []


def test_a_row_has_the_mean_and_the_spread_over_seeds() -> None:
    found = compared(**CALLS)
    assert [drafter.name for drafter in found.drafters] == ["good", "bad"]
    taus = [figures(of_seed(calls)).tau for calls in CALLS["bad"]]
    bad = found.drafters[1]
    assert bad.mean("tau") == pytest.approx(mean(taus))
    assert bad.spread("tau") == pytest.approx(stdev(taus))
    assert bad.text("tau") == f"{mean(taus):.2f} ± {stdev(taus):.2f}"


def test_drafters_are_paired_by_seed_and_marked_only_beyond_luck() -> None:
    found = compared(**CALLS, lucky=LUCKY)
    good, _, bad = found.drafters
    assert found.best("tau") is good
    assert found.below_best(good, "tau") is None
    expected = difference(
        [of_seed(calls) for calls in CALLS["bad"]],
        [of_seed(calls) for calls in CALLS["good"]],
    )
    assert found.below_best(bad, "tau") == expected
    marked = {
        row[0]: row[4].endswith("*") for row in _rows(found) if row[4] != "the best"
    }
    assert marked == {"lucky": False, "bad": True}


def test_too_few_shared_seeds_have_no_interval() -> None:
    found = compared(good=CALLS["good"], bad=CALLS["bad"][:3])
    below = found.below_best(found.drafters[1], "tau")
    assert below is not None
    assert below.interval is None
    assert not _rows(found)[1][4].endswith("*")


def test_a_drafter_of_one_seed_is_no_row() -> None:
    (ranking,) = rank([evaluation("x.s0", of_seed(30)), evaluation("y", of_seed(30))])
    assert over_seeds(ranking.results) == []


def test_a_doubted_seed_is_not_compared() -> None:
    """A drafted token that agrees and was not accepted: acceptance is broken."""
    evaluations = [
        of_drafter(
            name,
            seed,
            measured(calls=30, accepted=74, passes=30, missed=int(name == "odd")),
        )
        for name in ("odd", "fair")
        for seed in range(5)
    ]
    (ranking,) = rank(evaluations)
    (found,) = over_seeds(ranking.results)
    rows = {row[0]: row for row in _rows(found)}
    assert rows["odd"][4:] == ["-", "-", "-"]
    assert rows["fair"][4] == "the best"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"training": trained(0)}, "a seed twice"),
        ({"weights": "0" * 64}, "the same weights twice"),
        ({"training": trained(4, steps=3000)}, "not trained alike"),
        ({"training": trained(4, samples=9000)}, "not trained alike"),
        ({"drafter": "msd"}, "not trained alike"),
        ({"tree": "chain-7"}, "not trained alike"),
        ({"settings": "another learning rate"}, "not trained alike"),
    ],
)
def test_drafters_that_do_not_differ_by_their_seed_alone_have_no_mean(
    changes: dict[str, Any], why: str
) -> None:
    """One drafter five times would have no spread, and lead by any difference."""
    facts: list[dict[str, Any]] = [
        {"training": trained(seed), "weights": f"{seed}" * 64, "settings": "same"}
        for seed in range(4)
    ]
    last = {"training": trained(4), "weights": "4" * 64, "settings": "same"}
    facts.append({**last, **changes})
    evaluations = [
        evaluation(f"x.s{seed}", of_seed(30), **{"drafter": "sparrow", **of_seed_facts})
        for seed, of_seed_facts in enumerate(facts)
    ]
    (ranking,) = rank(evaluations)
    (found,) = over_seeds(ranking.results)
    (row,) = _rows(found)
    assert row[2:] == [f"5: {why}", "-", "-", "-", "-"]


def test_a_mean_of_wrong_counts_is_not_shown() -> None:
    seen = Leak(samples=9, prompts=tuple(f"k{number}" for number in range(20)))
    evaluations = [
        evaluation(
            f"x.s{seed}",
            of_seed(30),
            drafter="sparrow",
            training=trained(seed),
            leak=seen if seed == 2 else Leak(samples=9),
        )
        for seed in range(3)
    ]
    (ranking,) = rank(evaluations)
    (found,) = over_seeds(ranking.results)
    (row,) = _rows(found)
    assert row[2:] == ["3", "-", "-", "-", "-"]


def _rows(found: OverSeeds) -> list[list[str]]:
    from vlmdistill.pipelines.report.seeds import seed_rows

    return seed_rows([found])


@pytest.fixture
def printed(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What `report` prints of the seeds of two drafters."""
    for name, calls in CALLS.items():
        for seed, count in enumerate(calls):
            facts = {"drafter": name, "training": trained(seed)}
            save(f"{name}.s{seed}", of_seed(count), **facts)

    def report(*options: str) -> str:
        where = ["--runs", str(workspace.root.parent)]
        assert main(["report", *where, *options]) == 0
        return capsys.readouterr().out

    return report


def test_page_text_and_markdown_have_the_same_row(
    printed: Callable[..., str], workspace: Workspace
) -> None:
    taus = [figures(of_seed(calls)).tau for calls in CALLS["bad"]]
    number = f"{mean(taus):.2f} ± {stdev(taus):.2f}"
    text = printed()
    (row,) = [line for line in text.splitlines() if line.startswith("bad  ")]
    assert number in row
    assert row.rstrip().count("*") == 1
    assert re.search(rf"\| bad \| 0 \| 5 \| {number} \|", printed("--format", "md"))
    page = Page(make(workspace).page)
    assert number in page.text.partition("Over seeds")[2]


def test_a_paper_has_a_row_for_each_method_and_none_for_a_seed(
    printed: Callable[..., str],
) -> None:
    table = printed("--format", "latex").partition(r"\begin{table}")[2]
    bad, good = re.findall(r"^(?:good|bad).*$", table, re.MULTILINE)
    if bad.startswith("good"):
        bad, good = good, bad
    assert ".s0" not in table
    assert "bad (5 seeds)" in bad
    assert r"\textbf" in good
    assert r"{\scriptsize$\pm$ 0.0" in bad
    assert r"\textsuperscript{*}" in bad
    assert r"\textsuperscript{*}" not in good


def test_seeds_that_are_selected_are_some_of_all(
    printed: Callable[..., str], workspace: Workspace
) -> None:
    """So that the best ones cannot be chosen without a word."""
    some = ("--where", "drafter != 'bad.s1' and drafter != 'bad.s2'")
    text = printed(*some)
    (row,) = [line for line in text.splitlines() if line.startswith("bad  ")]
    assert "3 of 5" in row
    assert "bad (3 of 5 seeds)" in printed("--format", "latex", *some)
    rows = json.loads(printed("--json", *some))["seeds"]
    assert {row["of_seeds"] for row in rows} == {5}


def test_json_has_the_numbers(printed: Callable[..., str]) -> None:
    seeds = json.loads(printed("--json"))["seeds"]
    bad = next(row for row in seeds if row["drafter"] == "bad")
    assert bad["seeds"] == [0, 1, 2, 3, 4]
    assert bad["rates"]["tau"]["below_best"]["interval"]["high"] < 0
