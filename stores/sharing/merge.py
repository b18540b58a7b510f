"""Sharing: bring to one store what it misses of another, near or far.

Merging, pushing and pulling are one act. Pushing and pulling copy a store: every sample whose key is
missing. Merging brings teams together, so what is there already under another key is left out. Nothing
is copied unless all of it fits; where both stores have a key, the sample that is there stays.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import polars as pl
from msgspec import structs

from vlmdistill.stores.annexes import SAME
from vlmdistill.stores.backends.backend import STREAMS
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import RacedError, StoreError
from vlmdistill.stores.index.tables import XXH3, unlike
from vlmdistill.stores.manifest import STORE
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.retry import retried
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.sharing.merge_tables import bring_tables
from vlmdistill.stores.sharing.transfer import copy_shard
from vlmdistill.stores.store import Store


@dataclass(frozen=True)
class Copied:
    """What a copy did, in samples, and what it found to differ."""

    copied: int
    present: int  # were there already, by key and content
    duplicates: int  # left out by a merge: the same content under another key
    conflicts: tuple[
        str, ...
    ]  # keys that are there with other content: the ones there stay
    replaced: tuple[
        str, ...
    ] = ()  # views and statistics, such as views/long, that say something else now
    left: tuple[
        str, ...
    ] = ()  # those that stay as they are though the source says something else
    annexes: tuple[
        int, ...
    ] = ()  # of each annex of the source, the samples that were copied


def merge(
    target: str | Path, sources: Sequence[str | Path], *, progress: Progress = silent
) -> list[Copied]:
    """Copy what `target` misses from each source, making it when it is not there.

    Views and statistics of one name are brought together; of samples that both speak of, what is
    there already stays. StoreError naming the field when a source is of another target, processor,
    template, feature set, dtype or 8-bit encoding, or has other types of meta columns; nothing is
    copied from any then.
    """
    stores = [Store.open(path) for path in sources]
    for store in stores[1:]:
        stores[0].require(store.provenance, store.info)
    into = _like(target, stores, stores[0].provenance.features)
    annexes = [_annexes(store, into, store.features) for store in stores]
    done = []
    for store, pairs in zip(stores, annexes, strict=True):
        wanted = store.view(None)
        copied = _copy(store, into, wanted, merging=True, progress=progress)
        done.append(_copy_annexes(copied, into, wanted, pairs, progress))
    return done


def send(
    source: str | Path,
    target: str | Path,
    *,
    view: str | None = None,
    features: Collection[Feature] | None = None,
    progress: Progress = silent,
) -> Copied:
    """Push or pull: copy a store, or a view of it, or some features of it, where they are missing.

    The frozen head travels along; so do views and statistics when all samples go, and what the
    source says of its samples counts then. StoreError when the target is of another origin or holds
    other features, or when a shard that is copied whole does not arrive as it was sent.
    """
    store = Store.open(source)
    chosen = store.choose(features)
    names = tuple(feature.name for feature in chosen if feature in store.layout.parts)
    if not names:
        held = ", ".join(store.provenance.features)
        raise StoreError(
            f"a copy needs at least one of the features that {store.path} was made with: {held}"
        )
    wanted = store.view(view)
    into = _like(target, [store], names)
    pairs = _annexes(store, into, chosen)
    copied = _copy(store, into, wanted, tables=view is None, progress=progress)
    return _copy_annexes(copied, into, wanted, pairs, progress)


def _annexes(
    store: Store, into: Store, chosen: Collection[Feature]
) -> list[tuple[Store, Store]]:
    """Each annex with some of the features, and the annex of `into` to copy it to, made if need be."""
    pairs = []
    for annex in store.annexes:
        if names := [
            feature.name for feature in annex.layout.features if feature in chosen
        ]:
            encoding = {
                name: how
                for name, how in annex.layout.encoding.items()
                if name in names
            }
            there = into.annex(names, encoding)
            _require_kinds([there, annex])
            pairs.append((annex, there))
    return pairs


def _copy_annexes(
    copied: Copied,
    into: Store,
    wanted: pl.DataFrame,
    pairs: Sequence[tuple[Store, Store]],
    progress: Progress,
) -> Copied:
    """Copy annexes, for the samples that both stores have; what was copied before, and this."""
    both = wanted.select(SAME).join(into.index, on=SAME, how="semi")
    done = [
        _copy(
            annex,
            there,
            annex.index.join(both, on=SAME, how="semi"),
            tables=False,
            progress=progress,
        )
        for annex, there in pairs
    ]
    conflicts = {*copied.conflicts}.union(*(one.conflicts for one in done))
    annexes = tuple(one.copied for one in done)
    return replace(copied, conflicts=tuple(sorted(conflicts)), annexes=annexes)


def _like(
    path: str | Path, sources: Sequence[Store], features: tuple[str, ...]
) -> Store:
    """The store at `path`, made with these features if need be; StoreError when a source does not fit."""
    there = open_backend(path).size(STORE) is not None
    stores = [Store.open(path), *sources] if there else sources
    first = stores[0]
    if there:
        if first.provenance.features != features:
            held, wanted = ", ".join(first.provenance.features), ", ".join(features)
            raise StoreError(
                f"{path} was made for the features {held}, not {wanted}, and takes no others: copy these "
                f"to a new store, or to this one only its own: store push --features {held.replace(' ', '')}"
            )
        for store in sources:
            first.require(
                structs.replace(store.provenance, features=features), store.info
            )
    _require_encodings(stores, features)
    _require_kinds(stores)
    if there:
        return first
    encoding = {
        name: value for name, value in first.layout.encoding.items() if name in features
    }
    return Store.create(
        path,
        structs.replace(first.provenance, features=features),
        first.info,
        first.head(),
        encoding,
    )


def _require_encodings(stores: Sequence[Store], features: Sequence[str]) -> None:
    """StoreError when a feature is quantized in one store and not in another."""
    first = stores[0]
    for store in stores[1:]:
        for name in features:
            mine, theirs = (
                one.layout.encoding.get(name, "raw") for one in (first, store)
            )
            if mine != theirs:
                raise StoreError(
                    f"{name} has the encoding {mine} in {first.path} and {theirs} in {store.path}: use "
                    "another store, or capture the features again"
                )


def _require_kinds(stores: Sequence[Store]) -> None:
    """StoreError when a meta column is of one type here and of another there: no index could hold both."""
    if found := unlike(store.meta for store in stores):
        name, one, other = found
        kinds = [f"{stores[at].meta[name]} in {stores[at].path}" for at in (one, other)]
        raise StoreError(
            f"the meta column '{name}' is {kinds[0]} and {kinds[1]}: write one of them anew, with the "
            "other's type or another name"
        )


def _copy_group(
    source: Store, target: Store, group: tuple[tuple[object, ...], pl.DataFrame]
) -> int:
    """Copy rows of a shard; how many they are."""
    (shard,), rows = group
    copy_shard(source, target, str(shard), rows)
    return len(rows)


def _copy(
    source: Store,
    target: Store,
    wanted: pl.DataFrame,
    *,
    merging: bool = False,
    tables: bool = True,
    progress: Progress = silent,
) -> Copied:
    """Copy the samples of `wanted`, rows of the index of `source`, that `target` misses.

    What is reported is what the target holds in the end, as read anew: others may write to it, too.
    """
    content = [XXH3 + spec.name for spec in target.layout.arrays]
    sent: set[str] = set()

    @retried()
    def arrive() -> tuple[pl.DataFrame, pl.DataFrame]:
        """What the target holds, and what it misses as the same is there under another key.

        The first attempt copies; another looks whether all of it is there.
        """
        there = target.index.select("key", *content)
        fresh = missing = wanted.join(
            there, on="key", how="anti", maintain_order="left"
        )
        if (
            merging
        ):  # the first by key, so that an interrupted merge goes on to the same end
            new = fresh.join(
                there.select(content).unique(),
                on=content,
                how="anti",
                maintain_order="left",
            )
            missing = new.unique(content, keep="first", maintain_order=True)
        if not len(missing):
            return there, fresh
        done = 0
        by_shard = missing.sort("shard", "sample_row").group_by(
            "shard", maintain_order=True
        )
        far = source.backend if target.backend.is_local else target.backend
        for samples in far.map(partial(_copy_group, source, target), by_shard, STREAMS):
            done += samples
            progress(done, len(missing))
        sent.update(missing["key"])
        raise RacedError(
            f"{len(missing)} of {len(wanted)} samples are not in {target.path} although they were copied, "
            f"the first {missing['key'][0]}: do others remove or replace what is there? Run it again"
        )

    there, fresh = arrive()
    both = wanted.join(
        there, on="key", how="inner", suffix=".there", maintain_order="left"
    )
    other = both.filter(
        pl.any_horizontal(pl.col(name) != pl.col(f"{name}.there") for name in content)
    )
    held = both.join(other, on="key", how="anti").select("key")
    copied = held.filter(pl.col("key").is_in(sent))
    result = Copied(
        copied=len(copied),
        present=len(held) - len(copied),
        duplicates=len(fresh),
        conflicts=tuple(other["key"].to_list()),
    )
    if not tables:
        return result
    replaced, left = bring_tables(source, target, held, keep=merging)
    return replace(result, replaced=replaced, left=left)
