"""The catalogue: every drafter and every recipe by name.

Light to import, so that a wrong name fails before torch loads.
"""

import ast
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean

if TYPE_CHECKING:
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.drafters.core.drafter import Drafter, Proposer

DRAFTERS = {
    "dflash": "DFlash",
    "dream": "Dream",
    "eagle2": "Eagle2",
    "eagle3": "Eagle3",
    "eaglevlm": "EagleVLM",
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


@dataclass(frozen=True)
class Recipe:
    """Settings for every drafter, so that drafters compare."""

    about: str
    settings: str = ""
    """As for `--set`, with spaces between."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """By the name of a stage; a stage of another name keeps its paper's epochs."""


_EQUAL = Recipe(
    "as fair, with each paper's own schedule of images and text",
    "steps=40000 stages.*.learning_rate=1e-4 batch_tokens=16384 tree=30-3-8 warmup=0.05",
)
_SMALL = Recipe(
    "as demo, with each paper's own schedule of images and text",
    "steps=600 stages.*.learning_rate=2e-3 batch_tokens=2048 tree=chain-4 warmup=0.05 clip=1.0",
    {"text": 1, "multimodal": 9},
)


def _mixed(recipe: Recipe, about: str) -> Recipe:
    return replace(
        recipe, about=about, settings=f"{recipe.settings} stages.*.visual=[0.5,0.5]"
    )


RECIPES = {
    "paper": Recipe("each paper's own settings"),
    "fair": _mixed(
        _EQUAL, "the same steps, tree and share of images for all, to compare methods"
    ),
    "fair-paper": _EQUAL,
    "demo": _mixed(_SMALL, "as fair, for the embedded targets"),
    "demo-paper": _SMALL,
}


def check_recipe(name: str) -> None:
    """DataError on an unknown recipe."""
    if name not in RECIPES:
        near = did_you_mean(name, RECIPES)
        raise DataError(
            f"there is no recipe '{name}'{near}; choose from {', '.join(RECIPES)}"
        )


def about(name: str) -> str:
    """What a drafter is, in one line: that of its class, and the settings of a variant."""
    source = (Path(__file__).parent / f"{base(name)}.py").read_text(encoding="utf-8")
    kind = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == DRAFTERS[base(name)]
    )
    line = (ast.get_docstring(kind) or "").partition("\n")[0]
    return (
        f"{base(name)} with {' '.join(VARIANTS[name][1])}" if name in VARIANTS else line
    )


def check(name: str) -> None:
    """DataError on an unknown name."""
    if name not in NAMES:
        near = did_you_mean(name, NAMES)
        raise DataError(
            f"there is no drafter '{name}'{near}; choose from {', '.join(sorted(NAMES))}"
        )


def listed(names: str) -> list[str]:
    """The names of a list such as `sparrow,wren`; none for `all`. DataError on an unknown name."""
    some = (
        []
        if names == "all"
        else [*dict.fromkeys(one.strip() for one in names.split(",") if one.strip())]
    )
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
        raise DataError(
            f"{name} needs no training: evaluate it as it is, `vlmdistill eval {name}`"
        )
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
