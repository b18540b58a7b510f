"""The clock around a response: totals and speedups come from it, their parts from the decoder's cycles."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vlmdistill.drafters.decoding.decoders import Cycle


@dataclass(frozen=True)
class Timed:
    """A decoded response."""

    cycles: list[Cycle]
    seconds: float  # from the call of the decoder to its end, including queued work of the device

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
    def accounted(self) -> float:
        """Share of `seconds` that the cycles account for: 1 if they miss no work."""
        return (self.prefill_seconds + self.decode_seconds) / self.seconds if self.seconds else 1.0


def timed(decode: Callable[[], Iterator[Cycle]], device: torch.device) -> Timed:
    """Decode to the end under one clock."""
    wait(device)
    start = time.perf_counter()
    cycles = list(decode())
    wait(device)
    return Timed(cycles, time.perf_counter() - start)


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
