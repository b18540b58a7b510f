"""Deletion by age: samples that were asked too long ago leave a store, and their bytes leave the disk.

Shards are immutable, so a shard with such samples is written again without them, under another name, before
its record is dropped: what stays is in the store at every moment, whatever is killed whenever. A reader of
the old shard finds its files gone, and says so; one that begins later sees the new one. What killed writers
have left may hold any sample, so all of it goes. What another process still writes to is an error.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import polars as pl
from msgspec.structs import replace

from vlmdistill.stores.backends.backend import Backend, writing
from vlmdistill.stores.backends.clock import beyond
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
    VIEWS,
    RunRecord,
    TableRecord,
    ViewRecord,
    commit_name,
    record_names,
)
from vlmdistill.stores.schema import TIME
from vlmdistill.stores.sharing.transfer import copy_shard
from vlmdistill.stores.store import Store


@dataclass(frozen=True)
class Expired:
    """What was deleted, or would be on a dry run."""

    keys: frozenset[str]
    untimed: int  # samples that stay, since nothing says when they were asked
    removed: Mapping[str, int]  # files and folders, and the bytes of each


def time_of(store: Store) -> float:
    """The time by which samples are too old, in seconds since 1970.

    Of a store on a disk, StoreError when the clock is far beyond its newest file, see `backends.clock`.
    """
    backend = store.backend
    if not isinstance(backend, Local):
        return backend.now()
    now = time.time()
    if far := beyond(now, (backend.root / name for name in backend.list_files(""))):
        raise StoreError(
            f"{far} of {store.path}: if it is right, `touch {store.path}/store.json` and repeat"
        )
    return now


def expire(
    store: Store, before: float, *, keys: Iterable[str] = (), dry_run: bool = False
) -> Expired:
    """Delete the samples that were asked before a time (seconds since 1970), and those of some `keys`.

    Views and statistics forget them first, and what killed writers have left goes last. StoreError, after
    everything else, when a live writer holds a part of the store, or one cannot be read.
    """
    parts = (
        *store.annexes,
        store,
    )  # what the store no longer has, an annex could not be asked for
    aged = frozenset(keys).union(*(_aged(part, before) for part in parts))
    old = [*_old(store, aged)]
    gone = frozenset(key for _, rows, _ in old for key in rows["key"])
    times = (
        store.index[TIME]
        if TIME in store.index.columns
        else pl.Series([None] * len(store))
    )
    untimed = int(times.is_null().sum())
    if dry_run:
        shards = [store.commit(shard).named for shard, _, _ in old]
        sizes = {name: _bytes(store.backend, name) for name in shards}
        sizes |= {one.name: one.bytes for one in collect_all(store, dry_run=True)}
        return Expired(gone, untimed, sizes)
    removed = dict[str, int]()
    if aged:
        for folder in (VIEWS, STATS):
            for name in record_names(store.backend, folder):
                removed |= _forget(store.backend, folder, name, aged)
    for part in parts:
        inside = part.path.removeprefix(store.path).lstrip("/")
        for shard, _, rest in old if part is store else [*_old(part, aged)]:
            dropped = _drop(part, shard, rest)
            removed |= {f"{inside}/{name}".lstrip("/"): size for name, size in dropped}
    removed |= {one.name: one.bytes for one in collect_all(store)}
    return Expired(gone, untimed, removed)


def _aged(store: Store, before: float) -> set[str]:
    """The keys of samples that were asked before a time; of a key in several shards, as one of them says."""
    keys = set[str]()
    for shard in store.shards():
        rows = _lines(store, shard)
        if TIME in rows.columns:
            keys.update(rows.filter(pl.col(TIME) < before)["key"])
    return keys


def _old(
    store: Store, keys: frozenset[str]
) -> Iterator[tuple[str, pl.DataFrame, pl.DataFrame]]:
    """Each shard with samples of these keys: these, and the others."""
    named = pl.col("key").is_in(list(keys))
    for shard in store.shards():
        rows = _lines(store, shard)
        if len(old := rows.filter(named)):
            yield shard, old, rows.filter(~named)


def _lines(store: Store, shard: str) -> pl.DataFrame:
    """The lines of a shard, with samples that another shard has, too."""
    record = store.commit(shard)
    table = read_arrow(store.backend, f"{record.named}/{INDEX}", record.files[INDEX])
    return frame_of(table).with_columns(shard=pl.lit(shard))


def _drop(part: Store, shard: str, rest: pl.DataFrame) -> Iterator[tuple[str, int]]:
    """Write what stays of a shard, drop its record, and remove its files and the merged index."""
    backend, named = part.backend, part.commit(shard).named
    if len(rest):
        copy_shard(part, part, shard, rest)
    with writing(backend):
        backend.remove(
            f"{LEDGER}/{commit_name(shard)}"
        )  # first: a copy alone would be a lost record
        backend.remove(commit_name(shard))
        backend.remove(f"{CACHE}/index.json")
        for name in (named, *(f"{CACHE}/{leaf}" for leaf in backend.list_names(CACHE))):
            with backend.try_lock(name) as locked:
                size = _bytes(backend, name)
                if (
                    locked and size
                ):  # what is held is garbage now, which is collected at the end
                    backend.remove(name)
                    yield name, size


def _forget(
    backend: Backend, folder: str, name: str, gone: frozenset[str]
) -> dict[str, int]:
    """Write a view or the statistics of a run again without some keys, and remove the table before."""
    kind: type[ViewRecord] | type[RunRecord] = (
        ViewRecord if folder == VIEWS else RunRecord
    )
    record, table = read_table(backend, kind, name)
    frame = frame_of(table)
    left = frame.filter(~pl.col("key").is_in(list(gone)))
    if len(left) == len(frame):
        return {}
    now: TableRecord = record
    if isinstance(record, ViewRecord):
        reasons = left["reason"].cast(pl.String).drop_nulls().value_counts()
        counts = dict(reasons.iter_rows())
        now = replace(
            record,
            rows=len(left),
            kept=int(left["reason"].null_count()),
            dropped={why: counts.get(why, 0) for why in record.dropped},
        )
    size = _bytes(backend, record.file)
    write_table(backend, now, left)
    backend.remove(record.file)
    return {record.file: size}


def _bytes(backend: Backend, name: str) -> int:
    return sum(backend.list_files(name).values()) or backend.size(name) or 0
