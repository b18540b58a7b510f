"""Run functions in child processes, several at a time.

Each child gets its environment (threads, GPUs, rank) before it imports anything, runs in its own session, so
that Ctrl-C reaches the parent only, and sends progress and log lines back. The parent forwards signals; each
child saves its work and exits.
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
from typing import Any, NoReturn

from vlmdistill.drafters.training.signals import ASKING
from vlmdistill.stores.errors import (
    FOR_USER,
    LostRankError,
    StoppedError,
    TrainingError,
    one_line,
)

GRACE = 30.0  # seconds for a process to save its work and exit
AFTER = 5.0  # seconds to wait for the first cause, after one process failed as a consequence
KILLS = 3  # the third signal kills the processes
CHILD = "from vlmdistill.pipelines.cluster.processes import work; work({})"


@dataclass(frozen=True)
class FunctionProgress:
    """Progress of a function."""

    done: int
    total: int
    remark: str


@dataclass(frozen=True)
class FunctionLine:
    """A line that a function has logged."""

    logger: str
    level: int
    text: str

    def log(self, process: str) -> None:
        """Log it here, as of that process."""
        logging.getLogger(self.logger).log(
            self.level, "%s", f"{process}: {self.text}" if process else self.text
        )


class _Sender(logging.Handler):
    """Sends what is logged to the parent."""

    def __init__(self, send: Callable[[FunctionLine], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(FunctionLine(record.name, record.levelno, record.getMessage()))


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
        self.connection, theirs = Pipe()
        self._result: FunctionDone | FunctionFailed | FunctionStopped | None = None
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `end`)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", CHILD.format(theirs.fileno())],
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        with contextlib.suppress(
            BrokenPipeError
        ):  # it died already; `message` reports that
            self.connection.send((function, tuple(arguments)))

    def signal(self, number: int) -> None:
        """Send a signal if the process is alive."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, number)

    def message(
        self,
    ) -> FunctionProgress | FunctionDone | FunctionFailed | FunctionStopped | None:
        """The next message, None if it was a log line. Once the process has ended, it is how."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            message = self.connection.recv()
            if isinstance(message, FunctionLine):
                message.log(self.name)
                return None
            if isinstance(message, FunctionProgress):
                return message
            self._result = message
        return self.end()

    def end(self) -> FunctionDone | FunctionFailed | FunctionStopped:
        """Wait until the process has ended; kill it after `GRACE` seconds."""
        until = time.monotonic() + GRACE
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.connection.poll(max(0.0, until - time.monotonic())):
                if isinstance(message := self.connection.recv(), FunctionLine):
                    message.log(self.name)
            self.signal(signal.SIGKILL)
        code = self._popen.wait()
        self.connection.close()
        with self._errors as file:
            file.seek(0)
            last = "".join(line.strip() for line in file.readlines()[-1:])
        if self._result is not None:
            return self._result
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return FunctionFailed(
            f"its process ended with {how}{': ' if last else ''}{last}"
        )


class Processes:
    """Child processes that end with this context."""

    def __init__(self) -> None:
        self._running: dict[Connection, Process] = {}
        self._before: dict[int, Any] = {}
        self._signals: list[int] = []

    def __enter__(self) -> "Processes":
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._forward) for number in ASKING
            }
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for process in self._running.values():
                process.signal(signal.SIGTERM)
            for process in self._running.values():
                process.end()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

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
            raise StoppedError(
                "; ".join(dict.fromkeys(stopped)) or "all work was done",
                self._signals[0],
            )

    def _ready(
        self, seconds: float | None
    ) -> Iterator[
        tuple[
            Process, FunctionProgress | FunctionDone | FunctionFailed | FunctionStopped
        ]
    ]:
        for connection in wait(list(self._running), seconds):
            assert isinstance(connection, Connection)
            process = self._running[connection]
            if (message := process.message()) is None:
                continue
            if not isinstance(message, FunctionProgress):
                del self._running[connection]
            yield process, message

    def _fail(self, process: Process, failure: FunctionFailed) -> NoReturn:
        """Raise the error of the process that failed first, not of one that failed as a consequence."""
        until = time.monotonic() + AFTER
        while (
            failure.consequence
            and self._running
            and (left := until - time.monotonic()) > 0
        ):
            for other, message in self._ready(left):
                if isinstance(message, FunctionFailed) and not message.consequence:
                    process, failure = other, message
        raise TrainingError(_line(process, failure))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        for process in list(self._running.values()):
            process.signal(signal.SIGKILL if len(self._signals) >= KILLS else number)


def _line(process: Process, message: FunctionFailed | FunctionStopped) -> str:
    return f"{process.name}: {message.line}" if process.name else message.line


def work(number: int) -> NoReturn:
    """The child: run the function that the parent sends, report back; stop if the parent is gone.

    It ends at once, without the teardown of the interpreter, in which gloo's threads may abort the process.
    """
    connection, one_at_a_time = Connection(number), threading.RLock()

    def send(message: FunctionProgress | FunctionLine) -> None:
        try:
            with one_at_a_time:
                connection.send(message)
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)

    def report(done: int, total: int, remark: str = "") -> None:
        send(FunctionProgress(done, total, remark))

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt  # which no library catches as its own error

    message: FunctionDone | FunctionFailed | FunctionStopped
    try:
        for one in ASKING:
            signal.signal(one, stop)
        function, arguments = connection.recv()
        logger = logging.getLogger("vlmdistill")
        logger.addHandler(_Sender(send))
        logger.setLevel(logging.INFO)
        function(*arguments, report)
        message = FunctionDone(time.process_time())
    except (StoppedError, KeyboardInterrupt) as error:
        message = FunctionStopped(one_line(error) or "no work was started")
    except FOR_USER as error:
        message = FunctionFailed(one_line(error), isinstance(error, LostRankError))
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)
    os._exit(0)
