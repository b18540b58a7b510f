"""A cluster: a machine with a different disk is named; machines that fail, die or join disturb no other."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests import tiny
from tests.pipelines.cluster.machines import Cluster, namespaces
from tests.s3 import s3_server
from vlmdistill.pipelines.cluster.queue import FAILURES
from vlmdistill.pipelines.cluster.shared import Shared, marked, some_media
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import read
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.responses.responder import Responder, plan
from vlmdistill.pipelines.targets.checkpoints.fingerprint import (
    checkpoint as checkpoint_of,
)
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError, StoreError, TargetError
from vlmdistill.stores.store import Store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
AWS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}
SECONDS = 400  # for one run on a very busy machine
PROMPTS = 24

on_machines = pytest.mark.skipif(
    not namespaces(), reason="mount and process namespaces are not allowed here"
)


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]
) -> Path:
    """A folder with a model, prompts, and responses to all of them."""
    folder = tmp_path_factory.mktemp("world")
    model = checkpoint("qwen2_5_vl", layers=1)
    (folder / "model").symlink_to(model)
    rows = list[dict[str, Any]]()
    for i in range(PROMPTS):
        rows.append({"conversations": [{"from": "human", "value": f"What is {i}?"}]})
        if i % 8 == 0:
            tiny.picture(28, 28, i).save(folder / f"{i}.png")
            rows[-1]["image"] = f"{i}.png"
    (folder / "mix.json").write_text(json.dumps(rows))
    import_prompts([str(folder / "mix.json")], folder / "prompts.parquet")
    sampling, filters = SamplingSettings(max_new_tokens=4), Filters(min_words=0)
    worker = Responder(str(model), sampling, filters, batch=16)
    for task in plan(read(folder / "prompts.parquet"), PROMPTS, 0):
        kept = [
            dataclasses.replace(row, keep=True, reason="")
            for row in worker.work(task).rows
        ]
        dataset.write_part(folder / "responses", task.name, kept)
    settings = {"sampling": vars(sampling), "filters": vars(filters), **worker.facts()}
    dataset.write_settings(
        folder / "responses", {"checkpoint": str(checkpoint_of(str(model))), **settings}
    )
    return folder


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of an S3 server with a bucket `bucket`."""
    with s3_server() as url:
        S3FileSystem(key="x", secret="x", endpoint_url=url).mkdir("bucket")
        yield url


@pytest.fixture(scope="module")
def cluster(bucket: str) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(
            prefix="ray", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        Cluster(
            Path(folder),  # of which each machine has one of its own
            {**AWS, "AWS_ENDPOINT_URL": bucket, "VLMDISTILL_CACHE": f"{folder}/cache"},
        ) as machines,
    ):
        yield machines


def own_disk(*folders: Path) -> str:
    """Mounts that give a machine a copy of its own of these folders, under the same paths."""
    copies = [
        f"cp -r {one} /mnt/{i} && mount --bind /mnt/{i} {one}"
        for i, one in enumerate(folders)
    ]
    return " && ".join(["mount -t tmpfs none /mnt", *copies])


def start(cluster: Cluster, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=cluster.drivers,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def features(world: Path, store: str) -> list[str]:
    command = [
        "-m",
        "vlmdistill",
        "features",
        "-m",
        str(world / "model"),
        "--store",
        store,
    ]
    files = [
        "--prompts",
        str(world / "prompts.parquet"),
        "--responses",
        str(world / "responses"),
    ]
    return [*command, *files, "--for", "sparrow", "--json"]


@on_machines
def test_a_machine_with_a_disk_of_its_own_is_named_before_any_work(
    cluster: Cluster, world: Path
) -> None:
    cluster.on(B="true", C=own_disk(world))
    here, store = (
        ["-m", str(world / "model"), "--runs", str(world / "runs")],
        str(world / "store"),
    )
    missing = [
        "-m",
        "vlmdistill",
        "features",
        "--import",
        str(world / "mix.json"),
        *here,
        "--for",
        "sparrow",
    ]
    for command in (features(world, store), [*missing, "--store", store, "--json"]):
        out, err = start(cluster, *command).communicate(timeout=SECONDS)
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("error: machine C (127.0.0.67): ")
        assert f"the store {world / 'store'} " in line
    assert not list((world / "store").glob("commits/*"))
    assert not list((world / "runs").rglob("part-*"))  # no response was generated


CAPTURE = """
import sys
from pathlib import Path
from vlmdistill.cli.console import log_to_stderr
from vlmdistill.pipelines.data.features import capturer
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.prompts import prompt_table
log_to_stderr(debug=False)
world = Path(sys.argv[1])
prompts = prompt_table.read(world / "prompts.parquet")
summary = capturer.capture(
    prompts, world / "responses", CaptureStore(sys.argv[2]), str(world / "model"),
    capturer.CaptureSettings(drafters=["sparrow"], shard_bytes=1),
    report=lambda done, total, remark="": print(done, flush=True),
)
print(summary.captured, len(summary.failed))
"""


@on_machines
def test_without_a_shared_folder_all_samples_are_captured_although_a_machine_dies(
    cluster: Cluster, bucket: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.on(B="true", C=own_disk(world))
    run = start(cluster, "-c", CAPTURE, str(world), "s3://bucket/store")
    assert run.stdout is not None
    for line in run.stdout:
        if int(line) >= 4:
            break
    cluster.off("C")
    out, err = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, err
    assert out.splitlines()[-1] == f"{PROMPTS} 0"
    assert "machine C (127.0.0.67)" in err
    assert len(err.splitlines()) < 6  # Ray has much more to say of it
    for name, value in {**AWS, "AWS_ENDPOINT_URL": bucket}.items():
        monkeypatch.setenv(name, value)
    index = Store.open("s3://bucket/store").index
    assert sorted(index["key"]) == sorted(
        prompt.key for prompt in read(world / "prompts.parquet")
    )


@on_machines
def test_images_of_a_workspace_at_a_url_reach_machines_that_do_not_have_them(
    cluster: Cluster, bucket: str, world: Path, tmp_path: Path
) -> None:
    rows = json.loads((world / "mix.json").read_text())
    for row in rows:
        if "image" in row:
            row["image"] = tiny.data_url((world / row["image"]).read_bytes())
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    where = ["-m", str(world / "model"), "--runs", "s3://bucket/runs"]
    cluster.on(B="true")
    for words in (
        ["prompts", str(tmp_path / "rows.json")],
        ["features", "--responses", str(world / "responses"), "--for", "sparrow"],
    ):
        run = start(cluster, "-m", "vlmdistill", *words, *where, "--json")
        out, err = run.communicate(timeout=SECONDS)
        assert run.returncode == 0, err
    assert json.loads(out)["captured"] == PROMPTS


TOY = """
import json, sys, time
from dataclasses import dataclass, field
from pathlib import Path
from vlmdistill.cli.console import log_to_stderr
from vlmdistill.pipelines.cluster.session import here, machines, session
from vlmdistill.pipelines.cluster.pool import ActorPool, WorkerOptions
from vlmdistill.stores.errors import VlmdistillError

@dataclass(frozen=True)
class Numbers:
    keys: tuple
    def only(self, keys):
        return Numbers(tuple(key for key in self.keys if key in keys))

@dataclass
class Result:
    machine: str
    failed: dict = field(default_factory=dict)
    left: tuple = ()

class Toy:
    def __init__(self):
        self.machine = machines()[here()].name[0]
    def facts(self):
        (folder / self.machine).touch()
        return "ready"
    def wait_for(self, machine):
        while not (folder / machine).exists():
            time.sleep(0.05)

class Blind(Toy):
    def work(self, task):
        self.wait_for("C")
        if self.machine == "C":
            return Result("C", {key: "cannot be read" for key in task.keys})
        time.sleep(0.1)
        return Result(self.machine, {key: "is damaged" for key in task.keys if key == "bad"})

class Busy(Toy):
    def work(self, task):
        if self.machine == "B" and int(task.keys[0]) > 10:
            self.wait_for("D")
        time.sleep(0.1)
        return Result(self.machine)

folder, kind, number = Path(sys.argv[1]), globals()[sys.argv[2]], int(sys.argv[3])
tasks = [Numbers((f"{i}", f"{i}+", f"{i}-")) for i in range(number)] + [Numbers(("bad",))]
log_to_stderr(debug=False)
try:
    with session(), ActorPool(kind, options=WorkerOptions(wait=5.0)) as pool:
        for done in pool.run(tasks):
            machine = done.result.machine if done.result else ""
            print(json.dumps([machine, done.task.keys, done.failed]), flush=True)
except VlmdistillError as error:
    sys.exit(str(error))
"""


@on_machines
def test_a_machine_that_fails_fast_does_not_draw_the_tasks(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.on(B="true", C="true")
    run = start(cluster, "-c", TOY, str(tmp_path), "Blind", "20")
    out, err = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, err
    done = [json.loads(line) for line in out.splitlines()]
    assert sorted(
        key
        for machine, keys, _ in done
        if machine == "B"
        for key in keys
        if key != "bad"
    ) == sorted(f"{i}{sign}" for i in range(20) for sign in ("", "+", "-"))
    assert sum(machine == "C" for machine, _, _ in done) == FAILURES
    failed = {key: why for _, _, some in done for key, why in some.items()}
    assert list(failed) == ["bad"]
    assert "machine B (127.0.0." in failed["bad"]
    assert (
        sum(
            "machine C (127.0.0." in line and "is dropped" in line
            for line in err.splitlines()
        )
        == 1
    )


@on_machines
def test_a_run_continues_without_lost_machines_and_with_new_ones(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.on(B="true", C="true")
    run = start(cluster, "-c", TOY, str(tmp_path), "Busy", "5000")
    assert run.stdout is not None
    machines, keys = list[str](), list[str]()

    def read_until(enough: Callable[[], bool]) -> None:
        assert run.stdout is not None
        while not enough() and (line := run.stdout.readline()):
            machine, some, failed = json.loads(line)
            assert failed == {}
            machines.append(machine)
            keys.extend(some)

    read_until(lambda: {"B", "C"} <= set(machines))
    assert run.poll() is None, run.communicate()
    cluster.off("C")
    cluster.on(D="true")
    read_until(lambda: machines.count("D") > 3)
    cluster.off("B")
    cluster.off("D")
    read_until(lambda: False)
    _, err = run.communicate(timeout=SECONDS)
    assert set(machines) == {"B", "C", "D"}
    assert len(set(keys)) == len(keys)
    assert run.returncode == 1
    assert " 5 s (machine " in err.splitlines()[-1]
    for name in ("B", "C", "D"):
        assert any(
            f"machine {name} (127.0.0." in line and "was lost" in line
            for line in err.splitlines()
        )
    assert any(
        line.startswith("machine D (127.0.0.") and line.endswith("joined")
        for line in err.splitlines()
    )


def test_a_machine_names_what_it_does_not_see(
    world: Path, tmp_path: Path, checkpoint: Any
) -> None:
    model, mine = str(world / "model"), checkpoint_of(str(world / "model"))
    media = some_media(read(world / "prompts.parquet"))
    assert len(media) == PROMPTS // 8
    store = open_backend(tmp_path / "store")
    with marked(store) as mark:
        Shared(model, mine, media, store, mark)()
        with pytest.raises(StoreError, match=f"the store {tmp_path / 'other'} "):
            Shared(model, mine, media, open_backend(tmp_path / "other"), mark)()
    with pytest.raises(StoreError, match=f"the store {store.url} "):
        Shared(model, mine, media, store, mark)()
    assert not [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    with pytest.raises(DataError, match=f"1 of {len(media) + 1} .*{tmp_path}/gone.png"):
        Shared(model, mine, (*media, f"{tmp_path}/gone.png"))()
    with pytest.raises(TargetError, match=f"the model {tmp_path}/gone"):
        Shared(f"{tmp_path}/gone", mine)()
    other = checkpoint("qwen2_5_vl", layers=1, seed=1)
    with pytest.raises(TargetError, match=rf"the model {other} .*\(weights: "):
        Shared(str(other), mine)()


class ReadOnly(Local):
    """A store at a bucket whose keys may only read."""

    def create(self, name: str, data: bytes) -> bool:
        raise PermissionError("Access Denied")

    def remove(self, name: str) -> None:
        raise PermissionError("Access Denied")


def test_a_store_that_cannot_be_written_is_named_with_what_to_do(
    tmp_path: Path,
) -> None:
    denied = pytest.raises(
        StoreError, match=rf"{tmp_path} \(Access Denied\): give .* the right to write"
    )
    with denied, marked(ReadOnly(tmp_path)):
        pass


def test_a_store_is_not_begun_in_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").touch()
    with (
        pytest.raises(StoreError, match=r"1\.png"),
        marked(open_backend(tmp_path / "photos")),
    ):
        pass
    assert os.listdir(tmp_path / "photos") == ["1.png"]
