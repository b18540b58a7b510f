"""Training ends with a drafter, whatever happens on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
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
WORKER = """
import sys
from pathlib import Path
from tests.drafters.synthetic import plan
from vlmdistill.drafters.training.trainer import train

def tell(progress):
    print(progress.step, progress.loss.hex(), flush=True)

train(plan(Path(sys.argv[1]), Path(sys.argv[2])), tell)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "store"
    synthetic.store(path, 24)
    return path


def test_a_killed_run_continues_bit_for_bit(store: Path, tmp_path: Path) -> None:
    """Killed in a process of its own, continued in this one."""
    expected: dict[str, str] = {}
    train(plan(store, tmp_path / "whole"), lambda one: expected.update({str(one.step): one.loss.hex()}))
    assert len(expected) > 8

    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, str(tmp_path / "worker.py"), str(store), str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    seen: dict[str, str] = {}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            step, loss = line.split()
            seen[step] = loss
            if len(seen) == 5:  # two steps after the checkpoint at step 3
                killed.send_signal(signal.SIGKILL)
                break
    assert killed.returncode == -signal.SIGKILL
    resumed: dict[str, str] = {}
    again = plan(store, tmp_path / "killed", resume=True)
    train(again, lambda one: resumed.update({str(one.step): one.loss.hex()}))
    assert min(map(int, resumed)) == 4
    assert {**seen, **resumed} == expected
    files = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert files[0] == files[1]


@pytest.mark.parametrize("counted", [(), ("steps=30",)])
def test_images_come_in_as_the_stage_goes_on(counted: tuple[str, ...], store: Path, tmp_path: Path) -> None:
    """By epochs or by steps: a mix that begins with text alone and ends with images alone."""
    tokens: list[int] = []
    mixed = ("stages.text.epochs=0", "stages.multimodal.epochs=10", "stages.multimodal.visual=[0,1]")
    settings = (*mixed, "batch_tokens=30", *counted)
    run = plan(store, tmp_path / "out", drafter="msd", settings=settings, micro_tokens=15)
    train(run, lambda progress: tokens.append(progress.tokens))
    assert len(tokens) >= 30
    text = len(synthetic.LAYOUTS["no image"])
    shown = [count not in (text, 2 * text) for count in tokens]  # steps of two samples at most
    third = len(shown) // 3
    assert not any(shown[:3])  # the first epoch
    assert sum(shown[:third]) < third / 2 < sum(shown[-third:])


def test_a_finished_run_is_left_alone_and_another_one_is_refused(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan(store, out))
    written = (out / "model.safetensors").stat().st_mtime_ns
    train(plan(store, out))
    assert (out / "model.safetensors").stat().st_mtime_ns == written
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
    machinery = {
        "__init__",
        "base",
        "layers",
        "losses",
        "memory",
        "catalogue",
        "config",
        "checkpoint",
        "export",
    }
    modules = {file.stem for file in (ROOT / "drafters").glob("*.py")} - machinery
    assert modules == set(catalogue.DRAFTERS)
    for name in catalogue.DRAFTERS:
        assert issubclass(catalogue.load(name).Config, DrafterConfig)
