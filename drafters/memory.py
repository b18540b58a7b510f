"""What a drafter remembers of the tokens before the one it predicts: keys, values, a glance at the images.

A drafter's `step` writes and attends through this interface and cannot tell training from decoding,
which is why the two agree. `PackedMemory` holds whole samples side by side for the trainer;
`CacheMemory` grows with one sequence for the decoder.

Shapes: N entries, R rows whose output is wanted, S remembered prefix entries, A nodes drafted so far,
B samples, C self-feedback hops done, H query heads, K key heads, G = H / K, d head width, M visual spans,
X places of a group, J = X + 1 queries of a row with a group.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where entries stand: their sample, the index in its expanded sequence, the last span up to them."""

    segment_N: Tensor
    order_N: Tensor
    span_N: Tensor  # -1: no image yet
    rows_R: Tensor | None = None  # the entries whose output is wanted; None: all
    visible_NA: Tensor | None = (
        None  # draft trees: the drafted nodes each entry descends from, itself included
    )

    def at_rows(self) -> "Places":
        """The places of the wanted rows alone."""
        return self if self.rows_R is None else self.only(self.rows_R)

    def times(self, count: int) -> "Places":
        """Every place `count` times, side by side."""
        if count == 1:
            return self
        parts = (part.repeat_interleave(count) for part in (self.segment_N, self.order_N, self.span_N))
        return Places(*parts)

    def only(self, chosen_N: Tensor) -> "Places":
        """The places of the chosen entries (a mask or indices), all of them wanted."""
        return Places(self.segment_N[chosen_N], self.order_N[chosen_N], self.span_N[chosen_N])

    def with_rows(self, rows_R: Tensor) -> "Places":
        """The same places, with the output of `rows_R` alone wanted."""
        return replace(self, rows_R=rows_R)


Group = tuple[Tensor, Tensor]
"""Keys and values [R, X, K, d] of X places after each wanted row, which live for one step alone."""


class Memory(Protocol):
    """Keys and values of everything a query may see."""

    glance_MD: Tensor | None
    """One vector per visual span, for drafters that add one to later text; set by `condition`."""

    def update(self, key_NKd: Tensor, value_NKd: Tensor, places: Places, hop: int) -> None:
        """Remember entries: hop 0 as part of the prefix, later hops as guesses after it."""
        ...

    def attend(self, query_RHd: Tensor, places: Places, hop: int, group: Group | None = None) -> Tensor:
        """Attention of the wanted rows over what each may see: [R, H, d].

        With a `group`, each row has X + 1 queries side by side, [R * (X + 1), H, d]: the entry's own and one
        for each place after it; the j-th of them sees the first j places of its own row as well.
        """
        ...


class PackedMemory:
    """Samples side by side: the prefix is causal within each sample, later hops see their own past alone.

    Row r of hop n stands for the decoder that has read the target's states up to entry r and drafted
    n tokens since: it sees the prefix up to r and the n guesses of its own row. Summed over rows this is
    the multi-step mask of HASS (section 3.2), with every masked score at minus infinity.
    """

    def __init__(self) -> None:
        self.glance_MD: Tensor | None = None
        self._prefix: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._columns: list[tuple[Tensor, Tensor]] = []

    def update(self, key_NKd: Tensor, value_NKd: Tensor, places: Places, hop: int) -> None:
        """Remember prefix entries (hop 0), or one more guess for every row (in the rows' order)."""
        if hop == 0:
            self._prefix.append((key_NKd, value_NKd, places.segment_N, places.order_N))
        else:
            self._columns.append((key_NKd, value_NKd))

    def attend(self, query_RHd: Tensor, places: Places, hop: int, group: Group | None = None) -> Tensor:
        """Softmax over the prefix up to each row, the row's own guesses and its part of the group."""
        key_SKd, value_SKd, segment_S, order_S = (torch.cat(part) for part in zip(*self._prefix, strict=True))
        queries = 1 if group is None else group[0].shape[1] + 1
        rows = places.at_rows().times(queries)
        samples = int(torch.maximum(segment_S.max(), rows.segment_N.max())) + 1
        key_slots = _Slots(segment_S, samples)
        row_slots = _Slots(rows.segment_N, samples)

        heads, width = query_RHd.shape[1:]
        kv_heads = key_SKd.shape[1]
        query_RKGd = query_RHd.reshape(-1, kv_heads, heads // kv_heads, width) * width**-0.5
        query_BRKGd = row_slots.pad(query_RKGd)
        score_BKGRS = torch.einsum("brkgd,bskd->bkgrs", query_BRKGd, key_slots.pad(key_SKd))
        seen_BRS = key_slots.pad(order_S, -1)[:, None] <= row_slots.pad(rows.order_N, -1)[:, :, None]
        seen_BRS = seen_BRS & key_slots.filled_BS[:, None]
        # The lowest finite value, not -inf: padded rows see nothing and must not turn into NaN.
        lowest = torch.finfo(score_BKGRS.dtype).min
        score_BKGRS = score_BKGRS.masked_fill(~seen_BRS[:, None, None], lowest)
        columns, first_C = self._own(queries, group)
        turn_R = torch.arange(len(query_RHd), device=query_RHd.device) % queries
        own = []
        for (key_RKd, _), first in zip(columns, first_C, strict=True):
            score_RKG = torch.einsum("rkgd,rkd->rkg", query_RKGd, key_RKd)
            if first:
                score_RKG = score_RKG.masked_fill((turn_R < first)[:, None, None], lowest)
            own.append(row_slots.pad(score_RKG).permute(0, 2, 3, 1))
        score_BKGRX = torch.cat([score_BKGRS, *(score[..., None] for score in own)], dim=-1)
        weight_BKGRX = score_BKGRX.float().softmax(-1).to(score_BKGRX.dtype)
        prefix = key_slots.longest
        mixed_BRKGd = torch.einsum("bkgrs,bskd->brkgd", weight_BKGRX[..., :prefix], key_slots.pad(value_SKd))
        mixed_RKGd = row_slots.unpad(mixed_BRKGd)
        for column, (_, value_RKd) in enumerate(columns):
            weight_RKG = row_slots.unpad(weight_BKGRX[..., prefix + column].permute(0, 3, 1, 2))
            mixed_RKGd = mixed_RKGd + weight_RKG[..., None] * value_RKd[:, :, None]
        return mixed_RKGd.reshape(query_RHd.shape)

    def _own(self, queries: int, group: Group | None) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
        """Keys and values for each of a row's `queries`, seen by no other row, and the first to see each."""
        if group is None:
            return self._columns, [0] * len(self._columns)
        columns = [tuple(part.repeat_interleave(queries, 0) for part in column) for column in self._columns]
        parts = (part.repeat_interleave(queries, 0).unbind(1) for part in group)
        places = list(zip(*parts, strict=True))
        firsts = [0] * len(columns) + list(range(1, len(places) + 1))
        return [(key, value) for key, value in [*columns, *places]], firsts


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


class CacheMemory:
    """One sequence: committed entries, then the nodes of the draft tree now growing."""

    def __init__(self, capacity: int = 256) -> None:
        self.glance_MD: Tensor | None = None
        self.committed = 0
        self._capacity = capacity
        self._nodes = 0
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None  # keys, values [K, S, d]; order [S]

    def update(self, key_NKd: Tensor, value_NKd: Tensor, places: Places, hop: int) -> None:
        """Commit entries (hop 0), or add nodes to the tree; hops 0 and 1 forget the tree before."""
        if hop <= 1:
            self._nodes = 0
        start = self.committed + self._nodes
        end = start + len(key_NKd)
        key_KSd, value_KSd, order_S = self._room(key_NKd, end)
        key_KSd[:, start:end] = key_NKd.transpose(0, 1)
        value_KSd[:, start:end] = value_NKd.transpose(0, 1)
        if hop == 0:
            order_S[start:end] = places.order_N
            self.committed = end
        else:
            self._nodes += len(key_NKd)

    def attend(self, query_RHd: Tensor, places: Places, hop: int, group: Group | None = None) -> Tensor:
        """Causal over the committed entries at hop 0; the prefix and its ancestors for a tree node."""
        assert self._buffers is not None, "nothing was remembered yet"
        key_KSd, value_KSd, order_S = self._buffers
        end = self.committed + self._nodes
        key_KSd, value_KSd = key_KSd[:, :end], value_KSd[:, :end]
        mask_RS: Tensor | None = None
        if hop > 0 and places.visible_NA is not None:
            mask_RS = F.pad(places.visible_NA, (self.committed, 0), value=True)
        elif hop == 0 and len(query_RHd) > 1:
            mask_RS = order_S[:end] <= places.at_rows().order_N[:, None]
        if group is not None:
            key_KSd, value_KSd, mask_RS = _with_group(key_KSd, value_KSd, mask_RS, group)
        mixed_1HRd = F.scaled_dot_product_attention(
            query_RHd.transpose(0, 1)[None],
            key_KSd[None],
            value_KSd[None],
            attn_mask=mask_RS,
            enable_gqa=query_RHd.shape[1] != key_KSd.shape[0],
        )
        return mixed_1HRd[0].transpose(0, 1)

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
            key_KSd, value_KSd, order_S = self._buffers
            grown[0][:, : key_KSd.shape[1]] = key_KSd
            grown[1][:, : key_KSd.shape[1]] = value_KSd
            grown[2][: len(order_S)] = order_S
        self._buffers = grown
        return grown


def _with_group(
    key_KSd: Tensor, value_KSd: Tensor, mask_RS: Tensor | None, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask of R * J queries over what each row sees and its own group of X places."""
    rows, places, heads, width = group[0].shape
    key_KXd, value_KXd = (part.permute(2, 0, 1, 3).reshape(heads, rows * places, width) for part in group)
    if mask_RS is None:
        mask_RS = torch.ones(rows, key_KSd.shape[1], dtype=torch.bool, device=key_KSd.device)
    later_JX = torch.ones(places + 1, places, dtype=torch.bool, device=key_KSd.device).tril(-1)
    own_RR = torch.eye(rows, dtype=torch.bool, device=key_KSd.device)
    own_QX = (own_RR[:, None, :, None] & later_JX[None, :, None]).reshape(rows * (places + 1), -1)
    mask_QS = torch.cat([mask_RS.repeat_interleave(places + 1, 0), own_QX], dim=1)
    return torch.cat([key_KSd, key_KXd], dim=1), torch.cat([value_KSd, value_KXd], dim=1), mask_QS
