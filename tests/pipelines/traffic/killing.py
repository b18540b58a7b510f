"""Commands as processes of their own, which die where they publish a file."""

import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3fs import S3FileSystem

from vlmdistill.cli.main import main
from vlmdistill.stores.backends.remote import Remote

PUBLISHING = ("rename", "replace", "link", "unlink")  # functions of `os`
SENDING = ("create", "replace", "_put", "remove")  # methods of a remote backend
HASHES = re.compile(r"[0-9a-f]{8,}|[0-9]{4,}[0-9-]*")
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

    def elsewhere(self, name: str) -> "Disk":
        """The disk of another machine, which has nothing yet but the same bucket."""
        other = Disk(self.folder.with_name(name), self.bucket)
        other.sees(self)
        return other

    def sees(self, other: "Disk") -> None:
        """What another machine has done with the bucket."""
        shutil.rmtree(self.folder / "bucket", ignore_errors=True)
        shutil.copytree(other.folder / "bucket", self.folder / "bucket")

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
