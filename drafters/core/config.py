"""The settings of a drafter: what it computes, how it is trained, and its draft tree."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from vlmdistill.drafters.core.losses import NAMES
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo

ALWAYS = 4096  # tokens of a sample that is trained at any `batch_tokens`
Positions = Literal["expanded", "target", "compact"]
EAGLE_LOSSES: Mapping[str, float] = {"regression": 1.0, "cross_entropy": 0.1}
EAGLE_AND_TOP_K: Mapping[str, float] = {**EAGLE_LOSSES, "top_k": 1.0}
"""HASS's losses."""


def features(*names: str) -> frozenset[Feature]:
    """Features by name, such as `hidden.text`."""
    return frozenset(map(Feature.parse, names))


def states_of(sources: Iterable[str], *where: str) -> frozenset[Feature]:
    """The states of all sources, such as `layer3`, at each of `text`, `visual` or `span`."""
    names = [f"{source}.{rows}" for source in sources for rows in where]
    return features(*names)


def depths(layers: int) -> tuple[str, str, str]:
    """The three layers whose inputs EAGLE-3 reads, of a target with so many `layers`.

    Layer 2, the middle one and the last but two; on shallow targets they move apart.
    """
    middle = layers // 2
    low = min(2, max(middle - 1, 0))
    high = max(layers - 3, middle + 1)
    high = min(high, layers - 1)
    return f"layer{low}", f"layer{middle}", f"layer{high}"


def at_least(settings: object, least: int, *names: str, most: float = inf) -> None:
    """Raise DataError for the first setting below `least`, above `most`, or not finite."""
    for name in names:
        value = getattr(settings, name)
        if least <= value <= most and value < inf:
            continue
        limit = "" if most == inf else f", at most {most:g}"
        raise DataError(f"{name}={value}: give a number of at least {least}{limit}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a drafter computes, in training and in decoding; a method adds its switches."""

    kv_heads: Literal["all", "target"] = "all"
    """Key heads of the drafter's layer: as many as query heads, or as the target has."""
    positions: Positions = "expanded"
    """Rotary positions of text: its index in the expanded sequence, the target's own
    position, or its index among text tokens."""
    attention_window: int = 0
    """Committed positions that the drafter's layers see, the last included; 0: all. They are
    counted in the expanded sequence, visual ones too. No weight depends on it."""

    def needs(self, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """The features that the drafter reads in training, or of a prompt when `decoding`."""
        return frozenset()

    @property
    def max_hops(self) -> int | None:
        """The most tokens that it can draft in a row; None: any number.

        Deeper trees are cut. Every stage trains that many hops.
        """
        return None

    @property
    def own_losses(self) -> frozenset[str]:
        """Which of the losses `confidence` and `middle` the drafter has the parts for."""
        return frozenset()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of training: what data, how long, how many self-feedback hops, which losses."""

    name: str
    epochs: float = 20.0
    """Passes over its samples. If `steps` is set: its share of them, relative to other stages."""
    visual: tuple[float, float] = (0.0, 1.0)
    """Share of samples with images, from the start to the end of the stage: (0, 0) is text
    only, (1, 1) images only."""
    hops: int = 1
    """Draft steps unrolled per position; 1 is plain teacher forcing."""
    hop_decay: float = 1.0
    """Weight of each hop, relative to the hop before."""
    pace: float = 0.0
    """Weigh the hops of a row by the chance that they are reached (D-PACE, arXiv 2605.18810),
    smoothed by this share (the paper: 0.5); 0: do not."""
    learning_rate: float = 3e-5
    anchors: int = 0
    """The most response positions of a sample that are trained in a step, in random runs of
    16; 0: all."""
    keep_top: int = 0
    """Dynamic filtering (HiViS): a row stops counting at the first hop whose target token is
    not among the drafter's `keep_top` best; 0: rows always count."""
    view: str = ""
    """View of the store that the stage is trained on; empty: the run's view."""
    losses: Mapping[str, float] = field(default_factory=lambda: {**EAGLE_LOSSES})
    """Weight of each term, by its name in `losses.py`."""

    def __post_init__(self) -> None:
        at_least(self, 0, "epochs", "learning_rate", "keep_top", "hop_decay", "anchors")
        at_least(self, 0, "pace", most=1)
        at_least(self, 1, "hops")
        key = f"stages.{self.name}"
        if not all(0 <= share <= 1 for share in self.visual):
            shares = list(self.visual)
            raise DataError(f"{key}.visual={shares}: give two shares from 0 to 1")
        if unknown := sorted(set(self.losses) - {*NAMES}):
            choice = ", ".join(NAMES)
            raise DataError(
                f"{key}.losses has no term '{unknown[0]}': choose from {choice}"
            )
        if not any(self.losses.values()):
            raise DataError(f"{key}.losses: give a term a weight above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained. A method's `Training` sets its paper's values."""

    batch_tokens: int = 16384
    """Tokens of an optimizer step over all ranks; visual tokens count if they are read."""
    max_length: int = 0
    """Longer samples are left out; 0: those longer than `batch_tokens` and than 4,096 tokens."""
    steps: int = 0
    """Optimizer steps of all stages together, divided by their epochs; 0: train the epochs."""
    warmup: float = 0.05
    """Share of a stage's steps over which its learning rate rises."""
    noise: float = 0.2
    """Width of the uniform noise on input states of a sample of 512 tokens (EAGLE); it is
    inversely proportional to the length."""
    clip: float = 0.5
    """The most that the gradient's norm may be; a larger gradient is scaled down."""
    detach: bool = False
    """Cut the gradient between hops, as HASS does."""
    validate_every: int = 0
    """Optimizer steps between validations; the best weights are kept.
    0: agreement is measured at the end of each stage, and the last weights are kept."""
    patience: int = 0
    """A stage ends after so many validations in a row that do not improve; 0: never early."""
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
        """The most tokens of a sample, visual ones included."""
        return self.max_length or max(self.batch_tokens, ALWAYS)

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages as they are trained, after the method's switches."""
        return self.stages


def text_then_images(
    learning_rate: float,
    *,
    hops: int = 1,
    hop_decay: float = 1.0,
    losses: Mapping[str, float] = EAGLE_LOSSES,
) -> tuple[Stage, ...]:
    """The schedule of the ViSpec paper: a stage of text, and the same on images."""
    text = Stage(
        name="text",
        epochs=20,
        visual=(0, 0),
        hops=hops,
        hop_decay=hop_decay,
        learning_rate=learning_rate,
        losses=losses,
    )
    return text, replace(text, name="multimodal", visual=(1, 1))


def vispec_stages(learning_rate: float) -> tuple[Stage, ...]:
    """The stages of ViSpec's official code: text, then images with a second pass."""
    text = Stage(
        name="text",
        epochs=20,
        visual=(0, 0),
        learning_rate=learning_rate,
        losses={**EAGLE_LOSSES, "list_mle": 0.01},
    )
    multimodal = Stage(
        name="multimodal",
        epochs=20,
        visual=(1, 1),
        hops=2,
        learning_rate=learning_rate,
        losses={"l1": 10.0, "list_mle": 0.1},
    )
    return text, multimodal


@dataclass(frozen=True, kw_only=True)
class TwoPasses(TrainConfig):
    """Training whose stages may have a second pass, on the drafter's own states."""

    mtp: bool = True
    """Multi-token prediction: run the second pass; off: every stage has one hop."""

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages, with one hop each when `mtp` is off."""
        if self.mtp:
            return self.stages
        return tuple(replace(stage, hops=1) for stage in self.stages)


@dataclass(frozen=True)
class DrafterConfig:
    """All settings of a drafter."""

    model: ModelConfig
    training: TrainConfig
    tree: Tree

    def __post_init__(self) -> None:
        at_least(self.model, 0, "attention_window")
        for stage in self.training.stages:
            self._check_losses(stage)
            self._check_hops(stage)

    def _check_losses(self, stage: Stage) -> None:
        """DataError for a term that needs a part which this drafter lacks."""
        parts = {"confidence": "confidence head", "middle": "middle state"}
        for term, part in parts.items():
            if stage.losses.get(term) and term not in self.model.own_losses:
                raise DataError(
                    f"stages.{stage.name}.losses: this drafter has no {part}; "
                    f"leave {term} out"
                )

    def _check_hops(self, stage: Stage) -> None:
        """DataError for another number of hops than a drafter of `max_hops` trains."""
        limit = self.model.max_hops
        if limit is not None and stage.hops not in (1, limit):
            raise DataError(
                f"stages.{stage.name}.hops={stage.hops}: this drafter trains all {limit} "
                "tokens that it can draft in a row; leave the setting out"
            )

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages as they are trained, with all hops that the drafter must train."""
        limit = self.model.max_hops
        if limit is None:
            return self.training.schedule
        schedule = self.training.schedule
        return tuple(replace(stage, hops=limit) for stage in schedule)
