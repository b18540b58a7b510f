"""Commits: how a shard or a table comes to count, and which record could name a file.

What is committed is published first and named by a record afterwards. Then its files are looked for once
more, since `gc` removes what no record names. Only then a copy of the record is kept in the ledger.

A deleted record is indistinguishable from one never written. So a copy below `ledger/` without its record
means that the record was lost, renamed or overwritten. A writer that dies in between leaves a record without
a copy; the next `gc` writes it. What is dropped on purpose is removed from the ledger first.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import RacedError, StoreError, VersionError, one_line
from vlmdistill.stores.manifest import (
    COMMITS,
    NAME,
    STATS,
    TABLES,
    VIEWS,
    Commit,
    R,
    Record,
    TableRecord,
    commit_name,
    find_record,
    kind_of,
    record_names,
    seal,
)
from vlmdistill.stores.retry import retried

LEDGER = "ledger"
KEPT = (COMMITS, VIEWS, STATS)  # whose records have copies
SHARD = re.compile(rf"shards/({NAME.pattern})-[0-9a-f]{{16}}")
TABLE = re.compile(rf"({'|'.join(TABLES)})/({NAME.pattern})-[0-9a-f]{{16}}\.arrow")


@retried()
def commit(backend: Backend, record: Commit, publish: Callable[[], None]) -> Commit:
    """Publish a shard and make it count; returns its record, or that of another writer who was first.

    StoreError when the files of that record are not all there.
    """
    name = commit_name(record.shard)
    try:
        publish()
    except FileNotFoundError as error:
        what = f"files of shard {record.shard} vanished while it was committed ({one_line(error)})"
        raise StoreError(
            f"{what}: `vlmdistill store verify` says how to repair it"
        ) from error
    made = backend.create(name, seal(record))
    first = record if made else find_record(backend, name, Commit)
    if first is not None and first.folder != record.folder:
        backend.remove(
            record.named
        )  # the name is taken: these files can never be committed
    if first is not None and is_complete(backend, first):
        note(backend, name, first)
        return first
    what = f"the files of shard {record.shard} were removed while they were committed"
    raise RacedError(
        f"{what}: does `store gc` run with a short --grace? Run `store verify`"
    )


def find_commit(backend: Backend, shard: str) -> Commit | None:
    """The record of a shard; where it is lost, its copy in the ledger."""
    name = commit_name(shard)
    return find_record(backend, name, Commit) or find_copy(backend, name, Commit)


def complete_ledger(backend: Backend, records: Iterable[Commit | TableRecord]) -> None:
    """Note the records that have no copy: their writer died in between."""

    def one(record: Commit | TableRecord) -> None:
        name = record_name(record.named)
        try:
            copy = find_copy(backend, name, type(record))
        except VersionError:
            raise
        except StoreError:  # it is damaged: replace it
            copy = None
        if (
            copy != record
            and is_complete(backend, record)
            and find_naming(backend, record.named) == record
        ):
            note(backend, name, record)

    for _ in backend.map(one, records):
        pass


def find_naming(backend: Backend, name: str) -> Commit | TableRecord | None:
    """The record that names a shard or table, as of now."""
    where = record_name(name)
    record = find_record(backend, where, kind_of(where)) if where else None
    return record if record is not None and record.named == name else None


def record_name(name: str) -> str:
    """The file of the record that could name a shard or table; '' when none can."""
    if found := SHARD.fullmatch(name):
        return commit_name(found[1])
    if found := TABLE.fullmatch(name):
        return f"{found[1]}/{found[2]}.json"
    return ""


def is_complete(backend: Backend, record: Commit | TableRecord) -> bool:
    """Whether all files that a record names are there, by their sizes."""
    if isinstance(record, TableRecord):
        return bool(backend.size(record.named) == record.entry[0])
    there = backend.list_files(record.named)
    return all(there.get(file) == size for file, (size, _) in record.files.items())


def note(backend: Backend, name: str, record: Record) -> None:
    """Keep a copy of the record `name`, once it is committed; the cache has no copy."""
    if name.split("/")[0] in KEPT:
        backend.replace(f"{LEDGER}/{name}", seal(record))


def find_copy(backend: Backend, name: str, kind: type[R]) -> R | None:
    """The copy of the record `name`, None when it is missing; StoreError when it is damaged."""
    return find_record(backend, name, kind, f"{LEDGER}/")


def require_all(backend: Backend, folders: Sequence[str] = KEPT) -> None:
    """StoreError when a record is gone though it has a copy."""
    names = [  # first: a record is made before its copy
        f"{folder}/{name}"
        for folder in folders
        for name in record_names(backend, f"{LEDGER}/{folder}")
    ]
    there = {
        f"{folder}/{name}"
        for folder in folders
        for name in record_names(backend, folder)
    }
    missing = [f"{name}.json" for name in names if name not in there]
    if gone := [
        name for name in missing if backend.size(name) is None
    ]:  # a listing may be an old one
        what = f"{len(gone)} records of {backend.url} are lost, the first {gone[0]}"
        how = f"copy {LEDGER}/{gone[0]} to {gone[0]}, or remove it if that was dropped on purpose"
        raise StoreError(f"{what}. For each: {how}")
