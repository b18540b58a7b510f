"""Garbage collection: remove what no record names and no living writer holds.

A shard becomes garbage when its writer dies before the commit. Two things protect a living
writer: the lock on its folder, which the kernel drops with the process, and a time of grace
since the last write, by the clock of the file system or object store, where locks do not reach.
Neither is needed for safety. A shard is marked in `dead/` before the commits are read again and
it goes; whoever commits a shard looks for that mark afterwards and withdraws. So of a commit
and a collection that meet, one sees the other. Run one collector at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vlmdistill.stores.manifest import (
    CACHE,
    DEAD,
    HEADS,
    SHARDS,
    STATS,
    VIEWS,
    commit_name,
    read_record,
    units,
)
from vlmdistill.stores.place import STAGING, Place
from vlmdistill.stores.store import Store
from vlmdistill.stores.tables import table_names

GRACE = 3600.0  # seconds


@dataclass(frozen=True)
class Removed:
    """Something that was garbage."""

    name: str
    bytes: int


def collect(store: Store, *, grace: float = GRACE, dry_run: bool = False) -> list[Removed]:
    """Remove garbage untouched for `grace` seconds; what was removed, or would be on a `dry_run`.

    StoreError when a record is damaged: what it refers to cannot be told, so nothing is removed.
    """
    place = store.place
    removed = []
    for name in list(_garbage(place, store.record["head"]["file"])):
        with place.seized(name) as free:
            if not free or place.idle(name) < grace:
                continue
            size = sum(place.files(name).values()) or place.size(name) or 0
            if dry_run or _remove(place, name):
                removed.append(Removed(name, size))
    if not dry_run:
        _forget(place)
    return removed


def _garbage(place: Place, head: str) -> Iterator[str]:
    """What no record names, as of now."""
    shards = _committed(place)
    for shard in place.names(SHARDS):
        if shard not in shards:
            yield f"{SHARDS}/{shard}"
    for name in place.names(HEADS):
        if name != head.split("/")[1]:
            yield f"{HEADS}/{name}"
    for name in place.names(CACHE):  # it may speak of units that are gone, and is made again
        yield f"{CACHE}/{name}"
    for folder in (VIEWS, STATS):
        there = place.names(folder)
        # The records are read after the listing: a table in it that none names is an old one.
        named = {read_record(place, f"{folder}/{name}.json")["file"] for name in table_names(place, folder)}
        for leaf in there:
            name = f"{folder}/{leaf}"
            if name not in named and not leaf.endswith(".json"):
                yield name
    for name in place.names(STAGING):
        yield f"{STAGING}/{name}"


def _committed(place: Place) -> set[str]:
    return {read_record(place, commit_name(unit))["shard"] for unit in units(place)}


def _remove(place: Place, name: str) -> bool:
    """Remove it unless a commit came in between."""
    folder, _, shard = name.partition("/")
    if folder != SHARDS:
        place.remove(name)
        return True
    place.create(f"{DEAD}/{shard}", b"")
    gone = shard not in _committed(place)
    if gone:
        place.remove(name)
    place.remove(f"{DEAD}/{shard}")
    return gone


def _forget(place: Place) -> None:
    """Remove the marks that a killed collector left."""
    for shard in place.names(DEAD):
        place.remove(f"{DEAD}/{shard}")
