"""The drafter's KV caches: one for training, one for decoding.

A drafter's `step` writes and attends through the `KVCache` protocol, so it runs the same code in both.

Shapes: N entries, R rows whose output is wanted, J queries of a row, Q = R * J queries, S entries of the
prefix, A nodes drafted so far, H query heads, K key heads, G = H / K, X = J * G, d head width.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.core.attention import Part, attention, blocks
from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.transfer import place


class KVCache(Protocol):
    """Keys and values of everything that a query may see."""

    context: dict[str, Any]
    """What a method keeps of the prompt besides keys and values; filled by `condition`."""
    generator: torch.Generator | None
    """Draws what a method leaves to chance in training; None: nothing is."""

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """Write entries: hop 0 as part of the prefix, later hops as guesses after it."""
        ...

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Attention of the wanted rows over what each may see: [Q, H, d].

        Several queries of a row are adjacent. They stand for tokens guessed in one pass: query j of a row
        belongs to hop + j, and sees the guesses of its row up to that hop.
        """
        ...

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """Attention of J adjacent queries of each wanted row that see each other and the prefix: [Q, H, d].

        Their keys and values are not kept.
        """
        ...

    def temporary(self) -> AbstractContextManager[None]:
        """Guesses written in this context are dropped at its end."""
        ...

    def layer(self, number: int) -> "KVCache":
        """The cache of a drafter's layer; layer 0 has this one."""
        ...


@dataclass(frozen=True)
class _Order:
    """A prefix by sample and position, and what some rows see of it: the same for all layers."""

    written: Sequence[TokenIndex]
    asking: TokenIndex
    tokens: TokenIndex  # the prefix in that order
    order_S: Tensor
    seen: Sequence[Part]

    @classmethod
    def of(
        cls, written: Sequence[TokenIndex], asking: TokenIndex, window: int
    ) -> "_Order":
        """On a GPU too, it is worked out on the CPU if all places are readable there."""
        known = [tokens.readable for tokens in (*written, asking)]
        if any(tokens.segment_N.is_cpu for tokens in known):
            known = [tokens.to(torch.device("cpu")) for tokens in known]
        tokens, rows = TokenIndex.cat(known[:-1]), known[-1].at_rows()
        far = tokens.position_N.max() + 1
        place_S, order_S = torch.sort(
            tokens.segment_N * far + tokens.position_N, stable=True
        )
        oldest_R = (rows.position_N - window + 1).clamp(min=0) if window else 0
        first_R = torch.searchsorted(place_S, rows.segment_N * far + oldest_R)
        end_R = torch.searchsorted(
            place_S, rows.segment_N * far + rows.position_N, right=True
        )
        placed_S = place(order_S, asking.segment_N.device)
        return cls(
            written, asking, tokens.only(order_S), placed_S, blocks(first_R, end_R)
        )

    def serves(self, written: Sequence[TokenIndex], asking: TokenIndex) -> bool:
        """Whether it is of this prefix and these rows."""
        one, other = (*self.written, self.asking), (*written, asking)
        return len(one) == len(other) and all(map(operator.is_, one, other))


class PackedKVCache:
    """Packed samples: the prefix is causal within each sample; a row alone sees its guesses.

    With a `window`, a row sees that many positions of the prefix, its own the last.

    Row r of hop n is the decoder after reading the target's states up to entry r and drafting n tokens: it
    sees the prefix up to r and its own n guesses. Over all rows this is the multi-step mask of HASS
    (section 3.2), with every masked score at minus infinity.
    """

    def __init__(
        self,
        window: int = 0,
        generator: torch.Generator | None = None,
        orders: "list[_Order] | None" = None,
    ) -> None:
        """`orders` is what the caches of all layers share."""
        self.context: dict[str, Any] = {}
        self.generator = generator
        self._window = window
        self._prefix: list[
            tuple[Tensor, Tensor, TokenIndex]
        ] = []  # keys and values of tokens
        self._guesses: list[
            tuple[Tensor, Tensor]
        ] = []  # keys and values [R, 1, K, d] of hops 1, 2, ...
        self._seen: Sequence[Part] = []
        self._rows = -1  # how many those are of
        self._orders: list[_Order] = [] if orders is None else orders  # the last one
        later = partial(PackedKVCache, window, None, self._orders)
        self._later = defaultdict[int, PackedKVCache](later)  # of later layers

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """Write prefix entries (hop 0), or one more guess for every row (in the rows' order)."""
        if hop == 0:
            self._prefix.append((key_NKd, value_NKd, tokens))
        else:
            self._guesses.append((key_NKd[:, None], value_NKd[:, None]))

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Softmax over the prefix up to each row and the row's own guesses.

        All hops want the same rows, except that below the last layer hop 0 may want every entry.
        """
        group = query_QHd.shape[1] // self._prefix[0][0].shape[1]
        own = [
            (*guess, group * max(0, number - hop))
            for number, guess in enumerate(self._guesses, start=1)
        ]
        return self._attend(query_QHd, tokens, own, hop == 0)

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """See `KVCache.attend_block`."""
        count = len(tokens.at_rows().segment_N)
        key_RJKd, value_RJKd = (
            part.view(count, len(part) // max(1, count), *part.shape[1:])
            for part in (key_QKd, value_QKd)
        )
        return self._attend(query_QHd, tokens, [(key_RJKd, value_RJKd, 0)], True)

    def _attend(
        self,
        query_QHd: Tensor,
        tokens: TokenIndex,
        own: list[tuple[Tensor, Tensor, int]],
        first: bool,
    ) -> Tensor:
        rows = tokens.at_rows()
        if first or len(rows.segment_N) != self._rows:
            self._seen, self._rows = self._sorted(tokens), len(rows.segment_N)
        ((key_SKd, value_SKd, *_),) = self._prefix
        count, (kv_heads, width) = len(rows.segment_N), key_SKd.shape[1:]
        queries, group = len(query_QHd) // max(1, count), query_QHd.shape[1] // kv_heads
        query_RKJGd = query_QHd.view(count, queries, kv_heads, group, width).transpose(
            1, 2
        )
        query_RKXd = query_RKJGd.reshape(count, kv_heads, queries * group, width)
        mixed_RKXd = attention(query_RKXd, key_SKd, value_SKd, self._seen, own)
        mixed_RJKGd = mixed_RKXd.view(count, kv_heads, queries, group, width).transpose(
            1, 2
        )
        return mixed_RJKGd.reshape(query_QHd.shape)

    def _sorted(self, asking: TokenIndex) -> Sequence[Part]:
        """Sort the prefix by sample and position, so that what a row sees is a run of it."""
        keys, values, written = zip(*self._prefix, strict=True)
        key_SKd, value_SKd = torch.cat(keys), torch.cat(values)
        known = [order for order in self._orders if order.serves(written, asking)]
        if not known:
            known = [_Order.of(written, asking, self._window)]
            self._orders[:] = known
        order_S = known[0].order_S
        key_SKd, value_SKd = (
            part.index_select(0, order_S) for part in (key_SKd, value_SKd)
        )
        self._prefix = [(key_SKd, value_SKd, known[0].tokens)]
        return known[0].seen

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """See `KVCache.temporary`."""
        count = len(self._guesses)
        yield
        del self._guesses[count:]

    def layer(self, number: int) -> "PackedKVCache":
        """See `KVCache.layer`."""
        return self._later[number] if number else self


class GrowingKVCache:
    """One sequence: committed entries, then the nodes of the draft tree now growing.

    With a `window`, guesses see that many positions of what is committed. Older entries are dropped, those of
    a prompt when the first tokens after it are committed.
    """

    generator: torch.Generator | None = None

    def __init__(self, capacity: int = 256, window: int = 0) -> None:
        self.context: dict[str, Any] = {}
        self.committed = 0
        self._window = window
        self._capacity = capacity
        self._nodes = 0
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = (
            None  # keys, values [K, S, d]; positions [S]
        )
        self._later = defaultdict[int, GrowingKVCache](
            partial(GrowingKVCache, capacity, window)
        )  # layers

    @property
    def room(self) -> int:
        """The entries that the buffers have room for."""
        return len(self._buffers[2]) if self._buffers else 0

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """Commit entries (hop 0), or add nodes to the tree; hops 0 and 1 forget the tree before."""
        if hop <= 1:
            self._nodes = 0
        if hop == 0 and self._window and self.committed > 2 * self._window:
            self._forget(tokens.position_N)
        start = self.committed + self._nodes
        end = start + len(key_NKd)
        key_KSd, value_KSd, position_S = self._extended(key_NKd, end)
        key_KSd[:, start:end] = key_NKd.transpose(0, 1)
        value_KSd[:, start:end] = value_NKd.transpose(0, 1)
        if hop == 0:
            position_S[start:end] = tokens.position_N
            self.committed = end
        else:
            self._nodes += len(key_NKd)

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Causal over the committed entries at hop 0; the prefix and its ancestors for a tree node."""
        rows, end = tokens.at_rows(), self.committed + self._nodes
        count = len(rows.segment_N)
        queries = max(1, len(query_QHd) // max(1, count))
        own = count * (
            queries - 1
        )  # nodes that belong to one row each, `count` for each later query
        mask_QS: Tensor | None = None
        if hop > 0 and (tokens.visible_NA is not None or self._window):
            seen_NA = tokens.visible_NA
            if seen_NA is None:
                seen_NA = rows.segment_N.new_ones(
                    (count, self._nodes - own), dtype=torch.bool
                )
            mask_QS = F.pad(seen_NA, (self.committed, 0), value=True)
            if self._window:
                mask_QS[:, : self.committed] = self._recent(self._positions()[-1])
        elif hop == 0 and (count > 1 or self._window):
            mask_QS = self._causal(rows)
        if own:
            if mask_QS is None:
                mask_QS = torch.ones(
                    count, end - own, dtype=torch.bool, device=query_QHd.device
                )
            mask_QS = _with_own(mask_QS, queries)
        return self._attend(query_QHd, end, mask_QS)

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """See `KVCache.attend_block`."""
        rows, mask_QS = tokens.at_rows(), None
        with self.temporary():
            self._nodes = 0
            self.update(key_QKd, value_QKd, tokens, 1)
            end = self.committed + self._nodes
            if (count := len(rows.segment_N)) > 1 or self._window:
                own_RR = torch.eye(count, dtype=torch.bool, device=query_QHd.device)
                each = self._nodes // max(1, count)
                mask_RS = torch.cat(
                    [self._causal(rows), own_RR.repeat_interleave(each, 1)], dim=1
                )
                mask_QS = mask_RS.repeat_interleave(each, 0)
            return self._attend(query_QHd, end, mask_QS)

    def _causal(self, rows: TokenIndex) -> Tensor:
        """Which committed entries each row sees, [R, S]."""
        seen_RS = self._positions() <= rows.position_N[:, None]
        return (
            seen_RS & self._recent(rows.position_N[:, None])
            if self._window
            else seen_RS
        )

    def _recent(self, position: Tensor) -> Tensor:
        """Which committed entries are in the window that ends at a position."""
        return self._positions() > position - self._window

    def _positions(self) -> Tensor:
        assert self._buffers is not None, "nothing was written yet"
        return self._buffers[2][: self.committed]

    def _forget(self, position_N: Tensor) -> None:
        """Drop the committed entries that no entry at these positions, or later, sees."""
        assert self._buffers is not None
        kept_S = self._recent(position_N.min()).nonzero()[:, 0]
        key_KSd, value_KSd, position_S = self._buffers
        self._buffers = key_KSd[:, kept_S], value_KSd[:, kept_S], position_S[kept_S]
        self.committed = len(kept_S)

    def _attend(self, query_QHd: Tensor, end: int, mask_QS: Tensor | None) -> Tensor:
        assert self._buffers is not None, "nothing was written yet"
        key_KSd, value_KSd, _ = self._buffers
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

    def layer(self, number: int) -> "GrowingKVCache":
        """See `KVCache.layer`."""
        return self._later[number] if number else self

    def _extended(self, like_NKd: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """The buffers; those that cannot hold `end` entries are replaced, by the next power of two."""
        if self._buffers is not None and end <= self.room:
            return self._buffers
        held = max(self._capacity, 1 << (end - 1).bit_length())
        shape = (like_NKd.shape[1], held, like_NKd.shape[2])
        grown = (
            like_NKd.new_empty(shape),
            like_NKd.new_empty(shape),
            torch.empty(held, dtype=torch.long, device=like_NKd.device),
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
    later_JX = torch.ones(queries, queries - 1, dtype=torch.bool, device=device).tril(
        -1
    )
    own_QX = (own_RR[:, None, None, :] & later_JX[None, :, :, None]).reshape(
        rows * queries, -1
    )
    return torch.cat([mask_RS.repeat_interleave(queries, 0), own_QX], dim=1)
