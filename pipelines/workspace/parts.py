"""A workspace at a URL, and the folder of this machine that has copies of its parts.

    <url>/prompts, responses, drafters/<name>, reports, traffic   parts, see `stores.sharing.mirror`
          images, demo-data, benchmarks                  media of prompts; created, never replaced
          harvested                                      the same, and deleted: a machine sends its own alone
          features                                       the feature store, used where it is
    <cache>/s3/bucket/runs/<model>/                      the folder, under the path of its URL
                           .parts/                       what each part was equal to

A command updates a part when it first asks for it, and publishes what it has changed: responses every minute,
all others at its end. The run of a training publishes its own checkpoints (`drafters.training.saved`).
"""

import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmdistill.pipelines.media.urls import VARIABLE, address, cache, copy_of
from vlmdistill.stores.backends.backend import STREAMS
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError, LostError, one_line
from vlmdistill.stores.lease import leased
from vlmdistill.stores.sharing.mirror import Mirror, stat_of

RECORDS = ".parts"
PROMPTS = ("prompts.parquet", "prompts.skipped.jsonl")
UNSENT = (
    "unsent.json"  # files of this machine that go with the next version of the prompts
)
UNFINISHED = ".unfinished"  # evaluations
PART = re.compile(
    r"responses|reports|traffic|drafters/[^/]+"
)  # with a folder of its own
MEDIA = {
    "prompts": ("images", "demo-data"),
    "reports": ("benchmarks/images", "benchmarks/demo"),
}
EVERY = 60.0  # seconds between two versions of a part that is being written
log = logging.getLogger("vlmdistill.pipelines")


class Parts:
    """The parts of a workspace at a URL."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.there = url, folder, Remote(url)
        self._copies = dict[str, Mirror]()
        try:
            (folder / RECORDS).mkdir(
                parents=True, exist_ok=True
            )  # so that `parts_of` finds it
        except OSError as error:
            raise DataError(
                f"{folder}, the copy of {url}, cannot be written to ({error.strerror}): set {VARIABLE} to "
                "another folder"
            ) from None

    def fetch(self, part: str, again: bool = False) -> None:
        """Update the copy of a part, once in this process, or `again`."""
        if again or part not in self._copies:
            copy = self._copy(part)
            with self._reaching("read"):
                copy.update()
            self._copies[part] = copy

    def _copy(self, part: str) -> Mirror:
        there, record = (
            Remote(f"{self.url}/{part}"),
            self.folder / RECORDS / f"{part.replace('/', '--')}.json",
        )
        if part == "prompts":
            return Mirror(there, self.folder, record, PROMPTS.__contains__, deep=False)
        return Mirror(there, self.folder / part, record, _kept, apart=part == "reports")

    def part_of(self, path: Path) -> str | None:
        """The part that a file or folder of this machine is; None if it is of none."""
        name = Path(os.path.relpath(path, self.folder)).as_posix()
        return "prompts" if name in PROMPTS else name if PART.fullmatch(name) else None

    @contextmanager
    def writing(self, part: str, wait: bool = False) -> Iterator["Publishing"]:
        """Lock a part against other machines, update it, and publish it at the end; see `leased`."""
        with self._reaching("written to"):
            self._require_exclusive()
            lease = leased(self.there, f"{part}/lock", wait)
            lease.__enter__()
        try:
            self._copies.pop(part, None)
            self.fetch(part)
            publishing = Publishing(self, part)
            try:
                yield publishing
            finally:
                self.publish(part, publishing.deletes)
        finally:
            lease.__exit__(None, None, None)

    def _require_exclusive(self) -> None:
        """DataError at a store that cannot create a file on the condition that there is none."""
        probe = f".probe-{os.getpid()}-{time.time_ns()}"
        self.there.create(probe, b"")
        self.there.remove(probe)
        if not self.there.exclusive:
            raise DataError(
                f"{self.url}: this object store has no conditional PUT, so machines could overwrite each "
                "other's work: keep the workspace on S3, Google Cloud Storage or Azure"
            )

    def set_aside(self, part: str) -> list[Path]:
        """Folders of files of a part here that another machine's version has replaced."""
        return self._copy(part).set_aside()

    def publish(self, part: str, delete: bool = False) -> None:
        """Publish what has changed in a part here; with `delete`, nothing else of it stays at the URL.

        LostError if another machine has published meanwhile.
        """
        if part not in self._copies:  # the work on it came too late
            return
        with self._reaching("written to"):
            for folder in MEDIA.get(part, ()):
                self._send_media(folder)
            if part == "prompts":
                self._send_noted()
            try:
                self._copies[part].publish(delete)
            except LostError:  # which another attempt would not change
                del self._copies[part]
                raise

    def send_later(self, names: Iterable[str]) -> None:
        """Note media that other machines may delete: the next version of the prompts sends them, once.

        All else in their folder is a copy, which may be of what is deleted there.
        """
        with atomic_write(self.folder / RECORDS / UNSENT) as file:
            file.write_text(json.dumps(sorted({*self._unsent(), *names})))

    def _unsent(self) -> list[str]:
        file = self.folder / RECORDS / UNSENT
        return list(json.loads(file.read_text())) if file.is_file() else []

    def _send_noted(self) -> None:
        if noted := set(self._unsent()):
            for folder in {name.partition("/")[0] for name in noted}:
                self._send_media(folder, noted)
            (self.folder / RECORDS / UNSENT).unlink()

    def _send_media(self, folder: str, names: Collection[str] | None = None) -> None:
        """Create the files of a folder, or of these names, that are not there.

        DataError if another one has the same name.
        """
        here = {
            name: stat
            for path in (self.folder / folder).rglob("*")
            if not path.name.startswith(".") and (stat := stat_of(path))
            if (name := path.relative_to(self.folder).as_posix())
            and (names is None or name in names)
        }
        there = (
            {
                f"{folder}/{name}": size
                for name, size in self.there.list_files(folder).items()
            }
            if here
            else {}
        )
        other = [
            name for name, stat in here.items() if there.get(name, stat[0]) != stat[0]
        ]
        if other:
            raise DataError(
                f"{self.url}/{other[0]} is another file than {self.folder / other[0]}: rename one of the two"
            )

        def send(name: str) -> None:
            self.there.replace(name, self.folder / name)

        for _ in self.there.map(send, sorted(here.keys() - there.keys()), STREAMS):
            pass

    def close(self) -> None:
        """Publish what this process has changed in any part. DataError when that is not possible."""
        for part in [*self._copies]:
            self.publish(part)
        self._copies.clear()

    @contextmanager
    def _reaching(self, how: str) -> Iterator[None]:
        """Say that the URL cannot be read or written to, and what becomes of the work here."""
        try:
            yield
        except OSError as error:
            why = (
                f"{error.strerror}: {error.filename}"
                if error.strerror
                else one_line(error)
            )
            unsent = f"; {self.folder} has what was done here, and the next command with this --runs sends it"
            raise DataError(
                f"the workspace {self.url} cannot be {how} ({why}){unsent if how == 'written to' else ''}"
            ) from error


class Publishing:
    """A part that is being written; of a local workspace there is nothing to publish."""

    def __init__(self, parts: Parts | None = None, part: str = "") -> None:
        self._parts, self._part, self._last = parts, part, time.monotonic()
        self.deletes = (
            False  # whether the URL loses all that the last version does not name
        )

    def publish(self) -> None:
        """Publish what is there."""
        if self._parts:
            self._parts.publish(self._part, self.deletes)
            self.deletes = (
                False  # the end has nothing to publish, unless there are more changes
            )

    def save(self) -> None:
        """Publish what is there, if the last version is a minute old. What fails is tried again later.

        LostError if another machine has published meanwhile.
        """
        if self._parts and time.monotonic() - self._last > EVERY:
            try:
                self._parts.publish(self._part)
            except DataError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                log.warning("%s; it is tried again every minute", one_line(error))
            self._last = time.monotonic()


def parts_of(path: Path) -> Parts | None:
    """The parts of the workspace that a path is in the copy of, also in a process that did not open it."""
    full = path.resolve()
    if full.is_relative_to(cache()):
        for folder in full.parents:
            if (folder / RECORDS).is_dir():
                return parts(address(folder))
    return None


_opened = dict[tuple[str, Path], Parts]()


def parts(url: str) -> Parts:
    """The parts of the workspace at a URL, which this process opens once."""
    key = address(copy_of(url)), copy_of(url)
    if key not in _opened:
        _opened[key] = Parts(*key)
    return _opened[key]


def _kept(name: str) -> bool:
    *folders, leaf = name.split("/")
    hidden = any(folder.startswith(".") for folder in folders)
    return not hidden and (not leaf.startswith(".") or leaf.endswith(UNFINISHED))
