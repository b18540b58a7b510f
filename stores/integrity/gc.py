"""Garbage collection: remove what no record names, no live process has locked, and is a day old."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vlmdistill.stores.backends.backend import STAGING, Backend
from vlmdistill.stores.commits import KEPT, complete_ledger, find_naming, require_all
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import (
    CACHE,
    HEADS,
    SHARDS,
    STATS,
    VIEWS,
    CacheRecord,
    Commit,
    TableRecord,
    find_record,
    kind_of,
    record_names,
)
from vlmdistill.stores.store import Store

GRACE = 24 * 3600.0  # seconds
HASH = "[0-9a-f]{16}"
WRITTEN = re.compile(  # names that writers give: any other file is the user's own
    rf"shards/.+-{HASH}|heads/{HASH}|(views|stats)/.+-{HASH}\.arrow|cache/index(\.json|-{HASH}\.arrow)"
    rf"|staging/((copy|probe|removed)-)?{HASH}"
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
    """Remove garbage untouched for `grace` seconds; returns what was removed, or would be on a `dry_run`.

    StoreError when a record is lost or damaged: what it names looks like garbage then, so nothing is
    removed. StoreError also, after everything else is removed, when something cannot be removed.
    """
    return _collect(store, grace, dry_run)[0]


def collect_all(store: Store, *, dry_run: bool = False) -> list[Removed]:
    """Remove all garbage, however new: for deletion, since what killed writers have left holds samples.

    StoreError also, after all else is removed, when a live process holds some, and when a shard is missing,
    so that none may be removed. At a URL nothing is held: a writer whose files vanish writes them again.
    """
    removed, held = _collect(store, 0.0, dry_run)
    if held and not dry_run:
        raise StoreError(
            f"{len(held)} things in {store.path} are still written to, such as {held[0]}: run it again when "
            "that has ended"
        )
    return removed


def _collect(
    store: Store, grace: float, dry_run: bool
) -> tuple[list[Removed], list[str]]:
    """The garbage of a store and of its annexes: what was removed, and what stays since it is held."""
    removed, held = _collect_one(store, grace, dry_run)
    for annex in store.annexes:
        inside = annex.path.removeprefix(f"{store.path}/")
        garbage, names = _collect_one(annex, grace, dry_run)
        removed += [Removed(f"{inside}/{one.name}", one.bytes) for one in garbage]
        held += [f"{inside}/{name}" for name in names]
    return removed, held


def _collect_one(
    store: Store, grace: float, dry_run: bool
) -> tuple[list[Removed], list[str]]:
    backend = store.backend
    names = [
        f"{folder}/{name}.json"
        for folder in KEPT
        for name in record_names(backend, folder)
    ]
    there = backend.map(lambda name: find_record(backend, name, kind_of(name)), names)
    records = [record for record in there if record]
    missing = _missing_shard(backend, records)
    if missing:
        log.warning(
            "%s is missing: no shard is removed, since one may be it, renamed", missing
        )
    unnamed = _unnamed(backend, store.record.head.file, records)
    garbage = [name for name in unnamed if WRITTEN.fullmatch(name)]
    held = [name for name in garbage if missing and name.startswith(f"{SHARDS}/")]
    garbage = [name for name in garbage if name not in held]
    require_all(backend)
    if not dry_run:
        complete_ledger(backend, records)
    found, refused = list[Removed](), list[str]()
    for name in garbage:
        try:
            with backend.try_lock(name) as locked:
                if not locked:
                    held.append(name)
                    continue
                if grace and backend.seconds_idle(name) < grace:
                    continue
                # A record may have come since. Under the lock no local writer can commit it now; others renew
                # the age of a shard before they do.
                if name.split("/")[0] in (SHARDS, VIEWS, STATS) and find_naming(
                    backend, name
                ):
                    continue
                linked = bool(backend.links(name))
                size = (
                    0
                    if linked
                    else sum(backend.list_files(name).values())
                    or backend.size(name)
                    or 0
                )
                if not dry_run:
                    backend.remove(name)
                found.append(Removed(name, size))
        except PermissionError as error:
            refused.append(f"{name}: {error.strerror or error}")
    folders = {one.name.split("/")[0] for one in found}
    remaining = {
        f"{folder}/{leaf}" for folder in folders for leaf in backend.list_names(folder)
    }
    removed = [one for one in found if dry_run or one.name not in remaining]
    if refused:
        what = f"{len(refused)} things in {backend.url} could not be removed, the first {refused[0]}"
        raise StoreError(
            f"{what}. {len(removed)} others were: check the permissions and run it again"
        )
    return removed, held


def _missing_shard(backend: Backend, records: Iterable[Commit | TableRecord]) -> str:
    """A shard that a record names and that is not there; empty if there is none."""
    stored = {f"{SHARDS}/{leaf}" for leaf in backend.list_names(SHARDS)}
    named = {record.named for record in records if isinstance(record, Commit)}
    return min(named - stored, default="")


def _unnamed(
    backend: Backend, head: str, records: Iterable[Commit | TableRecord]
) -> Iterator[str]:
    """What no record names."""
    records = list(records)
    named = {head.rpartition("/")[0], *(record.named for record in records)}
    folders = {record.folder for record in records if isinstance(record, Commit)}
    kept: tuple[str, ...] = ()
    with contextlib.suppress(StoreError, OSError):
        cache = find_record(backend, f"{CACHE}/index.json", CacheRecord)
        if cache and folders.issuperset(cache.shards.values()):
            kept = "index.json", cache.file.rpartition("/")[2]
    for folder in (SHARDS, HEADS, VIEWS, STATS, STAGING):
        there = [f"{folder}/{leaf}" for leaf in backend.list_names(folder)]
        yield from (name for name in there if name not in named)
    # A cache that names shards that are gone is not used. Its record goes before what that names.
    yield from (
        f"{CACHE}/{leaf}"
        for leaf in reversed(backend.list_names(CACHE))
        if leaf not in kept
    )
