"""The clocks of decoding: of the phases inside the decoder, and of the response from outside.

Totals and speedups come from the clock outside; the decoder's own seconds say where they went.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import torch

from vlmdistill.drafters.core.tree import DraftTree
from vlmdistill.drafters.decoding.acceptance import MILLION, Fetched

Value = TypeVar("Value")
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
class Timed:
    """A decoded response."""

    cycles: list[Cycle]
    seconds: float
    """From the call of the decoder to its end, with queued work of the device."""
    cpu_seconds: float
    """Of this thread in that time; on a CPU as much as `seconds`, unless other programs ran."""

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
    cycles, seconds, cpu_seconds = clocked(lambda: list(decode()), device)
    return Timed(cycles, seconds, cpu_seconds)


def clocked(
    run: Callable[[], Value], device: torch.device
) -> tuple[Value, float, float]:
    """What `run` returns, its elapsed seconds and its CPU seconds.

    The elapsed seconds include queued work of the device.
    """
    wait(device)
    start = time.perf_counter()
    cpu_start = time.thread_time()
    value = run()
    wait(device)
    return value, time.perf_counter() - start, time.thread_time() - cpu_start


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
