"""Batched generation: one token per step for every unfinished response.

Shapes: B unfinished responses, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.decoding.acceptance import choose, is_greedy
from vlmdistill.pipelines.targets.fused_layers import FusedLayers
from vlmdistill.pipelines.targets.target_kv_cache import BatchKVCache


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen: greedily at temperature 0, else sampled from the target's own distribution."""

    temperature: float
    top_p: float
    seed: int

    def begin(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function from logits [B, V] to tokens [B]; another `begin` repeats the same choices."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def draw(logits_BV: Tensor) -> Tensor:
            if not is_greedy(self.temperature) and self.top_p < 1:
                logits_BV = nucleus(logits_BV, self.temperature, self.top_p)
            return choose(logits_BV, self.temperature, generator)

        return draw


def continue_batch(
    layers: FusedLayers,
    cache: BatchKVCache,
    hidden_BD: Tensor,
    rope_B: Tensor,
    draw: Callable[[Tensor], Tensor],
    eos_ids: Collection[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """The tokens after each prompt, up to one of `eos_ids` (included) or `max_new_tokens` of them.

    `cache` holds the prompts, `hidden_BD` are the states of their last tokens, `rope_B` the rotary positions
    after them; `draw` chooses a token for each state.
    """
    responses: list[list[int]] = [[] for _ in hidden_BD]
    active, last = list(range(len(responses))), int(rope_B.max())
    while True:
        token_B = draw(hidden_BD)
        tokens = token_B.tolist()
        for response, token in zip(active, tokens, strict=True):
            responses[response].append(token)
        unfinished = [row for row, token in enumerate(tokens) if token not in eos_ids]
        if not unfinished or len(responses[active[unfinished[0]]]) == max_new_tokens:
            return responses
        if len(unfinished) < len(active):
            order = cache.keep(unfinished)
            active = [active[row] for row in order]
            index_B = torch.tensor(order, device=rope_B.device)
            token_B, rope_B = token_B[index_B], rope_B[index_B]
        last += 1
        hidden_BD = layers.run(token_B, rope_B, last, layers.attend_batch(cache), {})["hidden"]
        rope_B = rope_B + 1


def nucleus(logits_BV: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits of the most likely tokens that together have probability `top_p`, and -inf elsewhere.

    The token that reaches `top_p` is included, as in the stock implementation (Holtzman et al., 2020).
    """
    sorted_BV, token_BV = logits_BV.sort(-1)
    below_BV = (sorted_BV.double() / temperature).softmax(-1).cumsum(-1)  # least likely first
    drop_BV = below_BV <= 1 - top_p
    drop_BV[:, -1] = False
    return logits_BV.masked_fill(drop_BV.scatter(1, token_BV, drop_BV), -torch.inf)
