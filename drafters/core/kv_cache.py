"""The drafter's attention and its KV caches: one for training, one for decoding.

A drafter's `step` writes and attends through the `KVCache` protocol, so it runs the same code in both.

Shapes: N entries, R rows whose output is wanted, J queries of a row, Q = R * J queries, S entries of the
prefix, A nodes drafted so far, B samples, H query heads, K key heads, G = H / K, d head width.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.core.batch import TokenIndex


class KVCache(Protocol):
    """Keys and values of everything that a query may see."""

    context: dict[str, Tensor]
    """What a method keeps of the prompt besides keys and values; filled by `condition`."""

    def update(self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int) -> None:
        """Write entries: hop 0 as part of the prefix, later hops as guesses after it."""
        ...

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Attention of the wanted rows over what each may see: [Q, H, d].

        Several queries of a row are adjacent. They stand for tokens guessed in one pass: query j of a row
        belongs to hop + j, and sees the guesses of its row up to that hop.
        """
        ...

    def temporary(self) -> AbstractContextManager[None]:
        """Guesses written in this context are dropped at its end."""
        ...


class PackedKVCache:
    """Packed samples: the prefix is causal within each sample; a row alone sees its guesses.

    Row r of hop n is the decoder after reading the target's states up to entry r and drafting n tokens: it
    sees the prefix up to r and its own n guesses. Over all rows this is the multi-step mask of HASS
    (section 3.2), with every masked score at minus infinity.
    """

    def __init__(self) -> None:
        self.context: dict[str, Tensor] = {}
        self._prefix: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._guesses: list[tuple[Tensor, Tensor]] = []  # keys and values [R, K, d] of hops 1, 2, ...

    def update(self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int) -> None:
        """Write prefix entries (hop 0), or one more guess for every row (in the rows' order)."""
        if hop == 0:
            self._prefix.append((key_NKd, value_NKd, tokens.segment_N, tokens.position_N))
        else:
            self._guesses.append((key_NKd, value_NKd))

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Softmax over the prefix up to each row and the row's own guesses."""
        key_SKd, value_SKd, segment_S, position_S = (
            torch.cat(part) for part in zip(*self._prefix, strict=True)
        )
        rows = tokens.at_rows()
        queries = max(1, len(query_QHd) // max(1, len(rows.segment_N)))
        rows = rows.times(queries)
        hop_Q = hop + torch.arange(len(query_QHd), device=query_QHd.device) % queries
        samples = int(torch.maximum(segment_S.max(), rows.segment_N.max())) + 1
        key_slots = _Slots(segment_S, samples)
        row_slots = _Slots(rows.segment_N, samples)

        heads, width = query_QHd.shape[1:]
        kv_heads = key_SKd.shape[1]
        query_QKGd = query_QHd.reshape(-1, kv_heads, heads // kv_heads, width) * width**-0.5
        query_BQKGd = row_slots.pad(query_QKGd)
        score_BKGQS = torch.einsum("bqkgd,bskd->bkgqs", query_BQKGd, key_slots.pad(key_SKd))
        seen_BQS = key_slots.pad(position_S, -1)[:, None] <= row_slots.pad(rows.position_N, -1)[:, :, None]
        seen_BQS = seen_BQS & key_slots.filled_BS[:, None]
        # The lowest finite value, not -inf: padded rows see nothing and must not turn into NaN.
        lowest = torch.finfo(score_BKGQS.dtype).min
        score_BKGQS = score_BKGQS.masked_fill(~seen_BQS[:, None, None], lowest)
        guesses = [
            (key_RKd.repeat_interleave(queries, 0), value_RKd.repeat_interleave(queries, 0))
            for key_RKd, value_RKd in self._guesses
        ]
        own = []
        for guessed, (key_QKd, _) in enumerate(guesses, start=1):
            score_QKG = torch.einsum("qkgd,qkd->qkg", query_QKGd, key_QKd)
            if guessed > hop:
                score_QKG = score_QKG.masked_fill((hop_Q < guessed)[:, None, None], lowest)
            own.append(row_slots.pad(score_QKG).permute(0, 2, 3, 1))
        score_BKGQX = torch.cat([score_BKGQS, *(score[..., None] for score in own)], dim=-1)
        weight_BKGQX = score_BKGQX.float().softmax(-1).to(score_BKGQX.dtype)
        prefix = key_slots.longest
        mixed_BQKGd = torch.einsum("bkgqs,bskd->bqkgd", weight_BKGQX[..., :prefix], key_slots.pad(value_SKd))
        mixed_QKGd = row_slots.unpad(mixed_BQKGd)
        for column, (_, value_QKd) in enumerate(guesses):
            weight_QKG = row_slots.unpad(weight_BKGQX[..., prefix + column].permute(0, 3, 1, 2))
            mixed_QKGd = mixed_QKGd + weight_QKG[..., None] * value_QKd[:, :, None]
        return mixed_QKGd.reshape(query_QHd.shape)

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """See `KVCache.temporary`."""
        count = len(self._guesses)
        yield
        del self._guesses[count:]


class _Slots:
    """Packed rows [N, ...] as a padded block [B, longest, ...] and back."""

    def __init__(self, segment_N: Tensor, samples: int) -> None:
        count_B = torch.bincount(segment_N, minlength=samples)
        self.longest = int(count_B.max())
        order_N = torch.argsort(segment_N, stable=True)
        rank_N = torch.empty_like(order_N)
        first_B = torch.cumsum(count_B, 0) - count_B
        steps_N = torch.arange(len(segment_N), device=segment_N.device)
        rank_N[order_N] = steps_N - first_B[segment_N[order_N]]
        self.flat_N = segment_N * self.longest + rank_N
        self.shape = (samples, self.longest)
        self.filled_BS = torch.arange(self.longest, device=segment_N.device) < count_B[:, None]

    def pad(self, value_N: Tensor, fill: int = 0) -> Tensor:
        rows = self.shape[0] * self.shape[1]
        block = value_N.new_full((rows, *value_N.shape[1:]), fill)
        return block.index_copy(0, self.flat_N, value_N).reshape(*self.shape, *value_N.shape[1:])

    def unpad(self, block_BS: Tensor) -> Tensor:
        return block_BS.flatten(0, 1).index_select(0, self.flat_N)


class GrowingKVCache:
    """One sequence: committed entries, then the nodes of the draft tree now growing."""

    def __init__(self, capacity: int = 256) -> None:
        self.context: dict[str, Tensor] = {}
        self.committed = 0
        self._capacity = capacity
        self._nodes = 0
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None  # keys, values [K, S, d]; positions [S]

    def update(self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int) -> None:
        """Commit entries (hop 0), or add nodes to the tree; hops 0 and 1 forget the tree before."""
        if hop <= 1:
            self._nodes = 0
        start = self.committed + self._nodes
        end = start + len(key_NKd)
        key_KSd, value_KSd, position_S = self._room(key_NKd, end)
        key_KSd[:, start:end] = key_NKd.transpose(0, 1)
        value_KSd[:, start:end] = value_NKd.transpose(0, 1)
        if hop == 0:
            position_S[start:end] = tokens.position_N
            self.committed = end
        else:
            self._nodes += len(key_NKd)

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Causal over the committed entries at hop 0; the prefix and its ancestors for a tree node."""
        assert self._buffers is not None, "nothing was written yet"
        key_KSd, value_KSd, position_S = self._buffers
        end = self.committed + self._nodes
        rows = tokens.at_rows()
        count = len(rows.segment_N)
        queries = max(1, len(query_QHd) // max(1, count))
        own = count * (queries - 1)  # nodes that belong to one row each, `count` for each later query
        mask_QS: Tensor | None = None
        if hop > 0 and tokens.visible_NA is not None:
            mask_QS = F.pad(tokens.visible_NA, (self.committed, 0), value=True)
        elif hop == 0 and count > 1:
            mask_QS = position_S[: end - own] <= rows.position_N[:, None]
        if own:
            if mask_QS is None:
                mask_QS = torch.ones(count, end - own, dtype=torch.bool, device=key_KSd.device)
            mask_QS = _with_own(mask_QS, queries)
        mixed_1HQd = F.scaled_dot_product_attention(
            query_QHd.transpose(0, 1)[None],
            key_KSd[None, :, :end],
            value_KSd[None, :, :end],
            attn_mask=mask_QS,
            enable_gqa=query_QHd.shape[1] != key_KSd.shape[0],
        )
        return mixed_1HQd[0].transpose(0, 1)

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """See `KVCache.temporary`."""
        nodes = self._nodes
        yield
        self._nodes = nodes

    def _room(self, like_NKd: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """The buffers, grown by doubling so that they hold `end` entries."""
        if self._buffers is not None and end <= self._capacity:
            return self._buffers
        while self._capacity < end:
            self._capacity *= 2
        shape = (like_NKd.shape[1], self._capacity, like_NKd.shape[2])
        grown = (
            like_NKd.new_empty(shape),
            like_NKd.new_empty(shape),
            torch.empty(self._capacity, dtype=torch.long, device=like_NKd.device),
        )
        if self._buffers is not None:
            key_KSd, value_KSd, position_S = self._buffers
            grown[0][:, : key_KSd.shape[1]] = key_KSd
            grown[1][:, : key_KSd.shape[1]] = value_KSd
            grown[2][: len(position_S)] = position_S
        self._buffers = grown
        return grown


def _with_own(mask_RS: Tensor, queries: int) -> Tensor:
    """The mask of J queries a row, [Q, S + R * (J - 1)]: query j also sees the first j nodes of its row."""
    rows, device = len(mask_RS), mask_RS.device
    own_RR = torch.eye(rows, dtype=torch.bool, device=device)
    later_JX = torch.ones(queries, queries - 1, dtype=torch.bool, device=device).tril(-1)
    own_QX = (own_RR[:, None, None, :] & later_JX[None, :, :, None]).reshape(rows * queries, -1)
    return torch.cat([mask_RS.repeat_interleave(queries, 0), own_QX], dim=1)
