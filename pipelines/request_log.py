"""Requests and responses of a server as a log, which `harvest` reads.

DIR/<day>.jsonl   a line for each response, by the day (UTC) on which it ended
    media/<hash>  its images, as they were sent
    policy.toml   the user's, if there is one: the headers that its lists name are recorded, and no others

Who asks, and gateways on the way, put credentials and names into headers that no list of ours could know.
Files and folders are for the user of the server alone.
"""

import errno
import json
import logging
import os
import queue
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.media.images import name_of
from vlmdistill.stores.backends.clock import AHEAD, SKEW, beyond
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.input_files import read_bytes

MEDIA, POLICY, DAYS = "media", "policy.toml", "[0-9]*-[0-9]*-[0-9]*.jsonl"
DAY = 86400.0
HOUR = 3600.0
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
WAITING = 1000  # responses that may wait to be written; more are lost
log = logging.getLogger("vlmdistill.pipelines")

Keep = Callable[[bytes], str]
"""Keeps an image, and says under which name."""
MakeLine = Callable[[Keep], Mapping[str, Any]]
"""Makes a line, and keeps its images."""
Headers = Iterable[tuple[str, str]]
"""Names and values, a name for each of its values."""


class Recorder:
    """Writes lines in a thread of its own, in order. `recorded` and `lost` count them."""

    def __init__(self, folder: Path, keep_seconds: float | None = None) -> None:
        """Write below a folder; remove the days, and the images, of more than `keep_seconds` ago.

        OSError if the folder cannot be made, DataError if it has a policy that cannot be read.
        """
        self.folder, self.keep_seconds = folder, keep_seconds
        self.header_names = named_headers(folder / POLICY)
        self.recorded = self.lost = 0
        self._started = time.time() - time.monotonic()
        self._ahead: str | None = None
        """How far the clock is ahead; None before it was looked at."""
        if not folder.is_dir():
            folder.mkdir(PRIVATE_FOLDER, parents=True)
        _require_private(folder)
        (folder / MEDIA).mkdir(PRIVATE_FOLDER, exist_ok=True)
        for path in (folder / MEDIA, *folder.glob(DAYS)):  # of an earlier version
            with suppress(OSError):  # it is another user's, a link, or gone
                _make_private(path)
        self._waiting = queue.Queue[tuple[float, MakeLine] | None](WAITING)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, make: MakeLine) -> None:
        """Record what `make` returns, later and in the other thread; what cannot wait is lost."""
        try:
            self._waiting.put_nowait((time.time(), make))
        except queue.Full:
            self._lose("it is slower than the server")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until all is written."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        removed = -HOUR
        while True:
            if time.monotonic() - removed >= HOUR:  # also of a server that nobody asks
                self._remove(time.time())
                removed = time.monotonic()
            try:
                waiting = self._waiting.get(timeout=HOUR)
            except queue.Empty:
                continue
            if waiting is None:
                return
            self._write(*waiting)

    def _write(self, now: float, make: MakeLine) -> None:
        try:
            exchange = dict(make(self._keep))
            line = {
                "time": round(now, 3),
                "headers": self._named(exchange.pop("headers", ())),
                "header_names": sorted(self.header_names),
                **exchange,
            }
            text = json.dumps(line, ensure_ascii=False)
            day = time.strftime("%Y-%m-%d", time.gmtime(now))
            _append(self.folder / f"{day}.jsonl", text.encode(errors="replace") + b"\n")
            self.recorded += 1
        except Exception as error:  # noqa: BLE001 (one response must not end the record of all later ones)
            self._lose(one_line(error))

    def _named(self, headers: Headers) -> dict[str, list[str]]:
        """The values of the headers that are recorded, by name in lower case."""
        values: dict[str, list[str]] = {}
        for name, value in headers:
            if name.lower() in self.header_names:
                values.setdefault(name.lower(), []).append(value)
        return values

    def _lose(self, why: str) -> None:
        self.lost += 1
        log.warning("a response is not recorded in %s: %s", self.folder, why)

    def _keep(self, content: bytes) -> str:
        name = f"{MEDIA}/{name_of(content)}"
        path = self.folder / name
        if path.exists():
            path.touch()  # it is as old as its last use
        else:
            with atomic_write(path, private=True) as new:
                new.write_bytes(content)
        return name

    def _remove(self, now: float) -> None:
        """Remove what is too old."""
        if self.keep_seconds is None:
            return
        oldest = now - self.keep_seconds
        first = time.strftime("%Y-%m-%d", time.gmtime(oldest))
        try:
            days = [*self.folder.glob(DAYS)]
            media = [*(self.folder / MEDIA).iterdir()]
            if not self._may_remove(now, [*days, *media]):
                return
            for file in days:
                if file.stem < first:
                    file.unlink(missing_ok=True)
            for file in media:
                # The lines of the day of its last use still name it.
                if file.stat().st_mtime < oldest - DAY:
                    file.unlink(missing_ok=True)
            self._warn_of_future(now + SKEW)
        except OSError as error:
            log.warning("what is too old stays in %s: %s", self.folder, one_line(error))

    def _warn_of_future(self, latest: float) -> None:
        """Say which files are later than a time: they do not get too old."""
        last = time.strftime("%Y-%m-%d", time.gmtime(latest))
        days = [file for file in self.folder.glob(DAYS) if file.stem > last]
        media = [*(self.folder / MEDIA).iterdir()]
        future = days + [file for file in media if file.stat().st_mtime > latest]
        if future:
            text = (
                "%d files of the future stay, such as %s: a clock was wrong when they were written, or is "
                "now; rename days, and `touch` media"
            )
            log.warning(text, len(future), future[0])

    def _may_remove(self, now: float, files: Iterable[Path]) -> bool:
        """Whether the clock is right, as far as the files, and the time since the start, can tell."""
        if self._ahead is None:  # before anything is written under a wrong clock
            self._ahead = beyond(now, files)
            self._warn()
        jumped = now - time.monotonic() - self._started
        if not self._ahead and jumped > AHEAD:
            self._ahead = f"the clock has jumped ahead by {jumped / DAY:.0f} days"
            self._warn()
        return not self._ahead

    def _warn(self) -> None:
        if self._ahead:
            text = (
                "nothing is removed from %s: %s; if it is right, start the server again"
            )
            log.warning(text, self.folder, self._ahead)


def named_headers(policy: Path) -> frozenset[str]:
    """The names in the lists of a policy, in lower case; none without a file.

    DataError if it cannot be read.
    """
    try:
        rules = tomllib.loads(read_bytes(policy).decode())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise DataError(f"{policy} cannot be used: {one_line(error)}") from None
    tables = [rules.get(name, {}) for name in ("allow", "deny")]
    if not all(isinstance(table, dict) for table in tables):
        raise DataError(f"{policy} cannot be used: allow and deny are tables")
    return frozenset(name.strip().lower() for table in tables for name in table)


def _require_private(folder: Path) -> None:
    """Let nobody else enter a folder that has nothing but a log; warn if others can enter another one."""
    if not folder.stat().st_mode & 0o077:
        return
    foreign: list[str] = []
    with suppress(OSError):  # it is another user's, or a link
        foreign = [path.name for path in folder.iterdir() if not _is_ours(path.name)]
        if not foreign:
            _make_private(folder)
            return
    reason = f"holds {foreign[0]}, too" if foreign else "is not this user's own"
    advice = "others can list the log in %s, which %s: give a folder of its own, or `chmod 700` it"
    log.warning(advice, folder, reason)


def _is_ours(name: str) -> bool:
    return name in (MEDIA, POLICY) or fnmatch(name, DAYS)


def _make_private(path: Path) -> None:
    """Let nobody else read a file or enter a folder; OSError on a link."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        os.fchmod(handle, PRIVATE_FOLDER if is_folder else PRIVATE)
    finally:
        os.close(handle)


def _append(file: Path, line: bytes) -> None:
    """Append to a file for this user alone; OSError on what is no file, such as a link or a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(file, flags, PRIVATE), "ab") as day:
        if not stat.S_ISREG(os.fstat(day.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        day.write(line)
