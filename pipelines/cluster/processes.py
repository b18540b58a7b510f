"""Run functions in child processes, several at a time.

Each child gets its environment (threads, GPUs, rank) before it imports anything, runs in its own session, so
that Ctrl-C reaches the parent only, and sends progress and log lines back. The parent forwards signals; each
child saves its work and exits.

torch.distributed.elastic starts processes as well, and gives up parts of that: its functions get their
environment after torch is imported, and Ctrl-C a second time from the terminal; its commands outlive a parent
that was killed; of several failures it returns the first, which may be the consequence of another.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from vlmdistill.drafters.training.signals import handling
from vlmdistill.stores.errors import (
    FOR_USER,
    LostRankError,
    StoppedError,
    TrainingError,
    one_line,
)

GRACE = 30.0
"""Seconds for a process to save its work and exit."""
CAUSE_SECONDS = 5.0
"""Seconds to wait for the cause, after one process failed as the consequence of another failure."""
KILLS = 3
"""The third signal kills the processes."""
CHILD = "from vlmdistill.pipelines.cluster.processes import work; work({})"


@dataclass(frozen=True)
class FunctionProgress:
    """Progress of a function."""

    done: int
    total: int
    remark: str


@dataclass(frozen=True)
class Threads:
    """To a function: it may use so many threads from now on."""

    count: int


@dataclass(frozen=True)
class FunctionLine:
    """A line that a function has logged."""

    logger: str
    level: int
    text: str

    def log(self, process: str) -> None:
        """Log the line here, with the name of the process that it comes from."""
        line = f"{process}: {self.text}" if process else self.text
        logging.getLogger(self.logger).log(self.level, "%s", line)


@dataclass(frozen=True)
class FunctionDone:
    """A function returned."""

    cpu_seconds: float  # of its process


@dataclass(frozen=True)
class FunctionFailed:
    """A function raised an error meant for the user."""

    line: str
    consequence: bool = False  # of the failure of another process


@dataclass(frozen=True)
class FunctionStopped:
    """A signal ended a function; the line says which work is kept."""

    line: str


End: TypeAlias = FunctionDone | FunctionFailed | FunctionStopped


class Process:
    """A process that runs `function(*arguments, report)`."""

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        arguments: Sequence[Any],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.connection, child_end = Pipe()
        self._end: End | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `end`)
        command = [sys.executable, "-c", CHILD.format(child_end.fileno())]
        with child_end:
            self._popen = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
        # A broken pipe: the process has ended already, which `message` reports.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((function, tuple(arguments)))

    def use(self, threads: Threads) -> None:
        """Let the function use so many threads from its next report on."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(threads)

    def signal(self, number: int) -> None:
        """Send a signal if the process is alive."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, number)

    def message(self) -> FunctionProgress | End | None:
        """The next message, None if it was a log line; the last one says how the process has ended."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            message = self.connection.recv()
            if isinstance(message, FunctionLine):
                message.log(self.name)
                return None
            if isinstance(message, FunctionProgress):
                return message
            self._end = message
        return self.end()

    def end(self) -> End:
        """Wait until the process has ended; kill it after `GRACE` seconds."""
        deadline = time.monotonic() + GRACE
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.connection.poll(max(0.0, deadline - time.monotonic())):
                message = self.connection.recv()
                if isinstance(message, FunctionLine):
                    message.log(self.name)
            self.signal(signal.SIGKILL)
        status = self._popen.wait()
        self.connection.close()
        last_line = self._last_error_line()
        if self._end is not None:
            return self._end
        how = f"signal {-status}" if status < 0 else f"status {status}"
        reason = f": {last_line}" if last_line else ""
        return FunctionFailed(f"its process ended with {how}{reason}")

    def _last_error_line(self) -> str:
        with self._stderr as file:
            file.seek(0)
            lines = file.readlines()
        return lines[-1].strip() if lines else ""


class Processes:
    """Child processes that end with this context."""

    def __init__(self) -> None:
        self._running: dict[Connection, Process] = {}
        self._signals: list[int] = []
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Processes":
        self._context.enter_context(handling(self._forward))
        return self

    def __exit__(self, *error: object) -> None:
        with self._context:
            for process in self._running.values():
                process.signal(signal.SIGTERM)
            for process in self._running.values():
                process.end()

    @property
    def stopping(self) -> bool:
        """Whether a signal has arrived: start nothing new."""
        return bool(self._signals)

    def start(
        self,
        name: str,
        function: Callable[..., object],
        arguments: Sequence[Any],
        environment: Mapping[str, str],
    ) -> None:
        """Run `function(*arguments, report)` in a new process, which imports it by name."""
        process = Process(name, function, arguments, environment)
        self._running[process.connection] = process

    def use(self, threads: Threads) -> None:
        """Let each running function use so many threads."""
        for process in self._running.values():
            process.use(threads)

    def messages(self) -> Iterator[tuple[str, FunctionProgress | FunctionDone]]:
        """The messages of all processes until they end; the last one of each is FunctionDone.

        TrainingError if a function fails. StoppedError after a signal, once all processes have ended.
        """
        stopped: list[str] = []
        while self._running:
            for process, message in self._ready(None):
                if isinstance(message, FunctionFailed) and not self._signals:
                    self._fail(process, message)
                elif isinstance(message, FunctionFailed | FunctionStopped):
                    stopped.append(_line(process, message))
                else:
                    yield process.name, message
        if self._signals:
            lines = "; ".join(dict.fromkeys(stopped))
            raise StoppedError(lines or "all work was done", self._signals[0])

    def _ready(
        self, seconds: float | None
    ) -> Iterator[tuple[Process, FunctionProgress | End]]:
        """Wait for messages, at most so many seconds, and take one of each process that has one."""
        for connection in wait(list(self._running), seconds):
            assert isinstance(connection, Connection)
            process = self._running[connection]
            message = process.message()
            if message is None:
                continue
            if not isinstance(message, FunctionProgress):
                del self._running[connection]
            yield process, message

    def _fail(self, process: Process, failure: FunctionFailed) -> NoReturn:
        """Raise the error of the process that failed first, not of one that failed as a consequence."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while failure.consequence and self._running:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                break
            for other, message in self._ready(seconds):
                if isinstance(message, FunctionFailed) and not message.consequence:
                    process, failure = other, message
        raise TrainingError(_line(process, failure))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) >= KILLS:
            number = signal.SIGKILL
        for process in list(self._running.values()):
            process.signal(number)


def _line(process: Process, message: FunctionFailed | FunctionStopped) -> str:
    return f"{process.name}: {message.line}" if process.name else message.line


# The child


class _Parent:
    """The connection of a child to its parent; a child whose parent is gone stops."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._one_at_a_time = threading.RLock()

    def receive(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """The function to run, and its arguments."""
        function, arguments = self._connection.recv()
        return function, arguments

    def send(self, message: FunctionProgress | FunctionLine) -> None:
        try:
            with self._one_at_a_time:
                self._connection.send(message)
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, message: End) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(message)

    def report(self, done: int, total: int, remark: str = "") -> None:
        """See `Progress`; the parent's word on threads is taken here, between two steps."""
        self.send(FunctionProgress(done, total, remark))
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self._connection.poll():
                threads: Threads = self._connection.recv()
                import torch

                torch.set_num_threads(threads.count)


class _LineSender(logging.Handler):
    """Sends what is logged to the parent."""

    def __init__(self, parent: _Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        line = FunctionLine(record.name, record.levelno, record.getMessage())
        self._parent.send(line)


def work(descriptor: int) -> NoReturn:
    """The child: run the function that the parent sends, and report how it has ended.

    It ends at once, without the teardown of the interpreter, in which gloo's threads may abort the process.
    """
    parent = _Parent(Connection(descriptor))
    message: End
    with handling(_interrupt):
        try:
            function, arguments = parent.receive()
            logger = logging.getLogger("vlmdistill")
            logger.addHandler(_LineSender(parent))
            logger.setLevel(logging.INFO)
            function(*arguments, parent.report)
            message = FunctionDone(time.process_time())
        except (StoppedError, KeyboardInterrupt) as error:
            message = FunctionStopped(one_line(error) or "no work was started")
        except FOR_USER as error:
            message = FunctionFailed(one_line(error), isinstance(error, LostRankError))
        parent.end(message)
        os._exit(0)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # which no library catches as its own error
