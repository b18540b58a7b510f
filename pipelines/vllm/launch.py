"""Processes of vLLM in the engine environment: started, waited for, always ended; and why one has died."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.pipelines.cluster.engine_environment import engine_python
from vlmdistill.pipelines.cluster.session import terminable
from vlmdistill.pipelines.targets.checkpoints.template import thinking_arguments
from vlmdistill.stores.errors import VlmdistillError

SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # targets and drafters are folders
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Variables of a process; the environment of this process takes precedence."""
PATIENCE = 900.0  # seconds until a server is healthy
STOPPING = 30.0  # seconds for a process to end
SHARE = 0.45  # of a GPU's memory: two servers fit
TAIL = 20  # lines of a log that are shown
OPENMP = "lib/libiomp5.so"
"""Intel's OpenMP in an environment: vLLM's CPU kernels are made for it, drafting above all."""
NO_CAUSE = (
    "Engine core initialization failed"  # vLLM's last line: the cause is above it
)
NO_PLUGIN = "Vlmdistill'] are not supported"
CHILD = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Starts a command that Linux sends SIGTERM (15) when we are killed (PR_SET_PDEATHSIG, 1)."""


class EngineError(VlmdistillError):
    """vLLM has failed; `log` is the end of what it wrote."""

    def __init__(self, line: str, log: str = "") -> None:
        super().__init__(line)
        self.log = log


def start(
    python: Path,
    arguments: Sequence[str | Path],
    log: IO[bytes],
    *,
    settings: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a Python, which ends when this process does, with its output in `log`.

    `settings` are variables that the environment of this process does not change.
    """
    environment = SETTINGS | preloaded(python) | dict(os.environ) | dict(settings or {})
    return subprocess.Popen(
        [python, "-c", CHILD, python, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C reaches us only
    )


def preloaded(python: Path) -> dict[str, str]:
    """The library that vLLM on a CPU wants to be loaded first, if its environment has it."""
    library = python.parents[1] / OPENMP
    if torch.cuda.is_available() or not library.exists():
        return {}
    return {"LD_PRELOAD": str(library)}


def end(run: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    try:
        run.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.wait(STOPPING)
    finally:
        with suppress(ProcessLookupError):  # all of its group have ended
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def reason(log: str, status: int) -> str:
    """Why a process has ended: a signal, the last error in its log that names a cause, or its last line."""
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    if NO_PLUGIN in log:
        return (
            "it has no plugin vlmdistill: install vlmdistill in its environment, and "
            "leave VLLM_PLUGINS unset"
        )
    errors: list[str] = re.findall(r"\w*Error: .+", log)
    causes = [line for line in errors if NO_CAUSE not in line]
    lines = causes or errors or log.strip().splitlines()
    return lines[-1] if lines else f"exit status {status}"


@contextmanager
def vllm_server(
    target: Path,
    name: str,
    dtype: str,
    log: Path,
    drafter: Exported | None = None,
    *,
    whole_images: bool,
    arguments: Sequence[str] = (),
) -> Iterator[str]:
    """The URL of a server of `target` under `name`, with a drafter if one is given; its output goes to `log`.

    It has no caches of prompts or media, and leaves room for a second one on a GPU. `whole_images`: all
    visual tokens of an image in one step; `arguments`: further ones of `vllm serve`. Inside the block SIGTERM
    raises SystemExit, so that the server ends.
    EngineError, with the end of the log, when it ends or is not healthy in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    python = engine_python()
    command = serve_command(
        str(target.absolute()),
        dtype,
        drafter,
        program=vllm(python),
        whole_images=whole_images,
    )
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", name, "--mm-processor-cache-gb", "0"]
    command += ["--gpu-memory-utilization", str(SHARE), *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with terminable():
        with log.open("wb") as output:
            # vLLM writes files into the folder where it is started.
            run = start(python, command, output, cwd=log.parent)
        try:
            _wait(run, url, log)
            yield url
        finally:
            end(run)


def vllm(python: Path) -> str:
    """The command `vllm` of an engine environment."""
    return str(python.with_name("vllm"))


def serve_command(
    target: str,
    dtype: str,
    drafter: Exported | None = None,
    *,
    program: str = "vllm",
    caching: bool = False,
    whole_images: bool = False,
) -> list[str]:
    """`vllm serve` for this machine; `caching`: of prompts.

    The target reasons as in the drafter's training (by default where that was mixed), unless a request says
    otherwise.
    Requests that set no sampling get vLLM's own: a checkpoint's `top_k` or `repetition_penalty` would give
    other responses, at temperature 0 too, than those that a drafter was trained on and evaluated with.
    """
    command = [program, "serve", target, "--dtype", dtype]
    command += ["--generation-config", "vllm"]
    if not caching:
        command.append("--no-enable-prefix-caching")
    if not torch.cuda.is_available():
        command.append("--enforce-eager")
    if whole_images:
        command.append("--disable-chunked-mm-input")
    if drafter:
        drafting = {
            "method": drafter.method,
            "model": str(Path(drafter.out).absolute()),
            "num_speculative_tokens": drafter.draft_tokens,
        }
        command += ["--speculative-config", json.dumps(drafting)]
        command += thinking_arguments(drafter.thinking)
    return command


def _wait(run: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Return when a server is healthy."""
    import httpx2  # of the extra `eval`; a capture starts an engine without it

    deadline = time.monotonic() + PATIENCE
    while run.poll() is None and time.monotonic() < deadline:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    text = log.read_text(errors="replace")
    tail = "\n".join(text.splitlines()[-TAIL:])
    if run.returncode is None:
        raise EngineError(
            f"vLLM is not healthy after {PATIENCE:g} seconds: see {log}", tail
        )
    raise EngineError(
        f"vLLM has failed: {reason(text, run.returncode)}: see {log}", tail
    )
