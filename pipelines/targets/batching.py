"""Put several prompts into one forward pass, and take fewer when memory runs out.

Shapes: B samples, L positions of the longest, A rotary axes.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from vlmdistill.stores.errors import TargetError

Item = TypeVar("Item")
Result = TypeVar("Result")


def halving(items: Sequence[Item], run: Callable[[Sequence[Item]], list[Result]]) -> list[Result]:
    """`run(items)`; where the GPU's memory does not suffice, the two halves one after the other.

    Raises TargetError when a single item is too much.
    """
    if not items:
        return []
    try:
        return run(items)
    except torch.OutOfMemoryError:
        if len(items) == 1:
            raise TargetError("one prompt alone exceeds the memory of the device: shorten it") from None
    torch.cuda.empty_cache()  # outside of `except`: the failed pass is held until there
    middle = len(items) // 2
    return halving(items[:middle], run) + halving(items[middle:], run)


def pad(rows: Sequence[Tensor], value: int, *, left: bool = False) -> Tensor:
    """Rows [..., L_i] as one batch [B, ..., L], padded with `value` on one side."""
    longest = max(row.shape[-1] for row in rows)
    sides = [(longest - row.shape[-1], 0) if left else (0, longest - row.shape[-1]) for row in rows]
    return torch.stack(
        [torch.nn.functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)]
    )
