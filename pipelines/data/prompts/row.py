"""A row of a source, as it is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.media.resolver import BadRowError

FILES = (
    ".json",
    ".jsonl",
    ".parquet",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".zip",
    ".tar",
    ".csv",
    ".tsv",
    ".txt",
)
"""Endings of files, in any number after each other."""
MOST_BYTES = 2**30  # of a row and its media, which memory holds


@dataclass(frozen=True)
class Row:
    """One row of a source, or its problem. `number` and `line` count from 1."""

    source: str
    dataset: str
    number: int
    value: Any
    line: int | None = None
    problem: BadRowError | None = None
    file: str = ""  # in the folder that is the source

    @property
    def folders(self) -> list[Path]:
        """The folders to which paths in the row may be relative: of its file, then of its source."""
        path, _ = located(self.source)
        folder = path if path.is_dir() else path.parent
        return [Path(self.file).parent, folder] if self.file else [folder]

    def __str__(self) -> str:
        """A description of the row, for messages."""
        if self.problem:
            where = f"line {self.line}" if self.line else f"row {self.number}"
            return f"{where} is {self.problem}"
        if isinstance(self.value, Mapping):
            columns = ", ".join(map(str, self.value)) or "(none)"
            return f"row {self.number} has the columns {columns}"
        return f"row {self.number} is a {type(self.value).__name__}, not an object"


def has_content(value: Any) -> bool:
    """Whether a value is something: not null, NaN, blank, or a list or an object of such values alone."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(has_content, value))
    return value not in (None, b"") and value == value


def located(source: str) -> tuple[Path, str]:
    """The path of a source, and the split that follows it in `FOLDER@SPLIT`, or an empty string."""
    path = Path(source).expanduser()
    folder, _, split = source.rpartition("@")
    if folder and split and not path.exists() and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser(), split
    return path, ""


def dataset_name(path: Path) -> str:
    """The name of a file without the endings of its format."""
    name = path.name
    while (ending := Path(name).suffix.lower()) in FILES:
        name = name[: -len(ending)]
    return name or path.name
