"""Commits: how a shard or a table comes to count, and which record could name a file.

The files are published first and named by a record afterwards. Then they are listed once more, since `gc`
removes files that no record names. Only then a copy of the record is kept in the ledger.

A deleted record is indistinguishable from one never written. So a copy below `ledger/` without its record
means that the record was lost, renamed or overwritten. A writer that dies in between leaves a record without
a copy; the next `gc` writes it. To drop a record on purpose, remove its copy first.
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
KEPT = (COMMITS, VIEWS, STATS)  # the folders of records that have copies
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
        raise StoreError(
            f"files of shard {record.shard} vanished while it was committed ({one_line(error)}): "
            "`vlmdistill store verify` says how to repair it"
        ) from error
    created = backend.create(name, seal(record))
    first = record if created else find_record(backend, name, Commit)
    if first is not None and first.folder != record.folder:
        # The name is taken: these files can never be committed.
        backend.remove(record.path)
    if first is not None and is_complete(backend, first):
        note(backend, name, first)
        return first
    raise RacedError(
        f"the files of shard {record.shard} were removed while they were committed: does `store gc` run with "
        "a short --grace? Run `store verify`"
    )


def find_commit(backend: Backend, shard: str) -> Commit | None:
    """The record of a shard; where it is lost, its copy in the ledger."""
    name = commit_name(shard)
    return find_record(backend, name, Commit) or find_copy(backend, name, Commit)


def complete_ledger(backend: Backend, records: Iterable[Commit | TableRecord]) -> None:
    """Note the records that have no copy: their writer died in between."""

    def complete(record: Commit | TableRecord) -> None:
        name = record_name(record.path)
        try:
            copy = find_copy(backend, name, type(record))
        except VersionError:
            raise
        except StoreError:  # it is damaged: replace it
            copy = None
        if copy == record or not is_complete(backend, record):
            return
        if find_naming(backend, record.path) == record:  # it still counts
            note(backend, name, record)

    for _ in backend.map(complete, records):
        pass


def find_naming(backend: Backend, name: str) -> Commit | TableRecord | None:
    """The record that names a shard or table, as of now."""
    record_file = record_name(name)
    if not record_file:
        return None
    record = find_record(backend, record_file, kind_of(record_file))
    return record if record is not None and record.path == name else None


def record_name(name: str) -> str:
    """The file of the record that could name a shard or table; '' when none can."""
    shard = SHARD.fullmatch(name)
    if shard:
        return commit_name(shard[1])
    table = TABLE.fullmatch(name)
    if table:
        return f"{table[1]}/{table[2]}.json"
    return ""


def is_complete(backend: Backend, record: Commit | TableRecord) -> bool:
    """Whether all files that a record names exist, by their sizes."""
    if isinstance(record, TableRecord):
        return bool(backend.size(record.path) == record.entry[0])
    sizes = backend.list_files(record.path)
    return all(sizes.get(file) == size for file, (size, _) in record.files.items())


def note(backend: Backend, name: str, record: Record) -> None:
    """Keep a copy of the record `name`, once it is committed; the cache has no copy."""
    if name.split("/")[0] in KEPT:
        backend.replace(f"{LEDGER}/{name}", seal(record))


def find_copy(backend: Backend, name: str, kind: type[R]) -> R | None:
    """The copy of the record `name`, None when it is missing; StoreError when it is damaged."""
    return find_record(backend, name, kind, f"{LEDGER}/")


def require_all(backend: Backend, folders: Sequence[str] = KEPT) -> None:
    """StoreError when a record is gone though it has a copy."""
    # Copies are listed first, as a record is made before its copy.
    copies = _listed(backend, folders, f"{LEDGER}/")
    records = set(_listed(backend, folders))
    missing = [name for name in copies if name not in records]
    # A listing may be an old one.
    lost = [name for name in missing if backend.size(name) is None]
    if lost:
        raise StoreError(
            f"{len(lost)} records of {backend.url} are lost, the first {lost[0]}. For each: copy "
            f"{LEDGER}/{lost[0]} to {lost[0]}, or remove it if that was dropped on purpose"
        )


def _listed(backend: Backend, folders: Sequence[str], above: str = "") -> list[str]:
    """The files of the records in some folders, or of their copies, as `commits/<shard>.json`."""
    names = []
    for folder in folders:
        for name in record_names(backend, f"{above}{folder}"):
            names.append(f"{folder}/{name}.json")
    return names
