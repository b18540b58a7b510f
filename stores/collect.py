"""Garbage collection: remove what no record names and no living writer holds.

A shard becomes garbage when its writer dies before the commit. Two things protect a living
writer: the lock on its folder, which the kernel drops with the process, and a time of grace
since the last write, by the clock of the file system or object store, where locks do not reach.
Neither is needed for safety: see `commits` for what happens when a writer and any number of
collectors meet.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vlmdistill.stores.commits import mend, remove
from vlmdistill.stores.manifest import CACHE, HEADS, SHARDS, STATS, VIEWS, commit_name, find_record, units
from vlmdistill.stores.place import STAGING, Place
from vlmdistill.stores.store import Store
from vlmdistill.stores.tables import table_names

GRACE = 3600.0  # seconds
REQUESTS = 16  # at once, to a place far away
HASH = "[0-9a-f]{16}"
MADE = re.compile(  # names that writers give: whatever else lies in a store is not ours to remove
    rf"shards/.+-{HASH}|heads/{HASH}|(views|stats)/.+-{HASH}\.arrow|cache/index(\.json|-{HASH}\.arrow)"
    rf"|staging/((copy|probe|removed)-)?{HASH}"
)


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
    if not dry_run:
        mend(place, grace)
    removed = []
    for name in list(_garbage(place, store.record["head"]["file"])):
        with place.seized(name) as free:
            if free is False or place.idle(name, dry_run) < grace:
                continue
            size = sum(place.files(name).values()) or place.size(name) or 0
            if dry_run or _remove(place, name):
                removed.append(Removed(name, size))
    return removed + [Removed(name, size) for name, size in place.leftovers(grace, dry_run)]


def _garbage(place: Place, head: str) -> Iterator[str]:
    """What writers made and no record names, as of now."""
    yield from filter(MADE.fullmatch, _unnamed(place, head))


def _unnamed(place: Place, head: str) -> Iterator[str]:
    shards = _committed(place)
    for shard in place.names(SHARDS):
        if shard not in shards:
            yield f"{SHARDS}/{shard}"
    for name in place.names(HEADS):
        if name != head.split("/")[1]:
            yield f"{HEADS}/{name}"
    # It may speak of units that are gone, and is made again. Its record goes before what that names.
    for name in reversed(place.names(CACHE)):
        yield f"{CACHE}/{name}"
    for folder in (VIEWS, STATS):
        there = place.names(folder)
        # The records are read after the listing: a table in it that none names is an old one.
        records = [find_record(place, f"{folder}/{name}.json") for name in table_names(place, folder)]
        named = {record["file"] for record in records if record}
        for leaf in there:
            name = f"{folder}/{leaf}"
            if name not in named and not leaf.endswith(".json"):
                yield name
    for name in place.names(STAGING):
        yield f"{STAGING}/{name}"


def _committed(place: Place) -> set[str]:
    with ThreadPoolExecutor(1 if place.here else REQUESTS) as pool:
        records = pool.map(lambda unit: find_record(place, commit_name(unit)), units(place))
        return {record["shard"] for record in records if record}


def _remove(place: Place, name: str) -> bool:
    """Remove it unless a record came in between."""
    if name.split("/")[0] in (SHARDS, VIEWS, STATS):
        return remove(place, name)
    place.remove(name)
    return True
