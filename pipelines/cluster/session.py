"""The Ray session, on this machine or on the cluster at RAY_ADDRESS, and how workers share its machines."""

import functools
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vlmdistill.stores.errors import DataError, VlmdistillError, one_line
from vlmdistill.stores.retry import retried

logger = logging.getLogger(__name__)

MIB = 2**20
WORKER_BYTES = 1536 * MIB  # of a worker without its target
CPUS = 4  # of a worker beside its GPUs, if there are as many: it decodes media and writes meanwhile
EXPANSION = 3
"""Of weights on a CPU: 16-bit files become 32-bit tensors, plus activations."""
FITS = 8192 * MIB  # of weights, which any GPU holds
ROOM = 2048 * MIB  # of a GPU, kept free of weights
GPU_SECONDS = 300.0  # to wait for a free GPU whose memory is measured
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b:? ?.*"
)
EXITED = re.compile(r"Worker exit detail: (.*?)\. (?:There are|$)")
ADDRESS = re.compile(r"\bip=([0-9a-fA-F.:]+)")


def is_open_or_named() -> bool:
    """Whether RAY_ADDRESS names a cluster, or this process has a session."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized()))


@contextmanager
def session(address: str = "") -> Iterator[None]:
    """A Ray session: the cluster at `address` or RAY_ADDRESS if one is given, else this machine alone.

    A session that is already open is used and stays open. Inside it SIGTERM raises SystemExit, so
    that the block ends as on Ctrl-C; Ray alone would print its stack and end the process.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    quiet = {
        "logging_level": "ERROR",
        "log_to_driver": logger.isEnabledFor(logging.DEBUG),
    }
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    with terminable() as handle:
        try:
            if address == "local":
                _start(quiet)
            else:
                _connect(address, quiet)
            _hush()
            handle()  # Ray has set its own handler
            yield
        except SystemExit as stop:
            # After SIGTERM, Ray's native code makes the status 1, and its handler the signal's number.
            by_us = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            if by_us or stop.code == signal.SIGTERM:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
        except ray.exceptions.RayError as error:
            # Not of a worker: the pool handles those.
            raise VlmdistillError(
                f"Ray failed ({cause_of(error)}). Finished work is kept; run the same command to continue"
            ) from error
        finally:
            ray.shutdown()


@contextmanager
def terminable() -> Iterator[Callable[[], None]]:
    """Inside it SIGTERM raises SystemExit, so that open files and processes are closed.

    It yields a function that sets the handler again, for use after a library has set its own. A handler of
    the caller stays.
    """
    before = signal.getsignal(signal.SIGTERM)

    def handle() -> None:
        _on_terminate(before if callable(before) else leave)

    handle()
    try:
        yield handle
    finally:
        _on_terminate(signal.SIG_DFL if before is None else before)


def _on_terminate(handler: Any) -> None:
    """Set the handler of SIGTERM. Python allows that in the main thread only."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def leave(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM that raises SystemExit."""
    del number, frame
    # A second signal would interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def _hush() -> None:
    """Keep Ray's messages about lost nodes and dead actors off stdout: the pool logs what matters."""
    from ray._private import worker

    def log(data: Any, ignore_prefix: bool = False) -> None:
        del ignore_prefix
        logger.debug("ray: %s", " ".join(map(str, data.get("lines", ()))))

    worker.print_to_stdstream = log


@retried(2, on=VlmdistillError)
def _start(quiet: dict[str, Any]) -> None:
    """Start Ray on this machine; again if that fails, since a busy machine may exceed Ray's half a minute."""
    import ray

    try:
        # No tensors travel through the object store, so the smallest size is enough.
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=100 * MIB,
            **quiet,
        )
    except Exception as error:  # Ray has no type for a failed start
        ray.shutdown()
        cause = cause_of(error)
        advice = "is the machine out of memory or very busy?"
        if "AF_UNIX" in cause:  # a socket of Ray in the folder for temporary files
            advice = "TMPDIR is too long a name for it: set RAY_TMPDIR=/tmp"
        raise VlmdistillError(f"Ray did not start ({cause}): {advice}") from error


def _connect(address: str, quiet: dict[str, Any]) -> None:
    """Join a cluster. Ray's native code repeats an error on stderr each second; report it in one line."""
    import ray

    reach(address)
    with tempfile.TemporaryFile() as log:
        try:
            with _stderr_into(log.fileno()):
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            log.seek(0)
            if b"InvalidAuthToken" in log.read() or "AuthToken" in str(error):
                raise DataError(
                    f"the Ray cluster at RAY_ADDRESS={address} requires a token: on every machine and here, "
                    "set RAY_AUTH_MODE=token and the head's RAY_AUTH_TOKEN (or ~/.ray/auth_token); or, in a "
                    "network that you trust, start all of them with RAY_AUTH_MODE=disabled"
                ) from None
            raise DataError(
                f"cannot use the Ray cluster at RAY_ADDRESS={address} ({cause_of(error)}): give it as "
                f"host:port, and check that it runs the same Python and Ray {ray.__version__}"
            ) from None


@contextmanager
def _stderr_into(target: int) -> Iterator[None]:
    sys.stderr.flush()
    original = os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


def reach(address: str) -> None:
    """DataError if nothing listens at host:port; Ray itself takes minutes to report that."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            why = error.strerror or error
            raise DataError(
                f"no Ray cluster at RAY_ADDRESS={address} ({why}): start it with `ray start`, or unset "
                "RAY_ADDRESS"
            ) from None


@dataclass(frozen=True)
class Machine:
    """A live machine of the cluster."""

    id: str  # Ray's
    name: str  # for messages: its name and address
    address: str
    cpus: int
    gpus: int
    memory: int  # bytes


def machines() -> dict[str, Machine]:
    """The live machines, by id."""
    import ray

    return {node["NodeID"]: _machine(node) for node in ray.nodes() if node["Alive"]}


def _machine(node: dict[str, Any]) -> Machine:
    address = node["NodeManagerAddress"]
    name = node.get("NodeName")
    if not name or name == address:
        name = node["NodeManagerHostname"]
    resources = node["Resources"]
    return Machine(
        id=node["NodeID"],
        name=f"{name} ({address})",
        address=address,
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        memory=int(resources.get("memory", 0)),
    )


def here() -> str:
    """The id of this machine."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


@dataclass(frozen=True)
class WorkerShare:
    """The resources of one worker."""

    cpus: float
    gpus: float
    memory: int  # bytes, on a CPU

    @classmethod
    def of(
        cls, machines: Sequence[Machine], workers: int | None, weights: int
    ) -> "WorkerShare":
        """The share with which `workers` fit; without a number, as many as can hold `weights` bytes each."""
        if any(machine.gpus for machine in machines):
            return cls._on_gpus(machines, workers, weights)
        return cls._on_cpus(machines, workers, weights)

    @classmethod
    def _on_gpus(
        cls, machines: Sequence[Machine], workers: int | None, weights: int
    ) -> "WorkerShare":
        with_gpus = [machine for machine in machines if machine.gpus]
        gpus: float = _gpus_for(weights)
        if workers:
            counts = [machine.gpus for machine in with_gpus]
            even = _even(counts, workers, machines, lambda each: cls(0, each, 0))
            gpus = min(even.gpus, gpus)
        cpus_per_gpu = min(machine.cpus / machine.gpus for machine in with_gpus)
        return cls(min(CPUS, cpus_per_gpu * gpus // 1), gpus, 0)

    @classmethod
    def _on_cpus(
        cls, machines: Sequence[Machine], workers: int | None, weights: int
    ) -> "WorkerShare":
        memory = 0 if workers else WORKER_BYTES + EXPANSION * weights
        single = cls(1, 0, memory)
        counts = [machine.cpus for machine in machines if machine.cpus]
        if not counts:
            return single
        workers = workers or max(1, single.room(machines))
        return _even(counts, workers, machines, lambda each: cls(each, 0, memory))

    def room(self, machines: Sequence[Machine]) -> int:
        """How many workers fit on the machines."""
        return sum(map(self._room_on, machines))

    def _room_on(self, machine: Machine) -> int:
        limits = list[float]()
        if self.gpus:
            limits.append(machine.gpus / self.gpus)
        if self.cpus:
            limits.append(machine.cpus / self.cpus)
        if self.memory:
            limits.append(machine.memory / self.memory)
        return int(min(limits))

    def __str__(self) -> str:
        return f"{self.gpus:g} free GPUs" if self.gpus else f"{self.cpus:g} free CPUs"

    @property
    def options(self) -> dict[str, Any]:
        """As options of a Ray actor."""
        options = {"num_cpus": self.cpus}
        if self.gpus:
            options["num_gpus"] = self.gpus
        return options


def _even(
    counts: Sequence[int],
    workers: int,
    machines: Sequence[Machine],
    share: Callable[[float], WorkerShare],
) -> WorkerShare:
    """The largest share with which `workers` fit, at most one machine each; or a fraction of a CPU or GPU.

    `counts` are the CPUs or GPUs of the machines. Ray would wait forever for a share that no machine has.
    """
    for each in range(max(counts), 0, -1):
        candidate = share(each)
        if candidate.room(machines) >= workers:
            return candidate
    return share(1 / math.ceil(workers / sum(counts)))


@functools.cache
def _gpus_for(weights: int) -> int:
    """How many GPUs of this cluster are needed to hold `weights` bytes."""
    import ray

    if weights <= FITS:
        return 1
    call = ray.remote(num_gpus=1)(_gpu_bytes).remote()
    try:
        gpu_bytes: int = ray.get(call, timeout=GPU_SECONDS)
    except ray.exceptions.RayError as error:
        ray.cancel(call)
        raise VlmdistillError(
            f"no GPU of the cluster was free within {GPU_SECONDS:.0f} s ({cause_of(error)}): wait for other "
            "jobs to end"
        ) from error
    if not gpu_bytes:
        return 1
    usable_bytes = max(1, gpu_bytes - ROOM)
    return max(1, math.ceil(weights / usable_bytes))


def _gpu_bytes() -> int:
    """The memory of the GPU of this Ray task, in bytes."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def cause_of(error: BaseException) -> str:
    """The cause in one line: Ray puts it at the end of a long text about its own processes."""
    text = COLOUR.sub("", str(error)).strip()
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if RAISED.fullmatch(line)]
    if raised:
        return raised[-1]
    if detail := EXITED.search(one_line(Exception(text))):
        return detail[1]
    return lines[0] if lines else type(error).__name__


def address_of(error: BaseException) -> str:
    """The address of the machine that a Ray error comes from; empty if unknown."""
    match = ADDRESS.search(str(error))
    return match[1] if match else ""
