"""Batches of prompts of similar length, and smaller ones when the GPU runs out of memory.

Shapes: B samples, L positions of the longest.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from vlmdistill.stores.errors import TargetError

Item = TypeVar("Item")
Result = TypeVar("Result")


class HalveOnOom:
    """Runs batches; halves one that exceeds the GPU's memory, and never tries as large a batch again."""

    def __init__(self) -> None:
        self._too_large = math.inf  # padded tokens of the smallest batch that did not fit

    def __call__(
        self,
        items: Sequence[Item],
        tokens: Callable[[Item], int],
        run: Callable[[Sequence[Item]], list[Result]],
    ) -> list[Result]:
        """`run(items)`, or the concatenated results of its halves; `tokens` is the length of an item.

        Raises TargetError, which names the item, if a single one does not fit.
        """
        if not items:
            return []
        size = len(items) * max(map(tokens, items))
        if len(items) == 1 or size < self._too_large:
            try:
                return run(items)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                if len(items) == 1:
                    raise TargetError(
                        f"{_describe_item(items[0])} exceeds the memory of the device: leave it out "
                        "(`vlmdistill responses --max-length N` drops longer prompts), or use a larger GPU"
                    ) from None
            self._too_large = size
            torch.cuda.empty_cache()  # outside of `except`: the failed pass is held until there
        middle = len(items) // 2
        return self(items[:middle], tokens, run) + self(items[middle:], tokens, run)


def _out_of_memory(error: RuntimeError) -> bool:
    """PyTorch's own error, or that of a library such as cuBLAS."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def _describe_item(item: object) -> str:
    """An item in words: a prompt, or a prompt with its response and the key of its sample."""
    prompt, response, key = item if isinstance(item, tuple) and len(item) == 3 else (item, (), "")
    length = getattr(prompt, "length", 0) + len(response)
    visual = sum(span.length for span in getattr(prompt, "spans", ()))
    tokens = f" of {length} tokens ({visual} visual)" if length else ""
    return f"{'sample ' + key if key else 'one prompt'}{tokens}"


def packed(
    items: Sequence[Item], tokens: Callable[[Item], int], budget: int, most: int | None = None
) -> Iterator[list[Item]]:
    """Batches of similar length, the longest first: at most `most` items and `budget` padded tokens each.

    An item longer than the budget is a batch of its own.
    """
    batch: list[Item] = []
    for item in sorted(items, key=tokens, reverse=True):
        if batch and (tokens(batch[0]) * (len(batch) + 1) > budget or len(batch) == most):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def one_ahead(items: Iterable[Item]) -> Generator[Item, None, None]:
    """The items; while one is used, a thread makes the next, whose error is raised when it is asked for."""
    left = iter(items)
    with ThreadPoolExecutor(1, "vlmdistill-ahead") as thread:
        coming = thread.submit(next, left, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, left, None)
            yield item


def pad(rows: Sequence[Tensor], value: int, *, left: bool = False) -> Tensor:
    """Rows [..., L_i] as one batch [B, ..., L], padded with `value` on one side."""
    longest = max(row.shape[-1] for row in rows)
    sides = [(longest - row.shape[-1], 0) if left else (0, longest - row.shape[-1]) for row in rows]
    return torch.stack(
        [torch.nn.functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)]
    )
