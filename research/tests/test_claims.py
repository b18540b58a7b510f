"""The papers' claims: intervals over seeds and prompts, verdicts, and finished work that is not repeated."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from research import claims
from research.claimed import PAPERS, Claim
from research.trial import Cost, Measured, Run
from tests.pipelines.bench.made_up import drafted, measured
from vlmdistill.drafters.core.settings import flat
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.pipelines.bench.records import Measurement
from vlmdistill.pipelines.bench.statistics import Difference, Interval, difference
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import Split
from vlmdistill.pipelines.demo import files

CLAIMS = [claim for paper in PAPERS for claim in paper.claims]
MORE = next(claim for claim in CLAIMS if claim.expects == "more")
SAME = next(claim for claim in CLAIMS if claim.expects == "same")


def trained(
    rng: np.random.Generator, tau: float, prompts: int = 40, seeds: int = 5
) -> list[Measurement]:
    """Drafters of `seeds` seeds: the seed, the prompt for this setting, and the response all have luck."""
    of_prompt_P = 0.15 * rng.standard_normal(prompts)
    of_seed_S = 0.1 * rng.standard_normal(seeds)
    found = []
    for seed in of_seed_S:
        rate_P = tau + seed + of_prompt_P + 0.15 * rng.standard_normal(prompts)
        rows = zip(measured(count=prompts, shown=()).prompts, rate_P, strict=True)
        found.append(
            Measurement(
                temperature=0.0,
                prompts=tuple(
                    dataclasses.replace(
                        row, drafted=drafted(tokens=1 + round(1000 * rate), calls=1000)
                    )
                    for row, rate in rows
                ),
            )
        )
    return found


def test_a_known_difference_is_found_and_where_there_is_none_it_seldom_is() -> None:
    rng = np.random.default_rng(0)
    intervals = [
        difference(trained(rng, 3.0), trained(rng, 3.0)).interval for _ in range(150)
    ]
    wrong = sum(not one.low <= 0 <= one.high for one in intervals if one)
    assert wrong / 150 < 0.08
    found = [difference(trained(rng, 3.4), trained(rng, 3.0)) for _ in range(20)]
    assert sum(claims.judge(MORE, one) == "holds" for one in found) >= 18
    assert sum(claims.judge(MORE, one) == "does not hold" for one in found) == 0
    assert np.mean([one.mean for one in found]) == pytest.approx(0.4, abs=0.05)
    # A difference of every prompt and seed alike is known exactly.
    for one, other in ((3.5, 3.25), (3.25, 3.5)):
        arms = [
            [measured(tokens=1 + round(1000 * tau), calls=1000)] * 5
            for tau in (one, other)
        ]
        exact = difference(arms[0], arms[1])
        assert exact.interval is not None
        assert (
            exact.interval.low
            == pytest.approx(one - other)
            == pytest.approx(exact.interval.high)
        )


def test_the_luck_of_prompts_and_of_training_both_widen_the_interval() -> None:
    base = [measured(count=12, calls=1000, tokens=3001)] * 5
    by_seed = [
        measured(count=12, calls=1000, tokens=3001 + 200 * step) for step in range(5)
    ]
    rows = measured(count=12, calls=1000, tokens=3001).prompts
    uneven = tuple(
        dataclasses.replace(row, drafted=drafted(tokens=3001 + 100 * at, calls=1000))
        for at, row in enumerate(rows)
    )
    by_prompt = [Measurement(temperature=0.0, prompts=uneven)] * 5
    for arm in (by_seed, by_prompt):
        interval = difference(arm, base).interval
        assert interval is not None
        assert interval.high - interval.low > 0.2


def test_four_seeds_are_too_few() -> None:
    four = [measured()] * 4
    found = difference(four, four)
    assert found.interval is None
    assert claims.judge(MORE, found) == "cannot be told"


@pytest.mark.parametrize(
    ("claim", "low", "high", "verdict"),
    [
        (MORE, 0.01, 0.5, "holds"),
        (MORE, -0.5, -0.01, "does not hold"),
        (MORE, -0.01, 0.5, "cannot be told"),
        (dataclasses.replace(MORE, ours="a norm"), -0.5, -0.01, "cannot be told"),
        (SAME, -0.05, 0.05, "holds"),
        (SAME, 0.05, 0.09, "holds"),
        (SAME, 0.11, 0.5, "does not hold"),
        (SAME, -0.5, -0.11, "does not hold"),
        (SAME, -0.2, 0.05, "cannot be told"),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    claim: Claim, low: float, high: float, verdict: str
) -> None:
    assert (
        claims.judge(claim, Difference((low + high) / 2, Interval(low, high)))
        == verdict
    )


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_both_sides_of_a_claim_have_one_budget_and_differ(claim: Claim) -> None:
    shared = (
        "steps=90",
        "batch_tokens=512",
        "stages.*.learning_rate=1e-3",
        "tree=chain-4",
    )
    sides = list[object]()
    for setting in (claim.one, claim.other):
        config = flat(resolve(setting.drafter, "paper", (*shared, *setting.settings)))
        rates = {
            value for key, value in config.items() if key.endswith("learning_rate")
        }
        assert (config["steps"], config["batch_tokens"], rates) == (90, 512, {1e-3})
        sides.append((setting.drafter, setting.where, config, claim.at[len(sides)]))
    assert sides[0] != sides[1]


def test_names_of_claims_and_the_page_of_made_up_results() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    rng = np.random.default_rng(1)

    def arm(tau: float) -> list[Run]:
        return [
            Run(Cost(60.0, "abc123"), Measured(one, "CPU Some Processor", "2026-01-01"))
            for one in trained(rng, tau)
        ]

    names = [
        claim.name
        for claim in CLAIMS
        if claim.rate == "tau" and claim.expects == "more"
    ][:3]
    sides = {
        names[0]: (arm(4.0), arm(3.0)),
        names[1]: (arm(3.0), arm(4.0)),
        names[2]: (arm(3.0), []),
    }
    text = claims.page(PAPERS, sides, claims.Conditions(5, 300))
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    assert {len(row) for row in cells} == {8}
    verdicts = [
        row[6] for row in cells if row[0] != "claim" and not row[0].startswith("---")
    ]
    assert len(verdicts) == len(CLAIMS)
    assert verdicts.count("holds") == verdicts.count("does not hold") == 1
    assert verdicts.count("not run yet") == len(CLAIMS) - 2
    assert "abc123" in text
    assert "CPU Some Processor" in text
    assert re.search(r"\+1\.\d\d \(\+0\.\d\d to \+1\.\d\d\)|\+0\.9\d", text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few prompts in the workspace of the embedded target."""
    folder = tmp_path_factory.mktemp("claims")
    out = folder / "demo" / "prompts.parquet"
    sides: Sequence[tuple[files.Side, Split]] = (
        ("drafter", "train"),
        ("evaluation", "eval"),
    )
    for side, split in sides:
        made = files.write(
            folder / "demo" / "demo-data" / side,
            images=6,
            dialogues=3,
            seed=5,
            split=side,
        )
        choices = Choices(images=made.images, split=split)
        import_prompts([str(made.llava), str(made.sharegpt)], out, choices=choices)
    return folder


@pytest.mark.slow
def test_finished_work_is_not_repeated(runs: Path) -> None:
    few = [
        "--seeds",
        "1",
        "--steps",
        "40",
        "--limit",
        "2",
        "--jobs",
        "1",
        "--runs",
        str(runs),
    ]
    page = runs / "claims.md"

    def tried(name: str) -> dict[Path, int]:
        claims.main([*few, "--only", name, "--out", str(page)])
        there = (
            *(runs / "demo-small").rglob("*.safetensors"),
            *(runs / "demo-small").rglob("*.json"),
        )
        return {file: file.stat().st_mtime_ns for file in there}

    first = tried("msd-images")
    after = tried("msd-speed")  # has the same baseline
    new = {file for file in after if after[file] != first.get(file)}
    for made in ("model.safetensors", "counted-0-*.json"):
        assert [sum(file.match(made) for file in some) for some in (first, new)] == [
            2,
            1,
        ]
    assert not [file for file in first if file.parent.name == "reports"]
    assert (
        len([file for file in new if file.parent.name == "reports"]) == 2
    )  # a speed is decoded
    assert page.read_text().count("cannot be told |") == 2
    found = re.search(
        r"check, (\d+) responses [^;]*; (\d+) of them gave the same counts",
        page.read_text(),
    )
    assert found is not None
    assert found.groups() == ("4", "4")  # two prompts with each setting
    rates = re.findall(r"\| tau \| (\d\.\d+) /", page.read_text())
    assert (
        float(rates[0]) > 1.2
    )  # or the counts are those of drafters that are never right
    with pytest.raises(SystemExit, match="no claim"):
        claims.main([*few, "--only", "nothing"])
