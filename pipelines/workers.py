"""Ray: actors that share units of work, and survive one another's death.

A worker is a plain class, made in the actor by the function that the crew was given; it loads its
target there, once. Only small things travel: units, and facts about what became of them.
"""

import functools
import logging
import math
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from vlmdistill.stores.errors import DataError, VlmdistillError

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # that one unit is given out
MIB = 2**20
WORKER_BYTES = 1536 * MIB  # what a worker takes beside its target
EXPANSION = 3  # of weights on a CPU: 16-bit files in 32 bits, and room to work
FITS = 8192 * MIB  # weights that any GPU holds
ROOM = 2048 * MIB  # that a GPU keeps beside weights

Unit = TypeVar("Unit", contravariant=True)
Result = TypeVar("Result", covariant=True)
U = TypeVar("U")
R = TypeVar("R")


class Worker(Protocol[Unit, Result]):
    """What runs inside an actor."""

    def facts(self) -> Any:
        """What the driver must know before it can plan."""
        ...

    def work(self, unit: Unit) -> Result:
        """Do one unit, whole."""
        ...


class Host:
    """The actor: makes its worker at the first call, so that an error while loading is an ordinary one."""

    def __init__(self, make: Callable[[], Worker[Any, Any]]) -> None:
        self._make = make
        self._worker: Worker[Any, Any] | None = None

    def _ready(self) -> Worker[Any, Any]:
        self._worker = self._worker or self._make()
        return self._worker

    def facts(self) -> Any:
        """The worker's facts."""
        return self._ready().facts()

    def work(self, unit: Any) -> Any:
        """The worker's result for one unit."""
        return self._ready().work(unit)


@contextmanager
def session(workers: int | None = None, weights: int = 0) -> Iterator[int]:
    """A Ray session; yields how many workers to use. Ends with the block, unless it was there before.

    The cluster at RAY_ADDRESS if that is set, else this machine alone. `workers` defaults to as many as can
    each hold a target of `weights` bytes: on a GPU, or on several of one machine where one is too small;
    without GPUs as many as there are cores and memory for.
    """
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers}: give a number above 0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ours = not ray.is_initialized()
    if ours:
        quiet = {"logging_level": "ERROR", "log_to_driver": logger.isEnabledFor(logging.DEBUG)}
        address = os.environ.get("RAY_ADDRESS", "local")
        if address != "local":
            reach(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError) as error:
                raise DataError(
                    f"cannot use the Ray cluster at RAY_ADDRESS={address} ({_first_line(error)}): does it "
                    "want RAY_AUTH_MODE=token, or another version of Ray?"
                ) from None
        else:
            _start(quiet)
    try:
        there = ray.cluster_resources()
        cores, memory = (int(there.get(name, 0)) for name in ("CPU", "memory"))
        fitting = memory // (WORKER_BYTES + EXPANSION * weights)
        nodes = gpu_nodes()
        if workers is None and nodes:
            needed = _gpus_for(weights)
            yield max(1, sum(gpus // needed for gpus in nodes))
        else:
            yield workers or max(1, min(cores, fitting))
    finally:
        if ours:
            ray.shutdown()


def gpu_nodes() -> list[int]:
    """How many GPUs each machine of the cluster has, those without left out."""
    import ray

    found = (int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
    return [gpus for gpus in found if gpus]


def gpus_each(nodes: Sequence[int], workers: int) -> float:
    """GPUs for each of `workers`, at most: as many as each finds on one machine, or an even part of one."""
    if workers > sum(nodes):
        return 1 / math.ceil(workers / sum(nodes))
    return max(each for each in range(1, max(nodes) + 1) if sum(gpus // each for gpus in nodes) >= workers)


@functools.cache
def _gpus_for(weights: int) -> int:
    """How many GPUs of this cluster hold `weights` bytes."""
    import ray

    if weights <= FITS:
        return 1
    held = ray.get(ray.remote(num_gpus=1)(_gpu_bytes).remote())
    return max(1, math.ceil(weights / max(1, held - ROOM))) if held else 1


def _gpu_bytes() -> int:
    """The memory of the GPU that Ray lends to this task."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Done(Generic[U, R]):
    """A unit and what came of it."""

    unit: U
    result: R


class Crew(Generic[U, R]):
    """Actors with one target each, of `weights` bytes. Use inside `session`, as a context manager."""

    def __init__(self, make: Callable[[], Worker[U, R]], size: int, weights: int = 0) -> None:
        import ray

        nodes, cores = gpu_nodes(), ray.cluster_resources().get("CPU", 1)
        # More workers than cores is the user's choice; Ray would wait for ever for whole cores.
        share = {"num_cpus": cores / size if size > cores else max(1, int(cores // size))}
        if nodes:
            share = {"num_gpus": min(gpus_each(nodes, size), _gpus_for(weights))}
        self._actor = ray.remote(Host).options(**share, max_restarts=0)
        self._make = make
        self._hosts = [self._actor.remote(make) for _ in range(size)]

    def __enter__(self) -> "Crew[U, R]":
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        for host in self._hosts:
            ray.kill(host)

    def facts(self) -> Any:
        """The facts of whichever worker is ready first; all of them start to load."""
        import ray

        asked = [host.facts.remote() for host in self._hosts]
        ready, _ = ray.wait(asked, num_returns=1)
        try:
            return ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from error
        except ray.exceptions.RayError as error:
            raise VlmdistillError(
                f"a worker died while it loaded the target: {_first_line(error)}"
            ) from error

    def run(self, units: Sequence[U]) -> Iterator[Done[U, R]]:
        """Give every unit to a worker; yield each as it is done.

        A unit whose worker dies goes to another worker. One that fails `ATTEMPTS` times is put
        aside, so that the others get done, and then it is an error. A user's error ends the run at once.
        """
        import ray

        waiting = deque(enumerate(units))
        idle = list(self._hosts)
        out: dict[Any, tuple[Any, int, U]] = {}
        failures: Counter[int] = Counter()
        given_up: list[str] = []
        last: Exception | None = None
        done = 0
        while out or waiting:
            while idle and waiting:
                host, (number, unit) = idle.pop(), waiting.popleft()
                out[host.work.remote(unit)] = host, number, unit
            ready, _ = ray.wait(list(out), num_returns=1)
            host, number, unit = out.pop(ready[0])
            try:
                result = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                cause = _cause(error)
                if isinstance(cause, (VlmdistillError, OSError)):
                    raise cause from error
                last, trouble = error, f"{type(cause).__name__}: {_first_line(cause)}"
            except ray.exceptions.RayError as error:
                last, trouble = error, f"its worker died ({_first_line(error)})"
                host = self._replace(host)
            else:
                done += 1
                idle.append(host)
                yield Done(unit, result)
                continue
            idle.append(host)
            failures[number] += 1
            if failures[number] < ATTEMPTS:
                logger.warning("a unit failed, trying again: %s", trouble)
                waiting.append((number, unit))
                continue
            given_up.append(trouble)
            if not done and len(given_up) >= ATTEMPTS:
                break
        if given_up:
            raise VlmdistillError(
                f"{len(given_up)} of {len(units)} units failed {ATTEMPTS} times, last with {given_up[-1]}; "
                f"what is done ({done} units) is kept, and the same command tries the rest again"
            ) from last

    def _replace(self, dead: Any) -> Any:
        self._hosts.remove(dead)
        self._hosts.append(self._actor.remote(self._make))
        return self._hosts[-1]


def _start(quiet: dict[str, Any]) -> None:
    """Start Ray on this machine. It gives itself half a minute, which a busy machine may exceed once."""
    import ray

    for attempt in range(2):
        try:
            # Tensors never travel through the object store, so the smallest will do.
            ray.init(address="local", include_dashboard=False, object_store_memory=100 * MIB, **quiet)
            return
        except Exception as error:  # what Ray raises when it cannot start has no type
            ray.shutdown()
            if attempt:
                raise VlmdistillError(
                    f"Ray did not start ({_first_line(error)}): is the machine out of memory or very busy?"
                ) from error


def reach(address: str) -> None:
    """DataError when nothing listens at host:port; Ray itself takes minutes to say so."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise DataError(f"no Ray cluster at RAY_ADDRESS={address}: {error.strerror or error}") from None


def _cause(error: Any) -> Exception:
    """What was raised in the worker."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
