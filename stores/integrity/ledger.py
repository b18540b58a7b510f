"""The ledger: a second copy of every record, which shows when a record is lost.

A record that is gone looks like one that was never made. So after a commit a copy of the record is kept below
`ledger/`: a copy without its record means that this was lost, renamed or overwritten. A writer that dies in
between leaves a record without a copy; the next `gc` writes it. What is dropped on purpose is removed from
the ledger first.
"""

from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import COMMITS, STATS, VIEWS, R, Record, find_record, record_names, seal

LEDGER = "ledger"
KEPT = (COMMITS, VIEWS, STATS)  # whose records have copies


def note(backend: Backend, name: str, record: Record) -> None:
    """Keep a copy of the record `name`, once it is committed; the cache has no copy."""
    if name.split("/")[0] in KEPT:
        backend.replace(f"{LEDGER}/{name}", seal(record))


def find_copy(backend: Backend, name: str, kind: type[R]) -> R | None:
    """The copy of the record `name`, None when it is missing; StoreError when it is damaged or too new."""
    return find_record(backend, name, kind, f"{LEDGER}/")


def noted(backend: Backend) -> list[str]:
    """The records that have a copy."""
    listed = ((folder, record_names(backend, f"{LEDGER}/{folder}")) for folder in KEPT)
    return [f"{folder}/{name}.json" for folder, names in listed for name in names]


def lost(backend: Backend) -> list[str]:
    """The records that are gone though they have a copy."""
    names = noted(backend)  # first: a record is made before its copy
    there = {f"{folder}/{leaf}" for folder in KEPT for leaf in backend.list_names(folder)}
    return [name for name in names if name not in there]


def require_all(backend: Backend) -> None:
    """StoreError when a record is lost."""
    if gone := lost(backend):
        what = f"{len(gone)} records of {backend.url} are lost, the first {gone[0]}"
        how = f"copy {LEDGER}/{gone[0]} to {gone[0]}, or remove it if that was dropped on purpose"
        raise StoreError(f"{what}. For each: {how}")
