"""The two decoders: speculative and plain.

Every operation between a caller's `next` and the cycle that it gets is inside that cycle's
seconds, so the seconds of a response add up to the time that passes outside, minus the
caller's own work between cycles.

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

    Args:
        target: Reads the prompt and verifies the trees.
        drafter: Drafts the trees.
        prompt: As the target's own `encode` returns it.
        tree: The shape of the trees.
        max_new_tokens: The most tokens of the response.
        temperature: 0: greedy; else the target's distribution at that temperature.
        generator: Draws samples, on the target's device.

    Yields:
        The tokens gained by each call of the target, until any EOS of the target,
        `max_new_tokens`, or the target's last position. Nothing follows an EOS.

    Raises:
        DataError: Another sequence was begun on the target before the end, the prompt
            leaves no room for a response, or a tree has more nodes than its shape.
    """
    laps = Laps(target.head.embed_VD.device)
    needs = drafter.config.needs(target.info, decoding=True)
    prefix = target.prefill(prompt, needs, lambda: laps.end("vision"))
    limit = _Limit(target, prefix, max_new_tokens)
    sequence = target.sequence
    sources = drafter.sources
    states_1D = {}
    for source in {"hidden", *sources}:
        states_1D[source] = prefix.feature(source, "text")[-1:]
    logits_1V = target.logits(states_1D["hidden"])
    bonus_1 = choose(logits_1V, temperature, generator)
    laps.end("prefill")
    draft = drafter.draft(prefix, target)
    observer = draft if isinstance(draft, Observer) else None
    before_1D = [states_1D[source] for source in sources]
    draft.commit(bonus_1, torch.cat(before_1D, dim=-1))
    ids = limit.cut(bonus_1.tolist())
    laps.end("draft_prefill")
    yield Cycle.plain(ids, laps)
    while not limit.reached:
        laps = Laps(bonus_1.device)
        _check_current(target, sequence)
        nodes = draft.grow(tree)
        if drafter.shaped and len(nodes.ids_N) > tree.total:
            raise DataError(
                f"the drafter drafted {len(nodes.ids_N)} nodes, and the tree {tree} has {tree.total}"
            )
        laps.end("draft")
        states_ND = target.extend(
            nodes.ids_N, nodes.depth_N, nodes.visible_NN, states_1D.keys()
        )
        logits_NV = target.logits(states_ND["hidden"])
        laps.end("verify")
        acceptance = verify(nodes, logits_NV, temperature, generator)
        if observer is not None:
            observer.observe(logits_NV)
        fetched = acceptance.fetch(nodes)  # the only wait for the GPU
        target.commit(fetched.accepted)
        ids = limit.cut(fetched.tokens)
        laps.end("accept")
        if not limit.reached:
            path_K = acceptance.path_N[: fetched.length]
            accepted_K = nodes.ids_N[path_K[1:]]
            ids_K = torch.cat([accepted_K, acceptance.bonus_1])
            before_KD = [states_ND[source][path_K] for source in sources]
            draft.commit(ids_K, torch.cat(before_KD, dim=-1))
        laps.end("draft")
        is_chain = drafter.shaped and tree.k == 1
        yield Cycle.of(ids, fetched, nodes, laps, is_chain=is_chain)


@torch.inference_mode()
def plain(
    target: Target,
    prompt: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Cycle]:
    """Decode one token at a time with a KV cache: the baseline of every speedup.

    Arguments, results and errors as of `speculate`.
    """
    laps = Laps(target.head.embed_VD.device)
    prefix: Batch = target.prefill(prompt, (), lambda: laps.end("vision"))
    limit = _Limit(target, prefix, max_new_tokens)
    sequence = target.sequence
    hidden_1D = prefix.feature("hidden", "text")[-1:]
    token_1 = choose(target.logits(hidden_1D), temperature, generator)
    depth_1 = torch.ones(1, dtype=torch.long, device=token_1.device)
    ids = limit.cut(token_1.tolist())
    laps.end("prefill")
    yield Cycle.plain(ids, laps)
    while not limit.reached:
        laps = Laps(token_1.device)
        _check_current(target, sequence)
        states_1D = target.extend(token_1, depth_1, None, ("hidden",))
        logits_1V = target.logits(states_1D["hidden"])
        laps.end("verify")
        token_1 = choose(logits_1V, temperature, generator)
        target.commit([0])
        ids = limit.cut(token_1.tolist())
        laps.end("accept")
        yield Cycle.plain(ids, laps)


def decode(
    target: Target,
    drafter: Proposer | None,
    prompt: Any,
    *,
    tree: Tree | None = None,
    **options: Any,
) -> Iterator[Cycle]:
    """Decode with a drafter, or plainly if it is None.

    `tree` is the drafter's own by default; `options` are those that `speculate` and `plain`
    have in common.
    """
    if drafter is None:
        return plain(target, prompt, **options)
    tree = tree or drafter.tree
    return speculate(target, drafter, prompt, tree=tree, **options)


def _check_current(target: Target, sequence: int) -> None:
    """DataError when another sequence was begun, which replaced the prefix of this one."""
    if target.sequence != sequence:
        raise DataError(
            "another response was begun on this target: finish one response before the next"
        )


class _Limit:
    """Cuts the tokens of a cycle at an EOS, the token limit and the target's last position."""

    def __init__(self, target: Target, prefix: Batch, max_new_tokens: int) -> None:
        length = int(prefix.position_T[-1]) + 1  # a prompt ends with text
        self.eos_ids = set(target.info.eos_ids)
        self.tokens_left = min(max_new_tokens, room(target.info, length))
        self.reached = max_new_tokens < 1

    def cut(self, ids: list[int]) -> list[int]:
        """Those of the tokens that belong to the response."""
        ids = ids[: self.tokens_left]
        for number, token in enumerate(ids):
            if token in self.eos_ids:
                self.reached = True
                ids = ids[: number + 1]
                break
        self.tokens_left -= len(ids)
        self.reached = self.reached or self.tokens_left == 0
        return ids
