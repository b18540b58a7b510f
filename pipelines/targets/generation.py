"""Batched generation: a token per step for every unfinished response.

The next prompts are read as slots of the cache become free.

Shapes: B unfinished responses, D hidden width, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.core.transfer import place
from vlmdistill.drafters.decoding.acceptance import choose, is_greedy
from vlmdistill.pipelines.targets.fused_layers import FusedLayers
from vlmdistill.pipelines.targets.target_kv_cache import BatchKVCache

PREFILL_TOKENS = 8192  # of the prompts in one pass, padding included


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen: greedily at temperature 0, else drawn from the target's distribution."""

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


@dataclass(frozen=True)
class Prefilled:
    """The states of prompts that were read into a cache."""

    hidden_BD: Tensor  # of the prompts' last tokens
    next_ropes: list[int]  # the rotary positions after the prompts


class _ActiveSequences:
    """The sequences in the first slots of the cache."""

    def __init__(self, like: Tensor) -> None:
        self.prompts: list[int] = []  # the number of each sequence's prompt
        self.ropes: list[int] = []  # the rotary position of its next token
        self.rope_B = torch.empty(0, dtype=torch.long, device=like.device)  # the same
        self.hidden_BD = like.new_empty(0, like.shape[1])  # of its last token

    def admit(self, prompts: Sequence[int], prefilled: Prefilled) -> None:
        """Add sequences whose prompts were read."""
        rope_B = place(torch.tensor(prefilled.next_ropes), self.rope_B.device)
        self.prompts += prompts
        self.ropes += prefilled.next_ropes
        self.rope_B = torch.cat([self.rope_B, rope_B])
        self.hidden_BD = torch.cat([self.hidden_BD, prefilled.hidden_BD])

    def keep(self, order: Sequence[int], index_B: Tensor) -> None:
        """Keep the sequences at these rows, whose next tokens are drawn; `index_B` is `order`."""
        self.prompts = [self.prompts[row] for row in order]
        self.ropes = [self.ropes[row] for row in order]
        self.rope_B = self.rope_B[index_B]
        self.hidden_BD = self.hidden_BD[:0]

    def advance(self, hidden_BD: Tensor) -> None:
        """Add a token to each sequence; `hidden_BD` are the tokens' states."""
        self.hidden_BD = hidden_BD
        self.rope_B = self.rope_B + 1
        self.ropes = [rope + 1 for rope in self.ropes]


def generate_batch(
    layers: FusedLayers,
    cache: BatchKVCache,
    lengths: Sequence[int],
    prefill: Callable[[Sequence[int]], Prefilled],
    draw: Callable[[Tensor], Tensor],
    eos_ids: Collection[int],
    max_new_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """The number of each prompt and the tokens after it, as soon as these end.

    The last one is of `eos_ids` (included), or they are `max_new_tokens`. As many prompts
    are active as `cache` has slots; when a quarter of the slots is free, the next prompts
    are read.

    Args:
        layers: The target's layers.
        cache: The slots of the active prompts.
        lengths: The length of each prompt.
        prefill: Reads prompts, by number, into free slots.
        draw: Chooses a token for each state [B, D].
        eos_ids: The ids that end a response.
        max_new_tokens: Maximum length of a response.
    """
    responses: list[list[int]] = [[] for _ in lengths]
    waiting = deque(range(len(lengths)))
    active = _ActiveSequences(layers.embed_VD)
    while waiting or active.prompts:
        while waiting and _has_room(cache):
            prompts = _next_prompts(waiting, lengths, cache.slots - cache.active)
            active.admit(prompts, prefill(prompts))
        token_B = draw(active.hidden_BD)
        tokens = token_B.tolist()
        unfinished = []
        for row, prompt in enumerate(active.prompts):
            response = responses[prompt]
            response.append(tokens[row])
            if tokens[row] not in eos_ids and len(response) < max_new_tokens:
                unfinished.append(row)
            else:
                yield prompt, response
        if len(unfinished) < len(tokens):
            order = cache.keep(unfinished)
            index_B = place(torch.tensor(order, dtype=torch.long), token_B.device)
            token_B = token_B[index_B]
            active.keep(order, index_B)
        if active.prompts:
            attend = layers.attend_batch(cache)
            states = layers.run(token_B, active.rope_B, max(active.ropes), attend, {})
            active.advance(states["hidden"])


def _has_room(cache: BatchKVCache) -> bool:
    """Whether enough slots are free for a prefill that is worth its pass."""
    free = cache.slots - cache.active
    return cache.active == 0 or free >= max(1, cache.slots // 4)


def _next_prompts(waiting: deque[int], lengths: Sequence[int], most: int) -> list[int]:
    """Take prompts whose padded tokens fit into one pass, at least one."""
    prompts = [waiting.popleft()]
    longest = lengths[prompts[0]]
    while waiting and len(prompts) < most:
        longest = max(longest, lengths[waiting[0]])
        if longest * (len(prompts) + 1) > PREFILL_TOKENS:
            break
        prompts.append(waiting.popleft())
    return prompts


def nucleus(logits_BV: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits of the most likely tokens that together have probability `top_p`, and -inf elsewhere.

    The token that reaches `top_p` is included, as in the stock implementation (Holtzman et al., 2020).
    """
    sorted_BV, token_BV = logits_BV.sort(-1)  # least likely first
    weight_BV = (sorted_BV.double() / temperature).softmax(-1)
    drop_BV = weight_BV.cumsum(-1) <= 1 - top_p
    drop_BV[:, -1] = False
    dropped_BV = drop_BV.scatter(1, token_BV, drop_BV)  # by token
    return logits_BV.masked_fill(dropped_BV, -torch.inf)
