"""Annexes: features that a store was not made for, kept in a store inside it."""

from collections.abc import Collection

from msgspec.structs import replace

from vlmdistill.stores.index.tables import XXH3
from vlmdistill.stores.layout import TOKENS
from vlmdistill.stores.manifest import ANNEXES, StoreRecord
from vlmdistill.stores.schema import content_hash

# The columns in which a sample of a store and its line in an annex must be equal.
SAME_SAMPLE = ("key", f"{XXH3}{TOKENS.name}", "visual_tokens")


def annex_folder(names: Collection[str]) -> str:
    """The folder of the annex of these features, the same for every process that adds them."""
    return f"{ANNEXES}/{content_hash(sorted(names))}"


def misplaced_annex(store: StoreRecord, annex: StoreRecord, folder: str) -> str | None:
    """Why the store in `folder` is not an annex of the store around it; None if it is."""
    own, added = store.provenance, annex.provenance
    right_folder = annex_folder(added.features)
    if folder != right_folder:
        return f"its features belong in {right_folder}"
    shared = {*own.features}.intersection(added.features)
    if shared:
        return f"the store has {', '.join(sorted(shared))} itself"
    difference = own.mismatch(replace(added, features=own.features))
    if difference:
        return f"it is of another origin ({difference})"
    if (store.info, store.head) != (annex.info, annex.head):
        return "it is of another target"
    return None
