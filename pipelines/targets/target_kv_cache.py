"""The KV caches of the target: of one sequence that is decoded, and of a batch of responses.

Keys and values of a layer are in one tensor: its first heads are keys, the others values.
Shapes: B sequences, N tokens, S positions, C capacity, K committed rows, Y layers, G key heads and then value
heads, d head width. What the stock layers pass has G key heads only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROOM = 256  # positions that the cache of a sequence grows by, at least
BATCH_ROOM = 128  # the same of a batch


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a target that its KV caches depend on."""

    layers: int
    kv_heads: int
    width: int  # of a head


class TargetKVCache:
    """The keys and values of one sequence: written once, never concatenated, rolled back for free.

    Rows after `length` are from the last forward pass and count only once committed. A `static` cache is for
    compiled steps, which read all of it: its capacity is a power of two, and unwritten rows are zero.
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
            blocks = self._blocks
            self._allocate(max(length + ROOM, 2 * self.capacity))
            for new, old in zip(self._blocks, blocks, strict=True):
                new[..., : self.length, :] = old[..., : self.length, :]

    def _allocate(self, capacity: int) -> None:
        count, heads, width = self._shape.layers, 2 * self._shape.kv_heads, self._shape.width
        if self._static:  # compiled code would copy a view before it writes to it: one tensor per layer
            self.capacity = 1 << (capacity - 1).bit_length()
            self.layers = tuple(self._like.new_zeros(heads, self.capacity, width) for _ in range(count))
            self._blocks = self.layers
            mark_static(*self.layers)
        else:
            self.capacity = capacity
            rows_YGCd = self._like.new_empty(count, heads, capacity, width)
            self.layers, self._blocks = tuple(rows_YGCd), (rows_YGCd,)

    def update(self, key_1GNd: Tensor, value_1GNd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`: write after `length`, return all keys and values."""
        end, heads = self.length + key_1GNd.shape[2], self._shape.kv_heads
        rows = self.layers[layer][None, :, :end]
        key, value = rows[:, :heads], rows[:, heads:]
        key[:, :, self.length :] = key_1GNd
        value[:, :, self.length :] = value_1GNd
        return key, value

    def commit(self, rows_K: Tensor, written: int) -> None:
        """Keep these of the `written` rows after `length`, in this order."""
        count = len(rows_K)
        in_order = count == written == 1 or (
            not rows_K.is_cuda and rows_K.tolist() == list(range(count))  # a GPU would have to wait
        )
        if not in_order:
            for block in self._blocks:
                new = block[..., self.length : self.length + written, :]
                new[..., :count, :] = new.index_select(-2, rows_K.to(new.device))
        self.length += count


class BatchKVCache:
    """The keys and values of several sequences of different lengths, each from position 0 on."""

    def __init__(self, shape: CacheShape, lengths: Sequence[int], like: Tensor):
        self._heads = shape.kv_heads
        self._closed = torch.finfo(like.dtype).min
        self._longest = max(lengths)
        self._length_B = torch.tensor(lengths, device=like.device)
        capacity = self._longest + BATCH_ROOM
        # Masked rows are multiplied by zero, so they must be finite.
        self.rows_YBGSd = like.new_zeros(
            shape.layers, len(lengths), 2 * shape.kv_heads, capacity, shape.width
        )
        open_BS = torch.arange(capacity, device=like.device) < self._length_B[:, None]
        self._mask_BS = torch.where(open_BS, 0.0, self._closed).to(like.dtype)

    def update(self, key_BGNd: Tensor, value_BGNd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`: write the prompts, whose tokens attend to each other only."""
        rows_BGNd = self.rows_YBGSd[layer, :, :, : key_BGNd.shape[2]]
        rows_BGNd[:, : self._heads] = key_BGNd
        rows_BGNd[:, self._heads :] = value_BGNd
        return key_BGNd, value_BGNd

    def append(self) -> tuple[Tensor, Tensor]:
        """Make room for a token per sequence: its position [B], and the additive mask [B, S] with it."""
        position_B = self._length_B
        self._length_B = position_B + 1
        self._longest += 1
        capacity = self._mask_BS.shape[1]
        if self._longest > capacity:
            more = max(BATCH_ROOM, capacity // 4)
            self.rows_YBGSd = F.pad(self.rows_YBGSd, (0, 0, 0, more))
            self._mask_BS = F.pad(self._mask_BS, (0, more), value=self._closed)
        self._mask_BS[torch.arange(len(position_B), device=position_B.device), position_B] = 0
        return position_B, self._mask_BS[:, : self._longest]

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drop all other sequences; the last kept ones move to their rows. Returns the old row of each."""
        count, kept = len(rows), set(rows)
        late = iter([row for row in rows if row >= count])
        order = [row if row in kept else next(late) for row in range(count)]
        for new, old in enumerate(order):
            if new != old:
                self.rows_YBGSd[:, new] = self.rows_YBGSd[:, old]
        index_B = torch.tensor(order, device=self._length_B.device)
        self.rows_YBGSd = self.rows_YBGSd[:, :count]
        self._mask_BS, self._length_B = self._mask_BS[index_B], self._length_B[index_B]
        return order


def mark_static(*tensors: Tensor) -> None:
    """Promise the compiler that these tensors stay at their addresses, so that a CUDA graph copies none."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
