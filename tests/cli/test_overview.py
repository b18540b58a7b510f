"""What a user sees before paying: what can be named, what is there, what comes next."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import dialogues
from tests.drafters import synthetic
from tests.pipelines.bench import made_up
from vlmdistill.cli.main import main
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import Training
from vlmdistill.pipelines.data.prompts.prompt_table import read
from vlmdistill.pipelines.data.responses.dataset import ResponseRow, write_part

pytestmark = pytest.mark.usefixtures("workplace")
Output = pytest.CaptureFixture[str]


def printed(capsys: Output, *arguments: str) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_list_names_what_commands_take(capsys: Output) -> None:
    lists = printed(capsys, "list")
    assert {*lists["drafters"]} == {*catalogue.NAMES}
    assert {*lists["recipes"]} == {*catalogue.RECIPES}
    entries = [entry for names in lists.values() for entry in names.values()]
    assert all("" not in entry.values() for entry in entries)
    assert lists["drafters"]["hass"]["variant_of"] == "eagle2"
    assert lists["drafters"]["hivis"] == {
        "variant_of": "-",
        "paper": "HiViS 2025",
        "trained": "yes",
        "served_by": "vLLM with the plugin",
        "bytes_a_text_token": 7168,
        "bytes_a_visual_token": 0,
        "good_for": catalogue.choice("hivis").good_for,
    }
    assert main(["list", "sets"]) == 0
    shown = capsys.readouterr().out
    assert "textvqa" in shown
    assert "sparrow" not in shown


def test_the_printed_settings_are_a_recipe(capsys: Output) -> None:
    assert (
        main(["train", "wren", "--show-config", "--set", "steps=7", "--recipe", "fair"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "recipe fair" in shown.splitlines()[0]
    Path("mine.toml").write_text(shown)
    assert resolve("wren", "mine.toml") == resolve("wren", "fair", ["steps=7"])
    for recipe in ((), ("--recipe", "")):  # an empty variable of a script
        command = ("train", "wren", "--show-config", *recipe)
        assert printed(capsys, *command)["steps"] == 600
    assert not Path("runs").exists()


def test_status_names_what_is_there_and_the_command_that_comes_next(
    capsys: Output,
) -> None:
    def state() -> tuple[Any, str]:
        found = printed(capsys, "status")
        return found, found["next"]

    found, following = state()
    assert (found["prompts"], found["samples"], following) == (
        0,
        0,
        "vlmdistill prompts demo",
    )
    dialogues(40)
    assert main(["prompts", "talks.json", "--split", "train"]) == 0
    found, following = state()
    assert (found["prompts"], found["held_out"], following) == (
        40,
        0,
        "vlmdistill prompts --resplit 0.2",
    )
    assert main(["prompts", "--resplit", "0.2"]) == 0
    found, following = state()
    assert found["prompts"] + found["held_out"] == 40
    assert following == "vlmdistill features"
    responded(2)
    found, _ = state()
    assert (found["responses"], found["uncaptured"]) == (2, 2)
    folder = Path("runs/demo-small/drafters/mine.training")
    folder.mkdir(parents=True)
    assert state()[0]["drafters"][0]["remarks"] == [
        "not finished: `vlmdistill train mine` continues"
    ]
    damaged = folder.with_name("mine")
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    assert "not readable JSON" in state()[0]["drafters"][0]["remarks"][0]
    (damaged / "config.json").write_text(
        '{"format": 3, "drafter": "wren", "config": {}, "target": {}, '
        '"provenance": {}, "training": {"samples": 1}}'
    )
    assert state()[0]["drafters"][0]["method"] == "wren"


def responded(count: int, tokens: int = 0) -> list[str]:
    """Responses of so many tokens to some prompts to train on; their keys."""
    prompts = [
        prompt
        for prompt in read(Path("runs/demo-small/prompts.parquet"))
        if prompt.split == "train"
    ]
    keys = [prompt.key for prompt in prompts[:count]]
    rows = [
        ResponseRow(
            key=key,
            ids=[1] * tokens,
            prompt_tokens=9,
            keep=True,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=8,
            target="t",
        )
        for key in keys
    ]
    write_part(Path("runs/demo-small/responses"), "part", rows)
    return keys


def test_status_has_each_drafter_with_what_it_was_measured_at(capsys: Output) -> None:
    dialogues(40)
    assert main(["prompts", "talks.json", "--eval-share", "0.3"]) == 0
    folder, reports = (
        Path("runs/demo-small/drafters/mine"),
        Path("runs/demo-small/reports"),
    )
    training: dict[str, Any] = {
        "signature": "s",
        "steps": 600,
        "saved_step": 500,
        "samples": 30,
        "validate": 4,
        "view": None,
    }
    synthetic.save("eagle3", folder, **training)
    (drafter,) = printed(capsys, "status")["drafters"]
    assert (drafter["method"], drafter["steps"], drafter["measured"]) == (
        "eagle3",
        500,
        "",
    )
    measured = made_up.evaluation("mine", training=Training(signature="s"))
    records.write(measured, records.new_file(reports, "mine"))
    (drafter,) = printed(capsys, "status")["drafters"]
    assert (drafter["measured"], drafter["remarks"]) == (measured.measured, [])
    assert drafter["tau"] > 1
    replaced = dataclasses.replace(
        measured, weights="other", measured="2027-01-01 00:00:00"
    )
    file = records.new_file(reports, "mine")
    records.write(replaced, file)
    (drafter_replaced,) = printed(capsys, "status")["drafters"]
    assert drafter_replaced["remarks"] == ["measured with other weights"]
    file.unlink()
    file = records.new_file(reports, "mine")
    slow = made_up.measured(missed=4)
    doubted = dataclasses.replace(
        measured, temperatures=(slow,), measured="2027-01-01 00:00:00"
    )
    records.write(doubted, file)
    (in_doubt,) = printed(capsys, "status")["drafters"]
    assert in_doubt["speedup"] is None
    assert "were not accepted" in in_doubt["remarks"][0]
    file.unlink()
    earlier = made_up.evaluation(
        "mine", measured="2001-01-01 00:00:00", training=Training(signature="t")
    )
    other = made_up.evaluation("mine@chain-4", measured="2001-01-01 00:00:00")
    for one in (earlier, other):
        records.write(one, records.new_file(reports, one.name))
    found = printed(capsys, "status")
    assert (found["evaluations"], found["drafters"]) == (
        3,
        [drafter],
    )  # what is shown is the last one
    synthetic.save("eagle3", folder, **training | {"signature": "other"})
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "measured before it was trained again" in shown
    assert "30, 4 validate" in shown


def test_a_new_split_leaves_prompts_with_responses_where_they_are(
    capsys: Output,
) -> None:
    dialogues(60)
    assert main(["prompts", "talks.json", "--split", "train"]) == 0
    keys = responded(20)
    summary = printed(capsys, "prompts", "--resplit", "0.5")
    assert summary["kept"] == 20
    assert summary["eval"] == summary["moved"] > 5
    split = {
        prompt.key: prompt.split
        for prompt in read(Path("runs/demo-small/prompts.parquet"))
    }
    assert {split[key] for key in keys} == {"train"}
    assert (
        printed(capsys, "prompts", "--resplit", "0.5")["moved"] == 0
    )  # the split is a hash
    assert main(["prompts", "--resplit", "0"]) == 0
    assert {
        prompt.split for prompt in read(Path("runs/demo-small/prompts.parquet"))
    } == {"train"}
    assert main(["prompts", "talks.json", "--resplit", "0.5"]) == 2
    assert main(["prompts", "--resplit", "1.5"]) == 1
    assert main(["prompts"]) == 2


def test_quiet_prints_results_errors_and_warnings_alone(capsys: Output) -> None:
    assert main(["target", "list", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "demo" in shown.out
    assert shown.err == ""
    assert main(["--quiet", "prompts", "talks.json"]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert any("held out" in line for line in warnings)
    assert all(line.startswith("warning: ") for line in warnings)
    assert main(["prompts", "absent.json", "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_dry_run_says_what_features_would_cost_and_does_nothing(
    capsys: Output,
) -> None:
    dialogues(20)
    assert main(["prompts", "talks.json", "--split", "train"]) == 0
    before = sorted(Path("runs").rglob("*"))
    command = ("features", "--dry-run", "--for", "wren")
    stages = printed(capsys, *command, "--max-new-tokens", "64")["stages"]
    responses = stages["responses"]
    assert (responses["to_do"], responses["tokens"]) == (20, 20 * 64)
    assert stages["features"]["certainty"] == "assumed"
    assert sorted(Path("runs").rglob("*")) == before
    responded(5, tokens=11)
    stages = printed(capsys, *command)["stages"]
    responses, captured = stages["responses"], stages["features"]
    numbers = [responses[name] for name in ("done", "to_do", "tokens", "certainty")]
    assert numbers == [5, 15, 15 * 11, "estimated"]
    assert (captured["done"], captured["to_do"]) == (0, 20)
    text = 20 * (9 + 11)
    assert captured["tokens"] == text
    assert f"{text} text and 0 visual tokens" in captured["details"]
    # Four states of width 128 in two bytes.
    assert captured["disk_bytes"] == text * 4 * 2 * 128
    assert main(["features", "--dry-run"]) == 0
    assert "about 400" in capsys.readouterr().out
    assert main(["responses", "--dry-run", "--limit", "4"]) == 0
    assert "0 responses" in capsys.readouterr().out
    assert main(["features", "--dry-run", "--import", "demo"]) == 2


def test_a_dry_run_of_eval_takes_its_time_from_earlier_evaluations_on_this_machine(
    capsys: Output,
) -> None:
    dialogues(40)
    assert main(["prompts", "talks.json", "--eval-share", "0.3"]) == 0
    synthetic.save("eagle3", Path("runs/demo-small/drafters/mine"))
    command = [
        "eval",
        "mine",
        "--dry-run",
        "--limit",
        "5",
        "--max-new-tokens",
        "10",
        "--tree",
        "chain-3",
    ]
    stage = printed(capsys, *command, "--tree", "chain-5")["stages"]["eval"]
    assert stage["memory"]["total"] > 0
    assert (stage["to_do"], stage["tokens"], stage["seconds"]) == (15, 150, None)
    reports = Path("runs/demo-small/reports")
    for machine in ("CPU of another", hardware.of(torch.device("cpu")).name):
        measured = made_up.evaluation("mine", hardware=machine)
        records.write(measured, records.new_file(reports, "mine"))
    rows = measured.temperatures[0].prompts
    plain, drafted = (
        sum(getattr(row, side).seconds for row in rows) for side in ("plain", "drafted")
    )
    seconds = printed(capsys, *command, "--tree", "chain-5")["seconds"]
    assert seconds == pytest.approx(5 * (plain + 2 * drafted) / len(rows))
    assert main(["eval", "absent", "--dry-run"]) == 1
    assert len([*reports.glob("*.json")]) == 2


@pytest.mark.parametrize(
    "command", ["status", "report", "eval sparrow", "export sparrow --out x"]
)
def test_an_empty_workspace_names_the_one_that_has_drafters(
    command: str, capsys: Output
) -> None:
    """Without --model, the default target is asked for, which may be another one."""
    named = "runs/demo has sparrow: --model demo"
    synthetic.save("sparrow", Path("runs/demo/drafters/sparrow"))
    capsys.readouterr()
    main(command.split())
    assert named in capsys.readouterr().err
    main([*command.split(), "--model", "demo"])
    assert named not in capsys.readouterr().err
    synthetic.save("sparrow", Path("runs/demo-video/drafters/sparrow"))
    main(command.split())
    said = capsys.readouterr().err
    assert named in said
    assert "runs/demo-video has sparrow" in said


def test_an_embedded_target_is_said_not_to_know_prompts_of_ones_own(
    capsys: Output,
) -> None:
    assert main(["prompts", "demo", "--limit", "4"]) == 0
    assert "--model" not in capsys.readouterr().err
    assert main(["prompts", dialogues(3)]) == 0
    assert "--model" in capsys.readouterr().err
