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
UNSENT = "unsent.json"
"""Names files of this machine that go with the next version of the prompts, and the version before that."""
UNFINISHED = ".unfinished"  # evaluations
PART = re.compile(r"responses|reports|traffic|drafters/[^/]+")
"""Parts with a folder of their own."""
MEDIA = {
    "prompts": ("images", "demo-data"),
    "reports": ("benchmarks/images", "benchmarks/demo"),
}
EVERY = 60.0  # seconds between two versions of a part that is being written
log = logging.getLogger("vlmdistill.pipelines")


class Parts:
    """The parts of a workspace at a URL."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.remote = Remote(url)
        self._mirrors = dict[str, Mirror]()
        try:
            # By this folder, `parts_of` recognises a copy.
            (folder / RECORDS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{folder}, the copy of {url}, cannot be written to ({error.strerror}): set {VARIABLE} to "
                "another folder"
            ) from None

    def fetch(self, part: str, again: bool = False) -> None:
        """Update the copy of a part, once in this process, or `again`."""
        if again or part not in self._mirrors:
            mirror = self._mirror(part)
            with self._reaching("read"):
                mirror.update()
            self._mirrors[part] = mirror

    def _mirror(self, part: str) -> Mirror:
        remote = Remote(f"{self.url}/{part}")
        record = self.folder / RECORDS / f"{part.replace('/', '--')}.json"
        if part == "prompts":
            return Mirror(remote, self.folder, record, PROMPTS.__contains__, deep=False)
        apart = part == "reports"
        return Mirror(remote, self.folder / part, record, _is_shared, apart=apart)

    def part_of(self, path: Path) -> str | None:
        """The part that a file or folder of this machine is; None if it is of none."""
        name = Path(os.path.relpath(path, self.folder)).as_posix()
        if name in PROMPTS:
            return "prompts"
        return name if PART.fullmatch(name) else None

    @contextmanager
    def writing(self, part: str, wait: bool = False) -> Iterator["Publishing"]:
        """Lock a part against other machines, update it, and publish it at the end; see `leased`."""
        with self._reaching("written to"):
            self._require_exclusive()
            lease = leased(self.remote, f"{part}/lock", wait)
            lease.__enter__()
        try:
            self._mirrors.pop(part, None)
            self.fetch(part)
            publishing = Publishing(self, part)
            try:
                yield publishing
            finally:
                self.publish(part, publishing.deletes)
        finally:
            lease.__exit__(None, None, None)

    def _require_exclusive(self) -> None:
        """DataError if the object store cannot create a file only if it does not exist."""
        probe = f".probe-{os.getpid()}-{time.time_ns()}"
        self.remote.create(probe, b"")
        self.remote.remove(probe)
        if not self.remote.exclusive:
            raise DataError(
                f"{self.url}: this object store has no conditional PUT, so machines could overwrite each "
                "other's work: keep the workspace on S3, Google Cloud Storage or Azure"
            )

    def set_aside(self, part: str) -> list[Path]:
        """Folders of files of a part here that another machine's version has replaced."""
        return self._mirror(part).set_aside()

    def publish(self, part: str, delete: bool = False) -> None:
        """Publish the changes of a part; with `delete`, files that it no longer has go from the URL, too.

        LostError if another machine has published meanwhile.
        """
        if part not in self._mirrors:  # never fetched, or lost to another machine
            return
        with self._reaching("written to"):
            for folder in MEDIA.get(part, ()):
                self._send_media(folder)
            if part == "prompts":
                self._send_noted()
            try:
                self._mirrors[part].publish(delete)
            except LostError:  # another attempt would not change it
                del self._mirrors[part]
                raise

    def send_later(self, names: Iterable[str]) -> None:
        """Note media that the next version of the prompts sends, once: other machines may delete them.

        All other files in their folder are copies, perhaps of files that were deleted at the URL.
        """
        noted = {
            "after": self._mirror("prompts").base,
            "names": sorted({*self._unsent(), *names}),
        }
        with atomic_write(self.folder / RECORDS / UNSENT) as file:
            file.write_text(json.dumps(noted))

    def _unsent(self) -> list[str]:
        """The names that were noted; none if another version came first, which may have deleted the files."""
        file = self.folder / RECORDS / UNSENT
        if not file.is_file():
            return []
        noted = json.loads(file.read_text())
        is_next = noted["after"] == self._mirror("prompts").base
        return list(noted["names"]) if is_next else []

    def _send_noted(self) -> None:
        """Send the media that `send_later` has noted."""
        noted = set(self._unsent())
        if not noted:
            return
        for folder in {name.partition("/")[0] for name in noted}:
            self._send_media(folder, noted)
        (self.folder / RECORDS / UNSENT).unlink()

    def _send_media(self, folder: str, names: Collection[str] | None = None) -> None:
        """Create the files of a folder, or those of `names`, that the URL lacks.

        DataError if another one has the same name.
        """
        local_sizes = self._media_sizes(folder)
        if names is not None:
            local_sizes = {
                name: size for name, size in local_sizes.items() if name in names
            }
        if not local_sizes:
            return
        remote_sizes = {
            f"{folder}/{name}": size
            for name, size in self.remote.list_files(folder).items()
        }
        for name, size in local_sizes.items():
            if remote_sizes.get(name, size) != size:
                raise DataError(
                    f"{self.url}/{name} is another file than {self.folder / name}: rename one of the two"
                )

        def send(name: str) -> None:
            self.remote.replace(name, self.folder / name)

        missing = sorted(local_sizes.keys() - remote_sizes.keys())
        for _ in self.remote.map(send, missing, STREAMS):
            pass

    def _media_sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each file in a folder here, by its name in the workspace; hidden ones are left out."""
        sizes = dict[str, int]()
        for path in (self.folder / folder).rglob("*"):
            if path.name.startswith("."):
                continue
            stat = stat_of(path)
            if stat:
                size, *_ = stat
                sizes[path.relative_to(self.folder).as_posix()] = size
        return sizes

    def close(self) -> None:
        """Publish the changes of this process in any part. DataError when that is not possible."""
        for part in [*self._mirrors]:
            self.publish(part)
        self._mirrors.clear()

    @contextmanager
    def _reaching(self, how: str) -> Iterator[None]:
        """DataError if the URL cannot be read or written to, which says what becomes of the work here."""
        try:
            yield
        except OSError as error:
            cause = one_line(error)
            if error.strerror:
                cause = f"{error.strerror}: {error.filename}"
            message = f"the workspace {self.url} cannot be {how} ({cause})"
            if how == "written to":
                message += f"; {self.folder} keeps the work, and the next command with this --runs sends it"
            raise DataError(message) from error


class Publishing:
    """A part that is being written; of a local workspace there is nothing to publish."""

    def __init__(self, parts: Parts | None = None, part: str = "") -> None:
        self._parts = parts
        self._part = part
        self._last = time.monotonic()
        self.deletes = False
        """Whether files that the last version does not name are deleted from the URL."""

    def publish(self) -> None:
        """Publish the changes so far."""
        if self._parts:
            self._parts.publish(self._part, self.deletes)
            # The end has nothing to publish, unless there are more changes.
            self.deletes = False

    def save(self) -> None:
        """Publish the changes so far if the last version is a minute old. A failure is retried later.

        LostError if another machine has published meanwhile.
        """
        if self._parts is None or time.monotonic() - self._last <= EVERY:
            return
        try:
            self._parts.publish(self._part)
        except DataError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            log.warning("%s; it is tried again every minute", one_line(error))
        self._last = time.monotonic()


def parts_of(path: Path) -> Parts | None:
    """The parts of the workspace whose copy holds a path, also in a process that did not open it."""
    full_path = path.resolve()
    if not full_path.is_relative_to(cache()):
        return None
    for folder in full_path.parents:
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


def _is_shared(name: str) -> bool:
    """Whether a file of a part is published: no hidden one, except unfinished evaluations."""
    *folders, leaf = name.split("/")
    if any(folder.startswith(".") for folder in folders):
        return False
    return not leaf.startswith(".") or leaf.endswith(UNFINISHED)
