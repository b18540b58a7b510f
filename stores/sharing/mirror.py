"""A part of a workspace at a URL: immutable files, and numbered versions that name them.

    <part>/versions/<number>.json   the files of a version; created, never replaced
           files/<token>-<name>     their content, under a name that no other upload has

Version n+1 is created on the condition that it does not exist, by a writer that began with version n. So
of two machines one is told that it came too late, whichever slept, died or has a wrong clock, and nothing
that a version names is changed. No lock and no clock is needed for that.

What may be removed: a writer lists `files/`, creates version n+1, and removes from that list what neither n+1
nor n names. A file of the list was uploaded before version n+1 existed, for a version whose number is n+1 at
most: all of these exist, or existed. A version names only files of the version before it, and files that were
uploaded after that one existed. So no version after n+1 can name what is removed. A reader whose file
vanishes reads the latest version again.

For deletion, a writer creates version n+1 even if nothing has changed, and removes what n alone names as
well: then the URL holds the files of n+1 and no others.
"""

import logging
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
from vlmdistill.stores.backends.local import atomic_write, locked
from vlmdistill.stores.errors import DataError, LostError, StoreError, one_line
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.manifest import Count, Record, Short, seal, unseal
from vlmdistill.stores.schema import SCHEMA_VERSION

VERSIONS, FILES = "versions", "files"
TOKEN = r"[0-9a-f]{16}"
DIGITS = 12  # of a number in a name
WRITERS = 1000  # that a version remembers
TRIES = 9
ASIDE = ".aside-"  # begins the folder of local files that another machine's version has replaced
log = logging.getLogger("vlmdistill.stores")

Stat = tuple[int, int]  # bytes, and the time of the last change in ns


class StoredFile(msgspec.Struct, frozen=True):
    """The content of a file."""

    file: Annotated[
        str, Meta(pattern=rf"\A{TOKEN}-[A-Za-z0-9._=+-]{{1,200}}\Z")
    ]  # below `files/`
    size: Count
    blake3: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Version(Record, frozen=True, kw_only=True):
    """The files of a part at one time."""

    MOST: ClassVar[int] = 1 << 24  # bytes

    schema: Annotated[int, Meta(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    format: Literal["vlmdistill-versions"] = "vlmdistill-versions"
    number: Annotated[int, Meta(ge=1, le=10**DIGITS - 1)]
    writer: Short  # a token, by which a writer recognises its own versions
    host: Short
    files: Mapping[Short, StoredFile]  # by name, relative to the folder
    writers: Mapping[
        Short, int
    ]  # the last version of each writer, of this one and those before it

    @property
    def mark(self) -> tuple[int, str]:
        """What no other version has."""
        return self.number, self.writer

    def wrong(self, name: str) -> str | None:
        """It has the number of its name, and its files lie in the folder of the part."""
        if name != _name(self.number):
            return f"it is version {self.number}"
        odd = [name for name in self.files if not _inside(name)]
        return f"{odd[0]!r} is no file of a part" if odd else None


class VersionedFolder:
    """The versions of one part at a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def latest(self) -> Version | None:
        """The version of the highest number; StoreError when it is damaged."""
        while number := max(self._numbers(), default=0):
            name = _name(number)
            with suppress(
                FileNotFoundError
            ):  # it was removed since it was listed: there is a later one
                try:
                    return unseal(
                        self.backend.read(name, Version.MOST + 1), Version, name
                    )
                except ValueError as error:
                    raise StoreError(
                        f"{self.backend.url}/{name} is damaged: {one_line(error)}"
                    ) from None
        return None

    def create(self, version: Version) -> bool:
        """Create a version; whether it is the latest one then, or one that this was built on."""
        self.backend.create(
            _name(version.number), seal(version)
        )  # if false, a reply may have been lost
        return self.has(version)

    def has(self, version: Version) -> bool:
        """Whether a version is the latest one, or one that this was built on."""
        latest = self.latest()
        return (
            latest is not None and latest.writers.get(version.writer) == version.number
        )

    def listed(self) -> list[str]:
        """All stored contents."""
        return [*self.backend.list_files(FILES)]

    def upload(self, name: str, path: Path) -> StoredFile:
        """Copy a local file that is not written to meanwhile. FileNotFoundError if it is gone."""
        leaf = "".join(
            one if (one.isalnum() and one.isascii()) or one in "._=+-" else "_"
            for one in name
        )
        file = f"{secrets.token_hex(8)}-{leaf[-200:]}"
        aside = self.backend.workspace()
        try:
            copy = (
                aside / file if self.backend.is_local else path
            )  # a link there would change with the file
            if copy != path:
                shutil.copyfile(path, copy)
            stored = StoredFile(file, copy.stat().st_size, _digest(copy))
            self.backend.replace(f"{FILES}/{file}", copy)
        finally:
            self.backend.release(aside)
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

        See the top of this file for what may be in the list.
        """
        kept = {stored.file for version in named for stored in version.files.values()}
        for _ in self.backend.map(
            lambda one: self.backend.remove(f"{FILES}/{one}"), {*listed} - kept
        ):
            pass
        for number in self._numbers():
            if number < min(version.number for version in named):
                self.backend.remove(_name(number))

    def _numbers(self) -> list[int]:
        names = (
            name.removesuffix(".json") for name in self.backend.list_names(VERSIONS)
        )
        return [int(name) for name in names if name.isdecimal() and len(name) == DIGITS]


class Synced(msgspec.Struct, frozen=True):
    """What a local folder was equal to."""

    version: Version | None
    stats: Mapping[str, Stat]  # of the files that are as in the version

    @property
    def files(self) -> Mapping[str, StoredFile]:
        """The files of the version."""
        return self.version.files if self.version else {}


class Mirror:
    """A local folder that holds a part: brought up to date, worked in, and published.

    `keep` says which names belong to the part, and `record` is the file that says what the folder was equal
    to. Not `deep`, the part has the files of the folder itself alone. With `apart`, each file stands for
    itself: where another machine has published a version meanwhile, the changes made here are added to it,
    unless both changed the same file.
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
        self.remote, self.folder, self.record, self.url = (
            VersionedFolder(backend),
            folder,
            record,
            backend.url,
        )
        self._keep, self._apart, self._deep = keep, apart, deep
        self._writer = secrets.token_hex(8)
        self._sent: Synced | None = None  # whose reply has not come

    def update(self) -> None:
        """Make the folder equal to the latest version.

        Changes that were not published stay if no other version was published since; else they are moved
        aside, and a line in the log says where. DataError if the part has vanished at the URL.
        """
        with self._alone():
            self._update()

    def _update(self) -> None:
        for _ in range(TRIES):
            latest, before = self.remote.latest(), self._read()
            if latest is None:
                if before.version is None:
                    return
                raise DataError(
                    f"{self.url} is empty, and {self.folder} has a copy of it: restore it, or move the copy "
                    "away"
                )
            with suppress(
                FileNotFoundError
            ):  # replaced while it was read: the latest version again
                self._take(latest, before)
                return
        raise StoreError(
            f"files of {self.url} are missing: restore them, or remove what is left of it"
        )

    def adopt(self, version: Version | None) -> None:
        """Go on from a version with the files here: `publish` replaces the files of the version by them."""
        with self._alone():
            self._write(Synced(version, {}))

    def _take(self, latest: Version, before: Synced) -> None:
        same = before.version is not None and before.version.mark == latest.mark
        stats, aside, missing = dict[str, Stat](), list[str](), set(latest.files)
        for name, stat in self.here().items():
            stored, untouched = latest.files.get(name), before.stats.get(name) == stat
            if stored and (
                (untouched and before.files.get(name) == stored)
                or _holds(self.folder / name, stored)
            ):
                stats[name] = stat
            elif same or (
                self._apart and stored == before.files.get(name)
            ):  # to be published
                missing.discard(name)
            elif untouched:
                (self.folder / name).unlink()
            else:
                aside.append(name)
        self._move_aside(aside)
        wanted = sorted(missing - stats.keys())

        def fetch(name: str) -> None:
            self.remote.download(latest.files[name], self.folder / name)

        for _ in self.remote.backend.map(fetch, wanted, STREAMS):
            pass
        fetched = {name: stat_of(self.folder / name) for name in wanted}
        stats |= {name: found for name, found in fetched.items() if found}
        self._write(Synced(latest, stats))

    def _move_aside(self, names: Collection[str]) -> None:
        """Move local files out of the way of another machine's version."""
        if names:
            aside = (
                self.record.parent / f"{ASIDE}{secrets.token_hex(4)}" / self.record.stem
            )
            for name in names:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).rename(aside / name)
            log.warning(
                "%s was changed by another machine: %d files of %s that it does not have are now in %s",
                *(self.url, len(names), self.folder, aside),
            )

    def publish(self, delete: bool = False) -> None:
        """Create the next version, of what the folder holds now; nothing if that is the latest one.

        With `delete` it is created anyway, and the URL holds nothing else then. LostError when another
        machine has published a version since: what was done here stays in the folder.
        """
        with self._alone():
            self._publish(delete)

    def set_aside(self) -> list[Path]:
        """The folders of local files that other machines' versions have replaced."""
        return [*self.record.parent.glob(f"{ASIDE}*/{self.record.stem}")]

    def _publish(self, delete: bool) -> None:
        base = self._read()
        if self._sent and self._sent.version and self.remote.has(self._sent.version):
            base = self._sent
            self._write(base)
        self._sent = None
        for _ in range(TRIES):
            here = self.here()
            same = [name for name in here if self._equal(name, here[name], base)]
            files, stats = (
                {name: base.files[name] for name in same},
                {name: here[name] for name in same},
            )
            unchanged = files.keys() == here.keys() == base.files.keys()
            listed = self.remote.listed() if delete or not unchanged else []
            if unchanged and not (delete and (base.version or listed)):
                return
            for name, stored in self._upload(
                [name for name in here if name not in files]
            ):
                files[name], stats[name] = stored, here[name]
            version = self._next(base.version, files)
            self._sent = Synced(version, stats)
            if self.remote.create(version):
                self._write(self._sent)
                self._sent = None
                if delete:
                    self.remote.collect(listed, [version])
                    return
                with suppress(OSError):  # then the next version's writer removes them
                    self.remote.collect(
                        listed, [one for one in (base.version, version) if one]
                    )
                return
            self._sent = None
            base = self._after(base, version, stats)
        raise StoreError(
            f"{self.url} is written to by too many others at once: run it again"
        )

    def _equal(self, name: str, stat: Stat, base: Synced) -> bool:
        """Whether a local file is as in the version that the folder was equal to."""
        stored = base.files.get(name)
        return stored is not None and (
            base.stats.get(name) == stat or _holds(self.folder / name, stored)
        )

    def _upload(self, names: Collection[str]) -> Iterator[tuple[str, StoredFile]]:
        def one(name: str) -> StoredFile | None:
            with suppress(FileNotFoundError):  # removed meanwhile
                return self.remote.upload(name, self.folder / name)
            return None

        for name, stored in zip(
            names, self.remote.backend.map(one, names, STREAMS), strict=True
        ):
            if stored:
                yield name, stored

    def _next(self, base: Version | None, files: Mapping[str, StoredFile]) -> Version:
        number = base.number + 1 if base else 1
        writers = {**(base.writers if base else {}), self._writer: number}
        latest = sorted(writers, key=lambda one: writers[one])[-WRITERS:]
        return Version(
            number=number,
            writer=self._writer,
            host=socket.gethostname()[:300],
            files=files,
            writers={one: writers[one] for one in latest},
        )

    def _after(self, base: Synced, mine: Version, stats: Mapping[str, Stat]) -> Synced:
        """What to build on, where another writer's version came first."""
        latest = self.remote.latest()
        if (latest and latest.mark) == (
            base.version and base.version.mark
        ):  # the other writer has failed
            return base
        changed = {
            name
            for name in {*mine.files, *base.files}
            if mine.files.get(name) != base.files.get(name)
        }
        theirs = latest.files if latest else {}
        expected = {
            name: (base.files.get(name), mine.files.get(name)) for name in changed
        }  # both may remove
        if not self._apart or any(
            theirs.get(name) not in some for name, some in expected.items()
        ):
            who = (
                f"{latest.host}, version {latest.number}"
                if latest
                else "its versions are gone"
            )
            raise LostError(
                f"{self.url} was changed by another machine ({who}): what was done here since is not part of "
                f"it, and is kept in {self.folder}; run again to go on from the other's work"
            )
        # The changed files become local changes to the latest version: `publish` uploads them again.
        for name in theirs.keys() - changed:
            if theirs[name] != base.files.get(name):
                self.remote.download(theirs[name], self.folder / name)
        for name in base.files.keys() - theirs.keys() - changed:
            (self.folder / name).unlink(missing_ok=True)
        here = self.here()
        synced = Synced(
            latest, {name: here[name] for name in here.keys() & theirs.keys() - changed}
        )
        self._write(synced)
        return synced

    def here(self) -> dict[str, Stat]:
        """The local files of the part."""
        found = {}
        for path in self.folder.glob("**/*" if self._deep else "*"):
            name = path.relative_to(self.folder).as_posix()
            if self._keep(name) and (stat := stat_of(path)):
                found[name] = stat
        return found

    def _alone(self) -> AbstractContextManager[int]:
        """Lock the folder against other processes of this machine."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
        return locked(self.record.with_suffix(".lock"), wait=True)

    def _read(self) -> Synced:
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=Synced)
        except (
            FileNotFoundError,
            msgspec.DecodeError,
        ):  # then files are compared by their content
            return Synced(None, {})

    def _write(self, synced: Synced) -> None:
        with atomic_write(self.record) as new:
            new.write_bytes(msgspec.json.encode(synced))


def stat_of(path: Path) -> Stat | None:
    """Size and time of a regular file; None if there is none."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (info.st_size, info.st_mtime_ns) if path.is_file() else None


def _holds(path: Path, stored: StoredFile) -> bool:
    """Whether a local file has this content."""
    return path.stat().st_size == stored.size and _digest(path) == stored.blake3


def _digest(path: Path) -> str:
    return (
        blake3.blake3(max_threads=blake3.blake3.AUTO)
        .update_mmap(regular(path))
        .hexdigest()
    )


def _inside(name: str) -> bool:
    """Whether a name is a path below a folder on every system."""
    return not {"", ".", ".."} & {*name.split("/")} and not any(
        one in name for one in "\\\0"
    )


def _name(number: int) -> str:
    return f"{VERSIONS}/{number:0{DIGITS}d}.json"
