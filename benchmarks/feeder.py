"""What the feeder of the plugin costs a decode step of vLLM, between the target's pass and the drafter's.

    python -m benchmarks.feeder [--requests 1 4 16 64 256] [--steps 200]

Each request has read its prompt, which shows images, and verifies four drafted tokens in each step. Times are
of one thread on the CPU, medians over steps, with quartiles. Text alone stands beside them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.vllm_media import Image, Place
from vlmdistill.drafters.core.config import ModelConfig
from vlmdistill.pipelines.vllm.plugin.entry_map import TextStates
from vlmdistill.pipelines.vllm.plugin.feeder import Feeder, Reading

ROWS = 5  # a token and four drafted ones
PROMPT, WIDTH = 600, 64
IMAGES = ((20, 256), (300, 256))
"""First token and length of each."""


class Expanded(TextStates):
    """As most served drafters: text alone, at the positions of the prompt."""

    config = ModelConfig(positions="expanded")


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step."""

    requests: int
    media: str
    quartiles: list[float]

    def __str__(self) -> str:
        low, middle, high = self.quartiles
        return f"{self.requests:5} requests, {self.media}: {middle:.3f} ms [{low:.3f}, {high:.3f}]"


def costs(requests: Sequence[int], steps: int) -> Iterator[Cost]:
    """Decode steps of so many requests, with images and without."""
    images = [Image(str(start), Place(start, length)) for start, length in IMAGES]
    for count in requests:
        for media, features in (("two images", images), ("text", [])):
            spent = [1000 * seconds for seconds in _steps(count, features, steps)]
            yield Cost(count, media, statistics.quantiles(spent))


def _steps(count: int, features: Sequence[Image], steps: int) -> Iterator[float]:
    """Seconds of each step, after one that reads the prompts."""
    feeder = Feeder(Expanded(), torch.device("cpu"))
    names = [str(number) for number in range(count)]
    media = {name: list(features) for name in names}
    prompt_B = np.full(count, PROMPT)
    for step in range(-1, steps):
        rows = PROMPT if step < 0 else ROWS
        read = Reading(
            names=names,
            media=media,
            prompt_B=prompt_B,
            first_B=np.full(count, 0 if step < 0 else PROMPT),
            starts=[rows * number for number in range(count + 1)],
            alive=media,
        )
        position_N = torch.arange(rows * count)
        hidden_ND = torch.zeros(rows * count, WIDTH)
        start = time.perf_counter()
        feeder.feed(read, position_N, hidden_ND, None, {})
        if step >= 0:
            yield time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for cost in costs(given.requests, given.steps):
        sys.stdout.write(f"{cost}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
