"""Check that every machine of the Ray cluster has what the stages need, by a Ray task on each of them."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vlmdistill.pipelines.cluster.session import (
    MIB,
    Machine,
    cause_of,
    machines,
    session,
)
from vlmdistill.pipelines.cluster.shared import Shared, marked, some_files
from vlmdistill.pipelines.targets import software
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.workspace.workspace import absolute_model
from vlmdistill.stores.backends.backend import STAGING, Backend
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import FOR_USER, one_line

PACKAGES = (*software.PACKAGES, "ray")
LEAST = 2048 * MIB  # of free disk: some shards
SKEW = 30.0  # seconds by which clocks may differ
GPU_QUERY = (
    "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader"
)
GPU_SECONDS = 60.0  # for a command that asks for GPUs
DRIVER = "driver"  # the name of a report on what is wrong where the command runs


@dataclass(frozen=True)
class MachineReport:
    """The software and hardware of a machine, and the checks that failed there."""

    versions: Mapping[str, str] = field(default_factory=dict)
    free_bytes: int = 0  # where shards are built
    gpus: tuple[str, ...] = ()  # name, memory and driver of each
    checked: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    """Check -> what is wrong and what to do."""
    clock: float = 0.0  # seconds ahead of the driver's


def examine(
    model: str,
    store: str,
    media: Callable[[], Iterable[str]],
    address: str = "",
    least: int = 1,
    wait: float = 120.0,
) -> dict[str, MachineReport]:
    """The report of each machine of the cluster at `address` or RAY_ADDRESS; without one, of this machine.

    `store` is a path or URL, and `media` finds the images and videos of the prompts. Waits up to `wait`
    seconds for `least` machines, and as long for their reports. The driver has a report of its own if one of
    its checks fails.
    """
    shared = Shared(absolute_model(model), None)
    failures = dict[str, str]()
    with _noting(failures, "model"):
        shared = replace(shared, checkpoint=checkpoint(model))
    with _noting(failures, "media"):
        shared = replace(shared, media=some_files(media()))
    with contextlib.ExitStack() as stack:
        with _noting(failures, "store"):
            is_url = "://" in store
            backend = open_backend(
                store if is_url else Path(store).expanduser().absolute()
            )
            shared = replace(shared, store=backend)
            stack.enter_context(_without_new_folders(backend))
            mark = stack.enter_context(marked(backend))
            shared = replace(shared, mark=mark)
        if not (address or os.environ.get("RAY_ADDRESS")):
            report = examination(shared, versions())
            all_failures = {**report.failures, **failures}
            return {"this machine": replace(report, failures=all_failures, clock=0.0)}
        with session(address):
            reports = _on_all(shared, least, wait, failures)
    if failures:
        reports[DRIVER] = MachineReport(failures=failures)
    return reports


def _on_all(
    shared: Shared, least: int, wait: float, failures: dict[str, str]
) -> dict[str, MachineReport]:
    """The reports of all machines, in the order of their names."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    joined = _wait_for(least, wait, failures)
    pending = {}  # calls -> names of machines
    for machine in joined:
        on_it = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_it)(
            examination
        )
        pending[task.remote(shared, versions(), machine.gpus)] = machine.name
    no_reply = f"no reply within {wait:g} s: a disk or network that hangs, or a machine that is very busy"
    reports = {
        name: MachineReport(failures={"reply": no_reply}) for name in pending.values()
    }
    end = time.monotonic() + wait
    while pending:
        seconds_left = end - time.monotonic()
        if seconds_left <= 0:
            break
        replied, _ = ray.wait(list(pending), num_returns=1, timeout=seconds_left)
        for call in replied:
            name = pending.pop(call)
            now = time.time()
            try:
                reports[name] = _with_skew(ray.get(call), now)
            except ray.exceptions.RayError as error:
                did_not_run = f"the checks did not run: {cause_of(error)}"
                reports[name] = MachineReport(failures={"reply": did_not_run})
    return dict(sorted(reports.items()))


def _wait_for(least: int, wait: float, failures: dict[str, str]) -> list[Machine]:
    """The machines of the cluster, once `least` have joined or `wait` seconds are over."""
    end = time.monotonic() + wait
    joined = machines()
    while len(joined) < least and time.monotonic() < end:
        time.sleep(1)
        joined = machines()
    if len(joined) < least:
        failures["machines"] = (
            f"only {len(joined)} of {least} machines have joined the cluster within {wait:g} s: look at the "
            "output of `ray start` on the others"
        )
    return list(joined.values())


def examination(
    shared: Shared, wanted: Mapping[str, str], offered: int | None = None
) -> MachineReport:
    """The report of this machine: `wanted` are the driver's versions, `offered` the GPUs that Ray has here.

    `clock` is the time of its end.
    """
    installed = versions()
    gpu_names = gpus()
    failures = dict[str, str]()
    differing = [
        f"{name} {installed[name] or 'is missing'}, not {version}"
        for name, version in wanted.items()
        if installed[name] != version
    ]
    if differing:
        failures["versions"] = f"{', '.join(differing)}: install what the driver has"
    with _noting(failures, "model"):
        shared.check_model()
    with _noting(failures, "media"):
        shared.check_media()
    with _noting(failures, "store"):
        if shared.mark:
            shared.check_store()
        if shared.store:
            with marked(shared.store):  # it can be written, too
                pass
    folder, free_bytes = _free(shared.store)
    if free_bytes < LEAST:
        failures["disk"] = (
            f"only {free_bytes // MIB} MiB are free in {folder}, where shards are built: make room"
        )
    if offered is None:
        offered = len(gpu_names)
    if problem := _gpu_problem(len(gpu_names), offered):
        failures["gpus"] = problem
    checked = ["model", "store"]
    if shared.media:
        checked.insert(1, "media")
    return MachineReport(
        versions=installed,
        free_bytes=free_bytes,
        gpus=gpu_names,
        checked=tuple(checked),
        failures=failures,
        clock=time.time(),
    )


def _gpu_problem(present: int, offered: int) -> str:
    """Why workers cannot use all GPUs of this machine; empty if they can."""
    if offered < present:
        return f"it has {present} GPUs, and Ray offers {offered}: see `ray start --num-gpus`"
    usable = _usable() if offered else 0
    if usable < offered:
        return f"torch can use {usable} of {offered} GPUs: check its build and the GPU driver"
    return ""


def _with_skew(report: MachineReport, now: float) -> MachineReport:
    """The report, which came at `now`, with the seconds by which its machine is ahead of this one."""
    ahead = report.clock - now
    failures = dict(report.failures)
    if abs(ahead) > SKEW:
        failures["clock"] = (
            f"its clock differs by {ahead:+.0f} s from the driver's: synchronise both (NTP)"
        )
    return replace(report, clock=round(ahead, 1), failures=failures)


@contextlib.contextmanager
def _noting(failures: dict[str, str], check: str) -> Iterator[None]:
    """Note the error of a check."""
    try:
        yield
    except FOR_USER as error:
        failures[check] = one_line(error)


@contextlib.contextmanager
def _without_new_folders(store: Backend) -> Iterator[None]:
    """Remove the empty folders that the check of a new store leaves."""
    new_folders = list[Path]()
    if store.is_local:
        staging = Path(store.url) / STAGING
        new_folders = [
            folder for folder in (staging, *staging.parents) if not folder.exists()
        ]
    yield
    for folder in new_folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def versions() -> dict[str, str]:
    """The version of Python and of each package here; empty if it is not installed.

    Without the build: torch has one for CPUs and one for each CUDA.
    """
    installed = software.versions(PACKAGES)
    return {name: version.partition("+")[0] for name, version in installed.items()}


def gpus() -> tuple[str, ...]:
    """Name, memory and driver of each GPU of this machine."""
    return tuple(_output(*GPU_QUERY.split()).splitlines())


def _usable() -> int:
    """How many GPUs torch can use."""
    program = "import torch; print(torch.cuda.device_count())"
    return int(_output(sys.executable, "-c", program) or 0)


def _output(*command: str) -> str:
    """The output of a command that sees the GPUs which Ray hides from its task; empty if it fails."""
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=GPU_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _free(store: Backend | None) -> tuple[Path, int]:
    """The folder in which shards are built, and its free bytes."""
    folder = Path(store.url if store and store.is_local else tempfile.gettempdir())
    while not folder.exists():
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free
