"""Runs in vLLM: a repair of how vLLM 0.32 verifies sampled drafts on a CPU.

Its `_expand_kernel_impl` (utils/cpu_triton_utils.py) writes the temperature, top-k and top-p of drafted
tokens into a copy of its output, in int64: sampled responses do not follow the target's distribution.
"""

import torch
from torch import Tensor


def expand_batch_to_tokens(
    value_B: Tensor, end_B: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """The value of each request for each of its drafted tokens, which end at `end_B`: [tokens]."""
    count_B = torch.diff(end_B, prepend=end_B.new_zeros(1))
    value_B = torch.where(value_B == replace_from, replace_to, value_B)
    return value_B.repeat_interleave(count_B, output_size=tokens)
