"""`make test-engine`: a run in one pass with vLLM ends whole, whatever of it is killed.

`VLMDISTILL_KILLS` sets the number of kills. Not collected by name: a kill costs the start of an engine.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from vlmdistill.pipelines import flow
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.prompts import import_sources
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import VlmdistillError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.store import Store

KILLS = int(os.environ.get("VLMDISTILL_KILLS", "2"))
PROMPTS, BATCH = 24, 2  # tasks of 4 prompts
SHARD_BYTES = 250_000  # two or three samples: a task makes several shards
PROGRAM = "tests.engines.killing"
VICTIMS = {
    "driver": PROGRAM,
    "worker": "ray::WorkerActor",
    "engine": "vllm.capture.server",
}
PATIENCE = 900.0  # seconds without a new file

pytestmark = pytest.mark.timeout(3600 + 300 * KILLS)


def workspace_in(folder: Path) -> Workspace:
    return Workspace.of("demo-small", folder)


def capture(folder: Path) -> None:
    """The run: all prompts, in many small tasks."""
    workspace = workspace_in(folder)
    prompts = prompt_table.load(workspace.prompts, "demo-small", "train", PROMPTS)
    job = CaptureJob(
        workspace=workspace,
        prompts=prompts,
        responses=workspace.responses,
        store=CaptureStore(workspace.features),
        settings=CaptureSettings(
            drafters=["sparrow"], dtype="float32", shard_bytes=SHARD_BYTES
        ),
        workers=WorkerOptions(workers=1, engine="vllm"),
        sampling=dataset.sampling(workspace.responses),
        batch=BATCH,
    )
    flow.capture_features(job)


def processes(root: int) -> Iterator[tuple[int, str]]:
    """A process and all that descend from it, with their command lines."""
    parents = dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(
                int(stat.read_text().rpartition(")")[2].split()[1]), []
            ).append(int(stat.parent.name))
    queue = [root]
    while queue:
        pid = queue.pop()
        queue += parents.get(pid, ())
        with suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def files(folder: Path) -> int:
    """How far a run is: files of responses, shards and their records."""
    patterns = ("responses/part-*", "features/shards/*", "features/commits/*")
    return sum(1 for pattern in patterns for _ in (folder / "demo-small").glob(pattern))


def wait(until: Callable[[], bool], tick: float) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        time.sleep(tick)


def strike(run: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> str:
    """Kill a part of a run after a few more files, or while the engine starts; '' if the run ended before."""
    victim, more = rng.choice(list(VICTIMS)), rng.choice([0, 1, 2, 3, 5, 8])
    name, before = VICTIMS[victim], files(folder)

    def found() -> list[int]:
        return [pid for pid, command in processes(run.pid) if name in command]

    wait(lambda: run.poll() is not None or bool(found()), 0.5)
    wait(lambda: run.poll() is not None or files(folder) >= before + more, 0.02)
    time.sleep(rng.choice([0.0, 0.02, 0.5]) * rng.random())
    for pid in found():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return f"{victim}+{more}"
    return ""


def assert_whole(folder: Path) -> None:
    """Every prompt has one response, every kept response one sample, of its own tokens; shards are small."""
    workspace = workspace_in(folder)
    prompts = prompt_table.load(workspace.prompts, "demo-small", "train", PROMPTS)
    keys = dataset.table(workspace.responses, ["key"])["key"].to_pylist()
    assert sorted(keys) == sorted(prompt.key for prompt in prompts)
    store, kept = (
        Store.open(workspace.features),
        list(dataset.read(workspace.responses)),
    )
    assert [row["key"] for row in store.index.iter_rows(named=True)] == sorted(
        row.key for row in kept
    )
    for row in kept:
        sample = store[row.key]
        assert np.array_equal(sample.ids_T[sample.response_T], row.ids), row.key
    shards = store.index.group_by("shard").agg(pl.len(), pl.sum("text_tokens"))
    row_bytes = 4 * store.info.hidden_size
    assert all(
        count == 1 or tokens * row_bytes <= SHARD_BYTES
        for _, count, tokens in shards.iter_rows()
    )
    assert len(kept) > len(shards) > PROMPTS // (2 * BATCH)
    assert not verify(
        workspace.features
    ).damage  # what killed writers left is no damage


def test_a_run_that_is_killed_again_and_again_ends_with_every_sample_once(
    tmp_path: Path,
) -> None:
    rng, killed, run, stores, struck = random.Random(), list[str](), None, 0, False
    while True:
        folder = tmp_path / str(stores)
        if run is None:
            if not folder.exists():
                import_sources(workspace_in(folder), ["demo"])
            run, struck = (
                subprocess.Popen([sys.executable, "-m", PROGRAM, str(folder)]),
                False,
            )
        if len(killed) < KILLS and (name := strike(run, folder, rng)):
            killed.append(name)
            struck = True
            sys.stderr.write(
                f"kill {len(killed)}: {name}, {files(folder)} files in {folder.name}\n"
            )
            if not name.startswith("driver"):
                continue
        try:
            status = run.wait(PATIENCE)
        finally:
            run.kill()
        run = None
        assert struck or status == 0
        if status == 0:
            assert_whole(folder)
            stores += 1
            if len(killed) >= KILLS:
                break
    assert stores


if __name__ == "__main__":
    try:
        capture(Path(sys.argv[1]))
    except VlmdistillError as error:  # its engine was killed
        sys.exit(f"the run has ended: {error}")
