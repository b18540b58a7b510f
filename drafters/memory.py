"""What a drafter remembers of the tokens before the one it predicts: keys, values, a glance at the images.

A drafter's `step` writes and attends through this interface and cannot tell training from decoding,
which is why the two agree. `PackedMemory` holds whole samples side by side for the trainer;
`CacheMemory` grows with one sequence for the decoder.

Shapes: N entries, R rows whose output is wanted, S remembered prefix entries, A nodes drafted so far,
B samples, C self-feedback hops done, H query heads, K key heads, G = H / K, d head width, M visual spans.
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

    def only(self, chosen_N: Tensor) -> "Places":
        """The places of the chosen entries (a mask or indices), all of them wanted."""
        return Places(self.segment_N[chosen_N], self.order_N[chosen_N], self.span_N[chosen_N])

    def with_rows(self, rows_R: Tensor) -> "Places":
        """The same places, with the output of `rows_R` alone wanted."""
        return replace(self, rows_R=rows_R)


class Memory(Protocol):
    """Keys and values of everything a query may see."""

    glance_MD: Tensor | None
    """One vector per visual span, for drafters that add one to later text; set by `condition`."""

    def update(self, key_NKd: Tensor, value_NKd: Tensor, places: Places, hop: int) -> None:
        """Remember entries: hop 0 as part of the prefix, later hops as guesses after it."""
        ...

    def attend(self, query_RHd: Tensor, places: Places, hop: int) -> Tensor:
        """Attention of the wanted rows over what each may see: [R, H, d]."""
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

    def attend(self, query_RHd: Tensor, places: Places, hop: int) -> Tensor:
        """Softmax over the prefix up to each row and the row's own guesses."""
        key_SKd, value_SKd, segment_S, order_S = (torch.cat(part) for part in zip(*self._prefix, strict=True))
        rows = places.at_rows()
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
        score_BKGRS = score_BKGRS.masked_fill(~seen_BRS[:, None, None], torch.finfo(score_BKGRS.dtype).min)
        own = [
            row_slots.pad(torch.einsum("rkgd,rkd->rkg", query_RKGd, key)).permute(0, 2, 3, 1)
            for key, _ in self._columns
        ]
        score_BKGRX = torch.cat([score_BKGRS, *(score[..., None] for score in own)], dim=-1)
        weight_BKGRX = score_BKGRX.float().softmax(-1).to(score_BKGRX.dtype)
        prefix = key_slots.longest
        mixed_BRKGd = torch.einsum("bkgrs,bskd->brkgd", weight_BKGRX[..., :prefix], key_slots.pad(value_SKd))
        mixed_RKGd = row_slots.unpad(mixed_BRKGd)
        for column, (_, value_RKd) in enumerate(self._columns):
            weight_RKG = row_slots.unpad(weight_BKGRX[..., prefix + column].permute(0, 3, 1, 2))
            mixed_RKGd = mixed_RKGd + weight_RKG[..., None] * value_RKd[:, :, None]
        return mixed_RKGd.reshape(query_RHd.shape)


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

    def attend(self, query_RHd: Tensor, places: Places, hop: int) -> Tensor:
        """Causal over the committed entries at hop 0; the prefix and its ancestors for a tree node."""
        assert self._buffers is not None, "nothing was remembered yet"
        key_KSd, value_KSd, order_S = self._buffers
        end = self.committed + self._nodes
        mask_RS: Tensor | None = None
        if hop > 0 and places.visible_NA is not None:
            mask_RS = F.pad(places.visible_NA, (self.committed, 0), value=True)
        elif hop == 0 and len(query_RHd) > 1:
            mask_RS = order_S[:end] <= places.at_rows().order_N[:, None]
        mixed_1HRd = F.scaled_dot_product_attention(
            query_RHd.transpose(0, 1)[None],
            key_KSd[None, :, :end],
            value_KSd[None, :, :end],
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
