"""The settings of a drafter: what it computes, how it is trained, and its draft tree."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import inf
from typing import Annotated, Literal, get_args

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


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be, as an annotation of its field."""

    least: float
    most: float = inf

    def __str__(self) -> str:
        if self.most == inf:
            return f"{self.least:g} or more"
        return f"{self.least:g} to {self.most:g}"


Count = Annotated[int, Range(0)]
Number = Annotated[int, Range(1)]
Amount = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]


@cache
def ranges(kind: type) -> Mapping[str, Range]:
    """The ranges of the fields of a dataclass by name; a class that sets a default keeps the range."""
    by_name: dict[str, Range] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        for setting in fields(base):
            for part in get_args(setting.type):
                if isinstance(part, Range):
                    by_name[setting.name] = part
    return by_name


def check_ranges(settings: object) -> None:
    """Raise DataError for the first setting that is outside of its range, or not finite."""
    kind: type = type(settings)
    for name, allowed in ranges(kind).items():
        at_least(settings, allowed.least, name, most=allowed.most)


def at_least(settings: object, least: float, *names: str, most: float = inf) -> None:
    """Raise DataError for the first setting below `least`, above `most`, or not finite."""
    for name in names:
        value = getattr(settings, name)
        if least <= value <= most and value < inf:
            continue
        limit = "" if most == inf else f", at most {most:g}"
        raise DataError(f"{name}={value}: give a number of at least {least:g}{limit}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a drafter computes, in training and in decoding; a method adds its switches."""

    kv_heads: Literal["all", "target"] = "all"
    """Key heads of the drafter's layer. all: as many as query heads; target: as few as the
    target has, for a smaller KV cache."""
    positions: Positions = "expanded"
    """The rotary position of a text token. expanded: its index in the sequence with all
    visual tokens; target: the target's own position (M-RoPE counts an image as few);
    compact: its index among text tokens alone, for a drafter that reads no images."""
    attention_window: Count = 0
    """The most recent committed positions that the drafter attends to, visual ones counted;
    0: all. It bounds the cost of drafting after a long prompt. No weight depends on it, so it
    may change after the training."""

    def __post_init__(self) -> None:
        check_ranges(self)

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
class EagleConfig(ModelConfig):
    """The settings that all drafters have which score with the target's LM head."""

    draft_vocab: Count = 0
    """Tokens that the drafter scores: the most frequent ones of the training responses; 0: all.
    It makes drafting cheaper where the LM head is a large part of the target (FR-Spec, arXiv
    2502.14856, section 3)."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of training: what data, how long, how many self-feedback hops, which losses."""

    name: str
    """The name of the stage in keys of settings, such as `stages.text.hops`."""
    epochs: Amount = 20.0
    """Passes over the samples. If `steps` is set, only the ratio to other stages counts: the
    stage gets that share of the steps."""
    visual: tuple[float, float] = (0.0, 1.0)
    """The share of samples with images or videos when the stage begins, and when it ends; in
    between it moves evenly. [0, 0]: text alone; [1, 1]: images alone; [0.5, 0.5]: half of
    each, which keeps acceptance on both. An epoch of both is as long as the rarer kind; where
    the store has one kind only, it takes that."""
    hops: Number = 1
    """Tokens that are drafted in a row from each position, each on the drafter's own state of
    the one before, as in decoding. 1: each on the target's states alone (teacher forcing).
    More hops raise the acceptance of later tokens, and cost time in proportion."""
    hop_decay: Amount = 1.0
    """The weight of a hop's loss, as a multiple of the hop before: 1 weighs all hops equally,
    0.8 the first ones more."""
    pace: Share = 0.0
    """Weigh the hops of a row by the chance that they are reached (D-PACE, arXiv 2605.18810),
    smoothed by this share (the paper: 0.5); 0: do not."""
    learning_rate: Amount = 3e-5
    """The highest learning rate of Adam; it rises to it over `warmup`, then falls to 0."""
    anchors: Count = 0
    """The most response positions of a sample that are trained in a step, in random runs of
    16, to save memory; 0: all."""
    keep_top: Count = 0
    """Dynamic filtering (HiViS): from the first hop whose target token is not among the
    drafter's `keep_top` best, a row stops counting; 0: rows always count."""
    view: str = ""
    """A view of the store (`vlmdistill store filter`) that the stage is trained on; empty:
    that of the run (`--view`), or the whole store."""
    losses: Mapping[str, Amount] = field(default_factory=lambda: {**EAGLE_LOSSES})
    """The weight of each loss: `regression` (smooth L1 to the target's state), `cross_entropy`,
    `top_k` (cross-entropy over the target's ten best tokens), `l1`, `list_mle`, and where a
    drafter has the part, `middle` and `confidence`."""

    def __post_init__(self) -> None:
        check_ranges(self)
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

    batch_tokens: Number = 16384
    """Tokens of an optimizer step, over all ranks; visual tokens count if they are read. More
    tokens need no more memory: they are read in smaller passes."""
    max_length: Count = 0
    """Longer samples are left out; 0: those longer than `batch_tokens` and than 4,096 tokens."""
    steps: Count = 0
    """Optimizer steps of all stages together, divided in the ratio of their `epochs`; 0: train
    the epochs."""
    warmup: Amount = 0.05
    """The share of a stage's steps over which its learning rate rises."""
    noise: Amount = 0.2
    """The width of uniform noise that is added to input states, for a sample of 512 tokens
    (EAGLE); it is inversely proportional to the length. 0: none."""
    clip: Amount = 0.5
    """The most that the norm of a gradient may be; a larger gradient is scaled down."""
    detach: bool = False
    """Cut the gradient between hops, as HASS does."""
    validate_every: Count = 0
    """Optimizer steps between validations; the best weights are kept.
    0: agreement is measured at the end of each stage, and the last weights are kept."""
    patience: Count = 0
    """A stage ends after so many validations in a row that do not improve; 0: never early."""
    stages: tuple[Stage, ...] = ()
    """The stages of the training, in order; `stages.*.KEY` sets a key of all."""

    def __post_init__(self) -> None:
        check_ranges(self)
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
    """Multi-token prediction: train the second hop on the drafter's own states; false: every
    stage has one hop."""

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
    """The draft tree in decoding, unless `--tree` gives another: total-depth-k, such as 30-3-8
    (30 nodes, the root included; 3 levels after the first; the 8 best of each), or a chain of
    tokens such as chain-5. A trained drafter can draft any tree."""

    def __post_init__(self) -> None:
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
