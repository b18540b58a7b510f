"""The catalogue: every drafter and every recipe by name.

Light to import, so that a wrong name fails before torch loads.
"""

import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

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
"""Drafters that need no training."""


@dataclass(frozen=True)
class Variant:
    """A drafter with other settings, and a name of its own."""

    drafter: str
    settings: tuple[str, ...]
    """As for `--set`."""


HASS = (
    "batch_tokens=32768",
    "warmup=0.01",
    "detach=true",
    "tree=60-5-10",
    "stages.*.hops=3",
    "stages.text.epochs=40",
    "stages.multimodal.epochs=10",
    "stages.multimodal.learning_rate=1e-5",
    'stages.multimodal.losses={"regression":1.0,"cross_entropy":0.1,"top_k":1.0}',
)
"""The official code's hops, losses, epochs, learning rates, warm-up and batch."""

DSPARK = (
    "markov=256",
    "tells=true",
    "from_anchor=true",
    'stages.*.losses={"cross_entropy":0.1,"l1":0.9,"confidence":1.0}',
)

VARIANTS = {
    "dspark": Variant("dflash", DSPARK),
    "hass": Variant("eagle2", HASS),
    "msd_vata": Variant("msd", ("vata=true",)),
    "semiar": Variant("specflash", ("compress=false",)),
    "viscomp": Variant("specflash", ("group=1", "tree=chain-4")),
}
"""Methods and baselines of the papers that are another drafter with other settings."""

NAMES = (*DRAFTERS, *VARIANTS)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a user chooses a method by."""

    paper: str
    """The paper's name for it and the year."""
    good_for: str
    states: tuple[int, int] = (0, 0)
    """States of the target in a store for each text token, and for each visual token."""
    engines: tuple[str, ...] = ("vLLM",)
    """Engines that load what `export` writes."""
    plugin: bool = True
    """Whether vLLM loads it with the plugin alone."""
    tau: str = "-"
    """At temperature 0, as papers print it on images or videos, with what it counts
    (docs/papers.md)."""
    reached: tuple[float, ...] = ()
    """Acceptance by drafted token on `demo-small` (docs/measurements/results.md)."""

    @property
    def engine_names(self) -> str:
        """The engines in words."""
        engines = ", ".join(self.engines) or "-"
        return (
            engines.replace("vLLM", "vLLM with the plugin") if self.plugin else engines
        )


@cache
def choices() -> Mapping[str, Choice]:
    """What to choose each method by, from `choices.toml`."""
    file = Path(__file__).with_name("choices.toml")
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return msgspec.convert(table, dict[str, Choice])


def choice(name: str) -> Choice:
    """What to choose a method by; of one without an entry, little is known."""
    return choices().get(name, Choice(paper="-", good_for="-", engines=()))


@dataclass(frozen=True)
class Recipe:
    """Training settings that are the same for every drafter, so that drafters compare."""

    about: str
    settings: str = ""
    """As for `--set`, separated by spaces."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """By the name of a stage; other stages keep their paper's epochs."""


HALF_VISUAL = "stages.*.visual=[0.5,0.5]"
EQUAL = (
    "steps=40000 stages.*.learning_rate=1e-4 batch_tokens=16384 tree=30-3-8 warmup=0.05"
)
SMALL = (
    "steps=600 stages.*.learning_rate=2e-3 batch_tokens=2048 tree=chain-4 "
    "warmup=0.05 clip=1.0"
)
SMALL_EPOCHS = {"text": 1, "multimodal": 9}

FAIR = Recipe(
    "the same steps, tree and share of images for all, to compare methods",
    f"{EQUAL} {HALF_VISUAL}",
)
FAIR_PAPER = Recipe("as fair, with each paper's own schedule of images and text", EQUAL)
SMALL_TARGET = Recipe(
    "as fair, for small targets and 100,000 response tokens or so: hours of a CPU",
    "steps=2000 stages.*.learning_rate=1e-3 batch_tokens=1024 tree=chain-4 "
    f"warmup=0.05 clip=1.0 {HALF_VISUAL}",
)
DEMO = Recipe(
    "as fair, for the embedded targets", f"{SMALL} {HALF_VISUAL}", SMALL_EPOCHS
)
DEMO_PAPER = Recipe(
    "as demo, with each paper's own schedule of images and text", SMALL, SMALL_EPOCHS
)
RECIPES = {
    "paper": Recipe(
        "each method's own settings: those of its paper or code; of wren, this project's"
    ),
    "fair": FAIR,
    "fair-paper": FAIR_PAPER,
    "small": SMALL_TARGET,
    "demo": DEMO,
    "demo-paper": DEMO_PAPER,
}


def check_recipe(name: str) -> None:
    """DataError on an unknown recipe."""
    if name in RECIPES:
        return
    near = did_you_mean(name, RECIPES)
    choice = ", ".join(RECIPES)
    raise DataError(f"there is no recipe '{name}'{near}; choose from {choice}")


def check(name: str) -> None:
    """DataError on an unknown name."""
    if name in NAMES:
        return
    near = did_you_mean(name, NAMES)
    choice = ", ".join(sorted(NAMES))
    raise DataError(f"there is no drafter '{name}'{near}; choose from {choice}")


def listed(names: str) -> list[str]:
    """The names of a list such as `sparrow,wren`, without repetitions; none for `all`.

    DataError on an unknown name.
    """
    if names == "all":
        return []
    stripped = [name.strip() for name in names.split(",")]
    drafters = [*dict.fromkeys(filter(None, stripped))]
    for name in drafters:
        check(name)
    return drafters


def load(name: str) -> "type[Proposer]":
    """The class of a drafter or variant; DataError on an unknown name."""
    check(name)
    drafter = base(name)
    module = importlib.import_module(f"vlmdistill.drafters.{drafter}")
    kind: type[Proposer] = getattr(module, DRAFTERS[drafter])
    return kind


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
    """The drafter that a variant is made of; another name is returned as it is."""
    return VARIANTS[name].drafter if name in VARIANTS else name


def config(name: str) -> "DrafterConfig":
    """The paper's settings of a drafter or variant."""
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.drafters.core.settings import override

    kind = load(name)
    settings = VARIANTS[name].settings if name in VARIANTS else ()
    paper = DrafterConfig(kind.Config(), kind.Training(), kind.tree)
    return override(paper, settings)
