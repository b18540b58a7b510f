"""Ray actors that work through a list of tasks and replace one another when they die; or this process alone.

An actor reports its machine, checks that the machine has what the work needs, loads the target once, and only
then gets tasks. Tensors never travel: workers get tasks and return counts or small rows.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from vlmdistill.pipelines.cluster.engine_environment import EngineName
from vlmdistill.pipelines.cluster.queue import (
    ATTEMPTS,
    FAILURES,
    Member,
    Queue,
    R,
    RunningTask,
    Step,
    T,
    TaskDone,
    TaskResult,
    WorkerTask,
    text_of,
)
from vlmdistill.pipelines.cluster.session import (
    Machine,
    WorkerShare,
    address_of,
    cause_of,
    here,
    is_open_or_named,
    machines,
    session,
    terminable,
)
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.stores.errors import FOR_USER, DataError, VlmdistillError

logger = logging.getLogger(__name__)

GATHER_SECONDS = 60.0
"""In which Ray may start workers, before work begins without the late ones."""
LOOK_SECONDS = 2.0  # between two looks at the machines of the cluster
TICK_SECONDS = 0.5  # to wait for a reply
FEW = 300  # prompts

In = TypeVar("In", bound=WorkerTask, contravariant=True)
Out = TypeVar("Out", bound=TaskResult, covariant=True)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How many workers a stage uses, and how each loads the target."""

    workers: int | None = None
    """None: see `for_prompts`, then as many as the machines have room for; 0: this process, without Ray."""
    wait: float = 300.0  # seconds without any live worker, until the run fails
    load: Options = field(default_factory=Options)
    engine: EngineName = "transformers"  # what runs the target

    def for_prompts(self, count: int) -> "WorkerOptions":
        """The options for so many prompts.

        Without a number of workers, this process takes few prompts, and all where only one worker has
        room: Ray would start for longer than it helps. A cluster is used, and so is a session that is open.
        """
        asked = self.workers is not None or self.engine != "transformers"
        if not count or asked or is_open_or_named():
            return self
        import torch

        room = torch.cuda.device_count() or len(os.sched_getaffinity(0))
        if count >= FEW and room > 1:
            return self
        why = f"for {count} prompts" if count < FEW else "on one device"
        logger.info("this process runs the target %s; --workers N starts workers", why)
        return replace(self, workers=0)

    def session(self) -> AbstractContextManager[object]:
        """The context in which workers run: a Ray session, unless this process does the work."""
        return terminable() if self.workers == 0 else session()


class Worker(Protocol[In, Out]):
    """Does the tasks, in an actor or in this process."""

    def facts(self) -> Any:
        """Facts by which the driver plans; equal for all workers."""
        ...

    def work(self, task: In) -> Out:
        """Do one task."""
        ...


class _WarningsKept(logging.Handler):
    """Keeps the texts of warnings until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """The texts since the last call."""
        texts, self._texts = self._texts, []
        return texts


@dataclass(frozen=True)
class _Worked:
    """The result of a task, and what its worker has warned of."""

    result: Any
    warnings: list[str]


class WorkerActor:
    """The Ray actor. It makes its worker in a call, so that an error while loading is an ordinary one."""

    def __init__(
        self, make: Callable[[], Worker[Any, Any]], check: Callable[[], None]
    ) -> None:
        self._make = make
        self._check = check
        self._worker: Worker[Any, Any] | None = None
        self._warnings = _WarningsKept()
        logging.getLogger("vlmdistill").addHandler(self._warnings)

    def locate(self) -> str:
        """The id of this machine."""
        return here()

    def check(self) -> None:
        """Raise an error that names what this machine lacks."""
        self._check()

    def facts(self) -> Any:
        """Make the worker and return its facts."""
        self._worker = self._make()
        return self._worker.facts()

    def work(self, task: Any) -> _Worked:
        """The worker's result for one task."""
        assert self._worker is not None
        return _Worked(self._worker.work(task), self._warnings.taken())


def no_check() -> None:
    """A check that every machine passes."""


class Pool(Protocol[T, R]):
    """Workers of a stage."""

    @property
    def on_gpus(self) -> bool:
        """Whether each worker has a GPU, or a share of one."""
        ...

    def facts(self) -> Any:
        """The facts of the first worker that is ready."""
        ...

    def run(self, tasks: Iterable[T]) -> Iterator[TaskDone[T, R]]:
        """Give every task to a worker; yield each as it ends."""
        ...


def opened(
    make: Callable[[], Worker[T, R]],
    check: Callable[[], None] = no_check,
    options: WorkerOptions | None = None,
    *,
    weights: int = 0,
) -> AbstractContextManager[Pool[T, R]]:
    """The workers that `options` name, with one target each, of `weights` bytes. Use inside their `session`.

    `make` makes a worker; `check` raises what a machine lacks.
    """
    if options and options.workers == 0:
        return OwnProcess(make, check)
    return ActorPool(make, check, options, weights=weights)


class OwnProcess(Generic[T, R]):
    """This process as the only worker: it begins at once, and no other takes over if it dies."""

    def __init__(
        self, make: Callable[[], Worker[T, R]], check: Callable[[], None] = no_check
    ) -> None:
        self._make, self._check = make, check
        self._worker: Worker[T, R] | None = None

    def __enter__(self) -> "OwnProcess[T, R]":
        return self

    def __exit__(self, *error: object) -> None:
        self._worker = None  # its target goes before the next one is loaded
        import torch

        torch.cuda.empty_cache()  # for the processes that train

    @property
    def on_gpus(self) -> bool:
        """Whether this process has one."""
        import torch

        return torch.cuda.is_available()

    def facts(self) -> Any:
        """The facts of the worker, which is made once."""
        if self._worker is None:
            self._check()
            try:
                self._worker = self._make()
            except Exception as error:
                raise _for_user(error) from error
        return self._worker.facts()

    def run(self, tasks: Iterable[T]) -> Iterator[TaskDone[T, R]]:
        """Do every task; yield each as it ends. A task that raises is repeated, then its halves are.

        An error meant for the user ends the run. VlmdistillError if no task succeeds, or if `FAILURES` tasks
        in a row raise: the process is broken.
        """
        self.facts()
        assert self._worker is not None
        member = _Own(None, None, Step.idle, names=("this process", "this process"))
        queue = Queue[T, R]([member], tasks)
        while queue:
            queue.assign()
            assert member.running is not None
            try:
                result = self._worker.work(member.running.task)
            except FOR_USER:
                raise
            except Exception as error:
                queue.failed(member, member.names[0], text_of(error))
                if member.failures >= FAILURES:
                    raise VlmdistillError(
                        f"{FAILURES} tasks in a row failed in this process ({text_of(error)}). Finished work "
                        "is kept; to continue, run the same command with --workers 1: a worker of its own is "
                        "replaced when a task fails"
                    ) from error
            else:
                queue.did(member, result)
            yield from queue.ended()


class _Own(Member):
    """This process as a member: the caller of the queue does the task."""

    def begin(self, running: RunningTask[Any]) -> None:
        self.step, self.running = Step.work, running


class ActorPool(Generic[T, R]):
    """Actors with one target each, of `weights` bytes. Use inside `session`, as a context manager.

    `make` makes the worker; `check` raises what a machine lacks. The number of workers defaults to as many as
    can hold a target: on one GPU each, or on several GPUs of a machine if one is too small; without GPUs, as
    many as there are cores and memory for. Machines that join later then add workers.
    """

    def __init__(
        self,
        make: Callable[[], Worker[T, R]],
        check: Callable[[], None] = no_check,
        options: WorkerOptions | None = None,
        *,
        weights: int = 0,
    ) -> None:
        import ray

        options = options or WorkerOptions()
        if options.workers is not None and options.workers < 1:
            raise DataError(f"--workers {options.workers}: give 0, or more")
        self._machines = machines()
        self._share = WorkerShare.of(
            list(self._machines.values()), options.workers, weights
        )
        # Spread, so that few workers on many machines do not crowd on one.
        self._actor = ray.remote(WorkerActor).options(
            **self._share.options, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._make, self._check = make, check
        self._workers, self._wait = options.workers, options.wait
        self._members: list[Member] = []
        self._queue = Queue[T, R](self._members)
        self._facts: Any = None
        self._has_assigned = False  # any task
        self._started = 0  # workers, to name them
        self._trouble = ""  # why the last worker was lost
        self._warned: set[str] = set()  # what workers have warned of
        now = time.monotonic()
        self._last_look = now  # at the machines
        self._last_alive = now  # any worker
        self._last_reply = now
        self._fill()

    def __enter__(self) -> "ActorPool[T, R]":
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._members:
            _kill(member)

    @property
    def on_gpus(self) -> bool:
        """Whether each worker has a GPU, or a share of one."""
        return self._share.gpus > 0

    def facts(self) -> Any:
        """The facts of the first worker that is ready, once every machine was checked."""
        while not self._gathered():
            self._advance()
        return self._facts

    def run(self, tasks: Iterable[T]) -> Iterator[TaskDone[T, R]]:
        """Give every task to a worker; yield each as it ends.

        A task whose worker dies or raises goes to another, then its halves do; a single sample has failed
        after `ATTEMPTS` attempts. An error that the user must fix ends the run, unless the task succeeds on
        another machine. VlmdistillError if no task succeeds, or if no worker is left.
        """
        self.facts()
        self._has_assigned = True
        self._queue = Queue[T, R](self._members, tasks)
        while self._queue:
            self._queue.assign()
            yield from self._queue.ended()
            if self._queue:
                self._advance()
                yield from self._queue.ended()

    def _fill(self) -> None:
        """Ask Ray for as many workers as the user wants, or as the cluster has room for."""
        room = self._share.room(list(self._machines.values()))
        wanted = self._workers or max(1, room)
        while len(self._members) < wanted:
            self._start()

    def _start(self, crashes: int = 0) -> None:
        actor = self._actor.remote(self._make, self._check)
        self._members.append(Member(actor, actor.locate.remote(), crashes=crashes))

    def _gathered(self) -> bool:
        """Whether a worker is ready and all others are checked, or are late."""
        steps = {member.step for member in self._members}
        if Step.idle not in steps:
            return False
        late = time.monotonic() - self._last_reply > GATHER_SECONDS
        return late or steps.isdisjoint({Step.locate, Step.check})

    def _advance(self) -> None:
        """Wait for a reply or a tick, and handle what has happened."""
        import ray

        calls = {
            member.call: member for member in self._members if member.call is not None
        }
        if calls:
            replied, _ = ray.wait(list(calls), num_returns=1, timeout=TICK_SECONDS)
            for call in replied:
                self._handle_reply(calls[call])
        else:
            time.sleep(TICK_SECONDS)
        if time.monotonic() - self._last_look > LOOK_SECONDS:
            self._look()
        self._require_alive()

    def _require_alive(self) -> None:
        """VlmdistillError if no worker was alive for too long."""
        now = time.monotonic()
        if any(member.alive for member in self._members):
            self._last_alive = now
            return
        wait = self._wait
        if self._facts is None:  # the first worker is still to come
            wait = max(wait, GATHER_SECONDS)
        if now - self._last_alive > wait:
            why = self._trouble or f"Ray found no machine with {self._share} for one"
            raise VlmdistillError(
                f"no worker was ready for {wait:g} s ({why}). Finished work is kept; run the same command to "
                "continue"
            )

    # Machines

    def _look(self) -> None:
        """Drop the workers of machines that were lost, and fill machines that joined."""
        before = self._machines
        self._machines = machines()
        self._last_look = time.monotonic()
        for lost in before.keys() - self._machines.keys():
            self._lose(before[lost])
        for joined in self._machines.keys() - before.keys():
            logger.warning("machine %s joined", self._machines[joined].name)
        self._fill()

    def _lose(self, machine: Machine) -> None:
        """Drop the workers of a machine that was lost."""
        for member in list(self._members):
            if member.machine and member.machine.id == machine.id:
                self._drop(member)
        alive = [member for member in self._members if member.alive]
        names = {member.names[1] for member in alive}
        self._trouble = f"machine {machine.name} was lost"
        logger.warning(
            "%s: %d workers on %d machines are left",
            self._trouble,
            len(alive),
            len(names),
        )

    def _drop(self, member: Member) -> None:
        self._members.remove(member)
        _kill(member)
        self._queue.lost(member)

    def _machine_name(self, member: Member, error: BaseException) -> str:
        """The machine that a worker was on, as far as it is known."""
        address = address_of(error)
        machine = member.machine
        if machine is None:
            at_address = [
                candidate
                for candidate in self._machines.values()
                if candidate.address == address
            ]
            if len(at_address) == 1:
                machine = at_address[0]
        if machine is not None:
            return f"machine {machine.name}"
        return f"machine {address}" if address else "a machine"

    # Replies

    def _handle_reply(self, member: Member) -> None:
        import ray

        call = member.call
        member.call = None
        try:
            value = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if member.step is Step.work:
                self._failed(member, cause)
            else:
                self._refuse(member, self._machine_name(member, error), cause)
        except ray.exceptions.RayError as error:
            self._died(member, error)
        else:
            self._next_step(member, value)

    def _next_step(self, member: Member, value: Any) -> None:
        """Call the next step of a worker whose last call succeeded."""
        self._last_reply = time.monotonic()
        if member.step is Step.locate:
            self._located(member, value)
        elif member.step is Step.check:
            member.step, member.call = Step.load, member.actor.facts.remote()
        elif member.step is Step.load:
            self._facts = value if self._facts is None else self._facts
            if value != self._facts:
                error = VlmdistillError(
                    f"it loaded a different target: {value}, not {self._facts}"
                )
                self._refuse(member, member.names[1], error)
                return
            member.step = Step.idle
            member.crashes = 0
            self._trouble = ""
        else:
            worked: _Worked = value
            for text in worked.warnings:
                if text not in self._warned:  # by another worker
                    self._warned.add(text)
                    logger.warning("%s", text)
            self._queue.did(member, worked.result)

    def _located(self, member: Member, machine_id: str) -> None:
        """Let a worker check its machine, whose id it has told."""
        if machine_id not in self._machines:
            self._look()
        member.machine = self._machines.get(machine_id)
        if member.machine is None:  # lost since it replied
            self._drop(member)
            return
        name = f"machine {member.machine.name}"
        self._started += 1
        member.names = (f"worker {self._started} on {name}", name)
        member.step, member.call = Step.check, member.actor.check.remote()

    def _refuse(self, member: Member, name: str, cause: BaseException) -> None:
        """A worker cannot be used: an error before the first task, a warning after it."""
        if not self._has_assigned:
            raise self._named(name, cause)
        self._trouble = f"{name} is excluded: {text_of(cause)}"
        logger.warning("%s", self._trouble)
        member.exclude()

    def _failed(self, member: Member, cause: Exception) -> None:
        """A worker raised an error in a task."""
        worker, machine = member.names
        if not isinstance(cause, FOR_USER):
            self._queue.failed(member, worker, text_of(cause))
            self._drop(member)  # its CUDA context may be broken
            self._start()
            return
        others_alive = any(
            other.alive and machine not in other.names for other in self._members
        )
        refused_before = member.running is not None and member.running.refused
        if refused_before or not others_alive:
            raise self._named(machine, cause)
        self._queue.failed(member, machine, text_of(cause), refused=True)

    def _died(self, member: Member, error: Any) -> None:
        """The process of a worker ended: start another, unless that cannot help."""
        if member.machine and member.machine.id not in machines():
            self._look()
            if member in self._members:
                # The loss was seen before the worker had replied.
                self._drop(member)
                self._fill()
            return
        name = self._machine_name(member, error)
        cause = cause_of(error)
        if getattr(error, "actor_init_failed", False):  # it would fail again
            self._refuse(member, name, VlmdistillError(cause))
            return
        if member.machine is None:
            # No machine can be blamed: most likely one was lost, and Ray has yet to notice. `_look` fills up.
            self._trouble = (
                self._trouble or f"a worker died before it started ({cause})"
            )
            self._drop(member)
            return
        if member.step is Step.work:
            self._queue.failed(member, name, f"its worker died ({cause})")
        else:
            member.crashes += 1
            if member.crashes >= ATTEMPTS:
                died = f"{ATTEMPTS} workers died while they loaded the target; last cause: {cause}"
                self._refuse(member, name, VlmdistillError(died))
                return
            self._trouble = (
                f"{name}: a worker died while it loaded the target ({cause})"
            )
            logger.warning("%s, starting another", self._trouble)
        self._drop(member)
        self._start(member.crashes)

    def _named(self, name: str, cause: BaseException) -> BaseException:
        """The error of a worker, with its machine if there are several."""
        if len(self._machines) == 1:
            return _for_user(cause)
        kind = type(cause) if isinstance(cause, VlmdistillError) else VlmdistillError
        return kind(f"{name}: {text_of(cause)}")


def _for_user(cause: BaseException) -> BaseException:
    """The error itself if it is meant for the user, else one that names it."""
    return cause if isinstance(cause, FOR_USER) else VlmdistillError(text_of(cause))


def weight_bytes(model: str, load: Options) -> int:
    """Bytes of a checkpoint's weights in the dtype in which they are loaded; quantised ones as numbers."""
    from vlmdistill.pipelines.targets.checkpoints.folder import (
        parameters_in,
        resolve,
        weight_files,
    )

    dtype = load.get("dtype", "auto")
    folder = resolve(model)
    parameters = parameters_in(folder)
    if dtype == "auto":
        file_bytes = sum(path.stat().st_size for path in weight_files(folder))
        return max(file_bytes, 2 * parameters)
    return parameters * (4 if dtype == "float32" else 2)


def _kill(member: Member) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(member.actor)
