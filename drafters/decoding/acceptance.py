"""Lossless acceptance: the target's own choice at every node of a draft tree.

Shapes: N nodes of a draft tree, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.core.tree import DraftTree

MILLION = 10**6


def is_greedy(temperature: float) -> bool:
    """Whether a temperature counts as 0: logits over a smaller one are not finite.

    vLLM has the same limit.
    """
    return temperature < 1e-5


def choose(
    logits_NV: Tensor, temperature: float, generator: torch.Generator | None
) -> Tensor:
    """The target's next token after each row: the best one at temperature 0, else a sample. [N]

    Probabilities are in float64: in half precision, a uniform is exactly zero often enough to
    accept tokens of probability zero.
    """
    if is_greedy(temperature):
        return logits_NV.argmax(-1)
    probability_NV = (logits_NV.double() / temperature).softmax(-1)
    # As torch.multinomial, without its checks, which wait for the GPU.
    noise_NV = torch.empty_like(probability_NV).exponential_(generator=generator)
    return (probability_NV / noise_NV).argmax(-1)


@dataclass(frozen=True)
class Acceptance:
    """The accepted path and the target's token after it; no shape depends on what is accepted."""

    path_N: Tensor
    """The nodes of the path, root first, then all others."""
    length_1: Tensor
    """How many nodes are on the path."""
    bonus_1: Tensor

    def fetch(self, tree: DraftTree) -> "Fetched":
        """Read it on the host, in a single wait for the GPU."""
        path_N = self.path_N
        ids_N = tree.ids_N[path_N]
        tensors = [self.length_1, self.bonus_1, path_N, ids_N, tree.greedy_N[path_N]]
        if tree.chance_N is not None:
            # As whole numbers, like the others.
            millionths_N = (tree.chance_N[path_N] * MILLION).long()
            tensors.append(millionths_N)
        length, bonus, *values = torch.cat(tensors).tolist()
        count = len(tree.ids_N)
        starts = range(0, len(values), count)
        path, ids, greedy, *chances = [values[at : at + count] for at in starts]
        return Fetched(length, bonus, path, ids, greedy, *chances)


@dataclass(frozen=True)
class Fetched:
    """An `Acceptance` on the host; lists have all nodes of the tree, those of the path first."""

    length: int  # nodes on the path, the root included
    bonus: int
    path: list[int]
    ids: list[int]
    greedy: list[int]  # 1: on the chain of each step's best guess
    chances: Sequence[int] = ()  # in millionths; empty: the drafter has no estimates

    @property
    def accepted(self) -> list[int]:
        """The nodes of the path."""
        return self.path[: self.length]

    @property
    def tokens(self) -> list[int]:
        """The tokens gained: those of the path without its root, and the bonus."""
        return [*self.ids[1 : self.length], self.bonus]


def verify(
    tree: DraftTree,
    logits_NV: Tensor,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Walk from the root: descend while a child is the target's choice after its parent.

    The children of a node are drafted deterministically, so this is speculative sampling
    (Leviathan et al., 2023) with a drafter of probability 1: every accepted token and the
    bonus are the target's own choice, and the output has the target's distribution for any
    tree. Choices are made for all nodes at once; those off the path are not used.
    """
    choice_N = choose(logits_NV, temperature, generator)
    if not is_greedy(temperature):
        # One draw per text: two draws would be two chances of acceptance.
        choice_N = choice_N[_first(tree)]
    chosen_N = tree.ids_N == choice_N[tree.parent_N]
    chosen_N[0] = True
    not_chosen_NN = tree.visible_NN & ~chosen_N
    accepted_N = ~not_chosen_NN.any(1)
    # The deepest accepted node, as a tensor: no wait for the GPU.
    end_1 = (tree.depth_N * accepted_N).argmax(0, keepdim=True)
    on_path_N = tree.visible_NN.index_select(0, end_1)[0]
    path_N = on_path_N.argsort(stable=True, descending=True)
    length_1 = on_path_N.sum(0, keepdim=True)
    bonus_1 = choice_N.index_select(0, end_1)
    return Acceptance(path_N, length_1, bonus_1)


def _first(tree: DraftTree) -> Tensor:
    """For each node the first one with the same path of tokens, [N].

    n-grams may propose a path twice.
    """
    depth_N = tree.depth_N
    visible_NN = tree.visible_NN.float()
    same_depth_NN = depth_N[:, None] == depth_N
    same_id_NN = tree.ids_N[:, None] == tree.ids_N
    alike_NN = same_id_NN & same_depth_NN
    # Levels on which two paths have the same token.
    shared_NN = visible_NN @ alike_NN.float() @ visible_NN.T
    same_path_NN = alike_NN & (shared_NN == depth_N)
    return same_path_NN.int().argmax(1)
