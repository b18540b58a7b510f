"""Draft trees: a drafter's guesses after the last token, best paths first.

Shapes: N nodes of a tree, the root included; K best children; F frontier nodes of a level; A nodes drafted
so far; C candidates of all levels; D hidden; V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmdistill.drafters.base import Batch, Drafter, DraftTree, Entries, Tree
from vlmdistill.drafters.memory import CacheMemory, Memory, Places


class Growth:
    """The `Draft` of a drafter that goes by steps: a tree that grows where it is confident."""

    def __init__(self, drafter: Drafter, prompt: Batch, memory: Memory | None = None) -> None:
        """Start from a prefilled prompt of one sequence that ends in text."""
        self.drafter = drafter
        self.memory = memory or CacheMemory()
        prompt = prompt.only(drafter.needs(drafter.config, drafter.info, decoding=True))
        drafter.condition(prompt, self.memory)
        self._entries: Entries | None = drafter.entries(prompt)[0]
        self.position = int(drafter.rotary(prompt)[-1])
        self.order = int(prompt.position_T[-1])
        self.span = prompt.text_places.span_N[-1:]
        self._frames: dict[Tree, _Frame] = {}
        self._root_id: Tensor | None = None
        self.state_1D: Tensor | None = None

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """Take tokens that are certain now, each with the target's states before it side by side."""
        offset_K = torch.arange(len(ids_K), device=ids_K.device)
        entries = self._place(ids_K, hidden_KD, self.position + offset_K, self.order + 1 + offset_K)
        if self._entries is not None:
            entries = _join(self._entries, entries)
            self._entries = None
        last = torch.arange(len(entries.ids_N) - 1, len(entries.ids_N), device=ids_K.device)
        places = entries.places.with_rows(last)
        entries = Entries(entries.ids_N, entries.hidden_ND, entries.position_N, places)
        self.state_1D = self.drafter.step(entries, self.memory)
        self._root_id = ids_K[-1:]
        self.position += len(ids_K)
        self.order += len(ids_K)

    def grow(self, shape: Tree) -> DraftTree:
        """The `shape.total - 1` most likely nodes of a tree of `shape.depth + 1` levels (EAGLE-2 section 4).

        Likelihoods are sums of float32 log-probabilities, sorted stably, so that a parent always precedes
        a child that is as likely. A tree deeper than the drafter can guess ends where it must.
        """
        assert self.state_1D is not None, "nothing was committed yet"
        assert self._root_id is not None
        if self.drafter.max_hops is not None:
            shape = replace(shape, depth=min(shape.depth, self.drafter.max_hops - 1))
        frame = self._frame(shape, self._root_id.device)
        score_FK, id_FK = self._expand(self.state_1D, 0, shape.k)
        width = id_FK.shape[1]
        scores, ids = [score_FK[0]], [id_FK[0]]
        parents = [frame.first_F - width]  # negative: children of the root
        frontier_id, frontier_score, slot_F = id_FK[0], score_FK[0], frame.first_F
        hidden_FD = self.state_1D.expand(width, *self.state_1D.shape[1:])
        visible_FA: Tensor | None = frame.eye_FF if width > 1 else None
        drafted = width
        for level in range(1, shape.depth + 1):
            places = Places(
                frame.zero_F, frame.one_F * (self.order + level), self.span.expand(width), None, visible_FA
            )
            position_F = frame.one_F * (self.position + level - 1)
            state_FD = self.drafter.step(
                Entries(frontier_id, hidden_FD, position_F, places, level), self.memory
            )
            score_FK, id_FK = self._expand(state_FD, level, width)
            total_FK = frontier_score[:, None] + score_FK
            scores.append(total_FK.flatten())
            ids.append(id_FK.flatten())
            parents.append(slot_F.repeat_interleave(width) if width > 1 else slot_F)
            if level < shape.depth:
                if visible_FA is None:  # a chain: its one node goes on
                    frontier_score, best_F, hidden_FD = total_FK[0], frame.zero_F, state_FD
                else:
                    frontier_score, best_F = total_FK.flatten().topk(width)
                    row_F = best_F // width
                    hidden_FD = state_FD[row_F]
                    visible_FA = torch.cat([visible_FA[row_F], frame.eye_FF], dim=1)
                frontier_id, slot_F = ids[-1][best_F], best_F + drafted
                drafted += width * width
        return _prune(
            self._root_id, torch.cat(ids), torch.cat(scores), torch.cat(parents), frame.rank_C, shape
        )

    def hear(self, logits_NV: Tensor) -> None:
        """Nothing is learnt while decoding."""

    def _frame(self, shape: Tree, device: torch.device) -> "_Frame":
        """What is the same for every tree of a shape, made once."""
        if self._frames.get(shape) is None:
            vocabulary_K = self.drafter.vocabulary_K
            size = self.drafter.info.vocab_size if vocabulary_K is None else len(vocabulary_K)
            self._frames[shape] = _Frame.of(shape, size, device)
        return self._frames[shape]

    def _expand(self, state_FD: Tensor, hop: int, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of each state's k best next tokens."""
        score_FV = self.drafter.logits(state_FD, hop).log_softmax(-1)
        score_FK, id_FK = score_FV.topk(min(k, score_FV.shape[-1]))
        vocabulary_K = self.drafter.vocabulary_K
        return score_FK, id_FK if vocabulary_K is None else vocabulary_K[id_FK]

    def _place(self, ids_N: Tensor, hidden_ND: Tensor, position_N: Tensor, order_N: Tensor) -> Entries:
        places = Places(torch.zeros_like(ids_N), order_N, self.span.expand(len(ids_N)))
        return Entries(ids_N, hidden_ND, position_N, places)


@dataclass(frozen=True)
class _Frame:
    """The fixed parts of a tree's shape; F frontier nodes a level, C candidates of all levels."""

    first_F: Tensor  # 0, 1, ...
    zero_F: Tensor
    one_F: Tensor
    eye_FF: Tensor
    rank_C: Tensor  # of each candidate among its siblings

    @classmethod
    def of(cls, shape: Tree, vocabulary: int, device: torch.device) -> "_Frame":
        width = min(shape.k, vocabulary)
        first_F = torch.arange(width, device=device)
        rank_C = first_F.repeat(1 + shape.depth * width)
        eye_FF = torch.eye(width, dtype=torch.bool, device=device)
        return cls(first_F, torch.zeros_like(first_F), torch.ones_like(first_F), eye_FF, rank_C)


def _join(first: Entries, second: Entries) -> Entries:
    """Two runs of hop-0 entries as one."""
    one, two = first.places, second.places
    return Entries(
        torch.cat([first.ids_N, second.ids_N]),
        torch.cat([first.hidden_ND, second.hidden_ND]),
        torch.cat([first.position_N, second.position_N]),
        Places(
            torch.cat([one.segment_N, two.segment_N]),
            torch.cat([one.order_N, two.order_N]),
            torch.cat([one.span_N, two.span_N]),
        ),
    )


def _prune(
    root_1: Tensor, ids_C: Tensor, score_C: Tensor, parent_C: Tensor, rank_C: Tensor, shape: Tree
) -> DraftTree:
    """Keep the best candidates of all levels and link them to their parents, the root at index 0.

    A negative `parent_C` is the root.
    """
    first = parent_C.new_zeros(1)
    if len(ids_C) < shape.total:
        parent_N = torch.cat([first, (parent_C + 1).clamp(min=0)])
        ids_N, rank_N = torch.cat([root_1, ids_C]), torch.cat([first, rank_C])
    else:
        order_C = torch.sort(score_C, descending=True, stable=True).indices
        kept_N = order_C[: shape.total - 1].sort().values
        node_C = torch.zeros_like(parent_C)
        node_C[kept_N] = torch.arange(1, len(kept_N) + 1, device=root_1.device)
        origin_N = parent_C[kept_N]
        parent_N = torch.cat([first, torch.where(origin_N < 0, 0, node_C[origin_N.clamp(min=0)])])
        ids_N, rank_N = torch.cat([root_1, ids_C[kept_N]]), torch.cat([first, rank_C[kept_N]])
    eye_NN = torch.eye(len(parent_N), dtype=torch.bool, device=root_1.device)
    visible_NN = eye_NN
    for _ in range(shape.depth + 1):
        visible_NN = eye_NN | visible_NN[parent_N]
    greedy_N = ~(visible_NN & (rank_N > 0)).any(1)
    return DraftTree(ids_N, parent_N, visible_NN, greedy_N)
