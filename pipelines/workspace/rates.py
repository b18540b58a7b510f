"""How fast stages ran: `rates.jsonl` of a workspace, a line for each run, on whatever machine it ran.

It is a record of this copy of the workspace; of a workspace at a URL, each machine has its own.
"""

import os
from datetime import datetime
from pathlib import Path

import msgspec
import torch

from vlmdistill.drafters.decoding import hardware
from vlmdistill.stores.errors import naming
from vlmdistill.stores.records import read_bytes

FILE = "rates.jsonl"
LEAST = 2.0  # seconds; a shorter run says little


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a stage did."""

    stage: str  # responses, features, train <method>
    engine: str
    where: str  # the hardware, or the address of the cluster
    tokens: float
    seconds: float
    measured: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of all workers together."""
        return self.tokens / self.seconds


def here() -> str:
    """Where stages of this process run."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return os.environ.get("RAY_ADDRESS") or hardware.of(torch.device(kind)).name


def record(root: Path, stage: str, tokens: float, seconds: float, engine: str = "transformers") -> None:
    """Add a run of a stage to the record of a workspace; one that was too short is left out."""
    if seconds < LEAST or not tokens:
        return
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    line = Rate(stage=stage, engine=engine, where=here(), tokens=tokens, seconds=seconds, measured=now)
    with naming(root / FILE), (root / FILE).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def known(root: Path, stage: str, engine: str = "transformers") -> Rate | None:
    """The latest run of a stage on this hardware; None if there was none."""
    try:
        lines = read_bytes(root / FILE).splitlines()
    except OSError:
        return None
    found = None
    for line in lines:
        try:
            one = msgspec.json.decode(line, type=Rate)
        except (msgspec.DecodeError, RecursionError):  # of a run that was killed while it wrote
            continue
        if (one.stage, one.engine, one.where) == (stage, engine, here()) and one.seconds > 0:
            found = one
    return found
