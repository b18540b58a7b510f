"""Which fields a capture brings into the store, and how each is kept there."""

from collections.abc import Collection, Mapping, Sequence

from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.layout import ENCODINGS
from vlmdistill.stores.manifest import STORE
from vlmdistill.stores.place import place_of
from vlmdistill.stores.schema import Feature, TargetInfo
from vlmdistill.stores.store import Store


def drafters(names: str) -> tuple[str, ...] | None:
    """Drafters as typed: `a,b`, or `all` (None). DataError on a name that is not known."""
    from vlmdistill.drafters import catalogue

    if names == "all":
        return None
    listed = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in listed:
        catalogue.load(name)
    if not listed:
        raise DataError("--for names no drafter: give names separated by commas, or all")
    return listed


def chosen(store: str, drafters: Sequence[str] | None, info: TargetInfo) -> frozenset[Feature]:
    """What to capture: the union of the drafters' needs, or what the store that is there holds.

    StoreError when that store lacks what a drafter asked for needs. `drafters` None: all known ones,
    which an existing store need not serve.
    """
    from vlmdistill.drafters import catalogue

    needs = {
        name: catalogue.load(name).needs(catalogue.config(name), info)
        for name in (drafters or catalogue.NAMES)
    }
    there = stored_features(store)
    if there is None:
        return frozenset().union(*needs.values())
    for name, wanted in needs.items():
        if drafters and wanted - there:
            lacking = ", ".join(sorted(feature.name for feature in wanted - there))
            raise StoreError(f"the store {store} lacks {lacking}, which {name} needs: give another --store")
    return there


def encodings(texts: Sequence[str], store: str) -> dict[str, str]:
    """Encodings as typed, `hidden.text=int8`: field -> raw, zstd or int8.

    DataError on one that is none; StoreError when the store that is there keeps a field in another way.
    """
    asked = dict[str, str]()
    for text in texts:
        name, equals, way = text.partition("=")
        if not equals or way not in ENCODINGS:
            raise DataError(f"--encoding {text}: write FIELD={'|'.join(ENCODINGS)}, as in hidden.text=int8")
        if asked.setdefault(Feature.parse(name).name, way) != way:
            raise DataError(f"--encoding gives {name} as {asked[name]} and as {way}: give one")
    if (there := stored_features(store)) is not None:
        check_encoding(store, there, asked)
    return asked


def check_encoding(store: str, features: Collection[Feature], asked: Mapping[str, str]) -> None:
    """StoreError when a field is not captured, or the store that is there keeps it in another way."""
    captured = sorted(feature.name for feature in features)
    kept = Store.open(store).layout.encoding if asked and stored_features(store) is not None else asked
    for name, way in asked.items():
        if name not in captured:
            raise StoreError(f"--encoding {name}={way}: captured are only {', '.join(captured)}")
        if (other := kept.get(name, "raw")) != way:
            what = f"the store {store} keeps {name} as {other}, not {way}"
            raise StoreError(f"{what}: leave its --encoding out, or give another --store")


def stored_features(store: str) -> frozenset[Feature] | None:
    """The features of the store at that place; None when there is none."""
    if place_of(store).size(STORE) is None:
        return None
    return frozenset(map(Feature.parse, Store.open(store).provenance.features))
