"""Attention of training equals a softmax over a dense mask, in values and in gradients, whatever runs it.

Shapes: R rows, J queries of a row, Q = R * J, S prefix entries, A all keys, H query heads, d head width.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlmdistill.drafters.core import attention
from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.kv_cache import PackedKVCache

H, D, HOPS = 6, 8, 3
# Three samples; in the first, visual entries are written apart, and two share the position of a third.
VISUAL = ([0, 0, 0, 2], [2, 3, 3, 0])
TEXT = (
    [0] * 9 + [1] * 2 + [2] * 6,
    [0, 1, 4, 5, 6, 7, 8, 9, 10, 0, 1, 1, 2, 3, 4, 5, 6],
)
# Of the first sample two turns are wanted, of the second its only response, of the third everything.
ROWS = torch.tensor([2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16])


def tokens(where: tuple[list[int], list[int]]) -> TokenIndex:
    return TokenIndex(
        torch.tensor(where[0]), torch.tensor(where[1]), torch.full((len(where[0]),), -1)
    )


def dense(
    query_QHd: Tensor, key_AHd: Tensor, value_AHd: Tensor, seen_QA: Tensor
) -> Tensor:
    score_HQA = torch.einsum("qhd,ahd->hqa", query_QHd, key_AHd) / D**0.5
    return torch.einsum(
        "hqa,ahd->qhd",
        score_HQA.masked_fill(~seen_QA, -torch.inf).softmax(-1),
        value_AHd,
    )


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [0, 2, 5])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)]
)
def test_values_and_gradients_of_all_hops_are_those_of_a_dense_mask(
    backend: SDPBackend,
    kv_heads: int,
    queries: int,
    window: int,
    dtype: torch.dtype,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every hop has `queries` queries a row, of which each sees one guess more than the one before."""
    monkeypatch.setattr(attention, "SCORE_BYTES", 1500)  # the scores of a few rows
    generator = torch.Generator().manual_seed(0)
    visual, text = tokens(VISUAL), tokens(TEXT)
    rows, count = text.only(ROWS), len(ROWS)
    leaves: list[Tensor] = []

    def leaf(count: int, heads: int) -> Tensor:
        leaves.append(
            torch.randn(
                count, heads, D, generator=generator, dtype=dtype
            ).requires_grad_()
        )
        return leaves[-1]

    written = [
        (leaf(len(part.segment_N), kv_heads), leaf(len(part.segment_N), kv_heads))
        for part in (visual, text)
    ]
    guesses = [
        (leaf(count, kv_heads), leaf(count, kv_heads))
        for _ in range(HOPS + queries - 2)
    ]
    asked = [leaf(count * queries, H) for _ in range(HOPS)]

    cache, got = PackedKVCache(window), []
    for part, states in zip((visual, text), written, strict=True):
        cache.update(*states, part, 0)
    with sdpa_kernel(backend):
        for hop, query_QHd in enumerate(asked):
            if hop:
                cache.update(*guesses[hop - 1], rows, hop)
            with cache.temporary():
                for ahead in range(1, queries):
                    cache.update(*guesses[hop + ahead - 1], rows, hop + ahead)
                got.append(
                    cache.attend(query_QHd, rows if hop else text.with_rows(ROWS), hop)
                )

    segment_S, position_S = (
        torch.tensor(one + other) for one, other in zip(VISUAL, TEXT, strict=True)
    )
    key_AHd, value_AHd = (
        torch.cat(part).repeat_interleave(H // kv_heads, 1)
        for part in zip(*written, *guesses, strict=True)
    )
    prefix_RS = (segment_S == rows.segment_N[:, None]) & (
        position_S <= rows.position_N[:, None]
    )
    if window:
        prefix_RS &= position_S > rows.position_N[:, None] - window
    expected = []
    for hop, query_QHd in enumerate(asked):
        own = [
            torch.eye(count, dtype=torch.bool).repeat_interleave(queries, 0)
            & (torch.arange(queries).repeat(count) + hop >= number)[:, None]
            for number in range(1, len(guesses) + 1)
        ]
        seen_QA = torch.cat([prefix_RS.repeat_interleave(queries, 0), *own], dim=1)
        expected.append(dense(query_QHd, key_AHd, value_AHd, seen_QA))

    weights = [
        torch.randn(mixed.shape, generator=generator, dtype=dtype) for mixed in got
    ]
    weights[0] = weights[0][..., :1].expand_as(weights[0])  # as a sum makes them
    with sdpa_kernel(backend):
        gradients = torch.autograd.grad(got, leaves, weights)
    naive = torch.autograd.grad(expected, leaves, weights)
    for one, other in zip([*got, *gradients], [*expected, *naive], strict=True):
        assert (one - other).norm() <= error * other.norm()


def test_no_row_wanted_is_no_error() -> None:
    cache, text = PackedKVCache(), tokens(TEXT)
    state_NHd = torch.randn(len(text.segment_N), H, D, requires_grad=True)
    cache.update(state_NHd, state_NHd, text, 0)
    none_R = torch.zeros(0, dtype=torch.long)
    mixed_QHd = cache.attend(state_NHd[none_R], text.with_rows(none_R), 0)
    assert mixed_QHd.shape == (0, H, D)
    (grad_NHd,) = torch.autograd.grad(mixed_QHd.sum(), state_NHd)
    assert not grad_NHd.any()


def test_rows_of_a_window_need_three_blocks_for_as_many_rows_as_it_has_keys() -> None:
    first_R, end_R = (
        torch.tensor([0, 0, 0, 1, 2, 3, 4]),
        torch.tensor([1, 2, 3, 4, 5, 6, 7]),
    )
    block = attention.Block
    assert attention.blocks(first_R, end_R) == [
        [
            block(slice(0, 3), slice(0, 3), True),
            block(slice(3, 6), slice(3, 6), True),
            block(slice(6, 7), slice(6, 7), True),
        ],
        [block(slice(6, 7), slice(4, 6), False)],
        [block(slice(3, 5), slice(1, 3), True, reversed=True)],
    ]


def test_rows_in_runs_need_two_blocks_a_run() -> None:
    first_R, end_R = torch.tensor([0, 0, 0, 0, 6, 6]), torch.tensor([3, 4, 5, 6, 7, 8])
    assert attention.blocks(first_R, end_R) == [
        [
            attention.Block(slice(0, 4), slice(2, 6), True),
            attention.Block(slice(4, 6), slice(6, 8), True),
        ],
        [attention.Block(slice(0, 4), slice(0, 2), False)],
    ]
