"""A hub of datasets on this machine: what huggingface_hub asks of the real one to read files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.stores.web import serving

COMMIT = "0" * 40


class _Hub(BaseHTTPRequestHandler):
    """Serves OWNER/NAME folders below `root`, each with one commit."""

    root: Path

    def do_GET(self) -> None:
        kind, *parts = urlsplit(self.path).path.strip("/").split("/")
        if kind == "api":
            self._answer_api(self.root.joinpath(*parts[1:3]), parts[3:])
        else:  # OWNER/NAME/resolve/REVISION/PATH
            self._send_file(self.root.joinpath(*parts[:2], *parts[4:]))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._send(404, b"{}")

    def _answer_api(self, folder: Path, asked: list[str]) -> None:
        """Facts of a dataset, or the list of a folder in it."""
        below = folder.joinpath(*asked[2:])
        if folder == self.root or not below.is_dir():
            self._send(404, b"{}", X_Error_Code="EntryNotFound")
        elif asked[:1] == ["tree"]:
            self._send_json([_entry(path, folder) for path in sorted(below.iterdir())])
        else:
            files = [path for path in folder.rglob("*") if path.is_file()]
            siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
            name = str(folder.relative_to(self.root))
            self._send_json({"id": name, "sha": COMMIT, "siblings": siblings})

    def _send_file(self, path: Path) -> None:
        if path.is_file():
            self._send(200, path.read_bytes(), ETag='"1"', X_Repo_Commit=COMMIT)
        else:
            self._send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    kind = "file" if path.is_file() else "directory"
    size = path.stat().st_size
    name = str(path.relative_to(folder))
    return {"type": kind, "oid": COMMIT, "size": size, "path": name}


@contextmanager
def hub(root: Path) -> Iterator[str]:
    """The address of a hub with the datasets OWNER/NAME below a folder."""
    handler = type("Handler", (_Hub,), {"root": root})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"
