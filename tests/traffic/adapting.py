"""Rounds on the embedded target: only a better drafter is published, and a kill costs nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.traffic.conftest import asked, write
from tests.traffic.conftest import fresh
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.description import describe, trained_on
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench import evaluate, records
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.traffic import adapt as traffic
from vlmdistill.pipelines.traffic.adapt import Adaptation, adapt
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.store import Store

SMALL = (
    "batch_tokens=1024",
    "stages.*.learning_rate=2e-3",
    "stages.*.visual=[0.5,0.5]",
    "tree=chain-3",
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray")]


def how(log: Path, **changes: Any) -> Adaptation:
    values: dict[str, Any] = {
        "steps": 40,
        "limit": 12,
        "max_new_tokens": 24,
        "workers": 1,
    }
    values["eval_share"] = 0.25
    values["settings"] = SMALL
    return Adaptation(sources=(str(log),), **{**values, **changes})


def test_a_better_drafter_is_published_with_what_it_was_trained_on(
    workspace: Workspace, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = adapt(workspace, "hawk", how(log))
    assert made.published, made.why
    assert versions.current(workspace, "hawk") == made.drafter == "hawk.r1"
    assert made.facts["new"]["tau"] > made.facts["new"]["base_tau"]
    store = Store.open(workspace.features)
    prompts = prompt_table.read(workspace.prompts)
    new = {one.key for one in prompts if one.time is not None and one.split == "train"}
    assert store.keys() == new
    trained = trained_on(workspace.drafter("hawk.r1"))
    assert trained is not None
    unknown = {key for key in trained if key.startswith("unknown:")}
    assert len(unknown) == 1  # the samples of the drafter that it began with
    assert trained - unknown <= new
    assert len(trained) > len(new) / 2  # without those that the training holds out
    assert describe(workspace.drafter("hawk.r1"))["training"]["init"]["from"].endswith(
        "hawk"
    )
    metrics = workspace.drafter("hawk.adapt") / "metrics.jsonl"
    assert json.loads(metrics.read_text())["published"] is True
    where = ["--model", "demo-small", "--runs", str(workspace.root.parent)]
    assert main(["adapt", "hawk", "--from", str(log), "--steps", "5", *where]) == 3
    assert (
        "0 samples of traffic are new to hawk.r1: a round needs 32"
        in capsys.readouterr().out
    )
    assert versions.current(workspace, "hawk") == "hawk.r1"
    assert main(["serve", "--drafter", "hawk", "--record-for", "3d", *where]) == 2


def test_a_drafter_that_is_not_surely_better_stays_unpublished(
    workspace: Workspace, log: Path
) -> None:
    settings = (*SMALL, "stages.*.learning_rate=0")
    made = adapt(
        workspace, "hawk", how(log, steps=None, minutes=0.01, settings=settings)
    )
    trained = describe(workspace.drafter(made.drafter))["training"]["steps"]
    assert made.facts["steps"] == trained >= 1
    assert not made.published
    assert "not surely better on the new prompts" in made.why
    assert versions.current(workspace, "hawk") == "hawk"
    with pytest.raises(DataError, match="--minutes"):
        adapt(workspace, "hawk", how(log, minutes=1))


def test_old_prompts_that_are_too_few_to_compare_are_no_reason_to_publish(
    tmp_path: Path, target: VisionLanguageTarget, log: Path
) -> None:
    here = fresh(tmp_path, target, old=3)
    made = adapt(here, "hawk", how(log))
    assert not made.published
    assert "0 of 3 held-out prompts of the old traffic can be compared" in made.why
    assert made.facts["new"]["ratio"][0] > 1


def test_killed_after_any_stage_a_round_goes_on_and_ends_as_if_it_was_not(
    workspace: Workspace, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def killing(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            result = whole(*given, **named)
            if name not in done:
                done.append(name)
                raise KeyboardInterrupt
            return result

        return call

    places: list[tuple[Any, str]] = [
        (traffic, "harvest"),
        (flow, "capture_features"),
        (traffic, "filter_store"),
        (train, "run"),
        (evaluate, "evaluate"),
    ]
    for place, name in places:
        monkeypatch.setattr(place, name, killing(name, getattr(place, name)))
    for _ in places:
        with pytest.raises(KeyboardInterrupt):
            adapt(workspace, "hawk", how(log, steps=12))
    made = adapt(workspace, "hawk", how(log, steps=12))
    assert done == [name for _, name in places]
    assert (made.number, made.drafter) == (1, "hawk.r1")
    assert len(versions.rounds(workspace, "hawk")) == 1
    assert describe(workspace.drafter("hawk.r1"))["training"]["steps"] == 12
    keys = [one.key for one in prompt_table.read(workspace.prompts)]
    assert len(keys) == len(set(keys))
    assert not (workspace.drafter("hawk.adapt") / "plan.json").exists()


def test_a_round_runs_the_target_in_the_dtype_of_the_store(
    workspace: Workspace, log: Path, tmp_path: Path
) -> None:
    questions = [
        {"messages": asked(f"Name {number} colours.")["messages"]}
        for number in range(4)
    ]
    import_prompts([str(write(tmp_path / "new.jsonl", questions))], workspace.prompts)
    where = ["--model", "demo-small", "--runs", str(workspace.root.parent)]
    capture = ["features", "--for", "eagle2", "--workers", "0", "--max-new-tokens", "8"]
    assert main([*capture, "--target-dtype", "bfloat16", *where]) == 0
    finished = adapt(workspace, "hawk", how(log, steps=12))
    store = Store.open(workspace.features)
    assert store.record.head.dtype == "bfloat16"
    assert len(store.keys()) == 4 + finished.facts["harvest"]["train"]
    evaluations = [records.read(file) for file in records.files_in(workspace.reports)]
    assert {evaluation.dtype for evaluation in evaluations} == {"bfloat16"}
