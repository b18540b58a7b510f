"""The clocks of decoding: of the phases inside the decoder, and of the response from outside.

Totals and speedups come from the clock outside; the decoder's own seconds say where they went.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import torch

from vlmdistill.drafters.core.tree import DraftTree
from vlmdistill.drafters.decoding.acceptance import MILLION, Fetched

Value = TypeVar("Value")
SCHEDULED: Final = Path("/proc/thread-self/schedstat")
"""Of the calling thread, by Linux: the nanoseconds in which it had a CPU, and in which it
waited for one though it was ready to run."""
LINE: Final = 100  # bytes, which hold it
Phase = Literal["vision", "prefill", "draft_prefill", "draft", "verify", "accept"]
"""The vision encoder; the target's layers on the prompt; the drafter on the prompt; the drafter
on trees and accepted tokens; the target's forward passes, plain steps included; acceptance and
the target's KV cache."""


class Laps:
    """The phases of one cycle.

    On a GPU events mark their ends, so that no mark waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = time.perf_counter()
        self._ends: list[tuple[Phase | None, Any]] = [(None, self._now())]

    def end(self, phase: Phase) -> None:
        """End a phase, which began where the last one ended."""
        self._ends.append((phase, self._now()))

    def stop(self) -> float:
        """The seconds since the beginning, by the host."""
        return time.perf_counter() - self._start

    def add_to(self, spent: dict[Phase, float]) -> None:
        """Add the seconds of each phase; the device must have finished."""
        for (_, before), (phase, after) in pairwise(self._ends):
            assert phase is not None
            if self._on_gpu:
                spent[phase] += before.elapsed_time(after) / 1e3  # milliseconds
            else:
                spent[phase] += after - before

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class Cycle:
    """One call of the target after the prefill (whose own token is a cycle without drafts).

    The chain is that of the drafter's best guess at each step, through the whole tree.
    """

    ids: list[int]  # the tokens gained, the bonus last
    accepted: int  # how many of them were drafted
    chain: tuple[int, int]
    """Nodes of the chain that were accepted, and that were verified (past the end too, as in
    vLLM)."""
    guesses: list[int]  # the tokens of the chain
    seconds: float  # since the caller asked for this cycle
    laps: Laps  # their phases
    chances: tuple[float, ...] = ()
    """The drafter's estimate of the chance of each of the guesses; empty: it has none."""
    tree: DraftTree | None = field(default=None, compare=False, repr=False)
    """None: nothing was drafted."""

    @classmethod
    def plain(cls, ids: list[int], laps: Laps) -> "Cycle":
        """A cycle without drafts, which ends now."""
        return cls(ids, 0, (0, 0), [], laps.stop(), laps)

    @classmethod
    def of(
        cls,
        ids: list[int],
        fetched: Fetched,
        tree: DraftTree,
        laps: Laps,
        *,
        is_chain: bool,
    ) -> "Cycle":
        """A cycle that ends now.

        `ids` are those of `fetched.tokens` that belong to the response. If the tree is a chain, all of its
        nodes are the chain's, whatever the drafter says.
        """
        greedy = [1] * len(fetched.greedy) if is_chain else fetched.greedy
        on_chain = [node for node, best in enumerate(greedy) if best]
        guesses = [fetched.ids[node] for node in on_chain[1:]]
        chances: tuple[float, ...] = ()
        if fetched.chances:
            chances = tuple(fetched.chances[node] / MILLION for node in on_chain[1:])
        accepted = min(fetched.length - 1, len(ids))
        accepted_chain = sum(greedy[: fetched.length]) - 1
        chain = (accepted_chain, len(guesses))
        return cls(ids, accepted, chain, guesses, laps.stop(), laps, chances, tree)


@dataclass(frozen=True)
class Spent:
    """The seconds that a call took."""

    seconds: float
    """By the clock, with queued work of the device."""
    cpu_seconds: float
    """In which the calling thread had a CPU."""
    delayed_seconds: float | None
    """In which the calling thread was ready to run, and other programs had the CPU. Not those
    in which it slept, or waited for threads of its own process. None: the system does not
    tell, or PyTorch computes in several threads, which wait for each other."""
    on_gpu: bool = False

    @property
    def own_seconds(self) -> float:
        """On a CPU without those of other programs; where these are not known, without sleep either."""
        if self.on_gpu:
            return self.seconds
        if self.delayed_seconds is None:
            return self.cpu_seconds
        return self.seconds - self.delayed_seconds


@dataclass(frozen=True)
class Timed:
    """A decoded response."""

    cycles: list[Cycle]
    spent: Spent
    """From the call of the decoder to its end."""

    @property
    def seconds(self) -> float:
        """By the clock."""
        return self.spent.seconds

    @property
    def ids(self) -> list[int]:
        """The tokens of the response."""
        return [token for cycle in self.cycles for token in cycle.ids]

    @property
    def prefill_seconds(self) -> float:
        """The first cycle's seconds, by the decoder's own clock."""
        return sum(cycle.seconds for cycle in self.cycles[:1])

    @property
    def decode_seconds(self) -> float:
        """The seconds of all later cycles, by the decoder's own clock."""
        return sum(cycle.seconds for cycle in self.cycles[1:])

    @property
    def phases(self) -> dict[Phase, float]:
        """The seconds of each phase of all cycles."""
        spent: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        for cycle in self.cycles:
            cycle.laps.add_to(spent)
        return spent

    @property
    def accounted(self) -> float:
        """Share of `seconds` that the cycles account for: 1 if they miss no work."""
        if not self.seconds:
            return 1.0
        return (self.prefill_seconds + self.decode_seconds) / self.seconds


def timed(decode: Callable[[], Iterator[Cycle]], device: torch.device) -> Timed:
    """Decode to the end under one clock."""
    cycles, spent = clocked(lambda: list(decode()), device)
    return Timed(cycles, spent)


def clocked(run: Callable[[], Value], device: torch.device) -> tuple[Value, Spent]:
    """What `run` returns, and the seconds that it took."""
    on_gpu = device.type == "cuda"
    wait(device)
    of_process, of_thread = time.process_time(), time.thread_time()
    ready, start = ready_seconds(), time.perf_counter()
    value = run()
    wait(device)
    seconds, ready_at_end = time.perf_counter() - start, ready_seconds()
    # What passes between two readings is in no second of the clock.
    cpu_seconds = min(seconds, time.thread_time() - of_thread)
    if ready is None or ready_at_end is None:
        return value, Spent(seconds, cpu_seconds, None, on_gpu)
    # Own threads may have had the CPU for which this one waited.
    of_own_threads = max(0.0, time.process_time() - of_process - cpu_seconds)
    delayed = max(0.0, ready_at_end - ready - of_own_threads)
    delayed = min(delayed, seconds - cpu_seconds)
    return value, Spent(seconds, cpu_seconds, delayed, on_gpu)


def ready_seconds() -> float | None:
    """The seconds in which the calling thread was ready to run and had no CPU; None: not known."""
    if torch.get_num_threads() > 1:
        return None
    try:
        # In microseconds, as the steps that are timed are short.
        file = os.open(SCHEDULED, os.O_RDONLY)
        try:
            on_cpu, ready, _ = map(int, os.read(file, LINE).split())
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    # A kernel that does not count has zeros.
    return ready / 1e9 if on_cpu else None


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
