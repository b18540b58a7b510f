"""Train and compare drafters for speculative decoding of vision-language models.

The names below are the public API; `docs/api.md` shows each in use. A name is imported when it is first used,
so that `import vlmdistill` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmdistill.data import create_store, open_store
    from vlmdistill.drafters.core.batch import Batch
    from vlmdistill.drafters.training.unroll import unroll
    from vlmdistill.inference import Chunk, generate, load_drafter, load_target
    from vlmdistill.packing import StoreDataset, iterate_batches
    from vlmdistill.stages import (
        TrainedDrafter,
        evaluate,
        export,
        features,
        prompts,
        report,
        responses,
        status,
        train,
    )
    from vlmdistill.stores.errors import VlmdistillError
    from vlmdistill.stores.loader.tensors import as_numpy, as_torch
    from vlmdistill.stores.schema import Feature, Sample, Span
    from vlmdistill.stores.store import Store
    from vlmdistill.training import NewDrafter, new_drafter

    __version__: str

__all__ = [
    "Batch",
    "Chunk",
    "Feature",
    "NewDrafter",
    "Sample",
    "Span",
    "Store",
    "StoreDataset",
    "TrainedDrafter",
    "VlmdistillError",
    "as_numpy",
    "as_torch",
    "create_store",
    "evaluate",
    "export",
    "features",
    "generate",
    "iterate_batches",
    "load_drafter",
    "load_target",
    "new_drafter",
    "open_store",
    "prompts",
    "report",
    "responses",
    "status",
    "train",
    "unroll",
]

_MODULES = {
    "data": ("create_store", "open_store"),
    "drafters.core.batch": ("Batch",),
    "drafters.training.unroll": ("unroll",),
    "inference": ("Chunk", "generate", "load_drafter", "load_target"),
    "packing": ("StoreDataset", "iterate_batches"),
    "stages": (
        "TrainedDrafter",
        "evaluate",
        "export",
        "features",
        "prompts",
        "report",
        "responses",
        "status",
        "train",
    ),
    "stores.errors": ("VlmdistillError",),
    "stores.loader.tensors": ("as_numpy", "as_torch"),
    "stores.schema": ("Feature", "Sample", "Span"),
    "stores.store": ("Store",),
    "training": ("NewDrafter", "new_drafter"),
}
"""Where each public name is defined."""


if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("vlmdistill")
        for module, names in _MODULES.items():
            if name in names:
                value = getattr(importlib.import_module(f"vlmdistill.{module}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'vlmdistill' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
