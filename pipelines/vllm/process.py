"""An engine's process: its environment, the job that it is given, and what it says when it fails."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import msgspec

from vlmdistill.pipelines.cluster.environment import engine_python
from vlmdistill.pipelines.vllm.messages import EngineJob, EngineOutcome
from vlmdistill.stores.errors import VlmdistillError

SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # the target and the drafter are folders
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Variables of the process; those that are set already stay."""


class EngineError(VlmdistillError):
    """An engine has failed; `log` is the end of what it wrote."""

    def __init__(self, line: str, log: str = "") -> None:
        super().__init__(line)
        self.log = log


def run(job: EngineJob) -> EngineOutcome:
    """Let vLLM do a job in its own environment; EngineError when it cannot."""
    python = engine_python()
    with tempfile.TemporaryDirectory() as folder:
        job_file, outcome_file, log = (Path(folder) / name for name in ("job.json", "outcome.json", "log"))
        job_file.write_bytes(msgspec.json.encode(job))
        command = [str(python), "-m", "vlmdistill.pipelines.vllm.plugin.job"]
        with log.open("wb") as said:
            status = subprocess.run(
                [*command, str(job_file), str(outcome_file)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=SETTINGS | dict(os.environ),
                cwd=folder,  # vLLM writes where it is started
                check=False,
            ).returncode
        if status:
            raise EngineError(f"vLLM has failed: {reason(log.read_text(errors='replace'), status)}")
        return msgspec.json.decode(outcome_file.read_bytes(), type=EngineOutcome)


def reason(log: str, status: int) -> str:
    """Why a process has failed: the last error in its log, else its last line."""
    errors: list[str] = re.findall(r"\w*Error: .+", log)
    return (errors or log.splitlines() or [f"exit status {status}"])[-1]
