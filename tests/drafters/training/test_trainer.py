"""Training ends with a drafter, whatever happens on the way."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.drafters import synthetic
from tests.drafters.synthetic import plan, stopped
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.config import ModelConfig
from vlmdistill.drafters.core.settings import from_dict, override, to_dict
from vlmdistill.drafters.training import cpu
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.saved import Position
from vlmdistill.drafters.training.schedule import Schedule
from vlmdistill.drafters.training.trainer import train
from vlmdistill.pipelines.planning import forecast
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.errors import DataError, StoppedError, StoreError, TrainingError
from vlmdistill.stores.manifest import digest, seal
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.sharing.mirror import Mirror, VersionedFolder
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WORKER = """
import sys
from pathlib import Path
from tests.drafters.synthetic import plan
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train

def tell(progress):
    print(progress.step, progress.loss.hex(), flush=True)

train(plan(Path(sys.argv[1]), Path(sys.argv[2])), tell)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(synthetic.store(tmp_path_factory.mktemp("trainer"), 24).path)


def test_a_forecast_says_what_the_training_then_does(
    store: Path, tmp_path: Path
) -> None:
    run = plan(store, tmp_path / "out")
    planned = forecast.training(run)
    assert planned.done == 0
    assert [*tmp_path.iterdir()] == []
    steps: list[TrainingProgress] = []
    train(run, steps.append)
    assert planned.to_do == steps[-1].step
    weights = load_file(run.out / "model.safetensors")
    count = sum(weight.numel() for weight in weights.values())
    assert f"{count} weights" in planned.details
    after = forecast.training(run)
    assert (after.to_do, after.done) == (0, planned.to_do)


def test_a_killed_run_continues_bit_for_bit(store: Path, tmp_path: Path) -> None:
    """Killed in a process of its own, continued in this one."""
    expected: dict[str, str] = {}
    train(
        plan(store, tmp_path / "whole"),
        lambda one: expected.update({str(one.step): one.loss.hex()}),
    )
    assert len(expected) > 8

    (tmp_path / "worker.py").write_text(WORKER)
    command = [
        sys.executable,
        str(tmp_path / "worker.py"),
        str(store),
        str(tmp_path / "killed"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/src",
        "OMP_NUM_THREADS": "1",
    }
    seen: dict[str, str] = {}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            step, loss = line.split()
            seen[step] = loss
            if len(seen) == 5:  # two steps after the checkpoint at step 3
                killed.send_signal(signal.SIGKILL)
                break
    assert killed.returncode == -signal.SIGKILL
    resumed: dict[str, str] = {}
    again = plan(store, tmp_path / "killed")
    train(again, lambda one: resumed.update({str(one.step): one.loss.hex()}))
    assert min(map(int, resumed)) == 4
    assert {**seen, **resumed} == expected
    files = [
        (tmp_path / run / "model.safetensors").read_bytes()
        for run in ("whole", "killed")
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize("counted", [(), ("steps=30",)])
def test_images_come_in_as_the_stage_goes_on(
    counted: tuple[str, ...], store: Path, tmp_path: Path
) -> None:
    """By epochs or by steps: a mix that begins with text alone and ends with images alone."""
    tokens: list[int] = []
    mixed = (
        "stages.text.epochs=0",
        "stages.multimodal.epochs=10",
        "stages.multimodal.visual=[0,1]",
    )
    settings = (*mixed, "batch_tokens=30", *counted)
    run = plan(
        store, tmp_path / "out", drafter="msd", settings=settings, micro_tokens=15
    )
    train(run, lambda progress: tokens.append(progress.tokens))
    assert len(tokens) >= 30
    text = len(synthetic.LAYOUTS["no image"])
    shown = [
        count not in (text, 2 * text) for count in tokens
    ]  # steps of two samples at most
    third = len(shown) // 3
    assert not any(shown[:3])  # the first epoch
    assert sum(shown[:third]) < third / 2 < sum(shown[-third:])


def test_a_finished_run_is_left_alone_and_another_one_is_refused(
    store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train(plan(store, out))
    written = (out / "model.safetensors").stat().st_mtime_ns
    train(plan(store, out))
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(TrainingError, match="settings or data"):
        train(plan(store, out, seed=1))


def test_a_run_on_other_responses_to_the_same_prompts_is_another_run(
    store: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    synthetic.store(again, 24, seed=1)
    stopped(plan(store, tmp_path / "out"), 4)
    with pytest.raises(TrainingError, match="content"):
        train(plan(again, tmp_path / "out"))
    train(plan(store, tmp_path / "out"))
    with pytest.raises(TrainingError, match="other responses"):
        train(plan(again, tmp_path / "out"))


def test_a_run_on_features_that_were_captured_again_is_another_run(
    store: Path, tmp_path: Path
) -> None:
    """Of the same tokens, as in another encoding."""
    again = tmp_path / "again"
    synthetic.store(again, 24, factor=1.01)
    stopped(plan(store, tmp_path / "out"), 4)
    with pytest.raises(TrainingError, match="content"):
        train(plan(again, tmp_path / "out"))


def test_a_run_that_starts_over_removes_the_old_one_only_when_it_can_begin(
    store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train(plan(store, out))
    first = (out / "model.safetensors").read_bytes()
    for cannot in (plan(tmp_path / "typo", out), plan(store, out, view="typo")):
        with pytest.raises((StoreError, TrainingError)):
            train(cannot, force=True)
        assert (out / "model.safetensors").read_bytes() == first
    train(plan(store, out, seed=1), force=True)
    assert (out / "model.safetensors").read_bytes() != first


def test_a_run_whose_loss_is_not_finite_fails_and_saves_nothing_of_it(
    store: Path, tmp_path: Path
) -> None:
    diverging = plan(
        store, tmp_path / "out", settings=("stages.*.learning_rate=1e25",), save_every=1
    )
    with pytest.raises(
        TrainingError, match=r"step \d+ has a loss of .*nan.*learning rate"
    ):
        train(diverging)
    assert not diverging.out.exists()
    for file in diverging.state.glob("step*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(file).values())


def test_a_sample_that_is_not_finite_is_named_with_a_view_that_trains_without_it(
    tmp_path: Path,
) -> None:
    made = synthetic.store(tmp_path / "store", 20)
    broken = made.read(next(key for key in made if made.read(key).spans))
    broken.features[Feature("hidden", "text")][0, 0] = float("nan")
    with made.writer("broken") as writer:
        writer.add(replace(broken, key="broken"))
    run = plan(
        tmp_path / "store", tmp_path / "out", settings=("steps=40",), save_every=3
    )
    with pytest.raises(
        TrainingError, match=r"sample broken .*key <> 'broken'"
    ) as error:
        train(run)
    assert "rate" not in str(error.value)
    lines = (run.state / "metrics.jsonl").read_text().splitlines()
    assert not any("null" in line for line in lines)
    filter_store(
        Store.open(tmp_path / "store"), "finite", expressions=["key <> 'broken'"]
    )
    train(replace(run, view="finite"), force=True)
    assert run.out.exists()


def test_a_stage_without_samples_is_named_with_its_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = synthetic.store(tmp_path / "store", 20)
    filter_store(whole, "shown", expressions=["visual_tokens > 0"])
    settings = ("steps=10", "stages.*.visual=[1,1]", "stages.text.visual=[0,0]")
    train(plan(tmp_path / "store", tmp_path / "out", settings=settings, view="shown"))
    (line,) = [
        one.getMessage() for one in caplog.records if "left out" in one.getMessage()
    ]
    assert re.search(r"stage text .* \d of 10 steps", line)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("visual_tokens > 0", "of text alone"),
        ("visual_tokens = 0", "with images or videos"),
        ("visual_tokens >= 0", ""),
    ],
)
def test_a_kind_that_stages_mix_and_the_store_lacks_is_named_once(
    where: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = synthetic.store(tmp_path / "store", 20)
    filter_store(whole, "part", expressions=[where])
    settings = ("steps=2", "stages.*.visual=[0.5,0.5]")
    train(plan(tmp_path / "store", tmp_path / "out", settings=settings, view="part"))
    messages = [record.getMessage() for record in caplog.records]
    warned = [message for message in messages if "a mix of" in message]
    assert len(warned) == bool(kind)
    for message in warned:
        assert message.startswith("text, multimodal: ")
        assert f"has no samples {kind}: " in message


@pytest.mark.parametrize("steps", range(1, 10))
def test_the_last_epoch_is_known_where_steps_do_not_divide_it(steps: int) -> None:
    config = override(catalogue.config("sparrow"), [f"steps={steps}"]).training
    schedule = Schedule(config, config.stages[:1], micro=2)
    begun = [*range(0, steps, 3)]  # of epochs with five batches
    last = [
        schedule.is_last_epoch(Position(steps_before_epoch=one), 5) for one in begun
    ]
    assert last == [False] * (len(begun) - 1) + [True]


def test_an_unfinished_run_goes_on_and_one_of_other_settings_is_refused_by_their_names(
    store: Path, tmp_path: Path
) -> None:
    stopped(plan(store, tmp_path / "out"), 4)
    other = plan(
        store, tmp_path / "out", seed=1, settings=("stages.text.hops=2", "warmup=0.5")
    )
    with pytest.raises(TrainingError) as refused:
        train(other)
    for word in (
        "seed 1, not 0",
        "stages.text.hops 2, not 1",
        "warmup 0.5, not ",
        "--force",
        "--name",
    ):
        assert word in str(refused.value)
    grown = tmp_path / "grown"
    synthetic.store(grown, 20)
    with pytest.raises(TrainingError, match=r"samples 20 .*, not 24 "):
        train(plan(grown, tmp_path / "out"))
    seen: list[int] = []
    train(plan(store, tmp_path / "out"), lambda progress: seen.append(progress.step))
    assert seen[0] == 4
    with pytest.raises(TrainingError, match=r"seed 1, not 0.*warmup 0.5, not "):
        train(other)


@pytest.mark.parametrize(
    "settings", [("steps=12",), ("stages.*.epochs=1.5",), ("stages.text.epochs=0",)]
)
def test_the_number_of_steps_is_known_from_the_first_on(
    settings: tuple[str, ...], store: Path, tmp_path: Path
) -> None:
    seen: list[TrainingProgress] = []
    train(plan(store, tmp_path / "out", settings=settings), seen.append)
    assert [one.step for one in seen] == [*range(1, len(seen) + 1)]
    assert abs(seen[0].total - len(seen)) <= (0 if settings == ("steps=12",) else 2)
    assert seen[-1].total >= len(seen)


def test_a_long_training_returns_freed_memory_again_and_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = list[int]()
    steps = list[int]()
    monkeypatch.setattr(cpu, "TRIM_EVERY", 4)
    monkeypatch.setattr(cpu, "trim", lambda: returned.append(steps[-1]))
    training = plan(store, tmp_path / "out", settings=("steps=9",))
    train(training, lambda progress: steps.append(progress.step))
    assert returned == [4, 8]


def test_the_number_of_steps_counts_that_images_come_in(
    store: Path, tmp_path: Path
) -> None:
    """Later epochs are longer than the first one, which has text alone."""
    seen: list[TrainingProgress] = []
    ramp = (
        "stages.text.epochs=0",
        "stages.multimodal.epochs=9.5",
        "stages.multimodal.visual=[0,1]",
    )
    train(
        plan(
            store, tmp_path / "out", drafter="msd", settings=(*ramp, "batch_tokens=60")
        ),
        seen.append,
    )
    assert seen[0].total == pytest.approx(len(seen), rel=0.15)


# A run that is asked to end


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method:DeprecationWarning"
)  # what ZeRO imports
@pytest.mark.parametrize(
    ("number", "zero", "dtype"),
    [
        (signal.SIGINT, 0, "float32"),
        (signal.SIGTERM, 1, "float32"),
        (signal.SIGTERM, 2, "bfloat16"),
        (signal.SIGINT, 0, "bfloat16"),
    ],
)
def test_a_signal_writes_a_checkpoint_from_which_the_run_goes_on_bit_for_bit(
    number: signal.Signals, zero: int, dtype: str, store: Path, tmp_path: Path
) -> None:
    def stop(progress: TrainingProgress) -> None:
        if progress.step == 4:
            for _ in range(
                2 if number == signal.SIGTERM else 1
            ):  # from Slurm, and again from torchrun
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    how: dict[str, Any] = {"zero": zero, "dtype": dtype, "save_every": 100}
    with pytest.raises(StoppedError, match=r"^5 of .* all ") as caught:
        train(plan(store, tmp_path / "parts", **how), stop)
    assert caught.value.signal == number
    seen: list[int] = []
    train(
        plan(store, tmp_path / "parts", **how),
        lambda progress: seen.append(progress.step),
    )
    assert seen[0] == 6
    train(plan(store, tmp_path / "whole", **how))
    files = [
        (tmp_path / run / "model.safetensors").read_bytes()
        for run in ("whole", "parts")
    ]
    assert files[0] == files[1]
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_at_once_and_says_what_is_saved(
    store: Path, tmp_path: Path
) -> None:
    def stop(progress: TrainingProgress) -> None:
        if progress.step in (2, 5):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StoppedError, match=r"^2 of .* none "):
        train(plan(store, tmp_path / "out"), stop)
    with pytest.raises(StoppedError, match=r"^5 of .* 3 "):
        train(
            plan(store, tmp_path / "again"),
            lambda one: stop(one) if one.step == 5 else None,
        )


def test_a_checkpoint_that_cannot_be_written_is_not_said_to_be(
    store: Path, tmp_path: Path
) -> None:
    run = plan(store, tmp_path / "out", save_every=100)

    def stop(progress: TrainingProgress) -> None:
        if progress.step == 2:
            (run.state / "checkpoint.json" / "in the way").mkdir(parents=True)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match=r"no checkpoint .* none ") as caught:
        train(run, stop)
    assert "\n" not in str(caught.value)


def test_a_copy_that_fails_is_made_later_and_only_at_the_end_it_counts(
    store: Path, tmp_path: Path
) -> None:
    way, seen = tmp_path / "copies", list[int]()
    run = plan(store, tmp_path / "out", checkpoints=str(way / "run"))

    def hear(stop: int, back: int) -> Callable[[TrainingProgress], None]:
        def heard(one: TrainingProgress) -> None:
            seen.append(one.step)
            if not way.exists():
                way.write_text("in the way")
            if one.step == back:
                way.unlink()
                way.mkdir()
            if one.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        return heard

    with pytest.raises(TrainingError, match=r"copied to .* 5 of .* all of them saved"):
        train(run, hear(4, 0))
    way.unlink()
    train(run, hear(0, 8))
    assert seen[5] == 6
    latest = VersionedFolder(Local(way / "run")).latest()
    assert latest
    assert {
        "checkpoint.json",
        f"step{len(seen) // 3 * 3}.safetensors",
    } < latest.files.keys()
    shutil.rmtree(way)
    whole = replace(run, out=tmp_path / "whole")
    with pytest.raises(TrainingError, match="copied to"):
        train(whole, hear(0, 0))
    assert (whole.out / "model.safetensors").read_bytes() == (
        run.out / "model.safetensors"
    ).read_bytes()


def test_a_run_that_another_machine_has_continued_is_not_said_to_go_on_from_here(
    store: Path, tmp_path: Path
) -> None:
    url, other = tmp_path / "copies", tmp_path / "other"
    run = plan(store, tmp_path / "out", checkpoints=str(url))

    def hear(progress: TrainingProgress) -> None:
        if progress.step == 4:
            mirror = Mirror(Local(url), other, tmp_path / "other.json")
            mirror.update()
            (other / "step4.safetensors").write_bytes(b"other")
            mirror.publish()

    with pytest.raises(TrainingError, match="step4") as caught:
        train(run, hear)
    assert "are done" not in str(caught.value)


# A checkpoint that something has happened to


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["PAYLOAD"],)


def test_a_pickle_in_the_training_folder_is_never_run(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAYLOAD", str(tmp_path / "it ran"))
    run = plan(store, tmp_path / "out")
    stopped(run, 4)
    (file,) = run.state.glob("step3*")
    content = file.read_bytes()
    evil = pickle.dumps(Payload())
    (run.state / "step3").mkdir()
    for planted in (
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ):
        (run.state / "step3" / planted).write_bytes(evil)
    (run.state / "latest.json").write_text(
        json.dumps({"tag": "step3", "signature": "", "world": 1})
    )
    file.write_bytes(evil)
    with pytest.raises(TrainingError, match="damaged"):
        train(run)
    # With a record that vouches for it.
    record = json.loads((run.state / "checkpoint.json").read_bytes())
    del record["blake3"]
    whole = (run.state / "checkpoint.json").read_bytes()
    (run.state / "checkpoint.json").write_bytes(
        seal({**record, "checksum": digest(evil)})
    )
    with pytest.raises(TrainingError, match="damaged"):
        train(run)
    file.write_bytes(content)
    (run.state / "checkpoint.json").write_bytes(whole)
    train(run)
    assert not (tmp_path / "it ran").exists()


def test_a_damaged_checkpoint_is_one_line(store: Path, tmp_path: Path) -> None:
    run = plan(store, tmp_path / "out")
    stopped(run, 4)
    for file in run.state.glob("*e*3*.safetensors"), run.state.glob("checkpoint.json"):
        (path,) = file
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = (
            content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        )
        for damaged in (content[:middle], b"", flipped, b"[" * 100_000):
            path.write_bytes(damaged)
            with pytest.raises(TrainingError, match="damaged: --force") as caught:
                train(run)
            assert "\n" not in str(caught.value)
        path.write_bytes(content)
    record = json.loads((run.state / "checkpoint.json").read_bytes())
    del record["blake3"]
    for member, wrong in [
        ("position", {**record["position"], "total": "../../../etc/passwd"}),
        ("position", {**record["position"], "stage": -1}),
        (
            "position",
            {**record["position"], "reader": {"identity": "", "history": [[1, 0, 1]]}},
        ),
        (
            "position",
            {**record["position"], "history": [{"held_out_agreement": "high"}]},
        ),
        ("position", [1, 2]),
        ("settings", None),
        ("signature", None),
    ]:
        (run.state / "checkpoint.json").write_bytes(seal({**record, member: wrong}))
        with pytest.raises(TrainingError):
            train(run)
    (run.state / "checkpoint.json").write_bytes(seal(record))
    train(run)


def test_a_checkpoint_of_a_development_version_says_how_to_start_over(
    store: Path, tmp_path: Path
) -> None:
    run = plan(store, tmp_path / "out")
    stopped(run, 4)
    file = run.state / "checkpoint.json"
    record = json.loads(file.read_bytes())
    del record["blake3"]
    file.write_bytes(seal({**record, "format": 1}))
    with pytest.raises(TrainingError, match=r"development version .*--force") as caught:
        train(run)
    assert "\n" not in str(caught.value)
    train(run, force=True)


def test_only_the_last_checkpoint_is_kept_and_a_half_written_one_is_not_taken(
    store: Path, tmp_path: Path
) -> None:
    run = plan(store, tmp_path / "out")
    stopped(run, 7)
    assert [file.name for file in run.state.glob("step*")] == ["step6.safetensors"]
    (run.state / "step9.safetensors").write_bytes(
        b"half of it"
    )  # killed before its record was written
    seen: list[int] = []
    train(run, lambda progress: seen.append(progress.step))
    assert seen[0] == 7


def test_training_tells_what_it_learnt_about_each_sample(
    store: Path, tmp_path: Path
) -> None:
    train(plan(store, tmp_path / "facts", settings=("stages.multimodal.visual=[1,1]",)))
    opened = Store.open(store)
    images = opened.index.filter(opened.index["visual_tokens"] > 0)
    from vlmdistill.stores.index.run_stats import join_stats

    table = join_stats(opened.backend, images)
    assert table["kept"].is_between(0, 1).all()
    assert table["agree0"].is_between(0, 1).all()
    assert (table["loss"] > 0).all()


def test_settings_survive_json_and_wrong_ones_are_named() -> None:
    paper = catalogue.config("sparrow")
    config = override(paper, ["tree=chain-5", "stages.text.hops=3", "ivsb=false"])
    again = from_dict(paper, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert str(again.tree) == "chain-5"
    assert again.training.stages[0].hops == 3
    added = override(config, ["stages.multimodal.losses.cross_entropy=0.5"])
    assert added.training.stages[1].losses["cross_entropy"] == 0.5
    for wrong, message in [
        ("ivsb", "key=value"),
        ("iwsb=false", "iwsb"),
        ("ivsb=maybe", "ivsb"),
        ("stages.third.hops=2", "text, multimodal"),
        ("stages.text.hop=2", "hop"),
        ("stages.text.hops=two", "hops"),
        ("stages.text.losses.l2=1", "l2"),
        ('stages=[{"name":"text","hop":2}]', "stages.text.hop"),
        ("tree=30-3", "30-3-8"),
        ("batch_tokens=many", "batch_tokens"),
        ("clip=-1", "clip"),
        ("stages.text.epochs=Infinity", "epochs"),
        ("stages.text.visual=[2,3]", "visual"),
        ("stages.text.visual.0=0.5", r"visual\.0"),
        ('stages.text.losses={"cross_entropy":0}', "weight above 0"),
    ]:
        with pytest.raises(DataError, match=message):
            override(config, [wrong])


def test_a_drafter_folder_is_whole_or_refused(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan(store, out))
    tables = synthetic.head()
    drafter = checkpoint.load(out, tables, synthetic.INFO)
    assert not drafter.training
    weights = load_file(out / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in weights)
    origin = Store.open(store).provenance
    from msgspec import structs

    with pytest.raises(TrainingError, match="weights_hash w, not other"):
        checkpoint.load(
            out,
            tables,
            synthetic.INFO,
            provenance=structs.replace(origin, weights_hash="other"),
        )
    file = out / "model.safetensors"
    content = file.read_bytes()
    for damaged in (
        content[: len(content) // 2],
        b"",
        content[:8] + b"\\xff" * 100 + content[108:],
    ):
        file.write_bytes(damaged)
        with pytest.raises(TrainingError, match="missing or corrupt"):
            checkpoint.load(out, tables, synthetic.INFO)
    file.unlink()
    with pytest.raises(TrainingError, match="missing or corrupt"):
        checkpoint.load(out, tables, synthetic.INFO)
    (out / "config.json").write_text("{")
    with pytest.raises(TrainingError, match="JSON"):
        checkpoint.load(out, tables, synthetic.INFO)
    with pytest.raises(TrainingError, match="nowhere"):
        checkpoint.load(tmp_path / "nowhere", tables, synthetic.INFO)


def test_the_catalogue_is_the_folder() -> None:
    modules = {file.stem for file in (ROOT / "drafters").glob("*.py")} - {
        "__init__",
        "catalogue",
    }
    assert modules == set(catalogue.DRAFTERS)
    untrained = [
        name
        for name in catalogue.DRAFTERS
        if not catalogue.load(name).Training().stages
    ]
    assert untrained == [*catalogue.UNTRAINED]
    for name in catalogue.DRAFTERS:
        assert issubclass(catalogue.load(name).Config, ModelConfig)
