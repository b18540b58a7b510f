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

from vlmdistill.pipelines.cluster.session import MIB, cause_of, machines, session
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
    """What a machine has, and what is wrong with it."""

    versions: Mapping[str, str] = field(default_factory=dict)
    free_bytes: int = 0  # where shards are built
    gpus: tuple[str, ...] = ()  # name, memory and driver of each
    checked: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(
        default_factory=dict
    )  # check -> what is wrong and what to do
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
    seconds for `least` machines, and as long for their reports. The driver has a report of its
    own if something is wrong with it.
    """
    shared, failures = Shared(absolute_model(model), None), dict[str, str]()
    with _noting(failures, "model"):
        shared = replace(shared, checkpoint=checkpoint(model))
    with _noting(failures, "media"):
        shared = replace(shared, media=some_files(media()))
    with contextlib.ExitStack() as held:
        with _noting(failures, "store"):
            backend = open_backend(
                store if "://" in store else Path(store).expanduser().absolute()
            )
            shared = replace(shared, store=backend)
            held.enter_context(_without_new_folders(backend))
            shared = replace(shared, mark=held.enter_context(marked(backend)))
        if not (address or os.environ.get("RAY_ADDRESS")):
            report = examination(shared, versions())
            return {
                "this machine": replace(
                    report, failures={**report.failures, **failures}, clock=0.0
                )
            }
        with session(address):
            reports = _on_all(shared, least, wait, failures)
    return (
        {**reports, DRIVER: MachineReport(failures=failures)} if failures else reports
    )


def _on_all(
    shared: Shared, least: int, wait: float, failures: dict[str, str]
) -> dict[str, MachineReport]:
    """The reports of all machines, in the order of their names."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    end = time.monotonic() + wait
    while len(there := machines()) < least and time.monotonic() < end:
        time.sleep(1)
    if len(there) < least:
        failures["machines"] = (
            f"only {len(there)} of {least} machines have joined the cluster within {wait:g} s: look at the "
            "output of `ray start` on the others"
        )
    calls = {}
    for machine in there.values():
        on_it = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_it)(
            examination
        )
        calls[task.remote(shared, versions(), machine.gpus)] = machine.name
    why = f"no reply within {wait:g} s: a disk or network that hangs, or a machine that is very busy"
    reports, end = (
        {name: MachineReport(failures={"reply": why}) for name in calls.values()},
        time.monotonic() + wait,
    )
    while calls and (left := end - time.monotonic()) > 0:
        for call in ray.wait(list(calls), num_returns=1, timeout=left)[0]:
            name, now = calls.pop(call), time.time()
            try:
                reports[name] = _with_skew(ray.get(call), now)
            except ray.exceptions.RayError as error:
                reports[name] = MachineReport(
                    failures={"reply": f"the checks did not run: {cause_of(error)}"}
                )
    return dict(sorted(reports.items()))


def examination(
    shared: Shared, wanted: Mapping[str, str], offered: int | None = None
) -> MachineReport:
    """The report of this machine: `wanted` are the driver's versions, `offered` the GPUs that Ray has here.

    `clock` is the time of its end.
    """
    mine, found, failures = versions(), gpus(), dict[str, str]()
    other = [
        f"{name} {mine[name] or 'is missing'}, not {one}"
        for name, one in wanted.items()
        if mine[name] != one
    ]
    if other:
        failures["versions"] = f"{', '.join(other)}: install what the driver has"
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
    folder, free = _free(shared.store)
    if free < LEAST:
        failures["disk"] = (
            f"only {free // MIB} MiB are free in {folder}, where shards are built: make room"
        )
    offered = len(found) if offered is None else offered
    if offered < len(found):
        failures["gpus"] = (
            f"it has {len(found)} GPUs, and Ray offers {offered}: see `ray start --num-gpus`"
        )
    elif (usable := _usable() if offered else 0) < offered:
        failures["gpus"] = (
            f"torch can use {usable} of {offered} GPUs: check its build and the GPU driver"
        )
    checked = ("model", *(["media"] if shared.media else []), "store")
    return MachineReport(mine, free, found, checked, failures, time.time())


def _with_skew(report: MachineReport, now: float) -> MachineReport:
    """The report, which came at `now`, with the seconds by which its machine is ahead of this one."""
    ahead, failures = report.clock - now, dict(report.failures)
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
    inner = Path(store.url) / STAGING
    made = (
        []
        if not store.is_local
        else [one for one in (inner, *inner.parents) if not one.exists()]
    )
    yield
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def versions() -> dict[str, str]:
    """The version of Python and of each package here; empty if it is not installed.

    Without the build: torch has one for CPUs and one for each CUDA.
    """
    return {
        name: version.partition("+")[0]
        for name, version in software.versions(PACKAGES).items()
    }


def gpus() -> tuple[str, ...]:
    """Name, memory and driver of each GPU of this machine."""
    return tuple(_output(*GPU_QUERY.split()).splitlines())


def _usable() -> int:
    """How many GPUs torch can use."""
    return int(
        _output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
        or 0
    )


def _output(*command: str) -> str:
    """What a command prints, with the GPUs that Ray hides from its task; empty if it fails."""
    shown = {
        name: value
        for name, value in os.environ.items()
        if name != "CUDA_VISIBLE_DEVICES"
    }
    try:
        return subprocess.run(
            command,
            env=shown,
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
