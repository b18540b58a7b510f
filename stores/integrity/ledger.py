"""The ledger: a second copy of every record, which shows when a record is lost.

A record that is gone looks like one that was never made. So after a commit a copy of the record is kept below
`ledger/`: a copy without its record means that this was lost, renamed or overwritten. A writer that dies in
between leaves a record without a copy; the next `gc` writes it. What is dropped on purpose is removed from
the ledger first.
"""

from collections.abc import Sequence

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


def require_all(backend: Backend, folders: Sequence[str] = KEPT) -> None:
    """StoreError when a record is gone though it has a copy."""
    names = [  # first: a record is made before its copy
        f"{folder}/{name}" for folder in folders for name in record_names(backend, f"{LEDGER}/{folder}")
    ]
    there = {f"{folder}/{name}" for folder in folders for name in record_names(backend, folder)}
    missing = [f"{name}.json" for name in names if name not in there]
    if gone := [name for name in missing if backend.size(name) is None]:  # a listing may be an old one
        what = f"{len(gone)} records of {backend.url} are lost, the first {gone[0]}"
        how = f"copy {LEDGER}/{gone[0]} to {gone[0]}, or remove it if that was dropped on purpose"
        raise StoreError(f"{what}. For each: {how}")
