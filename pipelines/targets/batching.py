"""Batches of prompts of similar length, halved when the GPU runs out of memory.

Shapes: B samples, L positions of the longest.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from vlmdistill.stores.errors import PromptError

CPU_BATCH = 32  # responses generated at a time where no GPU's memory decides
Item = TypeVar("Item")
Result = TypeVar("Result")


class HalveOnOom:
    """Runs batches, and halves those that exceed the GPU's memory.

    A batch as large as one that did not fit is not tried again.
    """

    def __init__(self) -> None:
        # Padded tokens of the smallest batch that did not fit.
        self._too_large = math.inf

    def __call__(
        self,
        items: Sequence[Item],
        tokens: Callable[[Item], int],
        run: Callable[[Sequence[Item]], list[Result]],
    ) -> list[Result]:
        """`run(items)`, or the concatenated results of its halves; `tokens` is the length of an item.

        PromptError, with the number of the item, if a single one does not fit.
        """
        if not items:
            return []
        size = len(items) * max(map(tokens, items))
        if len(items) == 1 or size < self._too_large:
            try:
                return run(items)
            except RuntimeError as error:
                _require_out_of_memory(error, items)
            self._shrink(size)
        middle = len(items) // 2
        first = self(items[:middle], tokens, run)
        try:
            return first + self(items[middle:], tokens, run)
        except PromptError as error:
            error.at += middle
            raise

    def each(
        self,
        items: Sequence[Item],
        tokens: Callable[[Item], int],
        run: Callable[[Sequence[Item]], Iterator[tuple[int, Result]]],
    ) -> Iterator[tuple[int, Result]]:
        """As a call, for a `run` that gives numbered results one by one, in any order.

        Those that it gave before the memory was exceeded count.
        """
        if not items:
            return
        size = len(items) * max(map(tokens, items))
        unfinished = list(range(len(items)))
        if len(items) == 1 or size < self._too_large:
            try:
                for number, result in run(items):
                    unfinished.remove(number)
                    yield number, result
                return
            except RuntimeError as error:
                _require_out_of_memory(error, items)
            self._shrink(size)
        middle = len(unfinished) // 2
        for half in (unfinished[:middle], unfinished[middle:]):
            chosen = [items[number] for number in half]
            try:
                for number, result in self.each(chosen, tokens, run):
                    yield half[number], result
            except PromptError as error:
                error.at = half[error.at]
                raise

    def _shrink(self, size: int) -> None:
        """Try no batch of so many tokens again. Outside of `except`: its error holds tensors."""
        self._too_large = size
        torch.cuda.empty_cache()


def _require_out_of_memory(error: RuntimeError, items: Sequence[object]) -> None:
    """Raise the error unless it is of memory and halves may fit; PromptError for a single item."""
    if not out_of_memory(error):
        raise error
    if len(items) == 1:
        raise PromptError(
            f"{_describe_item(items[0])} exceeds the memory of the device: "
            "use a larger GPU"
        ) from None


def out_of_memory(error: Exception) -> bool:
    """Whether an error is of memory: Python's, PyTorch's, or that of a library such as cuBLAS."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "ALLOC_FAILED" in text or "DefaultCPUAllocator" in text


def _describe_item(item: object) -> str:
    """An item in words: a prompt, or a prompt with its response."""
    prompt, response = item[:2] if isinstance(item, tuple) else (item, ())
    length = getattr(prompt, "length", 0) + len(response)
    if not length:
        return "one prompt"
    visual = sum(span.length for span in getattr(prompt, "spans", ()))
    return f"a prompt of {length} tokens ({visual} visual)"


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
    """Runs of similar length, the longest first: each item at least half as long as the run's first."""

    def fits(run: Sequence[Item], item: Item) -> bool:
        return 2 * tokens(item) >= tokens(run[0])

    return _longest_first(items, tokens, fits)


def _longest_first(
    items: Sequence[Item],
    tokens: Callable[[Item], int],
    fits: Callable[[Sequence[Item], Item], bool],
) -> Iterator[list[Item]]:
    """Groups of items by falling length; an item that does not fit begins a new group."""
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
    """Each batch with the results of `make` for its items.

    While one batch is used, `threads` make the next. An error is raised in its batch's
    turn; items that were not begun then, or when the generator is closed, never are.
    """
    remaining = iter(batches)
    with ThreadPoolExecutor(threads, "vlmdistill-ahead") as pool:

        def begin() -> tuple[Sequence[Item], list[Future[Result]]]:
            batch = next(remaining, ())
            return batch, [pool.submit(make, item) for item in batch]

        try:
            batch, futures = begin()
            while batch:
                # Complete before the next batch begins: more than two take memory.
                results = [future.result() for future in futures]
                ready = batch
                batch, futures = begin()
                yield ready, results
        finally:
            pool.shutdown(cancel_futures=True)


def pad(rows: Sequence[Tensor], value: int, *, on_left: bool = False) -> Tensor:
    """Rows [..., L_i] as one batch [B, ..., L], padded with `value` on one side."""
    longest = max(row.shape[-1] for row in rows)
    padded: list[Tensor] = []
    for row in rows:
        lacking = longest - row.shape[-1]
        sides = (lacking, 0) if on_left else (0, lacking)
        padded.append(torch.nn.functional.pad(row, sides, value=value))
    return torch.stack(padded)
