"""The store that a run captures into, or an annex of it: which features, and what it must agree with."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.cluster.engine_environment import EngineName
from vlmdistill.pipelines.cluster.shared import marked
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.targets.checkpoints.fingerprint import Fingerprint
from vlmdistill.pipelines.targets.checkpoints.template import DEFAULT, Thinking
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.annexes import annex_folder
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.layout import ENCODINGS
from vlmdistill.stores.schema import (
    Feature,
    FrozenTables,
    Provenance,
    TargetInfo,
    agree,
)
from vlmdistill.stores.sharing.retention import expire
from vlmdistill.stores.store import Store

HASHES = ("config", "weights", "processor")  # of a target, which samples depend on


class CaptureStore:
    """The store of a run, or an annex of it; workers may have yet to create it. Pickled, it is opened anew.

    Attributes:
        path: The folder or URL of the store, as the user gave it.
        backend: The files of the store.
        annex: The features of the annex that is captured into; empty for the store itself.
    """

    def __init__(self, path: str | Path, annex: Collection[str] = ()) -> None:
        self.path = os.path.expanduser(path)
        is_url = "://" in self.path
        self.backend = open_backend(self.path if is_url else Path(self.path).absolute())
        self.annex = tuple(sorted(annex))
        self._base: Store | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CaptureStore, (self.backend.url, self.annex)

    @property
    def base(self) -> Store | None:
        """The store, also if an annex of it is captured into; None while it does not exist."""
        if self._base is None:
            self._base = Store.find(self.backend)
        return self._base

    @property
    def current(self) -> Store | None:
        """The store or annex to capture into; None while it does not exist."""
        if not self.annex:
            return self.base
        return Store.find(self.backend.within(annex_folder(self.annex)))

    def open(self) -> Store:
        """The store or annex to capture into; StoreError if it does not exist."""
        return self.current or Store.open(self.backend)

    def keys(self) -> set[str]:
        """The keys of the samples that are captured already."""
        current = self.current
        return set() if current is None else current.keys()

    def annexes(self, drafters: Sequence[str] | None) -> "list[CaptureStore]":
        """The annexes of the store, and one more for features that the drafters need and the store lacks."""
        if self.base is None:
            return []
        names = [annex.provenance.features for annex in self.base.annexes]
        lacking = self._needs(drafters or (), self.base.info) - {*self.base.features}
        if lacking:
            names.append(tuple(feature.name for feature in lacking))
        return [CaptureStore(self.path, annex) for annex in names]

    @contextmanager
    def writing(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Lock the store against other runs, to add samples of these prompts; see `only_writer`.

        DataError if some of them are deleted. At a URL that may happen meanwhile, since another machine takes
        over the lock of one that sleeps; then their samples do not stay.
        """
        with only_writer(self.path):
            prompt_table.require_listed(prompts)
            if "://" not in self.path:
                yield
                return
            try:
                yield
            finally:
                self._remove(prompt_table.deleted(prompts))
            prompt_table.require_listed(prompts)

    def _remove(self, keys: Collection[str]) -> None:
        """Remove the samples of deleted prompts."""
        store = Store.find(self.backend)
        if keys and store is not None:
            expire(store, before=-math.inf, keys=keys)

    def marked(self) -> AbstractContextManager[str]:
        """Mark the store, so that workers can tell if they see it; see `marked`."""
        return marked(self.backend)

    @staticmethod
    def _needs(drafters: Sequence[str], info: TargetInfo) -> frozenset[Feature]:
        """The features that any of the drafters needs."""
        needs = [catalogue.config(name).model.needs(info) for name in drafters]
        return frozenset().union(*needs)

    def select(
        self, drafters: Sequence[str] | None, info: TargetInfo
    ) -> frozenset[Feature]:
        """The features to capture: all of an existing store or annex; for a new store what drafters need.

        `drafters` None means all.
        """
        if self.annex:
            return frozenset(map(Feature.parse, self.annex))
        if self.base is None:
            return self._needs(drafters or catalogue.NAMES, info)
        return frozenset(map(Feature.parse, self.base.provenance.features))

    def create(
        self,
        provenance: Provenance,
        info: TargetInfo,
        head: FrozenTables,
        encoding: Mapping[str, str],
    ) -> Store:
        """The store or annex, created if it does not exist; StoreError that names what differs.

        `encoding` applies to a new one. An existing one keeps its own.
        """
        new_encoding = None if self.current else encoding
        if not self.annex:
            return Store.create(self.backend, provenance, info, head, new_encoding)
        base = Store.open(self.backend)
        base.require(replace(provenance, features=base.provenance.features), info)
        return base.annex(self.annex, new_encoding)

    def check_encoding(
        self, drafters: Sequence[str] | None, wanted: Mapping[str, str]
    ) -> None:
        """StoreError if a feature is not captured, or if the store keeps it in another encoding."""
        if self.base is None:
            return  # the features are known once the target is
        holders = dict[Feature, Store]()
        for store in (self.base, *self.base.annexes):
            holders |= dict.fromkeys(store.layout.features, store)
        needed = self._needs(drafters or (), self.base.info)
        captured = {feature.name for feature in {*holders} | needed}
        for name, encoding in wanted.items():
            check_captured(name, encoding, captured)
            holder = holders.get(Feature.parse(name))
            if holder is None:
                continue
            stored = holder.layout.encoding.get(name, "raw")
            if stored != encoding:
                raise StoreError(
                    f"the store {self.path} keeps {name} as {stored}, not {encoding}: omit "
                    f"--encoding {name}, or give another --store"
                )

    def check_target_dtype(self, dtype: str) -> None:
        """StoreError if the features in the store come from a target that ran in another dtype."""
        if self.base is None:
            return
        stored = self.base.record.head.dtype
        if stored != dtype:
            raise StoreError(
                f"the store {self.path} holds features of a target that ran in {stored}, and this one runs "
                f"in {dtype}: give --target-dtype {stored}, or another --store"
            )

    def check_engine(self, engine: EngineName) -> None:
        """StoreError if another engine computed the features in the store."""
        if self.base is None:
            return
        stored = self.base.provenance.engine.partition(" ")[0]
        if stored != engine:
            raise StoreError(
                f"the store {self.path} holds features that {stored} computed: give --engine {stored}, or "
                "another --store"
            )

    def check_origin(self, fingerprint: Fingerprint, thinking: Thinking) -> None:
        """StoreError that names the hash in which the store's target differs, or its thinking."""
        if self.base is None:
            return
        provenance = self.open().provenance
        for name in HASHES:
            stored = getattr(provenance, f"{name}_hash")
            expected = getattr(fingerprint, name)
            if not agree(stored, expected):
                raise StoreError(
                    f"the store {self.path} is of another target ({name}_hash: {stored}, not {expected}): "
                    "give another --store"
                )
        stored_mode = provenance.thinking
        if stored_mode != thinking:
            raise StoreError(
                f"the store {self.path} has responses with thinking {stored_mode or DEFAULT}, and these "
                f"are with thinking {thinking or DEFAULT}: give another --store"
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
            f"--for '{names}' is empty: give names separated by commas, or all"
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
