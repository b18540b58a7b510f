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
EXPANSION = (
    3  # of weights on a CPU: 16-bit files become 32-bit tensors, plus activations
)
FITS = 8192 * MIB  # of weights, which any GPU holds
ROOM = 2048 * MIB  # of a GPU, kept free of weights
GPU_SECONDS = 300.0  # to wait for a free GPU whose memory is measured
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b:? ?.*"
)
EXITED = re.compile(r"Worker exit detail: (.*?)\. (?:There are|$)")
ADDRESS = re.compile(r"\bip=([0-9a-fA-F.:]+)")


@contextmanager
def session(address: str = "") -> Iterator[None]:
    """A Ray session: the cluster at `address` or RAY_ADDRESS if one is given, else this machine alone.

    It uses a session that is already open, and closes only its own. Inside it SIGTERM raises SystemExit, so
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
        except SystemExit as stop:  # Ray's native code makes it 1, and its own handler the signal's number
            if (
                signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
                or stop.code == signal.SIGTERM
            ):
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
        except (
            ray.exceptions.RayError
        ) as error:  # errors of workers are handled by the pool
            raise VlmdistillError(
                f"Ray failed ({cause_of(error)}). Finished work is kept; run the same command to continue"
            ) from error
        finally:
            ray.shutdown()


@contextmanager
def terminable() -> Iterator[Callable[[], None]]:
    """Inside it SIGTERM raises SystemExit, so that what is open is closed.

    It yields what sets the handler again, after a library has set its own. A handler of the caller stays.
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
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # a second one would interrupt the cleanup
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
    kept = os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


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
    address, given, has = (
        node["NodeManagerAddress"],
        node.get("NodeName"),
        node["Resources"],
    )
    name = given if given and given != address else node["NodeManagerHostname"]
    cpus, gpus, memory = (int(has.get(what, 0)) for what in ("CPU", "GPU", "memory"))
    return Machine(node["NodeID"], f"{name} ({address})", address, cpus, gpus, memory)


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
        cls, there: Sequence[Machine], workers: int | None, weights: int
    ) -> "WorkerShare":
        """The share with which `workers` fit; without a number, as many as can hold `weights` bytes each."""
        if gpus := [machine.gpus for machine in there if machine.gpus]:
            needed = _gpus_for(weights)
            even = _even(gpus, workers or 0, there, lambda each: cls(0, each, 0))
            each = min(even.gpus, needed) if workers else needed
            spare = min(
                machine.cpus / machine.gpus for machine in there if machine.gpus
            )
            return cls(min(CPUS, spare * each // 1), each, 0)
        single = cls(1, 0, 0 if workers else WORKER_BYTES + EXPANSION * weights)
        cpus = [machine.cpus for machine in there if machine.cpus]
        number = workers or max(1, single.room(there))
        return (
            _even(cpus, number, there, lambda each: cls(each, 0, single.memory))
            if cpus
            else single
        )

    def room(self, there: Sequence[Machine]) -> int:
        """How many workers fit on the machines."""
        if self.gpus:
            fits = (
                min(one.gpus / self.gpus, one.cpus / self.cpus if self.cpus else 2**31)
                for one in there
            )
            return sum(map(int, fits))
        return sum(
            min(
                int(machine.cpus / self.cpus),
                machine.memory // self.memory if self.memory else 2**31,
            )
            for machine in there
        )

    def __str__(self) -> str:
        return f"{self.gpus:g} free GPUs" if self.gpus else f"{self.cpus:g} free CPUs"

    @property
    def options(self) -> dict[str, Any]:
        """As options of a Ray actor."""
        return {"num_cpus": self.cpus} | ({"num_gpus": self.gpus} if self.gpus else {})


def _even(
    has: Sequence[int],
    workers: int,
    there: Sequence[Machine],
    share: Callable[[float], WorkerShare],
) -> WorkerShare:
    """The largest share with which `workers` fit, at most one machine each; or a fraction of a CPU or GPU.

    Ray would wait forever for a share that no machine has.
    """
    shares = (share(each) for each in range(max(has), 0, -1))
    enough = (one for one in shares if one.room(there) >= workers)
    return next(enough, None) or share(1 / math.ceil(workers / sum(has)))


@functools.cache
def _gpus_for(weights: int) -> int:
    """How many GPUs of this cluster are needed to hold `weights` bytes."""
    import ray

    if weights <= FITS:
        return 1
    asked = ray.remote(num_gpus=1)(_gpu_bytes).remote()
    try:
        held = ray.get(asked, timeout=GPU_SECONDS)
    except ray.exceptions.RayError as error:
        ray.cancel(asked)
        raise VlmdistillError(
            f"no GPU of the cluster was free within {GPU_SECONDS:.0f} s ({cause_of(error)}): wait for other "
            "jobs to end"
        ) from error
    return max(1, math.ceil(weights / max(1, held - ROOM))) if held else 1


def _gpu_bytes() -> int:
    """The memory of the GPU of this Ray task, in bytes."""
    import torch

    return (
        int(torch.cuda.get_device_properties(0).total_memory)
        if torch.cuda.is_available()
        else 0
    )


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
    found = ADDRESS.search(str(error))
    return found[1] if found else ""
