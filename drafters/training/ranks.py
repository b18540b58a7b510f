"""The ranks of a run: joining the group, collectives, and errors that reach all ranks.

Rank 0 decides. Its decision or its error reaches all ranks, so that none waits for a rank that has stopped.
Without a launcher there is one rank.
"""

import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from vlmdistill.stores.errors import FOR_USER, LostRankError, TrainingError, one_line

T = TypeVar("T")
# a file for the rendezvous on one machine, instead of torchrun's address
RENDEZVOUS = "VLMDISTILL_RENDEZVOUS"
NAMED = 3  # how many differences an error names


def backend() -> str:
    """The communication backend."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join() -> tuple[int, int]:
    """Join the group of a launcher; returns rank and world size, 0 and 1 without a launcher."""
    if "RANK" not in os.environ:
        return 0, 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not distributed.is_initialized():
        file = os.environ.get(RENDEZVOUS)
        distributed.init_process_group(
            backend(),
            init_method=f"file://{file}" if file else "env://",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    return distributed.get_rank(), distributed.get_world_size()


@contextmanager
def group() -> Iterator[None]:
    """Join the group of a launcher and leave it at the end, when the engine is gone and Python is whole."""
    join()
    try:
        yield
    finally:
        if "RANK" in os.environ:
            leave()


def leave() -> None:
    """Leave the group: its threads may abort a process that ends with them."""
    gc.collect()  # the engine, which holds the group, is part of a circle
    if distributed.is_initialized():
        distributed.destroy_process_group()


def alone() -> bool:
    """There is no other rank."""
    return not distributed.is_initialized() or distributed.get_world_size() == 1


def is_first() -> bool:
    """This is rank 0, which decides, writes and reports."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def total(value: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if not alone():
        distributed.all_reduce(value)
    return value


def shared(value: Tensor, source: int) -> Tensor:
    """The tensor of one rank on all ranks, in place."""
    if not alone():
        distributed.broadcast(value, source)
    return value


def first(action: Callable[[], T], source: int = 0) -> T:
    """Run an action on one rank: all ranks get its result, or stop with its error."""
    if alone():
        return action()
    sent: list[Any] = [None, None]  # result, error
    error: Exception | None = None
    if distributed.get_rank() == source:
        try:
            sent[0] = action()
        except Exception as failure:  # noqa: BLE001 (raised again once the others know)
            error, sent[1] = failure, one_line(failure) or type(failure).__name__
    distributed.broadcast_object_list(sent, source)
    if error is not None:
        raise error
    if sent[1] is not None:
        raise TrainingError(sent[1])
    result: T = sent[0]
    return result


@contextmanager
def all_or_none() -> Iterator[None]:
    """Around work that each rank does for itself: if one fails, all stop; the error names its machine."""
    error: Exception | None = None
    try:
        yield
    except FOR_USER as failure:
        error = failure
    if alone():
        if error is not None:
            raise error
        return
    failed = [
        (where, why)
        for where, why in of_each(error and (one_line(error) or repr(error)))
        if why
    ]
    if (
        len({why for _, why in failed}) == 1
        and len(failed) == distributed.get_world_size()
    ):
        raise TrainingError(
            failed[0][1]
        ) from error  # the same on all: no machine is at fault
    if failed:
        where, why = failed[0]
        raise TrainingError(f"{where}: {why}") from error


@contextmanager
def guarded() -> Iterator[None]:
    """Turn the loss of another rank, which breaks every exchange with it, into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        if alone() or not (
            isinstance(error, distributed.DistError) or "gloo" in str(error)
        ):
            raise
        reason = str(error).splitlines()[0]
        raise LostRankError(
            f"another rank has stopped: see its own error ({reason})"
        ) from error


def same(facts: Mapping[str, Any], what: str) -> None:
    """TrainingError on all ranks if one has other facts than rank 0; it names machine and fact."""
    if alone():
        return
    (chief, mine), *others = of_each(dict(facts))
    for where, theirs in others:
        if odd := differences(theirs, mine):
            raise TrainingError(
                f"the ranks do not {what}: {where} has {odd}, as {chief} has"
            )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The settings in which two runs differ, such as `batch_tokens 30, not 60`; empty when they are equal."""
    names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
    named = [
        f"{name} {mine.get(name)}, not {theirs.get(name)}" for name in names[:NAMED]
    ]
    return "; ".join(named) + (
        f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
    )


def of_each(value: T) -> list[tuple[str, T]]:
    """Every rank's value, with its machine and number."""
    if alone():
        return [(socket.gethostname(), value)]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(
        values, (f"{socket.gethostname()} (rank {distributed.get_rank()})", value)
    )
    return values
