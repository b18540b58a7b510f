"""Draft trees: shape, nodes, and the session that drafts them.

Shapes: K tokens committed, N nodes of a tree, the root included, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from vlmdistill.stores.errors import DataError


@dataclass(frozen=True)
class Tree:
    """A draft tree in EAGLE-2's notation total-depth-k (section 4).

    `total` nodes are verified, the root (the last sampled token) included. Each level has the `k` children of
    each of the `k` best nodes above; `depth` levels follow the first one. A chain of n tokens is total n + 1,
    depth n - 1, k 1.
    """

    total: int = 60
    depth: int = 5
    k: int = 10

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """Read `30-3-8` or `chain-5`; DataError on other text."""
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


@dataclass(frozen=True)
class DraftTree:
    """Nodes, parents before children; node 0, the root, is the last committed token."""

    ids_N: Tensor
    parent_N: Tensor  # the root is its own parent
    visible_NN: Tensor  # bool: node n attends to node m (its ancestors and itself)
    greedy_N: Tensor  # bool: the node is on the chain of each step's best guess

    @property
    def depth_N(self) -> Tensor:
        """The root has depth 1: it is one position after the committed prefix."""
        return self.visible_NN.sum(1)


class DraftSession(Protocol):
    """Drafting for one sequence: committed tokens, and guesses after them."""

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """Add accepted tokens, each with the target's states before it, concatenated."""
        ...

    def grow(self, shape: Tree) -> DraftTree:
        """Draft a tree after the last committed token."""
        ...


@runtime_checkable
class Observer(Protocol):
    """The capability of a session that uses the target's logits of its guesses."""

    def observe(self, logits_NV: Tensor) -> None:
        """Take the target's logits after every node of the last tree."""
        ...
