"""Put several prompts into one forward pass, and take fewer when memory runs out.

Shapes: B samples, L positions of the longest, A rotary axes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from vlmdistill.stores.errors import TargetError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Halving:
    """Runs batches; halves one that exceeds the GPU's memory, and tries none as large again."""

    def __init__(self) -> None:
        self.too_much = math.inf  # tokens, padded, of the smallest batch that did not fit

    def __call__(
        self,
        items: Sequence[Item],
        tokens: Callable[[Item], int],
        run: Callable[[Sequence[Item]], list[Result]],
    ) -> list[Result]:
        """`run(items)`, or its parts one after the other; `tokens` says how long an item is.

        Raises TargetError, which names it, when a single item is too much.
        """
        if not items:
            return []
        size = len(items) * max(map(tokens, items))
        if len(items) == 1 or size < self.too_much:
            try:
                return run(items)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                if len(items) == 1:
                    raise TargetError(
                        f"{_told(items[0])} alone exceeds the memory of the device: leave it out "
                        "(`vlmdistill responses --max-length N` drops what is longer), or use a larger GPU"
                    ) from None
            self.too_much = size
            torch.cuda.empty_cache()  # outside of `except`: the failed pass is held until there
        middle = len(items) // 2
        return self(items[:middle], tokens, run) + self(items[middle:], tokens, run)


def _out_of_memory(error: RuntimeError) -> bool:
    """Libraries that PyTorch calls have words of their own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def _told(item: object) -> str:
    """An item in words: a prompt, or a prompt with its response and the key of its sample."""
    prompt, response, key = item if isinstance(item, tuple) and len(item) == 3 else (item, (), "")
    length = getattr(prompt, "length", 0) + len(response)
    visual = sum(span.length for span in getattr(prompt, "spans", ()))
    tokens = f" of {length} tokens, {visual} of them visual," if length else ""
    return f"{'sample ' + key if key else 'one prompt'}{tokens}"


def packed(
    items: Sequence[Item], tokens: Callable[[Item], int], budget: int, most: int | None = None
) -> Iterator[list[Item]]:
    """Batches of similar length, the longest first: at most `most` items, padded to `budget` tokens in all.

    An item that is longer than the budget goes alone.
    """
    batch: list[Item] = []
    for item in sorted(items, key=tokens, reverse=True):
        if batch and (tokens(batch[0]) * (len(batch) + 1) > budget or len(batch) == most):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def pad(rows: Sequence[Tensor], value: int, *, left: bool = False) -> Tensor:
    """Rows [..., L_i] as one batch [B, ..., L], padded with `value` on one side."""
    longest = max(row.shape[-1] for row in rows)
    sides = [(longest - row.shape[-1], 0) if left else (0, longest - row.shape[-1]) for row in rows]
    return torch.stack(
        [torch.nn.functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)]
    )
