"""The engine's process as we see it: start it, submit sequences, receive their states, end it."""

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from vlmdistill.pipelines.cluster.engine_environment import engine_python
from vlmdistill.pipelines.vllm import launch
from vlmdistill.pipelines.vllm.capture.wire import (
    PROTOCOL,
    Channel,
    Chosen,
    Failed,
    Finished,
    Message,
    Ready,
    RunAll,
    Start,
    States,
    Submit,
    Tensors,
)
from vlmdistill.stores.errors import TargetError

SERVER = "vlmdistill.pipelines.vllm.capture.server"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the one process that we start and end
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # on GPUs too: what is tested
    "VLLM_PLUGINS": "",
}

Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True)
class Captured:
    """The result of the engine for one sequence."""

    key: str
    ids_L: Tensor  # int32, as they were run
    states: dict[int, Tensor]  # by layer, [rows, D]: the requested rows


class EngineProcess:
    """One process in the engine environment, with one loaded target. TargetError when it fails or ends."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        layers: tuple[int, ...],
        batch_tokens: int,
        tensor_parallel: int,
    ) -> None:
        python = engine_python()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._states: Channel | None = None
        own_end, engine_end = socket.socketpair()
        self._control = Channel(own_end)
        with engine_end:
            self._process = launch.start(
                python,
                ["-m", SERVER, str(engine_end.fileno())],
                self._log,
                settings=SETTINGS,
                pass_fds=[engine_end.fileno()],
            )
        try:
            # Nothing is left of the folder once the engine is connected.
            with (
                self._failing(),
                tempfile.TemporaryDirectory(prefix="vlmdistill-") as private,
                socket.socket(socket.AF_UNIX) as listener,
            ):
                path = f"{private}/states"
                listener.bind(path)
                listener.listen()
                start = Start(
                    folder=str(folder),
                    dtype=dtype,
                    layers=layers,
                    batch_tokens=batch_tokens,
                    tensor_parallel=tensor_parallel,
                    states=path,
                )
                self._control.send(start)
                ready = self._answer(Ready)
                if ready.protocol != PROTOCOL:
                    raise TargetError(
                        "the engine environment has another vlmdistill: run `make engine`"
                    )
                if layers:
                    self._states = Channel(listener.accept()[0])
        except BaseException:
            self.close()
            raise
        self.version, self.max_length = ready.version, ready.max_length

    def submit(self, sequence: Submit, tensors: Tensors) -> None:
        """Hand over a sequence with its positions and the visual inputs of its prompt."""
        with self._failing():
            self._control.send(sequence, tensors)

    def run(self) -> None:
        """Start to run all that was submitted."""
        with self._failing():
            self._control.send(RunAll())

    def states(self, sequences: int) -> Iterator[Captured]:
        """The states of each sequence of this run as it is done, in any order."""
        assert self._states is not None
        with self._failing():
            for _ in range(sequences):
                message, tensors = self._states.receive()
                assert isinstance(message, States)
                ids_L = tensors.pop("ids")
                states = {int(layer): rows for layer, rows in tensors.items()}
                yield Captured(message.key, ids_L, states)

    def chosen(self) -> dict[str, Chosen]:
        """The tokens after each sequence of this run, by key."""
        with self._failing():
            return self._answer(Finished).chosen

    def close(self) -> None:
        """End the process."""
        for channel in (self._control, self._states):
            if channel is not None:
                channel.close()
        launch.end(self._process)
        self._log.close()

    def _answer(self, kind: type[Kind]) -> Kind:
        message, _ = self._control.receive()
        if isinstance(message, Failed):
            raise TargetError(f"vLLM cannot run this target: {message.why}")
        assert isinstance(message, kind)
        return message

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """When the engine is gone, say why."""
        try:
            yield
        except (EOFError, OSError) as error:
            with contextlib.suppress(EOFError, OSError):
                self._answer(Failed)
            raise TargetError(f"vLLM has ended: {self._reason()}") from error

    def _reason(self) -> str:
        """Why the process ended."""
        status = self._process.wait()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        reason = launch.reason(log, status)
        return f"{reason}; run the same command to go on" if status < 0 else reason
