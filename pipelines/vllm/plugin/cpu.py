"""Runs in vLLM: repairs of four faults that 0.31 and 0.32 have on a CPU.

Two faults of `apply_sampling_constraints` (v1/sample/rejection_sampler.py). `_expand_kernel_impl`
(utils/cpu_triton_utils.py) writes the temperature, top-k and top-p of drafted tokens into a copy of its
output, in int64: sampled responses do not follow the target's distribution. And a step without drafts, as the
first one of every prompt is, has no rows, on which `apply_top_k_only` fails: a request with top-k alone ends
the engine.

One of seeded requests (v1/worker/gpu_model_runner.py `_bookkeeping_sync`): after a step that reads a part of
their prompt, it winds back the offset of their generator, which one of a CPU does not have: the engine ends.

One of block drafters (model_executor/models/qwen3_dflash.py `_normalize_context_k`): the CPU kernel of
`rms_norm` takes the first layer's weight for the keys of all layers.

Shapes: N drafted tokens, B requests, V vocabulary; L layers, T context tokens, K key heads, d head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Filter = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def constraints(top_k_top_p: Filter) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """The replacement of `apply_sampling_constraints`, around vLLM's own filter of top-k and top-p."""

    def apply(logits_NV: Tensor, end_B: Tensor, sampling: Any) -> Tensor:
        """The logits of drafted tokens, [N, V], as their requests sample; those of each end at `end_B`."""
        if sampling.all_greedy or not len(logits_NV):
            return logits_NV
        count_B = torch.diff(end_B, prepend=end_B.new_zeros(1))

        def each(value_B: Tensor | None) -> Tensor | None:
            """The value of each request for each of its tokens, [N]."""
            if value_B is None:
                return None
            return value_B.repeat_interleave(count_B, output_size=len(logits_NV))

        heat_B = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)
        heat_N = each(heat_B)
        assert heat_N is not None
        logits_NV.div_(heat_N[:, None])
        return top_k_top_p(logits_NV, each(sampling.top_k), each(sampling.top_p))

    return apply


def without_unfinished(sample: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `GPUModelRunner.sample_tokens`.

    Of requests whose prompt is unfinished, the sampled token is thrown away. Their generators are out of
    reach meanwhile, so they neither advance nor are wound back.
    """

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        unfinished_B = self.discard_request_mask.np[: self.input_batch.num_reqs]
        waiting = {
            request: generators.pop(request)
            for request in np.flatnonzero(unfinished_B).tolist()
            if request in generators
        }
        try:
            return sample(self, *args, **named)
        finally:
            generators.update(waiting)

    return sample_tokens


def normed_keys(model: Any, key_LTKd: Tensor) -> Tensor:
    """The replacement of `_normalize_context_k`: normalises the keys of each layer by its own weight."""
    weight_Ld: Tensor = model._k_norm_weights
    normed_LTKd = torch.nn.functional.rms_norm(
        key_LTKd, key_LTKd.shape[-1:], eps=model._rms_norm_eps
    )
    return normed_LTKd * weight_Ld[:, None, None]
