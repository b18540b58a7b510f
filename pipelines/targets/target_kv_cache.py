"""The KV caches of the target: of one sequence that is decoded, and of a batch of responses.

Keys and values of a layer are in one tensor: its first heads are keys, the others values.

Shapes: B sequences, N tokens, S positions, C capacity, K committed rows, Y layers, G key
heads and then value heads, d head width. In the arguments of `update`, which the stock
layers pass, G is the key heads alone, or the value heads alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmdistill.drafters.core.transfer import place

ROOM = 256  # positions that the cache of a sequence grows by, at least
STATIC_ROOM = 4096
"""The smallest capacity of a static cache on a GPU: each capacity compiles for a minute, and reading the
unused positions of a 7B target takes 1% of a step."""


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a target that its KV caches depend on."""

    layers: int
    kv_heads: int
    width: int  # of a head

    def position_bytes(self, dtype: torch.dtype) -> int:
        """The keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.width * dtype.itemsize


class TargetKVCache:
    """The keys and values of one sequence: written once, never concatenated, rolled back for free.

    Rows after `length` are from the last forward pass and count only once committed. A
    `static` cache is for compiled steps, which read all of it: its capacity is a power of
    two, and unwritten rows are zero.
    """

    def __init__(self, shape: CacheShape, like: Tensor, *, static: bool = False):
        self.length = 0
        self._shape = shape
        self._static = static
        self._like = like
        self._allocate(0)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in total."""
        if length > self.capacity:
            old_blocks = self._blocks
            self._allocate(max(length + ROOM, 2 * self.capacity))
            for block, old_block in zip(self._blocks, old_blocks, strict=True):
                block[..., : self.length, :] = old_block[..., : self.length, :]

    def _allocate(self, capacity: int) -> None:
        """Take memory for `capacity` positions or more: `layers` are views of `_blocks`."""
        shape = self._shape
        heads = 2 * shape.kv_heads
        if self._static:
            least = STATIC_ROOM if self._like.is_cuda else capacity
            self.capacity = 1 << (max(capacity, least) - 1).bit_length()
            # One tensor per layer: compiled code copies a view before it writes to it.
            self.layers = tuple(
                self._like.new_zeros(heads, self.capacity, shape.width)
                for _ in range(shape.layers)
            )
            self._blocks = self.layers
            mark_static(*self.layers)
        else:
            self.capacity = capacity
            rows_YGCd = self._like.new_empty(shape.layers, heads, capacity, shape.width)
            self.layers = tuple(rows_YGCd)
            self._blocks = (rows_YGCd,)

    def update(
        self, key_1GNd: Tensor, value_1GNd: Tensor, layer: int, /, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`: write after `length`, return all keys and values."""
        heads = self._shape.kv_heads
        end = self.length + key_1GNd.shape[2]
        rows = self.layers[layer][None, :, :end]
        key = rows[:, :heads]
        value = rows[:, heads:]
        key[:, :, self.length :] = key_1GNd
        value[:, :, self.length :] = value_1GNd
        return key, value

    def commit(self, rows: Sequence[int], written: int) -> None:
        """Keep these of the `written` rows after `length`, in this order."""
        count = len(rows)
        if list(rows) != list(range(count)):
            row_K = place(torch.tensor(rows), self._like.device)
            end = self.length + written
            for block in self._blocks:
                written_rows = block[..., self.length : end, :]
                written_rows[..., :count, :] = written_rows.index_select(-2, row_K)
        self.length += count


class BatchKVCache:
    """The keys and values of up to `slots` sequences, each from position 0 up to `capacity`.

    The active sequences are in the first slots. All memory is taken at once, so that a
    cache that does not fit fails before anything is generated.
    """

    def __init__(self, shape: CacheShape, slots: int, capacity: int, like: Tensor):
        self.slots = slots
        self._lengths: list[int] = []  # of the active sequences
        self._heads = shape.kv_heads
        self._closed = torch.finfo(like.dtype).min
        capacity = _aligned(capacity)
        # Masked rows are multiplied by zero, so they must be finite.
        self.rows_YBGSd = like.new_zeros(
            shape.layers, slots, 2 * shape.kv_heads, capacity, shape.width
        )
        self._length_B = torch.zeros(slots, dtype=torch.long, device=like.device)
        self._mask_BS = like.new_full((slots, capacity), self._closed)
        self._position_S = torch.arange(capacity, device=like.device)
        self._slot_B = torch.arange(slots, device=like.device)

    @property
    def active(self) -> int:
        """The number of active sequences."""
        return len(self._lengths)

    def admit(self, lengths: Sequence[int]) -> "AdmittedSequences":
        """Activate free slots for prompts of these lengths, whose layers then write into them."""
        slots = slice(self.active, self.active + len(lengths))
        length_B = place(torch.tensor(lengths), self._length_B.device)
        self._length_B[slots] = length_B
        is_prompt_BS = self._position_S < length_B[:, None]
        self._mask_BS[slots] = self._closed
        self._mask_BS[slots].masked_fill_(is_prompt_BS, 0)
        self._lengths += lengths
        return AdmittedSequences(self.rows_YBGSd[:, slots], self._heads)

    def append(self) -> tuple[Tensor, Tensor]:
        """Make room for a token per active sequence.

        Returns the position of each token [B], and the additive mask [B, S] that includes
        it; S is the length of the longest sequence.
        """
        active = self.active
        position_B = self._length_B[:active].clone()
        self._length_B[:active] += 1
        self._lengths = [length + 1 for length in self._lengths]
        self._mask_BS[self._slot_B[:active], position_B] = 0
        end = _aligned(max(self._lengths))
        return position_B, self._mask_BS[:active, :end]

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drop all sequences but these; the last of them move into the slots that are free.

        Returns the earlier slot of each sequence that is kept.
        """
        count = len(rows)
        kept = set(rows)
        moving = iter([row for row in rows if row >= count])
        order = [row if row in kept else next(moving) for row in range(count)]
        for slot, old_slot in enumerate(order):
            if slot != old_slot:
                self.rows_YBGSd[:, slot] = self.rows_YBGSd[:, old_slot]
        index_B = place(torch.tensor(order, dtype=torch.long), self._length_B.device)
        self._mask_BS[:count] = self._mask_BS[index_B]
        self._length_B[:count] = self._length_B[index_B]
        self._lengths = [self._lengths[row] for row in order]
        return order


@dataclass(frozen=True)
class AdmittedSequences:
    """The slots of prompts as a cache for the stock layers: a prompt's tokens attend to each other."""

    rows_YBGSd: Tensor
    heads: int

    def update(
        self, key_BGNd: Tensor, value_BGNd: Tensor, layer: int, /, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`."""
        rows_BGNd = self.rows_YBGSd[layer, :, :, : key_BGNd.shape[2]]
        rows_BGNd[:, : self.heads] = key_BGNd
        rows_BGNd[:, self.heads :] = value_BGNd
        return key_BGNd, value_BGNd


def _aligned(length: int) -> int:
    """A length whose mask rows begin at 16 bytes: GPU kernels copy other masks."""
    return -(-length // 16) * 16


def mark_static(*tensors: Tensor) -> None:
    """Promise the compiler that tensors stay at their addresses: a CUDA graph then copies none."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
