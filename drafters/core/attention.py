"""The attention of training: exact, in memory that is linear in the number of keys.

A row sees a run of keys in common with other rows, and keys of its own. The common ones go
through a flash kernel in blocks that need no mask; all parts are merged by their log-sum-exp
(lse). Flash kernels do not keep weights but compute them again in the backward pass, as
exp(score - lse), and so does the code for a row's own keys: with the lse and the output of
all parts, the gradient of each part is exact.

Shapes: R rows, L rows of a block, S keys in common, J keys of one row, K key heads, X queries
of a row for each key head, H = K * X, d head width; C runs of rows; 1HLd is the order that
kernels take.
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
"""Bytes of scores at a time where there is no flash kernel."""


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
        """The rows or keys `where` of a state, in the block's counting order: [1, H, L, d]."""
        return self.in_order(state_1HNd[:, :, where])

    def in_order(self, state_1HLd: Tensor) -> Tensor:
        """A state of the block's rows or keys, turned around if the block is `reversed`."""
        return state_1HLd.flip(2) if self.reversed else state_1HLd

    def add(self, total_1HNd: Tensor, where: slice, state_1HLd: Tensor) -> None:
        """Add a state of the block's rows or keys to the total of all rows or keys."""
        total_1HNd[:, :, where] += self.in_order(state_1HLd)


Part = Sequence[Block]
"""Blocks that have no row in common."""


def blocks(first_R: Tensor, end_R: Tensor) -> list[Part]:
    """Blocks in which row r sees the keys from `first_R[r]` up to, but not, `end_R[r]`.

    Each row sees at least one key. While each row sees one key more than the row before, two
    blocks serve them all; while it also sees one older key less, as in a window, three blocks
    serve as many rows as the window has keys. The first part has a block for every row.
    """
    # Rows are cut into runs in which both ends move at a constant step of 0 or 1.
    step_R = torch.ones_like(end_R)
    step_R[1:] = first_R.diff()
    end_jumps_R = torch.ones_like(end_R, dtype=torch.bool)
    end_jumps_R[1:] = end_R.diff() != 1
    jumps_R = end_jumps_R | (step_R < 0) | (step_R > 1)
    turns_R = torch.zeros_like(jumps_R)
    turns_R[1:] = ~jumps_R[:-1] & (step_R.diff() != 0)
    row_R = torch.arange(len(end_R), device=end_R.device)
    run_4R = torch.stack([row_R, first_R, end_R, step_R.roll(-1)])
    starts, firsts, ends, steps = run_4R[:, jumps_R | turns_R].tolist()
    stops = [*starts[1:], len(end_R)]

    later = list[Block]()
    common = list[Block]()
    older = list[Block]()
    for start, stop, first, end, step in zip(
        starts, stops, firsts, ends, steps, strict=False
    ):
        window_moves = stop - start > 1 and step == 1
        length = end - first if window_moves else stop - start
        # In a moving window, a block has at most as many rows as the window has keys.
        for begin in range(start, stop, length):
            rows = slice(begin, min(begin + length, stop))
            moved = begin - start
            count = rows.stop - begin
            oldest = first + moved  # key that the first row sees
            shared = oldest + count - 1 if window_moves else oldest  # that all rows see
            last = end - 1 + moved  # newest key of the first row
            later.append(Block(rows, slice(last, last + count), causal=True))
            if shared < last:
                common.append(Block(rows, slice(shared, last), causal=False))
            if oldest < shared:
                but_last = slice(begin, rows.stop - 1)
                keys = slice(oldest, shared)
                older.append(Block(but_last, keys, causal=True, reversed=True))
    return [part for part in (later, common, older) if part] or [later]


def attention(
    query_RKXd: Tensor,
    key_SKd: Tensor,
    value_SKd: Tensor,
    seen: Sequence[Part],
    own: Sequence[tuple[Tensor, Tensor, int]],
) -> Tensor:
    """Each query's mean of the values that it sees, weighted by the softmax of their scores.

    `seen` are the keys in common. `own` are keys and values [R, J, K, d] of each row, seen by
    its queries from that number on. Returns [R, K, X, d].
    """
    states: list[Tensor] = []
    for key_RJKd, value_RJKd, _ in own:
        states += [key_RJKd, value_RJKd]
    since = [first for *_, first in own]
    mixed_RKXd: Tensor = _Attention.apply(
        query_RKXd, key_SKd, value_SKd, seen, since, *states
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
        exact = torch.promote_types(query_RKXd.dtype, torch.float32)
        shape = query_RKXd.shape
        out_RKXd = query_RKXd.new_zeros(shape, dtype=exact)
        lse_RKX = query_RKXd.new_full(shape[:-1], -torch.inf, dtype=exact)

        # The keys in common, part by part.
        query = _heads_first(query_RKXd)
        key = _heads_first(key_SKd)
        value = _heads_first(value_SKd)
        kernel = _kernel(query)
        kept = []
        for part in seen:
            part_RKXd = torch.zeros_like(out_RKXd)
            part_lse_RKX = torch.full_like(lse_RKX, -torch.inf)
            part_1HRd = _heads_first(part_RKXd)
            part_lse_1HR1 = _heads_first(part_lse_RKX[..., None])
            for block in part:
                query_1HLd = block.of(query, block.rows)
                key_1KSd = block.of(key, block.keys)
                value_1KSd = block.of(value, block.keys)
                out_1HLd, lse_1HL, *for_backward = kernel.forward(
                    query_1HLd, key_1KSd, value_1KSd, block.causal
                )
                part_1HRd[:, :, block.rows] = block.in_order(out_1HLd)
                part_lse_1HR1[:, :, block.rows, 0] = block.in_order(lse_1HL)
                kept.append(for_backward)
            _merge(out_RKXd, lse_RKX, part_RKXd, part_lse_RKX)

        # The keys of each row.
        keys, values = own[::2], own[1::2]
        for key_RJKd, value_RJKd, first in zip(keys, values, since, strict=True):
            later_RKXd = query_RKXd[:, :, first:]
            score_RKXJ = _scores(later_RKXd, key_RJKd).to(exact)
            part_lse_RKX = score_RKXJ.logsumexp(-1)
            weight_RKXJ = (score_RKXJ - part_lse_RKX[..., None]).exp()
            part_RKXd = torch.einsum(
                "rkxj,rjkd->rkxd", weight_RKXJ.to(value_RJKd.dtype), value_RJKd
            )
            later_out_RKXd = out_RKXd[:, :, first:]
            later_lse_RKX = lse_RKX[:, :, first:]
            _merge(later_out_RKXd, later_lse_RKX, part_RKXd, part_lse_RKX)

        out_RKXd = out_RKXd.to(query_RKXd.dtype)
        ctx.save_for_backward(query_RKXd, key_SKd, value_SKd, out_RKXd, lse_RKX, *own)
        ctx.seen = seen
        ctx.since = since
        ctx.kernel = kernel
        ctx.kept = kept
        return out_RKXd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RKXd: Tensor) -> tuple[Tensor | None, ...]:
        query_RKXd, key_SKd, value_SKd, out_RKXd, lse_RKX, *own = ctx.saved_tensors
        exact = lse_RKX.dtype
        dtype = query_RKXd.dtype
        query_grad_RKXd = query_RKXd.new_zeros(query_RKXd.shape, dtype=exact)
        key_grad_SKd = key_SKd.new_zeros(key_SKd.shape, dtype=exact)
        value_grad_SKd = value_SKd.new_zeros(value_SKd.shape, dtype=exact)
        grad_RKXd = grad_RKXd.contiguous()  # kernels take a dense last dimension

        # The keys in common, block by block.
        grad = _heads_first(grad_RKXd)
        out = _heads_first(out_RKXd)
        query = _heads_first(query_RKXd)
        lse = _heads_first(lse_RKX[..., None])
        key = _heads_first(key_SKd)
        value = _heads_first(value_SKd)
        query_grad = _heads_first(query_grad_RKXd)
        key_grad = _heads_first(key_grad_SKd)
        value_grad = _heads_first(value_grad_SKd)
        all_blocks = chain.from_iterable(ctx.seen)
        for block, from_forward in zip(all_blocks, ctx.kept, strict=True):
            query_1HLd = block.of(query, block.rows)
            key_1KSd = block.of(key, block.keys)
            value_1KSd = block.of(value, block.keys)
            grad_1HLd = block.of(grad, block.rows)
            out_1HLd = block.of(out, block.rows)
            lse_1HL = block.of(lse, block.rows)[..., 0]
            grads = ctx.kernel.backward(
                grad_1HLd,
                query_1HLd,
                key_1KSd,
                value_1KSd,
                out_1HLd,
                lse_1HL,
                block.causal,
                *from_forward,
            )
            block.add(query_grad, block.rows, grads[0])
            block.add(key_grad, block.keys, grads[1])
            block.add(value_grad, block.keys, grads[2])

        # The keys of each row.
        scale = query_RKXd.shape[-1] ** -0.5
        mean_RKX = (grad_RKXd * out_RKXd).sum(-1, dtype=exact)
        own_grads: list[Tensor | None] = []
        keys, values = own[::2], own[1::2]
        for key_RJKd, value_RJKd, first in zip(keys, values, ctx.since, strict=True):
            later_RKXd = query_RKXd[:, :, first:]
            later_grad_RKXd = grad_RKXd[:, :, first:]
            score_RKXJ = _scores(later_RKXd, key_RJKd)
            later_lse_RKX1 = lse_RKX[:, :, first:, None]
            later_mean_RKX1 = mean_RKX[:, :, first:, None]
            weight_RKXJ = (score_RKXJ - later_lse_RKX1).exp()
            weight_grad_RKXJ = torch.einsum(
                "rkxd,rjkd->rkxj", later_grad_RKXd, value_RJKd
            )
            slope_RKXJ = _score_gradient(
                weight_RKXJ, weight_grad_RKXJ, later_mean_RKX1, scale, dtype
            )
            query_grad_RKXd[:, :, first:] += torch.einsum(
                "rkxj,rjkd->rkxd", slope_RKXJ, key_RJKd
            )
            own_key_grad_RJKd = torch.einsum("rkxj,rkxd->rjkd", slope_RKXJ, later_RKXd)
            weight_RKXJ = weight_RKXJ.to(grad_RKXd.dtype)
            own_value_grad_RJKd = torch.einsum(
                "rkxj,rkxd->rjkd", weight_RKXJ, later_grad_RKXd
            )
            own_grads += [own_key_grad_RJKd, own_value_grad_RJKd]
        return (
            query_grad_RKXd.to(dtype),
            key_grad_SKd.to(dtype),
            value_grad_SKd.to(dtype),
            None,
            None,
            *own_grads,
        )


def _scores(query_RKXd: Tensor, key_RJKd: Tensor) -> Tensor:
    """The scores of a row's own keys: [R, K, X, J]."""
    score_RKXJ: Tensor = torch.einsum("rkxd,rjkd->rkxj", query_RKXd, key_RJKd)
    return score_RKXJ.mul(query_RKXd.shape[-1] ** -0.5)


def _score_gradient(
    weight: Tensor, weight_grad: Tensor, mean: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """The gradient of query-key products, from that of the weights that their softmax is.

    `mean` is the product of the output and its gradient: the mean of `weight_grad`.
    """
    slope = weight_grad - mean
    return (weight * slope * scale).to(dtype)


def _merge(
    out_RKXd: Tensor, lse_RKX: Tensor, part_RKXd: Tensor, part_lse_RKX: Tensor
) -> None:
    """Add a part to the mean so far, in place."""
    share_RKX = torch.sigmoid(part_lse_RKX - lse_RKX)
    part_RKXd = part_RKXd.to(out_RKXd.dtype)
    out_RKXd.lerp_(part_RKXd, share_RKX[..., None])
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
        """Output [1, H, L, d], log-sum-exp [1, H, L], and further arguments of `backward`."""
        aten = torch.ops.aten
        states = (query_1HLd, key_1KSd, value_1KSd)
        if query_1HLd.is_cpu:
            on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
            return tuple(on_cpu(*states, 0.0, causal))
        results = aten._scaled_dot_product_flash_attention(*states, 0.0, causal)
        return tuple(results[:8])

    @staticmethod
    def backward(
        grad_1HLd: Tensor,
        query_1HLd: Tensor,
        key_1KSd: Tensor,
        value_1KSd: Tensor,
        out_1HLd: Tensor,
        lse_1HL: Tensor,
        causal: bool,
        *from_forward: Any,
    ) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values.

        Output and log-sum-exp are those of all that a query sees, not of these keys alone.
        """
        aten = torch.ops.aten
        states = (grad_1HLd, query_1HLd, key_1KSd, value_1KSd, out_1HLd)
        if query_1HLd.is_cpu:
            on_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return tuple(on_cpu(*states, lse_1HL, 0.0, causal))
        *lengths, seed, offset = from_forward
        lse_1HL = lse_1HL.contiguous()  # the kernel ignores strides
        on_gpu = aten._scaled_dot_product_flash_attention_backward
        return tuple(on_gpu(*states, lse_1HL, *lengths, 0.0, causal, seed, offset))


class _Plain:
    """The methods of `_Flash` from matrix products, some rows at a time.

    For devices and dtypes without a flash kernel.
    """

    @staticmethod
    def forward(
        query_1HLd: Tensor, key_1KSd: Tensor, value_1KSd: Tensor, causal: bool
    ) -> tuple[Any, ...]:
        """See `_Flash.forward`; `backward` has no further arguments."""
        query_KXLd = _grouped(query_1HLd, key_1KSd)
        key_KSd = key_1KSd[0]
        value_KSd = value_1KSd[0]
        outs, sums = [], []
        for rows in _row_slices(query_1HLd, key_KSd):
            rows_KXLd = query_KXLd[:, :, rows]
            score_KXLS = _masked(rows_KXLd, key_KSd, rows.start, causal)
            lse_KXL = score_KXLS.logsumexp(-1)
            weight_KXLS = (score_KXLS - lse_KXL[..., None]).exp()
            weight_KXLS = weight_KXLS.to(value_KSd.dtype)
            outs.append(torch.einsum("kxls,ksd->kxld", weight_KXLS, value_KSd))
            sums.append(lse_KXL)
        return _ungrouped(outs), _ungrouped(sums)

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
        exact = lse_1HL.dtype
        scale = query_1HLd.shape[-1] ** -0.5
        key_KSd = key_1KSd[0]
        value_KSd = value_1KSd[0]
        product_1HLd = grad_1HLd * out_1HLd
        mean_1HL = product_1HLd.sum(-1, dtype=exact)
        every_query_KXLd = _grouped(query_1HLd, key_1KSd)
        every_grad_KXLd = _grouped(grad_1HLd, key_1KSd)
        lse_KXL1 = _grouped(lse_1HL[..., None], key_1KSd)
        mean_KXL1 = _grouped(mean_1HL[..., None], key_1KSd)
        query_grads = []
        key_grad_KSd = torch.zeros_like(key_KSd, dtype=exact)
        value_grad_KSd = torch.zeros_like(value_KSd, dtype=exact)
        for rows in _row_slices(query_1HLd, key_KSd):
            query_KXLd = every_query_KXLd[:, :, rows]
            grad_KXLd = every_grad_KXLd[:, :, rows]
            score_KXLS = _masked(query_KXLd, key_KSd, rows.start, causal)
            weight_KXLS = (score_KXLS - lse_KXL1[:, :, rows]).exp()
            weight_grad_KXLS = torch.einsum("kxld,ksd->kxls", grad_KXLd, value_KSd)
            mean_rows_KXL1 = mean_KXL1[:, :, rows]
            slope_KXLS = _score_gradient(
                weight_KXLS, weight_grad_KXLS, mean_rows_KXL1, scale, grad_KXLd.dtype
            )
            query_grads.append(torch.einsum("kxls,ksd->kxld", slope_KXLS, key_KSd))
            key_grad_KSd += torch.einsum("kxls,kxld->ksd", slope_KXLS, query_KXLd)
            weight_KXLS = weight_KXLS.to(grad_KXLd.dtype)
            value_grad_KSd += torch.einsum("kxls,kxld->ksd", weight_KXLS, grad_KXLd)
        return _ungrouped(query_grads), key_grad_KSd[None], value_grad_KSd[None]


def _kernel(query_1HRd: Tensor) -> type[_Flash] | type[_Plain]:
    """Flash where there is such a kernel.

    `torch.nn.attention.sdpa_kernel(MATH)` asks for plain products.
    """
    if query_1HRd.is_cpu:
        return _Flash if flash_sdp_enabled() else _Plain  # type: ignore[no-untyped-call]
    like_query = (query_1HRd, query_1HRd, query_1HRd)
    fits = can_use_flash_attention(SDPAParams(*like_query, None, 0.0, True, False))
    is_aligned = query_1HRd.shape[-1] % 8 == 0
    return _Flash if fits and is_aligned else _Plain


def _grouped(state_1HLd: Tensor, key_1KSd: Tensor) -> Tensor:
    """[1, H, L, d] -> [K, X, L, d]."""
    kv_heads = key_1KSd.shape[1]
    _, heads, length, width = state_1HLd.shape
    return state_1HLd.reshape(kv_heads, heads // kv_heads, length, width)


def _ungrouped(states_KXLd: Sequence[Tensor]) -> Tensor:
    """The rows of some [K, X, L, ...], one after the other: [1, H, L, ...]."""
    state_KXLd = torch.cat([*states_KXLd], dim=2)
    return state_KXLd.flatten(0, 1)[None]


def _row_slices(query_1HLd: Tensor, key_KSd: Tensor) -> list[slice]:
    """Rows whose scores fit in `SCORE_BYTES`."""
    _, heads, length, _ = query_1HLd.shape
    row_bytes = 4 * heads * key_KSd.shape[1]
    step = max(1, SCORE_BYTES // row_bytes)
    return [slice(start, start + step) for start in range(0, length, step)]


def _masked(query_KXLd: Tensor, key_KSd: Tensor, first: int, causal: bool) -> Tensor:
    """The scores of rows from the `first`, float32 at least: [K, X, L, S]."""
    score_KXLS: Tensor = torch.einsum("kxld,ksd->kxls", query_KXLd, key_KSd)
    score_KXLS = score_KXLS.to(torch.promote_types(score_KXLS.dtype, torch.float32))
    score_KXLS = score_KXLS.mul(query_KXLd.shape[-1] ** -0.5)
    if causal:
        *_, rows, keys = score_KXLS.shape
        row_L = first + torch.arange(rows, device=key_KSd.device)
        key_S = torch.arange(keys, device=key_KSd.device)
        later_LS = row_L[:, None] < key_S
        score_KXLS = score_KXLS.masked_fill(later_LS, -torch.inf)
    return score_KXLS
