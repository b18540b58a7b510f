"""A store behind a plain web server can be pulled, and an interrupted pull goes on where it ended."""

import io
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.stores.samples import make
from tests.stores.web import serving
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.sharing import transfer
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store

pytest.importorskip("aiohttp", reason="fsspec speaks http by way of aiohttp")


class Server(ThreadingHTTPServer):
    """Serves a folder by byte ranges; the line breaks in the middle of a range of an array."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Ranges, directory=str(folder)))
        self.ranges: list[
            tuple[str, int]
        ] = []  # of arrays, that arrive: file and first byte
        self.until_broken = (
            0  # requests of arrays, of which the last breaks; 0 for none
        )
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Ranges(SimpleHTTPRequestHandler):
    """The standard library's server does not know ranges."""

    server: Server

    def send_head(self) -> Any:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            return super().send_head()
        size = path.stat().st_size
        start, end = int(asked[1]), min(int(asked[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        data = path.read_bytes()[start:end]
        if path.parts[-3:] == ("c", "0", "0"):
            with self.server.lock:
                self.server.until_broken -= 1
                breaks = not self.server.until_broken
            if breaks:
                data = data[: len(data) // 2]
                self.close_connection = True
            else:
                self.server.ranges.append((self.path, start))
        return io.BytesIO(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(Server(tmp_path / "web")) as server:
        yield server


def test_an_interrupted_pull_over_http_fetches_only_the_ranges_that_did_not_arrive(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "web", [range(9), range(9, 12)])
    monkeypatch.setattr(transfer, "BLOCK", 1 << 10)
    send(server.url, tmp_path / "calm")
    whole = sorted(server.ranges)
    server.ranges.clear()
    server.until_broken = len(whole) // 2
    with pytest.raises(StoreError, match=f"^{server.url}/shards/"):
        send(server.url, tmp_path / "there")
    arrived = sorted(server.ranges)
    server.ranges.clear()
    send(server.url, tmp_path / "there")
    assert arrived
    assert sorted(arrived + server.ranges) == whole
    assert Store.open(tmp_path / "there").index.equals(store.index)
    assert not verify(tmp_path / "there").findings
    assert not os.listdir(tmp_path / "there" / "staging")
