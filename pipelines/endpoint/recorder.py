"""`serve --record`: what was asked and answered, as a log that `harvest` reads.

DIR/<day>.jsonl   a line for each response, by the day (UTC) on which it ended
    media/<hash>  its images, as they were sent
"""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from vlmdistill.pipelines.endpoint.chat import ChatRequest, image_source
from vlmdistill.pipelines.endpoint.served_decoder import ServedResponse
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import one_line

MEDIA = "media"
SECRET = ("authorization", "cookie", "proxy-authorization", "x-api-key", "api-key")
DAY = 86400.0
log = logging.getLogger("vlmdistill.pipelines")


class Recorder:
    """Writes responses in a thread of its own, in order. Those that cannot be written are counted."""

    def __init__(self, folder: Path, keep_seconds: float | None = None) -> None:
        """Write below a folder; remove the days, and the images, of more than `keep_seconds` ago."""
        self.folder, self.keep_seconds = folder, keep_seconds
        self.lost = 0
        self._day = ""
        self._thread = ThreadPoolExecutor(1, "recorder")

    def add(self, response: ServedResponse, headers: Mapping[str, str]) -> None:
        """Record a response that has ended; this returns at once."""
        self._thread.submit(self._write, response, dict(headers), time.time())

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until all is written."""
        self._thread.shutdown()

    def _write(self, response: ServedResponse, headers: Mapping[str, str], now: float) -> None:
        try:
            day = time.strftime("%Y-%m-%d", time.gmtime(now))
            if day != self._day:
                self._day = day
                (self.folder / MEDIA).mkdir(parents=True, exist_ok=True)
                self._remove(now)
            line = json.dumps(self._line(response, headers, now), ensure_ascii=False)
            with (self.folder / f"{day}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except (OSError, ValueError) as error:
            self.lost += 1
            log.warning("a response is not recorded in %s: %s", self.folder, one_line(error))

    def _line(self, response: ServedResponse, headers: Mapping[str, str], now: float) -> dict[str, Any]:
        counts = response.decoding
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": response.text},
            "finish_reason": response.finish,
            "token_ids": [token for cycle in response.cycles for token in cycle.ids],
        }
        usage = {"prompt_tokens": response.prompt_tokens, "completion_tokens": counts.tokens}
        return {
            "time": round(now, 3),
            "headers": {name: one for name, one in headers.items() if name not in SECRET},
            "request": self._request(response.request, response.media),
            "response": {"model": response.decoder.model, "choices": [choice], "usage": usage},
            "decoding": {
                "drafter": response.drafter_name,
                "calls": counts.calls,
                "accepted": counts.accepted,
                "seconds": round(counts.seconds, 6),
            },
        }

    def _request(self, request: ChatRequest, media: Path | None) -> dict[str, Any]:
        """The request with its images as files of this log."""
        found = request.model_dump(exclude_defaults=True)
        for turn, message in zip(found["messages"], request.messages, strict=True):
            for part, given in zip(turn["content"], message.content, strict=True):
                if given.image_url is not None:
                    part["image_url"] = {"url": self._keep(given.image_url.url, media)}
        return found

    def _keep(self, url: str, media: Path | None) -> str:
        """Keep an image, and say under which name."""
        source = image_source(url, media)
        content = source.read_bytes() if isinstance(source, Path) else source.getvalue()
        name = f"{MEDIA}/{blake3(content).hexdigest()[:32]}"
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
        for file in self.folder.glob("[0-9]*-[0-9]*-[0-9]*.jsonl"):
            if file.stem < first:
                file.unlink(missing_ok=True)
        for file in (self.folder / MEDIA).iterdir():
            if file.stat().st_mtime < oldest - DAY:  # the lines of that day still name it
                file.unlink(missing_ok=True)
