"""`vlmdistill plan`: what a project takes, from the configuration alone."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from vlmdistill.cli.main import app, main
from vlmdistill.pipelines.planning.assumptions import BREAK_EVEN, PROMPT
from vlmdistill.pipelines.train import default_recipe
from vlmdistill.pipelines.workspace import rates

MEASURED = Path(__file__).parents[2] / "docs/measurements/gpu.md"
SEVEN = "qwen2.5-vl-7b"


@pytest.fixture
def planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def plan(*arguments: str, model: str = SEVEN) -> dict[str, Any]:
        runs = ["--runs", str(tmp_path), "--json"]
        assert main(["plan", model, *arguments, *runs]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    return plan


def test_rates_are_those_that_an_h100_reached(planned: Any) -> None:
    facts = planned("--gpus", "H100", "--for", "eagle2", "--recipe", "fair-paper")
    speed = facts["stages"]["features"]["tokens_per_second"]
    assert speed == pytest.approx(17_000, rel=0.05)
    training = facts["stages"]["train eagle2"]
    speed = training["tokens_per_second"]
    assert speed == pytest.approx(4_000 / 0.025, rel=0.05)
    assert training["rate"] == "assumed"
    lengths = ("--text-tokens", "20", "--visual-tokens", "80", "--max-new-tokens")
    (row,) = [
        line for line in MEASURED.read_text().split("\n") if "responses, 512" in line
    ]
    low, high = re.findall(r"\*\*([\d,]+) to ([\d,]+)\*\*", row)[0]
    speed = planned(*lengths, "128")["stages"]["responses"]["tokens_per_second"]
    assert int(low.replace(",", "")) <= speed <= int(high.replace(",", ""))


@pytest.mark.parametrize(("drafter", "reads_visual"), [("wren", 0), ("sparrow", 1)])
def test_a_drafter_trains_on_the_visual_tokens_that_it_reads(
    drafter: str, reads_visual: int, planned: Any
) -> None:
    """Without steps in the recipe, as in `paper`."""
    options = ("--for", drafter, "--recipe", "paper", "--visual-tokens")
    without, with_visual = (
        planned(*options, count)["stages"][f"train {drafter}"]["tokens"]
        for count in ("0", "612")
    )
    # A prompt has 100 text tokens, and its response 512.
    assert with_visual == pytest.approx((1 + reads_visual) * without)


def test_two_gpus_take_half_of_the_time_and_the_same_disk_for_features(
    planned: Any,
) -> None:
    single, double = planned("--gpus", "H100"), planned("--gpus", "2xh100")
    for stage in ("responses", "features", "train wren"):
        seconds = double["stages"][stage]["seconds"]
        assert single["stages"][stage]["seconds"] == pytest.approx(2 * seconds)
    assert single["seconds"] > double["seconds"]
    disks = [facts["stages"]["features"]["disk_bytes"] for facts in (single, double)]
    assert disks[0] == disks[1]


def test_what_the_workspace_has_measured_on_such_gpus_replaces_an_assumption(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "cluster:10001")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    workspace = tmp_path / SEVEN
    workspace.mkdir()
    rates.record(workspace, "features", tokens=5_000, seconds=10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (48 << 30, 48 << 30))
    facts = planned("--gpus", "4xL40S")
    features = facts["stages"]["features"]
    assert features["tokens_per_second"] == 1_000
    assert features["rate"] == "measured"
    assert facts["stages"]["responses"]["rate"] == "assumed"
    others = planned("--gpus", "4xH100")["stages"]["features"]
    assert others["rate"] == "assumed"


def test_what_does_not_fit_is_said(planned: Any) -> None:
    def fits(gpus: str) -> dict[str, bool]:
        facts = planned("--gpus", gpus, "--for", "wren", model="qwen2.5-vl-32b")
        stages = facts["stages"].items()
        return {name: stage["memory"]["fits"] for name, stage in stages}

    everything = fits("H100")
    assert all(everything.values())
    # Two GPUs share the target in responses and features, and not in eval.
    shared = fits("2xA6000")
    assert [shared[name] for name in ("features", "eval", "train wren")] == [
        True,
        False,
        True,
    ]
    assert not fits("A6000")["features"]


def test_a_target_that_is_too_large_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpus", "RTX4090", "--for", "hivis", "--runs", str(tmp_path)]
    assert main(["plan", "qwen2.5-vl-32b", *options]) == 0
    output = capsys.readouterr()
    assert "does not fit" in output.out
    assert "--zero" in output.err


@pytest.mark.parametrize(
    ("drafters", "verbs"),
    [
        ("all", {"prompts", "features", "train", "eval", "export"}),
        ("lookahead", {"prompts", "eval"}),  # it needs no training
    ],
)
def test_the_commands_of_a_plan_are_commands_of_the_program(
    drafters: str,
    verbs: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = ["--runs", str(tmp_path)]
    assert main(["plan", SEVEN, "--gpus", "4xH100", "--for", drafters, *runs]) == 0
    output = capsys.readouterr().out
    _, _, commands = output.partition("commands:")
    lines = [shlex.split(line)[1:] for line in commands.split("\n") if line.strip()]
    assert {line[0] for line in lines} == verbs
    group: Any = typer.main.get_command(app)
    for verb, *arguments in lines:
        group.commands[verb].make_context(verb, arguments)


@pytest.mark.parametrize("gpus", ["0xH100", "H10", "two", ""])
def test_gpus_that_are_none_are_refused(
    gpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", SEVEN, "--gpus", gpus]) != 0
    assert "--gpus" in capsys.readouterr().err


def test_a_target_of_which_nothing_is_known_is_said_what_it_lacks_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "someone/new-vl-7b"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "someone/new-vl-7b" in line
    assert "config.json is enough" in line


@pytest.mark.parametrize(
    ("model", "source", "recipe"),
    [("demo-small", "demo", "demo"), ("smollm2", "FILE", "paper")],
)
def test_a_plan_has_the_recipe_that_train_takes_by_default(
    model: str,
    source: str,
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--gpus", "L4", "--for", "medusa", "--runs", str(tmp_path))
    assert main(["plan", "--model", model, *options]) == 0
    output = capsys.readouterr().out
    assert f"vlmdistill prompts {source}" in output
    assert f"--recipe {recipe}" in output
    assert default_recipe(model) == recipe


def test_two_targets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", SEVEN, "--model", "smollm2"]) == 2
    assert f"{SEVEN} or smollm2" in capsys.readouterr().err


def test_a_plan_says_what_is_known_of_tau_and_counts_the_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planned: Any
) -> None:
    facts = planned("--for", "wren,hivis")
    stages = facts["stages"].values()
    disk_bytes = sum(stage["disk_bytes"] for stage in stages)
    assert facts["disk_bytes"] == disk_bytes + facts["download_bytes"]
    options = ("--for", "wren,hivis", "--runs", str(tmp_path))
    assert main(["plan", SEVEN, *options]) == 0
    output = capsys.readouterr().out
    (row,) = [line for line in output.split("\n") if line.startswith("wren  ")]
    assert re.search(r"^wren +\S+ \S+ +-  ", row)
    assert "no paper prints one" in output
    assert f"there about {PROMPT}" in output
    assert "measured rates" not in output  # nothing has run in this workspace
    assert "5.07 without bonus" in output
    assert "\ndownload" in output
    (row,) = [line for line in MEASURED.read_text().split("\n") if "break even" in line]
    chain, tree = BREAK_EVEN
    assert f"{chain} / {tree}" in row
