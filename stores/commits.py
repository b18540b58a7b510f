"""Commits and removals: what makes files count, and what takes them away.

Nothing is locked, and yet a commit and a removal that meet never leave a record of files that are gone.
Whoever removes anything leaves a mark in `dead/` first, then looks whether a record names it, and takes
the mark away when all is done. Whoever makes a record believes in it once it has seen, in this order, no
mark, all files, and the record itself. So of the two, one sees the other. A mark whose maker was killed
stays, and the next collector finishes its work.
"""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import DEAD, SHARDS, Record, commit_name, find_record, seal
from vlmdistill.stores.place import Place

STALE = 3600.0  # seconds after which the maker of a mark is dead, where locks cannot tell
TRIES, PAUSE = 50, 0.1  # how often and long to wait for a collector that looks at the same files
SHARD = re.compile(r"shards/(.+)-[0-9a-f]{16}")
TABLE = re.compile(r"([a-z]+)/(.+)-[0-9a-f]{16}\.arrow")


def commit(place: Place, record: Record) -> bool:
    """Make a published shard count; false when another was committed for the unit before.

    StoreError when a collector took the shard for garbage meanwhile: then it does not count.
    """
    unit, shard = record["unit"], f"{SHARDS}/{record['shard']}"
    made = place.create(commit_name(unit), seal(record))
    standing = record if made else find_record(place, commit_name(unit))
    if standing is not None and standing["shard"] != record["shard"]:
        remove(place, shard)
        shard = f"{SHARDS}/{standing['shard']}"
    if standing is None or not settled(place, shard, standing):
        with marked(place, shard):
            _withdraw(place, shard)
        what = f"unit {unit} was being removed by `store gc` while it was written"
        raise StoreError(f"{what}: let gc finish, then write it again")
    return made


def put_table(place: Place, name: str, data: bytes, record: Record) -> None:
    """Write a file and the record that names it, which may replace an older one."""
    for _ in range(TRIES):
        place.replace(name, data)  # also when it is there: it may be damaged
        place.replace(_record_of(name), seal(record))
        if settled(place, name, record):
            return
        time.sleep(PAUSE)
    raise StoreError(f"{place.url}/{name} was being removed by `store gc` while it was written: try again")


def settled(place: Place, name: str, record: Record) -> bool:
    """Whether a record just made stands: nobody who looked before it was made can still remove anything."""
    if any(of == name for of, _ in marks(place)) or not _whole(place, name, record):
        return False
    return find_record(place, _record_of(name)) is not None


def remove(place: Place, name: str) -> bool:
    """Remove a shard or table unless a record names it; whether it was removed."""
    with marked(place, name):
        if _naming(place, name) is not None:
            return False
        place.remove(name)
        _withdraw(place, name)
    return True


def mend(place: Place, grace: float) -> None:
    """Finish what killed collectors began, and remove their marks."""
    for name, mark in marks(place):
        with place.seized(mark) as free:
            if free or (free is None and place.idle(mark) >= max(grace, STALE)):
                with marked(place, name):
                    _withdraw(place, name)
                place.remove(mark)


def marks(place: Place) -> list[tuple[str, str]]:
    """What is being removed, and the mark that says so."""
    named = [(mark.rpartition("~")[0].replace("~", "/"), f"{DEAD}/{mark}") for mark in place.names(DEAD)]
    return [(name, mark) for name, mark in named if _record_of(name)]  # other files are no marks


@contextmanager
def marked(place: Place, name: str) -> Iterator[None]:
    """Say that something is being removed; when that fails midway the mark stays for `mend`."""
    with place.held(f"{DEAD}/{name.replace('/', '~')}~{secrets.token_hex(8)}"):
        yield


def _withdraw(place: Place, name: str) -> None:
    """Remove the record of files that are not all there; only under a mark of one's own."""
    record = _naming(place, name)
    if record is not None and not _whole(place, name, record):
        place.remove(_record_of(name))


def _naming(place: Place, name: str) -> Record | None:
    """The record that names a shard or table."""
    record = find_record(place, where) if (where := _record_of(name)) else None
    if record is None:
        return None
    named = f"{SHARDS}/{record['shard']}" if "shard" in record else record["file"]
    return record if named == name else None


def _record_of(name: str) -> str:
    """Where the record would be that names a shard or table; '' when none can."""
    if found := SHARD.fullmatch(name):
        return commit_name(found[1])
    if found := TABLE.fullmatch(name):
        return f"{found[1]}/{found[2]}.json"
    return ""


def _whole(place: Place, name: str, record: Record) -> bool:
    """Whether all files are there, by their sizes."""
    if "shard" not in record:
        return bool(place.size(name) == record["entry"][0])
    there = place.files(name)
    return all(there.get(file) == size for file, (size, _) in record["files"].items())
