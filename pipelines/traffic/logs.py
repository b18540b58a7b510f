"""The files of logs, on disks and at URLs, and the exchanges in them.

`dialects.py` has the forms of lines. A line that cannot be used is yielded with its problem; a file that
cannot be read raises DataError.
"""

import errno
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from vlmdistill.pipelines.data.prompts import sources
from vlmdistill.pipelines.data.prompts.folders import walk
from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.images import MediaError, kind_of
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.media.urls import copy_of, fetch, is_url
from vlmdistill.pipelines.request_log import MEDIA, POLICY
from vlmdistill.pipelines.traffic.dialects import (
    BatchAnswer,
    BatchRequest,
    Exchange,
    is_batch_request,
    read_batch_request,
    read_line,
)
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import FOR_USER, DataError, StoreError, naming, one_line
from vlmdistill.stores.input_files import read_bytes
from vlmdistill.stores.json_text import plain

LOG_ENDINGS = (".jsonl", ".json", ".ndjson", ".gz", ".bz2", ".xz", ".parquet", ".log")
MOST_SHOWN = 3  # unread files that `unread_line` names

BadLine = tuple[Row, BadRowError]
FileState = tuple[int, int]
"""Bytes, and the time of the last change in ns (0 at a URL): a file with another state has changed."""


@dataclass(frozen=True)
class Copies:
    """Copies files at URLs for as long as they are used: a log is not ours to keep."""

    workspace: Workspace  # where the copies are meanwhile

    @contextmanager
    def __call__(self, name: str) -> Iterator[Path]:
        """The path of a file, or of a copy of a URL; MediaError if it cannot be copied."""
        if not is_url(name):
            yield Path(name)
            return
        with self.workspace.staging() as folder:
            path = folder / copy_of(name).name
            fetch(name, path)
            yield path


@dataclass(frozen=True)
class LogFile:
    """A file of a log."""

    name: str  # path or URL
    state: FileState
    folder: str  # path or URL: paths in the file are relative to it
    copies: Copies

    def rows(self) -> Iterator[Row]:
        """Its rows; DataError if it cannot be read."""
        with self.copies(self.name) as path:
            for row in sources.read(str(path)):
                yield replace(row, source=self.name, value=plain(row.value))

    def media(self, name: str, most: int) -> bytes:
        """The content of an image or video that a line names; it must lie below the log's folder.

        BadRowError if it is not there, or has more than `most` bytes.
        """
        try:
            if is_url(self.folder):
                with self.copies(self._media_url(name)) as copy:
                    return read_bytes(copy, most)
            return read_bytes(self._media_path(name), most)
        except (OSError, ValueError, DataError, MediaError) as error:
            is_large = isinstance(error, OSError) and error.errno == errno.EFBIG
            reason = "media too large" if is_large else "missing media"
            raise BadRowError(reason, one_line(error)) from None

    def _media_url(self, name: str) -> str:
        url = name if is_url(name) else f"{self.folder}/{name}"
        # `copy_of` refuses a URL with `..`, which would lead out again.
        if not url.startswith(f"{self.folder}/"):
            raise BadRowError("media outside of the log")
        return url

    def _media_path(self, name: str) -> Path:
        if "://" in name:
            advice = "the log must hold it, as bytes or as a file beside it"
            raise BadRowError("media is a URL", advice)
        path = Path(self.folder, name).resolve()
        if not path.is_relative_to(Path(self.folder).resolve()):
            raise BadRowError("media outside of the log")
        return path


@dataclass(frozen=True)
class _Place:
    """Where a request stands in the file of `BatchRequests`."""

    start: int
    length: int
    digest: bytes


class BatchRequests:
    """The requests of batches by their ids, in a temporary file, as a batch may be larger than memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        weakref.finalize(self, self._file.close)
        self._place_of: dict[str, _Place | None] = {}  # None: several differ

    def add(self, request: BatchRequest) -> None:
        """Keep a request, unless requests with one id differ, as in batches that count from 1: then none."""
        content = json.dumps(request.body, sort_keys=True).encode()
        digest = hashlib.sha256(content).digest()
        custom_id = request.custom_id
        if custom_id not in self._place_of:
            start = self._file.seek(0, os.SEEK_END)
            with naming(tempfile.gettempdir()):
                self._file.write(content)
            self._place_of[custom_id] = _Place(start, len(content), digest)
            return
        place = self._place_of[custom_id]
        if place is not None and place.digest != digest:
            self._place_of[custom_id] = None

    def of(self, answer: BatchAnswer) -> Mapping[str, Any]:
        """The body of the request that is answered; BadRowError if there is none, or several that differ."""
        custom_id = answer.custom_id
        if custom_id not in self._place_of:
            raise BadRowError("no request", "name the batch's input file, too")
        place = self._place_of[custom_id]
        if place is None:
            raise BadRowError(
                "several requests",
                f"batches share the id {custom_id}: harvest one at a time",
            )
        self._file.seek(place.start)
        body: dict[str, Any] = json.loads(self._file.read(place.length))
        return body


@dataclass
class Log:
    """All files of some sources, and the requests of the batch files among them."""

    files: Sequence[LogFile]
    unread: dict[str, str] = field(default_factory=dict)
    """Folders and files below the sources that cannot be read -> why."""
    other_files: list[str] = field(default_factory=list)
    """Files of the sources that are neither logs nor media, by their endings."""

    @classmethod
    def open(cls, names: Sequence[str], workspace: Workspace) -> "Log":
        """The files at these paths and URLs; DataError if there is none at one of them."""
        copies = Copies(workspace)
        log = cls([])
        files = [file for name in names for file in _files(name, copies, log)]
        return replace(log, files=files)

    @cached_property
    def _batch_requests(self) -> BatchRequests:
        """The requests of batches in all files: an answer may be in another file than its request."""
        requests = BatchRequests()
        for file in self.files:
            with suppress(*FOR_USER):  # `read` of that file raises it again
                for row in file.rows():
                    if row.problem is None and is_batch_request(row.value):
                        with suppress(BadRowError):
                            requests.add(read_batch_request(row.value))
        return requests

    def read(self, file: LogFile) -> Iterator[Exchange | BadLine]:
        """The exchanges of a file; in place of one that cannot be used, its row and the problem."""
        for row in file.rows():
            try:
                exchange = self._exchange(row)
            except BadRowError as error:
                yield row, error
            else:
                if exchange is not None:
                    yield exchange

    def _exchange(self, row: Row) -> Exchange | None:
        """The exchange of a row; None for a request of a batch. BadRowError if it is neither."""
        if row.problem:
            # Without the detail, which may quote the line.
            raise BadRowError(row.problem.reason)
        if is_batch_request(row.value):
            read_batch_request(row.value)  # only to check it
            return None
        line = read_line(row.value)
        if isinstance(line, BatchAnswer):
            # A request that failed is told as such, also if the batch's input file is not there.
            line.body()
            return line.exchange(row, self._batch_requests.of(line))
        return line.exchange(row)


def _files(name: str, copies: Copies, log: Log) -> list[LogFile]:
    """The logs at a path or URL, sorted by name; DataError if there is none.

    Files and folders that cannot be read, or are no logs, are noted in `log`.
    """
    if is_url(name):
        return _remote_files(name.rstrip("/"), copies, log)
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
        return [_local_file(path, path.resolve().parent, copies)]
    return _files_below(path, copies, log)


def _files_below(folder: Path, copies: Copies, log: Log) -> list[LogFile]:
    files = []
    for path, error in walk(folder):
        try:
            if error:
                raise error
            if path.name.lower().endswith(LOG_ENDINGS):
                files.append(_local_file(path, folder.resolve(), copies))
            elif _may_be_log(path):
                log.other_files.append(str(path))
        except OSError as reason:
            log.unread[str(path)] = reason.strerror or str(reason)
    if not files and log.unread:
        raise DataError(unread_line(log.unread))
    if not files:
        raise DataError(
            f"{folder} holds no log: its files end in none of {', '.join(LOG_ENDINGS)}"
        )
    return files


def _may_be_log(path: Path | PurePosixPath) -> bool:
    """Whether a file is neither an image or a video, also of our recorder, nor a policy."""
    is_recorded = path.parent.name == MEDIA and not path.suffix
    is_policy = path.suffix == Path(POLICY).suffix
    return not (is_recorded or is_policy or kind_of(path.name))


def _local_file(path: Path, folder: Path, copies: Copies) -> LogFile:
    stat = path.stat()
    state = (stat.st_size, stat.st_mtime_ns)
    return LogFile(str(path.resolve()), state, str(folder), copies)


def _remote_files(url: str, copies: Copies, log: Log) -> list[LogFile]:
    """The logs at a URL, which is an object or the prefix of several."""
    parent, _, leaf = url.rpartition("/")
    try:
        size = open_backend(parent).size(leaf)
        if size is None:  # no object has this name
            folder = url
            sizes = open_backend(url).list_files("")
        else:
            folder = parent
            sizes = {leaf: size}
    except (OSError, StoreError) as error:
        raise DataError(f"{url} cannot be read: {one_line(error)}") from None
    files = [
        LogFile(f"{folder}/{name}", (length, 0), folder, copies)
        for name, length in sorted(sizes.items())
        if name.lower().endswith(LOG_ENDINGS)
    ]
    log.other_files += [
        f"{folder}/{name}"
        for name in sorted(sizes)
        if not name.lower().endswith(LOG_ENDINGS) and _may_be_log(PurePosixPath(name))
    ]
    if not files:
        raise DataError(
            f"{url} holds no log: there is no object whose name ends in {', '.join(LOG_ENDINGS)}"
        )
    return files


def other_files_line(names: Sequence[str]) -> str:
    """How many files of a log are not read, since their names end as no log's, and the first; else empty."""
    if not names:
        return ""
    ellipsis = ", ..." if len(names) > MOST_SHOWN else ""
    files = "1 file is" if len(names) == 1 else f"{len(names)} files are"
    return (
        f"{files} not read, since logs end in {', '.join(LOG_ENDINGS)}: "
        f"{', '.join(names[:MOST_SHOWN])}{ellipsis}"
    )


def unread_line(unread: Mapping[str, str]) -> str:
    """Which files and folders of a log could not be read, and why, in a line."""
    # Some reasons name the file already.
    problems = [
        reason if name in reason else f"{name} cannot be read: {reason}"
        for name, reason in unread.items()
    ]
    shown = "; ".join(problems[:MOST_SHOWN])
    hidden = len(problems) - MOST_SHOWN
    return f"{shown}; and {hidden} more" if hidden > 0 else shown
