"""The two decoders: with a drafter, and plainly. Both read from top to bottom.

Shapes: K tokens of a cycle, N nodes of a tree, D hidden.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vlmdistill.drafters.base import Batch, Proposer, Target, Tree
from vlmdistill.drafters.decoding.verify import choose, verify


@dataclass(frozen=True)
class Cycle:
    """One call of the target after the prefill (whose own token is a cycle without drafts)."""

    ids: list[int]  # the tokens gained, the bonus last
    accepted: int  # of those, how many were drafted
    chain: tuple[int, int]  # best-guess chain: nodes accepted, nodes verified
    seconds: float


def speculate(
    target: Target,
    drafter: Proposer,
    prompt: Any,
    *,
    tree: Tree,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Cycle]:
    """Decode with draft trees. The tokens are the target's own, whatever the drafter proposes.

    Ends after any EOS of the target, or at `max_new_tokens`; nothing follows an EOS.
    """
    needs = drafter.needs(drafter.config, target.info, decoding=True)
    limit = _Limit(target, max_new_tokens)
    with torch.inference_mode():
        start = time.perf_counter()
        prefix = target.prefill(prompt, needs)
        draft = drafter.draft(prefix, target)
        last_1D = {source: prefix.feature(source, "text")[-1:] for source in {"hidden", *drafter.sources}}
        bonus_1 = choose(target.logits(last_1D["hidden"]), temperature, generator)
        draft.commit(bonus_1, torch.cat([last_1D[source] for source in drafter.sources], dim=-1))
        yield limit.cycle(bonus_1.tolist(), (0, 0), start)
        while not limit.reached:
            start = time.perf_counter()
            nodes = draft.grow(tree)
            states = target.extend(nodes.ids_N, nodes.depth_N, nodes.visible_NN, last_1D.keys())
            logits_NV = target.logits(states["hidden"])
            verdict = verify(nodes, logits_NV, temperature, generator)
            draft.hear(logits_NV)
            told = [
                verdict.length_1,
                verdict.bonus_1,
                nodes.ids_N[verdict.path_N],
                nodes.greedy_N[verdict.path_N],
            ]
            length, bonus, *rest = torch.cat(told).tolist()  # a GPU is waited for once
            ids, greedy = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            path_K = verdict.path_N[:length]
            target.commit(path_K)
            chain = (sum(greedy[:length]) - 1, sum(greedy) - 1)
            yield limit.cycle([*ids[1:length], bonus], chain, start)
            if not limit.reached:
                before_KD = torch.cat([states[source][path_K] for source in drafter.sources], dim=-1)
                draft.commit(torch.cat([nodes.ids_N[path_K[1:]], verdict.bonus_1]), before_KD)


def plain(
    target: Target,
    prompt: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Cycle]:
    """Decode one token at a time with a KV cache: the baseline of every speedup."""
    limit = _Limit(target, max_new_tokens)
    with torch.inference_mode():
        start = time.perf_counter()
        prefix: Batch = target.prefill(prompt, ())
        token_1 = choose(target.logits(prefix.feature("hidden", "text")[-1:]), temperature, generator)
        yield limit.cycle(token_1.tolist(), (0, 0), start)
        one = torch.ones(1, dtype=torch.long, device=token_1.device)
        row = torch.zeros_like(one)
        while not limit.reached:
            start = time.perf_counter()
            hidden_1D = target.extend(token_1, one, None, ("hidden",))["hidden"]
            token_1 = choose(target.logits(hidden_1D), temperature, generator)
            target.commit(row)
            yield limit.cycle(token_1.tolist(), (0, 0), start)


class _Limit:
    """Cuts what a cycle gained at the first EOS and at the token limit, and knows when to stop."""

    def __init__(self, target: Target, max_new_tokens: int) -> None:
        self.eos, self.left = set(target.info.eos_ids), max_new_tokens
        self.reached = max_new_tokens < 1

    def cycle(self, ids: list[int], chain: tuple[int, int], start: float) -> Cycle:
        drafted = len(ids) - 1
        end = next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))
        kept = ids[: min(end, self.left)]
        self.left -= len(kept)
        self.reached = self.left == 0 or (bool(kept) and kept[-1] in self.eos)
        return Cycle(kept, min(drafted, len(kept)), chain, time.perf_counter() - start)
