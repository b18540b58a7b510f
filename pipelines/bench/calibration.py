"""Measures the machine itself before and after an evaluation, in a fraction of a second.

A machine that was slower at the end than at the start (other programs, heat, a changed clock) is warned of.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from vlmdistill.drafters.decoding.clock import Laps, wait
from vlmdistill.drafters.decoding.decoders import plain
from vlmdistill.pipelines.bench.records import Calibration

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

REPEATS: Final = 7  # of a product or copy; the median counts
RUNS: Final = 5  # of plain decoding, at most: a response may be short
STEPS: Final = 24  # of plain decoding in a run, at most
SECONDS: Final = 0.1  # of plain decoding, after which no other run begins
ROWS: Final = 5  # of the small product: a verification of a chain of four


def calibrate(target: "VisionLanguageTarget", prompt: Any) -> Calibration:
    """Measure the target's device with its dtype and threads; `prompt` is encoded, and not too long."""
    device, dtype, on_gpu = target.device, target.dtype, target.device.type == "cuda"
    side, copied = (4096, 256 << 20) if on_gpu else (512, 64 << 20)
    large_SS = torch.ones(side, side, device=device, dtype=dtype)
    small_RS = large_SS[:ROWS].clone()
    source = torch.ones(copied, device=device, dtype=torch.uint8)
    sink = torch.empty_like(source)

    def median(run: Callable[[], object]) -> float:
        seconds = []
        for _ in range(1 + REPEATS):  # the first is a warm-up
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])

    start, cpu_start = time.perf_counter(), time.thread_time()
    found = Calibration(
        plain_step=_step(
            lambda: [one.seconds for one in [*plain(target, prompt, max_new_tokens=1 + STEPS)][1:]]
        ),
        bare_step=_step(lambda: _bare_steps(target, prompt)),
        small_product=median(lambda: small_RS @ large_SS),
        large_product=median(lambda: large_SS @ large_SS),
        bandwidth=2 * copied / max(1e-9, median(lambda: sink.copy_(source))),
    )
    elapsed, cpu = time.perf_counter() - start, time.thread_time() - cpu_start
    return found if on_gpu else replace(found, cpu_share=min(1.0, cpu / elapsed))


def _step(run: Callable[[], list[float]]) -> float | None:
    """The median seconds of the steps of a few runs; None if a response has no second token."""
    steps: list[float] = []
    start = time.perf_counter()
    for _ in range(RUNS):
        steps += run()
        if time.perf_counter() - start > SECONDS:
            break
    return statistics.median(steps) if steps else None


@torch.inference_mode()
def _bare_steps(target: "VisionLanguageTarget", prompt: Any) -> list[float]:
    """Those of steps by calls of the target alone: what plain decoding may take, whatever became of it."""
    ends, steps = set(target.info.eos_ids), list[float]()
    hidden_1D = target.prefill(prompt, ()).feature("hidden", "text")[-1:]
    token_1 = target.logits(hidden_1D).argmax(-1)
    one = torch.ones_like(token_1)
    for _ in range(STEPS):
        if int(token_1) in ends:
            break
        laps = Laps(target.device)
        hidden_1D = target.extend(token_1, one, None, ("hidden",))["hidden"]
        token_1 = target.logits(hidden_1D).argmax(-1)
        target.commit([0])
        token_1.tolist()
        steps.append(laps.stop())
    return steps
