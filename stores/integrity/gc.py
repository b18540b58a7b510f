"""Garbage collection: remove files that no record names, no live process has locked, and are a day old."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vlmdistill.stores.backends.backend import STAGING, Backend
from vlmdistill.stores.commits import KEPT, complete_ledger, find_naming, require_all
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import (
    ANNEXES,
    CACHE,
    HEADS,
    SHARDS,
    STATS,
    STORE,
    VIEWS,
    CacheRecord,
    Commit,
    TableRecord,
    find_record,
    kind_of,
    names_in,
    record_names,
)
from vlmdistill.stores.store import Store

GRACE = 24 * 3600.0  # seconds
HASH = "[0-9a-f]{16}"
WRITTEN = re.compile(  # names that writers give: any other file is the user's own
    rf"shards/.+-{HASH}|heads/{HASH}|(views|stats)/.+-{HASH}\.arrow|cache/index(\.json|-{HASH}\.arrow)"
    rf"|(annexes/{HASH}/)?staging/((copy|probe|removed)-)?{HASH}"
)
log = logging.getLogger("vlmdistill.stores")


@dataclass(frozen=True)
class Removed:
    """Garbage that was removed."""

    name: str
    bytes: int


def collect(
    store: Store, *, grace: float = GRACE, dry_run: bool = False
) -> list[Removed]:
    """Remove garbage untouched for `grace` seconds; returns the files, which stay on a `dry_run`.

    StoreError when a record is lost or damaged: its files look like garbage then, so nothing is removed.
    StoreError also, after everything else is removed, when something cannot be removed.
    """
    return _collect(store, grace, dry_run)[0]


def collect_all(store: Store, *, dry_run: bool = False) -> list[Removed]:
    """Remove all garbage, however new: for deletion, since the leftovers of killed writers hold samples.

    StoreError also, after all else is removed, when a live process has locked some, and when a shard is
    missing, so that none may be removed. At a URL there are no locks: a writer whose files vanish writes them
    again.
    """
    removed, locked = _collect(store, 0.0, dry_run)
    if locked and not dry_run:
        raise StoreError(
            f"{len(locked)} things in {store.path} are still written to, such as {locked[0]}: run it again "
            "when that has ended"
        )
    return removed


def _collect(
    store: Store, grace: float, dry_run: bool
) -> tuple[list[Removed], list[str]]:
    """The garbage of a store and of its annexes: the removed files, and the names of those in use."""
    removed, locked = _collect_one(store, grace, dry_run)
    for annex in store.annexes:
        folder = annex.path.removeprefix(f"{store.path}/")
        removed_there, locked_there = _collect_one(annex, grace, dry_run)
        for item in removed_there:
            removed.append(Removed(f"{folder}/{item.name}", item.bytes))
        locked += [f"{folder}/{name}" for name in locked_there]
    return removed, locked


def _collect_one(
    store: Store, grace: float, dry_run: bool
) -> tuple[list[Removed], list[str]]:
    backend = store.backend
    records = _records(backend)
    unnamed = _unnamed(backend, store.record.head.file, records)
    garbage = [name for name in unnamed if WRITTEN.fullmatch(name)]
    locked: list[str] = []
    missing = _missing_shard(backend, records)
    if missing:
        log.warning(
            "%s is missing: no shard is removed, since one may be it, renamed", missing
        )
        locked = [name for name in garbage if name.startswith(f"{SHARDS}/")]
        garbage = [name for name in garbage if name not in locked]
    require_all(backend)
    if not dry_run:
        complete_ledger(backend, records)
    removed = list[Removed]()
    refused = list[str]()
    for name in garbage:
        try:
            with backend.try_lock(name) as is_free:
                if not is_free:
                    locked.append(name)
                elif _is_garbage(backend, name, grace):
                    item = Removed(name, _size(backend, name))
                    if not dry_run:
                        backend.remove(name)
                    removed.append(item)
        except PermissionError as error:
            refused.append(f"{name}: {error.strerror or error}")
    if not dry_run:
        removed = _without_remaining(backend, removed)
    if refused:
        raise StoreError(
            f"{len(refused)} things in {backend.url} could not be removed, the first {refused[0]}. "
            f"{len(removed)} others were: check the permissions and run it again"
        )
    return removed, locked


def _records(backend: Backend) -> list[Commit | TableRecord]:
    names = []
    for folder in KEPT:
        for name in record_names(backend, folder):
            names.append(f"{folder}/{name}.json")
    records = backend.map(lambda name: find_record(backend, name, kind_of(name)), names)
    return [record for record in records if record]


def _is_garbage(backend: Backend, name: str, grace: float) -> bool:
    """Whether a locked file or folder that no record named is old enough, and still not named."""
    if grace and backend.seconds_idle(name) < grace:
        return False
    # A record may have come since. Under the lock no local writer can commit it now; others renew the age of
    # a shard before they do.
    can_be_named = name.split("/")[0] in (SHARDS, VIEWS, STATS)
    return not (can_be_named and find_naming(backend, name))


def _size(backend: Backend, name: str) -> int:
    """Bytes of a file or of all files below a folder; 0 for a link."""
    if backend.links(name):
        return 0
    return sum(backend.list_files(name).values()) or backend.size(name) or 0


def _without_remaining(backend: Backend, removed: Sequence[Removed]) -> list[Removed]:
    """Those that a listing no longer shows."""
    remaining = set[str]()
    for folder in {item.name.split("/")[0] for item in removed}:
        remaining.update(f"{folder}/{leaf}" for leaf in backend.list_names(folder))
    return [item for item in removed if item.name not in remaining]


def _missing_shard(backend: Backend, records: Iterable[Commit | TableRecord]) -> str:
    """A shard that a record names and that does not exist; empty if there is none."""
    stored = {f"{SHARDS}/{leaf}" for leaf in backend.list_names(SHARDS)}
    named = {record.path for record in records if isinstance(record, Commit)}
    return min(named - stored, default="")


def _unnamed(
    backend: Backend, head: str, records: Iterable[Commit | TableRecord]
) -> Iterator[str]:
    """The shards, tables and other files that no record names."""
    records = list(records)
    named = {head.rpartition("/")[0], *(record.path for record in records)}
    for folder in (SHARDS, HEADS, VIEWS, STATS, STAGING):
        for leaf in backend.list_names(folder):
            if f"{folder}/{leaf}" not in named:
                yield f"{folder}/{leaf}"
    # Of an annex that has no record yet, nothing else is written.
    for annex in names_in(backend, ANNEXES):
        folder = f"{ANNEXES}/{annex}"
        if backend.size(f"{folder}/{STORE}") is None:
            for leaf in backend.list_names(f"{folder}/{STAGING}"):
                yield f"{folder}/{STAGING}/{leaf}"
    # The record of a cache goes before its table.
    used = _used_cache(backend, records)
    for leaf in reversed(backend.list_names(CACHE)):
        if leaf not in used:
            yield f"{CACHE}/{leaf}"


def _used_cache(
    backend: Backend, records: Iterable[Commit | TableRecord]
) -> tuple[str, ...]:
    """The files of the merged index; none if it names shards that are gone, so that it is not used."""
    folders = {record.folder for record in records if isinstance(record, Commit)}
    with contextlib.suppress(StoreError, OSError):
        cache = find_record(backend, f"{CACHE}/index.json", CacheRecord)
        if cache and folders.issuperset(cache.shards.values()):
            return "index.json", cache.file.rpartition("/")[2]
    return ()
