"""The queue of tasks: which worker gets which task, and how often a task is retried.

Samples that fail on one machine are retried on another, and so is a task whose worker dies or raises an
error; the second time, its halves are. A worker is dropped, if others are left, when no sample of its last
`FAILURES` new tasks succeeded: one that fails fast would draw most of the tasks.

A worker may return a part of a task. It gets the rest at once: what it has under way goes on, and the part is
not lost with it.
"""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, Protocol, Self, TypeVar

from vlmdistill.pipelines.cluster.session import Machine, cause_of
from vlmdistill.stores.errors import VlmdistillError, one_line

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # per task
PART_SECONDS = 30.0
"""After which a worker returns the part of a task that is done: a kill loses what came after it."""
FAILURES = 3
"""Tasks in a row in which no sample succeeded, after which a worker is dropped."""


class WorkerTask(Protocol):
    """Samples for one call of a worker."""

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the samples."""
        ...

    def only(self, keys: Collection[str]) -> Self:
        """The same task, with these samples only."""
        ...


class TaskResult(Protocol):
    """The result of one task."""

    failed: dict[str, str]
    """Key -> why the sample failed on this machine; it is retried on another."""
    left: Collection[str]
    """The keys that are still to be done; empty if the task has ended."""


T = TypeVar("T", bound=WorkerTask)
R = TypeVar("R", bound=TaskResult)


@dataclass(frozen=True)
class TaskDone(Generic[T, R]):
    """A task that has ended, with its result."""

    task: T
    result: R | None  # None after `ATTEMPTS` attempts without a result
    failed: dict[str, str]  # key -> reason, for samples that are not retried any more


@dataclass(eq=False)
class RunningTask(Generic[T]):
    """A task and its attempts."""

    task: T
    tried: list[str] = field(default_factory=list)
    """Workers and machines on which it failed."""
    why: dict[str, str] = field(default_factory=dict)  # key -> last error
    attempts: int = 0  # without a result
    refused: bool = False  # the last attempt ended with an error meant for the user


class Step(Enum):
    """The last call that a worker got."""

    locate = auto()
    check = auto()
    load = auto()
    idle = auto()
    work = auto()
    excluded = auto()  # it gets no calls, but keeps its resources so that Ray starts no other worker there


ALIVE = (Step.load, Step.idle, Step.work)


@dataclass(eq=False)
class Member:
    """A worker as the driver sees it."""

    actor: Any
    call: Any  # the Ray reference that the driver waits for; None when idle or excluded
    step: Step = Step.locate
    machine: Machine | None = None  # known after `locate`
    names: tuple[str, ...] = ()
    """Of the worker and its machine, for messages and `tried`."""
    running: RunningTask[Any] | None = None
    crashes: int = 0
    """Workers of this slot that died while they loaded the target, in a row."""
    failures: int = 0  # tasks in a row in which no sample succeeded

    @property
    def alive(self) -> bool:
        """Whether it loads, works or waits for work."""
        return self.step in ALIVE

    def begin(self, running: RunningTask[Any]) -> None:
        """Send it a task."""
        self.step, self.running = Step.work, running
        self.call = self.actor.work.remote(running.task)

    def exclude(self) -> None:
        """Send it no more calls."""
        self.step, self.call = Step.excluded, None


class Queue(Generic[T, R]):
    """The tasks of a run. `members` is the list of the pool, which changes it."""

    def __init__(self, members: Sequence[Member], tasks: Iterable[T] = ()) -> None:
        self._members = members
        # Each is made when a worker is free: all of them take much memory.
        self._fresh = iter(tasks)
        self._next = next(self._fresh, None)
        self._again: list[RunningTask[T]] = []  # failed, or lost with their machine
        self._ended: list[TaskDone[T, R]] = []
        self._several = False  # machines
        self._warned = set[str]()  # machines on which samples failed
        self._done = 0  # tasks
        self._given_up: list[str] = []  # errors of tasks that ended without a result

    def __bool__(self) -> bool:
        """Whether a task waits or runs."""
        waits = self._next is not None or bool(self._again)
        return waits or any(member.running for member in self._members)

    def ended(self) -> Iterator[TaskDone[T, R]]:
        """The tasks that ended since the last call. VlmdistillError if all tasks end without a result."""
        while self._ended:
            yield self._ended.pop(0)
        if len(self._given_up) >= ATTEMPTS and not self._done:
            raise VlmdistillError(
                f"{len(self._given_up)} tasks failed on every attempt and no task succeeded; last error: "
                f"{self._given_up[-1]}"
            )

    def assign(self) -> None:
        """Give tasks to idle workers, first those that failed elsewhere or were lost."""
        ids = {member.machine.id for member in self._members if member.machine}
        self._several |= len(ids) > 1
        for running in list(self._again):
            self._assign_again(running)
        for member in self._members:
            if self._next is not None and member.step is Step.idle:
                member.begin(RunningTask(self._next))
                self._next = next(self._fresh, None)

    def _assign_again(self, running: RunningTask[T]) -> None:
        """Give a task to an idle worker on which it has not failed; if it failed on all, to any again."""
        some_alive = any(member.alive for member in self._members)
        if some_alive and not self._takers(running):
            if not running.attempts:  # its samples failed on every machine
                self._give_up(running)
                return
            running.tried = []
        for member in self._takers(running):
            if member.step is Step.idle:
                self._again.remove(running)
                member.begin(running)
                return

    def _takers(self, running: RunningTask[T]) -> list[Member]:
        """The live workers on which this task has not failed."""
        return [
            member
            for member in self._members
            if member.alive and not set(member.names) & set(running.tried)
        ]

    def did(self, member: Member, result: R) -> None:
        """Record a result. The samples that failed are retried on another machine."""
        running = self._taken_from(member)
        if result.left:
            rest_keys = set(result.left)
            rest = dataclasses.replace(
                running, task=running.task.only(rest_keys), tried=list(running.tried)
            )
            done_keys = [key for key in running.task.keys if key not in rest_keys]
            running.task = running.task.only(done_keys)
        failed = dict(result.failed)
        first_cause = next(iter(failed.values()), "")
        succeeded = len(failed) < len(running.task.keys)
        self._count(member, running, succeeded, first_cause)
        if failed:
            machine = member.names[1]
            again = RunningTask(
                running.task.only(failed), [*running.tried, machine], failed
            )
            if len(again.tried) < ATTEMPTS and self._takers(again):
                self._again.append(again)
                self._warn_once(machine, first_cause)
                failed = {}
            else:
                failed = self._causes(again)
        self._done += 1
        self._ended.append(TaskDone(running.task, result, failed))
        if result.left:
            self._go_on(member, rest)

    def _go_on(self, member: Member, rest: RunningTask[T]) -> None:
        """Give a worker the rest of its task, unless it was dropped."""
        if member.step is Step.idle:
            member.begin(rest)
        else:
            rest.tried = []  # the worker was dropped: any other one may go on
            self._again.append(rest)

    def _warn_once(self, machine: str, cause: str) -> None:
        """Log the first time that samples fail on a machine."""
        if machine not in self._warned:
            logger.warning("%s: samples fail and are retried: %s", machine, cause)
            self._warned.add(machine)

    def failed(
        self, member: Member, name: str, cause: str, *, refused: bool = False
    ) -> None:
        """Record an attempt without a result; the task is retried, if possible not on `name`."""
        running = self._taken_from(member)
        self._count(member, running, False, cause)
        running.attempts += 1
        running.refused = refused
        running.tried.append(name)
        keys = running.task.keys
        running.why = dict.fromkeys(keys, cause)
        if len(keys) > 1 and running.attempts > 1 and not refused:
            # Halves of halves end with the guilty sample, and only that is given up.
            logger.warning("%s: a task failed and is halved: %s", name, cause)
            middle = len(keys) // 2
            halves = [
                RunningTask(running.task.only(half), attempts=1)
                for half in (keys[:middle], keys[middle:])
            ]
            self._again[:0] = halves
            return
        if running.attempts >= ATTEMPTS:
            self._give_up(running)
            return
        logger.warning("%s: a task failed and is retried: %s", name, cause)
        # First of all, as halves are: where every task fails, three are soon given up, and the run ends.
        self._again.insert(0, running)

    def lost(self, member: Member) -> None:
        """Record that a worker was lost with its machine, which is no failure of its task."""
        if member.running:
            self._again.append(self._taken_from(member))

    def _taken_from(self, member: Member) -> RunningTask[T]:
        running = member.running
        assert running is not None
        member.running = None
        member.step = Step.idle
        return running

    def _count(
        self, member: Member, running: RunningTask[T], succeeded: bool, why: str
    ) -> None:
        """Drop a worker whose tasks fail one after the other, unless it is the last one.

        A task that has failed elsewhere says nothing of this worker.
        """
        if succeeded:
            member.failures = 0
        elif not running.tried and not running.attempts:
            member.failures += 1
        if member.failures < FAILURES:
            return
        if any(other.alive for other in self._members if other is not member):
            member.exclude()
            logger.warning(
                "%s is dropped: %d tasks in a row failed there: %s",
                member.names[0],
                FAILURES,
                why,
            )

    def _give_up(self, running: RunningTask[T]) -> None:
        if running in self._again:
            self._again.remove(running)
        if running.attempts:
            self._given_up.append(next(iter(running.why.values())))
        self._ended.append(TaskDone(running.task, None, self._causes(running)))

    def _causes(self, running: RunningTask[T]) -> dict[str, str]:
        """Why each sample failed, and on which machines if there are several."""
        if not self._several:
            return running.why
        names = " and ".join(dict.fromkeys(running.tried))
        return {key: f"{why} (on {names})" for key, why in running.why.items()}


def scattered(count: int) -> list[int]:
    """The numbers below `count`, in an order whose first ones are spread over all: by reversed bits."""
    bits = (count - 1).bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{bits}b}"[::-1])


def text_of(cause: BaseException) -> str:
    """An error in one line, with its type if it is not one of this project."""
    if isinstance(cause, VlmdistillError):
        return one_line(cause)
    return f"{type(cause).__name__}: {cause_of(cause)}"
