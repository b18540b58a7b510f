"""Both KV caches attend as a softmax over what each query may see, written out query by query.

Shapes: N entries, R rows, X tokens guessed in the same pass after a row, J = X + 1 queries of a row, H query
heads, K key heads, d head width.
"""

import pytest
import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.kv_cache import GrowingKVCache, PackedKVCache

H, K, D = 4, 2, 6
KeyValue = tuple[Tensor, Tensor]


def states(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=generator)


def tokens_at(segments: list[int], positions: list[int]) -> TokenIndex:
    return TokenIndex(
        torch.tensor(segments),
        torch.tensor(positions),
        torch.full((len(positions),), -1),
    )


def naive(query_Hd: Tensor, seen: list[KeyValue]) -> Tensor:
    """One query over a list of keys and values [K, d]."""
    key_SKd, value_SKd = (
        torch.stack(part).repeat_interleave(H // K, 1)
        for part in zip(*seen, strict=True)
    )
    weight_HS = (torch.einsum("hd,shd->hs", query_Hd, key_SKd) / D**0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weight_HS, value_SKd)


def attend(
    cache: GrowingKVCache | PackedKVCache,
    query_QHd: Tensor,
    tokens: TokenIndex,
    hop: int,
    own: KeyValue,
) -> Tensor:
    """Attention of rows with X tokens after each, whose keys and values are `own` [R, X, K, d]."""
    with cache.temporary():
        for ahead in range(own[0].shape[1]):
            cache.update(
                own[0][:, ahead], own[1][:, ahead], tokens.at_rows(), hop + ahead + 1
            )
        return cache.attend(query_QHd, tokens, hop)


def in_window(at: int, last: int, window: int) -> bool:
    return at <= last and (not window or at > last - window)


def expect(
    mixed_QHd: Tensor,
    query_QHd: Tensor,
    row: int,
    before: list[KeyValue],
    own: KeyValue,
) -> None:
    """Query j of a row sees what is before it and the first j tokens after the row."""
    ahead = own[0].shape[1]
    for turn in range(ahead + 1):
        seen = before + [(own[0][row, one], own[1][row, one]) for one in range(turn)]
        query = row * (ahead + 1) + turn
        torch.testing.assert_close(mixed_QHd[query], naive(query_QHd[query], seen))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("hop", [0, 1, 3])
def test_packed_rows_see_their_prefix_and_their_own_guesses(
    hop: int, ahead: int, window: int
) -> None:
    generator, cache = torch.Generator().manual_seed(0), PackedKVCache(window)
    # Two samples; visual entries are written apart from the text, which need not be in their order.
    visual, text = (
        tokens_at([0, 0, 1], [2, 3, 1]),
        tokens_at([0, 0, 0, 0, 1, 1, 1], [1, 4, 5, 6, 2, 3, 4]),
    )
    prefix: list[tuple[int, int, Tensor, Tensor]] = []
    for part in (visual, text):
        key_NKd, value_NKd = (
            states(generator, len(part.position_N), K),
            states(generator, len(part.position_N), K),
        )
        cache.update(key_NKd, value_NKd, part, 0)
        prefix += zip(
            part.segment_N.tolist(),
            part.position_N.tolist(),
            key_NKd,
            value_NKd,
            strict=True,
        )
    rows = torch.tensor([1, 2, 4, 5, 6])
    guesses = [
        (states(generator, len(rows), K), states(generator, len(rows), K))
        for _ in range(hop)
    ]
    for number, (key_RKd, value_RKd) in enumerate(guesses):
        cache.update(key_RKd, value_RKd, text.only(rows), number + 1)
    own = states(generator, len(rows), ahead, K), states(generator, len(rows), ahead, K)
    query_QHd = states(generator, len(rows) * (ahead + 1), H)
    chosen = text.with_rows(rows) if hop == 0 else text.only(rows)
    mixed_QHd = attend(cache, query_QHd, chosen, hop, own)
    for row, entry in enumerate(rows.tolist()):
        sample, order = int(text.segment_N[entry]), int(text.position_N[entry])
        before = [
            (key, value)
            for segment, at, key, value in prefix
            if segment == sample and in_window(at, order, window)
        ]
        before += [(key_RKd[row], value_RKd[row]) for key_RKd, value_RKd in guesses]
        expect(mixed_QHd, query_QHd, row, before, own)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_cached_entries_see_what_was_committed_up_to_them_and_own_guesses(
    ahead: int, window: int
) -> None:
    generator, cache = torch.Generator().manual_seed(0), GrowingKVCache(2, window)
    visual, text = tokens_at([0, 0], [2, 3]), tokens_at([0, 0, 0], [1, 4, 5])
    prefix: list[tuple[int, Tensor, Tensor]] = []
    for part in (visual, text):
        key_NKd, value_NKd = (
            states(generator, len(part.position_N), K),
            states(generator, len(part.position_N), K),
        )
        cache.update(key_NKd, value_NKd, part, 0)
        prefix += zip(part.position_N.tolist(), key_NKd, value_NKd, strict=True)
    for rows in ([0, 1, 2], [2]):
        own = (
            states(generator, len(rows), ahead, K),
            states(generator, len(rows), ahead, K),
        )
        query_QHd = states(generator, len(rows) * (ahead + 1), H)
        chosen = text.with_rows(torch.tensor(rows))
        mixed_QHd = attend(cache, query_QHd, chosen, 0, own)
        for row, entry in enumerate(rows):
            order = int(text.position_N[entry])
            before = [
                (key, value)
                for at, key, value in prefix
                if in_window(at, order, window)
            ]
            expect(mixed_QHd, query_QHd, row, before, own)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_nodes_of_a_tree_see_the_prefix_their_ancestors_and_own_guesses(
    ahead: int, window: int
) -> None:
    generator, cache = torch.Generator().manual_seed(0), GrowingKVCache(2, window)
    committed = [(states(generator, K), states(generator, K)) for _ in range(3)]
    keys, values = (torch.stack(part) for part in zip(*committed, strict=True))
    cache.update(keys, values, tokens_at([0] * 3, [0, 1, 2]), 0)
    nodes: list[tuple[Tensor, Tensor]] = []
    # Two levels of two nodes; both of the second descend from node 1. Then a new tree forgets this one.
    for visible in ([[1, 0], [0, 1]], [[0, 1, 1, 0], [0, 1, 0, 1]], [[1, 0], [0, 1]]):
        hop = 1 if len(visible[0]) == 2 else 2
        if hop == 1:
            nodes = []
        level = [(states(generator, K), states(generator, K)) for _ in visible]
        keys, values = (torch.stack(part) for part in zip(*level, strict=True))
        nodes += level
        at = tokens_at([0, 0], [2 + hop] * 2)
        at = TokenIndex(
            at.segment_N, at.position_N, at.span_N, None, torch.tensor(visible).bool()
        )
        cache.update(keys, values, at, hop)
        own = states(generator, 2, ahead, K), states(generator, 2, ahead, K)
        query_QHd = states(generator, 2 * (ahead + 1), H)
        mixed_QHd = attend(cache, query_QHd, at, hop, own)
        for row, ancestors in enumerate(visible):
            before = committed[-window:] + [
                node for node, seen in zip(nodes, ancestors, strict=True) if seen
            ]
            expect(mixed_QHd, query_QHd, row, before, own)


@pytest.mark.parametrize("prompt", [2, 100])
@pytest.mark.parametrize("window", [1, 3])
def test_a_window_holds_a_few_entries_however_many_were_committed(
    window: int, prompt: int
) -> None:
    generator, cache = torch.Generator().manual_seed(0), GrowingKVCache(2, window)
    seen: list[KeyValue] = []
    for start in (0, *range(prompt, prompt + 60, 2)):
        count = 2 if start else prompt
        key_NKd, value_NKd = states(generator, count, K), states(generator, count, K)
        at = tokens_at([0] * count, [*range(start, start + count)]).with_rows(
            torch.arange(count - 2, count)
        )
        cache.update(key_NKd, value_NKd, at, 0)
        seen += zip(key_NKd, value_NKd, strict=True)
        query_QHd = states(generator, 2, H)
        mixed_QHd = cache.attend(query_QHd, at, 0)
        for row, end in enumerate((len(seen) - 1, len(seen))):
            torch.testing.assert_close(
                mixed_QHd[row], naive(query_QHd[row], seen[:end][-window:])
            )
        if start:
            assert cache.committed <= 2 * window + 2
            assert cache.room <= 4 * window + 4
