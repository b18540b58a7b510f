"""Lossless acceptance: what the target itself would have said, node by node.

Shapes: N nodes of a draft tree, V vocabulary, K nodes of the accepted path.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.base import DraftTree


def choose(logits_NV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The target's next token after each row: the best one at temperature 0, else a sample. [N].

    Probabilities are in float64: in half precision a uniform is exactly zero often enough to accept
    tokens that the target never says.
    """
    if temperature == 0:
        return logits_NV.argmax(-1)
    probability_NV = (logits_NV.double() / temperature).softmax(-1)
    return torch.multinomial(probability_NV, 1, generator=generator)[:, 0]


@dataclass(frozen=True)
class Verdict:
    """The accepted path, root first, and the token that the target says after it."""

    path_K: Tensor
    bonus_1: Tensor


def verify(
    tree: DraftTree, logits_NV: Tensor, temperature: float, generator: torch.Generator | None = None
) -> Verdict:
    """Walk from the root; the target chooses after each node; descend while a child is its choice.

    The children of a node were picked without chance, so this is speculative sampling (Leviathan et al.,
    2023) with a drafter that is certain of each: every token on the path and the bonus are the
    target's own choice, so the output has the target's distribution whatever was drafted. Choices are
    made for all nodes at once; those off the path are not used.
    """
    choice_N = choose(logits_NV, temperature, generator)
    chosen_N = tree.ids_N == choice_N[tree.parent_N]
    chosen_N[0] = True
    accepted_N = ~(tree.visible_NN & ~chosen_N).any(1)
    end_1 = (tree.depth_N * accepted_N).argmax(0, keepdim=True)  # a tensor throughout: no wait for a GPU
    path_N = tree.visible_NN.index_select(0, end_1)[0]
    return Verdict(path_K=path_N.nonzero()[:, 0], bonus_1=choice_N.index_select(0, end_1))
