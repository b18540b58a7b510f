"""The settings of a drafter: what it computes, how it is trained, and the tree that it drafts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from vlmdistill.drafters.core.losses import NAMES
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo

ALWAYS = 4096  # tokens of a sample that is trained at any `batch_tokens`
Positions = Literal["expanded", "target", "compact"]


def features(*names: str) -> frozenset[Feature]:
    """Features by name, such as `hidden.text`."""
    return frozenset(map(Feature.parse, names))


def depths(layers: int) -> tuple[str, str, str]:
    """EAGLE-3's layers, whose inputs are read: 2, half, the last but two; kept apart on shallow targets."""
    middle = layers // 2
    low, high = min(2, max(middle - 1, 0)), min(max(layers - 3, middle + 1), layers - 1)
    return f"layer{low}", f"layer{middle}", f"layer{high}"


def at_least(settings: object, least: int, *names: str, most: float = inf) -> None:
    """DataError names the first of the settings that is smaller, larger than `most`, or not finite."""
    for name in names:
        if not (least <= (value := getattr(settings, name)) <= most and value < inf):
            limit = "" if most == inf else f", at most {most:g}"
            raise DataError(f"{name}={value}: give a number of at least {least}{limit}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a drafter computes, in training and in decoding alike. A method's `Config` adds its switches."""

    kv_heads: Literal["all", "target"] = "all"
    """Key heads of the drafter's layer: as many as query heads (the published sizes), or the target's."""
    positions: Positions = "expanded"
    """Rotary positions: index in the expanded sequence, the target's own on text, or text tokens alone."""
    attention_window: int = 0
    """How many positions of the expanded sequence the drafter's layers see of what is committed, the last one
    included; 0: all. Visual ones count even if it reads none. No weight depends on it."""

    def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Exactly the features that it reads in training, or of a prompt when `decoding`."""
        return frozenset()

    @property
    def max_hops(self) -> int | None:
        """The most tokens that it can draft in a row; None: any number.

        Deeper trees are cut. Every stage trains that many hops.
        """
        return None

    @property
    def tells_confidence(self) -> bool:
        """Whether the drafter has a head for the chance that its guess is accepted."""
        return False

    @property
    def learns_middle(self) -> bool:
        """Whether the drafter has a state that learns from a layer of the target below the last."""
        return False

    def middle_source(self, info: TargetInfo) -> str | None:
        """The states of that layer; None: it has no such state."""
        return None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of training: what data, how long, how many self-feedback hops, which losses."""

    name: str
    epochs: float = 20.0
    """Passes over its samples. If the run counts `steps`: its share of them, relative to other stages."""
    visual: tuple[float, float] = (0.0, 1.0)
    """Share of samples with images, ramped over the stage; (0, 0) is text only, (1, 1) images only."""
    hops: int = 1
    """Draft steps unrolled per position; 1 is plain teacher forcing."""
    hop_decay: float = 1.0
    """Weight of each hop relative to the one before."""
    pace: float = 0.0
    """Each row's hops weigh by the chance that they are reached (D-PACE, arXiv 2605.18810), into which this
    share of certainty is mixed (the paper: 0.5); 0: all alike."""
    learning_rate: float = 3e-5
    anchors: int = 0
    """The most response positions of a sample that are trained in a step, random runs of 16; 0: all."""
    keep_top: int = 0
    """Dynamic filtering (HiViS): a row stops counting at the first hop whose target token is not among the
    drafter's `keep_top` best; 0 keeps all."""
    keep_failing: bool = False
    """That hop itself still counts."""
    view: str = ""
    """View of the store that the stage is trained on; empty: the run's own."""
    losses: Mapping[str, float] = field(
        default_factory=lambda: {"regression": 1.0, "cross_entropy": 0.1}
    )
    """Weight of each term of `losses.py`."""

    def __post_init__(self) -> None:
        at_least(self, 0, "epochs", "learning_rate", "keep_top", "hop_decay", "anchors")
        at_least(self, 0, "pace", most=1)
        at_least(self, 1, "hops")
        if not all(0 <= share <= 1 for share in self.visual):
            raise DataError(
                f"stages.{self.name}.visual={list(self.visual)}: give two shares from 0 to 1"
            )
        if unknown := sorted(set(self.losses) - {*NAMES}):
            raise DataError(
                f"stages.{self.name}.losses has no term '{unknown[0]}': choose from {', '.join(NAMES)}"
            )
        if not any(self.losses.values()):
            raise DataError(f"stages.{self.name}.losses: give a term a weight above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained. A method's `Training` sets its paper's values."""

    batch_tokens: int = 16384
    """Tokens in one optimizer step over all ranks; visual ones count if the drafter reads them."""
    max_length: int = 0
    """Samples of more tokens are left out; 0: of more than `batch_tokens`, and than 4,096."""
    steps: int = 0
    """Optimizer steps of all stages together, divided in proportion to their epochs; 0: as epochs say."""
    warmup: float = 0.05
    """Share of the steps of a stage over which its learning rate rises."""
    noise: float = 0.2
    """Width of the uniform noise on input states at 512 tokens (EAGLE); it shrinks with length."""
    clip: float = 0.5
    """Gradient norm."""
    detach: bool = False
    """Cut the gradient between hops, as HASS does."""
    validate_every: int = 0
    """Optimizer steps between validations on held-out samples, the best of which gives the drafter that is
    kept; 0: held-out agreement is measured at the end of each stage, and the last weights are kept."""
    patience: int = 0
    """A stage ends after that many validations in a row without a better one; 0: as its steps say."""
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        at_least(
            self, 0, "steps", "noise", "warmup", "clip", "validate_every", "patience"
        )
        at_least(self, 0, "max_length")
        at_least(self, 1, "batch_tokens")
        if self.patience and not self.validate_every:
            raise DataError(
                f"patience={self.patience} counts validations: set validate_every as well"
            )

    @property
    def longest(self) -> int:
        """The most tokens of a sample, visual ones included; alone it needs no more memory than a step."""
        return self.max_length or max(self.batch_tokens, ALWAYS)

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages as trained: `stages` after the method's switches."""
        return self.stages


@dataclass(frozen=True, kw_only=True)
class TwoPasses(TrainConfig):
    """Training whose stages may have a second pass, on the drafter's own states."""

    mtp: bool = True
    """Multi-token prediction: run the stages' later passes; off: every stage has one hop."""

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages, with one hop each when `mtp` is off."""
        return (
            self.stages
            if self.mtp
            else tuple(replace(stage, hops=1) for stage in self.stages)
        )


@dataclass(frozen=True)
class DrafterConfig:
    """All settings of a drafter."""

    model: ModelConfig
    training: TrainConfig
    tree: Tree

    def __post_init__(self) -> None:
        at_least(self.model, 0, "attention_window")
        lacking = {
            "confidence": (self.model.tells_confidence, "confidence head"),
            "middle": (self.model.learns_middle, "middle state"),
        }
        for stage in self.training.stages:
            for term, (there, what) in lacking.items():
                if stage.losses.get(term) and not there:
                    raise DataError(
                        f"stages.{stage.name}.losses: this drafter has no {what}; leave {term} out"
                    )
            if (limit := self.model.max_hops) is not None and stage.hops not in (
                1,
                limit,
            ):
                raise DataError(
                    f"stages.{stage.name}.hops={stage.hops}: this drafter trains all {limit} tokens that "
                    "it can draft in a row; leave the setting out"
                )

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages as trained, after the switches of the method and with all hops that it must train."""
        if (limit := self.model.max_hops) is None:
            return self.training.schedule
        return tuple(replace(stage, hops=limit) for stage in self.training.schedule)
