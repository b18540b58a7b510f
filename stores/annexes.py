"""Annexes: features that a store was not made for, kept in a store inside it; what makes a folder one."""

from collections.abc import Collection

from msgspec.structs import replace

from vlmdistill.stores.index.tables import XXH3
from vlmdistill.stores.layout import TOKENS
from vlmdistill.stores.manifest import ANNEXES, StoreRecord
from vlmdistill.stores.schema import content_hash

SAME = (
    "key",
    f"{XXH3}{TOKENS.name}",
    "visual_tokens",
)  # equal in a sample and in what an annex adds to it


def annex_folder(names: Collection[str]) -> str:
    """Where the annex of these features is: every process that adds the same features adds them there."""
    return f"{ANNEXES}/{content_hash(sorted(names))}"


def no_annex(store: StoreRecord, annex: StoreRecord, where: str) -> str | None:
    """Why what lies at `where` in a store is no annex of it; None if it is."""
    mine, theirs = store.provenance, annex.provenance
    if where != (folder := annex_folder(theirs.features)):
        return f"its features belong in {folder}"
    if shared := {*mine.features}.intersection(theirs.features):
        return f"the store has {', '.join(sorted(shared))} itself"
    if difference := mine.mismatch(replace(theirs, features=mine.features)):
        return f"it is of another origin ({difference})"
    return (
        None
        if (store.info, store.head) == (annex.info, annex.head)
        else "it is of another target"
    )
