"""A workspace at a URL: a folder of this machine that is kept equal to it.

    <cache>/s3/bucket/runs/<model>/   the folder, under the path of its URL
        .mirror.json                  files that were equal at both ends: version there, size and time here

A command fetches a part of the workspace when it first asks for it. What changes here is sent every minute,
when a lock is released, and at the end of the command. A file that has changed at both ends is left as it is.
The feature store and the checkpoints of a run are used at their URLs, and images are fetched one by one.
"""

import fcntl
import functools
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from vlmdistill.pipelines.media.urls import VARIABLE, address, cache, copy_of
from vlmdistill.pipelines.workspace.remote_lock import locked
from vlmdistill.stores.backends.backend import BLOCK, STREAMS
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError, VlmdistillError, one_line

PARTS = ("prompts.parquet", "prompts.skipped.jsonl", "responses", "drafters", "reports")
MEDIA = {"prompts.parquet": ("images", "demo-data"), "reports": ("benchmarks/images", "benchmarks/demo")}
ORDER = {"settings.json": 0, "prompts.parquet": 2, "config.json": 2}  # of being sent; of all others 1
RECORD, GUARD = ".mirror.json", ".mirror.lock"
UNFINISHED = ".unfinished"  # evaluations
EVERY = 60.0  # seconds between two sendings
log = logging.getLogger("vlmdistill.pipelines")

Stat = tuple[int, int]  # bytes, and the time of the last change in ns


class Synced(msgspec.Struct, frozen=True):
    """A file that was equal at both ends."""

    version: str  # at the URL
    stat: Stat


def mirror(url: str) -> "Mirror":
    """The one mirror of a URL in this process."""
    return _mirror(address(copy_of(url)), copy_of(url))


@functools.cache
def _mirror(url: str, folder: Path) -> "Mirror":
    return Mirror(url, folder)


def mirror_of(path: Path) -> "Mirror | None":
    """The mirror that a path is in, also in a process that did not open it."""
    full = path.resolve()
    if full.is_relative_to(cache()):
        for folder in full.parents:
            if (folder / RECORD).is_file():
                return mirror(address(folder))
    return None


class Mirror:
    """The folder of a workspace at a URL."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.there = url, folder, Remote(url)
        self._lock = threading.RLock()
        self._fetched, self._present = set[str](), set[str]()
        self._beat: threading.Thread | None = None
        self._end = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._files():
                pass  # so that `mirror_of` finds it
        except OSError as error:
            raise DataError(
                f"{folder}, the copy of {url}, cannot be written to ({error.strerror}): set {VARIABLE} to "
                "another folder"
            ) from None

    def fetch(self, part: str, again: bool = False) -> Path:
        """The path of a file or folder here, which this process has compared once with the URL, or `again`.

        DataError when it has changed at both ends.
        """
        self.start()
        if again or part not in self._fetched:
            with self._reaching("read"), self._files() as files:
                for _ in range(3):  # another machine may send meanwhile
                    if not self._fetch(part, files):
                        break
                self._present |= {name for name in self._here() if _below(name, part)}
            self._fetched.add(part)
        return self.folder / part

    def _fetch(self, part: str, files: dict[str, Synced]) -> int:
        """Take over what has changed at the URL; how many files."""
        there = {name: one for name, one in self.there.versions(part).items() if _kept(name)}
        removed = [name for name in files if _below(name, part) and name not in there]
        if removed and not self.there.list_names(""):
            raise DataError(
                f"the workspace {self.url} is empty, and {self.folder} has copies of it: restore it, or move "
                "them away"
            )
        for name in removed:
            gone = files.pop(name)
            if _stat(self.folder / name) == gone.stat:
                (self.folder / name).unlink()
                with suppress(OSError):  # it holds others
                    (self.folder / name).parent.rmdir()
        wanted, conflicts = list[str](), list[str]()
        for name, version in there.items():
            synced, stat = files.get(name), _stat(self.folder / name)
            if stat and (synced is None or synced.stat != stat):
                if synced and synced.version == version:
                    continue  # to be sent
                if self._same(name):
                    files[name] = Synced(version, stat)
                elif self._yielded(name):
                    wanted.append(name)
                else:
                    conflicts.append(name)
            elif not stat or not synced or synced.version != version:
                wanted.append(name)
        self._refuse(conflicts)
        taken = self.there.map(lambda name: self._take(name, there[name]), wanted, STREAMS)
        for name, one in zip(wanted, taken, strict=True):
            if one:
                files[name] = one
        return len(wanted)

    def _take(self, name: str, version: str) -> Synced | None:
        """Fetch one file; None if it is gone."""
        path, size = copy_of(f"{self.url}/{name}"), self.there.size(name)
        if size is None:
            return None
        with atomic_write(path) as new:
            self.there.copy(name, size, new)
            stat = _stat(new)
            if size > BLOCK and self._version(name) != version:
                raise DataError(f"{self.url}/{name} was replaced while it was fetched: run again")
        return Synced(version, stat or (0, 0))

    def send(self, *parts: str) -> None:
        """Copy what has changed here to the URL, and remove there what was removed of the `parts` here.

        What a file needs is sent before it: the media of prompts, the weights of a drafter's description.
        DataError when a file has changed at both ends; the others are sent.
        """
        with self._reaching("written to"), self._files() as files:
            here = self._here()
            changed = {name for name, stat in here.items() if name not in files or files[name].stat != stat}
            for part, folders in MEDIA.items():
                if any(_below(name, part) for name in changed):
                    for folder in folders:
                        self._send_media(folder)
            there = {name: one for part in PARTS for name, one in self._there(part, changed).items()}
            conflicts = self._conflicts(changed, files, there)
            changed -= conflicts
            changed = {name for name in changed if name not in files or files[name].stat != here[name]}
            for name in _described(changed):  # sent again after the weights
                if name in files and name in there and name in here:
                    del files[name]
                    self._write(files)  # else, after a kill, the next fetch would remove it here, too
                    self.there.remove(name)
                    changed.add(name)
            for turn in (0, 1, 2):
                names = [name for name in changed if ORDER.get(PurePosixPath(name).name, 1) == turn]
                sent = self.there.map(lambda name: self._send(name, files.get(name)), names, STREAMS)
                for name, one in zip(names, sent, strict=True):
                    if isinstance(one, Synced):
                        files[name] = one
                    elif one == "conflict":
                        conflicts.add(name)
            gone = self._present & files.keys() - here.keys()
            for name in gone:
                # Of other parts, a cleaner may have removed it.
                ours = name.endswith(UNFINISHED) or any(_below(name, part) for part in parts)
                if ours and self._version(name) == files.pop(name).version:
                    self.there.remove(name)
            self._present |= here.keys()
            self._refuse(conflicts)

    def _there(self, part: str, changed: set[str]) -> dict[str, str]:
        """The versions at the URL, of a part in which something has changed here."""
        return self.there.versions(part) if any(_below(name, part) for name in changed) else {}

    def _conflicts(self, changed: set[str], files: dict[str, Synced], there: dict[str, str]) -> set[str]:
        """What has changed at both ends, with all of its drafter; equal changes are taken over."""
        conflicts = set[str]()
        for name in (changed | _described(changed)) & there.keys():
            if name not in files or files[name].version != there[name]:
                stat = _stat(self.folder / name)
                if stat and self._same(name):
                    files[name] = Synced(there[name], stat)
                elif (stat or name not in changed) and not self._yielded(name):
                    conflicts.add(name)
        folders = {PurePosixPath(name).parent for name in conflicts if name.startswith("drafters/")}
        return conflicts | {name for name in changed if PurePosixPath(name).parent in folders}

    def _send(self, name: str, synced: Synced | None) -> Synced | Literal["gone", "conflict"]:
        """Send one file, unless it is gone, or has changed at the URL in this very moment."""
        stat = _stat(self.folder / name)
        if stat is None:
            return "gone"
        try:
            if synced is None and stat[0] <= BLOCK:
                if not self.there.create(name, (self.folder / name).read_bytes()) and not self._same(name):
                    return "conflict"
            elif self._version(name) not in (None, synced and synced.version):
                return "conflict"
            else:
                self.there.replace(name, self.folder / name)
        except FileNotFoundError:
            return "gone"
        return Synced(self._version(name) or "", stat)

    def _yielded(self, name: str) -> bool:
        """Whether a log or a response, which another machine has made again, was moved out of the way."""
        path = self.folder / name
        if not (_is_log(name) or name.startswith("responses/part-")):
            return False
        log.warning("%s was made again on another machine: that of %s counts", name, self.url)
        path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.unsent"))
        return True

    def _send_media(self, folder: str) -> None:
        there = self.there.list_files(folder) if (self.folder / folder).is_dir() else {}
        names = [
            f"{folder}/{name}"
            for name, stat in _walk(self.folder / folder)
            if there.get(name) != stat[0] and not _hidden(name)
        ]
        for _ in self.there.map(lambda name: self.there.replace(name, self.folder / name), names, STREAMS):
            pass

    def _version(self, name: str) -> str | None:
        return self.there.versions(name).get(name)

    def _same(self, name: str) -> bool:
        """Whether a file has the same bytes at both ends."""
        path, stat = self.folder / name, _stat(self.folder / name)
        return stat is not None and self.there.size(name) == stat[0] and self.there.same(name, path)

    def _refuse(self, names: Iterable[str]) -> None:
        if conflicts := sorted(names):
            more = f", as have {len(conflicts) - 1} others" if conflicts[1:] else ""
            raise DataError(
                f"{conflicts[0]} has changed both in {self.folder} and in {self.url} since they were equal"
                f"{more}: neither was overwritten; remove one of the two, and run again"
            )

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Lock a part against other machines; it is fetched then, and sent before the lock is released."""
        part = PurePosixPath(os.path.relpath(path, self.folder))
        with ExitStack() as stack:
            with self._reaching("locked"):
                stack.enter_context(locked(self.there, str(part.with_name(f".{part.name}.lock"))))
            parts = [str(part), f"{part}.training"][: 2 if part.parts[0] == "drafters" else 1]
            for one in parts:
                self.fetch(one, again=True)
            try:
                yield
            finally:
                self.send(*parts)

    def start(self) -> None:
        """Send every minute from now on, until `close` or the end of the process."""
        if self._beat is None:
            self._end.clear()
            self._beat = threading.Thread(target=self._beats, name="vlmdistill-mirror", daemon=True)
            self._beat.start()

    def stop(self) -> None:
        """Send no more."""
        self._end.set()
        if self._beat:
            self._beat.join()
        self._beat = None

    def _beats(self) -> None:
        failed = False
        while not self._end.wait(EVERY):
            try:
                self.send()
                failed = False
            except (VlmdistillError, OSError) as error:
                if not failed:
                    log.warning("%s; it is tried again every minute", one_line(error))
                failed = True

    def close(self) -> None:
        """Send the rest. DataError when that is not possible: the folder here has it."""
        self.stop()
        self._fetched.clear()
        self.send()

    @contextmanager
    def _files(self) -> Iterator[dict[str, Synced]]:
        """The files that were equal, for this process alone; what is changed in them is kept."""
        with self._lock, (self.folder / GUARD).open("a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            path = self.folder / RECORD
            try:
                before = msgspec.json.decode(path.read_bytes(), type=dict[str, Synced])
            except FileNotFoundError:
                before = None
            except msgspec.DecodeError:
                before = {}  # then files are compared by their content
            files = {name: one for name, one in (before or {}).items() if _kept(name)}
            try:
                yield files
            finally:
                if files != before:
                    self._write(files)

    def _write(self, files: dict[str, Synced]) -> None:
        with atomic_write(self.folder / RECORD) as new:
            new.write_bytes(msgspec.json.encode(files))

    @contextmanager
    def _reaching(self, how: str) -> Iterator[None]:
        """Say that the URL cannot be read, written to or locked, and what becomes of the work here."""
        try:
            yield
        except OSError as error:
            why = f"{error.strerror}: {error.filename}" if error.strerror else one_line(error)
            unsent = f"; {self.folder} has what was done here, and the next command with this --runs sends it"
            raise DataError(
                f"the workspace {self.url} cannot be {how} ({why}){unsent if how == 'written to' else ''}"
            ) from error

    def _here(self) -> dict[str, Stat]:
        found = dict[str, Stat]()
        for part in PARTS:
            path = self.folder / part
            if path.is_dir():
                found |= {f"{part}/{name}": stat for name, stat in _walk(path)}
            elif stat := _stat(path):
                found[part] = stat
        return {name: stat for name, stat in found.items() if _kept(name)}


def _kept(name: str) -> bool:
    """Whether a file is kept equal: not if it is hidden, or a checkpoint, which a run copies itself."""
    *folders, leaf = parts = name.split("/")
    if parts[0] not in PARTS or "" in parts or "\0" in name or _hidden("/".join(folders)):
        return False
    if _hidden(leaf) and not leaf.endswith(UNFINISHED):
        return False
    of_run = len(parts) > 2 and parts[1].endswith(".training")
    return not (of_run and (parts[2] == "checkpoint.json" or parts[2].startswith("step")))


def _is_log(name: str) -> bool:
    """Whether a file only grows: of an evaluation that was interrupted, or of a training."""
    return name.endswith(UNFINISHED) or ".training/" in name


def _described(changed: Iterable[str]) -> set[str]:
    """The descriptions of the drafters whose weights have changed."""
    weights = [PurePosixPath(name) for name in changed if name.endswith(".safetensors")]
    return {str(path.with_name("config.json")) for path in weights}


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _walk(folder: Path) -> Iterator[tuple[str, Stat]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if stat := _stat(path):
                yield path.relative_to(folder).as_posix(), stat


def _stat(path: Path) -> Stat | None:
    """Size and time of a file; None if it is missing."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return info.st_size, info.st_mtime_ns
