"""An evaluation that was interrupted: what was measured of each prompt, until the evaluation is written.

Each prompt is decoded by all decoders in one process, so its numbers compare, whichever process that was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmdistill.pipelines.bench.records import Calibration, Count, PromptResult, ShownResponse
from vlmdistill.pipelines.data.responses.pieces import Amount
from vlmdistill.stores.schema import content_hash


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One prompt at one temperature, by decoder."""

    number: Count
    temperature: Amount
    threads: Count
    results: Mapping[str, PromptResult]
    shown: Mapping[str, ShownResponse]
    calibration: Calibration | None = None  # right before, if a process began here


class Unfinished:
    """The file of an evaluation under way, a line for each prompt; `conditions`: what must stay the same."""

    def __init__(self, reports: Path, conditions: Mapping[str, Any]) -> None:
        self._path = reports / f".{content_hash(msgspec.to_builtins(conditions))}.unfinished"

    def read(self) -> dict[tuple[float, int], Decoded]:
        """The prompts done, by temperature and number; a line that was not written to its end is dropped."""
        done: dict[tuple[float, int], Decoded] = {}
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        whole = 0
        for line in lines:
            try:
                one = msgspec.json.decode(line, type=Decoded)
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            done[one.temperature, one.number] = one
        if lines:
            with self._path.open("r+b") as file:
                file.truncate(whole)
        return done

    def add(self, decoded: Decoded) -> None:
        """Append a prompt."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(decoded) + b"\n")

    def remove(self) -> None:
        """The evaluation is written."""
        self._path.unlink(missing_ok=True)
