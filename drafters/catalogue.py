"""The catalogue: every drafter by name. A test checks it against the folder."""

import importlib

from vlmdistill.drafters.base import Drafter
from vlmdistill.stores.errors import DataError

DRAFTERS = {
    "eagle2": "Eagle2",
    "eagle3": "Eagle3",
    "hass": "Hass",
    "hivis": "HiViS",
    "medusa": "Medusa",
    "msd": "MSD",
    "sparrow": "Sparrow",
    "vispec": "ViSpec",
}
"""Name (its module in this folder) -> class."""


def load(name: str) -> type[Drafter]:
    """The drafter class of that name; DataError with the known names when there is none."""
    if name not in DRAFTERS:
        raise DataError(f"there is no drafter '{name}'; choose from {', '.join(sorted(DRAFTERS))}")
    module = importlib.import_module(f"vlmdistill.drafters.{name}")
    drafter: type[Drafter] = getattr(module, DRAFTERS[name])
    return drafter
