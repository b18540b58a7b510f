"""The two decoders: speculative and plain.

Every operation between a caller's `next` and the cycle that it gets is inside that cycle's seconds, so the
seconds of a response add up to the time that passes outside, minus the caller's own work between cycles.

Shapes: K tokens of a cycle, N nodes of a tree, D hidden.
"""

from collections.abc import Iterator
from typing import Any

import torch

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import Target, room
from vlmdistill.drafters.core.tree import Observer, Tree
from vlmdistill.drafters.decoding.acceptance import choose, verify
from vlmdistill.drafters.decoding.clock import Cycle, Laps
from vlmdistill.stores.errors import DataError

MILLION = 10**6


@torch.inference_mode()  # while a cycle runs, not while its caller does
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
    """Decode with draft trees. The tokens are the target's own, for any drafter.

    Ends after any EOS of the target, at `max_new_tokens`, or at its last position; nothing follows an EOS.
    DataError when another sequence is begun on the target before the end.
    """
    laps = Laps(target.head.embed_VD.device)
    needs = drafter.config.needs(target.info, decoding=True)
    prefix = target.prefill(prompt, needs, lambda: laps.end("vision"))
    limit = _Limit(target, prefix, max_new_tokens)
    sequence = target.sequence
    last_1D = {
        source: prefix.feature(source, "text")[-1:]
        for source in {"hidden", *drafter.sources}
    }
    bonus_1 = choose(target.logits(last_1D["hidden"]), temperature, generator)
    laps.end("prefill")
    draft = drafter.draft(prefix, target)
    observer = draft if isinstance(draft, Observer) else None
    draft.commit(
        bonus_1, torch.cat([last_1D[source] for source in drafter.sources], dim=-1)
    )
    gained = limit.cut(bonus_1.tolist())
    laps.end("draft_prefill")
    yield Cycle(gained, 0, (0, 0), [], laps.stop(), laps)
    while not limit.reached:
        laps = Laps(bonus_1.device)
        _check_current(target, sequence)
        nodes = draft.grow(tree)
        laps.end("draft")
        states = target.extend(
            nodes.ids_N, nodes.depth_N, nodes.visible_NN, last_1D.keys()
        )
        logits_NV = target.logits(states["hidden"])
        laps.end("verify")
        accepted = verify(nodes, logits_NV, temperature, generator)
        if observer is not None:
            observer.observe(logits_NV)
        fetched = [
            accepted.length_1,
            accepted.bonus_1,
            accepted.path_N,
            nodes.ids_N[accepted.path_N],
            nodes.greedy_N[accepted.path_N],
        ]
        if nodes.chance_N is not None:  # as whole numbers, to be fetched at once
            fetched.append((nodes.chance_N[accepted.path_N] * MILLION).long())
        length, bonus, *rest = torch.cat(fetched).tolist()  # the only wait for the GPU
        count = len(nodes.ids_N)
        path, ids, greedy = (rest[start * count :][:count] for start in range(3))
        told = rest[3 * count :]
        target.commit(path[:length])
        path_K = accepted.path_N[:length]
        kept = limit.cut([*ids[1:length], bonus])
        laps.end("accept")
        if not limit.reached:
            before_KD = torch.cat(
                [states[source][path_K] for source in drafter.sources], dim=-1
            )
            draft.commit(
                torch.cat([nodes.ids_N[path_K[1:]], accepted.bonus_1]), before_KD
            )
        laps.end("draft")
        guesses = [token for token, best in zip(ids, greedy, strict=True) if best][1:]
        chain = (sum(greedy[:length]) - 1, len(guesses))
        chances = tuple(
            chance / MILLION for chance, best in zip(told, greedy, strict=False) if best
        )[1:]
        accepted_count = min(length - 1, len(kept))
        yield Cycle(
            kept, accepted_count, chain, guesses, laps.stop(), laps, chances, nodes
        )


@torch.inference_mode()
def plain(
    target: Target,
    prompt: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Cycle]:
    """Decode one token at a time with a KV cache: the baseline of every speedup."""
    laps = Laps(target.head.embed_VD.device)
    prefix: Batch = target.prefill(prompt, (), lambda: laps.end("vision"))
    limit = _Limit(target, prefix, max_new_tokens)
    sequence = target.sequence
    token_1 = choose(
        target.logits(prefix.feature("hidden", "text")[-1:]), temperature, generator
    )
    one = torch.ones(1, dtype=torch.long, device=token_1.device)
    gained = limit.cut(token_1.tolist())
    laps.end("prefill")
    yield Cycle(gained, 0, (0, 0), [], laps.stop(), laps)
    while not limit.reached:
        laps = Laps(token_1.device)
        _check_current(target, sequence)
        hidden_1D = target.extend(token_1, one, None, ("hidden",))["hidden"]
        logits_1V = target.logits(hidden_1D)
        laps.end("verify")
        token_1 = choose(logits_1V, temperature, generator)
        target.commit([0])
        gained = limit.cut(token_1.tolist())
        laps.end("accept")
        yield Cycle(gained, 0, (0, 0), [], laps.stop(), laps)


def decode(
    target: Target,
    drafter: Proposer | None,
    prompt: Any,
    *,
    tree: Tree | None = None,
    **options: Any,
) -> Iterator[Cycle]:
    """Decode with a drafter, by its own tree unless another is given, or plainly with None.

    `options` are those that `speculate` and `plain` share.
    """
    if drafter is None:
        return plain(target, prompt, **options)
    return speculate(target, drafter, prompt, tree=tree or drafter.tree, **options)


def _check_current(target: Target, sequence: int) -> None:
    """DataError when another sequence was begun: it replaced the prefix of this one."""
    if target.sequence != sequence:
        raise DataError(
            "another response was begun on this target: finish one response before the next"
        )


class _Limit:
    """Cuts the tokens of a cycle at the first EOS, the token limit and the target's last position."""

    def __init__(self, target: Target, prefix: Batch, max_new_tokens: int) -> None:
        length = int(prefix.position_T[-1]) + 1  # a prompt ends with text
        self.eos = set(target.info.eos_ids)
        self.left = min(max_new_tokens, room(target.info, length))
        self.reached = max_new_tokens < 1

    def cut(self, ids: list[int]) -> list[int]:
        end = next(
            (i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids)
        )
        kept = ids[: min(end, self.left)]
        self.left -= len(kept)
        self.reached = self.left == 0 or (bool(kept) and kept[-1] in self.eos)
        return kept
