"""The contract between targets, drafters, the trainer and the decoder.

Shapes: T text tokens of all samples side by side (packed, never padded), U visual tokens,
M visual spans, E entries (one for each text token that has a predecessor), R rows of interest
among the entries, N whatever is given (nodes of a tree), D hidden width, V vocabulary, H heads, d head width.

The field's one convention (EAGLE, section 3): the entry of token x_{t+1} pairs its embedding with
the target's hidden state h_t of the token before it, stands at rotary position t, and its output
g_{t+1} is an estimate of h_{t+1}, so that lm_head(g_{t+1}) predicts x_{t+2}.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from vlmdistill.drafters.losses import Rows, Score, score
from vlmdistill.drafters.memory import Memory, Places
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo

Positions = Literal["expanded", "target", "compact"]
Published = tuple[dict[str, Any], dict[str, Tensor]]
"""A `config.json` and the tensors beside it."""


@dataclass(frozen=True)
class Head:
    """The target's frozen tables: token embeddings and the LM head (the same tensor when tied)."""

    embed_VD: Tensor
    lm_head_VD: Tensor


@dataclass(frozen=True)
class Batch:
    """Samples side by side with the target's states: what the trainer reads and a prefill returns.

    Text and visual tokens live apart; `position_T` and the spans place both in the expanded sequence.
    """

    ids_T: Tensor
    response_T: Tensor  # bool
    position_T: Tensor  # index in the expanded sequence of its own sample
    rope_T: Tensor  # the target's own rotary position
    segment_T: Tensor  # which sample
    start_M: Tensor  # first expanded position of each visual span
    length_M: Tensor
    segment_M: Tensor
    features: Mapping[Feature, Tensor] = field(default_factory=dict)

    def feature(self, source: str, where: Literal["text", "visual", "span"]) -> Tensor:
        """The rows of one declared feature; KeyError when the drafter did not declare it."""
        return self.features[Feature(source, where)]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Batch":
        """The same batch elsewhere; `dtype` applies to the features alone."""
        moved = {
            item.name: getattr(self, item.name).to(device)
            for item in dataclasses.fields(self)
            if item.name != "features"
        }
        states = {name: value.to(device, dtype or value.dtype) for name, value in self.features.items()}
        return Batch(**moved, features=states)

    def having(self, features: Mapping[Feature, Tensor]) -> "Batch":
        """The same tokens with other features."""
        return dataclasses.replace(self, features=features)

    def only(self, features: Collection[Feature]) -> "Batch":
        """The same tokens with those of its features and no others; KeyError names what it lacks."""
        if lacking := sorted(feature.name for feature in {*features} - {*self.features}):
            raise KeyError(f"the batch lacks {', '.join(lacking)}")
        return self.having({feature: self.features[feature] for feature in features})

    @cached_property
    def visual_places(self) -> Places:
        """Where the U visual tokens stand: every span unrolled, in order."""
        span_U = torch.repeat_interleave(
            torch.arange(len(self.length_M), device=self.length_M.device), self.length_M
        )
        first_M = torch.cumsum(self.length_M, 0) - self.length_M
        offset_U = torch.arange(len(span_U), device=span_U.device) - first_M[span_U]
        return Places(self.segment_M[span_U], self.start_M[span_U] + offset_U, span_U)

    @cached_property
    def text_places(self) -> Places:
        """Where the T text tokens stand, each with the last span before it."""
        if len(self.start_M) == 0:
            return Places(self.segment_T, self.position_T, torch.full_like(self.segment_T, -1))
        far = int(self.position_T.max()) + int(self.length_M.sum()) + 1
        key_T = self.segment_T * far + self.position_T
        span_T = torch.searchsorted(self.segment_M * far + self.start_M, key_T, right=True) - 1
        own_T = (span_T >= 0) & (self.segment_M[span_T.clamp(min=0)] == self.segment_T)
        return Places(self.segment_T, self.position_T, torch.where(own_T, span_T, -1))

    def before(self, source: str) -> tuple[Tensor, Tensor]:
        """The `source` state of each token's predecessor, text tokens first, then visual ones.

        The predecessor is looked for among the positions whose states the batch holds: all of them; text
        and the last token of each span; or text alone (then the token after an image is paired with the
        last text token before it, as HiViS eq. 3 does). Returns states [N, D] and `found` [N] (bool), where
        N is T + U when visual states are held and T otherwise; rows not found are zero.
        """
        text, visual, span = (Feature(source, where) for where in ("text", "visual", "span"))
        segments, orders, states = [self.segment_T], [self.position_T], [self.features[text]]
        if visual in self.features:
            places = self.visual_places
            segments, orders = [*segments, places.segment_N], [*orders, places.order_N]
            states.append(self.features[visual])
        elif span in self.features:
            segments, orders = [*segments, self.segment_M], [*orders, self.start_M + self.length_M - 1]
            states.append(self.features[span])
        segment_N, order_N, state_ND = torch.cat(segments), torch.cat(orders), torch.cat(states)
        rank_N = torch.argsort(segment_N * (order_N.max() + 1) + order_N)
        prior_N = torch.empty_like(rank_N)
        prior_N[rank_N] = rank_N.roll(1)
        found_N = torch.empty_like(rank_N, dtype=torch.bool)
        found_N[rank_N] = segment_N[rank_N] == segment_N[rank_N.roll(1)]
        found_N[rank_N[0]] = False
        wanted = len(segment_N) if visual in self.features else len(self.segment_T)
        return (state_ND[prior_N] * found_N[:, None])[:wanted], found_N[:wanted]


@dataclass(frozen=True)
class Entries:
    """What one `step` consumes: tokens, the hidden states before them, and where they stand."""

    ids_N: Tensor
    hidden_ND: Tensor  # hop 0: the target's states; later hops: what `step` returned for the parent
    position_N: Tensor  # rotary position
    places: Places
    hop: int = 0  # 0: committed tokens with the target's states; n: n tokens after them are guesses


class Reader(Protocol):
    """One sequence that a target reads on: what is committed, and passes from there."""

    def extend(
        self, ids_N: Tensor, depth_N: Tensor, visible_NN: Tensor | None, sources: Collection[str]
    ) -> dict[str, Tensor]:
        """One forward pass over N tokens after the committed prefix: states by source, each [N, D].

        Token n stands `depth_N[n]` positions after the last committed one (the first at depth 1) and
        attends to the prefix and the tokens of `visible_NN[n]` (bool, itself included; None: causal).
        Nothing is committed.
        """
        ...

    def commit(self, rows_K: Tensor) -> None:
        """Keep those rows of the last `extend`, in that order, as part of the prefix; drop the others."""
        ...


class Target(Reader, Protocol):
    """The target VLM as the decoder sees it. One sequence at a time."""

    @property
    def info(self) -> TargetInfo:
        """The facts a drafter is built from."""
        ...

    @property
    def head(self) -> Head:
        """The frozen tables, on the target's device."""
        ...

    def prefill(self, prompt: Any, features: Collection[Feature]) -> Batch:
        """Forget the last sequence, run a prompt, and return its tokens with `features` and hidden.text."""
        ...

    def attention(self) -> Tensor:
        """How much the text after the last visual token of a prompt just read looks at each one: float32 [U].

        Mean over that text, all heads and layers.
        """
        ...

    def without(self, keep_U: Tensor) -> Reader:
        """A second sequence on the same weights: the last prompt with only those visual tokens (bool)."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The LM head on `hidden` states, float32 [N, V]."""
        ...


@dataclass(frozen=True)
class DraftTree:
    """Nodes in an order in which parents precede children; node 0 is the last token, already certain."""

    ids_N: Tensor
    parent_N: Tensor  # the root is its own parent
    visible_NN: Tensor  # bool: node n attends to node m (its ancestors and itself)
    greedy_N: Tensor  # bool: the node lies on the chain of each step's best guess

    @property
    def depth_N(self) -> Tensor:
        """The root stands at depth 1, one position after the committed prefix."""
        return self.visible_NN.sum(1)


class Draft(Protocol):
    """One sequence as its drafter sees it: what is committed, and guesses from there."""

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """Take tokens that are certain now, each with the target's states before it side by side."""
        ...

    def grow(self, shape: "Tree") -> DraftTree:
        """Guess what follows the last committed token."""
        ...

    def hear(self, logits_NV: Tensor) -> None:
        """What the target says after every node of the tree that was grown last."""
        ...


@dataclass(frozen=True)
class Tree:
    """A draft tree in EAGLE-2's notation total-depth-k (section 4).

    `total` nodes are verified, the root (the last sampled token) included; `k` children of each of the `k`
    best nodes are drafted on every level; `depth` levels follow the first one. A chain of n tokens is
    total n + 1, depth n - 1, k 1.
    """

    total: int = 60
    depth: int = 5
    k: int = 10

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """Read `30-3-8`, or `chain-5`; DataError when it is neither."""
        kind, _, length = text.partition("-")
        if kind == "chain" and length.isdecimal() and int(length) > 0:
            return cls(int(length) + 1, int(length) - 1, 1)
        parts = text.split("-")
        if len(parts) == 3 and all(part.isdecimal() for part in parts):
            tree = cls(*map(int, parts))
            if tree.total >= 2 and tree.k >= 1:
                return tree
        raise DataError(f"'{text}' is not a tree: write total-depth-k, such as 30-3-8, or chain-5")

    def __str__(self) -> str:
        if self.k == 1 and self.total == self.depth + 2:
            return f"chain-{self.total - 1}"
        return f"{self.total}-{self.depth}-{self.k}"


def at_least(settings: object, least: int, *names: str) -> None:
    """DataError names the first of the settings that is smaller."""
    for name in names:
        if not (value := getattr(settings, name)) >= least:
            raise DataError(f"{name}={value}: give a number of at least {least}")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of training: what data, how long, how many self-feedback hops, which losses."""

    name: str
    epochs: float = 20.0
    """Passes over its samples; where the run counts `steps`, its share of them."""
    visual: tuple[float, float] = (0.0, 1.0)
    """Share of samples with images, ramped over the stage; (0, 0) is text only, (1, 1) images only."""
    hops: int = 1
    """Draft steps unrolled per position; 1 is plain teacher forcing."""
    hop_decay: float = 1.0
    """Weight of each hop relative to the one before."""
    learning_rate: float = 3e-5
    keep_top: int = 0
    """Dynamic filtering (HiViS): a row stops counting at the first hop whose target token is not among the
    drafter's `keep_top` best; 0 keeps all."""
    keep_failing: bool = False
    """That hop itself still counts."""
    view: str = ""
    """View of the store that the stage is trained on; the run's own when empty."""
    losses: Mapping[str, float] = field(default_factory=lambda: {"regression": 1.0, "cross_entropy": 0.1})
    """Weight of each term of `losses.py`."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What every drafter shares; a method's own Config sets its paper's values."""

    kv_heads: Literal["all", "target"] = "all"
    """Key heads of the drafter's layer: as many as query heads (the published sizes), or the target's."""
    positions: Positions = "expanded"
    """Rotary positions: index in the expanded sequence, the target's own on text, or text tokens alone."""
    tree: Tree = Tree()
    batch_tokens: int = 16384
    """Tokens, text and visual, in one optimizer step over all ranks."""
    max_length: int = 4096
    """Longer samples are left out of training."""
    steps: int = 0
    """Optimizer steps of all stages together, shared out as their epochs are; 0: as the epochs say."""
    warmup: float = 0.05
    """Share of the steps of a stage over which its learning rate rises."""
    noise: float = 0.2
    """Width of the uniform noise on input states at 512 tokens (EAGLE); it shrinks with length."""
    clip: float = 0.5
    """Gradient norm."""
    detach: bool = False
    """Cut the gradient between hops, as HASS does."""
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 0, "steps", "noise", "warmup")
        at_least(self, 1, "batch_tokens", "max_length")
        for stage in self.stages:
            at_least(stage, 0, "epochs", "learning_rate", "keep_top")
            at_least(stage, 1, "hops")

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages as trained: `stages` after the method's switches."""
        return self.stages


class Proposer(nn.Module, ABC):
    """Whatever proposes tokens to a target: the trained `Drafter`s, and methods that need no training."""

    Config: ClassVar[type[DrafterConfig]] = DrafterConfig

    embed_VD: Tensor
    lm_head_VD: Tensor

    def __init__(self, config: DrafterConfig, info: TargetInfo, head: Head) -> None:
        super().__init__()
        self.config, self.info = config, info
        # Frozen and shared with the target: part of the module, never of its checkpoint.
        self.register_buffer("embed_VD", head.embed_VD, persistent=False)
        self.register_buffer("lm_head_VD", head.lm_head_VD, persistent=False)

    @classmethod
    @abstractmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """The features it reads in training, or of a prompt when `decoding`: exactly these, no others."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The target states concatenated into an entry's `hidden` at hop 0."""
        return ("hidden",)

    @abstractmethod
    def draft(self, prompt: Batch, target: Target) -> "Draft":
        """Begin to draft after a prompt that `target` has just read: one sequence, ending in text."""


class Drafter(Proposer, ABC):
    """Base of all trained drafters: how visual tokens enter, and what a step is."""

    counts_tokens: bool = False
    """`prepare` is to be called before training."""
    max_hops: int | None = None
    """How many tokens in a row it can guess; None: any number. Deeper trees are cut."""

    @property
    def vocabulary_K(self) -> Tensor | None:
        """The target's ids of the columns of `logits`; None: it scores every token."""
        return None

    def prepare(self, count_V: Tensor) -> None:
        """Hear, before training, how often each token stands in the responses of the training set.

        What is made of it must be in the checkpoint: a resumed run does not call this again.
        """

    def published(self) -> Published | None:
        """How serving engines name its settings and weights; None: they do not have the method."""
        return None

    def draft(self, prompt: Batch, target: Target) -> "Draft":
        """Grow trees from its own steps."""
        from vlmdistill.drafters.decoding.tree import Growth  # which is built on this module

        return Growth(self, prompt)

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Let the visual tokens of `batch` enter `memory`; the default is that they do not."""

    @abstractmethod
    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """One draft step: remember the entries, return the states of the wanted rows, [R, D]."""

    def logits(self, state_ND: Tensor, hop: int = 0) -> Tensor:
        """Scores of the next token for states that `step` returned at `hop`: float32 [N, V].

        The columns are the tokens of `vocabulary_K`, if it has one.
        """
        return nn.functional.linear(state_ND, self.lm_head_VD).float()

    def loss(self, rows: Rows, stage: Stage) -> "Score":
        """The stage's losses on one hop; see `losses.score`."""
        return score(
            rows,
            self.logits,
            self.lm_head_VD,
            stage.losses,
            keep_top=stage.keep_top,
            keep_failing=stage.keep_failing,
            vocabulary_K=self.vocabulary_K,
        )

    def entries(self, batch: Batch) -> tuple[Entries, Tensor]:
        """Hop-0 entries of all text tokens that have a predecessor, and the text index of each, [E].

        The token at text index j becomes the entry (embedding of x_j, state before it) at the rotary
        position of that state.
        """
        states, found_T = zip(*(batch.before(source) for source in self.sources), strict=True)
        text = len(batch.ids_T)
        token_E = found_T[0][:text].nonzero()[:, 0]
        places = batch.text_places
        entries = Entries(
            ids_N=batch.ids_T[token_E],
            hidden_ND=torch.cat([state[:text] for state in states], dim=-1)[token_E],
            position_N=self.rotary(batch)[token_E] - 1,
            places=places.only(token_E),
        )
        return entries, token_E

    def rotary(self, batch: Batch) -> Tensor:
        """The rotary position of every text token under `config.positions`, [T]."""
        if self.config.positions == "expanded":
            return batch.position_T
        if self.config.positions == "target":
            return batch.rope_T
        index_T = torch.arange(len(batch.segment_T), device=batch.segment_T.device)
        return index_T - torch.searchsorted(batch.segment_T, batch.segment_T)
