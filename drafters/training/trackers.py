"""Experiment trackers: packages that are sent the figures of a run besides `metrics.jsonl`.

trackio and wandb have the same three calls; both print, and stdout belongs to results.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vlmdistill.stores.errors import TrainingError, one_line

PROJECT = "vlmdistill"
MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Name of a tracker and of its extra -> its module."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run, as trackers show it."""

    name: str
    target: str
    settings: Mapping[str, Any]
    signature: str
    folder: Path
    done: int  # steps of an earlier process


class Tracker(Protocol):
    """A package that records figures."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures of a step by name."""

    def close(self) -> None:
        """Write out all figures."""


def open_tracker(name: str, facts: RunFacts) -> Tracker:
    """Begin or continue the record of a run; TrainingError when the package is missing or refuses."""
    try:
        module = importlib.import_module(MODULES[name])
    except ImportError as error:
        raise TrainingError(
            f"--tracker {name} needs a package that is missing ({one_line(error)}): pip install "
            f'"vlmdistill[{name}]", or leave it out: metrics.jsonl has the same figures'
        ) from None
    try:
        if name == "tensorboard":
            return _TensorBoard(module, facts)
        return _OnlineRun(name, module, facts)
    except Exception as error:  # noqa: BLE001 (whatever it raises without a network or an account)
        raise TrainingError(
            f"--tracker {name} cannot begin ({one_line(error)}): leave it out"
        ) from None


class _TensorBoard:
    def __init__(self, module: Any, facts: RunFacts) -> None:
        folder = str(facts.folder / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=facts.done + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _OnlineRun:
    """A run of trackio or wandb."""

    def __init__(self, name: str, module: Any, facts: RunFacts) -> None:
        # Runs of other targets or settings get a record of their own, and so does a run that starts over.
        label = f"{facts.target}-{facts.name}-{facts.signature}"
        label = re.sub(r"[^\w.-]", "-", label)[-128:]
        options: dict[str, Any] = {}
        if name == "wandb":
            options = {"id": label, "dir": str(facts.folder)}
        if facts.done:
            options["resume"] = "allow"
        facts.folder.mkdir(parents=True, exist_ok=True)
        self._module = module
        with redirect_stdout(sys.stderr):
            self._run = module.init(
                project=PROJECT,
                name=label,
                group=facts.target,
                config=dict(facts.settings),
                **options,
            )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        with redirect_stdout(sys.stderr):
            self._run.log(dict(figures), step=step)

    def close(self) -> None:
        # Of the module, not of the run alone: trackio would repeat that at exit.
        with redirect_stdout(sys.stderr):
            self._module.finish()
