"""Requests and responses of a server as a log, which `harvest` reads.

DIR/<day>.jsonl   a line for each response, by the day (UTC) on which it ended
    media/<hash>  its images, as they were sent
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.media.images import name_of
from vlmdistill.stores.backends.clock import beyond
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import one_line

MEDIA = "media"
SECRET = ("authorization", "cookie", "key", "token", "secret", "password")  # ends of the names of headers
DAY = 86400.0
HOUR = 3600.0
WAITING = 1000  # responses that may wait to be written; more are lost
log = logging.getLogger("vlmdistill.pipelines")

Keep = Callable[[bytes], str]
"""Keeps an image, and says under which name."""


class Recorder:
    """Writes lines in a thread of its own, in order. `recorded` and `lost` count them."""

    def __init__(self, folder: Path, keep_seconds: float | None = None) -> None:
        """Write below a folder; remove the days, and the images, of more than `keep_seconds` ago.

        OSError if the folder cannot be made.
        """
        self.folder, self.keep_seconds = folder, keep_seconds
        self.recorded = self.lost = 0
        self._ahead: str | None = None  # how far the clock is ahead, None before it was looked at
        (folder / MEDIA).mkdir(parents=True, exist_ok=True)
        self._waiting = queue.Queue[tuple[float, Callable[[Keep], Mapping[str, Any]]] | None](WAITING)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, make: Callable[[Keep], Mapping[str, Any]]) -> None:
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
                found = self._waiting.get(timeout=HOUR)
            except queue.Empty:
                continue
            if found is None:
                return
            self._write(*found)

    def _write(self, now: float, make: Callable[[Keep], Mapping[str, Any]]) -> None:
        try:
            line = json.dumps({"time": round(now, 3), **make(self._keep)}, ensure_ascii=False)
            day = time.strftime("%Y-%m-%d", time.gmtime(now))
            with (self.folder / f"{day}.jsonl").open("a", encoding="utf-8", errors="replace") as file:
                file.write(line + "\n")
            self.recorded += 1
        except Exception as error:  # noqa: BLE001 (one response must not end the record of all later ones)
            self._lose(one_line(error))

    def _lose(self, why: str) -> None:
        self.lost += 1
        log.warning("a response is not recorded in %s: %s", self.folder, why)

    def _keep(self, content: bytes) -> str:
        name = f"{MEDIA}/{name_of(content)}"
        path = self.folder / name
        if path.exists():
            path.touch()  # it is as old as its last use
        else:
            with atomic_write(path) as new:
                new.write_bytes(content)
        return name

    def _remove(self, now: float) -> None:
        """Remove what is too old."""
        if self.keep_seconds is None:
            return
        oldest = now - self.keep_seconds
        first = time.strftime("%Y-%m-%d", time.gmtime(oldest))
        try:
            days = [*self.folder.glob("[0-9]*-[0-9]*-[0-9]*.jsonl")]
            media = [*(self.folder / MEDIA).iterdir()]
            if self._ahead is None:  # before anything is written under a wrong clock
                self._ahead = beyond(now, [*days, *media])
                if self._ahead:
                    text = "nothing is removed from %s: %s; if it is right, start the server again"
                    log.warning(text, self.folder, self._ahead)
            if self._ahead:
                return
            for file in days:
                if file.stem < first:
                    file.unlink(missing_ok=True)
            for file in media:
                if file.stat().st_mtime < oldest - DAY:  # the lines of that day still name it
                    file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("what is too old stays in %s: %s", self.folder, one_line(error))


def without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request that may be recorded: those that by their name are no credentials."""
    return {name: one for name, one in headers.items() if not name.lower().endswith(SECRET)}
