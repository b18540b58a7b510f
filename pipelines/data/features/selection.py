"""Choose the features to capture, and the encoding of each in the store."""

from collections.abc import Collection, Mapping, Sequence

from vlmdistill.drafters.core import catalogue
from vlmdistill.pipelines.cluster.environment import EngineName
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.layout import ENCODINGS
from vlmdistill.stores.manifest import STORE
from vlmdistill.stores.schema import Feature, TargetInfo
from vlmdistill.stores.store import Store


def drafters(names: str) -> tuple[str, ...] | None:
    """Parse `a,b`, or `all` (None). DataError on an unknown name."""
    if names == "all":
        return None
    listed = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in listed:
        if not catalogue.is_trained(name):
            raise DataError(
                f"--for {names}: {name} needs no features, leave it out: `vlmdistill eval {name}`"
            )
    if not listed:
        raise DataError(f"--for '{names}' names no drafter: give names separated by commas, or all")
    return listed


def select_features(
    store: Store | None, drafters: Sequence[str] | None, info: TargetInfo
) -> frozenset[Feature]:
    """The features to capture: those of an existing store, else the union of what the drafters need.

    `drafters` None means all, which an existing store need not serve. StoreError if the store lacks what one
    of the given drafters needs.
    """
    needs = {name: catalogue.config(name).model.needs(info) for name in (drafters or catalogue.NAMES)}
    if store is None:
        return frozenset().union(*needs.values())
    held = features_of(store)
    for name, wanted in needs.items():
        if drafters and wanted - held:
            lacking = ", ".join(sorted(feature.name for feature in wanted - held))
            raise StoreError(
                f"the store {store.path} lacks {lacking}, which {name} needs: give another --store, and name "
                "all drafters at once, such as --for sparrow,eagle2"
            )
    return held


def encodings(texts: Sequence[str], store: str) -> dict[str, str]:
    """Parse `FEATURE=ENCODING` options, such as `hidden.text=int8`.

    DataError if one is malformed; StoreError if an existing store keeps the feature in another encoding.
    """
    parsed = dict[str, str]()
    for text in texts:
        name, equals, encoding = text.partition("=")
        if not equals or encoding not in ENCODINGS:
            raise DataError(
                f"--encoding {text}: write FEATURE={'|'.join(ENCODINGS)}, such as hidden.text=int8"
            )
        if parsed.setdefault(Feature.parse(name).name, encoding) != encoding:
            raise DataError(f"--encoding gives {name} as {parsed[name]} and as {encoding}: give one of them")
    if (there := store_at(store)) is not None:
        check_encoding(there, features_of(there), parsed)
    return parsed


def check_encoding(store: Store | None, features: Collection[Feature], asked: Mapping[str, str]) -> None:
    """StoreError if a feature is not captured, or if an existing store keeps it in another encoding."""
    captured = sorted(feature.name for feature in features)
    for name, encoding in asked.items():
        if name not in captured:
            raise StoreError(
                f"--encoding {name}={encoding}: choose from the captured features {', '.join(captured)}"
            )
        if store is not None and (other := store.layout.encoding.get(name, "raw")) != encoding:
            raise StoreError(
                f"the store {store.path} keeps {name} as {other}, not {encoding}: omit --encoding {name}, or "
                "give another --store"
            )


def check_dtype(store: Store | None, dtype: str) -> None:
    """StoreError if the features in the store come from a target that ran in another dtype."""
    if store is not None and (theirs := store.record.head.dtype) != dtype:
        raise StoreError(
            f"the store {store.path} holds features of a target that ran in {theirs}, and this one runs in "
            f"{dtype}: give --target-dtype {theirs}, or another --store"
        )


def check_engine(store: Store | None, engine: EngineName) -> None:
    """StoreError if another engine computed the features in the store."""
    if store is not None and (theirs := store.provenance.engine.partition(" ")[0]) != engine:
        raise StoreError(
            f"the store {store.path} holds features that {theirs} computed: give --engine {theirs}, or "
            "another --store"
        )


def store_at(path: str) -> Store | None:
    """The store at a path or URL; None if there is none."""
    return None if open_backend(path).size(STORE) is None else Store.open(path)


def features_of(store: Store) -> frozenset[Feature]:
    """The features that a store holds."""
    return frozenset(map(Feature.parse, store.provenance.features))
