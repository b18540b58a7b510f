"""Rows of JSON text, read as a stream: JSON lines, one array, or one object over several lines.

Memory holds one row: a file may be larger than memory, and what a compressed one unpacks to, too.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vlmdistill.pipelines.media.images import kind_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.json_text import MOST_DEPTH, KeyCheckingDecoder

MOST_ROW = 2**26  # bytes, with images in base64; 2**26 brackets take 2 GB of memory
MOST_SKIPPED = 2**30  # bytes of a longer line that are read to find the next one
AT_ONCE = 2**20  # bytes that are read of an array
BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class TextRow:
    """A row of a text file, or its problem. Rows and lines count from 1."""

    number: int
    value: Any
    line: int
    problem: BadRowError | None = None


def rows_of(file: IO[bytes], path: Path) -> Iterator[TextRow]:
    """The rows of an open file, which can be read twice; DataError if it is no JSON text.

    A row that is longer than MOST_ROW has a problem.
    """
    first = _first_character(file)
    if first == b"[":
        yield from _Array(file, path).items()
        return
    whole = _object(file) if first == b"{" else None
    if whole is not None:
        value, problem = whole
        yield TextRow(1, value, 1, problem)
        return
    file.seek(0)
    yield from _lines(file, path, is_json=first == b"{")


def loads(text: str) -> Any:
    """The value of JSON text.

    ValueError or RecursionError if it is none; BadRowError if it is nested deeply, or an object in it has a
    key with two values.
    """
    value, problem = _decoded(KeyCheckingDecoder(), text)
    if problem:
        raise problem
    return value


def parse(text: str) -> tuple[Any, BadRowError | None]:
    """The value of JSON text, or what is wrong with it."""
    try:
        return _decoded(KeyCheckingDecoder(), text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at column {error.colno}: {text[:40].strip()!r}"
    except (ValueError, RecursionError) as error:
        # A number of too many digits, or nested too deeply.
        where = one_line(error)
    return None, BadRowError("invalid JSON", where)


def _decoded(decoder: KeyCheckingDecoder, text: str) -> tuple[Any, BadRowError | None]:
    return decoder.decode(text), _problem(decoder)


def _problem(decoder: KeyCheckingDecoder) -> BadRowError | None:
    """What is wrong with what a decoder has read since the last call."""
    key, was_deep = decoder.repeated_key(), decoder.was_deep()
    if was_deep:
        return BadRowError("invalid JSON", f"nested more than {MOST_DEPTH} deep")
    if key is None:
        return None
    return BadRowError("a key twice", f"'{key}' has two values")


def _first_character(file: IO[bytes]) -> bytes:
    """The first byte that is no space, and the file at its beginning again."""
    head = file.read(AT_ONCE).removeprefix(codecs.BOM_UTF8).lstrip()
    while not head and (more := file.read(AT_ONCE)):
        head = more.lstrip()
    file.seek(0)
    return head[:1]


def _object(file: IO[bytes]) -> tuple[Mapping[str, Any], BadRowError | None] | None:
    """The object that a whole file is, and its problem; None if its first line is one by itself."""
    line_1 = file.readline(MOST_ROW + 1)
    try:
        if len(line_1) > MOST_ROW or parse(line_1.decode("utf-8-sig"))[1] is None:
            return None
        content = line_1 + file.read(MOST_ROW - len(line_1) + 1)
        if len(content) > MOST_ROW:
            return None
        whole, problem = parse(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None
    return (whole, problem) if isinstance(whole, Mapping) else None


def _lines(file: IO[bytes], path: Path, is_json: bool) -> Iterator[TextRow]:
    """JSON lines, of which some may be damaged. Rows are numbered by their line."""
    number, start = 0, 0
    while line := file.readline(MOST_ROW + 1):
        number += 1
        if len(line) > MOST_ROW and not line.endswith(b"\n"):
            start += len(line) + _skip_line(file, path, number)
            too_long = BadRowError("line too long", f"more than {MOST_ROW} bytes")
            yield TextRow(number, None, number, too_long)
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            if not is_json:
                raise _no_text(path, error.reason, start + error.start) from None
            yield TextRow(number, None, number, BadRowError("text is not Unicode"))
        else:
            if text.strip():
                value, problem = parse(text)
                yield TextRow(number, value, number, problem)
        start += len(line)


def _skip_line(file: IO[bytes], path: Path, number: int) -> int:
    """Read to the end of a line; how many bytes that were. DataError if it takes too long."""
    skipped = 0
    while part := file.readline(AT_ONCE):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
        if skipped > MOST_SKIPPED:
            raise DataError(
                f"{path} is no JSON lines: line {number} has more than {MOST_SKIPPED} bytes"
            )
    return skipped


def _no_text(path: Path, reason: str, at: int) -> DataError:
    if kind_of(path.name):
        return DataError(
            f"{path} is an image or a video: give its folder, or a file of rows that name it"
        )
    return DataError(
        f"{path} is neither UTF-8 text nor Parquet ({reason} at byte {at})"
    )


@dataclass
class _Array:
    """A JSON array, of which memory holds the text of one item."""

    file: IO[bytes]
    path: Path
    _text: str = ""  # what is read and not yet passed
    _at: int = 0  # of it, where the next item begins
    _line: int = 1  # of the file, on which the character at `_counted` is
    _counted: int = 0
    _bytes: int = 0  # that were read
    _ended: bool = False  # the file is read
    _decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8-sig")()
    )
    _json: KeyCheckingDecoder = field(default_factory=KeyCheckingDecoder)

    def items(self) -> Iterator[TextRow]:
        """The items, with the line on which each begins."""
        number = 0
        try:
            self._next_character()
            self._at += 1  # the bracket
            while self._next_character() != "]":
                number += 1
                line = self._line_at(self._at)
                value = self._item()
                yield TextRow(number, value, line, _problem(self._json))
                if self._next_character() == ",":
                    self._at += 1
            self._at += 1
            if self._next_character():
                raise json.JSONDecodeError(
                    "Text after the end of the array", self._text, self._at
                )
        except json.JSONDecodeError as error:
            raise self._invalid(
                f"{error.msg} at line {self._line_at(error.pos)}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise self._invalid(
                f"{one_line(error)} at line {self._line_at(self._at)}"
            ) from None

    def _item(self) -> Any:
        """The item at this place: it ends before a comma or bracket, since `12` may go on as `123`."""
        while True:
            _problem(self._json)  # of an item whose text was not complete
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                end = _past_blanks(self._text, end)
                if self._text[end : end + 1] in (",", "]") and end < len(self._text):
                    self._at = end
                    return value
                raise json.JSONDecodeError("Expecting ',' or ']'", self._text, end)
            except json.JSONDecodeError:
                if not self._more():
                    raise

    def _next_character(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            self._at = _past_blanks(self._text, self._at)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _more(self) -> bool:
        """Read on, as much again as there is of an unfinished item; whether there was more."""
        if self._ended:
            return False
        self._line_at(self._at)
        self._text, self._at, self._counted = self._text[self._at :], 0, 0
        if len(self._text) > MOST_ROW:
            raise ValueError(f"an item has more than {MOST_ROW} characters")
        content = self.file.read(max(AT_ONCE, len(self._text)))
        self._ended = not content
        waiting = len(self._decode.getstate()[0])  # the first bytes of a character
        try:
            self._text += self._decode.decode(content, final=self._ended)
        except UnicodeDecodeError as error:
            raise _no_text(
                self.path, error.reason, self._bytes - waiting + error.start
            ) from None
        self._bytes += len(content)
        return not self._ended

    def _line_at(self, at: int) -> int:
        """The line of a character, which is none before those that were asked for."""
        self._line += self._text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def _invalid(self, why: str) -> DataError:
        return DataError(f"{self.path} is not valid JSON: {why}")


def _past_blanks(text: str, at: int) -> int:
    match = BLANK.match(text, at)
    return match.end() if match else at
