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
class About:
    """The run, as trackers show it."""

    name: str
    target: str
    settings: Mapping[str, Any]
    signature: str
    folder: Path
    done: int  # steps of an earlier process


class Tracker(Protocol):
    """Where figures are sent."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures of a step by name."""

    def close(self) -> None:
        """Write out what is not yet."""


def opened(name: str, about: About) -> Tracker:
    """Begin or continue the record of a run; TrainingError when the package is missing or refuses."""
    try:
        module = importlib.import_module(MODULES[name])
    except ImportError as error:
        raise TrainingError(
            f"--tracker {name} needs a package that is missing ({one_line(error)}): pip install "
            f'"vlmdistill[{name}]", or leave it out: metrics.jsonl has the same figures'
        ) from None
    try:
        return (
            _Board(module, about)
            if name == "tensorboard"
            else _Runs(name, module, about)
        )
    except Exception as error:  # noqa: BLE001 (whatever it raises without a network or an account)
        raise TrainingError(
            f"--tracker {name} cannot begin ({one_line(error)}): leave it out"
        ) from None


class _Board:
    def __init__(self, module: Any, about: About) -> None:
        folder = str(about.folder / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=about.done + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Runs:
    def __init__(self, name: str, module: Any, about: About) -> None:
        # Runs of other targets, or of a name with other settings, are others; one that starts over is new.
        label = re.sub(
            r"[^\w.-]", "-", f"{about.target}-{about.name}-{about.signature}"
        )[-128:]
        own = {"id": label, "dir": str(about.folder)} if name == "wandb" else {}
        own |= {"resume": "allow"} if about.done else {}
        about.folder.mkdir(parents=True, exist_ok=True)
        self._module = module
        with redirect_stdout(sys.stderr):
            self._run = module.init(
                project=PROJECT,
                name=label,
                group=about.target,
                config=dict(about.settings),
                **own,
            )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        with redirect_stdout(sys.stderr):
            self._run.log(dict(figures), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._module.finish()  # of its run alone, trackio would repeat it at exit
