"""The files of evaluations under way: each prompt as soon as it is decoded.

Each prompt is decoded by all decoders in one process, so its numbers compare, whichever process that was.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
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

FILES = ".*.unfinished"
NAME = re.compile(r"\.[0-9a-f]+\.[0-9a-f]+\.unfinished")


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One prompt at one temperature, by decoder."""

    number: Count
    temperature: Amount
    threads: Count
    trees: Mapping[str, str]
    results: Mapping[str, PromptResult]
    shown: Mapping[str, ShownResponse]
    calibration: Calibration | None = None  # right before, if a process began here
    of: Count = 0  # prompts that will be decoded, at all temperatures

    @property
    def place(self) -> tuple[float, int]:
        """Its temperature and number, which no other prompt of an evaluation has."""
        return self.temperature, self.number


@dataclass(frozen=True)
class Interim:
    """What an unfinished evaluation has measured: it is running, or was interrupted."""

    decoded: Mapping[tuple[float, int], Decoded]  # by temperature and number
    written: float  # when the last prompt was, in seconds since 1970

    @property
    def of(self) -> int:
        """The prompts that will be decoded, at all temperatures."""
        return max(prompt.of for prompt in self.decoded.values())


def measurements(
    decoded: Mapping[tuple[float, int], Decoded],
) -> dict[tuple[str, float], Measurement]:
    """The prompts so far, by decoder and temperature."""
    grouped: dict[tuple[str, float], list[Decoded]] = {}
    for (temperature, _), prompt in sorted(decoded.items(), key=lambda item: item[0]):
        for name in prompt.results:
            grouped.setdefault((name, temperature), []).append(prompt)
    return {
        (name, temperature): _measurement(name, temperature, prompts)
        for (name, temperature), prompts in grouped.items()
    }


def _measurement(
    name: str, temperature: float, decoded: Sequence[Decoded]
) -> Measurement:
    results = [prompt.results[name] for prompt in decoded]
    shown = [prompt.shown[name] for prompt in decoded if name in prompt.shown]
    return Measurement(
        temperature=temperature, prompts=tuple(results), shown=tuple(shown)
    )


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
        line = msgspec.json.encode(decoded) + b"\n"
        with naming(self._own), self._own.open("ab") as file:
            file.write(line)

    def remove(self) -> None:
        """Remove the files: the evaluation is written."""
        for file in (*self._files, self._own):
            file.unlink(missing_ok=True)


def strip(files: Iterable[Path], wanted: Callable[[Decoded], bool]) -> None:
    """Keep only the wanted prompts in files; lines that are cut off are dropped, too."""
    for file in files:
        lines = read_bytes(file).splitlines(keepends=True)
        kept_lines = []
        for line in lines:
            decoded = _parsed(line)
            if decoded and wanted(decoded):
                kept_lines.append(line)
        if not kept_lines:
            file.unlink()
        elif kept_lines != lines:
            with atomic_write(file) as aside:
                aside.write_bytes(b"".join(kept_lines))


def interim(reports: Path) -> list[Interim]:
    """The evaluations that are not finished, the latest first."""
    files_of: dict[str, list[Path]] = {}
    for file in sorted(reports.glob(FILES)):
        evaluation = file.name.split(".")[1]
        files_of.setdefault(evaluation, []).append(file)
    interims = []
    for files in files_of.values():
        with suppress(OSError):  # it has ended meanwhile, or is no file
            decoded = _read(files)
            written = max(file.stat().st_mtime for file in files)
            if decoded:
                interims.append(Interim(decoded, written))
    return sorted(interims, key=lambda one: -one.written)


def _read(files: Sequence[Path]) -> dict[tuple[float, int], Decoded]:
    """The prompts of all files; a line that is cut off is dropped."""
    prompts: dict[tuple[float, int], Decoded] = {}
    for file in files:
        for line in read_bytes(file).split(b"\n"):
            if decoded := _parsed(line):
                prompts[decoded.place] = decoded
    return prompts


def _parsed(line: bytes) -> Decoded | None:
    """The prompt of a line; None if it is not whole."""
    try:
        return msgspec.json.decode(line, type=Decoded)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
