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


def chosen(there: Store | None, drafters: Sequence[str] | None, info: TargetInfo) -> frozenset[Feature]:
    """What to capture: the union of the drafters' needs, or what the store that is there holds.

    StoreError when that store lacks what a drafter asked for needs. `drafters` None: all known ones,
    which an existing store need not serve.
    """
    from vlmdistill.drafters import catalogue

    needs = {
        name: catalogue.load(name).needs(catalogue.config(name), info)
        for name in (drafters or catalogue.NAMES)
    }
    if there is None:
        return frozenset().union(*needs.values())
    held = features_of(there)
    for name, wanted in needs.items():
        if drafters and wanted - held:
            lacking = ", ".join(sorted(feature.name for feature in wanted - held))
            raise StoreError(
                f"the store {there.path} lacks {lacking}, which {name} needs: capture into another --store, "
                "for all drafters at once, as in --for sparrow,eagle2"
            )
    return held


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
    if (there := store_at(store)) is not None:
        check_encoding(there, features_of(there), asked)
    return asked


def check_encoding(there: Store | None, features: Collection[Feature], asked: Mapping[str, str]) -> None:
    """StoreError when a field is not captured, or the store that is there keeps it in another way."""
    captured = sorted(feature.name for feature in features)
    for name, way in asked.items():
        if name not in captured:
            raise StoreError(f"--encoding {name}={way}: captured are only {', '.join(captured)}")
        if there is not None and (other := there.layout.encoding.get(name, "raw")) != way:
            what = f"the store {there.path} keeps {name} as {other}, not {way}"
            raise StoreError(f"{what}: leave its --encoding out, or give another --store")


def store_at(place: str) -> Store | None:
    """The store at that place; None when there is none."""
    return None if place_of(place).size(STORE) is None else Store.open(place)


def features_of(store: Store) -> frozenset[Feature]:
    """The features that a store holds."""
    return frozenset(map(Feature.parse, store.provenance.features))
