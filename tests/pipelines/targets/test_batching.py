"""Batches that exceed the device's memory are halved until they fit; a single one that does not is named."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests import tiny
from vlmdistill.pipelines.targets.batching import Halving
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import TargetError

Checkpoint = Callable[..., Path]


def room_for(most: int, asked: list[int]) -> Callable[[Sequence[int]], list[int]]:
    """A device that squares numbers and holds `most` of them at once; `asked` hears every attempt."""

    def run(items: Sequence[int]) -> list[int]:
        asked.append(len(items))
        if len(items) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [item * item for item in items]

    return run


def too_much(items: Sequence[object]) -> list[int]:
    """A device that holds nothing."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def one(item: object) -> int:
    """Every item counts as one token."""
    return 1


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_halves_give_what_the_whole_would(most: int) -> None:
    asked: list[int] = []
    assert Halving()(list(range(13)), one, room_for(most, asked)) == [i * i for i in range(13)]
    assert max(size for size in asked if size <= most) >= min(13, most / 2)
    assert Halving()([], one, room_for(1, asked)) == []


def test_what_was_too_much_once_is_not_tried_again() -> None:
    halving, asked = Halving(), list[int]()
    assert halving(list(range(16)), one, room_for(4, asked)) == [i * i for i in range(16)]
    assert asked == [16, 8, 4, 4, 4, 4]
    asked.clear()
    assert halving(list(range(16)), one, room_for(4, asked)) == [i * i for i in range(16)]
    assert asked == [4, 4, 4, 4]
    asked.clear()
    halving([1, 1, 1, 1], lambda item: 100, room_for(4, asked))
    assert asked == [1, 1, 1, 1], "four long ones are more than eight short ones"


def test_one_sample_that_is_too_much_is_named(checkpoint: Checkpoint) -> None:
    target = load(str(checkpoint("qwen2_vl")))
    prompt = target.encode(tiny.message("what is it?", tiny.picture(90, 64)))
    visual = sum(span.length for span in prompt.spans)
    said = rf"sample abc of {prompt.length + 3} tokens, {visual} of them visual, alone exceeds the memory"
    with pytest.raises(TargetError, match=said) as caught:
        Halving()([(prompt, [1, 2, 3], "abc")] * 3, one, too_much)
    assert "--max-length" in str(caught.value)
    with pytest.raises(TargetError, match=f"one prompt of {prompt.length} tokens"):
        Halving()([prompt], one, too_much)


def test_libraries_have_their_own_words_for_it() -> None:
    def run(items: Sequence[int]) -> list[int]:
        if len(items) > 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return list(items)

    assert Halving()([1, 2, 3], one, run) == [1, 2, 3]


def test_any_other_error_is_no_matter_of_memory() -> None:
    def run(items: Sequence[int]) -> list[int]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Halving()([1, 2], one, run)
