"""Losses between drafter and target, on supervised rows only and never on a whole [rows, vocabulary] block.

Rows are scored in chunks. A chunk computes the target's logits once for all hops, whose targets overlap by
all but one token, and the gradient of its states at once, so that no logits are kept or computed again
in the backward pass: two matrix products with the LM head per row and hop, and one per row for the target.
Every term is a sum over rows; the trainer divides by the number of rows over all ranks.

Shapes: H hops, R rows, C rows of one chunk, N counted rows of a chunk and hop, T text tokens, U of them in
a chunk, L terms, D hidden, V vocabulary, K best tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.core.transfer import place, place_all

CHUNK_BYTES, CHUNK_BYTES_GPU = 2**28, 2**30
"""Upper bound of one float32 block of logits: anywhere, and on a GPU that has room for 16 of them."""
BEST = 10
"""Tokens of the target that `top_k` and `list_mle` compare."""


@cache
def chunk_bytes(device: torch.device) -> int:
    """The most bytes of a block of logits on a device: decided once for each."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return chunk_of(torch.cuda.mem_get_info(device)[0])


def chunk_of(free: int) -> int:
    """The most bytes of a block of logits on a GPU with so many free bytes."""
    size = CHUNK_BYTES
    while size < CHUNK_BYTES_GPU and 32 * size <= free:
        size *= 2
    return size


@dataclass(frozen=True)
class TargetRows:
    """What the drafter's rows are compared with; whole numbers are on the CPU where they are known there."""

    hidden_TD: Tensor  # the target's hidden states
    ids_T: Tensor  # the tokens
    token_R: Tensor  # hop n of a row estimates the state of token `token_R + n`
    valid_HR: Tensor  # bool: all tokens up to the hop's are response tokens
    middle_TD: Tensor | None = (
        None  # states of a layer below the last, where a drafter learns from them
    )

    def after(self, index_N: Tensor, hop: int) -> Tensor:
        """The tokens of rows `hop` tokens after their first one; at the end of all, the last one."""
        return self.ids_T[(self.token_R[index_N] + hop).clamp(max=len(self.ids_T) - 1)]


@dataclass(frozen=True)
class Score:
    """The result of one hop; nothing in it carries a gradient."""

    terms: dict[str, Tensor]  # each term's unweighted sum over the counted rows
    count_R: Tensor  # bool: rows that counted
    agree_R: Tensor  # bool: rows where drafter and target have the same best token
    loss_R: Tensor  # weighted loss of each counted row, else 0

    @property
    def total(self) -> Tensor:
        """The weighted loss, summed over the counted rows."""
        return self.loss_R.sum()

    @property
    def sums(self) -> Tensor:
        """Loss, rows that agree, rows that count: float64 [3]."""
        agree = (self.agree_R & self.count_R).sum()
        return torch.stack(
            [self.total.double(), agree.double(), self.count_R.sum().double()]
        )


@dataclass(frozen=True)
class Scores:
    """The results of all hops."""

    total: Tensor  # weighted sum over hops, terms and counted rows; differentiable
    hops: list[Score]


def regression(state_CD: Tensor, target_CD: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) between hidden states, mean over the width (EAGLE eq. of L_reg): [C]."""
    return F.smooth_l1_loss(state_CD.float(), target_CD.float(), reduction="none").mean(
        -1
    )


@dataclass(frozen=True)
class Logits:
    """Logits, and what the terms read of them, each computed once."""

    logits_CV: Tensor

    @cached_property
    def softmax_CV(self) -> Tensor:
        """The distribution."""
        return self.logits_CV.softmax(-1)

    @cached_property
    def log_softmax_CV(self) -> Tensor:
        """Its logarithm."""
        return self.logits_CV.log_softmax(-1)

    @cached_property
    def best_CK(self) -> Tensor:
        """The columns of the `BEST` most likely tokens, the best first."""
        return self.logits_CV.topk(min(BEST, self.logits_CV.shape[-1])).indices

    @cached_property
    def best_softmax_CK(self) -> Tensor:
        """Their probabilities."""
        return self.softmax_CV.gather(1, self.best_CK)


def cross_entropy(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Cross-entropy against the target's distribution (EAGLE, L_cls): [C]."""
    return -(target.softmax_CV[row_C] * draft.log_softmax_CV).sum(-1)


def top_k(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Cross-entropy over the target's `BEST` most likely tokens, not renormalised (HASS section 3.1): [C]."""
    log_draft_CK = draft.log_softmax_CV.gather(1, target.best_CK[row_C])
    return -(target.best_softmax_CK[row_C] * log_draft_CK).sum(-1)


def l1(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """L1 distance of the two distributions (ViSpec, official code): [C]."""
    return (draft.softmax_CV - target.softmax_CV[row_C]).abs().sum(-1)


def list_mle(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Negative log-likelihood of the target's order of its best tokens (ViSpec, official code): [C]."""
    score_CK = draft.logits_CV.gather(1, target.best_CK[row_C])
    tail_CK = score_CK.flip(-1).logcumsumexp(-1).flip(-1)
    return (tail_CK - score_CK).sum(-1)


TERMS: dict[str, Callable[[Logits, Logits, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "top_k": top_k,
    "l1": l1,
    "list_mle": list_mle,
}
"""Terms on logits, the drafter's against rows of the target's."""
NAMES = ("regression", "middle", *TERMS, "confidence")
"""All terms; `regression` and `middle` are on states, `confidence` on what the drafter tells of guesses."""


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient was computed along with it."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, gradients: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        """Remember the gradient of `total` for each of the `inputs`."""
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Scale it."""
        return (
            None,
            None,
            *(outer[0].to(gradient.dtype) * gradient for gradient in ctx.gradients),
        )


@dataclass(frozen=True)
class _Teacher:
    """The target's logits of all tokens that a chunk of rows is compared with, computed once."""

    token_HC: Tensor  # index of each hop's token among those below
    hidden_UD: Tensor
    middle_UD: Tensor | None
    logits: Logits  # float32, U rows; over the draft vocabulary where there is one
    share_U: Tensor  # of the target's probability, what that has
    best_U: Tensor  # column of the best token, -1: none

    @classmethod
    def of(
        cls,
        rows: TargetRows,
        chunk: slice,
        lm_head_VD: Tensor,
        vocabulary_K: Tensor | None,
    ) -> "_Teacher":
        hop_H1 = torch.arange(len(rows.valid_HR), device=rows.token_R.device)[:, None]
        token_HC = (rows.token_R[chunk] + hop_H1).clamp(max=len(rows.hidden_TD) - 1)
        token_U, index_HC = torch.unique(token_HC, return_inverse=True)
        token_U = place(token_U, rows.hidden_TD.device)
        hidden_UD = rows.hidden_TD[token_U]
        logits_UV = F.linear(hidden_UD, lm_head_VD).float()
        best_U, share_U = logits_UV.argmax(-1), logits_UV.new_ones(len(logits_UV))
        if vocabulary_K is not None:  # ascending
            share_U = (
                logits_UV[:, vocabulary_K].logsumexp(-1) - logits_UV.logsumexp(-1)
            ).exp()
            column_U = torch.searchsorted(vocabulary_K, best_U).clamp(
                max=len(vocabulary_K) - 1
            )
            best_U = torch.where(vocabulary_K[column_U] == best_U, column_U, -1)
            logits_UV = logits_UV[:, vocabulary_K]
        middle_UD = None if rows.middle_TD is None else rows.middle_TD[token_U]
        return cls(index_HC, hidden_UD, middle_UD, Logits(logits_UV), share_U, best_U)

    def losses(
        self,
        names: Sequence[str],
        estimate_ND: Tensor,
        draft_NV: Tensor,
        confidence_N: Tensor | None,
        token_N: Tensor,
    ) -> Tensor:
        """The named terms of estimates and their logits against these tokens: [N, L]."""
        draft = Logits(draft_NV)
        found, width = [], self.hidden_UD.shape[1]
        for name in names:
            if name == "regression":
                found.append(
                    regression(estimate_ND[:, :width], self.hidden_UD[token_N])
                )
            elif name == "middle":
                assert self.middle_UD is not None, (
                    "this drafter learns from no middle state"
                )
                found.append(
                    regression(estimate_ND[:, width:], self.middle_UD[token_N])
                )
            elif (
                name == "confidence"
            ):  # DSpark: the chance that a sampled guess is accepted
                assert confidence_N is not None, "this drafter has no confidence head"
                target_NV = (
                    self.logits.softmax_CV[token_N] * self.share_U[token_N, None]
                )
                chance_N = draft.softmax_CV.detach().minimum(target_NV).sum(-1)
                found.append(
                    F.binary_cross_entropy_with_logits(
                        confidence_N.float(), chance_N, reduction="none"
                    )
                )
            else:
                found.append(TERMS[name](draft, self.logits, token_N))
        return torch.stack(found, dim=-1)


def _kept(draft_NV: Tensor, best_N: Tensor, keep_top: int) -> Tensor:
    """Rows whose target token is among the drafter's `keep_top` best; all of them when it is 0: [N]."""
    if not keep_top:
        return torch.ones_like(best_N, dtype=torch.bool)
    best_NK = draft_NV.topk(min(keep_top, draft_NV.shape[-1])).indices
    return (best_NK == best_N[:, None]).any(-1)


def pace_weights(chance_HR: Tensor, valid_HR: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights of the hops of each row (arXiv 2605.18810), 0 where it is not valid: [H, R].

    A hop counts as far as it is reached: w_j is the sum over m >= j of the product over i <= m of
    (1 - a) q_i + a, where q_i is the chance that the drafter gives the response's own token, and a the
    `smoothing`.
    """
    reached_HR = (((1 - smoothing) * chance_HR + smoothing) * valid_HR).cumprod(0)
    return reached_HR.flip(0).cumsum(0).flip(0)


def score(
    estimates: Sequence[Tensor],
    rows: TargetRows,
    logits: Callable[[Tensor, Tensor], Tensor],
    lm_head_VD: Tensor,
    weights: Mapping[str, float],
    *,
    confidence: Callable[
        [Tensor, Tensor], Tensor | None
    ] = lambda estimate_ND, last_N: None,
    parameters: Sequence[Tensor] = (),
    decay: float = 1.0,
    pace: float = 0.0,
    keep_top: int = 0,
    keep_failing: bool = False,
    vocabulary_K: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score all hops: weighted losses of their rows, hop n weighing `decay` ** n, and agreement.

    With `pace`, each row's hops weigh in addition as `pace_weights` has it, with that smoothing.

    `estimates` are the drafter's, [R, D] for each hop, or [R, 2D] with those of `rows.middle_TD` behind.
    `logits(estimate_ND, last_N)` computes its float32 logits after the tokens `last_N`, `confidence` its
    logit of the chance that its guess is accepted, and `parameters` are those that they train. With
    `keep_top`, a row whose target token is not among the drafter's `keep_top` best counts at no later
    hop, and at this one only with `keep_failing` (HiViS section 3.2). With `vocabulary_K`, the target's
    ids of the columns of those logits, the target's distribution is renormalized over them, and a row
    whose target token has no column never agrees and has no loss but `confidence`, which knows what the
    columns lack. KeyError for an unknown term.
    """
    if unknown := set(weights) - {*NAMES}:
        raise KeyError(f"unknown loss {sorted(unknown)}; there are {', '.join(NAMES)}")
    names = [name for name, weight in weights.items() if weight]
    device, where = estimates[0].device, rows.token_R.device
    always_L = place(torch.tensor([name == "confidence" for name in names]), device)
    inputs = [*estimates, *parameters]
    track = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    gradients = [torch.zeros_like(one) for one in inputs] if track else []
    wide = torch.promote_types(lm_head_VD.dtype, torch.float32)
    weight_L = place(
        torch.tensor([weights[name] for name in names], dtype=wide), device
    )
    hops, count = rows.valid_HR.shape
    step = chunk_rows or max(1, chunk_bytes(device) // (4 * len(lm_head_VD)))
    loss_HRL = weight_L.new_zeros(hops, count, len(names))
    count_HR, agree_HR = torch.zeros(2, hops, count, dtype=torch.bool, device=device)
    slot_H = torch.tensor([decay**hop for hop in range(hops)], dtype=wide)
    slot_HR = place(slot_H, device)[:, None].repeat(1, count)
    if pace:
        chance_HR = _chances(estimates, rows, logits, vocabulary_K, step)
        valid_HR = place(rows.valid_HR, device)
        slot_HR *= pace_weights(chance_HR.to(slot_HR.dtype), valid_HR, pace)

    for chunk in (slice(start, start + step) for start in range(0, count, step)):
        teacher = _Teacher.of(rows, chunk, lm_head_VD, vocabulary_K)
        alive_R = rows.valid_HR.new_zeros(count)
        alive_R[chunk] = True
        for hop, estimate_RD in enumerate(estimates):
            alive_R = alive_R & rows.valid_HR[hop]
            index_N = alive_R.nonzero()[:, 0]
            token_N = teacher.token_HC[hop, index_N - chunk.start]
            index_N, token_N, last_N = place_all(
                [index_N, token_N, rows.after(index_N, hop)], device
            )
            best_N = teacher.best_U[token_N]
            estimate_ND = estimate_RD.detach()[index_N].requires_grad_(track)
            with torch.set_grad_enabled(track):
                draft_NV, chance_N = (
                    logits(estimate_ND, last_N),
                    confidence(estimate_ND, last_N),
                )
                loss_NL = teacher.losses(
                    names, estimate_ND, draft_NV, chance_N, token_N
                )
            draft_NV = draft_NV.detach()
            kept_N = _kept(draft_NV, best_N, keep_top)
            counted_N = kept_N | keep_failing
            has_loss_NL = counted_N[:, None] & ((best_N >= 0)[:, None] | always_L)
            if track:
                outer_NL = (slot_HR[hop, index_N, None] * weight_L * has_loss_NL).to(
                    loss_NL.dtype
                )
                found = torch.autograd.grad(
                    loss_NL, [estimate_ND, *parameters], outer_NL, allow_unused=True
                )
                gradients[hop][index_N] = found[0]
                for total, part in zip(gradients[hops:], found[1:], strict=True):
                    if part is not None:
                        total += part
            loss_HRL[hop, index_N] = (loss_NL.detach() * has_loss_NL).to(loss_HRL.dtype)
            count_HR[hop, index_N] = counted_N
            agree_HR[hop, index_N] = draft_NV.argmax(-1) == best_N
            if (
                keep_top and hop + 1 < hops
            ):  # a wait for a GPU; what no longer counts costs more
                alive_R = alive_R.masked_scatter(alive_R, place(kept_N, where))

    weighted_HR = loss_HRL @ weight_L
    total = (weighted_HR * slot_HR).sum()
    scores = [
        Score(dict(zip(names, loss_HRL[hop].sum(0), strict=True)), *columns)
        for hop, columns in enumerate(zip(count_HR, agree_HR, weighted_HR, strict=True))
    ]
    if track:
        total = _WithGradient.apply(total, gradients, *inputs)  # type: ignore[no-untyped-call]
    return Scores(total, scores)


@torch.no_grad()
def _chances(
    estimates: Sequence[Tensor],
    rows: TargetRows,
    logits: Callable[[Tensor, Tensor], Tensor],
    vocabulary_K: Tensor | None,
    step: int,
) -> Tensor:
    """The chances that the drafter gives the response's own tokens, [H, R]; 0 for one without a column."""
    device = estimates[0].device
    chance_HR = torch.zeros(rows.valid_HR.shape, device=device)
    index_R = torch.arange(len(rows.token_R), device=rows.token_R.device)
    for hop, estimate_RD in enumerate(estimates):
        for known_N in torch.split(index_R, step):
            parts = [known_N, rows.after(known_N, hop), rows.after(known_N, hop + 1)]
            index_N, last_N, own_N = place_all(parts, device)
            softmax_NV = logits(estimate_RD[index_N], last_N).softmax(-1)
            column_N = own_N
            if vocabulary_K is not None:  # ascending
                column_N = torch.searchsorted(vocabulary_K, own_N).clamp(
                    max=len(vocabulary_K) - 1
                )
                softmax_NV = softmax_NV * (vocabulary_K[column_N] == own_N)[:, None]
            chance_HR[hop, index_N] = softmax_NV.gather(1, column_N[:, None])[:, 0].to(
                chance_HR.dtype
            )
    return chance_HR
