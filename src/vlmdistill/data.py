"""Feature stores for users: open one, or create one for the states of a target."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


def open_store(path: str | Path) -> Store:
    """Open a feature store for reading, or for adding samples.

    A store maps keys to samples: `len(store)`, `key in store`, `for key in store` and `store[key]` work as on
    a dictionary. Opening reads the index alone.

    Args:
        path: A local folder, or a URL that fsspec opens, such as `s3://bucket/features` or
            `https://host/features`.

    Returns:
        The store. Its `index` is a polars table with one row per sample, which has the key, the numbers of
        tokens and the columns that came with the sample.

    Raises:
        StoreError: There is no store at `path`, or it is damaged or of a newer format.

    Example:
        >>> store = vlmdistill.open_store("runs/demo/features")
        >>> sample = store["demo-000017"]
    """
    return Store.open(path)


def create_store(
    path: str | Path,
    target: "VisionLanguageTarget",
    features: Collection[str | Feature],
    *,
    dtype: str = "bfloat16",
    encoding: Mapping[str, str] | None = None,
) -> Store:
    """Create a store for hidden states of `target`, or open the one at `path` if its origin is the same.

    The store records the hashes of the target's weights, configuration and processor, and holds a copy of its
    frozen embedding table and LM head, so that drafters train from it without the target. Add samples with
    `store.writer(shard)`: all samples of one `with` block are stored, or none.

    Args:
        path: A local folder or a URL; it must be empty, or hold a store.
        target: The target that the states come from; see `load_target`.
        features: The features of every sample, such as `hidden.text`; see `Feature`.
        dtype: Number format of the stored features: `bfloat16`, `float16` or `float32`.
        encoding: How a feature is stored, by its name: `raw` (the default) or `int8`.

    Returns:
        The store.

    Raises:
        DataError: A name is not a feature.
        StoreError: The store at `path` has another origin, or the folder holds other files.

    Example:
        >>> store = vlmdistill.create_store("mine", target, ["hidden.text"])
        >>> with store.writer("first-shard") as writer:
        ...     writer.add(sample)
    """
    from vlmdistill.pipelines.data.features.capturer import stored_head

    provenance = target.provenance(features, dtype)
    return Store.create(path, provenance, target.info, stored_head(target), encoding)
