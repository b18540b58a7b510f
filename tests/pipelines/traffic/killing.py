"""Commands as processes of their own, which die where they publish a file, and marked bytes on a disk."""

import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from s3fs import S3FileSystem

from tests.pipelines.traffic.conftest import asked, data_url, said, write
from vlmdistill.cli.main import main
from vlmdistill.stores.backends.remote import Remote

PUBLISHING = ("rename", "replace", "link", "unlink")  # functions of `os`
SENDING = ("create", "replace", "_put", "remove")  # methods of a remote backend
MARK = "Zebedee bounces past the roundabout"
ANSWER = "There is a marmalade machine behind the carousel, and it is number {}."
HASHES = re.compile(r"[0-9a-f]{8,}|[0-9]{4,}[0-9-]*")
DAY = 86400
EXCHANGES = 24
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.pipelines.traffic.imported"])


class Bucket:
    """A bucket of a server, which has the workspace, and another one with the log."""

    def __init__(self, server: str) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": server,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "VLMDISTILL_RUNS": "s3://workspace/runs",
        }
        self._files = S3FileSystem(
            key="x", secret="x", endpoint_url=server, use_listings_cache=False
        )
        for name in ("workspace", "logs"):
            self._files.mkdir(name)

    def put_log(self, log: Path) -> None:
        self._files.put_file(str(log), "logs/day.jsonl")

    def load(self, folder: Path) -> None:
        """Make its objects those of a folder."""
        for name in self._files.find("workspace"):
            self._files.rm_file(name)
        for file in folder.rglob("*"):
            if file.is_file():
                self._files.pipe_file(
                    f"workspace/{file.relative_to(folder)}", file.read_bytes()
                )

    def save(self, folder: Path) -> None:
        """Copy its objects into a folder."""
        shutil.rmtree(folder, ignore_errors=True)
        for name in self._files.find("workspace"):
            file = folder / name.removeprefix("workspace/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self._files.cat_file(name))


@dataclass(frozen=True)
class Disk:
    """The folders that a machine writes into and, of a workspace at a URL, a copy of the bucket."""

    folder: Path
    bucket: Bucket | None = None

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def copy(self, name: str) -> "Disk":
        """The disk in its present state, under another name."""
        target = self.folder.with_name(name)
        shutil.copytree(self.folder, target)
        return Disk(target, self.bucket)

    def run(self, *command: str, die: int = 0, after: bool = False) -> int:
        """The exit status of a command, which is killed at the publication of that number."""
        environment = {"VLMDISTILL_RUNS": str(self.runs)}
        if self.bucket:
            environment |= self.bucket.environment
            self.bucket.load(self.folder / "bucket")
        process = CONTEXT.Process(
            target=_run, args=(self.folder, environment, command, die, after)
        )
        process.start()
        process.join()
        if self.bucket:
            self.bucket.save(self.folder / "bucket")
        assert process.exitcode is not None
        return process.exitcode

    def publications(self) -> list[str]:
        """What the last command that was not killed has published, removed or linked, with hashes as '#'."""
        return (self.folder / "publications").read_text().splitlines()


def _run(
    folder: Path,
    environment: Mapping[str, str],
    command: Sequence[str],
    die: int,
    after: bool,
) -> None:
    for variable, name in {"TMPDIR": "tmp", "VLMDISTILL_CACHE": "cache"}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(folder / name)
    os.environ |= environment
    tempfile.tempdir = None
    os.chdir(folder)
    lock, published = threading.Lock(), list[str]()

    def dying(
        function: Callable[..., Any], name: Callable[..., str]
    ) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            with lock:
                published.append(f"{function.__name__} {HASHES.sub('#', name(*given))}")
                mine = len(published) == die
            if mine and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*given, **named)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in PUBLISHING:
        last = dying(
            getattr(os, name),
            lambda *given: os.path.relpath(os.fsdecode(given[-1]), folder),
        )
        setattr(os, name, last)
    for name in SENDING:
        setattr(
            Remote,
            name,
            dying(getattr(Remote, name), lambda there, *given: f"{there.url} {given}"),
        )
    with (folder / "said.txt").open("a") as said_file:
        os.dup2(said_file.fileno(), 1)
        os.dup2(said_file.fileno(), 2)
    status = main(list(command))
    (folder / "publications").write_text("\n".join(published))
    sys.stdout.flush()
    os._exit(status)


def marked_log(folder: Path, first: int = 0) -> Path:
    """Exchanges of 40 days ago, half of them with an image, every text of which has a mark."""
    when = time.time() - 40 * DAY
    lines = [
        {
            "time": when + number,
            "request": asked(
                f"Tell me if {MARK} {number}.", data_url(number) if number % 2 else None
            ),
            "response": said(ANSWER.format(number)),
        }
        for number in range(first, first + EXCHANGES)
    ]
    return write(folder / "day.jsonl", lines)


def marks(encode: Callable[[str], Sequence[int]]) -> list[bytes]:
    """What must not be found: the texts, their tokens, and the images, also in a page."""
    texts = [MARK, ANSWER.partition("{}")[0].strip()]
    tokens = [
        np.asarray(encode(f"- {text}")[3:-1], np.int32).tobytes() for text in texts
    ]
    return [*(text.encode() for text in texts), *tokens, b"data:image", b"IHDR"]


def found(folder: Path, sought: Sequence[bytes]) -> list[str]:
    """The files below a folder that hold one of these, compressed or not."""
    return [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and any(mark in content for content in _contents(file) for mark in sought)
    ]


def _contents(file: Path) -> Iterator[bytes]:
    """The bytes of a file and, of a table, its texts."""
    content = file.read_bytes()
    yield content
    if "tokens" in file.parts:  # of a store: a row of four numbers for each
        yield np.frombuffer(content[: len(content) // 16 * 16], np.int32)[::4].tobytes()
    if content.startswith(b"PAR1") and content.endswith(b"PAR1"):
        import pyarrow.parquet as pq

        yield str(pq.read_table(file).to_pylist()).encode()
    if content.startswith(b"ARROW1") and content.endswith(b"ARROW1"):
        import pyarrow as pa

        yield str(pa.ipc.open_file(file).read_all().to_pylist()).encode()
