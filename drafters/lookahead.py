"""Lookahead -- Break the Sequential Dependency of LLM Inference Using Lookahead Decoding, ICML 2024.

Idea: no drafter. In the call that verifies, the target also guesses a window of later tokens in
parallel (Jacobi iteration). The columns of the window make n-grams; those that begin with the
last token are the next guesses.
Differs from EAGLE by: nothing is trained or stored; the target is its own drafter, at the cost
of a wider verification. The tree has its own size, whatever tree is asked for.

Shapes: L levels of the window (an n-gram has L + 1 tokens), W columns, G guesses, N nodes:
L * W + G * L.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from vlmdistill.drafters.core import Batch
from vlmdistill.drafters.core.config import ModelConfig, Number, Range
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import Target
from vlmdistill.drafters.core.tree import DraftTree, Tree


class Lookahead(Proposer):
    """n-grams that the target has generated in parallel."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """The official settings for a 7B target."""

        level: Annotated[int, Range(2)] = 5
        """Tokens of an n-gram (N)."""
        window: Number = 7
        """Positions guessed at in parallel (W)."""
        guesses: Number = 7
        """n-grams that are verified in one call and kept for each first token (G)."""
        pool_from_prompt: bool = False
        """Begin with the n-grams of the prompt."""

    config: Config
    shaped = False

    def draft(self, prompt: Batch, target: Target) -> "Window":
        """Begin with a window of random tokens of the prompt."""
        return Window(self.config, prompt.ids_T)


class Window:
    """The window [L, W], whose first token is the last committed one, and a pool of n-grams."""

    def __init__(self, config: Lookahead.Config, prompt_T: Tensor) -> None:
        self.config = config
        self.device = prompt_T.device
        self.levels = config.level - 1
        prompt = prompt_T.tolist()
        random_token = random.Random(0)
        self.rows: list[list[int]] = []
        for _ in range(self.levels):
            row = [random_token.choice(prompt) for _ in range(config.window)]
            self.rows.append(row)
        self.pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        """By first token, the rest of its latest n-grams, the oldest first."""
        if config.pool_from_prompt:
            for start in range(len(prompt) - self.levels):
                first, *rest = prompt[start : start + config.level]
                self._keep(first, tuple(rest))

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """The window begins with the last committed token."""
        # A wait for the GPU, as in `observe`: the pool is on the host.
        self.rows[0][0] = int(ids_K[-1])

    def grow(self, shape: Tree) -> DraftTree:
        """The window, then the n-grams of its first token, the latest first, for any `shape`."""
        width = self.config.window
        levels = self.levels
        last_token = self.rows[0][0]
        n_grams = [*reversed(self.pool.get(last_token, {}))]
        ids = [token for row in self.rows for token in row]
        for n_gram in n_grams:
            ids += n_gram
        # Level 0 is a chain from the root; the nodes of a column descend from its token there.
        level_0 = [max(node - 1, 0) for node in range(width)]
        parents = [*level_0, *range((levels - 1) * width)]
        for first in range(levels * width, len(ids), levels):
            parents += [0, *range(first, first + levels - 1)]
        parent_N = torch.tensor(parents, device=self.device)

        count = len(parents)
        eye_NN = torch.eye(count, dtype=torch.bool, device=self.device)
        visible_NN = eye_NN
        for _ in range(levels + width):
            visible_NN = eye_NN | visible_NN[parent_N]
        greedy_N = torch.zeros(count, dtype=torch.bool, device=self.device)
        greedy_N[0] = True
        latest = levels * width
        greedy_N[latest : latest + levels] = True  # of none, if there is no n-gram
        ids_N = torch.tensor(ids, device=self.device)
        return DraftTree(ids_N, parent_N, visible_NN, greedy_N)

    def observe(self, logits_NV: Tensor) -> None:
        """Keep the n-gram of every column, and move the window by one position."""
        width = self.config.window
        last_level = (self.levels - 1) * width
        logits_WV = logits_NV[last_level : last_level + width]
        best = logits_WV.argmax(-1).tolist()
        for first, *rest in zip(*self.rows, best, strict=True):
            self._keep(first, tuple(rest))
        self.rows = [*self.rows[1:], best]

    def _keep(self, first: int, rest: tuple[int, ...]) -> None:
        """Remember an n-gram; of each first token the `guesses` latest are kept."""
        n_grams = self.pool.setdefault(first, OrderedDict())
        n_grams.pop(rest, None)
        n_grams[rest] = None
        if len(n_grams) > self.config.guesses:
            n_grams.popitem(last=False)
