"""Lookahead -- Break the Sequential Dependency of LLM Inference Using Lookahead Decoding, ICML 2024.

Idea: no drafter at all. In the same call that verifies, the target also guesses in parallel at a window of
later places (Jacobi iteration); what it says along each column of the window makes n-grams, and the n-grams
that begin with the last token are the guesses of the next call. Nothing is trained, stored or read.
Differs from EAGLE by: the target is its own drafter, at the price of a wider verification.
Departs from the official code in: the window is part of the draft tree (every token of it descends from
the last one, as the code's attention mask has it), so a window that happens to be right is accepted as well;
the first window is random tokens of the prompt on all levels, where the code fills one level after the other.
The size of its tree is its own: a tree that is asked for changes nothing.

Shapes: L levels of the window (an n-gram has L + 1 tokens), W columns, G guesses, N nodes: L * W + G * L.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.base import Batch, DrafterConfig, DraftTree, Proposer, Target, Tree, at_least
from vlmdistill.stores.schema import Feature, TargetInfo


class Lookahead(Proposer):
    """n-grams that the target itself has said in parallel."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: the official ones for a 7B target."""

        level: int = 5
        """Tokens of an n-gram (N)."""
        window: int = 7
        """Places guessed at in parallel (W)."""
        guesses: int = 7
        """n-grams verified in one call, and kept for each first token (G)."""
        pool_from_prompt: bool = False
        """Begin with the n-grams of the prompt."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 2, "level")
            at_least(self, 1, "window", "guesses")

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """Nothing."""
        return frozenset()

    def draft(self, prompt: Batch, target: Target) -> "Window":
        """Begin with a window of random tokens of the prompt."""
        return Window(self.config, prompt.ids_T)


class Window:
    """The window [L, W], whose first token is the last certain one, and the n-grams found so far."""

    def __init__(self, config: Lookahead.Config, prompt_T: Tensor) -> None:
        self.config, self.device = config, prompt_T.device
        self.levels = config.level - 1
        words = prompt_T.tolist()
        draw = random.Random(0)
        self.rows = [[draw.choice(words) for _ in range(config.window)] for _ in range(self.levels)]
        self.pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        if config.pool_from_prompt:
            for start in range(len(words) - self.levels):
                self._keep(words[start], tuple(words[start + 1 : start + config.level]))

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """The last certain token is where the window begins."""
        self.rows[0][0] = int(ids_K[-1])  # the pool is on the host: a wait for a GPU, and one more in `hear`

    def grow(self, shape: Tree) -> DraftTree:
        """The window, then the known n-grams of its first token, the latest first, whatever the `shape`."""
        width, levels = self.config.window, self.levels
        known = list(reversed(self.pool.get(self.rows[0][0], {})))
        # Level 0 is a chain from the root; what stands below a place of it descends from there.
        parents = [max(node - (1 if node < width else width), 0) for node in range(levels * width)]
        for first in range(len(parents), len(parents) + len(known) * levels, levels):
            parents += [0, *range(first, first + levels - 1)]
        ids = [token for row in self.rows for token in row] + [token for one in known for token in one]
        parent_N = torch.tensor(parents, device=self.device)
        visible_NN = eye_NN = torch.eye(len(parents), dtype=torch.bool, device=self.device)
        for _ in range(levels + width):
            visible_NN = eye_NN | visible_NN[parent_N]
        greedy_N = torch.zeros(len(parents), dtype=torch.bool, device=self.device)
        greedy_N[0] = True
        greedy_N[levels * width : levels * width + (levels if known else 0)] = True
        return DraftTree(torch.tensor(ids, device=self.device), parent_N, visible_NN, greedy_N)

    def hear(self, logits_NV: Tensor) -> None:
        """Keep the n-gram of every column, and move the window on by a place."""
        width = self.config.window
        last = (self.levels - 1) * width
        said = logits_NV[last : last + width].argmax(-1).tolist()
        for column in zip(*self.rows, said, strict=True):
            self._keep(column[0], column[1:])
        self.rows = [*(list(row) for row in self.rows[1:]), said]

    def _keep(self, first: int, rest: tuple[int, ...]) -> None:
        """Remember an n-gram; of each first token the `guesses` latest are kept."""
        known = self.pool.setdefault(first, OrderedDict())
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.config.guesses:
            known.popitem(last=False)
