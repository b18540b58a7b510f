"""The catalogue: every drafter by name.

Light to import, so that a wrong name fails before torch loads.
"""

import importlib
from typing import TYPE_CHECKING, cast

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean

if TYPE_CHECKING:
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.drafters.core.drafter import Drafter, Proposer

DRAFTERS = {
    "dflash": "DFlash",
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
    "wren": "Wren",
}
"""Module -> class."""

UNTRAINED = ("lookahead", "specvlm")
"""Those that need no training."""

DSPARK = (
    "markov=256",
    "tells=true",
    "from_anchor=true",
    'stages.*.losses={"cross_entropy":0.1,"l1":0.9,"confidence":1.0}',
)

VARIANTS = {
    "dspark": ("dflash", DSPARK),
    "msd_vata": ("msd", ("vata=true",)),
    "semiar": ("specflash", ("compress=false",)),
    "viscomp": ("specflash", ("group=1", "tree=chain-4")),
}
"""Baselines of the papers that are a drafter with other settings: name -> (drafter, settings)."""

NAMES = (*DRAFTERS, *VARIANTS)


def check(name: str) -> None:
    """DataError on an unknown name."""
    if name not in NAMES:
        near = did_you_mean(name, NAMES)
        raise DataError(f"there is no drafter '{name}'{near}; choose from {', '.join(sorted(NAMES))}")


def listed(names: str) -> list[str]:
    """The names of a list such as `sparrow,wren`; none for `all`. DataError on an unknown name."""
    some = [] if names == "all" else [*dict.fromkeys(one.strip() for one in names.split(",") if one.strip())]
    for name in some:
        check(name)
    return some


def load(name: str) -> "type[Proposer]":
    """The class of a drafter or variant; DataError on an unknown name."""
    check(name)
    module = base(name)
    proposer: type[Proposer] = getattr(
        importlib.import_module(f"vlmdistill.drafters.{module}"), DRAFTERS[module]
    )
    return proposer


def trained(name: str) -> "type[Drafter]":
    """The class of a drafter that is trained; DataError when it needs no training."""
    if not is_trained(name):
        raise DataError(f"{name} needs no training: evaluate it as it is, `vlmdistill eval {name}`")
    return cast("type[Drafter]", load(name))


def is_trained(name: str) -> bool:
    """Whether there is anything to train; DataError on an unknown name."""
    check(name)
    return base(name) not in UNTRAINED


def base(name: str) -> str:
    """The name of the drafter that a variant is made of; another name is returned as it is."""
    return VARIANTS[name][0] if name in VARIANTS else name


def config(name: str) -> "DrafterConfig":
    """The paper's settings of a drafter or variant."""
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.drafters.core.settings import override

    kind = load(name)
    settings = VARIANTS[name][1] if name in VARIANTS else ()
    return override(DrafterConfig(kind.Config(), kind.Training(), kind.tree), settings)
