"""How fast stages ran: `rates.jsonl` of a workspace, a line for each run, on whatever machine it ran.

Rates are kept per machine, not in the shared workspace at a URL.
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
    """The speed of one run of a stage."""

    stage: str  # responses, features, train <method>
    engine: str
    where: str  # the hardware, or the address of the cluster
    tokens: float
    seconds: float
    measured: str = ""
    wanted: float | None = None
    """Processes that wanted a CPU at its end, for each CPU; None: not known."""

    @property
    def shared(self) -> bool:
        """Other programs used the CPUs as well."""
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
    """The latest run of a stage on this hardware, preferably one that had the CPUs to itself; None: no run.

    If other programs used the CPUs in all runs, the log says so.
    """
    latest = _latest(root, stage, engine)
    if latest is not None and latest.shared:
        log.warning(
            "%s: the only rates known are of runs beside other programs (%.0f processes for each CPU)",
            stage,
            latest.wanted,
        )
    return latest


def _wanted() -> float | None:
    """Processes that wanted a CPU in the last minute, for each CPU."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):  # a system that does not tell
        return None


def _latest(root: Path, stage: str, engine: str) -> Rate | None:
    latest = None
    for rate in _read(root):
        if (rate.stage, rate.engine, rate.where) != (stage, engine, here()):
            continue
        if latest is None or latest.shared or not rate.shared:
            latest = rate
    return latest


def _read(root: Path) -> list[Rate]:
    """All rates of a workspace, the oldest first; a line that a killed run has cut off is left out."""
    try:
        lines = read_bytes(root / FILE).splitlines()
    except OSError:
        return []
    rates = list[Rate]()
    for line in lines:
        try:
            rate = msgspec.json.decode(line, type=Rate)
        except (msgspec.DecodeError, RecursionError):
            continue
        if rate.seconds > 0:
            rates.append(rate)
    return rates
