"""The clocks of decoding: phases of a cycle inside the decoder, and the whole response from outside.

Totals and speedups come from the clock outside; the decoder's own seconds say where they went.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import torch

from vlmdistill.drafters.core.tree import DraftTree

Value = TypeVar("Value")
Phase = Literal["vision", "prefill", "draft_prefill", "draft", "verify", "accept"]
"""The vision encoder; the target's layers on the prompt; the drafter on the prompt; the drafter on trees and
accepted tokens; the target's forward passes, plain steps included; acceptance and the target's KV cache."""


class Laps:
    """The phases of one cycle. On a GPU events mark their ends, so that no mark waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = time.perf_counter()
        self._ends: list[tuple[Phase | None, Any]] = [(None, self._now())]

    def end(self, phase: Phase) -> None:
        """What was done since the last call was of this phase."""
        self._ends.append((phase, self._now()))

    def stop(self) -> float:
        """The seconds since the beginning, by the host."""
        return time.perf_counter() - self._start

    def add_to(self, spent: dict[Phase, float]) -> None:
        """Add the seconds of each phase; the device must have finished."""
        for (_, before), (phase, after) in pairwise(self._ends):
            assert phase is not None
            spent[phase] += (
                before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
            )

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class Cycle:
    """One call of the target after the prefill (whose own token is a cycle without drafts)."""

    ids: list[int]  # the tokens gained, the bonus last
    accepted: int  # how many of them were drafted
    chain: tuple[
        int, int
    ]  # best-guess chain: nodes accepted, nodes verified, past the end too (as in vLLM)
    guesses: list[int]  # the tokens of that chain
    seconds: float  # since the caller asked for this cycle
    laps: Laps  # their phases
    chances: tuple[
        float, ...
    ] = ()  # what the drafter told of each of the guesses; empty: nothing
    tree: DraftTree | None = field(
        default=None, compare=False, repr=False
    )  # None: nothing was drafted


@dataclass(frozen=True)
class Timed:
    """A decoded response."""

    cycles: list[Cycle]
    seconds: float  # from the call of the decoder to its end, including queued work of the device
    cpu_seconds: float  # of this thread in that time: on a CPU as much, unless other programs used it

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
        return (
            (self.prefill_seconds + self.decode_seconds) / self.seconds
            if self.seconds
            else 1.0
        )


def timed(decode: "Callable[[], Iterator[Cycle]]", device: torch.device) -> Timed:
    """Decode to the end under one clock."""
    return Timed(*clocked(lambda: list(decode()), device))


def clocked(
    run: Callable[[], Value], device: torch.device
) -> tuple[Value, float, float]:
    """What `run` returns, and its elapsed seconds, queued work of the device included, and CPU seconds."""
    wait(device)
    start, cpu_start = time.perf_counter(), time.thread_time()
    found = run()
    wait(device)
    return found, time.perf_counter() - start, time.thread_time() - cpu_start


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
