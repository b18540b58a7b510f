"""The drafting session of step-by-step drafters: draft trees grown where the drafter is confident (EAGLE-2).

Shapes: N nodes of a tree, the root included; K best children; F frontier nodes of a level; A nodes drafted
so far; C candidates of all levels; D hidden; V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.config import ModelConfig
from vlmdistill.drafters.core.kv_cache import GrowingKVCache, KVCache
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.stores.schema import TargetInfo


class Stepper(Protocol):
    """What a tree is grown with, step by step: a `Drafter`, which says what each does."""

    info: TargetInfo

    @property
    def config(self) -> ModelConfig: ...  # noqa: D102
    def condition(self, batch: Batch, cache: KVCache) -> None: ...  # noqa: D102
    def entries(self, batch: Batch) -> tuple[Entries, Tensor]: ...  # noqa: D102
    def rotary(self, batch: Batch) -> Tensor: ...  # noqa: D102
    def step(self, entries: Entries, cache: KVCache) -> Tensor: ...  # noqa: D102
    def estimate(self, state_ND: Tensor, hop: int) -> Tensor: ...  # noqa: D102
    def logits(self, state_ND: Tensor, last_N: Tensor, hop: int = 0) -> Tensor: ...  # noqa: D102
    def confidence(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor | None: ...  # noqa: D102


class TreeDrafter:
    """One sequence: the committed tokens in a KV cache, and the tree after them."""

    def __init__(
        self, drafter: Stepper, prompt: Batch, cache: KVCache | None = None
    ) -> None:
        """Start after a prefilled prompt: one sequence that ends in text."""
        self.drafter = drafter
        self.cache = cache or GrowingKVCache(window=drafter.config.attention_window)
        prompt = prompt.only(drafter.config.needs(drafter.info, decoding=True))
        drafter.condition(prompt, self.cache)
        self._entries: Entries | None = drafter.entries(prompt)[0]
        known = prompt.readable
        self.rotary = int(drafter.rotary(known)[-1])
        self.position = int(known.position_T[-1])
        self.span = prompt.text_tokens.span_N[-1:]
        self._columns_K = columns_of(drafter)
        self._frames: dict[Tree, _Frame] = {}
        self._root_id: Tensor | None = None
        self.state_1D: Tensor | None = None

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """See `DraftSession.commit`."""
        offset_K = torch.arange(len(ids_K), device=ids_K.device)
        entries = self._at(
            ids_K, hidden_KD, self.rotary + offset_K, self.position + 1 + offset_K
        )
        if self._entries is not None:
            entries = _join(self._entries, entries)
            self._entries = None
        last = torch.arange(
            len(entries.ids_N) - 1, len(entries.ids_N), device=ids_K.device
        )
        tokens = entries.tokens.with_rows(last)
        entries = replace(entries, tokens=tokens)
        self.state_1D = self.drafter.step(entries, self.cache)
        self._root_id = ids_K[-1:]
        self.rotary += len(ids_K)
        self.position += len(ids_K)

    def grow(self, shape: Tree) -> DraftTree:
        """The `shape.total - 1` most likely nodes of a tree of `shape.depth + 1` levels (EAGLE-2 section 4).

        Scores are sums of float32 log-probabilities, sorted stably, so that a parent precedes a child with
        the same score. A tree deeper than the drafter's `max_hops` is cut.
        """
        assert self.state_1D is not None, "nothing was committed yet"
        assert self._root_id is not None
        if (limit := self.drafter.config.max_hops) is not None:
            shape = replace(shape, depth=min(shape.depth, limit - 1))
        frame = self._frame(shape, self._root_id.device)
        if frame.chain is not None:
            ids_N, chance_N = self._chain(frame, shape.confidence)
            return replace(
                frame.chain.first(len(ids_N)), ids_N=ids_N, chance_N=chance_N
            )
        score_FK, id_FK = self._expand(self.state_1D, self._root_id, 0, shape.k)
        width = id_FK.shape[1]
        scores, ids = [score_FK[0]], [id_FK[0]]
        parents = [frame.first_F - width]  # negative: children of the root
        frontier_id, frontier_score, slot_F = id_FK[0], score_FK[0], frame.first_F
        hidden_FD = self.state_1D.expand(width, *self.state_1D.shape[1:])
        visible_FA = frame.eye_FF
        drafted = width
        for hop in range(1, shape.depth + 1):
            state_FD = self._step(frame, frontier_id, hidden_FD, hop, visible_FA)
            score_FK, id_FK = self._expand(state_FD, frontier_id, hop, width)
            total_FK = frontier_score[:, None] + score_FK
            scores.append(total_FK.flatten())
            ids.append(id_FK.flatten())
            parents.append(slot_F.repeat_interleave(width))
            if hop < shape.depth:
                frontier_score, best_F = total_FK.flatten().topk(width)
                row_F = best_F // width
                hidden_FD = state_FD[row_F]
                visible_FA = torch.cat([visible_FA[row_F], frame.eye_FF], dim=1)
                frontier_id, slot_F = ids[-1][best_F], best_F + drafted
                drafted += width * width
        return _prune(
            self._root_id,
            torch.cat(ids),
            torch.cat(scores),
            torch.cat(parents),
            frame.rank_C,
            shape,
        )

    def _chain(
        self, frame: "_Frame", confidence: float
    ) -> tuple[Tensor, Tensor | None]:
        """The ids of a tree without branches, [N], and their chances.

        Without a confidence head, chances are computed only where the chain may end early.
        """
        assert self.state_1D is not None
        assert self._root_id is not None
        assert frame.chain is not None
        ids, state_1D, left = [self._root_id], self.state_1D, 1.0
        chances = [self._root_id.new_ones(1, dtype=torch.float32)]
        for hop in range(len(frame.chain.ids_N) - 1):
            if hop > 0:
                state_1D = self._step(frame, ids[-1], state_1D, hop, None)
            logits_1V = self.drafter.logits(state_1D, ids[-1], hop)
            told_1 = self.drafter.confidence(
                self.drafter.estimate(state_1D, hop), ids[-1]
            )
            if confidence or told_1 is not None:
                chances.append(
                    logits_1V.softmax(-1).amax(-1)
                    if told_1 is None
                    else told_1.float().sigmoid()
                )
            if confidence:
                left *= float(chances[-1])  # a wait for the GPU
                if left < confidence:
                    break
            ids.append(self._ids(logits_1V.argmax(-1)))
        told = len(chances) > 1 or len(ids) == 1
        return torch.cat(ids), torch.cat(chances[: len(ids)]) if told else None

    def _step(
        self,
        frame: "_Frame",
        ids_F: Tensor,
        hidden_FD: Tensor,
        hop: int,
        visible_FA: Tensor | None,
    ) -> Tensor:
        """The drafter's states after the frontier nodes, which are `hop` guesses after the root, [F, D]."""
        position_F, span_F = (
            frame.one_F * (self.position + hop),
            self.span.expand(len(ids_F)),
        )
        tokens = TokenIndex(frame.zero_F, position_F, span_F, None, visible_FA)
        rotary_F = frame.one_F * (self.rotary + hop - 1)
        return self.drafter.step(
            Entries(ids_F, hidden_FD, rotary_F, tokens, hop), self.cache
        )

    def _frame(self, shape: Tree, device: torch.device) -> "_Frame":
        """The tensors that all trees of a shape share, made once."""
        if self._frames.get(shape) is None:
            size = (
                self.drafter.info.vocab_size
                if self._columns_K is None
                else len(self._columns_K)
            )
            self._frames[shape] = _Frame.of(shape, size, device)
        return self._frames[shape]

    def _expand(
        self, state_FD: Tensor, last_F: Tensor, hop: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k best tokens after each frontier node."""
        score_FV = self.drafter.logits(state_FD, last_F, hop).log_softmax(-1)
        score_FK, id_FK = score_FV.topk(min(k, score_FV.shape[-1]))
        return score_FK, self._ids(id_FK)

    def _ids(self, column_N: Tensor) -> Tensor:
        """The target's ids of columns of the logits."""
        return column_N if self._columns_K is None else self._columns_K[column_N]

    def _at(
        self, ids_N: Tensor, hidden_ND: Tensor, rotary_N: Tensor, position_N: Tensor
    ) -> Entries:
        tokens = TokenIndex(
            torch.zeros_like(ids_N), position_N, self.span.expand(len(ids_N))
        )
        return Entries(ids_N, hidden_ND, rotary_N, tokens)


@dataclass(frozen=True)
class _Frame:
    """The fixed parts of a tree's shape; F frontier nodes a level, C candidates of all levels."""

    first_F: Tensor  # 0, 1, ...
    zero_F: Tensor
    one_F: Tensor
    eye_FF: Tensor
    rank_C: Tensor  # of each candidate among its siblings
    chain: DraftTree | None  # without branches, all trees are alike but for their ids

    @classmethod
    def of(cls, shape: Tree, vocabulary: int, device: torch.device) -> "_Frame":
        width = min(shape.k, vocabulary)
        first_F = torch.arange(width, device=device)
        rank_C = first_F.repeat(1 + shape.depth * width)
        eye_FF = torch.eye(width, dtype=torch.bool, device=device)
        chain = (
            _linked(min(shape.total, shape.depth + 2), device) if width == 1 else None
        )
        return cls(
            first_F,
            torch.zeros_like(first_F),
            torch.ones_like(first_F),
            eye_FF,
            rank_C,
            chain,
        )


def _linked(count: int, device: torch.device) -> DraftTree:
    """A chain of `count` nodes, the root included, with zeros for ids."""
    order_N = torch.arange(count, device=device)
    all_N = torch.ones_like(order_N, dtype=torch.bool)
    return DraftTree(
        torch.zeros_like(order_N),
        (order_N - 1).clamp(min=0),
        all_N.expand(count, -1).tril(),
        all_N,
    )


def _join(first: Entries, second: Entries) -> Entries:
    """Two runs of hop-0 entries as one."""
    one, two = first.tokens, second.tokens
    return Entries(
        torch.cat([first.ids_N, second.ids_N]),
        torch.cat([first.hidden_ND, second.hidden_ND]),
        torch.cat([first.rotary_N, second.rotary_N]),
        TokenIndex(
            torch.cat([one.segment_N, two.segment_N]),
            torch.cat([one.position_N, two.position_N]),
            torch.cat([one.span_N, two.span_N]),
        ),
    )


def _prune(
    root_1: Tensor,
    ids_C: Tensor,
    score_C: Tensor,
    parent_C: Tensor,
    rank_C: Tensor,
    shape: Tree,
) -> DraftTree:
    """Keep the best candidates of all levels and link them to their parents, the root at index 0.

    A negative `parent_C` is the root.
    """
    first, sure_1 = parent_C.new_zeros(1), score_C.new_zeros(1)
    if len(ids_C) < shape.total:
        parent_N = torch.cat([first, (parent_C + 1).clamp(min=0)])
        ids_N, rank_N = torch.cat([root_1, ids_C]), torch.cat([first, rank_C])
        score_N = torch.cat([sure_1, score_C])
    else:
        order_C = torch.sort(score_C, descending=True, stable=True).indices
        kept_N = order_C[: shape.total - 1].sort().values
        node_C = torch.zeros_like(parent_C)
        node_C[kept_N] = torch.arange(1, len(kept_N) + 1, device=root_1.device)
        origin_N = parent_C[kept_N]
        parent_N = torch.cat(
            [first, torch.where(origin_N < 0, 0, node_C[origin_N.clamp(min=0)])]
        )
        ids_N, rank_N = (
            torch.cat([root_1, ids_C[kept_N]]),
            torch.cat([first, rank_C[kept_N]]),
        )
        score_N = torch.cat([sure_1, score_C[kept_N]])
    eye_NN = torch.eye(len(parent_N), dtype=torch.bool, device=root_1.device)
    visible_NN = eye_NN
    for _ in range(shape.depth + 1):
        visible_NN = eye_NN | visible_NN[parent_N]
    greedy_N = ~(visible_NN & (rank_N > 0)).any(1)
    chance_N = (score_N - score_N[parent_N]).exp()
    return DraftTree(ids_N, parent_N, visible_NN, greedy_N, chance_N)
