"""Deletion by age: samples that were asked too long ago leave a store, and their bytes leave the disk.

Shards are immutable, so a shard with such samples is written again without them, under another name, before
its record is dropped: the other samples are in the store at every moment, whenever a process is killed. A
reader of the old shard finds its files gone, and says so; one that begins later sees the new one. Leftovers
of killed writers may hold any sample, so all of them go. It is an error if another process still writes to
some file.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import polars as pl
from msgspec.structs import replace

from vlmdistill.stores.backends.backend import Backend, writing
from vlmdistill.stores.backends.clock import SKEW, beyond
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.commits import LEDGER
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.arrow import frame_of, read_arrow
from vlmdistill.stores.index.tables import read_table, write_table
from vlmdistill.stores.integrity.gc import collect_all
from vlmdistill.stores.manifest import (
    CACHE,
    INDEX,
    STATS,
    STORE,
    VIEWS,
    RunRecord,
    TableRecord,
    ViewRecord,
    commit_name,
    record_names,
)
from vlmdistill.stores.schema import TIME, utc
from vlmdistill.stores.sharing.transfer import copy_shard
from vlmdistill.stores.store import Store


@dataclass(frozen=True)
class Expired:
    """The samples and files that were deleted, or would be on a dry run."""

    keys: frozenset[str]
    untimed: int  # samples that stay, since nothing says when they were asked
    removed: Mapping[str, int]  # files and folders, and the bytes of each


@dataclass(frozen=True)
class _Outdated:
    """A shard with samples that must go: their lines of its index, and the others."""

    shard: str
    old: pl.DataFrame
    rest: pl.DataFrame


def time_of(store: Store) -> float:
    """The time by which samples are too old, in seconds since 1970.

    Of a store on a disk, StoreError when the clock is far beyond its newest file, see `backends.clock`.
    """
    backend = store.backend
    if not isinstance(backend, Local):
        return backend.now()
    now = time.time()
    files = (backend.root / name for name in backend.list_files(""))
    why = beyond(now, files, confirmed=backend.root / STORE)
    if why:
        raise StoreError(
            f"{why} of {store.path}: if it is right, `touch {store.path}/store.json` and repeat"
        )
    return now


def require_past(store: Store, now: float) -> None:
    """StoreError if samples were asked in the future: no deletion by age would ever reach them."""
    if TIME not in store.index.columns:
        return
    future = store.index.filter(pl.col(TIME) > now + SKEW)[TIME]
    if len(future):
        raise StoreError(
            f"{len(future)} samples stay that were asked in the future, such as on {utc(future[0])}: a clock "
            "was wrong at their harvest, or is now"
        )


def expire(
    store: Store, before: float, *, keys: Iterable[str] = (), dry_run: bool = False
) -> Expired:
    """Delete the samples that were asked before a time (seconds since 1970), and those of some `keys`.

    Views and statistics forget them first, and leftovers of killed writers go last. StoreError, after
    everything else, when a live writer has locked something in the store, or something cannot be read.
    """
    # An annex first: samples that the store no longer has could not be found in it.
    stores = (*store.annexes, store)
    aged = frozenset(keys).union(*(_aged(each, before) for each in stores))
    outdated = [*_outdated(store, aged)]
    deleted = frozenset(key for shard in outdated for key in shard.old["key"])
    untimed = _untimed(store)
    if dry_run:
        shards = [store.commit(shard.shard).path for shard in outdated]
        sizes = {name: _bytes(store.backend, name) for name in shards}
        for item in collect_all(store, dry_run=True):
            sizes[item.name] = item.bytes
        return Expired(deleted, untimed, sizes)
    removed = dict[str, int]()
    if aged:
        for folder in (VIEWS, STATS):
            for name in record_names(store.backend, folder):
                removed |= _forget(store.backend, folder, name, aged)
    for holder in stores:
        folder = holder.path.removeprefix(store.path).lstrip("/")
        of_holder = outdated if holder is store else [*_outdated(holder, aged)]
        for shard in of_holder:
            for name, size in _drop(holder, shard):
                removed[f"{folder}/{name}".lstrip("/")] = size
    for item in collect_all(store):
        removed[item.name] = item.bytes
    return Expired(deleted, untimed, removed)


def _untimed(store: Store) -> int:
    """The number of samples without a time."""
    if TIME not in store.index.columns:
        return len(store)
    return int(store.index[TIME].null_count())


def _aged(store: Store, before: float) -> set[str]:
    """The keys of samples that were asked before a time; of a key in several shards, by any of them."""
    keys = set[str]()
    for shard in store.shards():
        lines = _lines(store, shard)
        if TIME in lines.columns:
            keys.update(lines.filter(pl.col(TIME) < before)["key"])
    return keys


def _outdated(store: Store, keys: frozenset[str]) -> Iterator[_Outdated]:
    """Each shard with samples of these keys."""
    is_old = pl.col("key").is_in(list(keys))
    for shard in store.shards():
        lines = _lines(store, shard)
        old = lines.filter(is_old)
        if len(old):
            yield _Outdated(shard, old, lines.filter(~is_old))


def _lines(store: Store, shard: str) -> pl.DataFrame:
    """The lines of a shard, with samples that another shard has, too."""
    record = store.commit(shard)
    table = read_arrow(store.backend, f"{record.path}/{INDEX}", record.files[INDEX])
    return frame_of(table).with_columns(shard=pl.lit(shard))


def _drop(store: Store, outdated: _Outdated) -> Iterator[tuple[str, int]]:
    """Write the rest of a shard anew, drop its record, and remove its files and the merged index."""
    backend = store.backend
    shard = outdated.shard
    folder = store.commit(shard).path
    if len(outdated.rest):
        copy_shard(store, store, shard, outdated.rest)
    with writing(backend):
        # The copy first: alone, it would tell of a lost record.
        backend.remove(f"{LEDGER}/{commit_name(shard)}")
        backend.remove(commit_name(shard))
        backend.remove(f"{CACHE}/index.json")
        cached = [f"{CACHE}/{leaf}" for leaf in backend.list_names(CACHE)]
        for name in (folder, *cached):
            with backend.try_lock(name) as locked:
                size = _bytes(backend, name)
                # A file that another process has locked is garbage now, collected at the end.
                if locked and size:
                    backend.remove(name)
                    yield name, size


def _forget(
    backend: Backend, folder: str, name: str, keys: frozenset[str]
) -> dict[str, int]:
    """Write a view or the statistics of a run again without some keys, and remove the table before."""
    kind: type[ViewRecord] | type[RunRecord] = RunRecord
    if folder == VIEWS:
        kind = ViewRecord
    record, table = read_table(backend, kind, name)
    rows = frame_of(table)
    remaining = rows.filter(~pl.col("key").is_in(list(keys)))
    if len(remaining) == len(rows):
        return {}
    changed: TableRecord = record
    if isinstance(record, ViewRecord):
        changed = _recounted(record, remaining["reason"])
    size = _bytes(backend, record.file)
    write_table(backend, changed, remaining)
    backend.remove(record.file)
    return {record.file: size}


def _recounted(view: ViewRecord, reasons: pl.Series) -> ViewRecord:
    """The record of a view with the numbers of these rows."""
    counts = dict(reasons.cast(pl.String).drop_nulls().value_counts().iter_rows())
    return replace(
        view,
        rows=len(reasons),
        kept=reasons.null_count(),
        dropped={reason: counts.get(reason, 0) for reason in view.dropped},
    )


def _bytes(backend: Backend, name: str) -> int:
    return sum(backend.list_files(name).values()) or backend.size(name) or 0
