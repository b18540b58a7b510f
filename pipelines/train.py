"""Stage 4: train drafters: one rank, several ranks, or several drafters at once."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.budget import fitted
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train
from vlmdistill.pipelines.cluster.processes import (
    FunctionDone,
    FunctionProgress,
    Processes,
    Threads,
)
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.checkpoints.folder import locate
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import agree
from vlmdistill.stores.store import Store


def default_recipe(model: str) -> str:
    """The recipe of every method where none is given: `demo` for the embedded targets, else `paper`."""
    return "demo" if model in EMBEDDED else "paper"


def planned(
    workspace: Workspace,
    drafter: str,
    recipe: str | None = None,
    settings: Sequence[str] = (),
    *,
    name: str | None = None,
    seed: int = 0,
) -> Run:
    """A run on the workspace's store into the workspace; `dataclasses.replace` changes more of it.

    DataError as `recipes.resolve`.
    """
    recipe = recipe or default_recipe(workspace.model)
    if name is None:
        name = drafter
    return Run(
        drafter=catalogue.base(drafter),
        config=resolve(drafter, recipe, settings),
        store=workspace.features,
        out=workspace.drafter(name),
        checkpoints=workspace.checkpoints(name),
        seed=seed,
    )


def other_target(model: str, store: str, cache: str | None) -> str | None:
    """The target of a store if it is not `model`; None if it is, or `model` is not on this machine."""
    try:
        if locate(model).lacking:
            return None
        own = checkpoint(model)
    except TargetError:
        return None
    provenance = Store.open(store, cache).provenance
    is_same = own.config == provenance.config_hash and agree(
        provenance.weights_hash, own.weights
    )
    return None if is_same else provenance.target


def run(plan: Run, force: bool = False, report: Progress = silent) -> Path:
    """Train as one rank, of those that a launcher such as torchrun started; see `fitted` and `trainer.train`.

    Only rank 0 locks the drafter's folder, reports steps and records their rate.
    """
    ranks.join()
    tokens = 0
    seconds = 0.0

    def on_step(progress: TrainingProgress) -> None:
        nonlocal tokens, seconds
        tokens += progress.tokens
        seconds += progress.seconds
        report(progress.step, progress.total, progress.remark)

    with ExitStack() as locks:

        def lock() -> None:
            plan.out.parent.mkdir(parents=True, exist_ok=True)
            locks.enter_context(only_writer(plan.out))

        ranks.first(lock)
        folder = train(fitted(plan, force), on_step, force)
        rates.record(plan.out.parents[1], f"train {plan.drafter}", tokens, seconds)
        return folder


def _run_as_rank(plan: Run, force: bool, report: Progress) -> None:
    """Train as one rank, and leave the group of ranks at the end."""
    with ranks.group():
        run(plan, force, report)


def launch(
    plan: Run, processes: int, force: bool = False, report: Progress = silent
) -> Path:
    """Train on several ranks of this machine, unless a launcher has started them; see `run`."""
    if processes == 1 or "RANK" in os.environ:
        _run_as_rank(plan, force, report)
        return plan.out
    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise DataError(
            f"--ranks {processes}: this machine has {gpus} GPUs; give at most one rank for each"
        )
    with tempfile.TemporaryDirectory() as folder, Processes() as children:
        common = {
            ranks.RENDEZVOUS: str(Path(folder) / "ranks"),
            "WORLD_SIZE": str(processes),
            **_threads(processes),
        }
        for rank in range(processes):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.start("", _run_as_rank, (plan, force), environment)
        for _, message in children.messages():
            if isinstance(message, FunctionProgress):
                report(message.done, message.total, message.remark)
    return plan.out


def default_jobs() -> int:
    """How many drafters to train at once: one for each GPU, or one for each core up to 4."""
    return torch.cuda.device_count() or min(4, len(os.sched_getaffinity(0)))


def several(
    runs: Sequence[Run],
    jobs: int,
    *,
    report: Progress = silent,
    on_done: Callable[[Run, FunctionDone], None] = lambda run, cost: None,
) -> None:
    """Train drafters, `jobs` at a time, each in its own process; continue those that were stopped.

    Each process gets one GPU, or its share of the cores, which grows when others have ended and none is left
    to start. TrainingError if one fails; finished drafters are kept, and the others save a checkpoint.
    """
    waiting = list(reversed(runs))
    free_slots = list(range(jobs))
    running: dict[str, _Running] = {}
    progress = _CommonProgress(len(runs))

    with Processes() as children:

        def fill_slots() -> None:
            while waiting and free_slots and not children.stopping:
                plan = waiting.pop()
                slot = free_slots.pop()
                name = plan.out.name
                running[name] = _Running(plan, slot)
                children.start(name, run, (plan, False), _share(slot, jobs))

        fill_slots()
        for name, message in children.messages():
            if isinstance(message, FunctionProgress):
                progress.steps[name] = (message.done, message.total)
            else:
                ended = running.pop(name)
                progress.finish(name)
                free_slots.append(ended.slot)
                on_done(ended.plan, message)
                fill_slots()
                if 0 < len(running) < jobs and not _is_fixed():
                    children.use(Threads(_cores() // len(running)))
            progress.show(report, running)


@dataclass(frozen=True)
class _Running:
    """A run in a process, and the slot that the process has."""

    plan: Run
    slot: int


class _CommonProgress:
    """The progress of several runs as one."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self.steps: dict[str, tuple[int, int]] = {}
        """Done and total, of each run that has started."""

    def finish(self, name: str) -> None:
        """Count all steps of a run as done."""
        _, total = self.steps.get(name, (0, 0))
        self.steps[name] = (total, total)

    def show(self, report: Progress, running: Mapping[str, _Running]) -> None:
        """Report the steps of all runs; runs that have not started count as long as the others."""
        done = sum(run_done for run_done, _ in self.steps.values())
        total = sum(run_total for _, run_total in self.steps.values())
        started = [name for name in running if name in self.steps]
        remark = ", ".join(f"{name} {self.steps[name][0]}" for name in started)
        report(done, round(total / len(self.steps) * self._runs), remark)


def _share(slot: int, processes: int) -> Mapping[str, str]:
    """The environment of a process: one of the GPUs, or its share of the cores."""
    gpus = _gpus()
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    return _threads(processes)


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count()
    if visible:
        return visible.split(",")[:count]
    return [str(number) for number in range(count)]


def _is_fixed() -> bool:
    """Whether the threads of a process are not for this program to choose."""
    return bool(_gpus()) or "OMP_NUM_THREADS" in os.environ


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _threads(processes: int) -> Mapping[str, str]:
    """The share of each process in the cores, unless OMP_NUM_THREADS is set."""
    share = max(1, _cores() // processes)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
