"""Both memories attend as a softmax over what each query may see, written out query by query.

Shapes: N entries, R rows, X places of a group, J = X + 1 queries of a row, H query heads, K key heads,
d head width.
"""

import pytest
import torch
from torch import Tensor

from vlmdistill.drafters.memory import CacheMemory, PackedMemory, Places

H, K, D = 4, 2, 6
Group = tuple[Tensor, Tensor]  # keys, values


def states(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=generator)


def places(segments: list[int], orders: list[int]) -> Places:
    return Places(torch.tensor(segments), torch.tensor(orders), torch.full((len(orders),), -1))


def naive(query_Hd: Tensor, seen: list[Group]) -> Tensor:
    """One query over a list of keys and values [K, d]."""
    key_SKd, value_SKd = (torch.stack(part).repeat_interleave(H // K, 1) for part in zip(*seen, strict=True))
    weight_HS = (torch.einsum("hd,shd->hs", query_Hd, key_SKd) / D**0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weight_HS, value_SKd)


def expect(mixed_QHd: Tensor, query_QHd: Tensor, row: int, before: list[Group], own: Group) -> None:
    """Query j of a row sees what is before it and the first j places of its own group."""
    places = own[0].shape[1]
    for turn in range(places + 1):
        seen = before + [(own[0][row, place], own[1][row, place]) for place in range(turn)]
        query = row * (places + 1) + turn
        torch.testing.assert_close(mixed_QHd[query], naive(query_QHd[query], seen))


@pytest.mark.parametrize("group", [0, 1, 3])
@pytest.mark.parametrize("hop", [0, 1, 3])
def test_packed_rows_see_their_prefix_their_guesses_and_the_places_before_in_their_group(
    hop: int, group: int
) -> None:
    generator, memory = torch.Generator().manual_seed(0), PackedMemory()
    # Two samples; visual entries are written apart from the text, which need not be in their order.
    visual, text = places([0, 0, 1], [2, 3, 1]), places([0, 0, 0, 0, 1, 1, 1], [1, 4, 5, 6, 2, 3, 4])
    prefix: list[tuple[int, int, Tensor, Tensor]] = []
    for part in (visual, text):
        key_NKd, value_NKd = states(generator, len(part.order_N), K), states(generator, len(part.order_N), K)
        memory.update(key_NKd, value_NKd, part, 0)
        prefix += zip(part.segment_N.tolist(), part.order_N.tolist(), key_NKd, value_NKd, strict=True)
    rows = torch.tensor([1, 2, 4, 5, 6])
    guesses = [(states(generator, len(rows), K), states(generator, len(rows), K)) for _ in range(hop)]
    for number, (key_RKd, value_RKd) in enumerate(guesses):
        memory.update(key_RKd, value_RKd, text.only(rows), number + 1)
    own = states(generator, len(rows), group, K), states(generator, len(rows), group, K)
    query_QHd = states(generator, len(rows) * (group + 1), H)
    chosen = text.with_rows(rows) if hop == 0 else text.only(rows)
    mixed_QHd = memory.attend(query_QHd, chosen, hop, own if group else None)
    for row, entry in enumerate(rows.tolist()):
        sample, order = int(text.segment_N[entry]), int(text.order_N[entry])
        before = [(key, value) for segment, at, key, value in prefix if segment == sample and at <= order]
        before += [(key_RKd[row], value_RKd[row]) for key_RKd, value_RKd in guesses]
        expect(mixed_QHd, query_QHd, row, before, own)


@pytest.mark.parametrize("group", [0, 1, 3])
def test_cached_entries_see_what_was_committed_up_to_them_and_their_group(group: int) -> None:
    generator, memory = torch.Generator().manual_seed(0), CacheMemory(capacity=2)
    visual, text = places([0, 0], [2, 3]), places([0, 0, 0], [1, 4, 5])
    prefix: list[tuple[int, Tensor, Tensor]] = []
    for part in (visual, text):
        key_NKd, value_NKd = states(generator, len(part.order_N), K), states(generator, len(part.order_N), K)
        memory.update(key_NKd, value_NKd, part, 0)
        prefix += zip(part.order_N.tolist(), key_NKd, value_NKd, strict=True)
    for rows in ([0, 1, 2], [2]):
        own = states(generator, len(rows), group, K), states(generator, len(rows), group, K)
        query_QHd = states(generator, len(rows) * (group + 1), H)
        chosen = text.with_rows(torch.tensor(rows))
        mixed_QHd = memory.attend(query_QHd, chosen, 0, own if group else None)
        for row, entry in enumerate(rows):
            before = [(key, value) for at, key, value in prefix if at <= int(text.order_N[entry])]
            expect(mixed_QHd, query_QHd, row, before, own)


@pytest.mark.parametrize("group", [0, 1, 3])
def test_nodes_of_a_tree_see_the_prefix_their_ancestors_and_their_group(group: int) -> None:
    generator, memory = torch.Generator().manual_seed(0), CacheMemory(capacity=2)
    committed = [(states(generator, K), states(generator, K)) for _ in range(3)]
    keys, values = (torch.stack(part) for part in zip(*committed, strict=True))
    memory.update(keys, values, places([0] * 3, [0, 1, 2]), 0)
    nodes: list[tuple[Tensor, Tensor]] = []
    # Two levels of two nodes; both of the second descend from node 1. Then a new tree forgets this one.
    for visible in ([[1, 0], [0, 1]], [[0, 1, 1, 0], [0, 1, 0, 1]], [[1, 0], [0, 1]]):
        hop = 1 if len(visible[0]) == 2 else 2
        if hop == 1:
            nodes = []
        level = [(states(generator, K), states(generator, K)) for _ in visible]
        keys, values = (torch.stack(part) for part in zip(*level, strict=True))
        nodes += level
        at = places([0, 0], [2 + hop] * 2)
        at = Places(at.segment_N, at.order_N, at.span_N, None, torch.tensor(visible).bool())
        memory.update(keys, values, at, hop)
        own = states(generator, 2, group, K), states(generator, 2, group, K)
        query_QHd = states(generator, 2 * (group + 1), H)
        mixed_QHd = memory.attend(query_QHd, at, hop, own if group else None)
        for row, ancestors in enumerate(visible):
            before = committed + [node for node, seen in zip(nodes, ancestors, strict=True) if seen]
            expect(mixed_QHd, query_QHd, row, before, own)
