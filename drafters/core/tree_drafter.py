"""The drafting session of step-by-step drafters: trees that grow where the drafter is confident.

The dynamic trees of EAGLE-2 (section 4), and chains that may end early.

Shapes: N nodes of a tree, the root included; K best children, or tokens committed; F
frontier nodes of a level; A nodes drafted so far; C candidates of all levels; D hidden;
V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch, Entries, TokenIndex
from vlmdistill.drafters.core.capabilities import ConfidenceHead
from vlmdistill.drafters.core.config import ModelConfig
from vlmdistill.drafters.core.kv_cache import GrowingKVCache, KVCache
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.stores.schema import TargetInfo


class Stepper(Protocol):
    """The part of `Drafter` with which a tree is grown, step by step."""

    info: TargetInfo

    @property
    def config(self) -> ModelConfig: ...  # noqa: D102
    def condition(self, batch: Batch, cache: KVCache) -> None: ...  # noqa: D102
    def entries(self, batch: Batch) -> tuple[Entries, Tensor]: ...  # noqa: D102
    def rotary(self, batch: Batch) -> Tensor: ...  # noqa: D102
    def step(self, entries: Entries, cache: KVCache) -> Tensor: ...  # noqa: D102
    def estimate(self, state_ND: Tensor, hop: int) -> Tensor: ...  # noqa: D102
    def logits(self, state_ND: Tensor, last_N: Tensor, hop: int = 0) -> Tensor: ...  # noqa: D102


class TreeDrafter:
    """One sequence: the committed tokens in a KV cache, and the tree after them."""

    def __init__(
        self, drafter: Stepper, prompt: Batch, cache: KVCache | None = None
    ) -> None:
        """Start after a prefilled prompt: one sequence that ends in text."""
        self.drafter = drafter
        self.cache = cache or GrowingKVCache(window=drafter.config.attention_window)
        needs = drafter.config.needs(drafter.info, decoding=True)
        prompt = prompt.only(needs)
        drafter.condition(prompt, self.cache)
        # The prompt's entries wait for the first committed tokens: one step reads both.
        entries, _ = drafter.entries(prompt)
        self._prompt_entries: Entries | None = entries
        readable = prompt.readable
        self.rotary = int(drafter.rotary(readable)[-1])
        self.position = int(readable.position_T[-1])
        self.span = prompt.text_tokens.span_N[-1:]
        self.state_1D: Tensor | None = None
        self._root_id: Tensor | None = None
        self._columns_K = columns_of(drafter)
        self._confidence = drafter if isinstance(drafter, ConfidenceHead) else None
        self._frames: dict[Tree, _Frame] = {}

    def commit(self, ids_K: Tensor, hidden_KD: Tensor) -> None:
        """See `DraftSession.commit`."""
        entries = self._entries(ids_K, hidden_KD)
        if self._prompt_entries is not None:
            entries = _join(self._prompt_entries, entries)
            self._prompt_entries = None
        count = len(entries.ids_N)
        last_1 = torch.arange(count - 1, count, device=ids_K.device)
        entries = replace(entries, tokens=entries.tokens.with_rows(last_1))
        self.state_1D = self.drafter.step(entries, self.cache)
        self._root_id = ids_K[-1:]
        self.rotary += len(ids_K)
        self.position += len(ids_K)

    def _entries(self, ids_K: Tensor, hidden_KD: Tensor) -> Entries:
        """The entries of tokens that follow the committed ones."""
        offset_K = torch.arange(len(ids_K), device=ids_K.device)
        position_K = self.position + 1 + offset_K
        span_K = self.span.expand(len(ids_K))
        tokens = TokenIndex(torch.zeros_like(ids_K), position_K, span_K)
        return Entries(ids_K, hidden_KD, self.rotary + offset_K, tokens)

    def grow(self, shape: Tree) -> DraftTree:
        """The `shape.total - 1` most likely nodes of a tree of `shape.depth + 1` levels.

        As EAGLE-2, section 4. Scores are sums of float32 log-probabilities, sorted stably,
        so that a parent precedes a child with the same score. A tree deeper than the
        drafter's `max_hops` is cut.
        """
        assert self.state_1D is not None, "nothing was committed yet"
        assert self._root_id is not None
        limit = self.drafter.config.max_hops
        if limit is not None:
            depth = min(shape.depth, limit - 1)
            shape = replace(shape, depth=depth)
        frame = self._frame(shape, self._root_id.device)
        if frame.chain is not None:
            return self._chain(frame, frame.chain, shape.confidence)

        # The first level: the children of the root, all of which are the frontier.
        score_1K, id_1K = self._expand(self.state_1D, self._root_id, 0, shape.k)
        width = id_1K.shape[1]
        scores = [score_1K[0]]
        ids = [id_1K[0]]
        parents = [frame.first_F - width]  # negative: children of the root
        id_F = id_1K[0]
        score_F = score_1K[0]
        candidate_F = frame.first_F  # the frontier's places among all candidates
        hidden_FD = self.state_1D.expand(width, *self.state_1D.shape[1:])
        visible_FA = frame.eye_FF
        drafted = width
        # Each later level: the children of the frontier, the best of which are the next one.
        for hop in range(1, shape.depth + 1):
            state_FD = self._step(frame, id_F, hidden_FD, hop, visible_FA)
            score_FK, child_FK = self._expand(state_FD, id_F, hop, width)
            total_FK = score_F[:, None] + score_FK
            scores.append(total_FK.flatten())
            ids.append(child_FK.flatten())
            parents.append(candidate_F.repeat_interleave(width))
            if hop < shape.depth:
                score_F, best_F = total_FK.flatten().topk(width)
                row_F = best_F // width
                hidden_FD = state_FD[row_F]
                above_FA = visible_FA[row_F]
                visible_FA = torch.cat([above_FA, frame.eye_FF], dim=1)
                id_F = ids[-1][best_F]
                candidate_F = best_F + drafted
                drafted += width * width
        ids_C = torch.cat(ids)
        score_C = torch.cat(scores)
        candidates = _Candidates(ids_C, score_C, torch.cat(parents), frame.rank_C)
        return _prune(self._root_id, candidates, shape)

    def _chain(self, frame: "_Frame", chain: DraftTree, confidence: float) -> DraftTree:
        """Draft a tree without branches, which ends early below a `confidence` above 0.

        Without a confidence head, chances are computed only where the chain may end early.
        """
        assert self.state_1D is not None
        assert self._root_id is not None
        ids = [self._root_id]
        state_1D = self.state_1D
        chances = [self._root_id.new_ones(1, dtype=torch.float32)]
        chance_so_far = 1.0
        for hop in range(len(chain.ids_N) - 1):
            if hop > 0:
                state_1D = self._step(frame, ids[-1], state_1D, hop, None)
            logits_1V = self.drafter.logits(state_1D, ids[-1], hop)
            head_1 = self._head_confidence(state_1D, ids[-1], hop)
            if head_1 is not None:
                chances.append(head_1.float().sigmoid())
            elif confidence:
                softmax_1V = logits_1V.softmax(-1)
                chances.append(softmax_1V.amax(-1))
            if confidence:
                chance_so_far *= float(chances[-1])  # a wait for the GPU
                if chance_so_far < confidence:
                    break
            best_1 = logits_1V.argmax(-1)
            ids.append(self._ids(best_1))
        chance_N: Tensor | None = None
        if len(chances) > 1 or len(ids) == 1:
            chance_N = torch.cat(chances[: len(ids)])
        drafted = chain.first(len(ids))
        return replace(drafted, ids_N=torch.cat(ids), chance_N=chance_N)

    def _head_confidence(
        self, state_1D: Tensor, last_1: Tensor, hop: int
    ) -> Tensor | None:
        """The logit [1] of a confidence head; None: the drafter has none."""
        if self._confidence is None:
            return None
        estimate_1D = self.drafter.estimate(state_1D, hop)
        return self._confidence.confidence(estimate_1D, last_1)

    def _step(
        self,
        frame: "_Frame",
        ids_F: Tensor,
        hidden_FD: Tensor,
        hop: int,
        visible_FA: Tensor | None,
    ) -> Tensor:
        """The drafter's states after frontier nodes at depth `hop` below the root, [F, D]."""
        position_F = frame.one_F * (self.position + hop)
        rotary_F = frame.one_F * (self.rotary + hop - 1)
        span_F = self.span.expand(len(ids_F))
        tokens = TokenIndex(frame.zero_F, position_F, span_F, None, visible_FA)
        entries = Entries(ids_F, hidden_FD, rotary_F, tokens, hop)
        return self.drafter.step(entries, self.cache)

    def _frame(self, shape: Tree, device: torch.device) -> "_Frame":
        """The tensors that all trees of a shape share, made once."""
        if self._frames.get(shape) is None:
            size = self.drafter.info.vocab_size
            if self._columns_K is not None:
                size = len(self._columns_K)
            self._frames[shape] = _Frame.of(shape, size, device)
        return self._frames[shape]

    def _expand(
        self, state_FD: Tensor, last_F: Tensor, hop: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k best tokens after each frontier node, [F, K]."""
        logits_FV = self.drafter.logits(state_FD, last_F, hop)
        score_FV = logits_FV.log_softmax(-1)
        width = min(k, score_FV.shape[-1])
        score_FK, column_FK = score_FV.topk(width)
        return score_FK, self._ids(column_FK)

    def _ids(self, column_N: Tensor) -> Tensor:
        """The target's ids of columns of the logits."""
        return column_N if self._columns_K is None else self._columns_K[column_N]


@dataclass(frozen=True)
class _Frame:
    """What all trees of a shape have in common; F frontier nodes a level."""

    first_F: Tensor  # 0, 1, ...
    zero_F: Tensor
    one_F: Tensor
    eye_FF: Tensor
    rank_C: Tensor  # of each candidate among its siblings
    chain: DraftTree | None  # a tree without branches, but for its ids

    @classmethod
    def of(cls, shape: Tree, vocabulary: int, device: torch.device) -> "_Frame":
        """For a drafter whose logits have `vocabulary` columns."""
        width = min(shape.k, vocabulary)
        first_F = torch.arange(width, device=device)
        eye_FF = torch.eye(width, dtype=torch.bool, device=device)
        chain = None
        if width == 1:
            count = min(shape.total, shape.depth + 2)
            chain = _linked(count, device)
        zero_F = torch.zeros_like(first_F)
        one_F = torch.ones_like(first_F)
        rank_C = first_F.repeat(1 + shape.depth * width)
        return cls(first_F, zero_F, one_F, eye_FF, rank_C, chain)


def _linked(count: int, device: torch.device) -> DraftTree:
    """A chain of `count` nodes, the root included, with zeros for ids."""
    order_N = torch.arange(count, device=device)
    all_N = torch.ones_like(order_N, dtype=torch.bool)
    parent_N = (order_N - 1).clamp(min=0)
    visible_NN = all_N.expand(count, -1).tril()
    return DraftTree(torch.zeros_like(order_N), parent_N, visible_NN, all_N)


def _join(first: Entries, second: Entries) -> Entries:
    """Two runs of hop-0 entries as one."""
    ids_N = torch.cat([first.ids_N, second.ids_N])
    hidden_ND = torch.cat([first.hidden_ND, second.hidden_ND])
    rotary_N = torch.cat([first.rotary_N, second.rotary_N])
    tokens = TokenIndex.cat([first.tokens, second.tokens])
    return Entries(ids_N, hidden_ND, rotary_N, tokens)


@dataclass(frozen=True)
class _Candidates:
    """The nodes drafted on all levels, without the root."""

    ids_C: Tensor
    score_C: Tensor  # the sum of log-probabilities from the root
    parent_C: Tensor  # index of the parent; negative: the root
    rank_C: Tensor  # among the siblings


def _prune(root_1: Tensor, candidates: _Candidates, shape: Tree) -> DraftTree:
    """Keep the best candidates and link them to their parents, the root at index 0."""
    ids_C = candidates.ids_C
    score_C = candidates.score_C
    rank_C = candidates.rank_C
    parent_C = candidates.parent_C
    if len(ids_C) < shape.total:
        parent_K = (parent_C + 1).clamp(min=0)
    else:
        order_C = torch.sort(score_C, descending=True, stable=True).indices
        best_K = order_C[: shape.total - 1]
        best_K = best_K.sort().values
        node_C = torch.zeros_like(parent_C)
        count = len(best_K)
        node_C[best_K] = torch.arange(1, count + 1, device=root_1.device)
        origin_K = parent_C[best_K]
        origin_node_K = node_C[origin_K.clamp(min=0)]
        parent_K = torch.where(origin_K < 0, 0, origin_node_K)
        ids_C = ids_C[best_K]
        score_C = score_C[best_K]
        rank_C = rank_C[best_K]
    zero_1 = parent_C.new_zeros(1)
    parent_N = torch.cat([zero_1, parent_K])
    rank_N = torch.cat([zero_1, rank_C])
    score_N = torch.cat([score_C.new_zeros(1), score_C])

    eye_NN = torch.eye(len(parent_N), dtype=torch.bool, device=root_1.device)
    visible_NN = eye_NN
    for _ in range(shape.depth + 1):
        visible_NN = eye_NN | visible_NN[parent_N]
    below_other_NN = visible_NN & (rank_N > 0)
    greedy_N = ~below_other_NN.any(1)
    chance_N = (score_N - score_N[parent_N]).exp()
    ids_N = torch.cat([root_1, ids_C])
    return DraftTree(ids_N, parent_N, visible_NN, greedy_N, chance_N)
