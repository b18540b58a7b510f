"""What changed between two reports: a planted change is found, a second run is none."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.bench.made_up import (
    evaluation,
    in_sequence,
    measured,
    responding,
    with_cpu_share,
    without_delays,
)
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.records import (
    Calibration,
    Leak,
    Measurement,
    TargetId,
    new_file,
    write,
)
from vlmdistill.pipelines.report.changes import Changes, compare
from vlmdistill.pipelines.targets.software import Software

SOFTWARE = Software(
    python="3.11",
    vlmdistill="1",
    torch="2.9",
    transformers="5",
    commit="abc",
    command="x",
)
COUNTS = ["tau", "accepted"]
ALL = [*COUNTS, "decode_speedup", "speedup"]

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes an evaluation into one of two workspaces."""

    def made(
        side: str, name: str = "sparrow", /, *temperatures: Measurement, **changes: Any
    ) -> Path:
        file = tmp_path / side / "reports" / f"{name}.json"
        write(evaluation(name, *temperatures, **changes), file)
        return file

    return made


@pytest.fixture
def compared(tmp_path: Path) -> Callable[[], Changes]:
    return lambda: compare(tmp_path / "a", tmp_path / "b")


def noisy(
    seed: int, calls: float = 32, temperature: float = 1.0, count: int = 24
) -> Measurement:
    """Sampled responses, whose calls and seconds vary by a tenth."""
    at = measured(temperature, noise=0.1, seed=seed, count=count)
    vary = [
        round(calls * (1 + 0.1 * ((7 * seed + 11 * number) % 13 - 6) / 6))
        for number in range(count)
    ]
    prompts = [
        dataclasses.replace(
            one,
            drafted=dataclasses.replace(
                one.drafted, calls=some, accepted=104 - some, passes=some
            ),
        )
        for one, some in zip(at.prompts, vary, strict=True)
    ]
    return dataclasses.replace(at, prompts=tuple(prompts))


def test_a_planted_change_is_found_and_only_there(
    save: Save, compared: Callable[[], Changes]
) -> None:
    save("a", "sparrow", noisy(1, temperature=0), noisy(2))
    save("b", "sparrow", noisy(3, temperature=0), noisy(4, calls=27))
    changed = compared().changed
    assert [(one.temperature, rate.rate, rate.verdict) for one, rate in changed] == [
        (1, "tau", "higher"),
        (1, "accepted", "higher"),
    ]
    tau = changed[0][1]
    assert tau.ratio is not None
    assert tau.ratio.low < tau.after / tau.before < tau.ratio.high


def test_a_second_run_is_no_change(save: Save, compared: Callable[[], Changes]) -> None:
    pairs = 40
    for number in range(pairs):
        save("a", f"d{number}", noisy(number))
        save("b", f"d{number}", noisy(1000 + number))
    found = compared()
    rates = [rate for one in found.drafters for rate in one.rates]
    assert len(rates) == len(ALL) * pairs
    assert len(found.changed) <= 0.1 * len(rates)  # 95% intervals
    assert found.differing == []


def test_prompts_are_paired_by_key(save: Save, compared: Callable[[], Changes]) -> None:
    at = noisy(1, temperature=0)
    save("a", "sparrow", at)
    reversed_at = dataclasses.replace(at, prompts=at.prompts[::-1])
    save("b", "sparrow", in_sequence(reversed_at))
    (one,) = compared().drafters
    assert [rate.verdict for rate in one.rates] == ["equal"] * len(ALL)
    assert all(rate.ratio and rate.ratio.low == pytest.approx(1) for rate in one.rates)


def test_a_target_of_an_earlier_version_compares(
    save: Save, compared: Callable[[], Changes]
) -> None:
    former = "0123456789abcdef"
    for side, fingerprint in (("a", former), ("b", f"{former}00000000")):
        target = TargetId(name="a-target", family="llava", fingerprint=fingerprint)
        save(side, target=target)
    assert compared().differing == []
    assert len(compared().drafters) == 2


@pytest.mark.parametrize(
    ("hardware", "count", "is_compared"),
    [
        ("CPU Some Processor", 4, True),  # rounding
        ("CPU Some Processor", 5, False),
        ("Other", 12, True),
        ("Other", 13, False),
    ],
)
def test_other_responses_of_the_target_do_not_compare(
    save: Save,
    compared: Callable[[], Changes],
    hardware: str,
    count: int,
    is_compared: bool,
) -> None:
    before, after = responding("before"), responding("after")
    some = (*after.prompts[:count], *before.prompts[count:])
    save("a", "sparrow", before, measured(1.0))
    mixed = dataclasses.replace(before, prompts=some)
    save("b", "sparrow", mixed, measured(1.0), hardware=hardware)
    changes = compared()
    assert len(changes.drafters) == 2 * is_compared
    if not is_compared:
        reasons = ["other responses of plain decoding"]
        assert [*changes.refused.values()] == [reasons, reasons]


@pytest.mark.parametrize(
    ("change", "differs", "rates"),
    [
        ({"hardware": "Other"}, ["hardware"], COUNTS),
        ({"dtype": "bfloat16", "threads": 2}, ["dtype", "threads"], COUNTS),
        ({"attention": "eager", "compiled": True}, ["attention", "compiled"], COUNTS),
        (
            {
                "target": TargetId(
                    name="a-target", family="qwen2_5_vl", fingerprint="beef"
                )
            },
            ["target"],
            [],
        ),
        ({"max_new_tokens": 128}, ["max new tokens"], []),
        (
            {"temperatures": (measured(count=23), measured(1.0, count=23))},
            ["prompts"],
            [],
        ),
        ({"tree": "30-3-8"}, ["tree"], ALL),
    ],
)
def test_what_does_not_compare_is_left_out_and_said(
    save: Save,
    compared: Callable[[], Changes],
    change: dict[str, Any],
    differs: list[str],
    rates: list[str],
) -> None:
    save("a")
    save("b", "sparrow", **change) if "temperatures" not in change else save(
        "b", "sparrow", *change["temperatures"]
    )
    found = compared()
    assert [fact.name for fact in found.differing] == differs
    assert all([rate.rate for rate in one.rates] == rates for one in found.drafters)
    assert len(found.drafters) == (2 if rates else 0)
    reasons = [f"other {fact}" for fact in differs]
    others = {"sparrow at T=0": reasons, "sparrow at T=1": reasons}
    assert found.refused == ({} if rates else others)
    assert found.untimed == (others if rates == COUNTS else {})


def test_what_the_audit_doubts_is_no_change(
    save: Save, compared: Callable[[], Changes]
) -> None:
    """Neither times beside a slow baseline, nor any number of a record whose counts cannot be true."""
    save("a", "sparrow", measured())
    slow = Calibration(
        plain_step=0.01,
        bare_step=0.0077,
        step_ratio=1.3,
        step_bytes=10**6,
        small_product=1e-4,
        large_product=1e-3,
        bandwidth=1e10,
    )
    save("b", "sparrow", measured(speedup=2.0), calibrations=(slow,))
    found = compared()
    assert [rate.rate for rate in found.drafters[0].rates] == COUNTS
    assert [*found.untimed] == ["sparrow"]
    save("b", "sparrow", measured(passes=31))
    found = compared()
    assert (found.drafters, [*found.refused]) == ([], ["sparrow"])


def test_times_beside_other_programs_are_no_change(
    save: Save, compared: Callable[[], Changes]
) -> None:
    save("a", "sparrow", measured())
    save("b", "sparrow", with_cpu_share(measured(speedup=2.0), 0.3))
    found = compared()
    assert found.untimed == {"sparrow": ["B: other programs had most of the CPU"]}
    assert found.changed == []


@pytest.mark.parametrize("busy", ["a", "b"])
def test_beside_other_programs_undisturbed_seconds_are_compared(
    busy: str,
    save: Save,
    compared: Callable[[], Changes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They took more of plain decoding's time on one side, by which it is faster by the clock."""
    other = "b" if busy == "a" else "a"
    save(busy, "sparrow", with_cpu_share(measured(speedup=1.5), 0.72, 0.8))
    save(other, "sparrow", with_cpu_share(measured(speedup=1.35), 1.0))
    found = compared()
    assert found.untimed == {}
    (drafter,) = found.drafters
    speedup = drafter.of("speedup")
    assert speedup is not None
    assert (speedup.before, speedup.after) == pytest.approx((1.35, 1.35))
    assert found.changed == []
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "1.50" not in capsys.readouterr().out


def test_one_of_several_evaluations_is_called_that(
    save: Save, compared: Callable[[], Changes], tmp_path: Path
) -> None:
    save("a")
    save("b")
    again = evaluation("sparrow", measured="2027-01-01 00:00:00")
    write(again, tmp_path / "b" / "reports" / "again.json")
    (one, _) = compared().drafters
    assert one.warnings == ("B: it is one of 2 repeated evaluations",)


def test_versions_and_drafters_that_differ_are_listed(
    save: Save, compared: Callable[[], Changes]
) -> None:
    save("a", "sparrow", measured(), measured(1.0), software=SOFTWARE)
    save("a", "old", software=SOFTWARE)
    save("a", "same", software=SOFTWARE)
    save(
        "b",
        "sparrow",
        measured(),
        software=dataclasses.replace(SOFTWARE, torch="2.10", commit=None, command="y"),
    )
    save("b", "new")
    save("b", "same", software=SOFTWARE)
    found = compared()
    assert [
        (fact.name, fact.before, fact.after, fact.drafters) for fact in found.differing
    ] == [
        ("torch", "2.9", "2.10", ("sparrow",)),
        ("commit", "abc", "none", ("sparrow",)),
    ]
    assert found.only_before == ["old", "sparrow at T=1"]
    assert found.only_after == ["new"]


def test_counts_that_say_nothing_of_a_drafter_do_not_compare(
    save: Save, compared: Callable[[], Changes]
) -> None:
    """Wrong tokens are easily accepted, and so are those that were seen in training."""
    better: Any = {"calls": 26, "passes": 26, "accepted": 78}
    for name in ("sparrow", "wren", "msd"):
        save("a", name, measured())
    seen = Leak(samples=9, prompts=tuple(f"k{number}" for number in range(20)))
    save("b", "sparrow", measured(**better), leak=seen)
    save("b", "wren", measured(own=["different"] * 24, **better))
    save("b", "msd", measured(**better))
    found = compared()
    assert found.refused == {
        "sparrow": ["B: it has seen 20 of 24 prompts in training"],
        "wren": ["B: it is not lossless"],
    }
    assert {one.name for one, _ in found.changed} == {"msd"}


def test_a_temperature_that_does_not_compare_is_named(
    save: Save, compared: Callable[[], Changes]
) -> None:
    save("a", "sparrow", measured(), measured(1.0))
    save("b", "sparrow", measured(), measured(1.0, missed=3))
    found = compared()
    assert [drafter.temperature for drafter in found.drafters] == [0]
    assert found.refused == {"sparrow at T=1": ["B: right tokens were not accepted"]}


def test_two_files_compare_whatever_their_names(save: Save) -> None:
    found = compare(
        save("a", "sparrow", measured(count=5)),
        save("b", "hivis", measured(count=5, calls=26, passes=26, accepted=78)),
    )
    (one,) = found.drafters
    assert one.name == "sparrow -> hivis"
    assert {rate.verdict for rate in one.rates} == {"unknown"}  # too few prompts


def test_the_command_prints_it_and_exits_0(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("a", "sparrow", measured(), software=SOFTWARE)
    changed = dataclasses.replace(SOFTWARE, torch="2.10")
    save("b", "sparrow", measured(calls=26, passes=26, accepted=78), software=changed)
    sides = [str(tmp_path / "a"), str(tmp_path / "b" / "reports")]
    assert main(["report", *sides]) == 0
    printed = capsys.readouterr().out
    for text in (
        "3.25 -> 4.00 (1.23-1.23)",
        "2.25 -> 3.00",
        "1.50 -> 1.50 (1.00-1.00)",
    ):
        assert text in printed
    assert main(["report", *sides, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (one,) = facts["drafters"]
    assert [rate["verdict"] for rate in one["rates"]] == [
        "higher",
        "higher",
        "equal",
        "equal",
    ]
    assert one["rates"][0]["after"] == 4
    assert facts["differing"][0]["name"] == "torch"
    save("b", "sparrow", measured(count=3))
    assert main(["report", *sides]) == 0
    assert "not compared, sparrow: other prompts\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["a", "nowhere"], 1),
        (["a", "empty"], 1),
        (["a", "text.json"], 1),
        (["a"], 2),
        (["a", "a", "a"], 2),
        (["a", "a", "--format", "csv"], 2),
        (["a", "a", "--out", "page.html"], 2),
    ],
)
def test_wrong_input_is_one_line(
    save: Save,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    save("a")
    Path("empty").mkdir()
    Path("text.json").write_text("no JSON")
    assert main(["report", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    if status == 1:
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert arguments[-1] in captured.err


def test_measurements_of_one_drafter_are_compared_with_their_like(
    tmp_path: Path, compared: Callable[[], Changes]
) -> None:
    few, many = measured(count=8), measured(count=24)
    for side, made in {
        "a": [
            evaluation("sparrow", few),
            evaluation("sparrow", many),
            evaluation("msd", many, tree="30-3-8"),
        ],
        "b": [
            evaluation("sparrow", measured(count=8, calls=16)),
            evaluation("sparrow", few, measured="2026-02-02 00:00:00"),
            evaluation("sparrow", many, title="again"),
            evaluation("msd", many),
        ],
    }.items():
        for one in made:
            write(one, new_file(tmp_path / side / "reports", one.name))
    found = compared()
    names = [(one.name.partition(" ")[0], one.prompts) for one in found.drafters]
    assert names == [("msd", 24), ("sparrow", 8)]
    assert found.changed == []  # with the latest of its kind, not the first
    assert [fact.name for fact in found.differing] == ["tree"]
    assert [len(some) for some in (found.only_before, found.only_after)] == [1, 1]
    assert "again" in found.only_after[0]


def test_a_side_of_unknown_delays_beside_other_programs_has_no_times(
    save: Save, compared: Callable[[], Changes]
) -> None:
    save("a", "sparrow", without_delays(with_cpu_share(measured(), 0.8)))
    save("b", "sparrow", measured())
    changes = compared()
    assert [*changes.untimed] == ["sparrow"]
    (drafter,) = changes.drafters
    assert [change.rate for change in drafter.rates] == COUNTS
