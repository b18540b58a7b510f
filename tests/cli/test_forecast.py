"""What a stage needs: told beforehand, recorded afterwards, and refused where it is not there."""

import json
import os
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import vlmdistill
from tests.cli.conftest import dialogues
from tests.cli.test_overview import printed, responded
from tests.drafters import synthetic
from vlmdistill.cli.main import main
from vlmdistill.pipelines.planning import forecast, resources
from vlmdistill.pipelines.workspace import rates
from vlmdistill.stores.errors import DataError

pytestmark = pytest.mark.usefixtures("workplace")
Output = pytest.CaptureFixture[str]
Usage = namedtuple("Usage", "total used free")
FEATURES = ("features", "--dry-run", "--for", "wren", "--target-dtype", "float32")


@pytest.fixture
def prompts(workplace: object) -> None:
    dialogues(40)
    assert main(["prompts", "talks.json", "--eval-share", "0.3"]) == 0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program wants a CPU."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def test_a_run_beside_other_programs_is_no_rate_where_there_is_another(
    alone: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        os, "getloadavg", lambda: (100.0 * (os.cpu_count() or 1), 0.0, 0.0)
    )
    rates.record(tmp_path, "features", 200, 100.0)
    only = rates.known(tmp_path, "features")
    assert only is not None
    assert only.tokens_per_second == 2
    assert len(caplog.records) == 1
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    rates.record(tmp_path, "features", 200, 4.0)
    monkeypatch.setattr(
        os, "getloadavg", lambda: (100.0 * (os.cpu_count() or 1), 0.0, 0.0)
    )
    rates.record(tmp_path, "features", 200, 100.0)
    found = rates.known(tmp_path, "features")
    assert found is not None
    assert found.tokens_per_second == 50
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("prompts", "alone")
def test_time_is_told_by_a_stated_rate_or_the_last_run_here(capsys: Output) -> None:
    responded(4, tokens=11)

    def stages(*options: str) -> Any:
        return printed(capsys, *FEATURES, *options)["stages"]

    unknown = stages()
    assert [stage["seconds"] for stage in unknown.values()] == [None, None]
    tokens = unknown["features"]["tokens"]
    stated = stages("--rate", "features=50", "--rate", "responses=2.5")
    assert stated["features"]["seconds"] == pytest.approx(tokens / 50)
    response_tokens = unknown["responses"]["tokens"]
    assert stated["responses"]["seconds"] == pytest.approx(response_tokens / 2.5)
    assert stated["features"]["rate"] == "stated"
    root = Path("runs/demo-small")
    for seconds in (4.0, 10.0, 1.0):  # the last one is too short to say anything
        rates.record(root, "features", 200, seconds)
    last = json.loads((root / rates.FILE).read_text().splitlines()[-1])
    with (root / rates.FILE).open(
        "a"
    ) as file:  # another machine, and a line that was cut off
        file.write(
            json.dumps({**last, "where": "elsewhere", "seconds": 1})
            + '\n{"stage": "fea'
        )
    measured = stages()["features"]
    assert measured["seconds"] == pytest.approx(tokens / 20)
    assert measured["rate"] == "measured"
    assert stages("--engine", "vllm")["features"]["seconds"] is None
    for text in ("features", "features=0", "feature=3", "features=-1"):
        assert main([*FEATURES, "--rate", text]) == 1
        assert "such as features=3000" in capsys.readouterr().err


@pytest.mark.usefixtures("prompts")
def test_what_one_pass_captures_takes_no_time_of_its_own(capsys: Output) -> None:
    responded(4, tokens=11)
    here = printed(capsys, *FEATURES)["stages"]["features"]
    vllm = printed(capsys, *FEATURES, "--engine", "vllm")["stages"]["features"]
    assert vllm["tokens"] == 4 * (9 + 11)
    assert here["tokens"] == here["to_do"] * (9 + 11)


def test_store_and_annex_take_a_pass_of_the_target_each() -> None:
    def capture(waiting: int, to_come: int) -> forecast._PlannedCapture:
        tokens = forecast._Tokens
        return forecast._PlannedCapture(
            frozenset(), 2, tokens(waiting, 0), tokens(to_come, 5)
        )

    captures = [capture(25, 10), capture(60, 20)]
    assert forecast.tokens_to_run(captures, in_one_pass=False) == 40 + 85
    assert forecast.tokens_to_run(captures, in_one_pass=True) == 25 + 85


@pytest.mark.usefixtures("prompts")
def test_memory_is_that_of_weights_and_batches_in_a_dtype(capsys: Output) -> None:
    responded(4, tokens=11)

    def memory(dtype: str, batch: str) -> Any:
        options = ("--max-new-tokens", "100", "--target-dtype", dtype)
        command = ("responses", "--dry-run", *options, "--batch-size", batch)
        return printed(capsys, *command)["stages"]["responses"]["memory"]

    whole, half = memory("float32", "8"), memory("bfloat16", "8")
    parts = whole["weights"] + whole["kv_cache"] + whole["logits"]
    assert whole["total"] == 2 * half["total"] == parts
    info = printed(capsys, "target", "show", "demo-small")
    assert whole["weights"] == 4 * info["parameters"]["all"]
    sizes = info["target"]
    token = 2 * 4 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"]
    # The prompts that are known have nine tokens.
    assert whole["kv_cache"] == 8 * (9 + 100) * token
    assert memory("bfloat16", "16")["kv_cache"] == 2 * half["kv_cache"]


@pytest.mark.usefixtures("prompts")
def test_a_pass_over_half_of_the_tokens_takes_half_of_the_memory(
    capsys: Output,
) -> None:
    responded(4, tokens=11)
    passes = []
    for tokens in ("4096", "8192"):
        stages = printed(capsys, *FEATURES, "--batch-tokens", tokens)["stages"]
        passes.append(stages["features"]["memory"]["pass"])
    assert 2 * passes[0] == passes[1] > 0


@pytest.mark.usefixtures("prompts")
def test_a_share_of_probability_above_all_of_it_is_refused(capsys: Output) -> None:
    assert main(["responses", "--top-p", "1.5", "--anyway"]) == 1
    assert "--top-p 1.5" in capsys.readouterr().err


@pytest.mark.usefixtures("prompts")
def test_a_dry_run_of_the_flow_has_all_stages_and_does_nothing(capsys: Output) -> None:
    responded(4, tokens=11)
    before = sorted(Path("runs").rglob("*"))
    command = ["run", "--dry-run", "--drafters", "wren,lookahead", "--set", "steps=60"]
    planned = printed(capsys, *command)
    stages = planned["stages"]
    assert [*stages] == ["responses", "features", "train wren", "eval"]
    training = stages["train wren"]
    assert (training["to_do"], training["tokens"]) == (60, 60 * 2048)
    assert training["memory"]["optimizer"] > 0
    # Plain and two drafters at two temperatures.
    assert stages["eval"]["to_do"] % (2 * 3) == 0
    assert stages["responses"]["to_do"] > 0
    assert planned["seconds"] is None
    assert main([*command, "--rate", "train=1000"]) == 0
    assert " 2 min " in capsys.readouterr().out  # 60 steps of 2,048 tokens
    assert sorted(Path("runs").rglob("*")) == before
    command = ["run", "--dry-run", "--drafters", "all", "--set", "steps=0"]
    assert main(command) == 0
    assert "by epochs" in capsys.readouterr().out


@pytest.mark.usefixtures("prompts")
def test_a_dry_run_downloads_nothing(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target whose weights are elsewhere, the shipped configuration says what it takes."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a dry run asks the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    monkeypatch.setenv("RAY_ADDRESS", "cluster:10001")  # whose memory is not known
    model = ("--model", "qwen2.5-vl-3b")
    workspace = Path("runs/qwen2.5-vl-3b")
    workspace.mkdir()
    shutil.copy("runs/demo-small/prompts.parquet", workspace)
    commands = {
        "responses": ("responses",),
        "features": ("features", "--for", "hivis"),
        "train hivis": ("train", "hivis", "--set", "steps=60"),
        "eval": ("eval", "hivis", "--limit", "2"),
    }
    alone = {}
    for stage, command in commands.items():
        planned = printed(capsys, *command, *model, "--dry-run")["stages"]
        alone[stage] = planned[stage]
    flow = ("run", "--drafters", "hivis", "--set", "steps=60", "--limit", "2")
    temperature = ("--temperature", "0")
    together = printed(capsys, *flow, *temperature, *model, "--dry-run")["stages"]
    assert "not trained yet" in alone["eval"]["details"]
    for stage in (*together.values(), *alone.values()):
        del stage["details"]  # with the free disk, which others change
    assert together == alone
    weights = 2 * printed(capsys, "target", "show", model[1])["parameters"]["all"]
    float32 = {2 * weights, weights}
    assert alone["features"]["memory"]["weights"] in float32
    assert alone["eval"]["memory"]["weights"] in float32
    assert alone["features"]["certainty"] == "assumed"
    assert alone["features"]["disk_bytes"] > 0
    assert alone["train hivis"]["tokens"] == 60 * 16384


def test_a_step_has_no_more_tokens_than_the_samples(capsys: Output) -> None:
    store = synthetic.store(Path("store"), 9)
    command = ("train", "wren", "--store", "store", "--set", "steps=2", "--dry-run")

    def tokens(batch_tokens: int) -> int:
        option = ("--set", f"batch_tokens={batch_tokens}")
        stage = printed(capsys, *command, *option)["stages"]["train wren"]
        return int(stage["tokens"])

    assert tokens(10) == 2 * 10
    of_samples = store.view(None)["text_tokens"].sum()
    assert 0 < tokens(10**11) <= 2 * of_samples


@pytest.mark.usefixtures("prompts")
def test_a_stage_that_cannot_end_is_not_started(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    responded(4, tokens=11)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))
    for command in (["features", "--for", "wren"], ["run", "--drafters", "wren"]):
        assert main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "of disk are needed" in line
        assert "1 kB free" in line
        assert "--anyway" in line
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**12))
    monkeypatch.setattr(resources, "free_memory", lambda: 1000)
    synthetic.save("eagle3", Path("runs/demo-small/drafters/mine"))
    synthetic.store(Path("store"), 9)
    train = ["train", "wren", "--store", "store", "--set", "steps=1"]
    for command in (
        ["responses"],
        ["features", "--for", "wren"],
        ["eval", "mine"],
        train,
    ):
        assert main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "of memory are needed in float32, and this machine has 1 kB free" in line
        assert "--anyway" in line
    synthetic.store(Path("runs/demo-small/features"), 9)
    stages = (
        vlmdistill.responses,
        vlmdistill.features,
        partial(vlmdistill.train, "wren"),
    )
    for stage in (*stages, partial(vlmdistill.evaluate, "mine")):
        with pytest.raises(DataError, match=r"of memory are needed .*anyway=True"):
            stage()
    assert not Path("runs/demo-small/drafters/wren.training").exists()
    assert main([*train, "--anyway"]) == 0
    assert (
        vlmdistill.train("wren", settings={"steps": 1}, anyway=True, force=True).steps
        == 1
    )


def test_what_fits_on_gpus_is_told_for_one_or_for_all() -> None:
    free = [10 * 2**30, 10 * 2**30]
    for spread, lacking in ((True, ""), (False, "14 GB of memory")):
        memory = resources.Memory(
            dtype="bfloat16",
            parts={"weights": 14 * 10**9, "kv_cache": 50 * 10**9},
            halved=50 * 10**9,
            free=free,
            device="GPU",
            spread=spread,
        )
        assert memory.lacking.startswith(lacking) if lacking else not memory.lacking


def test_a_training_leaves_its_rate(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic.store(Path("store"), 9)
    monkeypatch.setattr(rates, "LEAST", 0.0)
    command = [
        "train",
        "wren",
        "--store",
        "store",
        "--set",
        "steps=2",
        "--set",
        "batch_tokens=64",
    ]
    assert main(command) == 0
    rate = rates.known(Path("runs/demo-small"), "train wren")
    assert rate is not None
    assert rate.tokens > 64
    planned = printed(capsys, *command, "--dry-run", "--name", "again")
    seconds = planned["stages"]["train again"]["seconds"]
    assert seconds == pytest.approx(2 * 64 / rate.tokens_per_second)
    for options, to_do in ((), 0), (("--force",), 2):
        dry = printed(capsys, *command, "--dry-run", *options)
        assert dry["stages"]["train wren"]["to_do"] == to_do


def test_a_dry_run_of_a_training_that_starts_over_takes_other_settings(
    capsys: Output,
) -> None:
    synthetic.store(Path("store"), 9)
    drafter = synthetic.save("medusa", Path("runs/demo-small/drafters/medusa"))
    command = ("train", "medusa", "--store", "store", "--set", "steps=2", "--dry-run")
    assert main([*command]) == 1
    assert "--force to replace it" in capsys.readouterr().err
    planned = printed(capsys, *command, "--force")["stages"]["train medusa"]
    assert (planned["to_do"], planned["done"]) == (2, 0)
    assert (drafter / "model.safetensors").exists()
