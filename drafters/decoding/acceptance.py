"""Lossless acceptance: the target's own choice at every node of a draft tree.

Shapes: N nodes of a draft tree, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.core.tree import DraftTree


def is_greedy(temperature: float) -> bool:
    """Whether a temperature is taken as 0: logits over a smaller one are not finite (vLLM has this limit)."""
    return temperature < 1e-5


def choose(
    logits_NV: Tensor, temperature: float, generator: torch.Generator | None
) -> Tensor:
    """The target's next token after each row: the best one at temperature 0, else a sample. [N].

    Probabilities are in float64: in half precision, a uniform is exactly zero often enough to accept tokens
    of probability zero.
    """
    if is_greedy(temperature):
        return logits_NV.argmax(-1)
    probability_NV = (logits_NV.double() / temperature).softmax(-1)
    # As torch.multinomial, without its checks, which wait for the GPU.
    return (
        probability_NV
        / torch.empty_like(probability_NV).exponential_(generator=generator)
    ).argmax(-1)


@dataclass(frozen=True)
class Acceptance:
    """The accepted path and the target's token after it; no shape depends on what is accepted."""

    path_N: Tensor
    """The nodes of the path, root first, then all others."""
    length_1: Tensor
    """How many nodes are on the path."""
    bonus_1: Tensor


def verify(
    tree: DraftTree,
    logits_NV: Tensor,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Walk from the root; the target chooses after each node; descend while a child is its choice.

    The children of a node are drafted deterministically, so this is speculative sampling (Leviathan et al.,
    2023) with a drafter of probability 1: every accepted token and the bonus are the target's own choice, and
    the output has the target's distribution for any tree. Choices are made for all nodes at once; those off
    the path are not used.
    """
    choice_N = choose(logits_NV, temperature, generator)
    if not is_greedy(temperature):  # one draw per text: two draws would be two chances
        choice_N = choice_N[_first(tree)]
    chosen_N = tree.ids_N == choice_N[tree.parent_N]
    chosen_N[0] = True
    accepted_N = ~(tree.visible_NN & ~chosen_N).any(1)
    end_1 = (tree.depth_N * accepted_N).argmax(
        0, keepdim=True
    )  # stays a tensor: no wait for the GPU
    on_path_N = tree.visible_NN.index_select(0, end_1)[0]
    return Acceptance(
        path_N=on_path_N.argsort(stable=True, descending=True),
        length_1=on_path_N.sum(0, keepdim=True),
        bonus_1=choice_N.index_select(0, end_1),
    )


def _first(tree: DraftTree) -> Tensor:
    """For each node the first one with the same path of tokens, [N]: n-grams may propose a path twice."""
    depth_N, seen_NN = tree.depth_N, tree.visible_NN.float()
    alike_NN = (tree.ids_N[:, None] == tree.ids_N) & (depth_N[:, None] == depth_N)
    shared_NN = (
        seen_NN @ alike_NN.float() @ seen_NN.T
    )  # levels on which two paths have the same token
    return (alike_NN & (shared_NN == depth_N)).int().argmax(1)
