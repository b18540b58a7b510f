"""The attention of training: exact, in memory that grows with the keys and not with their square.

A row sees a run of keys in common with other rows, and keys of its own. The common ones go through a flash
kernel in blocks that need no mask; all parts are merged by their log-sum-exp. Flash kernels keep no weights
but compute them again in the backward pass, as exp(score - lse), and so do we for a row's own keys: with the
lse and the output of all parts, the gradient of each part is exact.

Shapes: R rows, L rows of a block, S keys in common, K key heads, X queries of a row for each key head, H = K
* X, d head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention, flash_sdp_enabled

SCORE_BYTES = 1 << 26
"""Scores at a time where there is no flash kernel."""


@dataclass(frozen=True)
class Block:
    """Adjacent rows that see adjacent keys: all of them or, if `causal`, row i the first i + 1."""

    rows: slice
    keys: slice
    causal: bool


def blocks(first_R: Tensor, end_R: Tensor) -> list[Block]:
    """Blocks in which row r sees the keys from `first_R[r]` up to and without `end_R[r]`, at least one.

    While each row sees one key more than the row before, two blocks serve them all.
    """
    starts_R = torch.ones_like(end_R, dtype=torch.bool)
    starts_R[1:] = (end_R[1:] != end_R[:-1] + 1) | (first_R[1:] != first_R[:-1])
    run_3C = torch.stack([torch.arange(len(end_R), device=end_R.device), first_R, end_R])[:, starts_R]
    starts, firsts, ends = run_3C.tolist()
    found = []
    for start, stop, first, end in zip(starts, [*starts[1:], len(end_R)], firsts, ends, strict=False):
        rows, last = slice(start, stop), end - 1
        if first < last:
            found.append(Block(rows, slice(first, last), False))
        found.append(Block(rows, slice(last, last + stop - start), True))
    return found


def attention(
    query_RKXd: Tensor,
    key_SKd: Tensor,
    value_SKd: Tensor,
    seen: Sequence[Block],
    own: Sequence[tuple[Tensor, Tensor, int]],
) -> Tensor:
    """Each query's mean of the values that it sees, weighted by the softmax of their scores: [R, K, X, d].

    `own` are keys and values [R, K, d] of each row, seen by its queries from the given one on.
    """
    flat = [part for key_RKd, value_RKd, _ in own for part in (key_RKd, value_RKd)]
    since = [first for *_, first in own]
    mixed_RKXd: Tensor = _Attention.apply(query_RKXd, key_SKd, value_SKd, seen, since, *flat)  # type: ignore[no-untyped-call]
    return mixed_RKXd


class _Attention(torch.autograd.Function):
    """See `attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query_RKXd: Tensor,
        key_SKd: Tensor,
        value_SKd: Tensor,
        seen: Sequence[Block],
        since: Sequence[int],
        *own: Tensor,
    ) -> Tensor:
        exact = torch.promote_types(query_RKXd.dtype, torch.float32)
        lse_RKX = query_RKXd.new_full(query_RKXd.shape[:-1], -torch.inf, dtype=exact)
        out_RKXd = torch.zeros_like(query_RKXd, dtype=exact)
        kernel = _kernel(query_RKXd)
        kept = []
        for block in seen:
            part_LKXd, lse_LKX, rest = kernel.forward(
                query_RKXd[block.rows], key_SKd[block.keys], value_SKd[block.keys], block.causal
            )
            _merge(out_RKXd[block.rows], lse_RKX[block.rows], part_LKXd, lse_LKX)
            kept.append(rest)
        for key_RKd, value_RKd, first in zip(own[::2], own[1::2], since, strict=True):
            score_RKX = _scores(query_RKXd[:, :, first:], key_RKd).to(exact)
            _merge(out_RKXd[:, :, first:], lse_RKX[:, :, first:], value_RKd[:, :, None], score_RKX)
        out_RKXd = out_RKXd.to(query_RKXd.dtype)
        ctx.save_for_backward(query_RKXd, key_SKd, value_SKd, out_RKXd, lse_RKX, *own)
        ctx.seen, ctx.since, ctx.kernel, ctx.kept = seen, since, kernel, kept
        return out_RKXd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RKXd: Tensor) -> tuple[Tensor | None, ...]:
        query_RKXd, key_SKd, value_SKd, out_RKXd, lse_RKX, *own = ctx.saved_tensors
        parts = (query_RKXd, key_SKd, value_SKd)
        grads = [torch.zeros_like(part, dtype=lse_RKX.dtype) for part in parts]
        for block, rest in zip(ctx.seen, ctx.kept, strict=True):
            places = (block.rows, block.keys, block.keys)
            found = ctx.kernel.backward(
                grad_RKXd[block.rows],
                *(part[place] for part, place in zip(parts, places, strict=True)),
                out_RKXd[block.rows],
                lse_RKX[block.rows],
                rest,
                block.causal,
            )
            for grad, place, added in zip(grads, places, found, strict=True):
                grad[place] += added
        mean_RKX = (grad_RKXd * out_RKXd).sum(-1, dtype=lse_RKX.dtype)
        own_grads = []
        for key_RKd, value_RKd, first in zip(own[::2], own[1::2], ctx.since, strict=True):
            query, grad, mean, lse = (x[:, :, first:] for x in (query_RKXd, grad_RKXd, mean_RKX, lse_RKX))
            weight_RKX = (_scores(query, key_RKd) - lse).exp()
            slope_RKX = weight_RKX * (torch.einsum("rkxd,rkd->rkx", grad, value_RKd) - mean)
            slope_RKX = slope_RKX.to(query.dtype) * query.shape[-1] ** -0.5
            grads[0][:, :, first:] += slope_RKX[..., None] * key_RKd[:, :, None]
            own_grads.append(torch.einsum("rkx,rkxd->rkd", slope_RKX, query))
            own_grads.append(torch.einsum("rkx,rkxd->rkd", weight_RKX.to(grad.dtype), grad))
        return *(grad.to(query_RKXd.dtype) for grad in grads), None, None, *own_grads


def _scores(query_RKXd: Tensor, key_RKd: Tensor) -> Tensor:
    """The scores of one key for each row and head: [R, K, X]."""
    score_RKX: Tensor = torch.einsum("rkxd,rkd->rkx", query_RKXd, key_RKd)
    return score_RKX.mul(query_RKXd.shape[-1] ** -0.5)


def _merge(out_LKXd: Tensor, lse_LKX: Tensor, part_LKXd: Tensor, part_lse_LKX: Tensor) -> None:
    """Add a part to the mean so far, in place."""
    share_LKX1 = torch.sigmoid(part_lse_LKX - lse_LKX)[..., None]
    out_LKXd.lerp_(part_LKXd.to(out_LKXd.dtype), share_LKX1)
    torch.logaddexp(lse_LKX, part_lse_LKX, out=lse_LKX)


class _Flash:
    """The flash kernels of PyTorch, in the shapes of `_Attention`."""

    @staticmethod
    def forward(
        query_LKXd: Tensor, key_SKd: Tensor, value_SKd: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """Output and log-sum-exp of a block, and what else its backward pass takes."""
        states = (_heads_first(query_LKXd.flatten(1, 2)), _heads_first(key_SKd), _heads_first(value_SKd))
        aten = torch.ops.aten
        if query_LKXd.is_cpu:
            out_1HLd, lse_1HL, *rest = aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, causal)
        else:
            out_1HLd, lse_1HL, *rest = aten._scaled_dot_product_flash_attention(*states, 0.0, causal)
        shape = query_LKXd.shape
        return out_1HLd[0].transpose(0, 1).reshape(shape), lse_1HL[0].T.reshape(shape[:-1]), rest

    @staticmethod
    def backward(
        grad_LKXd: Tensor,
        query_LKXd: Tensor,
        key_SKd: Tensor,
        value_SKd: Tensor,
        out_LKXd: Tensor,
        lse_LKX: Tensor,
        rest: list[Any],
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of a block's queries, keys and values, given output and lse of all that they see."""
        grad, query, out = (_heads_first(x.flatten(1, 2)) for x in (grad_LKXd, query_LKXd, out_LKXd))
        # A slice would give wrong gradients on a GPU, whose kernel does not look at the strides.
        lse_1HL = lse_LKX.flatten(1, 2).T[None].contiguous()
        states = (grad, query, _heads_first(key_SKd), _heads_first(value_SKd), out, lse_1HL)
        aten = torch.ops.aten
        if query_LKXd.is_cpu:
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*states, 0.0, causal)
        else:
            *lengths, seed, offset = rest[:6]
            grads = aten._scaled_dot_product_flash_attention_backward(
                *states, *lengths, 0.0, causal, seed, offset
            )
        query_LHd, key_SKd, value_SKd = (grad_1HNd[0].transpose(0, 1) for grad_1HNd in grads)
        return query_LHd.reshape(query_LKXd.shape), key_SKd, value_SKd


class _Plain:
    """The same from matrix products, some rows at a time: for devices and dtypes without a flash kernel."""

    @staticmethod
    def forward(
        query_LKXd: Tensor, key_SKd: Tensor, value_SKd: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """See `_Flash.forward`."""
        out_LKXd = torch.empty_like(query_LKXd)
        parts = []
        for rows in _some(query_LKXd, key_SKd):
            score_LKXS = _masked(query_LKXd, key_SKd, rows, causal)
            parts.append(score_LKXS.logsumexp(-1))
            weight_LKXS = (score_LKXS - parts[-1][..., None]).exp().to(value_SKd.dtype)
            out_LKXd[rows] = torch.einsum("lkxs,skd->lkxd", weight_LKXS, value_SKd)
        return out_LKXd, torch.cat(parts), []

    @staticmethod
    def backward(
        grad_LKXd: Tensor,
        query_LKXd: Tensor,
        key_SKd: Tensor,
        value_SKd: Tensor,
        out_LKXd: Tensor,
        lse_LKX: Tensor,
        rest: list[Any],
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `_Flash.backward`."""
        exact, scale = lse_LKX.dtype, query_LKXd.shape[-1] ** -0.5
        query_grad = torch.empty_like(query_LKXd)
        key_grad, value_grad = (torch.zeros_like(part, dtype=exact) for part in (key_SKd, value_SKd))
        mean_LKX = (grad_LKXd * out_LKXd).sum(-1, dtype=exact)
        for rows in _some(query_LKXd, key_SKd):
            grad, score = grad_LKXd[rows], _masked(query_LKXd, key_SKd, rows, causal)
            weight_LKXS = (score - lse_LKX[rows, ..., None]).exp()
            slope_LKXS = torch.einsum("lkxd,skd->lkxs", grad, value_SKd) - mean_LKX[rows, ..., None]
            slope_LKXS = (weight_LKXS * slope_LKXS * scale).to(grad.dtype)
            query_grad[rows] = torch.einsum("lkxs,skd->lkxd", slope_LKXS, key_SKd)
            key_grad += torch.einsum("lkxs,lkxd->skd", slope_LKXS, query_LKXd[rows])
            value_grad += torch.einsum("lkxs,lkxd->skd", weight_LKXS.to(grad.dtype), grad)
        return query_grad, key_grad, value_grad


def _kernel(query_RKXd: Tensor) -> type[_Flash] | type[_Plain]:
    """Flash where there is such a kernel; `torch.nn.attention.sdpa_kernel(MATH)` asks for plain products."""
    if query_RKXd.is_cpu:
        return _Flash if flash_sdp_enabled() else _Plain  # type: ignore[no-untyped-call]
    states = _heads_first(query_RKXd.flatten(1, 2))
    fits = can_use_flash_attention(SDPAParams(states, states, states, None, 0.0, True, False))
    return _Flash if fits and query_RKXd.shape[-1] % 8 == 0 else _Plain


def _heads_first(state_NHd: Tensor) -> Tensor:
    """As kernels take it: [1, H, N, d]."""
    return state_NHd.transpose(0, 1)[None]


def _some(query_LKXd: Tensor, key_SKd: Tensor) -> list[slice]:
    """Rows whose scores fit in `SCORE_BYTES`."""
    step = max(1, SCORE_BYTES // (4 * len(key_SKd) * query_LKXd[0, ..., 0].numel()))
    return [slice(start, start + step) for start in range(0, len(query_LKXd), step)]


def _masked(query_LKXd: Tensor, key_SKd: Tensor, rows: slice, causal: bool) -> Tensor:
    """The scores of some rows, float32 at least: [L, K, X, S]."""
    score_LKXS: Tensor = torch.einsum("lkxd,skd->lkxs", query_LKXd[rows], key_SKd)
    score_LKXS = score_LKXS.to(torch.promote_types(score_LKXS.dtype, torch.float32))
    score_LKXS = score_LKXS.mul(query_LKXd.shape[-1] ** -0.5)
    if causal:
        row_L, key_S = (torch.arange(size, device=key_SKd.device) for size in (len(query_LKXd), len(key_SKd)))
        hidden_LS = row_L[rows, None] < key_S
        score_LKXS = score_LKXS.masked_fill(hidden_LS[:, None, None], -torch.inf)
    return score_LKXS
