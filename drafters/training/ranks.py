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
RENDEZVOUS = "VLMDISTILL_RENDEZVOUS"
"""Environment variable: a file for the rendezvous on one machine, in place of torchrun's address."""
NAMED_DIFFERENCES = 3
"""The most that an error names."""


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
    gc.collect()  # the engine, which holds the group, is part of a reference cycle
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
    """Run an action on the rank `source`: all ranks get its result, or stop with its error."""
    if alone():
        return action()
    result: Any = None
    reason: str | None = None
    error: Exception | None = None
    if distributed.get_rank() == source:
        try:
            result = action()
        except Exception as failure:  # noqa: BLE001 (raised again once the others know)
            error = failure
            reason = one_line(failure) or type(failure).__name__
    message = [result, reason]
    distributed.broadcast_object_list(message, source)
    if error is not None:
        raise error
    result, reason = message
    if reason is not None:
        raise TrainingError(reason)
    shared_result: T = result
    return shared_result


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
    own_reason = one_line(error) or repr(error) if error else None
    failures = [(where, reason) for where, reason in of_each(own_reason) if reason]
    if not failures:
        return
    where, reason = failures[0]
    reasons = {reason for _, reason in failures}
    if len(reasons) == 1 and len(failures) == distributed.get_world_size():
        raise TrainingError(reason) from error  # on all ranks: no machine is at fault
    raise TrainingError(f"{where}: {reason}") from error


@contextmanager
def guarded() -> Iterator[None]:
    """Turn the loss of another rank, which breaks every exchange with it, into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        is_exchange = isinstance(error, distributed.DistError) or "gloo" in str(error)
        if alone() or not is_exchange:
            raise
        reason = str(error).splitlines()[0]
        raise LostRankError(
            f"another rank has stopped: see its own error ({reason})"
        ) from error


def same(facts: Mapping[str, Any], action: str) -> None:
    """TrainingError on all ranks if one rank has other facts than rank 0; it names machine and fact.

    `action` is what all ranks should do, such as "train the same".
    """
    if alone():
        return
    (first_rank, first_facts), *others = of_each(dict(facts))
    for rank, rank_facts in others:
        if differing := differences(rank_facts, first_facts):
            raise TrainingError(
                f"the ranks do not {action}: {rank} has {differing}, as {first_rank} has"
            )


def differences(settings: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The settings that differ from a reference, such as `batch_tokens 30, not 60`; empty if none does."""
    names = [
        name
        for name in {**reference, **settings}
        if settings.get(name) != reference.get(name)
    ]
    parts = [
        f"{name} {settings.get(name)}, not {reference.get(name)}"
        for name in names[:NAMED_DIFFERENCES]
    ]
    if len(names) > NAMED_DIFFERENCES:
        parts.append(f"and {len(names) - NAMED_DIFFERENCES} more")
    return "; ".join(parts)


def of_each(value: T) -> list[tuple[str, T]]:
    """Every rank's value, with its machine and number."""
    if alone():
        return [(socket.gethostname(), value)]
    name = f"{socket.gethostname()} (rank {distributed.get_rank()})"
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, (name, value))
    return values
