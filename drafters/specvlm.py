"""SpecVLM -- SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning,
EMNLP 2025.

Idea: the target drafts for itself on a prompt without most of its visual tokens. The attention of the text
after them decides: the tokens that hold the first `share` of that attention stay, and of the others as many,
evenly spaced, as `drop` allows.
Differs from EAGLE by: nothing is trained; a whole model drafts, at its full cost for each level of the tree,
so it pays only where reading the visual tokens dominates.

Shapes: N entries, F frontier nodes, A nodes drafted so far, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from vlmdistill.drafters.core import Drafter
from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.config import ModelConfig
from vlmdistill.drafters.core.kv_cache import GrowingKVCache, KVCache
from vlmdistill.drafters.core.target import Reader, Target
from vlmdistill.drafters.core.tree import DraftSession, Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.stores.errors import TrainingError


class PrunableTarget(Target, Protocol):
    """A target that can read its last prompt again without some of the visual tokens."""

    def attention(self) -> Tensor:
        """How much the text after the last visual token of a prompt just read looks at each one: float32 [U].

        Mean over that text, all heads and layers.
        """
        ...

    def without(self, keep_U: Tensor) -> Reader:
        """A second sequence on the same weights: the last prompt with only those visual tokens (bool)."""
        ...


def prunable(target: Target) -> TypeGuard[PrunableTarget]:
    """Whether it is a PrunableTarget; also behind a wrapper, at which a Protocol looks statically."""
    return hasattr(target, "attention") and hasattr(target, "without")


class SpecVLM(Drafter):
    """The target on a pruned prompt."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The official code's."""

        drop: float = 0.9
        """Share of the visual tokens that are left out."""
        share: float = 0.4
        """Share of the attention whose tokens are kept before any others."""

    tree = Tree(26, 4, 8)
    config: Config

    def draft(self, prompt: Batch, target: Target) -> DraftSession:
        """Let the target read the prompt again without the visual tokens that matter little."""
        if not prunable(target):
            raise TrainingError(
                "specvlm needs a target that can leave out visual tokens: this one cannot"
            )
        keep_U = kept(target.attention(), self.config.drop, self.config.share)
        return TreeDrafter(self, prompt, PrunedCache(target.without(keep_U)))

    def entries(self, batch: Batch) -> tuple[Entries, Tensor]:
        """None: the prompt has been read."""
        none_N = batch.ids_T[:0]
        hidden_ND = self.embed_VD[:0]
        return Entries(
            none_N, hidden_ND, none_N, TokenIndex(none_N, none_N, none_N)
        ), none_N

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """The target's own state after each entry; committed tokens are read for good, guesses are not."""
        assert isinstance(cache, PrunedCache)
        state_ND = cache.read(entries)
        rows_R = entries.tokens.rows_R
        return state_ND if rows_R is None else state_ND[rows_R]


def kept(weight_U: Tensor, drop: float, share: float) -> Tensor:
    """Which visual tokens stay [U] (bool), by their attention weights (section 3; two stages)."""
    count = int(len(weight_U) * (1 - drop))
    keep_U = torch.zeros_like(weight_U, dtype=torch.bool)
    order_U = torch.sort(weight_U, descending=True, stable=True).indices
    mass_U = weight_U[order_U].cumsum(0)
    first = min(count, int((mass_U < share * weight_U.sum()).sum()) + 1)
    keep_U[order_U[:first]] = True
    rest = (~keep_U).nonzero()[:, 0]
    if count > first:
        even = torch.linspace(0, len(rest) - 1, count - first, device=weight_U.device)
        keep_U[rest[even.long()]] = True
    return keep_U


class PrunedCache(GrowingKVCache):
    """The second sequence of the target, with the nodes of the tree now growing.

    A pass commits nothing, so each level reads the nodes above it again: a few more rows of one pass.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self.ids_A = torch.zeros(0, dtype=torch.long)
        self.visible_AA = torch.zeros(0, 0, dtype=torch.bool)

    def read(self, entries: Entries) -> Tensor:
        """The target's states after the entries [N, D]."""
        ids_N, count = entries.ids_N, len(entries.ids_N)
        if entries.hop == 0:
            step_N = torch.arange(count, device=ids_N.device)
            state_ND = self.reader.extend(ids_N, step_N + 1, None, ("hidden",))[
                "hidden"
            ]
            self.reader.commit(range(count))
            return state_ND
        if entries.hop == 1:
            self.ids_A = ids_N[:0]
            self.visible_AA = torch.zeros(0, 0, dtype=torch.bool, device=ids_N.device)
        above = len(self.ids_A)
        self.ids_A = torch.cat([self.ids_A, ids_N])
        visible_FA = entries.tokens.visible_NA
        if visible_FA is None:  # a chain
            visible_FA = torch.ones(
                count, above + count, dtype=torch.bool, device=ids_N.device
            )
        old_AA = torch.nn.functional.pad(self.visible_AA, (0, count))
        self.visible_AA = torch.cat([old_AA, visible_FA])
        depth_A = self.visible_AA.sum(1)
        return self.reader.extend(self.ids_A, depth_A, self.visible_AA, ("hidden",))[
            "hidden"
        ][above:]
