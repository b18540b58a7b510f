"""The store that a run captures into: what it is checked for, and what is chosen to be captured."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.cluster.environment import EngineName
from vlmdistill.pipelines.cluster.shared import marked
from vlmdistill.pipelines.targets.checkpoints.fingerprint import Fingerprint
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.layout import ENCODINGS
from vlmdistill.stores.schema import Feature, TargetInfo
from vlmdistill.stores.store import Store


class StorePart:
    """The store of a run, which its workers may have yet to make. Pickled, it is opened anew, once a process.

    Attributes:
        path: The folder or URL, as the user gave it.
        backend: Its files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = os.path.expanduser(path)
        self.backend = open_backend(self.path if "://" in self.path else Path(self.path).absolute())
        self._store: Store | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StorePart, (self.backend.url,)

    @property
    def store(self) -> Store | None:
        """The store; None while there is none."""
        if self._store is None:
            self._store = Store.find(self.backend)
        return self._store

    @property
    def made(self) -> Store:
        """The store; StoreError when there is none."""
        return self.store or Store.open(self.backend)

    def writing(self) -> AbstractContextManager[object]:
        """Lock the store against other runs; see `only_writer`."""
        return only_writer(self.path)

    def marked(self) -> AbstractContextManager[str]:
        """Mark the store, so that workers can tell if they see it; see `marked`."""
        return marked(self.backend)

    def announce(self, samples: int) -> None:
        """Say in the store, if there is one, that it will hold so many samples: who follows it waits."""
        if self.store:
            self.store.announce(samples, ended=False)

    def select(self, drafters: Sequence[str] | None, info: TargetInfo) -> frozenset[Feature]:
        """The features to capture: those of an existing store, else the union of what the drafters need.

        `drafters` None means all, which an existing store need not serve. StoreError if the store lacks what
        one of the given drafters needs.
        """
        needs = {name: catalogue.config(name).model.needs(info) for name in (drafters or catalogue.NAMES)}
        if self.store is None:
            return frozenset().union(*needs.values())
        held = frozenset(map(Feature.parse, self.store.provenance.features))
        for name, wanted in needs.items():
            if drafters and wanted - held:
                lacking = ", ".join(sorted(feature.name for feature in wanted - held))
                raise StoreError(
                    f"the store {self.path} lacks {lacking}, which {name} needs: give another --store, and "
                    "name all drafters at once, such as --for sparrow,eagle2"
                )
        return held

    def check_encoding(self, features: Collection[Feature], asked: Mapping[str, str]) -> None:
        """StoreError if a feature is not captured, or if the store keeps it in another encoding."""
        captured = sorted(feature.name for feature in features)
        for name, encoding in asked.items():
            if name not in captured:
                raise StoreError(
                    f"--encoding {name}={encoding}: choose from the captured features {', '.join(captured)}"
                )
            if self.store and (other := self.store.layout.encoding.get(name, "raw")) != encoding:
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
        if self.store and (theirs := self.store.provenance.engine.partition(" ")[0]) != engine:
            raise StoreError(
                f"the store {self.path} holds features that {theirs} computed: give --engine {theirs}, or "
                "another --store"
            )

    def check_origin(self, fingerprint: Fingerprint) -> None:
        """StoreError that names the hash in which the store's target differs."""
        for name in ("config", "weights", "processor") if self.store else ():
            theirs, mine = getattr(self.made.provenance, f"{name}_hash"), getattr(fingerprint, name)
            if theirs != mine:
                raise StoreError(
                    f"the store {self.path} is of another target ({name}_hash: {theirs}, not {mine}): give "
                    "another --store"
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
        raise DataError(f"--for '{names}' names no drafter: give names separated by commas, or all")
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
            raise DataError(f"--encoding gives {name} as {parsed[name]} and as {encoding}: give one of them")
    return parsed
