"""Sharing: bring to one store the samples of another, near or far, that it misses.

Merging, pushing and pulling are one act. Pushing and pulling copy a store: every sample whose key is
missing. Merging brings teams together, so content that the target has under another key is left out. Nothing
is copied unless all of it fits; where both stores have a key, the sample that is there stays.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import polars as pl
from msgspec import structs

from vlmdistill.stores.annexes import SAME_SAMPLE
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
    """The result of a copy, in samples, and the differences that it found."""

    copied: int
    present: int  # the target had them already, by key and content
    duplicates: int  # left out by a merge: the same content under another key
    conflicts: tuple[str, ...]
    """Keys that the target has with other content, which stays."""
    replaced: tuple[str, ...] = ()
    """Views and statistics, such as views/long, of which values in the target were replaced."""
    left: tuple[str, ...] = ()
    """Views and statistics that stay as they are although the source has other values."""
    annexes: tuple[int, ...] = ()
    """Of each annex of the source, the samples that were copied."""


def merge(
    target: str | Path, sources: Sequence[str | Path], *, progress: Progress = silent
) -> list[Copied]:
    """Copy the samples that `target` misses from each source, making the target when it does not exist.

    Views and statistics of one name are brought together; where both have values for a sample, the target's
    stay. StoreError naming the field when a source is of another target, processor, template, feature set,
    dtype or 8-bit encoding, or has other types of meta columns; nothing is copied from any then.
    """
    stores = [Store.open(path) for path in sources]
    for store in stores[1:]:
        stores[0].require(store.provenance, store.info)
    into = _like(target, stores, stores[0].provenance.features)
    annexes = [_annexes(store, into, store.features) for store in stores]
    results = []
    for store, pairs in zip(stores, annexes, strict=True):
        wanted = store.view(None)
        copied = _copy(store, into, wanted, merging=True, progress=progress)
        results.append(_copy_annexes(copied, into, wanted, pairs, progress))
    return results


def send(
    source: str | Path,
    target: str | Path,
    *,
    view: str | None = None,
    features: Collection[Feature] | None = None,
    progress: Progress = silent,
) -> Copied:
    """Push or pull: copy a store, or a view of it, or some features of it, where they are missing.

    The frozen head travels along; so do views and statistics when all samples go, and then the
    source's values count. StoreError when the target is of another origin or holds
    other features, or when a shard that is copied whole does not arrive as it was sent.
    """
    store = Store.open(source)
    chosen = store.choose(features)
    own = [feature for feature in chosen if feature in store.layout.arrays_of]
    if not own:
        raise StoreError(
            f"a copy needs at least one of the features that {store.path} was made with: "
            f"{', '.join(store.provenance.features)}"
        )
    wanted = store.view(view)
    into = _like(target, [store], tuple(feature.name for feature in own))
    pairs = _annexes(store, into, chosen)
    copied = _copy(store, into, wanted, tables=view is None, progress=progress)
    return _copy_annexes(copied, into, wanted, pairs, progress)


def _annexes(
    store: Store, into: Store, chosen: Collection[Feature]
) -> list[tuple[Store, Store]]:
    """Each annex with some of the features, and the annex of `into` to copy it to, made if need be."""
    pairs = []
    for annex in store.annexes:
        features = annex.layout.features
        names = [feature.name for feature in features if feature in chosen]
        if not names:
            continue
        encodings = annex.layout.encoding
        encoding = {name: encodings[name] for name in encodings if name in names}
        annex_of_target = into.annex(names, encoding)
        _require_types([annex_of_target, annex])
        pairs.append((annex, annex_of_target))
    return pairs


def _copy_annexes(
    copied: Copied,
    into: Store,
    wanted: pl.DataFrame,
    pairs: Sequence[tuple[Store, Store]],
    progress: Progress,
) -> Copied:
    """Copy annexes, for the samples that both stores have; the result together with that of the stores."""
    both = wanted.select(SAME_SAMPLE).join(into.index, on=SAME_SAMPLE, how="semi")
    conflicts = {*copied.conflicts}
    counts = []
    for annex, annex_of_target in pairs:
        lines = annex.index.join(both, on=SAME_SAMPLE, how="semi")
        result = _copy(annex, annex_of_target, lines, tables=False, progress=progress)
        conflicts.update(result.conflicts)
        counts.append(result.copied)
    return replace(copied, conflicts=tuple(sorted(conflicts)), annexes=tuple(counts))


def _like(
    path: str | Path, sources: Sequence[Store], features: tuple[str, ...]
) -> Store:
    """The store at `path`, made with these features if need be; StoreError when a source does not fit."""
    exists = open_backend(path).size(STORE) is not None
    stores = [Store.open(path), *sources] if exists else sources
    first = stores[0]
    if exists:
        _require_features(first, path, features)
        for store in sources:
            provenance = structs.replace(store.provenance, features=features)
            first.require(provenance, store.info)
    _require_encodings(stores, features)
    _require_types(stores)
    if exists:
        return first
    encodings = first.layout.encoding
    return Store.create(
        path,
        structs.replace(first.provenance, features=features),
        first.info,
        first.head(),
        {name: encodings[name] for name in encodings if name in features},
    )


def _require_features(
    store: Store, path: str | Path, features: tuple[str, ...]
) -> None:
    own = store.provenance.features
    if own != features:
        raise StoreError(
            f"{path} was made for the features {', '.join(own)}, not {', '.join(features)}, and "
            "takes no others: copy these to a new store, or to this one only its own: store push --features "
            f"{','.join(own)}"
        )


def _require_encodings(stores: Sequence[Store], features: Sequence[str]) -> None:
    """StoreError when a feature is quantized in one store and not in another."""
    first = stores[0]
    for store in stores[1:]:
        for name in features:
            own = first.layout.encoding.get(name, "raw")
            other = store.layout.encoding.get(name, "raw")
            if own != other:
                raise StoreError(
                    f"{name} has the encoding {own} in {first.path} and {other} in {store.path}: use "
                    "another store, or capture the features again"
                )


def _require_types(stores: Sequence[Store]) -> None:
    """StoreError when a meta column is of different types in two stores: no index could hold both."""
    conflict = unlike(store.meta for store in stores)
    if conflict is None:
        return
    name = conflict.column
    first, second = stores[conflict.first], stores[conflict.second]
    raise StoreError(
        f"the meta column '{name}' is {first.meta[name]} in {first.path} and {second.meta[name]} in "
        f"{second.path}: write one of them anew, with the other's type or another name"
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

    The result is counted in the target in the end, as read anew: others may write to it, too.
    """
    content = [XXH3 + spec.name for spec in target.layout.arrays]
    sent: set[str] = set()

    @retried()
    def arrive() -> tuple[pl.DataFrame, pl.DataFrame]:
        """The lines of the target, and those of `wanted` that it lacks though it has their content.

        The first attempt copies; another looks whether all of it is there.
        """
        own = target.index.select("key", *content)
        fresh = wanted.join(own, on="key", how="anti", maintain_order="left")
        missing = _without_duplicates(fresh, own, content) if merging else fresh
        if not len(missing):
            return own, fresh
        done = 0
        by_shard = missing.sort("shard", "sample_row").group_by(
            "shard", maintain_order=True
        )
        remote = source.backend if target.backend.is_local else target.backend
        copy = partial(_copy_group, source, target)
        for samples in remote.map(copy, by_shard, STREAMS):
            done += samples
            progress(done, len(missing))
        sent.update(missing["key"])
        raise RacedError(
            f"{len(missing)} of {len(wanted)} samples are not in {target.path} although they were copied, "
            f"the first {missing['key'][0]}: do others remove or replace samples? Run it again"
        )

    own, duplicates = arrive()
    both = wanted.join(own, on="key", how="inner", suffix=".own", maintain_order="left")
    differing = [pl.col(name) != pl.col(f"{name}.own") for name in content]
    conflicts = both.filter(pl.any_horizontal(differing))
    shared = both.join(conflicts, on="key", how="anti").select("key")
    copied = shared.filter(pl.col("key").is_in(sent))
    result = Copied(
        copied=len(copied),
        present=len(shared) - len(copied),
        duplicates=len(duplicates),
        conflicts=tuple(conflicts["key"].to_list()),
    )
    if not tables:
        return result
    replaced, unchanged = bring_tables(source, target, shared, keep=merging)
    return replace(result, replaced=replaced, left=unchanged)


def _without_duplicates(
    fresh: pl.DataFrame, own: pl.DataFrame, content: Sequence[str]
) -> pl.DataFrame:
    """The lines whose content the target does not have, each content once.

    Of several, the first by key, so that an interrupted merge goes on to the same end.
    """
    contents = own.select(content).unique()
    new = fresh.join(contents, on=content, how="anti", maintain_order="left")
    return new.unique(content, keep="first", maintain_order=True)
