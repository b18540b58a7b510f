"""Rates of stages that nobody has measured, by the arithmetic and bandwidth of a GPU.

Each is the arithmetic of the stage at the share of the GPU's peak that an H100 reached
(docs/measurements/gpu.md).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.pipelines.planning.gpus import Gpus
from vlmdistill.pipelines.planning.resources import kv_cache

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.describe import TargetDescription

PEAK = {"features": 0.285, "steps": 0.37, "train": 0.27}
"""Shares of a GPU's arithmetic: capture of 17,000 tokens a second, decoding steps of 512 responses in 30 ms,
4,000 tokens of `eagle2` in 25 ms, all with 8.3 billion parameters on an H100."""
READ = 0.69
"""Share of a GPU's bandwidth at which all weights are read."""
MOST_RESPONSES = 512  # at a time
PROMPT = 100
"""Tokens of a prompt, about, whose responses were measured."""
BREAK_EVEN = (1.64, 1.98)
"""Tokens of a cycle that pay for it, with `chain-5` and `30-3-8`, on an H100 with a 7B target."""
PASSES = 3  # of a weight for each trained token: forward, and twice backward


@dataclass(frozen=True)
class AssumedRates:
    """Tokens per second of the stages on GPUs of a class, with a target."""

    gpus: Gpus
    target: "TargetDescription"
    prompt_tokens: int  # of one prompt
    response_tokens: int  # of one response

    @property
    def _weights(self) -> int:
        return self.target.parameters.all

    @property
    def features(self) -> float:
        """Tokens of prompts and responses in forward passes."""
        flops = PEAK["features"] * self.gpus.each.flops
        return self.gpus.count * flops / (2 * self._weights)

    @property
    def responses(self) -> float:
        """Response tokens, the reading of their prompts included."""
        gpu = self.gpus.each
        weights_bytes = 2 * self._weights
        # A target that is too large for one GPU is spread over all of them.
        together = self.gpus.count if weights_bytes > gpu.gib << 30 else 1
        free_bytes = together * (gpu.gib << 30) - weights_bytes
        at_a_time = max(1, min(MOST_RESPONSES, free_bytes // self._kv_bytes))
        read_seconds = weights_bytes / (READ * gpu.bandwidth)
        flops = PEAK["steps"] * gpu.flops
        step_seconds = read_seconds + at_a_time * 2 * self._weights / flops
        decoding_seconds = self.response_tokens * step_seconds / at_a_time
        prefill_seconds = self.prompt_tokens * self.gpus.count / self.features
        seconds = decoding_seconds + prefill_seconds
        return self.gpus.count / together * self.response_tokens / seconds

    @property
    def _kv_bytes(self) -> int:
        """Of one response with its prompt, in bfloat16."""
        tokens = self.prompt_tokens + self.response_tokens
        return 2 * kv_cache(self.target.target, tokens)


def decoding_rate(gpus: Gpus, parameters: int) -> float:
    """Tokens per second of a target that decodes one response at a time, on one GPU."""
    return READ * gpus.each.bandwidth / (2 * parameters)


def training_rate(gpus: Gpus, config: DrafterConfig, weights: int) -> float:
    """Tokens of optimizer steps per second, of a drafter with so many weights."""
    flops = PEAK["train"] * gpus.each.flops
    epochs = sum(stage.epochs for stage in config.schedule) or 1.0
    hops = sum(stage.epochs * stage.hops for stage in config.schedule) / epochs
    passes = 2 * PASSES * weights * max(hops, 1.0)
    return gpus.count * flops / passes
