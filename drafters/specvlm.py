"""SpecVLM -- SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning,
EMNLP 2025.

Idea: the target drafts for itself on a prompt without most of its visual tokens. The attention
of the text after them decides: the tokens that hold the first `share` of that attention stay,
and of the others as many, evenly spaced, as `drop` allows.
Differs from EAGLE by: nothing is trained; a whole model drafts, at its full cost for each level
of the tree, so it pays only where reading the visual tokens dominates.

Shapes: N entries, F frontier nodes, A nodes drafted so far, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from vlmdistill.drafters.core import Drafter
from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.config import ModelConfig, Share
from vlmdistill.drafters.core.kv_cache import GrowingKVCache, KVCache
from vlmdistill.drafters.core.target import Reader, Target
from vlmdistill.drafters.core.tree import DraftSession, Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.stores.errors import TrainingError


class PrunableTarget(Target, Protocol):
    """A target that can read its last prompt again without some of the visual tokens."""

    def attention(self) -> Tensor:
        """Attention to each visual token of the prompt just read: float32 [U].

        The mean over all heads and layers, and the text after the last visual token.
        """
        ...

    def without(self, keep_U: Tensor) -> Reader:
        """A second sequence on the same weights: the last prompt, of its visual tokens only
        those in `keep_U` (bool)."""
        ...


def prunable(target: Target) -> TypeGuard[PrunableTarget]:
    """Whether it is a `PrunableTarget`, also behind a wrapper, which no Protocol sees through."""
    return hasattr(target, "attention") and hasattr(target, "without")


class SpecVLM(Drafter):
    """The target on a pruned prompt."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The official code's."""

        drop: Share = 0.9
        """Share of the visual tokens that are left out."""
        share: Share = 0.4
        """Share of the attention; the tokens that hold it are kept first."""

    tree = Tree(26, 4, 8)
    config: Config

    def draft(self, prompt: Batch, target: Target) -> DraftSession:
        """Let the target read the prompt again without the visual tokens that matter little."""
        if not prunable(target):
            raise TrainingError(
                "specvlm needs a target that can leave out visual tokens: this one cannot"
            )
        weight_U = target.attention()
        keep_U = kept(weight_U, self.config.drop, self.config.share)
        pruned = PrunedCache(target.without(keep_U))
        return TreeDrafter(self, prompt, pruned)

    def entries(self, batch: Batch) -> tuple[Entries, Tensor]:
        """None: the prompt has been read."""
        none_N = batch.ids_T[:0]
        hidden_ND = self.embed_VD[:0]
        tokens = TokenIndex(none_N, none_N, none_N)
        return Entries(none_N, hidden_ND, none_N, tokens), none_N

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """The target's own state after each entry, [R, D]; guesses are not committed."""
        assert isinstance(cache, PrunedCache)
        return entries.tokens.wanted(cache.read(entries))


def kept(weight_U: Tensor, drop: float, share: float) -> Tensor:
    """Which visual tokens stay (bool [U]), by their attention weights (section 3; two stages)."""
    count = int(len(weight_U) * (1 - drop))
    order_U = torch.sort(weight_U, descending=True, stable=True).indices
    mass_U = weight_U[order_U].cumsum(0)
    below_share_U = mass_U < share * weight_U.sum()
    first = min(count, int(below_share_U.sum()) + 1)
    keep_U = torch.zeros_like(weight_U, dtype=torch.bool)
    keep_U[order_U[:first]] = True
    if count > first:
        rest = (~keep_U).nonzero()[:, 0]
        last = len(rest) - 1
        spaced = torch.linspace(0, last, count - first, device=weight_U.device)
        keep_U[rest[spaced.long()]] = True
    return keep_U


class PrunedCache(GrowingKVCache):
    """The second sequence of the target, with the nodes of the tree now growing.

    A pass commits nothing, so each level reads the nodes above it again: a few more rows of
    one pass.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self.ids_A = torch.zeros(0, dtype=torch.long)
        self.visible_AA = torch.zeros(0, 0, dtype=torch.bool)

    def read(self, entries: Entries) -> Tensor:
        """The target's states after the entries, [N, D]; those of hop 0 are committed."""
        ids_N = entries.ids_N
        device = entries.ids_N.device
        count = len(ids_N)
        if entries.hop == 0:
            depth_N = torch.arange(count, device=device) + 1
            state_ND = self._extend(ids_N, depth_N, None)
            self.reader.commit(range(count))
            return state_ND
        if entries.hop == 1:  # a new tree
            self.ids_A = ids_N[:0]
            self.visible_AA = torch.zeros(0, 0, dtype=torch.bool, device=device)
        above = len(self.ids_A)
        self.ids_A = torch.cat([self.ids_A, ids_N])
        visible_FA = entries.tokens.visible_NA
        if visible_FA is None:  # a chain
            shape = (count, above + count)
            visible_FA = torch.ones(shape, dtype=torch.bool, device=device)
        old_AA = torch.nn.functional.pad(self.visible_AA, (0, count))
        self.visible_AA = torch.cat([old_AA, visible_FA])
        depth_A = self.visible_AA.sum(1)
        state_AD = self._extend(self.ids_A, depth_A, self.visible_AA)
        return state_AD[above:]

    def _extend(
        self, ids_N: Tensor, depth_N: Tensor, visible_NN: Tensor | None
    ) -> Tensor:
        """The target's last states of a pass over the tokens, [N, D]."""
        states = self.reader.extend(ids_N, depth_N, visible_NN, ("hidden",))
        return states["hidden"]
