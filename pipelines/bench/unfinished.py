"""An evaluation that was interrupted: what was measured of each prompt, until the evaluation is written.

Each prompt is decoded by all decoders in one process, so its numbers compare, whichever process that was.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmdistill.pipelines.bench.records import (
    Calibration,
    Count,
    Measurement,
    PromptResult,
    ShownResponse,
)
from vlmdistill.pipelines.streaming.pieces import Amount
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import naming
from vlmdistill.stores.input_files import read_bytes
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
    of: Count = 0  # prompts that will be decoded, at all temperatures; 0: not recorded


@dataclass(frozen=True)
class Interim:
    """What an evaluation has measured that is not finished: it is running, or was interrupted."""

    decoded: Mapping[tuple[float, int], Decoded]  # by temperature and number
    written: float  # when the last prompt was, in seconds since 1970

    @property
    def of(self) -> int:
        """The prompts that will be decoded, at all temperatures; 0 if that was not recorded."""
        return max(one.of for one in self.decoded.values())


def measurements(
    decoded: Mapping[tuple[float, int], Decoded],
) -> dict[tuple[str, float], Measurement]:
    """The prompts so far, by decoder and temperature."""
    rows: dict[tuple[str, float], list[Decoded]] = {}
    for (temperature, _), one in sorted(decoded.items(), key=lambda item: item[0]):
        for name in one.results:
            rows.setdefault((name, temperature), []).append(one)
    return {
        (name, temperature): Measurement(
            temperature=temperature,
            prompts=tuple(row.results[name] for row in some),
            shown=tuple(row.shown[name] for row in some if name in row.shown),
        )
        for (name, temperature), some in rows.items()
    }


class Unfinished:
    """The files of an evaluation under way; `conditions` are what must stay the same.

    Each process appends to a file of its own, a line for each prompt: none changes what another wrote, on
    this machine or on another one.
    """

    def __init__(self, reports: Path, conditions: Mapping[str, Any]) -> None:
        self._name = f".{content_hash(msgspec.to_builtins(conditions))}"
        self._files = sorted(reports.glob(f"{self._name}.*unfinished"))
        self._own = reports / f"{self._name}.{secrets.token_hex(8)}.unfinished"

    def read(self) -> dict[tuple[float, int], Decoded]:
        """The prompts done, by temperature and number."""
        return _read(self._files)

    def add(self, decoded: Decoded) -> None:
        """Append a prompt."""
        self._own.parent.mkdir(parents=True, exist_ok=True)
        with naming(self._own), self._own.open("ab") as file:
            file.write(msgspec.json.encode(decoded) + b"\n")

    def remove(self) -> None:
        """The evaluation is written."""
        for file in (*self._files, self._own):
            file.unlink(missing_ok=True)


def strip(reports: Path, wanted: Callable[[Decoded], bool]) -> None:
    """Leave the wanted prompts alone in all files; what was not written to its end goes, too."""
    for file in reports.glob(".*.unfinished"):
        lines = read_bytes(file).splitlines(keepends=True)
        kept = [line for line in lines if (one := _parsed(line)) and wanted(one)]
        if not kept:
            file.unlink()
        elif kept != lines:
            with atomic_write(file) as new:
                new.write_bytes(b"".join(kept))


def interim(reports: Path) -> list[Interim]:
    """The evaluations that are not finished, the latest first."""
    alike: dict[str, list[Path]] = {}
    for file in sorted(reports.glob(".*.unfinished")):
        alike.setdefault(file.name.split(".")[1], []).append(file)
    found = []
    for files in alike.values():
        with suppress(OSError):  # it has ended meanwhile, or is no file
            if decoded := _read(files):
                found.append(
                    Interim(decoded, max(file.stat().st_mtime for file in files))
                )
    return sorted(found, key=lambda one: -one.written)


def _read(files: Sequence[Path]) -> dict[tuple[float, int], Decoded]:
    """The prompts of all files; a line that was not written to its end is dropped."""
    done: dict[tuple[float, int], Decoded] = {}
    for line in (line for file in files for line in read_bytes(file).split(b"\n")):
        if one := _parsed(line):
            done[one.temperature, one.number] = one
    return done


def _parsed(line: bytes) -> Decoded | None:
    """The prompt of a line; None if it is not whole."""
    try:
        return msgspec.json.decode(line, type=Decoded)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
