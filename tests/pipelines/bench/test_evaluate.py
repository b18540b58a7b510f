"""Evaluation of a drafter that needs no training, on a tiny target: what is measured, written and reused."""

import dataclasses
import hashlib
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters import synthetic
from tests.pipelines.bench.conftest import held_out
from tests.pipelines.bench.made_up import newest
from tests.ticks import Ticks
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.description import WEIGHTS
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding import clock, decoders
from vlmdistill.drafters.decoding.acceptance import Acceptance, verify
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.drafters.decoding.tree_search import FILE, BestTree
from vlmdistill.drafters.lookahead import Window
from vlmdistill.pipelines.bench import again as repeating
from vlmdistill.pipelines.bench import audit, calibration, side_by_side
from vlmdistill.pipelines.bench import evaluate as evaluation_run
from vlmdistill.pipelines.bench import plan as evaluation_plan
from vlmdistill.pipelines.bench.evaluate import Settings, evaluate, kept
from vlmdistill.pipelines.bench.records import Evaluation, files_in, new_file, write
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.changes import compare
from vlmdistill.pipelines.report.documents import csv
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.streaming.response import open_pair
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.software import of_this_process
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.progress import Progress

SETTINGS = Settings(max_new_tokens=8, temperatures=(0.0, 1.0), seed=0)
WORK = 200  # operations


@pytest.fixture(scope="module")
def workspace(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Workspace:
    """A tiny target with three prompts to evaluate on."""
    contents = [f"What is {number}?" for number in range(3)]
    return held_out(
        str(checkpoint("qwen2_5_vl")), tmp_path_factory.mktemp("evaluate"), contents
    )


def with_prompts_of(workspace: Workspace, folder: Path) -> Workspace:
    """A workspace without evaluations."""
    shutil.copy(workspace.prompts, folder)
    return Workspace(workspace.model, folder)


def by_ticks(
    workspace: Workspace,
    plant: Callable[[pytest.MonkeyPatch], None] = lambda patch: None,
) -> Evaluation:
    """An evaluation whose clocks, of the decoders and around them, count operations."""
    with pytest.MonkeyPatch.context() as patch, Ticks() as ticks:
        patch.setattr(clock, "time", ticks)
        patch.setattr(clock, "ready_seconds", ticks.ready_seconds)
        patch.setattr(side_by_side, "time", ticks)
        plant(patch)
        (made,) = evaluate(workspace, open_drafters(workspace, ["lookahead"]), SETTINGS)
    return made


@pytest.fixture(scope="module")
def honest(workspace: Workspace) -> Evaluation:
    return by_ticks(workspace)


def work() -> None:
    for _ in range(WORK):
        torch.zeros(1)


Command = Callable[..., tuple[str, str]]


@pytest.fixture
def command(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """`eval` in a workspace without evaluations: what it prints on both streams."""
    model = workspace.model
    alone = Workspace.of(model, tmp_path / "runs")
    alone.root.mkdir(parents=True)
    shutil.copy(workspace.prompts, alone.prompts)
    where = ("--threads", "1", "--model", model, "--runs", str(alone.root.parent))

    def run(*arguments: str) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["eval", *arguments, *where]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


def test_a_tree_that_no_response_has_room_for_is_warned_of(command: Command) -> None:
    few = ("--max-new-tokens", "8", "--limit", "1")
    assert "chain-12" in command("specvlm", "--tree", "chain-12", *few)[1]
    assert "in vain" not in command("specvlm", "--tree", "chain-7", *few)[1]
    assert "in vain" not in command("lookahead", *few)[1]


def test_where_nothing_was_drafted_there_is_no_tau(
    command: Command, workspace: Workspace, tmp_path: Path
) -> None:
    table, said = command("lookahead", "--max-new-tokens", "1")
    assert "0.00" not in table
    assert "nothing was drafted" in said
    facts = json.loads(command("lookahead", "--max-new-tokens", "1", "--json")[0])
    (at,) = facts["lookahead"]["temperatures"]
    assert (at["tau"], at["accepted"], at["decode_speedup"]) == (None, None, None)
    alone = Workspace.of(workspace.model, tmp_path / "runs")
    row = pl.read_csv(io.StringIO(csv(read(alone)))).row(0, named=True)
    assert (row["tau"], row["accepted"], row["decode_speedup"]) == (None, None, None)
    (compared,) = compare(alone.root, alone.root).drafters
    assert "tau" not in {change.rate for change in compared.rates}


def slowly(decode: Callable[..., Iterator[Cycle]]) -> Callable[..., Iterator[Cycle]]:
    """A decoder that does work between its cycles."""

    def slow(*args: Any, **kwargs: Any) -> Iterator[Cycle]:
        for cycle in decode(*args, **kwargs):
            yield cycle
            work()

    return slow


def test_the_cycles_account_for_all_seconds(honest: Evaluation) -> None:
    for at in honest.temperatures:
        measured = figures(at)
        assert (measured.accounted, measured.plain_accounted, measured.warnings) == (
            1,
            1,
            (),
        )
        for one in at.prompts:
            assert (
                one.drafted.seconds
                == one.drafted.prefill_seconds + one.drafted.decode_seconds
                > 0
            )


@pytest.mark.parametrize("at", [0, 1])
def test_the_pieces_of_shown_responses_have_their_times(
    at: int, honest: Evaluation
) -> None:
    measured = honest.temperatures[at]
    for shown, one in zip(measured.shown, measured.prompts, strict=True):
        assert shown.key == one.key
        for pieces, decoding in ((shown.pieces, one.drafted), (shown.plain, one.plain)):
            times = [piece.seconds or 0 for piece in pieces]
            total = decoding.prefill_seconds + decoding.decode_seconds
            expected = [
                decoding.prefill_seconds,
                *times,
                total,
            ]  # some tokens have no text
            assert expected == sorted(expected)
        if at == 0:  # both decoders generate the same text
            assert "".join(one.text for one in shown.pieces) == "".join(
                one.text for one in shown.plain
            )


@pytest.mark.parametrize("at", [0, 1])
def test_the_phases_account_for_all_seconds(at: int, honest: Evaluation) -> None:
    measured = figures(honest.temperatures[at])
    assert measured.budget is not None
    budget = dataclasses.asdict(measured.budget)
    plain_step, ideal = budget.pop("plain_step"), budget.pop("ideal")
    assert sum(budget.values()) == measured.seconds
    assert budget["other"] == 0
    assert all(
        budget[phase] > 0
        for phase in ("prefill", "draft_prefill", "draft", "verify", "accept")
    )
    assert plain_step == sum(
        one.plain.decode_seconds for one in honest.temperatures[at].prompts
    ) / sum(one.plain.calls for one in honest.temperatures[at].prompts)
    assert measured.decode_speedup < ideal < measured.tau


def test_a_slower_drafter_is_slower_in_its_phase_alone(
    workspace: Workspace, honest: Evaluation
) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        grow = Window.grow

        def slow(self: Window, shape: Tree) -> DraftTree:
            work()
            return grow(self, shape)

        patch.setattr(Window, "grow", slow)

    for at, before in zip(
        by_ticks(workspace, plant).temperatures, honest.temperatures, strict=True
    ):
        slow, fair = figures(at), figures(before)
        assert slow.budget == dataclasses.replace(
            fair.budget,
            draft=fair.budget.draft + WORK * fair.calls,
            ideal=slow.budget.ideal,
        )
        assert slow.speedup < fair.speedup
        assert slow.budget.ideal < fair.budget.ideal


def shortened(*args: Any) -> Acceptance:
    """The last accepted token is left to the next cycle."""
    accepted = verify(*args)
    if int(accepted.length_1) == 1:
        return accepted
    last = accepted.path_N[accepted.length_1 - 1]
    return dataclasses.replace(
        accepted, length_1=accepted.length_1 - 1, bonus_1=args[0].ids_N[last]
    )


def test_a_verifier_that_accepts_too_little_is_detected(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lossless: only the responses show that guesses were right."""
    settings = dataclasses.replace(SETTINGS, temperatures=(0.0,), max_new_tokens=48)
    (fair,) = evaluate(workspace, open_drafters(workspace, ["lookahead"]), settings)
    monkeypatch.setattr(decoders, "verify", shortened)
    (made,) = evaluate(workspace, open_drafters(workspace, ["lookahead"]), settings)
    before, after = figures(fair.temperatures[0]), figures(made.temperatures[0])
    assert before.missed == 0
    assert after.lossless == before.lossless
    assert after.tau < before.tau
    assert after.missed > 0
    assert [
        one
        for one in after.warnings
        if one.startswith(f"{after.missed} drafted tokens")
    ]


@pytest.fixture(scope="module")
def tuned(workspace: Workspace) -> Path:
    """The folder of a drafter of random weights."""
    return synthetic.save(
        "eagle2", workspace.drafter("tuned"), target=load(workspace.model)
    )


def test_several_trees_are_results_of_their_own(
    workspace: Workspace, tuned: Path
) -> None:
    trees = (Tree.parse("chain-2"), Tree.parse("8-2-2"))
    settings = dataclasses.replace(SETTINGS, trees=trees, limit=2)
    *made, window = evaluate(
        workspace, open_drafters(workspace, ["tuned", "lookahead"]), settings
    )
    assert [(one.name, one.tree) for one in made] == [
        (f"tuned@{tree}", str(tree)) for tree in trees
    ]
    assert window.name == "lookahead"  # its tree is its own
    assert [newest(workspace.reports, f"tuned@{tree}") for tree in trees] == made
    plain_of = [
        [at.prompts[0].plain for at in one.temperatures] for one in (*made, window)
    ]
    assert plain_of[0] == plain_of[1] == plain_of[2]  # measured once, for all
    assert [
        len(one.temperatures[0].prompts[0].drafted.chain_tried) for one in made
    ] == [2, 3]


def test_the_fastest_tree_is_kept_with_the_drafter(
    workspace: Workspace, tuned: Path
) -> None:
    settings = dataclasses.replace(
        SETTINGS, trees=("auto",), limit=1, temperatures=(0.0,), threads=1
    )
    rounds: list[str] = []
    (first,) = evaluate(
        workspace,
        open_drafters(workspace, ["tuned"]),
        settings,
        on_prompt=lambda done, total, remark="": rounds.append(remark),
    )
    (best,) = msgspec.json.decode((tuned / FILE).read_bytes(), type=list[BestTree])
    assert first.tree == best.tree in best.tokens_per_second
    assert len([one for one in rounds if "trees" in one]) == 4
    (again,) = evaluate(
        workspace,
        open_drafters(workspace, ["tuned"]),
        settings,
        on_prompt=lambda done, total, remark="": rounds.append(remark),
    )
    assert again.tree == first.tree
    assert len([one for one in rounds if "trees" in one]) == 4  # not searched for again
    assert str(open_pair(workspace, "tuned", "auto")[2]) == best.tree
    assert open_pair(workspace, "tuned", "auto", temperature=1.0)[2] is None  # its own
    (tuned / FILE).write_text(
        (tuned / FILE).read_text().replace("threads: 1", "threads: 7")
    )
    assert str(open_pair(workspace, "tuned", "auto")[2]) == best.tree
    (tuned / FILE).write_text("[{}]")
    with pytest.raises(DataError, match=FILE):
        evaluate(workspace, open_drafters(workspace, ["tuned"]), settings)
    evaluate(
        workspace,
        open_drafters(workspace, ["tuned"]),
        dataclasses.replace(settings, trees=()),
    )  # needs no such file


def test_a_tree_is_searched_for_on_prompts_that_are_not_evaluated(
    workspace: Workspace, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tuned / FILE).unlink(missing_ok=True)
    settings = dataclasses.replace(
        SETTINGS, trees=("auto",), temperatures=(0.0,), threads=1
    )
    with pytest.raises(DataError, match="--limit"):
        evaluate(workspace, open_drafters(workspace, ["tuned"]), settings)
    asked: list[int] = []
    encode = VisionLanguageTarget.encode

    def watched(target: Any, messages: Any) -> Any:
        text = messages[0]["content"][0]["text"]
        if text.startswith("What"):  # not what a target is tried with
            asked.append(int(text.strip("What is?")))
        return encode(target, messages)

    monkeypatch.setattr(VisionLanguageTarget, "encode", watched)
    (made,) = evaluate(
        workspace,
        open_drafters(workspace, ["tuned"]),
        dataclasses.replace(settings, limit=2),
    )
    assert asked.count(asked[1]) == 1  # after one for the threads, what is searched on
    assert asked[1] not in asked[2:]
    assert len(made.keys) == 2


def test_a_drafter_that_is_trained_again_meanwhile_is_not_decoded_again(
    workspace: Workspace, tuned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its new weights need other numbers of calls; those of the record are right."""
    monkeypatch.setattr(repeating, "PROMPTS", 1)
    elsewhere = with_prompts_of(workspace, tmp_path)
    shutil.copytree(workspace.root / "drafters", elsewhere.root / "drafters")

    def trained_again(done: int, total: int, remark: str = "") -> None:
        file = elsewhere.drafter("tuned") / WEIGHTS
        save_file({key: -tensor for key, tensor in load_file(file).items()}, file)

    settings = dataclasses.replace(SETTINGS, limit=1, temperatures=(0.0,))
    drafters = open_drafters(elsewhere, ["tuned"])
    (made,) = evaluate(elsewhere, drafters, settings, on_prompt=trained_again)
    assert "trained again" in made.not_again
    assert audit.failures(made) == []
    # What was decoded before it was loaded still shows whether it has changed the target.
    (again,) = made.again
    other = dataclasses.replace(again, plain_response="0")
    (failure,) = audit.failures(dataclasses.replace(made, again=(other,)))
    assert "other responses" in failure


def test_a_drafter_that_is_trained_again_while_it_is_loaded_is_not_measured(
    workspace: Workspace, tuned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The record would name its old weights for the numbers of the new ones."""
    elsewhere = with_prompts_of(workspace, tmp_path)
    shutil.copytree(workspace.root / "drafters", elsewhere.root / "drafters")

    def trained_again(*named: Any, **how: Any) -> Any:
        file = elsewhere.drafter("tuned") / WEIGHTS
        save_file({key: -tensor for key, tensor in load_file(file).items()}, file)
        return load(*named, **how)

    monkeypatch.setattr("vlmdistill.pipelines.targets.loading.load", trained_again)
    with pytest.raises(TrainingError, match=r"tuned was trained again.*the same"):
        evaluate(elsewhere, open_drafters(elsewhere, ["tuned"]), SETTINGS)


def test_the_last_evaluation_is_the_last_one_in_any_time_zone(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = with_prompts_of(workspace, tmp_path)
    settings = dataclasses.replace(SETTINGS, limit=1, temperatures=(0.0,))
    seeds = []
    for zone, seed in (("UTC-9", 1), ("UTC+8", 2)):  # east and west, as POSIX has it
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        drafters = open_drafters(elsewhere, ["lookahead"])
        evaluate(elsewhere, drafters, dataclasses.replace(settings, seed=seed))
        seeds.append(newest(elsewhere.reports, "lookahead").seed)
    monkeypatch.undo()
    time.tzset()
    assert seeds == [1, 2]


def test_an_interrupted_evaluation_takes_over_no_prompts_of_another_tree(
    workspace: Workspace, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--tree auto` may find another one, as at another first temperature."""

    def interrupted(done: int, total: int, remark: str = "") -> None:
        if done == 1:
            raise KeyboardInterrupt

    def run(tree: str, on_prompt: Progress) -> Evaluation:
        monkeypatch.setattr(
            evaluation_run, "choose_trees", lambda *_: [Tree.parse(tree)]
        )
        settings = dataclasses.replace(SETTINGS, trees=("auto",), limit=2)
        drafters = open_drafters(workspace, ["tuned"])
        return evaluate(workspace, drafters, settings, on_prompt=on_prompt)[0]

    with pytest.raises(KeyboardInterrupt):
        run("chain-4", interrupted)
    made = run("chain-1", lambda *_: None)
    assert made.tree == "chain-1"
    for measurement in made.temperatures:
        for prompt in measurement.prompts:
            assert len(prompt.drafted.chain_tried) == 1
    assert not list(workspace.reports.glob(".*"))


def test_an_interrupted_evaluation_continues_after_its_last_prompt(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Workspace(workspace.model, tmp_path)
    remarks: list[int] = []

    def until_second(done: int, total: int, remark: str = "") -> None:
        remarks.append(done)
        if done == 2:
            raise KeyboardInterrupt

    def run(settings: Settings, on_prompt: Progress) -> Evaluation:
        return evaluate(
            elsewhere,
            open_drafters(elsewhere, ["lookahead"]),
            settings,
            prompts_file=workspace.prompts,
            on_prompt=on_prompt,
        )[0]

    with pytest.raises(KeyboardInterrupt):
        run(SETTINGS, until_second)
    (file,) = elsewhere.reports.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:-20])  # died while it wrote
    other = dataclasses.replace(SETTINGS, seed=5)
    fifth = run(other, lambda *_: None)
    assert fifth.seed == 5  # of its own
    eager = run(
        dataclasses.replace(SETTINGS, how={"attention": "eager"}), lambda *_: None
    )  # likewise
    assert (eager.attention, eager.compiled) == ("eager", False)
    with monkeypatch.context() as patch:
        other_code = dataclasses.replace(of_this_process(), commit="other")
        patch.setattr(evaluation_plan, "of_this_process", lambda: other_code)
        changed = run(SETTINGS, lambda *_: None)  # likewise
    made = run(SETTINGS, lambda done, total, remark="": remarks.append(done))
    assert remarks == [1, 2, 1, *range(2, 7)]
    first = msgspec.json.decode(lines[0], type=Decoded).results["lookahead"]
    assert made.temperatures[0].prompts[0] == first
    assert (
        len(made.calibrations) == 3
    )  # of two processes at their start, and of one at its end
    kept_there = [
        one.evaluation
        for one in selection.read(elsewhere.reports).drafter_results
        if one.temperature
    ]
    assert kept_there == [made, changed, eager, fifth]
    assert not list(elsewhere.reports.glob(".*"))


def test_an_evaluation_replaces_none(
    workspace: Workspace,
    tuned: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = Workspace(workspace.model, tmp_path / workspace.root.name)
    shutil.copytree(workspace.root / "drafters", elsewhere.root / "drafters")
    shutil.copy(workspace.prompts, elsewhere.root)
    where = ("--model", workspace.model, "--runs", str(tmp_path))
    other = ("--prompts", str(held_out(workspace.model, tmp_path, ["Other?"]).prompts))
    files: list[Path] = []
    contents: dict[Path, bytes] = {}
    few = ("--limit", "1", "--max-new-tokens", "2", "--threads", "1")
    again = [
        (),
        ("--temperature", "1"),
        ("--tree", "chain-2"),
        other,
        (),
        ("--name", "nightly"),
    ]
    for more in again:
        assert main(["eval", "tuned", *few, *more, *where]) == 0
        assert all(file.read_bytes() == content for file, content in contents.items())
        files = sorted(elsewhere.reports.glob("*.json"))
        contents = {file: file.read_bytes() for file in files}
    assert len(files) == len(again)
    capsys.readouterr()

    def rows_of(*words: str, key: str = "rows") -> list[dict[str, Any]]:
        assert main([*words, *where, "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)[key]
        return found

    listed = rows_of("eval", "--list", key="evaluations")
    assert [one["name"] for one in listed] == ["nightly", "", "", "", "", ""]
    assert [one["temperature"] for one in listed] == [0, 0, 0, 0, 1, 0]
    assert [one["tree"] == "chain-2" for one in listed] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert listed[2]["prompt_set"] != listed[1]["prompt_set"] == listed[5]["prompt_set"]
    tree = listed[0]["tree"]
    default = f"tuned@{tree}"
    shown = {
        (one["group"], one["name"], one["temperature"]): one["measured"]
        for one in rows_of("report")
    }
    assert shown.keys() == {
        *(
            (1, default, 0),
            (1, default, 1),
            (1, f"tuned (nightly)@{tree}", 0),
            (1, "tuned@chain-2", 0),
        ),
        (2, "tuned", 0),
    }
    assert shown[1, default, 0] == listed[1]["measured"]  # not that of the first
    sampled = rows_of("report", "--where", "temperature = 1")
    assert [one["name"] for one in sampled] == ["tuned"]
    (first,) = rows_of(
        "report", "--where", f"measured = '{listed[5]['measured']}' and temperature = 0"
    )[:1]
    assert first["measured"] == listed[5]["measured"]
    assert (
        main(
            [
                "report",
                *where,
                "--where",
                "tree = 'chain-2'",
                "--where",
                "name = 'nightly'",
            ]
        )
        == 1
    )
    assert "none of the 6 measurements matches" in capsys.readouterr().err
    assert main(["report", *where, "--where", "tree = chain"]) == 1
    assert "single quotes, 'chain'" in capsys.readouterr().err
    assert main(["eval", "tuned", *few, *where, "--name", "../x"]) == 1
    assert "--name ../x" in capsys.readouterr().err


def test_responses_that_are_not_the_targets_end_in_exit_1(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def twice(*args: Any, **kwargs: Any) -> Iterator[Cycle]:
        for cycle in speculate(*args, **kwargs):
            yield dataclasses.replace(cycle, ids=[*cycle.ids, *cycle.ids])

    monkeypatch.setattr(decoders, "speculate", twice)
    where = (
        "--model",
        workspace.model,
        "--runs",
        str(workspace.root.parent),
        "--max-new-tokens",
        "8",
    )
    greedy = ("--temperature", "0", "--temperature", "0.0")
    capsys.readouterr()
    assert main(["eval", "lookahead", *greedy, *where]) == 1
    shown = capsys.readouterr()
    assert "3 DIFFERENT" in shown.out
    assert shown.err.splitlines()[-1].startswith("not lossless: ")
    (at,) = newest(workspace.reports, "lookahead").temperatures
    assert {one.drafted.check for one in at.prompts} == {"different"}


def test_a_cpu_that_others_use_is_detected(workspace: Workspace) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Ticks, "thread_time", lambda self: 0.5 * self.now)

    for at in by_ticks(workspace, plant).temperatures:
        measured = figures(at)
        assert measured.cpu_share == 0.5
        assert len(measured.warnings) == 1


def test_a_machine_that_becomes_slower_is_detected(
    workspace: Workspace, honest: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated: list[int] = []

    def slower(*args: Any, **kwargs: Any) -> Iterator[Cycle]:
        calibrated.append(1)
        for cycle in plain(*args, **kwargs):
            yield dataclasses.replace(cycle, seconds=cycle.seconds * len(calibrated))

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(calibration, "time", vars(clock)["time"])
        patch.setattr(calibration, "plain", slower)

    start, end = (made := by_ticks(workspace, plant)).calibrations
    assert start.plain_step == (end.plain_step or 0) / 2
    assert (start.small_product, start.large_product) == (
        end.small_product,
        end.large_product,
    )
    assert [figures(at).speedup for at in made.temperatures] == [
        figures(at).speedup for at in honest.temperatures
    ]
    capsys.readouterr()
    assert (
        main(
            ["report", "--model", workspace.model, "--runs", str(workspace.root.parent)]
        )
        == 0
    )
    assert "plain step by a factor of 2.00" in capsys.readouterr().err
    assert (
        "plain step by a factor of 2.00"
        in (workspace.reports / "index.html").read_text()
    )


def plant_in_decoder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoders, "speculate", slowly(speculate))


def plant_in_proposer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Window, "__del__", lambda self: work(), raising=False)


def plant_in_plain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoders, "plain", slowly(plain))


@pytest.mark.parametrize("plant", [plant_in_decoder, plant_in_proposer])
def test_work_outside_the_cycles_is_detected(
    plant: Callable[[pytest.MonkeyPatch], None],
    workspace: Workspace,
    honest: Evaluation,
) -> None:
    made = by_ticks(workspace, plant)
    for at, before in zip(made.temperatures, honest.temperatures, strict=True):
        measured, fair = figures(at), figures(before)
        assert measured.accounted < 0.98
        assert measured.plain_accounted == 1
        assert len(measured.warnings) == 1
        assert measured.tokens == fair.tokens
        assert (
            measured.seconds >= fair.seconds + WORK * measured.prompts
        )  # included in the elapsed time
        assert measured.speedup < fair.speedup
        assert measured.decode_speedup == fair.decode_speedup


def test_work_outside_the_cycles_of_plain_decoding_is_detected(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    for at in by_ticks(workspace, plant_in_plain).temperatures:
        measured = figures(at)
        assert measured.accounted == 1
        assert measured.plain_accounted < 0.98
        assert len(measured.warnings) == 1
    capsys.readouterr()
    assert (
        main(
            ["report", "--model", workspace.model, "--runs", str(workspace.root.parent)]
        )
        == 0
    )
    assert f"{measured.plain_accounted:.1%}" in capsys.readouterr().err
    assert (
        f"{measured.plain_accounted:.1%}"
        in (workspace.reports / "index.html").read_text()
    )


@pytest.fixture(scope="module")
def made(workspace: Workspace) -> Evaluation:
    """An evaluation by the real clock."""
    (one,) = evaluate(workspace, open_drafters(workspace, ["lookahead"]), SETTINGS)
    return one


def test_the_numbers_of_every_prompt_are_written(
    workspace: Workspace, made: Evaluation
) -> None:
    assert newest(workspace.reports, "lookahead") == made
    assert made.software is not None
    assert torch.__version__.startswith(made.software.torch)  # which may add a build
    assert made.machine is not None
    assert made.hardware == made.machine.name
    assert len(made.calibrations) == 2
    assert all(one.plain_step and one.bandwidth > 0 for one in made.calibrations)
    greedy, sampled = made.temperatures
    assert len({one.key for one in greedy.prompts}) == 3
    for at in (greedy, sampled):
        for one in at.prompts:
            assert (one.kind, one.dataset) == ("text", "asked")
            assert one.plain.calls == one.plain.tokens - 1
            assert one.drafted.tokens <= one.drafted.calls + one.drafted.accepted + 1
            assert (
                one.drafted.check
                == one.plain.check
                == (None if at is sampled else "identical")
            )
    assert [one.plain.tokens for one in greedy.prompts] == [
        one.drafted.tokens for one in greedy.prompts
    ]


def test_cycles_are_counted_by_position_of_the_chain(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laps = clock.Laps(torch.device("cpu"))
    cycles = [
        Cycle([25], 0, (0, 0), [], 0.5, laps),  # the prefill
        Cycle([21, 22, 23, 24], 3, (3, 3), [], 0.2, laps, (0.9, 0.55, 0.5)),
        Cycle([21, 22], 1, (1, 3), [], 0.2, laps, (0.96, 0.52, 0.5)),
        Cycle([21, 22], 1, (0, 3), [], 0.2, laps),  # along another branch
        Cycle([21], 0, (0, 1), [], 0.2, laps),
    ]
    monkeypatch.setattr(decoders, "speculate", lambda *args, **kwargs: iter(cycles))
    settings = dataclasses.replace(SETTINGS, temperatures=(1.0,), limit=1)
    elsewhere = Workspace(workspace.model, tmp_path)
    (made,) = evaluate(
        elsewhere,
        open_drafters(elsewhere, ["lookahead"]),
        settings,
        prompts_file=workspace.prompts,
    )
    (shown,) = made.temperatures[0].shown
    a, b, c, d, e = load(workspace.model).tokenizer.decode(range(21, 26))
    expected = [
        (e, False, 0.5),
        (a + b + c, True, 0.7),
        (d, False, 0.7),
        (a, True, 0.9),
        (b, False, 0.9),
    ]
    expected += [(a, True, 1.1), (b, False, 1.1), (a, False, 1.3)]
    assert [
        (one.text, one.drafted, round(one.seconds or 0, 9)) for one in shown.pieces
    ] == expected
    one = made.temperatures[0].prompts[0].drafted
    assert (one.tokens, one.calls, one.accepted) == (10, 4, 5)
    assert (one.chain_tried, one.chain_accepted) == ((4, 2, 1), (2, 1, 1))
    assert (one.prefill_seconds, one.decode_seconds) == (0.5, 0.8)
    told = [
        (counts.position, counts.tried, counts.accepted, round(counts.chances, 9))
        for counts in one.probabilities
    ]
    assert told == [(0, 2, 2, 1.86), (1, 2, 1, 1.07), (2, 1, 1, 0.5)]
    found = figures(made.temperatures[0]).calibration
    assert found == pytest.approx((0.14 / 2, 0.07 / 2, 0.5))


@pytest.mark.parametrize(
    "change",
    [
        {"temperatures": (0.0, 0.5)},
        {"max_new_tokens": 9},
        {"limit": 2},
        {"trees": (Tree.parse("chain-3"),)},
        {"seed": 1},
        {"how": {"attention": "eager"}},
        {"how": {"compiled": True}},
        {"how": {"dtype": "bfloat16"}},
        {"threads": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_only_evaluations_with_the_same_settings_are_reused(
    change: dict[str, Any], workspace: Workspace, made: Evaluation, tmp_path: Path
) -> None:
    elsewhere = with_prompts_of(workspace, tmp_path)
    add = partial(new_file, elsewhere.reports, "lookahead")
    assert made.software is not None
    updated = dataclasses.replace(made.software, torch="1.0")
    for other in ({"hardware": "another"}, {"software": updated}):
        write(dataclasses.replace(made, **other), add())
        assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == []
    write(made, add())
    assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == [made]
    assert kept(
        elsewhere,
        open_drafters(elsewhere, ["lookahead"]),
        dataclasses.replace(SETTINGS, temperatures=(1.0,)),
    ) == [made]
    assert (
        kept(
            elsewhere,
            open_drafters(elsewhere, ["lookahead"]),
            dataclasses.replace(SETTINGS, **change),
        )
        == []
    )
    assert (
        kept(elsewhere, open_drafters(elsewhere, ["lookahead", "specvlm"]), SETTINGS)
        == []
    )
    later = dataclasses.replace(made, measured="2999-01-01 00:00:00")
    write(later, add())
    assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == [later]
    earlier_version = made.target.fingerprint[:16]
    target = dataclasses.replace(made.target, fingerprint=earlier_version)
    latest = dataclasses.replace(made, measured="2999-01-02 00:00:00", target=target)
    write(latest, add())
    assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == [
        latest
    ]
    fine_tuned = dataclasses.replace(made.target, fingerprint="0" * 24)
    for file in files_in(elsewhere.reports):
        write(dataclasses.replace(made, target=fine_tuned), file)
    assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == []


def test_an_evaluation_names_the_weights_that_it_is_of(
    workspace: Workspace, tmp_path: Path
) -> None:
    """Those of another training under the same description are others."""
    elsewhere = with_prompts_of(workspace, tmp_path)
    target = load(workspace.model)
    folder = synthetic.save("eagle2", elsewhere.drafter("tuned"), target=target)
    few = dataclasses.replace(SETTINGS, limit=1, temperatures=(0.0,))
    (made,) = evaluate(elsewhere, open_drafters(elsewhere, ["tuned"]), few)
    content = (folder / WEIGHTS).read_bytes()
    assert made.weights == hashlib.sha256(content).hexdigest()
    assert kept(elsewhere, open_drafters(elsewhere, ["tuned"]), few) == [made]
    (folder / WEIGHTS).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert kept(elsewhere, open_drafters(elsewhere, ["tuned"]), few) == []
    assert made.weights in str(read(elsewhere).groups[0].facts)


def test_a_prompt_that_the_target_refuses_is_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    contents = ["What is 1?", "What is <|image_pad|>?"]
    workspace = held_out(str(checkpoint("qwen2_5_vl")), tmp_path, contents)
    (row,) = (
        prompt.row
        for prompt in prompt_table.read(workspace.prompts)
        if "pad" in str(prompt.messages)
    )
    with pytest.raises(DataError, match=rf"placeholder.*\(row {row} of .*leave it out"):
        evaluate(workspace, open_drafters(workspace, ["lookahead"]), SETTINGS)


def test_a_drafter_of_another_target_is_refused_in_one_line(
    workspace: Workspace,
    checkpoint: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = load(str(checkpoint("qwen2_5_vl", seed=1)))
    synthetic.save("eagle2", workspace.drafter("stranger"), target=other)
    with pytest.raises(TrainingError, match="weights_hash"):
        evaluate(workspace, open_drafters(workspace, ["stranger"]), SETTINGS)
    where = ("--model", workspace.model, "--runs", str(workspace.root.parent))
    capsys.readouterr()
    assert main(["eval", "stranger", *where]) == 1
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if "stranger" in line
    ]
    assert other.name in line
    assert not (workspace.reports / "stranger.json").exists()


@pytest.mark.parametrize(
    "name", ["tuned/", "./tuned", "../drafters/tuned", "{folder}", "", ".tuned"]
)
def test_a_path_is_no_drafters_name(
    name: str, workspace: Workspace, tuned: Path
) -> None:
    runs = workspace.root.parent
    before = sorted(runs.rglob("*"))
    where = (
        "--model",
        workspace.model,
        "--runs",
        str(runs),
        "--limit",
        "1",
        "--max-new-tokens",
        "2",
    )
    status = 1 if name else 2  # no name is a mistake of the command line
    assert main(["eval", name.format(folder=tuned), *where]) == status
    assert sorted(runs.rglob("*")) == before


def test_a_file_of_an_older_format_is_not_reused(
    workspace: Workspace, made: Evaluation, tmp_path: Path
) -> None:
    elsewhere = with_prompts_of(workspace, tmp_path)
    file = (
        elsewhere.reports / "lookahead.json"
    )  # the name that earlier versions gave it
    write(made, file)
    assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == [made]
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))
    assert kept(elsewhere, open_drafters(elsewhere, ["lookahead"]), SETTINGS) == []
