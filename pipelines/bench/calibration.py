"""Measures the machine itself before and after an evaluation, in a fraction of a second.

A machine that was slower at the end than at the start (other programs, heat, a changed clock) is warned of.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from vlmdistill.drafters.decoding.acceptance import choose
from vlmdistill.drafters.decoding.clock import clocked, wait
from vlmdistill.drafters.decoding.decoders import plain
from vlmdistill.pipelines.bench.records import Calibration

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

REPEATS: Final = 7  # of a product or copy; the median counts
RUNS: Final = 8  # of plain decoding, at most: a response may be short
STEPS: Final = 24  # of plain decoding in a run, at most
SECONDS: Final = 0.3  # of plain decoding, after which no other run begins
ROWS: Final = 5  # of the small product: a verification of a chain of four
STEPS_BESIDE: Final = 3  # of the target alone, right after a response


def calibrate(target: "VisionLanguageTarget", prompt: Any) -> Calibration:
    """Measure the target's device with its dtype and threads; `prompt` is encoded, and not too long."""
    start, cpu_start = time.perf_counter(), time.thread_time()
    pairs = _step_pairs(target, prompt)
    speeds = _MachineSpeeds.of(target.device, target.dtype)
    calibration = Calibration(
        plain_step=_median([pair.plain for pair in pairs]),
        bare_step=_median([pair.bare for pair in pairs]),
        step_ratio=_median([pair.ratio for pair in pairs]),
        step_bytes=target.step_bytes,
        small_product=speeds.small_product,
        large_product=speeds.large_product,
        bandwidth=speeds.bandwidth,
    )
    elapsed = time.perf_counter() - start
    cpu_share = min(1.0, (time.thread_time() - cpu_start) / elapsed)
    if target.device.type == "cuda":
        return calibration
    return replace(calibration, cpu_share=cpu_share)


@dataclass(frozen=True)
class _MachineSpeeds:
    """As in `Calibration`."""

    small_product: float
    large_product: float
    bandwidth: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "_MachineSpeeds":
        """Measure products of matrices, and copying."""
        on_gpu = device.type == "cuda"
        side = 4096 if on_gpu else 512
        copied_bytes = (256 if on_gpu else 64) << 20
        large_SS = torch.ones(side, side, device=device, dtype=dtype)
        small_RS = large_SS[:ROWS].clone()
        source = torch.ones(copied_bytes, device=device, dtype=torch.uint8)
        sink = torch.empty_like(source)
        copy_seconds = _median_seconds(device, lambda: sink.copy_(source))
        return cls(
            small_product=_median_seconds(device, lambda: small_RS @ large_SS),
            large_product=_median_seconds(device, lambda: large_SS @ large_SS),
            bandwidth=2 * copied_bytes / max(1e-9, copy_seconds),
        )


def _median_seconds(device: torch.device, run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + REPEATS):  # the first is a warm-up
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


@dataclass(frozen=True)
class StepPair:
    """Two steps over the same token, one right after the other."""

    plain: float  # seconds of plain decoding
    bare: float  # seconds of the target alone
    ratio: float
    """Of the two, on a CPU without other programs: they take whole slices of time."""


def _step_pairs(target: "VisionLanguageTarget", prompt: Any) -> list[StepPair]:
    """The pairs of a few runs; none if the response has no second token."""
    pairs: list[StepPair] = []
    start = time.perf_counter()
    for _ in range(RUNS):
        pairs += _run_of_pairs(target, prompt)
        if time.perf_counter() - start > SECONDS:
            break
    return pairs


def _run_of_pairs(target: "VisionLanguageTarget", prompt: Any) -> Iterator[StepPair]:
    """Before each step of plain decoding, the same step by the target alone.

    Both take the same token after the same prefix within milliseconds, so that a machine whose speed drifts
    affects both alike.
    """
    device = target.device
    cycles = plain(target, prompt, max_new_tokens=1 + STEPS)
    token = next(cycles).ids[-1]
    while True:
        _, bare = clocked(partial(_bare_step, target, token, 0), device)
        cycle, step = clocked(partial(next, cycles, None), device)
        if cycle is None:
            return
        ratio = step.seconds / bare.seconds
        if bare.own_seconds > 0:
            ratio = step.own_seconds / bare.own_seconds
        yield StepPair(cycle.seconds, bare.seconds, ratio)
        token = cycle.ids[-1]


def step_beside(
    target: "VisionLanguageTarget", token: int, temperature: float
) -> float:
    """The mean seconds of the target's own step after what plain decoding has just decoded.

    As in the mean over a response, slow steps count. On a CPU without other programs. `token` is the last
    one.
    """
    seconds = []
    for _ in range(STEPS_BESIDE):
        step = partial(_bare_step, target, token, temperature)
        _, spent = clocked(step, target.device)
        seconds.append(spent.own_seconds)
    return statistics.fmean(seconds)


@torch.inference_mode()
def _bare_step(target: "VisionLanguageTarget", token: int, temperature: float) -> None:
    """A step by calls of the target alone: all that plain decoding has to do. Commits nothing."""
    one_1 = torch.ones(1, dtype=torch.long, device=target.device)
    hidden_1D = target.extend(one_1 * token, one_1, None, ("hidden",))["hidden"]
    choose(target.logits(hidden_1D), temperature, None).tolist()


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
