"""Draft trees: shape, nodes, and the session that drafts them.

Shapes: K tokens committed, N nodes of a tree, the root included, D hidden, V vocabulary.
"""

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from vlmdistill.stores.errors import DataError

CHAIN = re.compile(
    r"chain-(?P<length>[1-9]\d{0,3})(-(?P<confidence>0\.(?!0+$)\d{1,4}))?"
)
TOTAL_DEPTH_K = re.compile(r"\d{1,4}-\d{1,4}-\d{1,4}")


@dataclass(frozen=True)
class Tree:
    """A draft tree in EAGLE-2's notation total-depth-k (section 4).

    `total` nodes are verified, the root (the last sampled token) included. Each level has the
    `k` best children of each of the `k` best nodes above; `depth` levels follow the first one.

    A chain of n tokens is total n + 1, depth n - 1, k 1. With a `confidence` above 0 it ends
    before the drafter's probability of all its tokens is lower; each token is then a wait for
    the GPU. It has four decimals at most.
    """

    total: int = 60
    depth: int = 5
    k: int = 10
    confidence: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """Read `30-3-8`, `chain-5` or `chain-8-0.3`.

        DataError on other text, or on a tree with nodes that could never be verified.
        """
        if match := CHAIN.fullmatch(text):
            length = int(match["length"])
            confidence = float(match["confidence"] or 0)
            return cls(length + 1, length - 1, 1, confidence)
        if TOTAL_DEPTH_K.fullmatch(text):
            total, depth, k = map(int, text.split("-"))
            if depth + 2 > total or not 1 <= k < total:
                raise DataError(
                    f"no tree is '{text}': total-depth-k is {total} nodes with the root, "
                    f"{depth} levels after the first (at most total - 2), and {k} best nodes "
                    "of each (1 to total - 1)"
                )
            return cls(total, depth, k)
        raise DataError(
            f"'{text}' is not a tree: "
            "write total-depth-k, such as 30-3-8, or chain-5, or chain-8-0.3"
        )

    def __str__(self) -> str:
        is_chain = self.k == 1 and self.total == self.depth + 2
        if not is_chain:
            return f"{self.total}-{self.depth}-{self.k}"
        chain = f"chain-{self.total - 1}"
        if not self.confidence:
            return chain
        confidence = f"{self.confidence:.4f}".rstrip("0")
        return f"{chain}-{confidence}"


@dataclass(frozen=True)
class DraftTree:
    """Nodes, parents before children; node 0, the root, is the last committed token."""

    ids_N: Tensor
    parent_N: Tensor  # the root is its own parent
    visible_NN: Tensor  # bool: node n attends to node m (its ancestors and itself)
    greedy_N: Tensor  # bool: the node is on the chain of each step's best guess
    chance_N: Tensor | None = None
    """The drafter's estimate of the chance that a node follows its parent, 1 for the root."""

    def first(self, count: int) -> "DraftTree":
        """The tree of the first `count` nodes."""
        if count == len(self.ids_N):
            return self
        ids_N = self.ids_N[:count]
        parent_N = self.parent_N[:count]
        visible_NN = self.visible_NN[:count, :count]
        chance_N = None if self.chance_N is None else self.chance_N[:count]
        return DraftTree(ids_N, parent_N, visible_NN, self.greedy_N[:count], chance_N)

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
    """The capability of a session to learn from the target's logits of its guesses."""

    def observe(self, logits_NV: Tensor) -> None:
        """Take the target's logits after every node of the last tree."""
        ...
