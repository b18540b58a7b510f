"""`make test-cluster`: the templates of examples/cluster on a Slurm of two nodes.

Not collected by name: it needs Slurm, and root.
"""

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from tests.cluster.scheduler import SECONDS, Slurm, missing, slurm
from tests.s3 import s3_server
from vlmdistill.pipelines.data.prompts.prompt_table import read
from vlmdistill.pipelines.demo.prompts import DemoSize, import_demo
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.store import Store

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "examples" / "cluster"
PROMPTS, STEPS, SAVED = 12, 300, 20
AWS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
SMALL = ("--nodes=2", "--cpus-per-task=1", "--gpus-per-node=0", "--time=60")

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(3 * SECONDS),
]


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Slurm]:
    with (
        tempfile.TemporaryDirectory(
            prefix="slurm", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        slurm(Path(folder)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace.of("demo-small", tmp_path_factory.mktemp("runs"))
    size = DemoSize(PROMPTS - 4, 4, held_out=(1, 1, 0))
    import_demo(workspace.root / "demo-data", workspace.prompts, size)
    return workspace


def submit(
    scheduler: Slurm, workspace: Workspace, template: str, **variables: str
) -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    given = {
        "MODEL": "demo-small",
        "RUNS": str(workspace.root.parent),
        "VENV": os.environ.get("VIRTUAL_ENV", str(ROOT / ".venv")),
        "PORT": port,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    return scheduler.submit(TEMPLATES / template, *SMALL, **given)


def until(scheduler: Slurm, job: str, true: Callable[[], bool]) -> None:
    """Wait for something that a running job does."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, scheduler.log(job)
        assert scheduler.state(job) in LIVE, scheduler.log(job)
        time.sleep(0.2)


def steps(workspace: Workspace, name: str) -> list[int]:
    """The steps of a run as they were taken."""
    path = workspace.drafter(f"{name}.training") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["step"] for row in rows if "train/loss" in row]


def ranks(name: str) -> list[int]:
    """The processes of the ranks of a run, of both nodes."""
    found = list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            inside = b"\0RANK=" in b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue
        if inside and b"vlmdistill" in words and name.encode() in words:
            found.append(int(folder.name))
    return found


def test_features_on_two_nodes(scheduler: Slurm, workspace: Workspace) -> None:
    job = submit(
        scheduler,
        workspace,
        "slurm-features.sbatch",
        OPTIONS="--for sparrow --workers 2",
    )
    scheduler.wait_for(job, "COMPLETED")
    wanted = sorted(
        prompt.key for prompt in read(workspace.prompts) if prompt.split == "train"
    )
    dropped = len(wanted) - len(Store.open(str(workspace.features)).index)
    assert "n1" in scheduler.log(job)
    assert "n2" in scheduler.log(job)
    assert 0 <= dropped < len(wanted) / 2  # by the filters of responses


def test_features_of_a_workspace_at_a_url(scheduler: Slurm, tmp_path: Path) -> None:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **AWS,
            "AWS_ENDPOINT_URL": server,
            "VLMDISTILL_CACHE": str(tmp_path),
        }.items():
            patch.setenv(name, value)
        S3FileSystem(key="x", secret="x", endpoint_url=server).mkdir("bucket")
        shared = Workspace.of("demo-small", "s3://bucket/runs")
        import_demo(
            shared.root / "demo-data",
            shared.prompts,
            DemoSize(4, 1, held_out=(1, 1, 0)),
        )
        shared.close()
        options = "--for sparrow --workers 2 --limit 4"
        job = submit(
            scheduler,
            shared,
            "slurm-features.sbatch",
            OPTIONS=options,
            RUNS="s3://bucket/runs",
            **AWS,
        )
        scheduler.wait_for(job, "COMPLETED")
        assert 0 < len(Store.open(shared.features).index) <= 4


def options(name: str) -> str:
    small = f"--set steps={STEPS} --set batch_tokens=128 --validation-share 0 --dtype float32"
    return f"--name {name} --save-every {SAVED} --recipe demo {small}"


def test_training_goes_on_after_the_time_limit(
    scheduler: Slurm, workspace: Workspace
) -> None:
    job = submit(
        scheduler,
        workspace,
        "slurm-train.sbatch",
        OPTIONS=options("limited"),
        RANKS="1",
    )
    until(scheduler, job, lambda: len(steps(workspace, "limited")) > 5)
    scheduler(
        "scancel", "--signal=USR1", "--batch", job
    )  # as Slurm does before the limit
    until(scheduler, job, lambda: scheduler.state(job) == "PENDING")
    saved = steps(workspace, "limited")[-1]
    assert not (workspace.drafter("limited") / "config.json").exists()
    scheduler.wait_for(job, "COMPLETED")
    assert "Restarts=1" in scheduler("scontrol", "show", "job", job)
    taken = steps(workspace, "limited")
    assert taken == list(range(1, len(taken) + 1))  # none was lost, none taken twice
    assert saved < len(taken)
    assert (workspace.drafter("limited") / "model.safetensors").exists()


def test_a_killed_rank_is_started_again(scheduler: Slurm, workspace: Workspace) -> None:
    job = submit(
        scheduler, workspace, "slurm-train.sbatch", OPTIONS=options("killed"), RANKS="1"
    )
    until(scheduler, job, lambda: len(steps(workspace, "killed")) > SAVED + 1)
    os.kill(max(ranks("killed")), signal.SIGKILL)
    scheduler.wait_for(job, "COMPLETED")
    taken = steps(workspace, "killed")
    assert sorted(set(taken)) == list(range(1, max(taken) + 1))
    assert (workspace.drafter("killed") / "model.safetensors").exists()
