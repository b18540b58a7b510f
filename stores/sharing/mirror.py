"""A folder at a URL, and local folders that mirror it: immutable files, and numbered versions that name them.

    <url>/versions/<number>.json   the files of a version; created, never replaced
          files/<token>-<name>     their content, under a name that no other upload has

Version n+1 is created on the condition that it does not exist, by a writer that began with version n. So
of two machines one is told that it came too late, whichever slept, died or has a wrong clock, and nothing
that a version names is changed. No lock and no clock is needed for that.

What may be removed: a writer lists `files/`, creates version n+1, and removes from that list the files that
neither n+1 nor n names. A file of the list was uploaded before version n+1 existed, for a version whose
number is n+1 at most: all of these exist, or existed. A version names only files of the version before it,
and files that were uploaded after that one existed. So no version after n+1 can name a removed file. A reader
whose file vanishes reads the latest version again.

For deletion, a writer creates version n+1 even if nothing has changed, and removes the files that n
alone names as well: then the URL holds the files of n+1 and no others. Later versions remember its number:
what another machine has changed since a version before it may hold what was deleted, so it is not published.
"""

import logging
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import blake3
import msgspec
from msgspec import Meta

from vlmdistill.stores.backends.backend import STREAMS, Backend
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.locks import locked
from vlmdistill.stores.errors import (
    DataError,
    LostError,
    StoreError,
    VersionError,
    one_line,
)
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.manifest import Count, Record, Short, seal, unseal
from vlmdistill.stores.schema import SCHEMA_VERSION

VERSIONS = "versions"
FILES = "files"
TOKEN = r"[0-9a-f]{16}"
DIGITS = 12  # of a number in a name
WRITERS = 1000  # that a version remembers
TRIES = 9
ASIDE = ".aside-"  # begins the folder of local files that another machine's version has replaced
log = logging.getLogger("vlmdistill.stores")

Stat = tuple[int, int]  # bytes, and the time of the last change in ns


class StoredFile(msgspec.Struct, frozen=True):
    """The content of a file."""

    file: Annotated[str, Meta(pattern=rf"\A{TOKEN}-[A-Za-z0-9._=+-]{{1,200}}\Z")]
    """Its name below `files/`."""
    size: Count
    blake3: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Version(Record, frozen=True, kw_only=True):
    """The files of the folder at one time."""

    MOST: ClassVar[int] = 1 << 24  # bytes

    schema: Annotated[int, Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    format: Literal["vlmdistill-versions"] = "vlmdistill-versions"
    number: Annotated[int, Meta(ge=1, le=10**DIGITS - 1)]
    writer: Short  # a token, by which a writer recognises its own versions
    host: Short
    files: Mapping[Short, StoredFile]  # by name, relative to the folder
    writers: Mapping[Short, int]
    """The last version of each writer, of this one and those before it."""
    deletion: Count = 0
    """The last version that was made for deletion; 0: none was."""

    @property
    def mark(self) -> tuple[int, str]:
        """Number and writer, which no other version has."""
        return self.number, self.writer

    def wrong(self, name: str) -> str | None:
        """It has the number of its name, and its files lie in the folder."""
        if name != _name(self.number):
            return f"it is version {self.number}"
        for file in self.files:
            if not _inside(file):
                return f"{file!r} is no file of a folder"
        return None


class VersionedFolder:
    """The versions of a folder, and the contents of its files, at a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def latest(self) -> Version | None:
        """The version of the highest number; StoreError when it is damaged."""
        while True:
            numbers = self._numbers()
            if not numbers:
                return None
            # If it was removed since it was listed, there is a later one.
            with suppress(FileNotFoundError):
                return self._read(_name(max(numbers)))

    def _read(self, name: str) -> Version:
        try:
            data = self.backend.read(name, Version.MOST + 1)
            return unseal(data, Version, name)
        except VersionError as error:
            raise VersionError(f"{self.backend.url}/{name} {error}") from None
        except ValueError as error:
            raise StoreError(
                f"{self.backend.url}/{name} is damaged: {one_line(error)}"
            ) from None

    def create(self, version: Version) -> bool:
        """Create a version; whether it is the latest one then, or one that this was built on."""
        # If the result is false, a reply may have been lost.
        self.backend.create(_name(version.number), seal(version))
        return self.has(version)

    def has(self, version: Version) -> bool:
        """Whether a version is the latest one, or one that this was built on."""
        latest = self.latest()
        if latest is None:
            return False
        return latest.writers.get(version.writer) == version.number

    def listed(self) -> list[str]:
        """The names of all stored contents."""
        return [*self.backend.list_files(FILES)]

    def upload(self, name: str, path: Path) -> StoredFile:
        """Copy a local file that is not written to meanwhile. FileNotFoundError if it is gone."""
        file = f"{secrets.token_hex(8)}-{_plain(name)[-200:]}"
        workspace = self.backend.workspace()
        try:
            copy = path
            if self.backend.is_local:  # where a link would change with the file
                copy = workspace / file
                shutil.copyfile(path, copy)
            stored = StoredFile(file, copy.stat().st_size, _digest(copy))
            self.backend.replace(f"{FILES}/{file}", copy)
        finally:
            self.backend.release(workspace)
        return stored

    def download(self, stored: StoredFile, path: Path) -> None:
        """Make a local file hold a content. FileNotFoundError if it is gone; StoreError if it is damaged."""
        name = f"{FILES}/{stored.file}"
        with atomic_write(path) as new:
            self.backend.copy(name, stored.size, new)
            if not _holds(new, stored):
                raise StoreError(
                    f"{self.backend.url}/{name} is damaged: its checksum does not match"
                )

    def collect(self, listed: Collection[str], named: Collection[Version]) -> None:
        """Remove the contents of a list that these versions do not name, and the versions before them.

        See the top of this file for the conditions on the list.
        """
        kept = {stored.file for version in named for stored in version.files.values()}
        self.discard({*listed} - kept)
        first = min(version.number for version in named)
        for number in self._numbers():
            if number < first:
                self.backend.remove(_name(number))

    def discard(self, files: Collection[str]) -> None:
        """Remove contents that no version names."""

        def remove(file: str) -> None:
            self.backend.remove(f"{FILES}/{file}")

        for _ in self.backend.map(remove, files):
            pass

    def _numbers(self) -> list[int]:
        numbers = []
        for name in self.backend.list_names(VERSIONS):
            digits = name.removesuffix(".json")
            if digits.isdecimal() and len(digits) == DIGITS:
                numbers.append(int(digits))
        return numbers


class Synced(msgspec.Struct, frozen=True):
    """The version that a local folder was equal to."""

    version: Version | None
    stats: Mapping[str, Stat]  # of the files that are as in the version

    @property
    def files(self) -> Mapping[str, StoredFile]:
        """The files of the version."""
        return self.version.files if self.version else {}

    def is_before_deletion(self, latest: Version | None) -> bool:
        """Whether a deletion was published since: local changes may hold what it has deleted."""
        number = self.version.number if self.version else 0
        return latest is not None and latest.deletion > number


class Mirror:
    """A local folder that mirrors a versioned folder: brought up to date, worked in, and published.

    Args:
        backend: Where the versioned folder lies.
        folder: The local folder.
        record: The file that says which version the local folder was equal to.
        keep: Which names are mirrored; all others are local.
        apart: Each file stands for itself: where another machine has published a version meanwhile, the local
            changes are added to it, unless both changed the same file, or one of them has deleted.
        deep: Whether folders in the folder are mirrored, too.
    """

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        record: Path,
        keep: Callable[[str], bool] = lambda name: True,
        *,
        apart: bool = False,
        deep: bool = True,
    ) -> None:
        self.remote = VersionedFolder(backend)
        self.folder = folder
        self.record = record
        self.url = backend.url
        self._keep = keep
        self._apart = apart
        self._deep = deep
        self._writer = secrets.token_hex(8)
        self._unconfirmed: Synced | None = None  # a version that may have been created

    def update(self) -> None:
        """Make the folder equal to the latest version.

        Changes that were not published stay if no other version was published since or, where each file
        stands for itself, no deletion; else they are moved aside, and a line in the log says where. DataError
        if the versioned folder has vanished.
        """
        with self._alone():
            for _ in range(TRIES):
                # A file that was replaced while it was read: the latest version again.
                with suppress(FileNotFoundError):
                    self._update()
                    return
            raise StoreError(
                f"files of {self.url} are missing: restore them, or remove the others as well"
            )

    def _update(self) -> None:
        latest = self.remote.latest()
        before = self._read()
        if latest is not None:
            self._take(latest, before)
        elif before.version is not None:
            raise DataError(
                f"{self.url} is empty, and {self.folder} has a copy of it: restore it, or move the copy away"
            )

    def adopt(self, version: Version | None) -> None:
        """Go on from a version with the local files: `publish` replaces the files of the version by them."""
        with self._alone():
            self._write(Synced(version, {}))

    def _take(self, latest: Version, before: Synced) -> None:
        """Make the folder equal to a version, but for changes that are still to be published."""
        published_since = before.version is None or before.version.mark != latest.mark
        adds_up = self._apart and not before.is_before_deletion(latest)
        stats = dict[str, Stat]()
        replaced = list[str]()
        missing = set(latest.files)
        for name, stat in self.local_files().items():
            stored = latest.files.get(name)
            past = before.files.get(name)
            untouched = before.stats.get(name) == stat
            if stored and self._is_equal(name, stored, untouched and past == stored):
                stats[name] = stat
                missing.remove(name)
            elif not published_since or (adds_up and stored == past):
                missing.discard(name)  # a local change, to be published
            elif untouched:
                (self.folder / name).unlink()
            else:
                replaced.append(name)
        self._move_aside(replaced)
        self._fetch(sorted(missing), latest)
        for name in missing:
            stat_there = stat_of(self.folder / name)
            if stat_there:
                stats[name] = stat_there
        self._write(Synced(latest, stats))

    def _is_equal(self, name: str, stored: StoredFile, known: bool) -> bool:
        """Whether a local file has a content; if that is not `known`, the file is read."""
        return known or _holds(self.folder / name, stored)

    def _fetch(self, names: Collection[str], version: Version) -> None:
        def fetch(name: str) -> None:
            self.remote.download(version.files[name], self.folder / name)

        for _ in self.remote.backend.map(fetch, names, STREAMS):
            pass

    def _move_aside(self, names: Collection[str]) -> None:
        """Move local files out of the way of another machine's version."""
        if not names:
            return
        folder = f"{ASIDE}{secrets.token_hex(4)}"
        aside = self.record.parent / folder / self.record.stem
        for name in names:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).rename(aside / name)
        log.warning(
            "%s was changed by another machine: %d files of %s that it does not have are now in %s",
            self.url,
            len(names),
            self.folder,
            aside,
        )

    def publish(self, delete: bool = False) -> None:
        """Create the next version, of the files that the folder has now; nothing if these are the latest one.

        With `delete` it is created anyway, and the URL holds nothing else then. LostError when another
        machine has published a version since: the local changes stay in the folder.
        """
        with self._alone():
            base = self._base()
            for _ in range(TRIES):
                retry_from = self._publish(base, delete)
                if retry_from is None:
                    return
                base = retry_from
            raise StoreError(
                f"{self.url} is written to by too many others at once: run it again"
            )

    @property
    def base(self) -> str:
        """The version that the folder was equal to, in a text; empty before the first one."""
        version = self._read().version
        return f"{version.number} {version.writer}" if version else ""

    def set_aside(self) -> list[Path]:
        """The folders of local files that other machines' versions have replaced."""
        return [*self.record.parent.glob(f"{ASIDE}*/{self.record.stem}")]

    def _base(self) -> Synced:
        """The version to build on: the last own one, if it was created though no reply has come."""
        base = self._read()
        sent = self._unconfirmed
        if sent and sent.version and self.remote.has(sent.version):
            base = sent
            self._write(base)
        self._unconfirmed = None
        return base

    def _publish(self, base: Synced, delete: bool) -> Synced | None:
        """Create a version that follows `base`; if another came first, returns the next base."""
        local = self.local_files()
        files = dict[str, StoredFile]()
        stats = dict[str, Stat]()
        for name, stat in local.items():
            stored = base.files.get(name)
            known = base.stats.get(name) == stat
            if stored and self._is_equal(name, stored, known):
                files[name] = stored
                stats[name] = stat
        unchanged = files.keys() == local.keys() == base.files.keys()
        listed = self.remote.listed() if delete or not unchanged else []
        if unchanged and not delete:
            return None
        changed = [name for name in local if name not in files]
        uploaded = dict(self._upload(changed))
        files |= uploaded
        stats |= {name: local[name] for name in uploaded}
        version = self._next(base.version, files, delete)
        sent = self._unconfirmed = Synced(version, stats)  # until it is recorded
        if not self.remote.create(version):
            self._unconfirmed = None
            with suppress(OSError):
                # They may hold what the other version has deleted.
                self.remote.discard([stored.file for stored in uploaded.values()])
            return self._after(base, version)
        self._write(sent)
        self._unconfirmed = None
        if delete:
            self.remote.collect(listed, [version])
        else:
            with suppress(OSError):  # then the next version's writer removes them
                named = [version, base.version] if base.version else [version]
                self.remote.collect(listed, named)
        return None

    def _upload(self, names: Collection[str]) -> Iterator[tuple[str, StoredFile]]:
        def upload(name: str) -> StoredFile | None:
            with suppress(FileNotFoundError):  # removed meanwhile
                return self.remote.upload(name, self.folder / name)
            return None

        uploads = self.remote.backend.map(upload, names, STREAMS)
        for name, stored in zip(names, uploads, strict=True):
            if stored:
                yield name, stored

    def _next(
        self, base: Version | None, files: Mapping[str, StoredFile], delete: bool
    ) -> Version:
        number = base.number + 1 if base else 1
        last_deletion = base.deletion if base else 0
        writers = dict(base.writers) if base else {}
        writers[self._writer] = number
        latest = sorted(writers, key=lambda writer: writers[writer])[-WRITERS:]
        return Version(
            number=number,
            writer=self._writer,
            host=socket.gethostname()[:300],
            files=files,
            writers={writer: writers[writer] for writer in latest},
            deletion=number if delete else last_deletion,
        )

    def _after(self, base: Synced, own: Version) -> Synced:
        """The version to build on, where another writer's version came before the `own`.

        LostError when it cannot be built on.
        """
        latest = self.remote.latest()
        latest_mark = latest and latest.mark
        base_mark = base.version and base.version.mark
        if latest_mark == base_mark:  # the other writer has failed
            return base
        names = {*own.files, *base.files}
        changed = {
            name for name in names if own.files.get(name) != base.files.get(name)
        }
        other_files = latest.files if latest else {}
        # A deletion has not looked at the other's files, nor has the other's deletion at these.
        has_deletion = own.deletion == own.number or base.is_before_deletion(latest)
        adds_up = self._apart and not has_deletion
        if not adds_up or self._conflicts(changed, base, own, other_files):
            writer = "its versions are gone"
            if latest:
                writer = f"{latest.host}, version {latest.number}"
            raise LostError(
                f"{self.url} was changed by another machine ({writer}): the changes made here since are not "
                f"in it, and are kept in {self.folder}; run again to go on from the other's work"
            )
        # The changed files become local changes to the latest version: `publish` uploads them again.
        for name in other_files.keys() - changed:
            if other_files[name] != base.files.get(name):
                self.remote.download(other_files[name], self.folder / name)
        for name in base.files.keys() - other_files.keys() - changed:
            (self.folder / name).unlink(missing_ok=True)
        local = self.local_files()
        same = local.keys() & other_files.keys() - changed
        synced = Synced(latest, {name: local[name] for name in same})
        self._write(synced)
        return synced

    def _conflicts(
        self,
        changed: Collection[str],
        base: Synced,
        own: Version,
        other_files: Mapping[str, StoredFile],
    ) -> bool:
        """Whether another version has changed one of these files, and not in the same way as the own one."""
        for name in changed:
            harmless = (base.files.get(name), own.files.get(name))  # both may remove it
            if other_files.get(name) not in harmless:
                return True
        return False

    def local_files(self) -> dict[str, Stat]:
        """The local files that are mirrored."""
        stats = {}
        for path in self.folder.glob("**/*" if self._deep else "*"):
            name = path.relative_to(self.folder).as_posix()
            if not self._keep(name):
                continue
            stat = stat_of(path)
            if stat:
                stats[name] = stat
        return stats

    def _alone(self) -> AbstractContextManager[int]:
        """Lock the folder against other processes of this machine."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
        return locked(self.record.with_suffix(".lock"), wait=True)

    def _read(self) -> Synced:
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=Synced)
        except (FileNotFoundError, msgspec.DecodeError):
            return Synced(None, {})  # files are compared by their content

    def _write(self, synced: Synced) -> None:
        with atomic_write(self.record) as new:
            new.write_bytes(msgspec.json.encode(synced))


def stat_of(path: Path) -> Stat | None:
    """Size and time of a regular file; None if it is missing or not regular."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (info.st_size, info.st_mtime_ns) if path.is_file() else None


def _holds(path: Path, stored: StoredFile) -> bool:
    """Whether a local file has this content."""
    return path.stat().st_size == stored.size and _digest(path) == stored.blake3


def _digest(path: Path) -> str:
    state = blake3.blake3(max_threads=blake3.blake3.AUTO)
    return state.update_mmap(regular(path)).hexdigest()


def _inside(name: str) -> bool:
    """Whether a name is a path below a folder on every system."""
    if {"", ".", ".."} & {*name.split("/")}:
        return False
    return "\\" not in name and "\0" not in name


def _plain(name: str) -> str:
    """A name with other characters than letters, digits and . _ = + - replaced."""
    return re.sub(r"[^A-Za-z0-9._=+-]", "_", name)


def _name(number: int) -> str:
    return f"{VERSIONS}/{number:0{DIGITS}d}.json"
