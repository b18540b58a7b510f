"""Rows of tables in text, CSV and TSV, read as a stream."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vlmdistill.pipelines.data.prompts.json_rows import MOST_ROW, TextRow
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError

TAB = "\t"
SEPARATORS = {".csv": (",", ";", TAB), ".tsv": (TAB,)}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def separators_of(name: str) -> tuple[str, ...]:
    """What may separate the values of a table, by the name of its file; empty for other files."""
    endings = [end for end in Path(name.lower()).suffixes if end not in COMPRESSED]
    return SEPARATORS.get(endings[-1], ()) if endings else ()


def table_rows(
    file: IO[bytes], separators: tuple[str, ...], path: Path
) -> Iterator[TextRow]:
    """The rows of an open table. Values stay as they are: `None`, `NA` and `007` may be answers.

    The first of the separators that its first line has separates all values: a CSV file may have semicolons.
    DataError if it is no table, or has two columns of one name.
    """
    csv.field_size_limit(MOST_ROW)  # images in base64
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    lines = _TableLines(text, path)
    separator = _first_in(lines.peek(), separators)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    number = 0
    try:
        names = next(reader, [])
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise DataError(f"{path} has two columns {repeated[0]!r}: rename one")
        lines.take()
        for values in reader:
            record = lines.take()
            if not values:
                continue
            number += 1
            problem = _count_problem(values, names)
            if separator == TAB and problem is None:
                problem = _quote_problem(record, names)
            row = dict(zip(names, values, strict=False))
            yield TextRow(number, row, reader.line_num, problem)
    except csv.Error as error:
        raise DataError(
            f"{path} is no table: {error} at line {reader.line_num}"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} after line {reader.line_num}"
        ) from None
    finally:
        text.detach()  # the file is closed by who opened it


class _TableLines:
    """The lines of a table, of which a row may have several. DataError if a row is too long for memory."""

    def __init__(self, text: io.TextIOWrapper, path: Path) -> None:
        self._text = text
        self._path = path
        self._peeked: str | None = None
        self._record: list[str] = []
        self._size = 0

    def peek(self) -> str:
        """The first line, which is read again."""
        try:
            self._peeked = self._text.readline(MOST_ROW + 1)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 text: {error.reason}") from None
        return self._peeked

    def take(self) -> list[str]:
        """The lines that were read since the last call."""
        record = self._record
        self._record = []
        self._size = 0
        return record

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line, self._peeked = self._peeked, None
        if line is None:
            line = self._text.readline(MOST_ROW + 1)
        if not line:
            raise StopIteration
        self._size += len(line)
        if self._size > MOST_ROW:
            raise DataError(
                f"{self._path} has a row of more than {MOST_ROW} characters"
            )
        self._record.append(line)
        return line


def _first_in(line: str, separators: tuple[str, ...]) -> str:
    present = [separator for separator in separators if separator in line]
    return (present or separators)[0]


def _count_problem(values: list[str], names: list[str]) -> BadRowError | None:
    if len(values) == len(names):
        return None
    which = "too many values" if len(values) > len(names) else "too few values"
    return BadRowError(which, f"{len(values)}, for {len(names)} columns")


def _quote_problem(record: list[str], names: list[str]) -> BadRowError | None:
    """The problem of a row that is several where quotes are ordinary letters, as in some TSV files."""
    if len(record) < 2:
        return None
    if any(line.count(TAB) != len(names) - 1 for line in record):
        return None
    detail = f"a row of {len(record)} lines may be {len(record)} rows: write it as JSON"
    return BadRowError("quotes in a TSV file", detail)
