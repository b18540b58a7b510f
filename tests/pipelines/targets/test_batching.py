"""Batches that exceed the device's memory are halved until they fit; one batch is made ahead of its use."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests import tiny
from vlmdistill.pipelines.targets.batching import HalveOnOom, one_ahead
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import DataError, PromptError

Checkpoint = Callable[..., Path]


def room_for(most: int, asked: list[int]) -> Callable[[Sequence[int]], list[int]]:
    """A device that squares at most `most` numbers at once; `asked` records every attempt."""

    def run(items: Sequence[int]) -> list[int]:
        asked.append(len(items))
        if len(items) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [item * item for item in items]

    return run


def too_much(items: Sequence[object]) -> list[int]:
    """A device without memory."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def one(item: object) -> int:
    """Every item counts as one token."""
    return 1


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_halves_give_the_same_result(most: int) -> None:
    asked: list[int] = []
    assert HalveOnOom()(list(range(13)), one, room_for(most, asked)) == [
        i * i for i in range(13)
    ]
    assert max(size for size in asked if size <= most) >= min(13, most / 2)
    assert HalveOnOom()([], one, room_for(1, asked)) == []


def test_a_batch_size_that_failed_is_not_tried_again() -> None:
    halving, asked = HalveOnOom(), list[int]()
    assert halving(list(range(16)), one, room_for(4, asked)) == [
        i * i for i in range(16)
    ]
    assert asked == [16, 8, 4, 4, 4, 4]
    asked.clear()
    assert halving(list(range(16)), one, room_for(4, asked)) == [
        i * i for i in range(16)
    ]
    assert asked == [4, 4, 4, 4]
    asked.clear()
    halving([1, 1, 1, 1], lambda item: 100, room_for(4, asked))
    assert asked == [1, 1, 1, 1], "four long ones are more than eight short ones"


def test_the_error_names_a_sample_that_does_not_fit(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_vl")))
    prompt = target.encode(tiny.message("what is it?", tiny.picture(90, 64)))
    visual = sum(span.length for span in prompt.spans)
    with pytest.raises(
        PromptError, match=rf"{prompt.length + 3} tokens \({visual} visual\)"
    ):
        HalveOnOom()([(prompt, [1, 2, 3], "abc")] * 3, one, too_much)
    with pytest.raises(PromptError, match=f"{prompt.length} tokens"):
        HalveOnOom()([prompt], one, too_much)


@pytest.mark.parametrize("wrong", [0, 3, 6])
def test_the_error_has_the_number_of_the_item_in_the_batch(wrong: int) -> None:
    def run(items: Sequence[int]) -> list[int]:
        if len(items) > 2 or wrong in items:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(items)

    with pytest.raises(PromptError) as caught:
        HalveOnOom()(range(7), one, run)
    assert caught.value.at == wrong


def test_out_of_memory_errors_of_libraries_are_recognized() -> None:
    def run(items: Sequence[int]) -> list[int]:
        if len(items) > 1:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )
        return list(items)

    assert HalveOnOom()([1, 2, 3], one, run) == [1, 2, 3]


def test_other_errors_are_raised() -> None:
    def run(items: Sequence[int]) -> list[int]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        HalveOnOom()([1, 2], one, run)


def test_one_batch_is_made_ahead_and_its_error_comes_in_its_turn() -> None:
    begun = list[int]()

    def make(number: int) -> int:
        begun.append(number)
        if number == 6:
            raise DataError("the sixth")
        return -number

    ahead = one_ahead(([at, at + 1] for at in (1, 3, 5, 7)), make)
    for first in (1, 3):
        assert next(ahead) == ([first, first + 1], [-first, -first - 1])
        assert len(begun) <= first + 3
    with pytest.raises(DataError, match="the sixth"):
        next(ahead)
    assert begun == [1, 2, 3, 4, 5, 6]


def test_several_threads_make_a_batch_and_closing_leaves_the_rest() -> None:
    together, go, begun = threading.Barrier(2), threading.Event(), list[int]()

    def make(number: int) -> int:
        begun.append(number)
        if number < 2:
            together.wait(timeout=60)  # for the other thread
        else:
            go.wait(timeout=60)
        return number

    ahead = one_ahead([[0, 1], list(range(2, 50))], make, threads=2)
    assert next(ahead) == ([0, 1], [0, 1])
    threading.Timer(0.1, go.set).start()
    ahead.close()
    assert len(begun) < 50
