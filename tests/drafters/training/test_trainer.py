"""Training ends with a drafter, whatever happens on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.drafters import synthetic
from tests.drafters.synthetic import plan
from vlmdistill.drafters import catalogue, checkpoint
from vlmdistill.drafters.base import DrafterConfig
from vlmdistill.drafters.config import from_dict, override, to_dict
from vlmdistill.drafters.training.record import Progress
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.store import Store

ROOT = Path(__file__).parents[3]
ROOM = {"medusa": 0.25}
"""Share learnt by heart where it is less: on random states, a head that only adds cannot reach more."""

WORKER = """
import sys
from pathlib import Path
from tests.drafters.synthetic import plan
from vlmdistill.drafters.training.trainer import train

def tell(progress):
    print(progress.step, progress.loss.hex(), flush=True)

train(plan(Path(sys.argv[1]), Path(sys.argv[2]), resume=True, **eval(sys.argv[3])), tell)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "store"
    synthetic.store(path, 24)
    return path


def start(store: Path, out: Path, *, ranks: int = 1, **more: Any) -> "subprocess.Popen[str]":
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = out.parent / "worker.py"
    script.write_text(WORKER)
    command = [
        sys.executable,
        *(launcher if ranks > 1 else []),
        str(script),
        str(store),
        str(out),
        repr(more),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", synthetic.TRAINED)
def test_it_learns_a_handful_of_samples_by_heart(name: str, tmp_path: Path) -> None:
    few = tmp_path / "store"
    synthetic.store(few, 6)
    seen: list[Progress] = []
    settings = ("stages.*.epochs=150", "noise=0", "stages.*.learning_rate=0.02", "batch_tokens=500")
    train(plan(few, tmp_path / "out", drafter=name, settings=settings, save_every=10**6), seen.append)
    assert seen[-1].agreement[0] > ROOM.get(name, 0.9)
    assert seen[0].agreement[0] < ROOM.get(name, 0.5)


def test_a_killed_run_continues_bit_for_bit(store: Path, tmp_path: Path) -> None:
    whole = start(store, tmp_path / "whole")
    expected = dict(line.split() for line in whole.communicate()[0].splitlines())
    assert whole.returncode == 0
    assert len(expected) > 8

    seen: dict[str, str] = {}
    killed = start(store, tmp_path / "killed")
    assert killed.stdout is not None
    for line in killed.stdout:
        step, loss = line.split()
        seen[step] = loss
        if len(seen) == 5:  # two steps after the checkpoint at step 3
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate()
    again = start(store, tmp_path / "killed")
    resumed = dict(line.split() for line in again.communicate()[0].splitlines())
    assert again.returncode == 0
    assert min(map(int, resumed)) == 4
    assert {**seen, **resumed} == expected
    files = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert files[0] == files[1]


@pytest.mark.parametrize("zero", [0, 2])
def test_two_ranks_take_the_step_of_one(zero: int, store: Path, tmp_path: Path) -> None:
    quiet = {"settings": ("noise=0", "stages.*.epochs=1"), "zero": zero}
    for ranks, name in ((1, "one"), (2, "two")):
        run = start(store, tmp_path / name, ranks=ranks, **quiet)
        run.communicate()
        assert run.returncode == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-3, atol=1e-4)


def test_a_finished_run_is_left_alone_and_another_one_is_refused(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan(store, out))
    written = (out / "model.safetensors").stat().st_mtime_ns
    began = time.monotonic()
    train(plan(store, out))
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert time.monotonic() - began < 60
    with pytest.raises(TrainingError, match="other settings or data"):
        train(plan(store, out, seed=1))


def test_an_unfinished_run_is_continued_only_when_asked(store: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.step == 4:
            raise StopError

    with pytest.raises(StopError):
        train(plan(store, tmp_path / "out"), stop)
    with pytest.raises(TrainingError, match="--resume"):
        train(plan(store, tmp_path / "out"))
    with pytest.raises(TrainingError, match="other settings"):
        train(plan(store, tmp_path / "out", resume=True, seed=1))
    seen: list[int] = []
    train(plan(store, tmp_path / "out", resume=True), lambda progress: seen.append(progress.step))
    assert seen[0] == 4


def test_a_store_without_a_needed_feature_is_refused_and_one_feature_more_is_not_read(tmp_path: Path) -> None:
    synthetic.store(tmp_path / "poor", 3, ["hidden.text", "hidden.span"])
    with pytest.raises(TrainingError, match=r"does not hold layer2\.visual, which sparrow needs"):
        train(plan(tmp_path / "poor", tmp_path / "out"))
    needs = {
        feature.name
        for feature in catalogue.load("sparrow").needs(plan(tmp_path, tmp_path).config, synthetic.INFO)
    }
    exact, rich = tmp_path / "exact", tmp_path / "rich"
    synthetic.store(exact, 6, sorted(needs))
    synthetic.store(rich, 6)
    for one in (exact, rich):
        train(plan(one, tmp_path / f"{one.name}-out"))
    (shard,) = (rich / "shards").iterdir()
    for extra in set(synthetic.ALL) - needs:
        for chunk in (shard / extra).rglob("*"):
            if chunk.is_file():
                chunk.write_bytes(b"damaged")
    train(plan(rich, tmp_path / "unread"))


def test_training_tells_what_it_learnt_about_each_sample(store: Path, tmp_path: Path) -> None:
    train(plan(store, tmp_path / "told", settings=("stages.multimodal.visual=[1,1]",)))
    opened = Store.open(store)
    images = opened.index.filter(opened.index["visual_tokens"] > 0)
    from vlmdistill.stores.sidecar import join_stats

    table = join_stats(opened.place, images)
    assert table["kept"].is_between(0, 1).all()
    assert table["agree0"].is_between(0, 1).all()
    assert (table["loss"] > 0).all()


def test_settings_survive_json_and_wrong_ones_are_named() -> None:
    config = override(
        catalogue.load("sparrow").Config(), ["tree=chain-5", "stages.text.hops=3", "ivsb=false"]
    )
    again = from_dict(type(config), json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert str(again.tree) == "chain-5"
    assert again.stages[0].hops == 3
    added = override(config, ["stages.multimodal.losses.cross_entropy=0.5"])
    assert added.stages[1].losses["cross_entropy"] == 0.5
    for wrong, message in [
        ("ivsb", "key=value"),
        ("iwsb=false", "iwsb"),
        ("ivsb=maybe", "ivsb"),
        ("stages.third.hops=2", "text, multimodal"),
        ("stages.text.hop=2", "hop"),
        ("tree=30-3", "30-3-8"),
        ("batch_tokens=many", "batch_tokens"),
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
    from dataclasses import replace

    with pytest.raises(TrainingError, match="another target"):
        checkpoint.load(out, tables, synthetic.INFO, provenance=replace(origin, weights_hash="other"))
    file = out / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:8] + b"\\xff" * 100 + content[108:]):
        file.write_bytes(damaged)
        with pytest.raises(TrainingError, match="missing or corrupt"):
            checkpoint.load(out, tables, synthetic.INFO)
    file.unlink()
    with pytest.raises(TrainingError, match="missing or corrupt"):
        checkpoint.load(out, tables, synthetic.INFO)
    (out / "config.json").write_text("{")
    with pytest.raises(TrainingError, match="not readable JSON"):
        checkpoint.load(out, tables, synthetic.INFO)
    with pytest.raises(TrainingError, match="no drafter in"):
        checkpoint.load(tmp_path / "nowhere", tables, synthetic.INFO)


def test_the_catalogue_is_the_folder() -> None:
    machinery = {"__init__", "base", "layers", "losses", "memory", "catalogue", "config", "checkpoint"}
    modules = {file.stem for file in (ROOT / "drafters").glob("*.py")} - machinery
    assert modules == set(catalogue.DRAFTERS)
    for name in catalogue.DRAFTERS:
        assert issubclass(catalogue.load(name).Config, DrafterConfig)
