"""The attention of training: exact, in memory that grows with the keys and not with their square.

A row sees a run of keys in common with other rows, and keys of its own. The common ones go through a flash
kernel in blocks that need no mask; all parts are merged by their log-sum-exp. Flash kernels keep no weights
but compute them again in the backward pass, as exp(score - lse), and so do we for a row's own keys: with the
lse and the output of all parts, the gradient of each part is exact.

Shapes: R rows, L rows of a block, S keys in common, J keys of one row, K key heads, X queries of a row for
each key head, H = K * X, d head width; 1HLd is the order that kernels take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention, flash_sdp_enabled

SCORE_BYTES = 1 << 26
"""Scores at a time where there is no flash kernel."""
EVERY = slice(None)


@dataclass(frozen=True)
class Block:
    """Adjacent rows that see adjacent keys: all of them or, if `causal`, row i the first i + 1.

    If `reversed`, rows and keys are counted from their ends.
    """

    rows: slice
    keys: slice
    causal: bool
    reversed: bool = False

    def of(self, state_1HNd: Tensor, where: slice) -> Tensor:
        """Its rows or keys of all, in the order in which they are counted: [1, H, L, d]."""
        part_1HLd = state_1HNd[:, :, where]
        return part_1HLd.flip(2) if self.reversed else part_1HLd

    def into(self, whole_1HNd: Tensor, where: slice, part_1HLd: Tensor) -> None:
        """Add what was computed for its rows or keys to that of all."""
        whole_1HNd[:, :, where] += part_1HLd.flip(2) if self.reversed else part_1HLd


Part = Sequence[Block]
"""Blocks that have no row in common."""


def blocks(first_R: Tensor, end_R: Tensor) -> list[Part]:
    """Blocks in which row r sees the keys from `first_R[r]` up to and without `end_R[r]`, at least one.

    While each row sees one key more than the row before, two blocks serve them all; while it also sees one
    older key less, as in a window, three blocks serve as many rows as the window has keys. The first part
    has a block for every row.
    """
    step_R = torch.ones_like(end_R)
    jumps_R, starts_R = (torch.ones_like(end_R, dtype=torch.bool) for _ in range(2))
    step_R[1:] = first_R[1:] - first_R[:-1]
    jumps_R[1:] = (end_R[1:] != end_R[:-1] + 1) | (step_R[1:] < 0) | (step_R[1:] > 1)
    starts_R[1:] = jumps_R[1:] | (~jumps_R[:-1] & (step_R[1:] != step_R[:-1]))
    row_R = torch.arange(len(end_R), device=end_R.device)
    run_4C = torch.stack([row_R, first_R, end_R, step_R.roll(-1)])[:, starts_R]
    starts, firsts, ends, steps = run_4C.tolist()
    older, common, later = list[Block](), list[Block](), list[Block]()
    stops = [*starts[1:], len(end_R)]
    for begin, stop, first, end, step in zip(
        starts, stops, firsts, ends, steps, strict=False
    ):
        moving = stop - begin > 1 and step == 1
        length = end - first if moving else stop - begin
        for start in range(begin, stop, length):
            rows, moved = slice(start, min(start + length, stop)), start - begin
            last = end - 1 + moved
            oldest = (
                first + moved + (rows.stop - start - 1 if moving else 0)
            )  # that all of them see
            later.append(Block(rows, slice(last, last + rows.stop - start), True))
            if oldest < last:
                common.append(Block(rows, slice(oldest, last), False))
            if first + moved < oldest:
                older.append(
                    Block(
                        slice(start, rows.stop - 1),
                        slice(first + moved, oldest),
                        True,
                        True,
                    )
                )
    return [part for part in (later, common, older) if part] or [later]


def attention(
    query_RKXd: Tensor,
    key_SKd: Tensor,
    value_SKd: Tensor,
    seen: Sequence[Part],
    own: Sequence[tuple[Tensor, Tensor, int]],
) -> Tensor:
    """Each query's mean of the values that it sees, weighted by the softmax of their scores: [R, K, X, d].

    `own` are keys and values [R, J, K, d] of each row, seen by its queries from the given one on.
    """
    flat = [part for key_RJKd, value_RJKd, _ in own for part in (key_RJKd, value_RJKd)]
    since = [first for *_, first in own]
    mixed_RKXd: Tensor = _Attention.apply(
        query_RKXd, key_SKd, value_SKd, seen, since, *flat
    )  # type: ignore[no-untyped-call]
    return mixed_RKXd


class _Attention(torch.autograd.Function):
    """See `attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query_RKXd: Tensor,
        key_SKd: Tensor,
        value_SKd: Tensor,
        seen: Sequence[Part],
        since: Sequence[int],
        *own: Tensor,
    ) -> Tensor:
        exact, shape = (
            torch.promote_types(query_RKXd.dtype, torch.float32),
            query_RKXd.shape,
        )
        out_RKXd = query_RKXd.new_zeros(shape, dtype=exact)
        lse_RKX = query_RKXd.new_full(shape[:-1], -torch.inf, dtype=exact)
        query, key, value = (
            _heads_first(state) for state in (query_RKXd, key_SKd, value_SKd)
        )
        kernel = _kernel(query)
        kept = []
        for part in seen:
            part_RKXd, part_RKX = (
                torch.zeros_like(out_RKXd),
                torch.full_like(lse_RKX, -torch.inf),
            )
            part_1HRd, part_1HR = (
                _heads_first(part_RKXd),
                _heads_first(part_RKX[..., None])[..., 0],
            )
            for block in part:
                rows, keys = block.rows, block.keys
                out_1HLd, lse_1HL, *rest = kernel.forward(
                    block.of(query, rows),
                    block.of(key, keys),
                    block.of(value, keys),
                    block.causal,
                )
                part_1HRd[:, :, rows] = block.of(out_1HLd, EVERY)
                part_1HR[:, :, rows] = block.of(lse_1HL, EVERY)
                kept.append(rest)
            _merge(out_RKXd, lse_RKX, part_RKXd, part_RKX)
        for key_RJKd, value_RJKd, first in zip(own[::2], own[1::2], since, strict=True):
            score_RKXJ = _scores(query_RKXd[:, :, first:], key_RJKd).to(exact)
            part_RKX = score_RKXJ.logsumexp(-1)
            weight_RKXJ = (score_RKXJ - part_RKX[..., None]).exp().to(value_RJKd.dtype)
            part_RKXd = torch.einsum("rkxj,rjkd->rkxd", weight_RKXJ, value_RJKd)
            _merge(out_RKXd[:, :, first:], lse_RKX[:, :, first:], part_RKXd, part_RKX)
        out_RKXd = out_RKXd.to(query_RKXd.dtype)
        ctx.save_for_backward(query_RKXd, key_SKd, value_SKd, out_RKXd, lse_RKX, *own)
        ctx.seen, ctx.since, ctx.kernel, ctx.kept = seen, since, kernel, kept
        return out_RKXd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RKXd: Tensor) -> tuple[Tensor | None, ...]:
        query_RKXd, key_SKd, value_SKd, out_RKXd, lse_RKX, *own = ctx.saved_tensors
        exact, scale = lse_RKX.dtype, query_RKXd.shape[-1] ** -0.5
        grads = [
            part.new_zeros(part.shape, dtype=exact)
            for part in (query_RKXd, key_SKd, value_SKd)
        ]
        into = [_heads_first(grad) for grad in grads]
        grad_RKXd = (
            grad_RKXd.contiguous()
        )  # kernels take the last dimension to be dense
        grad, query, out = (
            _heads_first(state) for state in (grad_RKXd, query_RKXd, out_RKXd)
        )
        key, value, lse = (
            _heads_first(state) for state in (key_SKd, value_SKd, lse_RKX[..., None])
        )
        for block, rest in zip(chain.from_iterable(ctx.seen), ctx.kept, strict=True):
            rows, keys = block.rows, block.keys
            found = ctx.kernel.backward(
                *(
                    block.of(grad, rows),
                    block.of(query, rows),
                    block.of(key, keys),
                    block.of(value, keys),
                ),
                *(
                    block.of(out, rows),
                    block.of(lse, rows)[..., 0],
                    block.causal,
                    *rest,
                ),
            )
            for whole, at, added in zip(into, (rows, keys, keys), found, strict=True):
                block.into(whole, at, added)
        mean_RKX = (grad_RKXd * out_RKXd).sum(-1, dtype=exact)
        for key_RJKd, value_RJKd, first in zip(
            own[::2], own[1::2], ctx.since, strict=True
        ):
            asking, given = query_RKXd[:, :, first:], grad_RKXd[:, :, first:]
            weight_RKXJ = (
                _scores(asking, key_RJKd) - lse_RKX[:, :, first:, None]
            ).exp()
            slope_RKXJ = (
                torch.einsum("rkxd,rjkd->rkxj", given, value_RJKd)
                - mean_RKX[:, :, first:, None]
            )
            slope_RKXJ = (weight_RKXJ * slope_RKXJ * scale).to(asking.dtype)
            grads[0][:, :, first:] += torch.einsum(
                "rkxj,rjkd->rkxd", slope_RKXJ, key_RJKd
            )
            grads.append(torch.einsum("rkxj,rkxd->rjkd", slope_RKXJ, asking))
            grads.append(
                torch.einsum("rkxj,rkxd->rjkd", weight_RKXJ.to(given.dtype), given)
            )
        dtype = query_RKXd.dtype
        return *(whole.to(dtype) for whole in grads[:3]), None, None, *grads[3:]


def _scores(query_RKXd: Tensor, key_RJKd: Tensor) -> Tensor:
    """The scores of a row's own keys: [R, K, X, J]."""
    score_RKXJ: Tensor = torch.einsum("rkxd,rjkd->rkxj", query_RKXd, key_RJKd)
    return score_RKXJ.mul(query_RKXd.shape[-1] ** -0.5)


def _merge(
    out_RKXd: Tensor, lse_RKX: Tensor, part_RKXd: Tensor, part_lse_RKX: Tensor
) -> None:
    """Add a part to the mean so far, in place."""
    share_RKX1 = torch.sigmoid(part_lse_RKX - lse_RKX)[..., None]
    out_RKXd.lerp_(part_RKXd.to(out_RKXd.dtype), share_RKX1)
    torch.logaddexp(lse_RKX, part_lse_RKX, out=lse_RKX)


def _heads_first(state_Nd: Tensor) -> Tensor:
    """[N, ..., d] -> [1, H, N, d]."""
    return state_Nd.flatten(1, -2).transpose(0, 1)[None]


class _Flash:
    """The flash kernels of PyTorch."""

    @staticmethod
    def forward(
        query_1HLd: Tensor, key_1KSd: Tensor, value_1KSd: Tensor, causal: bool
    ) -> tuple[Any, ...]:
        """Output [1, H, L, d], log-sum-exp [1, H, L], and what else `backward` takes."""
        aten, states = torch.ops.aten, (query_1HLd, key_1KSd, value_1KSd)
        if query_1HLd.is_cpu:
            return tuple(
                aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, causal)
            )
        return tuple(aten._scaled_dot_product_flash_attention(*states, 0.0, causal)[:8])

    @staticmethod
    def backward(
        grad_1HLd: Tensor,
        query_1HLd: Tensor,
        key_1KSd: Tensor,
        value_1KSd: Tensor,
        out_1HLd: Tensor,
        lse_1HL: Tensor,
        causal: bool,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values, given output and log-sum-exp of all that is seen."""
        aten, states = (
            torch.ops.aten,
            (grad_1HLd, query_1HLd, key_1KSd, value_1KSd, out_1HLd),
        )
        if query_1HLd.is_cpu:
            return tuple(
                aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *states, lse_1HL, 0.0, causal
                )
            )
        *lengths, seed, offset = rest
        # Contiguous: the kernel does not look at the strides.
        states = (*states, lse_1HL.contiguous(), *lengths)
        return tuple(
            aten._scaled_dot_product_flash_attention_backward(
                *states, 0.0, causal, seed, offset
            )
        )


class _Plain:
    """The same from matrix products, some rows at a time: for devices and dtypes without a flash kernel."""

    @staticmethod
    def forward(
        query_1HLd: Tensor, key_1KSd: Tensor, value_1KSd: Tensor, causal: bool
    ) -> tuple[Any, ...]:
        """See `_Flash.forward`."""
        query_KXLd, key_KSd, value_KSd = (
            _grouped(query_1HLd, key_1KSd),
            key_1KSd[0],
            value_1KSd[0],
        )
        outs, sums = [], []
        for rows in _some(query_1HLd, key_KSd):
            score_KXLS = _masked(query_KXLd[:, :, rows], key_KSd, rows.start, causal)
            sums.append(score_KXLS.logsumexp(-1))
            weight_KXLS = (score_KXLS - sums[-1][..., None]).exp().to(value_KSd.dtype)
            outs.append(torch.einsum("kxls,ksd->kxld", weight_KXLS, value_KSd))
        return torch.cat(outs, 2).flatten(0, 1)[None], torch.cat(sums, 2).flatten(0, 1)[
            None
        ]

    @staticmethod
    def backward(
        grad_1HLd: Tensor,
        query_1HLd: Tensor,
        key_1KSd: Tensor,
        value_1KSd: Tensor,
        out_1HLd: Tensor,
        lse_1HL: Tensor,
        causal: bool,
    ) -> tuple[Tensor, ...]:
        """See `_Flash.backward`."""
        exact, scale = lse_1HL.dtype, query_1HLd.shape[-1] ** -0.5
        query_KXLd, grad_KXLd = (
            _grouped(state, key_1KSd) for state in (query_1HLd, grad_1HLd)
        )
        key_KSd, value_KSd = key_1KSd[0], value_1KSd[0]
        lse_KXL1, mean_KXL1 = (
            _grouped(state[..., None], key_1KSd)
            for state in (lse_1HL, (grad_1HLd * out_1HLd).sum(-1, dtype=exact))
        )
        queries, keys, values = (
            [],
            torch.zeros_like(key_KSd, dtype=exact),
            torch.zeros_like(value_KSd, dtype=exact),
        )
        for rows in _some(query_1HLd, key_KSd):
            asking, given = query_KXLd[:, :, rows], grad_KXLd[:, :, rows]
            weight_KXLS = (
                _masked(asking, key_KSd, rows.start, causal) - lse_KXL1[:, :, rows]
            ).exp()
            slope_KXLS = (
                torch.einsum("kxld,ksd->kxls", given, value_KSd) - mean_KXL1[:, :, rows]
            )
            slope_KXLS = (weight_KXLS * slope_KXLS * scale).to(given.dtype)
            queries.append(torch.einsum("kxls,ksd->kxld", slope_KXLS, key_KSd))
            keys += torch.einsum("kxls,kxld->ksd", slope_KXLS, asking)
            values += torch.einsum("kxls,kxld->ksd", weight_KXLS.to(given.dtype), given)
        return torch.cat(queries, 2).flatten(0, 1)[None], keys[None], values[None]


def _kernel(query_1HRd: Tensor) -> type[_Flash] | type[_Plain]:
    """Flash where there is such a kernel; `torch.nn.attention.sdpa_kernel(MATH)` asks for plain products."""
    if query_1HRd.is_cpu:
        return _Flash if flash_sdp_enabled() else _Plain  # type: ignore[no-untyped-call]
    fits = can_use_flash_attention(
        SDPAParams(query_1HRd, query_1HRd, query_1HRd, None, 0.0, True, False)
    )
    return _Flash if fits and query_1HRd.shape[-1] % 8 == 0 else _Plain


def _grouped(state_1HLd: Tensor, key_1KSd: Tensor) -> Tensor:
    """[1, H, L, d] -> [K, X, L, d]."""
    heads, (_, count, length, width) = key_1KSd.shape[1], state_1HLd.shape
    return state_1HLd.reshape(heads, count // heads, length, width)


def _some(query_1HLd: Tensor, key_KSd: Tensor) -> list[slice]:
    """Rows whose scores fit in `SCORE_BYTES`."""
    _, heads, length, _ = query_1HLd.shape
    step = max(1, SCORE_BYTES // (4 * heads * key_KSd.shape[1]))
    return [slice(start, start + step) for start in range(0, length, step)]


def _masked(query_KXLd: Tensor, key_KSd: Tensor, first: int, causal: bool) -> Tensor:
    """The scores of rows from the `first`, float32 at least: [K, X, L, S]."""
    score_KXLS: Tensor = torch.einsum("kxld,ksd->kxls", query_KXLd, key_KSd)
    score_KXLS = score_KXLS.to(torch.promote_types(score_KXLS.dtype, torch.float32))
    score_KXLS = score_KXLS.mul(query_KXLd.shape[-1] ** -0.5)
    if causal:
        row_L, key_S = (
            torch.arange(size, device=key_KSd.device) for size in score_KXLS.shape[2:]
        )
        score_KXLS = score_KXLS.masked_fill(first + row_L[:, None] < key_S, -torch.inf)
    return score_KXLS
