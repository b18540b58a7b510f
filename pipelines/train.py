"""Train drafters in a workspace: settings resolved, one rank here, several, or several drafters at once."""

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.base import DrafterConfig
from vlmdistill.drafters.config import RECIPES, override
from vlmdistill.drafters.training.record import Progress
from vlmdistill.drafters.training.trainer import Run, train
from vlmdistill.pipelines.demo import EMBEDDED
from vlmdistill.pipelines.workspace import Workspace, absolute, only_writer
from vlmdistill.stores.errors import DataError, TrainingError


def default_recipe(model: str) -> str:
    """The papers' settings are for real targets; the embedded ones have their own."""
    return "demo" if model in EMBEDDED else "paper"


def resolve(drafter: str, recipe: str, settings: Sequence[str]) -> DrafterConfig:
    """The configuration of a drafter: its paper's, then a recipe's, then `key=value` settings.

    DataError on an unknown drafter, recipe, key or a value that does not fit.
    """
    catalogue.trained(drafter)
    config = catalogue.config(drafter)
    if recipe not in RECIPES:
        raise DataError(f"there is no recipe '{recipe}'; choose from {', '.join(RECIPES)}")
    stages = {stage.name for stage in config.stages}
    common = [one for one in RECIPES[recipe] if _fits(one, stages)]
    return override(config, [*common, *settings])


def _fits(setting: str, stages: Collection[str]) -> bool:
    """A recipe is for all drafters: what it says of a stage that this one does not have is passed over."""
    first, *rest = setting.split(".")
    return first != "stages" or rest[0] == "*" or rest[0] in stages


def run(
    workspace: Workspace,
    drafter: str,
    config: DrafterConfig,
    *,
    name: str | None = None,
    store: Path | None = None,
    view: str | None = None,
    seed: int = 0,
    zero: int = 0,
    dtype: str = "auto",
    save_every: int = 200,
    resume: bool = False,
    force: bool = False,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Train on this process's rank and return the drafter's folder; see `train`.

    `force` removes what an earlier run of that name left.
    """
    plan = Run(
        drafter=catalogue.base(drafter),
        config=config,
        store=store or workspace.features,
        out=workspace.drafter(name or drafter),
        view=view,
        seed=seed,
        zero=zero,
        dtype=dtype,
        save_every=save_every,
        resume=resume,
    )
    if os.environ.get("RANK", "0") != "0":
        return train(plan, on_step)
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(plan.out):
        if force:
            shutil.rmtree(plan.out, ignore_errors=True)
            shutil.rmtree(plan.state, ignore_errors=True)
        return train(plan, on_step)


def launch(ranks: int, arguments: Sequence[str]) -> None:
    """Run the command line again on several ranks of this machine, with torchrun.

    TrainingError when any rank fails; each has said why.
    """
    if ranks < 1:
        raise DataError(f"--ranks {ranks}: give a number above 0")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, "-m", "vlmdistill.cli.main", *arguments], check=False)
    if done.returncode:
        raise TrainingError(
            f"training on {ranks} ranks ended with status {done.returncode}: see the lines above"
        )


@dataclass(frozen=True)
class Job:
    """One drafter to train in a process of its own."""

    drafter: str
    name: str
    seed: int = 0


@dataclass(frozen=True)
class Cost:
    """What training one drafter took."""

    cpu_seconds: float
    peak_bytes: int


def side_by_side() -> int:
    """How many drafters are trained at once unless told: one on each GPU, or on each of a few cores."""
    return torch.cuda.device_count() or min(4, len(os.sched_getaffinity(0)))


def several(
    workspace: Workspace,
    jobs: Sequence[Job],
    at_once: int,
    *,
    recipe: str,
    settings: Sequence[str] = (),
    report: Callable[[int, int, str], None] = lambda done, total, remark: None,
    on_done: Callable[[Job, Cost], None] = lambda job, cost: None,
) -> None:
    """Train drafters `at_once` at a time, each by `vlmdistill train --resume` in a process of its own.

    With GPUs each process is given one of them, else its share of the cores. TrainingError says what the
    first one that failed said; what has been trained by then stays.
    """
    places: queue.Queue[int] = queue.Queue()
    for place in range(at_once):
        places.put(place)
    shares: dict[str, int] = {}
    lock = threading.Lock()

    def run_one(job: Job) -> None:
        place = places.get()
        try:
            for share in _in_process(workspace, job, place, at_once, recipe, settings, on_done):
                with lock:
                    shares[job.name] = share
                    running = ", ".join(f"{name} {done}%" for name, done in shares.items() if done < 100)
                    report(sum(shares.values()), 100 * len(jobs), running)
        finally:
            places.put(place)

    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(run_one, job) for job in jobs]
        try:
            for one in as_completed(running):
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_process(
    workspace: Workspace,
    job: Job,
    place: int,
    at_once: int,
    recipe: str,
    settings: Sequence[str],
    on_done: Callable[[Job, Cost], None],
) -> Iterator[int]:
    """Train one drafter and yield how many per cent of it are done."""
    options = {"model": absolute(workspace.model), "runs": str(workspace.root.parent), "recipe": recipe}
    options |= {"name": job.name, "seed": str(job.seed)}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    words += [word for setting in settings for word in ("--set", setting)]
    gpus = torch.cuda.device_count()
    if gpus:
        share = {"CUDA_VISIBLE_DEVICES": str(place % gpus)}
    else:
        threads = max(1, len(os.sched_getaffinity(0)) // at_once)
        share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    child = subprocess.Popen(
        [sys.executable, "-m", "vlmdistill.cli.main", "train", job.drafter, "--resume", *words],
        env={**os.environ, **share},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert child.stderr is not None
    said = ""
    try:
        with child.stderr as lines:
            for line in lines:
                said = line.strip() or said
                if told := re.search(r"(\d+)/100 %", line):
                    yield int(told[1])
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if child.returncode is None:  # whoever listens has gone
            child.terminate()
            child.wait()
    if child.returncode:
        raise TrainingError(f"training {job.name} failed: {said.removeprefix('error: ')}")
    on_done(job, Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
    yield 100
