"""Train and compare drafters for speculative decoding of vision-language models.

The names below are the public API; `docs/api.md` shows each in use. A name is imported when it is first used,
so that `import vlmdistill` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmdistill.data import create_store as create_store
    from vlmdistill.data import open_store as open_store
    from vlmdistill.drafters.core.batch import Batch as Batch
    from vlmdistill.drafters.training.unroll import unroll as unroll
    from vlmdistill.inference import Chunk as Chunk
    from vlmdistill.inference import generate as generate
    from vlmdistill.inference import load_drafter as load_drafter
    from vlmdistill.inference import load_target as load_target
    from vlmdistill.packing import StoreDataset as StoreDataset
    from vlmdistill.packing import iterate_batches as iterate_batches
    from vlmdistill.stages import TrainedDrafter as TrainedDrafter
    from vlmdistill.stages import evaluate as evaluate
    from vlmdistill.stages import export as export
    from vlmdistill.stages import features as features
    from vlmdistill.stages import prompts as prompts
    from vlmdistill.stages import report as report
    from vlmdistill.stages import responses as responses
    from vlmdistill.stages import status as status
    from vlmdistill.stages import train as train
    from vlmdistill.stores.errors import VlmdistillError as VlmdistillError
    from vlmdistill.stores.loader.tensors import as_numpy as as_numpy
    from vlmdistill.stores.loader.tensors import as_torch as as_torch
    from vlmdistill.stores.schema import Feature as Feature
    from vlmdistill.stores.schema import Sample as Sample
    from vlmdistill.stores.schema import Span as Span
    from vlmdistill.stores.store import Store as Store
    from vlmdistill.training import NewDrafter as NewDrafter
    from vlmdistill.training import new_drafter as new_drafter

    __all__: list[str]
    __version__: str

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


# A type checker knows the names above, and that there are no others.
if not TYPE_CHECKING:
    __all__ = sorted(name for names in _MODULES.values() for name in names)

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
