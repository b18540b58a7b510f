"""How fast stages ran: `rates.jsonl` of a workspace, a line for each run, on whatever machine it ran.

It is a record of this copy of the workspace; of a workspace at a URL, each machine has its own.
"""

import logging
import os
from datetime import datetime
from pathlib import Path

import msgspec
import torch

from vlmdistill.drafters.decoding import hardware
from vlmdistill.stores.errors import naming
from vlmdistill.stores.input_files import read_bytes

FILE = "rates.jsonl"
LEAST = 2.0  # seconds; a shorter run says little
SHARED = 1.5  # processes that want a CPU, for each: a run has one for each at most

log = logging.getLogger(__name__)


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a stage did."""

    stage: str  # responses, features, train <method>
    engine: str
    where: str  # the hardware, or the address of the cluster
    tokens: float
    seconds: float
    measured: str = ""
    wanted: float | None = (
        None  # processes that wanted a CPU at its end, for each CPU; None: not told
    )

    @property
    def shared(self) -> bool:
        """Other programs had a part of the CPUs."""
        return self.wanted is not None and self.wanted > SHARED

    @property
    def tokens_per_second(self) -> float:
        """Of all workers together."""
        return self.tokens / self.seconds


def here() -> str:
    """Where stages of this process run."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return os.environ.get("RAY_ADDRESS") or hardware.of(torch.device(kind)).name


def record(
    root: Path, stage: str, tokens: float, seconds: float, engine: str = "transformers"
) -> None:
    """Add a run of a stage to the record of a workspace; one that was too short is left out."""
    if seconds < LEAST or not tokens:
        return
    line = Rate(
        stage=stage,
        engine=engine,
        where=here(),
        tokens=tokens,
        seconds=seconds,
        measured=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        wanted=_wanted(),
    )
    with naming(root / FILE), (root / FILE).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def known(root: Path, stage: str, engine: str = "transformers") -> Rate | None:
    """The latest run of a stage on this hardware, one with the CPUs to itself if there is one; None: none.

    If there is none, the log says so: its rate is that of a shared machine.
    """
    found = _latest(root, stage, engine)
    if found is not None and found.shared:
        log.warning(
            "%s: the only rates known are of runs beside other programs (%.0f processes for each CPU)",
            stage,
            found.wanted,
        )
    return found


def _wanted() -> float | None:
    """The mean of the last minute."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):  # a system that does not tell
        return None


def _latest(root: Path, stage: str, engine: str) -> Rate | None:
    try:
        lines = read_bytes(root / FILE).splitlines()
    except OSError:
        return None
    found = None
    for line in lines:
        try:
            one = msgspec.json.decode(line, type=Rate)
        except (
            msgspec.DecodeError,
            RecursionError,
        ):  # of a run that was killed while it wrote
            continue
        same = (one.stage, one.engine, one.where) == (stage, engine, here())
        if (
            same
            and one.seconds > 0
            and (found is None or found.shared or not one.shared)
        ):
            found = one
    return found
