"""Logs of requests and responses as exchanges: OpenAI-style JSON lines, batch files, folders and URLs.

A line has a request and its response, under the names of `REQUEST` and `RESPONSE`, maybe with the headers and
the status of HTTP around each. A line of a batch's output has its request in the batch's input.
`docs/traffic.md` shows lines. A line that cannot be used has a problem; a file that cannot be read raises
DataError.
"""

import errno
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from vlmdistill.pipelines.data.prompts import sources
from vlmdistill.pipelines.data.prompts.formats import ASKING
from vlmdistill.pipelines.data.prompts.json_rows import loads
from vlmdistill.pipelines.data.prompts.sources import Row
from vlmdistill.pipelines.media.images import MediaError
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.media.urls import copy_of, fetch, is_url
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import FOR_USER, DataError, StoreError, naming, one_line
from vlmdistill.stores.input_files import read_bytes

REQUEST = ("request", "request_body", "body", "kwargs")
RESPONSE = ("response", "response_body", "completion")
BODY = ("user", "model")  # what a policy may name of the request itself
HEADERS = (
    "headers",
    "extra_headers",
)  # of a request; the second one by clients that log
PLAIN = (str, int, float, NoneType)  # of what a policy meets
SPELLED = (*BODY, *HEADERS, "request_headers", "header_names")
TIME = ("time", "timestamp", "request_time", "created_at", "created")
FILES = (".jsonl", ".json", ".ndjson", ".gz", ".bz2", ".xz", ".parquet", ".log")
MILLISECONDS = 1e11  # a time above this is not in seconds
EARLIEST = 1e9  # in seconds: 2001
MOST_SHOWN = 3  # unread files in a line


@dataclass(frozen=True)
class Exchange:
    """One request and the response to it, as they were logged."""

    row: Row  # where it stands
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    headers: (
        Mapping[str, Sequence[str]] | None
    )  # of the request, names in lower case; None: not logged
    time: float | None  # in seconds since 1970
    header_names: Collection[str] | None = (
        None  # the headers that would be logged; None: all
    )

    @property
    def messages(self) -> Any:
        """The conversation that was sent; what is not a list is a problem of the row."""
        asked = self.request.get("messages", self.request.get("input"))
        if isinstance(asked, list) and isinstance(
            system := self.request.get("instructions"), str
        ):
            return [{"role": "system", "content": system}, *asked]
        return asked

    @property
    def choice(self) -> Mapping[str, Any]:
        """The first response; BadRowError if there is none."""
        choices = self.response.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            return choices[0]
        if isinstance(
            output := self.response.get("output"), list
        ):  # of the responses API
            said = [
                one
                for one in output
                if isinstance(one, Mapping) and one.get("type") == "message"
            ]
            if len(said) == 1 and len(output) == 1:
                done = self.response.get("status") == "completed"
                return {
                    "message": said[0],
                    "finish_reason": "stop" if done else "length",
                }
        raise BadRowError("no response")

    def values(self, name: str) -> Sequence[str] | None:
        """What a list of a policy meets under a name in lower case: the `user`, the `model`, or a header.

        Empty if the request has none of the name; None if the log does not tell.
        """
        asked = self.request.get(name) if name in BODY else None
        if not isinstance(asked, PLAIN):
            return None
        body = [] if asked is None else [str(asked)]
        logged = self.headers is not None and (
            self.header_names is None or name in self.header_names
        )
        if self.headers is None or not logged:
            return body if name in BODY else None
        return [*body, *self.headers.get(name, [])]


@dataclass(frozen=True)
class LogFile:
    """A file of a log, and where the relative paths in it begin."""

    name: str  # path or URL
    state: tuple[
        int, int
    ]  # bytes, and when it was written in ns, 0 for a URL: what changes when it grows
    folder: str  # path or URL
    copies: "Copies"  # of what is at a URL

    def rows(self) -> Iterator[Row]:
        """Its rows; DataError if it cannot be read."""
        with self.copies(self.name) as path:
            for row in sources.read(str(path)):
                yield replace(row, source=self.name)

    def media(self, name: str, most: int) -> bytes:
        """The content of an image or video that a line names; it must lie below the log's folder.

        BadRowError if it is not there, or has more than `most` bytes.
        """
        kind = "media outside of the log"
        try:
            if is_url(self.folder):
                url = name if is_url(name) else f"{self.folder}/{name}"
                if not url.startswith(f"{self.folder}/"):
                    raise BadRowError(kind)
                with self.copies(url) as copy:
                    return read_bytes(copy, most)
            if "://" in name:
                raise BadRowError(
                    "media is a URL",
                    "the log must hold it, as bytes or as a file beside it",
                )
            path = Path(self.folder, name).resolve()
            if not path.is_relative_to(Path(self.folder).resolve()):
                raise BadRowError(kind)
            return read_bytes(path, most)
        except (OSError, ValueError, DataError, MediaError) as error:
            large = isinstance(error, OSError) and error.errno == errno.EFBIG
            reason = "media too large" if large else "missing media"
            raise BadRowError(reason, one_line(error)) from None


@dataclass(frozen=True)
class _Place:
    """Where a request stands in the file of `BatchRequests`."""

    start: int
    length: int
    digest: bytes


class BatchRequests:
    """The requests of batches by their ids, on a disk under no name: a batch may be larger than memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed, and gone, with this object)
        weakref.finalize(self, self._file.close)
        self._places: dict[str, _Place | None] = {}

    def __contains__(self, number: str) -> bool:
        return number in self._places

    def add(self, number: str, body: Mapping[str, Any]) -> None:
        """Keep a request; of several with one id, as batches that count from 1 have them, none is got."""
        content = json.dumps(body, sort_keys=True).encode()
        digest = hashlib.sha256(content).digest()
        if number not in self._places:
            start = self._file.seek(0, os.SEEK_END)
            with naming(tempfile.gettempdir()):
                self._file.write(content)
            self._places[number] = _Place(start, len(content), digest)
            return
        known = self._places[number]
        if known is not None and known.digest != digest:
            self._places[number] = None

    def get(self, number: str) -> Mapping[str, Any] | None:
        """The request of an id, None if there is none, or several."""
        place = self._places.get(number)
        if place is None:
            return None
        self._file.seek(place.start)
        return _object(json.loads(self._file.read(place.length)))


@dataclass
class Log:
    """All files of some sources, and the requests of the batch files among them."""

    files: Sequence[LogFile]
    unread: dict[str, str] = field(default_factory=dict)
    """Folders and files below the sources that cannot be read -> why."""

    @classmethod
    def open(cls, names: Sequence[str], workspace: Workspace) -> "Log":
        """The files of these paths and URLs; DataError if one has none."""
        copies, unread = Copies(workspace), dict[str, str]()
        return cls(
            [file for name in names for file in _files(name, copies, unread)], unread
        )

    @cached_property
    def _asked(self) -> "BatchRequests":
        """The requests of batches: what answers them may stand in any other file."""
        found = BatchRequests()
        for file in self.files:
            with suppress(*FOR_USER):  # which `read` of that file raises, too
                for row in file.rows():
                    if isinstance(row.value, Mapping) and _asks(row.value):
                        found.add(str(row.value["custom_id"]), row.value["body"])
        return found

    def read(self, file: LogFile) -> Iterator[Exchange | tuple[Row, BadRowError]]:
        """The exchanges of a file, and the rows that are none with what is wrong."""
        for row in file.rows():
            if isinstance(row.value, Mapping) and _asks(row.value):
                continue
            try:
                yield self._exchange(row)
            except BadRowError as error:
                yield row, error

    def _exchange(self, row: Row) -> Exchange:
        if row.problem:
            raise BadRowError(row.problem.reason)
        value = row.value
        if not isinstance(value, Mapping):
            raise BadRowError("not an object")
        if value.get("error"):
            raise BadRowError("failed request")
        response, status, _ = _body(value, RESPONSE)
        if status not in (None, 200):
            raise BadRowError("failed request", f"status {status}")
        if response is None:
            raise BadRowError("no response")
        request, _, headers = _body(value, REQUEST)
        if request is None and "custom_id" in value:
            number = str(value["custom_id"])
            request = self._asked.get(number)
            if request is None and number in self._asked:
                raise BadRowError(
                    "several requests",
                    f"batches share the id {number}: harvest one at a time",
                )
            if request is None:
                raise BadRowError("no request", "name the batch's input file, too")
        given = (
            *(value.get(name) for name in TIME),
            response.get("created"),
            response.get("created_at"),
        )
        time = next(
            (found for one in given if (found := _seconds(one)) is not None), None
        )
        asked = value if request is None else request
        return Exchange(
            row,
            asked,
            response,
            _flat(headers),
            time,
            _names(value.get("header_names")),
        )


def _files(name: str, copies: "Copies", unread: dict[str, str]) -> list[LogFile]:
    """The files of a path or URL, by name; DataError if there is none. `unread` gets what is not readable."""
    if is_url(name):
        return _remote(name.rstrip("/"), copies)
    if "://" in name:
        raise DataError(
            f"{name}: logs are read from folders, s3://, gs:// and az://: copy it to one of them"
        )
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise DataError(
            f"there is no log {name or '(an empty name)'}: give a file, a folder or a URL"
        )
    if path.is_file():
        return [_local(path, path.resolve().parent, copies)]
    found = []
    for file, error in sources.walk(path):
        try:
            if error:
                raise error
            if file.name.lower().endswith(FILES):
                found.append(_local(file, path.resolve(), copies))
        except OSError as reason:
            unread[str(file)] = reason.strerror or str(reason)
    if not found and unread:
        raise DataError(unread_line(unread))
    if not found:
        raise DataError(
            f"{name} holds no log: its files end in none of {', '.join(FILES)}"
        )
    return found


def unread_line(unread: Mapping[str, str]) -> str:
    """Which files and folders of a log could not be read, and why, in a line."""
    shown = [
        why if name in why else f"{name} cannot be read: {why}"
        for name, why in unread.items()
    ]
    more = f"; and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    return "; ".join(shown[:MOST_SHOWN]) + more


def _local(path: Path, folder: Path, copies: "Copies") -> LogFile:
    found = path.stat()
    return LogFile(
        str(path.resolve()), (found.st_size, found.st_mtime_ns), str(folder), copies
    )


@dataclass(frozen=True)
class Copies:
    """Copies of logs at a URL for a while: a log is not for us to keep."""

    workspace: Workspace  # that they lie in meanwhile

    @contextmanager
    def __call__(self, name: str) -> Iterator[Path]:
        """A file on this machine; MediaError if it cannot be copied."""
        if not is_url(name):
            yield Path(name)
            return
        with self.workspace.staging() as folder:
            path = folder / copy_of(name).name
            fetch(name, path)
            yield path


def _remote(url: str, copies: Copies) -> list[LogFile]:
    folder, _, leaf = url.rpartition("/")
    try:
        there = open_backend(folder)
        size = there.size(leaf)
        listed = {leaf: size} if size is not None else open_backend(url).list_files("")
    except (OSError, StoreError) as error:
        raise DataError(f"{url} cannot be read: {one_line(error)}") from None
    base = folder if size is not None else url
    found = [
        LogFile(f"{base}/{name}", (length, 0), base, copies)
        for name, length in sorted(listed.items())
        if name.lower().endswith(FILES)
    ]
    if not found:
        raise DataError(
            f"{url} holds no log: there is no object whose name ends in {', '.join(FILES)}"
        )
    return found


def _asks(value: Mapping[str, Any]) -> bool:
    """Whether a row is a request of a batch, whose response stands elsewhere."""
    url = value.get("url", ASKING[0])
    asks = (
        isinstance(url, str)
        and url.endswith(ASKING)
        and isinstance(value.get("body"), Mapping)
    )
    return asks and "custom_id" in value and "response" not in value


def _body(
    value: Mapping[str, Any], names: Sequence[str]
) -> tuple[Mapping[str, Any] | None, Any, list[Any]]:
    """The body under the first of these names, the status of HTTP around it, and what has headers."""
    given = [value[name] for name in names if value.get(name) is not None]
    objects = [value, *(one for one in map(_object, given) if one)]
    status = value.get("status_code")
    found = _object(given[0]) if given else None
    if found and "body" in found:
        status, found = found.get("status_code", status), _object(found["body"])
        objects += [found] if found else []
    for holder in objects:
        _require_spelling(holder)
    headers = [holder.get(name) for holder in objects for name in HEADERS]
    return found, status, [*headers, value.get("request_headers")]


def _require_spelling(holder: Mapping[str, Any]) -> None:
    """BadRowError if a name that a policy is about is written otherwise, such as `Headers`."""
    for name in holder:
        plain = name.strip().lower().replace("-", "_")
        if plain in SPELLED and name != plain:
            raise BadRowError("unreadable headers", f"'{name}': write {plain}")


def _flat(given: Sequence[Any]) -> dict[str, list[str]] | None:
    """The values of all headers, by name in lower case; None if there are no headers at all.

    Each is an object, of values or of lists of values, or a list of pairs or of objects with a name and a
    value. BadRowError if it is not: whoever asked not to be kept could not be told.
    """
    if all(headers is None for headers in given):
        return None
    flat: dict[str, list[str]] = {}
    for headers in given:
        for name, value in _pairs(_parsed(headers)):
            values = (value if isinstance(value, list) else [value]) or [""]
            if not all(isinstance(one, PLAIN) for one in values):
                raise BadRowError("unreadable headers")
            flat.setdefault(name.strip().lower(), []).extend(
                str(one).strip() for one in values
            )
    return flat


def _names(given: Any) -> Collection[str] | None:
    """The headers that a recorder would have logged; BadRowError if it does not say that."""
    if given is None:
        return None
    if not (isinstance(given, list) and all(isinstance(name, str) for name in given)):
        raise BadRowError("unreadable headers")
    return [name.lower() for name in given]


def _pairs(headers: Any) -> list[tuple[str, Any]]:
    if headers is None:
        return []
    if isinstance(headers, Mapping):
        return [(str(name), value) for name, value in headers.items()]
    pairs = []
    for one in headers if isinstance(headers, list) else [None]:
        pair = one
        if isinstance(one, Mapping) and "value" in one:
            pair = [one.get("name", one.get("key")), one["value"]]
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise BadRowError("unreadable headers")
        pairs.append((pair[0], pair[1]))
    return pairs


def _parsed(value: Any) -> Any:
    """What JSON written as text says; else the value."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except (ValueError, RecursionError):
        return value


def _object(value: Any) -> dict[str, Any] | None:
    """A JSON object, which may be written as text."""
    value = _parsed(value)
    return dict(value) if isinstance(value, Mapping) else None


def _seconds(value: Any) -> float | None:
    """A time in seconds since 1970, of a number or a text of ISO 8601; UTC where no zone is given.

    Numbers may count thousandths, millionths and so on. One that would be before 2001 is a duration.
    """
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not number >= EARLIEST:
            try:
                moment = datetime.fromisoformat(value)
                return (
                    moment if moment.tzinfo else moment.replace(tzinfo=UTC)
                ).timestamp()
            except (ValueError, OverflowError):
                return None
        value = number
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not EARLIEST <= value < 1e20
    ):
        return None
    while value > MILLISECONDS:
        value /= 1000
    return float(value)
