"""SpecVLM -- SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning,
EMNLP 2025.

Idea: no drafter is trained: the target drafts for itself, having read the prompt without most of its visual
tokens; which ones matter is told by the attention of the text after them. The tokens that hold the first
`share` of that attention stay, and of the others as many, evenly spaced, as `drop` allows.
Differs from EAGLE by: a whole model drafts, at its full price for each level of the tree, so that it pays
only where reading the visual tokens, and not the weights, is what takes the time.
Departs from the official code in: the draft model is the target itself (a smaller one of the family is not
served); the tree is EAGLE-2's in the place of a fixed one of 25 nodes and five levels; positions are the
target's own, where the code for Qwen2.5-VL does without M-RoPE; sampling is served, where the code is greedy.

Shapes: N entries, F frontier nodes, A nodes drafted so far, R rows, U visual tokens, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.base import Batch, Draft, Drafter, DrafterConfig, Entries, Reader, Target, Tree
from vlmdistill.drafters.decoding.tree import Growth
from vlmdistill.drafters.memory import CacheMemory, Memory, Places
from vlmdistill.stores.schema import Feature, TargetInfo


class SpecVLM(Drafter):
    """The target on a pruned prompt."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: the official code's."""

        drop: float = 0.9
        """Share of the visual tokens that are left out."""
        share: float = 0.4
        """Share of the attention whose tokens are kept before any others."""
        tree: Tree = Tree(26, 4, 8)

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Nothing."""
        return frozenset()

    def draft(self, prompt: Batch, target: Target) -> Draft:
        """Let the target read the prompt again without the visual tokens that matter little."""
        keep_U = kept(target.attention(), self.config.drop, self.config.share)
        return Growth(self, prompt, Second(target.without(keep_U)))

    def entries(self, batch: Batch) -> tuple[Entries, Tensor]:
        """None: the prompt has been read."""
        none_N = batch.ids_T[:0]
        hidden_ND = self.embed_VD[:0]
        return Entries(none_N, hidden_ND, none_N, Places(none_N, none_N, none_N)), none_N

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """The target's own state after each entry; committed tokens are read for good, guesses are not."""
        assert isinstance(memory, Second)
        state_ND = memory.read(entries)
        rows_R = entries.places.rows_R
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


class Second(CacheMemory):
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
            state_ND = self.reader.extend(ids_N, step_N + 1, None, ("hidden",))["hidden"]
            self.reader.commit(step_N)
            return state_ND
        if entries.hop == 1:
            self.ids_A = ids_N[:0]
            self.visible_AA = torch.zeros(0, 0, dtype=torch.bool, device=ids_N.device)
        above = len(self.ids_A)
        self.ids_A = torch.cat([self.ids_A, ids_N])
        visible_FA = entries.places.visible_NA
        if visible_FA is None:  # a chain
            visible_FA = torch.ones(count, above + count, dtype=torch.bool, device=ids_N.device)
        old_AA = torch.nn.functional.pad(self.visible_AA, (0, count))
        self.visible_AA = torch.cat([old_AA, visible_FA])
        depth_A = self.visible_AA.sum(1)
        return self.reader.extend(self.ids_A, depth_A, self.visible_AA, ("hidden",))["hidden"][above:]
