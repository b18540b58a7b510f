"""The flash kernels of a GPU compute what plain products do, values and gradients.

Shapes: R rows, S entries of the prefix, H query heads, K key heads, d head width.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.ticks import Operations
from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.kv_cache import PackedKVCache

pytestmark = pytest.mark.gpu

H, D, HOPS = 28, 128, 3
LENGTHS = (200, 77, 130)


class Kernels(Operations):  # type: ignore[no-untyped-call]
    """Counts the flash kernels that run."""

    count = 0

    def tell(self, func: Any, args: Sequence[Any]) -> None:
        self.count += (
            func.overloadpacket.__name__ == "_scaled_dot_product_flash_attention"
        )


def prefix() -> TokenIndex:
    """Three samples."""
    segment_S = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    position_S = torch.cat([torch.arange(length) for length in LENGTHS])
    return TokenIndex(segment_S, position_S, torch.full_like(segment_S, -1)).to(
        torch.device("cuda")
    )


def drawn(kv_heads: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values of the prefix, those of each guess, the queries of each hop, and their gradients."""
    heads = [kv_heads] * 2 + [kv_heads] * 2 * (HOPS - 1) + [H] * 2 * HOPS
    counts = [sum(LENGTHS)] * 2 + [rows] * (len(heads) - 2)
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(count, head, D, generator=generator, device="cuda").to(dtype)
        for count, head in zip(counts, heads, strict=True)
    ]


def attended(states: list[Tensor], rows_R: Tensor, window: int) -> list[Tensor]:
    """The outputs of all hops, then the gradients of all that was drawn but the outputs' own."""
    leaves = [state.clone().requires_grad_() for state in states[:-HOPS]]
    (key, value), guesses, asked = leaves[:2], leaves[2:-HOPS], leaves[-HOPS:]
    cache, text = PackedKVCache(window), prefix()
    cache.update(key, value, text, 0)
    out = []
    for hop, query in enumerate(asked):
        if hop:
            guess_key, guess_value = guesses[2 * hop - 2 : 2 * hop]
            cache.update(guess_key, guess_value, text.only(rows_R), hop)
        out.append(
            cache.attend(
                query, text.only(rows_R) if hop else text.with_rows(rows_R), hop
            )
        )
    grads = torch.autograd.grad(out, leaves, states[-HOPS:])
    return [part.detach() for part in (*out, *grads)]


@pytest.mark.parametrize("window", [0, 48])
@pytest.mark.parametrize("kv_heads", [H, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_is_as_near_to_exact_as_plain_products_are(
    dtype: torch.dtype, kv_heads: int, window: int
) -> None:
    rows_R = torch.cat(
        [torch.arange(40, 200), torch.arange(230, 277), torch.arange(300, 407)]
    )
    states = drawn(kv_heads, len(rows_R), dtype)
    with Kernels() as kernels:
        flash = attended(states, rows_R, window)
    assert kernels.count
    with sdpa_kernel(SDPBackend.MATH):
        plain = attended(states, rows_R, window)
        exact = attended([state.float() for state in states], rows_R, window)
    for ours, simple, right in zip(flash, plain, exact, strict=True):
        assert ours.dtype == dtype
        size = right.norm()
        error, usual = ((part.float() - right).norm() / size for part in (ours, simple))
        assert error < max(2 * float(usual), torch.finfo(dtype).eps)
