"""The drafter's KV caches: one for training, one for decoding.

A drafter's `step` writes and attends through the `KVCache` protocol, so that it runs the
same code in both.

Shapes: N entries, R rows whose output is wanted, J queries of a row, Q = R * J queries, S
entries of the prefix, A nodes drafted so far, B nodes of a block, H query heads, K key heads,
G = H / K, X = J * G, d head width.
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
    """What a method keeps of the prompt besides keys and values, from `condition` on."""
    generator: torch.Generator | None
    """Draws what a method leaves to chance in training; None: nothing is drawn."""

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """Write entries: hop 0 as part of the prefix, later hops as guesses after it."""
        ...

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Attention of the wanted rows over what each may see: [Q, H, d].

        Several queries of a row are adjacent. They stand for tokens guessed in one pass:
        query j of a row belongs to hop + j, and sees the guesses of its row up to that hop.
        """
        ...

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """Attention of J adjacent queries of each wanted row: [Q, H, d].

        They see each other and the prefix. Their keys and values are not kept.
        """
        ...

    def temporary(self) -> AbstractContextManager[None]:
        """A context at whose end the guesses that were written in it are dropped."""
        ...

    def layer(self, number: int) -> "KVCache":
        """The cache of a drafter's layer; this one is that of layer 0."""
        ...


@dataclass(frozen=True)
class _Order:
    """A prefix sorted by sample and position, and what some rows see of it.

    It is the same for all layers.
    """

    written: Sequence[TokenIndex]
    asking: TokenIndex
    tokens: TokenIndex  # the prefix in that order
    order_S: Tensor
    seen: Sequence[Part]

    @classmethod
    def of(
        cls, written: Sequence[TokenIndex], asking: TokenIndex, window: int
    ) -> "_Order":
        """Sort the tokens that were written, and find what the rows of `asking` see.

        This is done on the CPU if any of the tokens can be read there.
        """
        prefix = [tokens.readable for tokens in written]
        asking_tokens = asking.readable
        if any(tokens.segment_N.is_cpu for tokens in (*prefix, asking_tokens)):
            cpu = torch.device("cpu")
            prefix = [tokens.to(cpu) for tokens in prefix]
            asking_tokens = asking_tokens.to(cpu)
        tokens = TokenIndex.cat(prefix)
        rows = asking_tokens.at_rows()
        far = tokens.position_N.max() + 1
        place_N = tokens.segment_N * far + tokens.position_N
        place_S, order_S = torch.sort(place_N, stable=True)
        oldest_R: Tensor | int = 0
        if window:
            oldest_R = (rows.position_N - window + 1).clamp(min=0)
        sample_R = rows.segment_N * far
        first_R = torch.searchsorted(place_S, sample_R + oldest_R)
        place_R = sample_R + rows.position_N
        end_R = torch.searchsorted(place_S, place_R, right=True)
        seen = blocks(first_R, end_R)
        in_order = tokens.only(order_S)
        order_S = place(order_S, asking.segment_N.device)
        return cls(written, asking, in_order, order_S, seen)

    def serves(self, written: Sequence[TokenIndex], asking: TokenIndex) -> bool:
        """Whether it is of this prefix and these rows."""
        own = (*self.written, self.asking)
        wanted = (*written, asking)
        if len(own) != len(wanted):
            return False
        return all(map(operator.is_, own, wanted))


class PackedKVCache:
    """Packed samples: the prefix is causal within each sample; a row alone sees its guesses.

    With a `window`, a row sees that many positions of the prefix, its own the last.

    Row r of hop n is the decoder after reading the target's states up to entry r and drafting
    n tokens: it sees the prefix up to r and its own n guesses. Over all rows this is the
    multi-step mask of HASS (section 3.2), with every masked score at minus infinity.
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
        self._prefix: list[tuple[Tensor, Tensor, TokenIndex]] = []
        """Keys and values [N, K, d] of tokens."""
        self._guesses: list[tuple[Tensor, Tensor]] = []
        """Keys and values [R, 1, K, d] of hops 1, 2, ..."""
        self._seen: Sequence[Part] = []
        self._seen_rows = -1  # for how many rows `_seen` is
        self._orders: list[_Order] = [] if orders is None else orders
        """The last order, or none."""
        later = partial(PackedKVCache, window, None, self._orders)
        self._later_layers = defaultdict[int, PackedKVCache](later)

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """Write prefix entries (hop 0), or one more guess for every row, in their order."""
        if hop == 0:
            self._prefix.append((key_NKd, value_NKd, tokens))
        else:
            key_R1Kd = key_NKd[:, None]
            value_R1Kd = value_NKd[:, None]
            self._guesses.append((key_R1Kd, value_R1Kd))

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Softmax over the prefix up to each row and the row's own guesses.

        All hops want the same rows, except that below the last layer hop 0 may want every
        entry.
        """
        key_SKd = self._prefix[0][0]
        group = query_QHd.shape[1] // key_SKd.shape[1]
        own = []
        for guess_hop, (key_R1Kd, value_R1Kd) in enumerate(self._guesses, start=1):
            first_query = group * max(0, guess_hop - hop)
            own.append((key_R1Kd, value_R1Kd, first_query))
        return self._attend(query_QHd, tokens, own, is_first=hop == 0)

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """See `KVCache.attend_block`."""
        count = len(tokens.at_rows().segment_N)
        queries = len(key_QKd) // max(1, count)
        shape = (count, queries, *key_QKd.shape[1:])
        key_RJKd = key_QKd.view(shape)
        value_RJKd = value_QKd.view(shape)
        own = [(key_RJKd, value_RJKd, 0)]
        return self._attend(query_QHd, tokens, own, is_first=True)

    def _attend(
        self,
        query_QHd: Tensor,
        tokens: TokenIndex,
        own: list[tuple[Tensor, Tensor, int]],
        *,
        is_first: bool,
    ) -> Tensor:
        """Attend to the prefix and to keys and values [R, J, K, d] of each row.

        Each of `own` is seen by the queries of its row from the number in it on. `is_first`:
        the prefix may have grown since the last call.
        """
        count = len(tokens.at_rows().segment_N)
        if is_first or count != self._seen_rows:
            self._seen = self._sorted(tokens)
            self._seen_rows = count
        ((key_SKd, value_SKd, _),) = self._prefix
        _, kv_heads, width = key_SKd.shape
        queries = len(query_QHd) // max(1, count)
        group = query_QHd.shape[1] // kv_heads
        query_RJKGd = query_QHd.view(count, queries, kv_heads, group, width)
        query_RKJGd = query_RJKGd.transpose(1, 2)
        query_RKXd = query_RKJGd.reshape(count, kv_heads, queries * group, width)
        mixed_RKXd = attention(query_RKXd, key_SKd, value_SKd, self._seen, own)
        mixed_RKJGd = mixed_RKXd.view(count, kv_heads, queries, group, width)
        return mixed_RKJGd.transpose(1, 2).reshape(query_QHd.shape)

    def _sorted(self, asking: TokenIndex) -> Sequence[Part]:
        """Sort the prefix by sample and position, so that what a row sees is a run of it."""
        keys, values, written = zip(*self._prefix, strict=True)
        if not self._orders or not self._orders[0].serves(written, asking):
            self._orders[:] = [_Order.of(written, asking, self._window)]
        (order,) = self._orders
        key_SKd = torch.cat(keys).index_select(0, order.order_S)
        value_SKd = torch.cat(values).index_select(0, order.order_S)
        self._prefix = [(key_SKd, value_SKd, order.tokens)]
        return order.seen

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """See `KVCache.temporary`."""
        count = len(self._guesses)
        yield
        del self._guesses[count:]

    def layer(self, number: int) -> "PackedKVCache":
        """See `KVCache.layer`."""
        return self._later_layers[number] if number else self


@dataclass(frozen=True)
class _Buffers:
    """Keys and values of committed entries, then of nodes, and room for more of them."""

    key_KSd: Tensor
    value_KSd: Tensor
    position_S: Tensor  # in the expanded sequence; of committed entries

    @property
    def room(self) -> int:
        """The entries that they can hold."""
        return len(self.position_S)

    @classmethod
    def like(cls, key_NKd: Tensor, room: int) -> "_Buffers":
        """Empty buffers."""
        _, kv_heads, width = key_NKd.shape
        shape = (kv_heads, room, width)
        position_S = torch.empty(room, dtype=torch.long, device=key_NKd.device)
        key_KSd = key_NKd.new_empty(shape)
        value_KSd = key_NKd.new_empty(shape)
        return cls(key_KSd, value_KSd, position_S)

    def copy_from(self, smaller: "_Buffers") -> None:
        """Take over all entries of smaller buffers."""
        self.key_KSd[:, : smaller.room] = smaller.key_KSd
        self.value_KSd[:, : smaller.room] = smaller.value_KSd
        self.position_S[: smaller.room] = smaller.position_S

    def only(self, index_S: Tensor) -> "_Buffers":
        """Buffers of some entries, without room for more."""
        key_KSd = self.key_KSd[:, index_S]
        value_KSd = self.value_KSd[:, index_S]
        return _Buffers(key_KSd, value_KSd, self.position_S[index_S])


class GrowingKVCache:
    """One sequence: committed entries, then the nodes of the draft tree now growing.

    With a `window`, guesses see that many positions of what is committed. Older entries are
    dropped, those of a prompt when the first tokens after it are committed.
    """

    generator: torch.Generator | None = None

    def __init__(self, capacity: int = 256, window: int = 0) -> None:
        self.context: dict[str, Any] = {}
        self.committed = 0
        self._window = window
        self._capacity = capacity
        self._nodes = 0
        self._buffers: _Buffers | None = None
        later = partial(GrowingKVCache, capacity, window)
        self._later_layers = defaultdict[int, GrowingKVCache](later)

    @property
    def room(self) -> int:
        """The entries that the buffers have room for."""
        return self._buffers.room if self._buffers else 0

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        """Commit entries (hop 0), or add nodes; hops 0 and 1 forget the tree before."""
        if hop <= 1:
            self._nodes = 0
        if hop == 0 and self._has_old_entries:
            self._forget(tokens.position_N)
        start = self.committed + self._nodes
        end = start + len(key_NKd)
        buffers = self._extended(key_NKd, end)
        buffers.key_KSd[:, start:end] = key_NKd.transpose(0, 1)
        buffers.value_KSd[:, start:end] = value_NKd.transpose(0, 1)
        if hop == 0:
            buffers.position_S[start:end] = tokens.position_N
            self.committed = end
        else:
            self._nodes += len(key_NKd)

    @property
    def _has_old_entries(self) -> bool:
        """Whether enough entries are outside of the window to be worth dropping."""
        return self._window > 0 and self.committed > 2 * self._window

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        """Causal over committed entries at hop 0; the prefix and its ancestors for a node."""
        rows = tokens.at_rows()
        end = self.committed + self._nodes
        count = len(rows.segment_N)
        queries = len(query_QHd) // max(1, count)
        queries = max(1, queries)
        own = count * (queries - 1)  # the last nodes are of one row each
        mask_RS: Tensor | None = None
        if hop > 0:
            mask_RS = self._node_mask(rows, tokens.visible_NA, self._nodes - own)
        elif count > 1 or self._window:
            mask_RS = self._causal(rows)
        if not own:
            return self._attend(query_QHd, end, mask_RS)
        if mask_RS is None:
            shape = (count, end - own)
            mask_RS = torch.ones(shape, dtype=torch.bool, device=query_QHd.device)
        return self._attend(query_QHd, end, _with_own(mask_RS, queries))

    def _node_mask(
        self, rows: TokenIndex, visible_RA: Tensor | None, nodes: int
    ) -> Tensor | None:
        """What nodes see of the committed entries and of `nodes`, [R, S + A]; None: all."""
        if visible_RA is None and not self._window:
            return None
        if visible_RA is None:
            shape = (len(rows.segment_N), nodes)
            visible_RA = rows.segment_N.new_ones(shape, dtype=torch.bool)
        mask_RS = F.pad(visible_RA, (self.committed, 0), value=True)
        if self._window:
            last = self._positions()[-1]
            mask_RS[:, : self.committed] = self._recent(last)
        return mask_RS

    def attend_block(
        self, query_QHd: Tensor, key_QKd: Tensor, value_QKd: Tensor, tokens: TokenIndex
    ) -> Tensor:
        """See `KVCache.attend_block`."""
        rows = tokens.at_rows()
        count = len(rows.segment_N)
        with self.temporary():
            self._nodes = 0
            self.update(key_QKd, value_QKd, tokens, 1)
            mask_QS = None
            if count > 1 or self._window:
                queries = self._nodes // max(1, count)
                own_RR = torch.eye(count, dtype=torch.bool, device=query_QHd.device)
                own_RB = own_RR.repeat_interleave(queries, 1)
                causal_RS = self._causal(rows)
                mask_RS = torch.cat([causal_RS, own_RB], dim=1)
                mask_QS = mask_RS.repeat_interleave(queries, 0)
            return self._attend(query_QHd, self.committed + self._nodes, mask_QS)

    def _causal(self, rows: TokenIndex) -> Tensor:
        """Which committed entries each row sees, [R, S]."""
        position_R1 = rows.position_N[:, None]
        seen_RS = self._positions() <= position_R1
        if self._window:
            seen_RS = seen_RS & self._recent(position_R1)
        return seen_RS

    def _recent(self, position: Tensor) -> Tensor:
        """Which committed entries are in the window that ends at a position."""
        return self._positions() > position - self._window

    def _positions(self) -> Tensor:
        assert self._buffers is not None, "nothing was written yet"
        return self._buffers.position_S[: self.committed]

    def _forget(self, position_N: Tensor) -> None:
        """Drop committed entries that no entry from these positions on sees."""
        assert self._buffers is not None
        is_recent_S = self._recent(position_N.min())
        kept_S = is_recent_S.nonzero()[:, 0]
        self._buffers = self._buffers.only(kept_S)
        self.committed = len(kept_S)

    def _attend(self, query_QHd: Tensor, end: int, mask_QS: Tensor | None) -> Tensor:
        """Attend to the first `end` entries."""
        assert self._buffers is not None, "nothing was written yet"
        key_KSd = self._buffers.key_KSd[:, :end]
        value_KSd = self._buffers.value_KSd[:, :end]
        query_HQd = query_QHd.transpose(0, 1)
        mixed_1HQd = F.scaled_dot_product_attention(
            query_HQd[None],
            key_KSd[None],
            value_KSd[None],
            attn_mask=mask_QS,
            enable_gqa=len(query_HQd) != len(key_KSd),
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
        return self._later_layers[number] if number else self

    def _extended(self, key_NKd: Tensor, end: int) -> _Buffers:
        """The buffers, replaced by larger ones if they cannot hold `end` entries.

        Larger ones have room for a power of two, at least for `capacity` entries.
        """
        if self._buffers is not None and end <= self._buffers.room:
            return self._buffers
        power_of_two = 1 << (end - 1).bit_length()
        room = max(self._capacity, power_of_two)
        larger = _Buffers.like(key_NKd, room)
        if self._buffers is not None:
            larger.copy_from(self._buffers)
        self._buffers = larger
        return larger


def _with_own(mask_RS: Tensor, queries: int) -> Tensor:
    """The mask of J queries a row: query j also sees the first j nodes of its row.

    [Q, S + B], where B = R * (J - 1) are the nodes of all rows, by their number j.
    """
    rows = len(mask_RS)
    device = mask_RS.device
    own_RR = torch.eye(rows, dtype=torch.bool, device=device)
    shape = (queries, queries - 1)
    before_JJ = torch.ones(shape, dtype=torch.bool, device=device).tril(-1)
    own_R11R = own_RR[:, None, None, :]
    own_RJJR = own_R11R & before_JJ[None, :, :, None]
    own_QB = own_RJJR.reshape(rows * queries, -1)
    mask_QS = mask_RS.repeat_interleave(queries, 0)
    return torch.cat([mask_QS, own_QB], dim=1)
