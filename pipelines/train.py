"""Stage 4: train drafters: one rank, several ranks, or several drafters at once."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train
from vlmdistill.pipelines.cluster.processes import (
    FunctionDone,
    FunctionProgress,
    Processes,
)
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.progress import Progress, silent


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

    The recipe is by default `demo` for the embedded targets, else `paper`. DataError as `recipes.resolve`.
    """
    default = "demo" if workspace.model in EMBEDDED else "paper"
    name = drafter if name is None else name
    return Run(
        drafter=catalogue.base(drafter),
        config=resolve(drafter, recipe or default, settings),
        store=workspace.features,
        out=workspace.drafter(name),
        checkpoints=workspace.checkpoints(name),
        seed=seed,
    )


def run(plan: Run, force: bool = False, report: Progress = silent) -> Path:
    """Train as one rank, of those that a launcher such as torchrun started; see `trainer.train`.

    Only rank 0 locks the drafter's folder, reports steps and records their rate.
    """
    ranks.join()
    tokens = seconds = 0.0

    def note(progress: TrainingProgress) -> None:
        nonlocal tokens, seconds
        tokens, seconds = tokens + progress.tokens, seconds + progress.seconds
        report(progress.step, progress.total, progress.remark)

    with ExitStack() as held:

        def hold() -> None:
            plan.out.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(only_writer(plan.out))

        ranks.first(hold)
        folder = train(plan, note, force)
        rates.record(plan.out.parents[1], f"train {plan.drafter}", tokens, seconds)
        return folder


def _as_rank(plan: Run, force: bool, report: Progress) -> None:
    """What the process of a rank does."""
    with ranks.group():
        run(plan, force, report)


def launch(
    plan: Run, processes: int, force: bool = False, report: Progress = silent
) -> Path:
    """Train on several ranks of this machine, unless a launcher has started them; see `run`."""
    if processes == 1 or "RANK" in os.environ:
        _as_rank(plan, force, report)
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
        }
        common |= _threads(processes)
        for rank in range(processes):
            children.start(
                "",
                _as_rank,
                (plan, force),
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        for _, message in children.messages():
            if isinstance(message, FunctionProgress):
                report(message.done, message.total, message.remark)
    return plan.out


def default_jobs() -> int:
    """How many drafters to train at once: one for each GPU, or one for each core up to 4."""
    return torch.cuda.device_count() or min(4, len(os.sched_getaffinity(0)))


def several(
    runs: Sequence[Run],
    at_once: int,
    *,
    report: Progress = silent,
    on_done: Callable[[Run, FunctionDone], None] = lambda run, cost: None,
) -> None:
    """Train drafters `at_once` at a time, each in its own process; continue those that were stopped.

    Each process gets one GPU, or its share of the cores. TrainingError if one fails; finished drafters are
    kept, and the others save a checkpoint.
    """
    waiting, free = list(reversed(runs)), list(range(at_once))
    running: dict[str, tuple[Run, int]] = {}
    steps: dict[
        str, tuple[int, int]
    ] = {}  # done and total, of each run that has started

    with Processes() as children:

        def fill() -> None:
            while waiting and free and not children.stopping:
                plan, slot = waiting.pop(), free.pop()
                running[plan.out.name] = plan, slot
                gpus = _gpus()
                share = (
                    {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
                    if gpus
                    else _threads(at_once)
                )
                children.start(plan.out.name, run, (plan, False), share)

        fill()
        for name, message in children.messages():
            if isinstance(message, FunctionProgress):
                steps[name] = message.done, message.total
            else:
                plan, slot = running.pop(name)
                steps[name] = (steps.get(name, (0, 0))[1],) * 2
                free.append(slot)
                on_done(plan, message)
                fill()
            done, total = (sum(one) for one in zip(*steps.values(), strict=True))
            remark = ", ".join(
                f"{one} {steps[one][0]}" for one in running if one in steps
            )
            # Runs that have not started count as long as the others.
            report(done, round(total / len(steps) * len(runs)), remark)


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(one) for one in range(count)]


def _threads(processes: int) -> Mapping[str, str]:
    """The share of each process in the cores, unless OMP_NUM_THREADS is set."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
