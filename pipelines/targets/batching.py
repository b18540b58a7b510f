"""Batches of prompts of similar length, and smaller ones when the GPU runs out of memory.

Shapes: B samples, L positions of the longest.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from vlmdistill.stores.errors import PromptError

CPU_BATCH = 32  # responses that are generated at a time where no GPU's memory decides
Item = TypeVar("Item")
Result = TypeVar("Result")


class HalveOnOom:
    """Runs batches; halves one that exceeds the GPU's memory, and never tries as large a batch again."""

    def __init__(self) -> None:
        self._too_large = (
            math.inf
        )  # padded tokens of the smallest batch that did not fit

    def __call__(
        self,
        items: Sequence[Item],
        tokens: Callable[[Item], int],
        run: Callable[[Sequence[Item]], list[Result]],
    ) -> list[Result]:
        """`run(items)`, or the concatenated results of its halves; `tokens` is the length of an item.

        Raises PromptError, with its number, if a single one does not fit.
        """
        if not items:
            return []
        size = len(items) * max(map(tokens, items))
        if len(items) == 1 or size < self._too_large:
            try:
                return run(items)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if len(items) == 1:
                    raise PromptError(
                        f"{_describe_item(items[0])} exceeds the memory of the device: use a larger GPU"
                    ) from None
            self._too_large = size
            torch.cuda.empty_cache()  # outside of `except`: the failed pass is held until there
        middle = len(items) // 2
        first = self(items[:middle], tokens, run)
        try:
            return first + self(items[middle:], tokens, run)
        except PromptError as error:
            error.at += middle
            raise


def out_of_memory(error: Exception) -> bool:
    """Python's error, PyTorch's own, that of its CPU allocator, or that of a library such as cuBLAS."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(
        text in str(error) for text in ("ALLOC_FAILED", "DefaultCPUAllocator")
    )


def _describe_item(item: object) -> str:
    """An item in words: a prompt, or a prompt with its response."""
    prompt, response = item[:2] if isinstance(item, tuple) else (item, ())
    length = getattr(prompt, "length", 0) + len(response)
    visual = sum(span.length for span in getattr(prompt, "spans", ()))
    return f"a prompt of {length} tokens ({visual} visual)" if length else "one prompt"


def packed(
    items: Sequence[Item], tokens: Callable[[Item], int], budget: int
) -> Iterator[list[Item]]:
    """Batches of similar length, the longest first: at most `budget` padded tokens each.

    An item longer than the budget is a batch of its own.
    """

    def fits(batch: Sequence[Item], item: Item) -> bool:
        return tokens(batch[0]) * (len(batch) + 1) <= budget

    return _longest_first(items, tokens, fits)


def alike(items: Sequence[Item], tokens: Callable[[Item], int]) -> Iterator[list[Item]]:
    """All items, the longest first, in runs of which none is less than half as long as the first."""

    def fits(run: Sequence[Item], item: Item) -> bool:
        return 2 * tokens(item) >= tokens(run[0])

    return _longest_first(items, tokens, fits)


def _longest_first(
    items: Sequence[Item],
    tokens: Callable[[Item], int],
    fits: Callable[[Sequence[Item], Item], bool],
) -> Iterator[list[Item]]:
    """Groups of items by falling length; a new one begins where an item does not fit into the last."""
    group: list[Item] = []
    for item in sorted(items, key=tokens, reverse=True):
        if group and not fits(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def one_ahead(
    batches: Iterable[Sequence[Item]], make: Callable[[Item], Result], threads: int = 1
) -> Generator[tuple[Sequence[Item], list[Result]], None, None]:
    """Each batch with what `make` makes of its items; while one is used, `threads` make the next.

    An error is raised in its batch's turn. What was not begun then, or when this is closed, never is.
    """
    left = iter(batches)
    with ThreadPoolExecutor(threads, "vlmdistill-ahead") as pool:

        def begin() -> tuple[Sequence[Item], list[Future[Result]]]:
            batch = next(left, ())
            return batch, [pool.submit(make, item) for item in batch]

        try:
            batch, coming = begin()
            while batch:
                made = [
                    one.result() for one in coming
                ]  # before more is begun: two batches take memory
                ready, (batch, coming) = batch, begin()
                yield ready, made
        finally:
            pool.shutdown(cancel_futures=True)


def pad(rows: Sequence[Tensor], value: int, *, left: bool = False) -> Tensor:
    """Rows [..., L_i] as one batch [B, ..., L], padded with `value` on one side."""
    longest = max(row.shape[-1] for row in rows)
    sides = [
        (longest - row.shape[-1], 0) if left else (0, longest - row.shape[-1])
        for row in rows
    ]
    return torch.stack(
        [
            torch.nn.functional.pad(row, side, value=value)
            for row, side in zip(rows, sides, strict=True)
        ]
    )
