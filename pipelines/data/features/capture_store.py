"""The store that a run captures into, or an annex of it: what it is checked for, and what is captured."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.cluster.engine_environment import EngineName
from vlmdistill.pipelines.cluster.shared import marked
from vlmdistill.pipelines.targets.checkpoints.fingerprint import Fingerprint
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.annexes import annex_folder
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.layout import ENCODINGS
from vlmdistill.stores.schema import Feature, FrozenTables, Provenance, TargetInfo
from vlmdistill.stores.store import Store


class CaptureStore:
    """The store of a run, or an annex of it, which workers may have yet to make. Pickled, it is opened anew.

    Attributes:
        path: The folder or URL of the store, as the user gave it.
        backend: The files of the store.
        annex: The features of the annex that is captured into; none for the store itself.
    """

    def __init__(self, path: str | Path, annex: Collection[str] = ()) -> None:
        self.path = os.path.expanduser(path)
        self.backend = open_backend(
            self.path if "://" in self.path else Path(self.path).absolute()
        )
        self.annex = tuple(sorted(annex))
        self._store: Store | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CaptureStore, (self.backend.url, self.annex)

    @property
    def store(self) -> Store | None:
        """The store; None while there is none."""
        if self._store is None:
            self._store = Store.find(self.backend)
        return self._store

    @property
    def there(self) -> Store | None:
        """The store, or the annex of it, to capture into; None while there is none."""
        return (
            Store.find(self.backend.within(annex_folder(self.annex)))
            if self.annex
            else self.store
        )

    @property
    def made(self) -> Store:
        """The store or annex to capture into; StoreError when there is none."""
        return self.there or Store.open(self.backend)

    def keys(self) -> set[str]:
        """The keys of the samples that are captured already."""
        there = self.there
        return set() if there is None else there.keys()

    def annexes(self, drafters: Sequence[str] | None) -> "list[CaptureStore]":
        """The annexes of the store, and one more for what the given drafters need that it lacks."""
        if self.store is None:
            return []
        names = [annex.provenance.features for annex in self.store.annexes]
        needed = self._needs(drafters or (), self.store.info)
        if more := needed - {*self.store.features}:
            names.append(tuple(feature.name for feature in more))
        return [CaptureStore(self.path, annex) for annex in names]

    def writing(self) -> AbstractContextManager[object]:
        """Lock the store against other runs; see `only_writer`."""
        return only_writer(self.path)

    def marked(self) -> AbstractContextManager[str]:
        """Mark the store, so that workers can tell if they see it; see `marked`."""
        return marked(self.backend)

    @staticmethod
    def _needs(drafters: Sequence[str], info: TargetInfo) -> frozenset[Feature]:
        return frozenset().union(
            *(catalogue.config(name).model.needs(info) for name in drafters)
        )

    def select(
        self, drafters: Sequence[str] | None, info: TargetInfo
    ) -> frozenset[Feature]:
        """The features to capture: all of a store or annex, for a new store what the drafters need.

        `drafters` None means all.
        """
        if self.annex:
            return frozenset(map(Feature.parse, self.annex))
        if self.store is None:
            return self._needs(drafters or catalogue.NAMES, info)
        return frozenset(map(Feature.parse, self.store.provenance.features))

    def create(
        self,
        provenance: Provenance,
        info: TargetInfo,
        head: FrozenTables,
        encoding: Mapping[str, str],
    ) -> Store:
        """The store or annex, made if it is not there yet; StoreError that names what differs.

        `encoding` is of what is made. A store that is there keeps its own.
        """
        made = None if self.there else encoding
        if self.annex:
            store = Store.open(self.backend)
            store.require(replace(provenance, features=store.provenance.features), info)
            return store.annex(self.annex, made)
        return Store.create(self.backend, provenance, info, head, made)

    def check_encoding(
        self, drafters: Sequence[str] | None, asked: Mapping[str, str]
    ) -> None:
        """StoreError if a feature is not captured, or if the store keeps it in another encoding."""
        if self.store is None:
            return  # the features are known once the target is
        held = {
            feature: one
            for one in (self.store, *self.store.annexes)
            for feature in one.layout.features
        }
        captured = {
            feature.name
            for feature in {*held} | self._needs(drafters or (), self.store.info)
        }
        for name, encoding in asked.items():
            check_captured(name, encoding, captured)
            holder = held.get(Feature.parse(name))
            if (
                holder
                and (other := holder.layout.encoding.get(name, "raw")) != encoding
            ):
                raise StoreError(
                    f"the store {self.path} keeps {name} as {other}, not {encoding}: omit --encoding {name}, "
                    "or give another --store"
                )

    def check_target_dtype(self, dtype: str) -> None:
        """StoreError if the features in the store come from a target that ran in another dtype."""
        if self.store and (theirs := self.store.record.head.dtype) != dtype:
            raise StoreError(
                f"the store {self.path} holds features of a target that ran in {theirs}, and this one runs "
                f"in {dtype}: give --target-dtype {theirs}, or another --store"
            )

    def check_engine(self, engine: EngineName) -> None:
        """StoreError if another engine computed the features in the store."""
        if (
            self.store
            and (theirs := self.store.provenance.engine.partition(" ")[0]) != engine
        ):
            raise StoreError(
                f"the store {self.path} holds features that {theirs} computed: give --engine {theirs}, or "
                "another --store"
            )

    def check_origin(self, fingerprint: Fingerprint) -> None:
        """StoreError that names the hash in which the store's target differs."""
        for name in ("config", "weights", "processor") if self.store else ():
            theirs, mine = (
                getattr(self.made.provenance, f"{name}_hash"),
                getattr(fingerprint, name),
            )
            if theirs != mine:
                raise StoreError(
                    f"the store {self.path} is of another target ({name}_hash: {theirs}, not {mine}): give "
                    "another --store"
                )


def check_captured(name: str, encoding: str, captured: Collection[str]) -> None:
    """StoreError if a feature that is given an encoding is not captured."""
    if name not in captured:
        raise StoreError(
            f"--encoding {name}={encoding}: choose from the captured features {', '.join(sorted(captured))}"
        )


def drafters(names: str) -> tuple[str, ...] | None:
    """Parse `a,b`, or `all` (None). DataError on an unknown name."""
    if names == "all":
        return None
    listed = tuple(catalogue.listed(names))
    for name in listed:
        if not catalogue.is_trained(name):
            raise DataError(
                f"--for {names}: {name} needs no features, leave it out: `vlmdistill eval {name}`"
            )
    if not listed:
        raise DataError(
            f"--for '{names}' names no drafter: give names separated by commas, or all"
        )
    return listed


def encodings(texts: Sequence[str]) -> dict[str, str]:
    """Parse `FEATURE=ENCODING` options, such as `hidden.text=int8`; DataError if one is malformed."""
    parsed = dict[str, str]()
    for text in texts:
        name, equals, encoding = text.partition("=")
        if not equals or encoding not in ENCODINGS:
            raise DataError(
                f"--encoding {text}: write FEATURE={'|'.join(ENCODINGS)}, such as hidden.text=int8"
            )
        if parsed.setdefault(Feature.parse(name).name, encoding) != encoding:
            raise DataError(
                f"--encoding gives {name} as {parsed[name]} and as {encoding}: give one of them"
            )
    return parsed
