"""The catalogue: every drafter by name. A test checks it against the folder."""

import importlib

from vlmdistill.drafters.base import Drafter, DrafterConfig, Proposer
from vlmdistill.drafters.config import override
from vlmdistill.stores.errors import DataError

DRAFTERS = {
    "eagle2": "Eagle2",
    "eagle3": "Eagle3",
    "hass": "Hass",
    "hivis": "HiViS",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "msd": "MSD",
    "sparrow": "Sparrow",
    "specflash": "SpecFlash",
    "specvlm": "SpecVLM",
    "text_only": "TextOnly",
    "vispec": "ViSpec",
}
"""Name (its module in this folder) -> class."""

VARIANTS = {
    "msd_vata": ("msd", ("vata=true",)),
    "semiar": ("specflash", ("compress=false",)),
    "viscomp": ("specflash", ("group=1", "tree=chain-4")),
}
"""What the papers compare with and that is a drafter with other settings: name -> (drafter, settings)."""

NAMES = (*DRAFTERS, *VARIANTS)


def load(name: str) -> type[Proposer]:
    """The class of a drafter or variant; DataError with the known names when there is none."""
    if name not in NAMES:
        raise DataError(f"there is no drafter '{name}'; choose from {', '.join(sorted(NAMES))}")
    module = base(name)
    proposer: type[Proposer] = getattr(
        importlib.import_module(f"vlmdistill.drafters.{module}"), DRAFTERS[module]
    )
    return proposer


def trained(name: str) -> type[Drafter]:
    """The class of a drafter that is trained; DataError when it needs no training."""
    kind = load(name)
    if not issubclass(kind, Drafter) or not kind.Config().stages:
        raise DataError(f"{name} needs no training: evaluate it as it is, `vlmdistill eval {name}`")
    return kind


def is_trained(name: str) -> bool:
    """Whether there is anything to train."""
    return bool(load(name).Config().stages)


def base(name: str) -> str:
    """The drafter that a name stands for: its own, or that of a variant."""
    return VARIANTS[name][0] if name in VARIANTS else name


def config(name: str) -> DrafterConfig:
    """The paper's configuration of a drafter or variant."""
    settings = VARIANTS[name][1] if name in VARIANTS else ()
    return override(load(name).Config(), settings)
