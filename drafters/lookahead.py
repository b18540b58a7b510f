"""Lookahead -- Break the Sequential Dependency of LLM Inference Using Lookahead Decoding, ICML 2024.

Idea: no drafter. In the call that verifies, the target also guesses a window of later tokens in parallel
(Jacobi iteration). The columns of the window make n-grams; those that begin with the last token are the next
guesses.
Differs from EAGLE by: nothing is trained or stored; the target is its own drafter, at the cost of a wider
verification. The tree has its own size, whatever tree is asked for.

Shapes: L levels of the window (an n-gram has L + 1 tokens), W columns, G guesses, N nodes: L * W + G * L.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.core import Batch
from vlmdistill.drafters.core.config import ModelConfig, at_least
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import Target
from vlmdistill.drafters.core.tree import DraftTree, Tree


class Lookahead(Proposer):
    """n-grams that the target has generated in parallel."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The official settings for a 7B target."""

        level: int = 5
        """Tokens of an n-gram (N)."""
        window: int = 7
        """Positions guessed at in parallel (W)."""
        guesses: int = 7
        """n-grams verified in one call, and kept for each first token (G)."""
        pool_from_prompt: bool = False
        """Begin with the n-grams of the prompt."""

        def __post_init__(self) -> None:
            at_least(self, 2, "level")
            at_least(self, 1, "window", "guesses")

    config: Config
    shaped = False

    def draft(self, prompt: Batch, target: Target) -> "Window":
        """Begin with a window of random tokens of the prompt."""
        return Window(self.config, prompt.ids_T)


class Window:
    """The window [L, W], whose first token is the last committed one, and the n-grams found so far."""

    def __init__(self, config: Lookahead.Config, prompt_T: Tensor) -> None:
        self.config, self.device = config, prompt_T.device
        self.levels = config.level - 1
        words = prompt_T.tolist()
        draw = random.Random(0)
        self.rows = [
            [draw.choice(words) for _ in range(config.window)]
            for _ in range(self.levels)
        ]
        self.pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        if config.pool_from_prompt:
            for start in range(len(words) - self.levels):
                self._keep(words[start], tuple(words[start + 1 : start + config.level]))

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """The window begins with the last committed token."""
        self.rows[0][0] = int(
            ids_K[-1]
        )  # a wait for the GPU, as in `observe`: the pool is on the host

    def grow(self, shape: Tree) -> DraftTree:
        """The window, then the known n-grams of its first token, the latest first, for any `shape`."""
        width, levels = self.config.window, self.levels
        known = list(reversed(self.pool.get(self.rows[0][0], {})))
        # Level 0 is a chain from the root; the nodes of a column descend from its token on level 0.
        parents = [
            max(node - (1 if node < width else width), 0)
            for node in range(levels * width)
        ]
        for first in range(len(parents), len(parents) + len(known) * levels, levels):
            parents += [0, *range(first, first + levels - 1)]
        ids = [token for row in self.rows for token in row] + [
            token for one in known for token in one
        ]
        parent_N = torch.tensor(parents, device=self.device)
        visible_NN = eye_NN = torch.eye(
            len(parents), dtype=torch.bool, device=self.device
        )
        for _ in range(levels + width):
            visible_NN = eye_NN | visible_NN[parent_N]
        greedy_N = torch.zeros(len(parents), dtype=torch.bool, device=self.device)
        greedy_N[0] = True
        greedy_N[levels * width : levels * width + (levels if known else 0)] = True
        return DraftTree(
            torch.tensor(ids, device=self.device), parent_N, visible_NN, greedy_N
        )

    def observe(self, logits_NV: Tensor) -> None:
        """Keep the n-gram of every column, and move the window by one position."""
        width = self.config.window
        last = (self.levels - 1) * width
        best = logits_NV[last : last + width].argmax(-1).tolist()
        for column in zip(*self.rows, best, strict=True):
            self._keep(column[0], column[1:])
        self.rows = [*(list(row) for row in self.rows[1:]), best]

    def _keep(self, first: int, rest: tuple[int, ...]) -> None:
        """Remember an n-gram; of each first token the `guesses` latest are kept."""
        known = self.pool.setdefault(first, OrderedDict())
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.config.guesses:
            known.popitem(last=False)
