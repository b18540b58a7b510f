"""Validation during training: what it measures, which weights are kept, what is recorded."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafters import synthetic
from tests.drafters.synthetic import plan, stopped
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.training import saved
from vlmdistill.drafters.training.batches import as_batch, split
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.saved import HeldOut
from vlmdistill.drafters.training.trackers import MODULES
from vlmdistill.drafters.training.trainer import train
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.stores.errors import DataError, StoppedError, TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.store import Store

pytestmark = pytest.mark.slow

ZERO = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method:DeprecationWarning"
)  # what it imports
HOW: dict[str, Any] = {"held_out": 0.3, "save_every": 2}
SETTINGS = ("steps=14", "validate_every=3", "tree=chain-3")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(synthetic.store(tmp_path_factory.mktemp("validation"), 30).path)


def training(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = describe(run.out)["training"]
    return found


def figures(run: Run) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run.state / "metrics.jsonl").read_text().splitlines()
    ]


def weights(run: Run) -> bytes:
    return (run.out / "model.safetensors").read_bytes()


def expected_tau(run: Run, chain: int) -> float:
    """Row by row: one token, and the drafted ones before the first that is not the target's."""
    opened = Store.open(run.store)
    held_out = split(opened, None, run.config.training, run.held_out).held_out
    drafter = checkpoint.load(run.out, synthetic.head(), synthetic.INFO)
    assert isinstance(drafter, Drafter)
    probe = Stage(name="probe", hops=chain)
    accepted, counted = [0] * chain, [0] * chain
    for key in held_out:
        (samples,) = Epoch(
            opened, run.config.model.needs(opened.info), keys=[key], token_budget=1
        )
        with torch.no_grad():
            scores = unroll(drafter, as_batch(samples, "float32"), probe).scores
        for row in range(len(scores[0].agree_R)):
            alive = True
            for hop, score in enumerate(scores):
                alive &= bool(score.agree_R[row])
                counted[hop] += bool(score.count_R[row])
                accepted[hop] += bool(score.count_R[row]) and alive
    return 1 + sum(one / of for one, of in zip(accepted, counted, strict=True))


def test_the_best_weights_by_predicted_tau_are_kept(
    store: Path, tmp_path: Path
) -> None:
    run = plan(
        store,
        tmp_path / "out",
        settings=(*SETTINGS, "stages.*.learning_rate=0.05"),
        held_out=0.3,
        save_every=1,
    )
    states: dict[int, dict[str, Tensor]] = {}

    def look(progress: TrainingProgress) -> None:
        for file in run.state.glob("step*.safetensors"):  # of the step before
            states[progress.step - 1] = load_file(file)

    train(run, look)
    record = training(run)
    assert record["steps"] == 14
    taus = {one["step"]: one["predicted_tau"] for one in record["history"]}
    assert {3, 6, 9, 12, 14} <= set(taus)
    best = record["saved_step"]
    assert taus[best] == max(taus.values())
    assert best < 14, "the test shows nothing if the last step is the best one"
    kept = load_file(run.out / "model.safetensors")
    assert kept
    assert all(
        torch.equal(kept[name], states[best][f"weight/drafter.{name}"]) for name in kept
    )
    assert taus[best] == pytest.approx(expected_tau(run, 3))


def test_without_validation_the_last_weights_are_kept(
    store: Path, tmp_path: Path
) -> None:
    run = plan(store, tmp_path / "out", settings=("steps=14", "tree=chain-3"), **HOW)
    train(run)
    assert training(run)["saved_step"] == 14
    taus = {one["step"]: one["predicted_tau"] for one in training(run)["history"]}
    assert taus[14] == pytest.approx(expected_tau(run, 3))


@ZERO
@pytest.mark.parametrize(
    ("step", "asked", "drafter", "more"),
    [
        (5, True, "sparrow", {}),  # ends after step 6, before it is measured
        (7, False, "sparrow", {}),
        (10, False, "eagle3", {"zero": 1}),
        (5, True, "medusa", {"zero": 2, "dtype": "bfloat16"}),
    ],
)
def test_a_run_that_validates_continues_bit_for_bit(
    step: int,
    asked: bool,
    drafter: str,
    more: dict[str, Any],
    store: Path,
    tmp_path: Path,
) -> None:
    """Killed or asked to end, also right before a validation."""
    settings = (*SETTINGS, "patience=3", "stages.*.learning_rate=0.02")
    whole, parts = (
        plan(store, tmp_path / name, drafter=drafter, settings=settings, **HOW, **more)
        for name in ("whole", "parts")
    )
    train(whole)
    if asked:
        with pytest.raises(StoppedError):
            train(
                parts,
                lambda one: (
                    os.kill(os.getpid(), signal.SIGTERM) if one.step == step else None
                ),
            )
    else:
        stopped(parts, step)
    train(parts)
    assert training(parts) == training(whole)
    assert weights(parts) == weights(whole)
    lines = [
        [(one["step"], "train/loss" in one) for one in figures(run)]
        for run in (whole, parts)
    ]
    assert lines[0] == lines[1]


def test_a_drafter_tells_the_steps_and_passes_of_its_stages(
    store: Path, tmp_path: Path
) -> None:
    """Where the run counts steps, the epochs of its settings are only the shares of the stages."""
    run = plan(
        store,
        tmp_path / "out",
        settings=("steps=14", "stages.*.visual=[0.5,0.5]"),
        **HOW,
    )
    train(run)
    record = training(run)
    lines = [one for one in figures(run) if "train/loss" in one]
    for stage in record["stages"]:
        own = [one for one in lines if one["stage"] == stage["name"]]
        assert stage["steps"] == len(own) == 7
    whole = plan(
        store, tmp_path / "whole", settings=("stages.*.epochs=3", *SETTINGS[2:]), **HOW
    )
    train(whole)
    text, multimodal = training(whole)["stages"]
    kinds = split(Store.open(whole.store), None, whole.config.training, whole.held_out)
    samples = training(whole)["samples"]
    assert text["passes"] == pytest.approx(3 * len(kinds.text) / samples, abs=0.01)
    assert multimodal["passes"] == pytest.approx(
        3 * len(kinds.visual) / samples, abs=0.01
    )


def test_a_stage_that_learns_nothing_more_ends_early(
    store: Path, tmp_path: Path
) -> None:
    idle = ("steps=40", "stages.*.learning_rate=0", "validate_every=2", "patience=2")
    run = plan(store, tmp_path / "out", settings=idle, **HOW)
    train(run)
    steps = [(one["stage"], one["step"]) for one in training(run)["history"]]
    assert steps == [
        *(("text", step) for step in (2, 4, 6)),
        *(("multimodal", step) for step in (8, 10, 12)),
    ]
    assert training(run)["saved_step"] == 2
    # Stopped where a stage has just ended.
    parts = plan(store, tmp_path / "parts", settings=idle, **HOW)
    stopped(parts, 7)
    train(parts)
    assert training(parts) == training(run)


def test_a_run_continues_from_a_checkpoint_at_the_end_of_a_stage(
    store: Path, tmp_path: Path
) -> None:
    """The reader of the stage that is done is not that of the next."""
    settings = ("steps=8", "stages.*.epochs=1")
    how: dict[str, Any] = {"settings": settings, "held_out": 0.3, "save_every": 4}
    whole, parts = (plan(store, tmp_path / name, **how) for name in "ab")
    train(whole)
    stopped(parts, 5)
    assert figures(parts)[-1]["stage"] == "multimodal"
    train(parts)
    assert weights(parts) == weights(whole)
    assert [one["step"] for one in figures(parts) if "train/loss" not in one] == [4, 8]


def test_settings_that_cannot_validate_are_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="--validation-share"):
        train(plan(store, tmp_path / "out", settings=SETTINGS))
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="patience=2"):
        plan(store, tmp_path / "out", settings=("patience=2",))
    with pytest.raises(TrainingError):
        train(
            plan(
                store,
                tmp_path / "out",
                settings=("stages=[]", "validate_every=5"),
                **HOW,
            )
        )


@pytest.mark.parametrize(("share", "told"), [(0.001, 1), (0.0, 0), (0.3, 0)])
def test_samples_that_are_too_few_to_hold_one_out_are_told(
    store: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    share: float,
    told: int,
) -> None:
    train(plan(store, tmp_path / "out", settings=("steps=1",), held_out=share))
    assert (
        sum("--validation-share" in record.getMessage() for record in caplog.records)
        == told
    )


# What is recorded


def test_every_step_has_its_figures_once(store: Path, tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    run = plan(store, tmp_path / "out", settings=SETTINGS, **HOW)
    stopped(run, 7)
    with (run.state / "metrics.jsonl").open("a") as file:
        file.write('{"step": [7]}\n')  # of another program
        file.write('{"step": 8, "sta')  # killed in the middle of a line
    train(run, seen.append)
    steps = [one for one in figures(run) if "train/loss" in one]
    assert [one["step"] for one in steps] == [*range(1, 15)]
    assert steps[-1]["train/loss"] == seen[-1].loss
    for one in steps:
        assert {"train/agreement/hop0", "train/tokens", "train/memory_bytes"} < set(one)
        assert one["train/gradient_norm"] > 0
        assert 0 <= one["train/data_wait"] <= one["train/seconds"]
        rate = one["train/tokens_per_second"] * one["train/seconds"]
        assert rate == pytest.approx(one["train/tokens"])
    measured = {
        one["step"]: one["held_out/predicted_tau"]
        for one in figures(run)
        if "train/loss" not in one
    }
    assert measured == {
        one["step"]: one["predicted_tau"] for one in training(run)["history"]
    }


@ZERO
def test_the_gradient_is_measured_before_clipping_and_the_same_in_any_form(
    store: Path, tmp_path: Path
) -> None:
    norms: list[float] = []
    for zero, dtype, clip in [
        (0, "float32", 0.5),
        (0, "float32", 1e-3),
        (1, "float32", 1),
        (2, "bfloat16", 1),
    ]:
        settings = ("steps=1", f"clip={clip}")
        run = plan(
            store, tmp_path / str(len(norms)), settings=settings, zero=zero, dtype=dtype
        )
        train(run, lambda one: norms.append(one.gradient_norm))
    assert norms[0] > 0.5
    assert norms[1:] == pytest.approx(norms[:1] * 3, rel=0.02)


def test_tensorboard_is_written_if_asked_for_and_named_if_missing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, board = (
        plan(store, tmp_path / name, settings=SETTINGS, trackers=trackers, **HOW)
        for name, trackers in {"plain": (), "board": ("tensorboard",)}.items()
    )
    train(plain)
    assert not (plain.state / "tensorboard").exists()
    train(board)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(board.state / "tensorboard"))
    log.Reload()
    named = {name for one in figures(board) for name in one} - {
        "step",
        "stage",
        "total",
    }
    assert set(log.Tags()["scalars"]) == named
    assert [one.step for one in log.Scalars("train/gradient_norm")] == [*range(1, 15)]

    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, module, None)
        missing = plan(store, tmp_path / "missing", trackers=(name,))
        with pytest.raises(TrainingError, match=rf"vlmdistill\[{name}\]"):
            train(missing)
        assert not missing.state.exists()
    train(plan(store, tmp_path / "other"))


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_get_the_figures_of_every_step_and_no_word_on_stdout(
    name: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The calls of their interfaces; a run that goes on continues its record."""
    begun: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []
    ended: list[None] = []

    def init(**about: Any) -> SimpleNamespace:
        sys.stdout.write("welcome")
        begun.append(about)
        return SimpleNamespace(
            log=lambda figures, step: sent.append({"step": step, **figures})
        )

    def finish() -> None:
        ended.append(None)

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init, finish=finish))
    run = plan(store, tmp_path / "out", settings=SETTINGS, trackers=(name,), **HOW)
    with pytest.raises(StoppedError):
        train(
            run,
            lambda one: os.kill(os.getpid(), signal.SIGTERM) if one.step == 5 else None,
        )
    train(run)
    kept = figures(run)
    told = [{key: one[key] for key in one.keys() - {"stage", "total"}} for one in kept]
    assert sent == told
    first, second = begun
    assert second == {**first, "resume": "allow"}
    assert "resume" not in first
    assert len(ended) == 2
    train(
        plan(
            store,
            tmp_path / "out2",
            settings=(*SETTINGS, "steps=1"),
            trackers=(name,),
            **HOW,
        )
    )
    assert begun[2]["name"] != first["name"]
    assert all("synthetic" in one["name"] for one in begun)
    assert [one["id"] == one["name"] for one in begun if "id" in one] == [True] * (
        3 * (name == "wandb")
    )
    assert capsys.readouterr().out == ""


def test_a_tracker_that_fails_does_not_end_the_run(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[int] = []

    def fail(figures: object, step: int) -> None:
        sent.append(step)
        raise RuntimeError("no network")

    module = SimpleNamespace(
        init=lambda **about: SimpleNamespace(log=fail), finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = plan(store, tmp_path / "out", settings=SETTINGS, trackers=("wandb",), **HOW)
    train(run)
    assert (run.out / "model.safetensors").exists()
    assert len(sent) == 1
    assert "no network" in caplog.text


def test_a_checkpoint_has_room_for_the_measurements_of_a_long_run(
    tmp_path: Path,
) -> None:
    measured = HeldOut(
        stage="multimodal",
        step=123_456,
        held_out_agreement=[1 / 3] * 5,
        predicted_tau=10 / 3,
    )
    position = saved.Position(history=[measured] * 20_000)
    now = saved.Saved(
        signature="", settings={}, ranks=1, dtype="float32", position=position
    )
    saved.write(tmp_path, now, {})
    read = saved.read(tmp_path)
    assert read is not None
    assert read.position == position
