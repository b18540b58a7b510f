"""Losses between drafter and target, on supervised rows only.

Rows are scored in chunks, so that no block of logits [rows, vocabulary] exists. A chunk
computes the target's logits once for all hops, and takes the gradient of its losses at
once, so that no logits are kept or computed again in the backward pass: two matrix
products with the LM head per row and hop, and one per row for the target. Every term is
a sum over rows; the trainer divides by the number of rows over all ranks.

Shapes: H hops, R rows, C rows of one chunk, N counted rows of a chunk and hop, T text
tokens, U of them in a chunk, L terms, D hidden, V vocabulary, K best tokens or columns of
the draft vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.core.transfer import place, place_all

CHUNK_BYTES = 2**28
"""Most bytes of a float32 block of logits."""
CHUNK_BYTES_GPU = 2**30
"""The same on a GPU with room for 16 such blocks."""
BEST = 10
"""Tokens of the target that `top_k` and `list_mle` compare."""

DraftLogits = Callable[[Tensor, Tensor], Tensor]
"""Float32 logits [N, V] of estimates [N, D] after the tokens [N]."""


@cache
def chunk_bytes(device: torch.device) -> int:
    """Most bytes of a block of logits on a device, decided when it is first asked for."""
    if device.type != "cuda":
        return CHUNK_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return chunk_of(free)


def chunk_of(free: int) -> int:
    """Most bytes of a block of logits on a GPU with that many free bytes."""
    size = CHUNK_BYTES
    while size < CHUNK_BYTES_GPU and 32 * size <= free:
        size *= 2
    return size


@dataclass(frozen=True)
class TargetRows:
    """The target's side of the drafter's rows.

    `ids_T`, `token_R` and `valid_HR` are on the CPU if the batch has come from there.

    Args:
        hidden_TD: The target's last hidden states.
        ids_T: The tokens.
        token_R: Hop n of a row estimates the state of token `token_R + n`.
        valid_HR: bool, whether all tokens up to the hop's are of the response.
        middle_TD: The states of a lower layer, if the drafter learns from one.
    """

    hidden_TD: Tensor
    ids_T: Tensor
    token_R: Tensor
    valid_HR: Tensor
    middle_TD: Tensor | None = None

    def after(self, index_N: Tensor, hop: int) -> Tensor:
        """The tokens `hop` after the first one of each row, at most the last token: [N]."""
        token_N = self.token_R[index_N] + hop
        last = len(self.ids_T) - 1
        return self.ids_T[token_N.clamp(max=last)]


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
        sums = [self.total, agree, self.count_R.sum()]
        return torch.stack([value.double() for value in sums])


@dataclass(frozen=True)
class Scores:
    """The results of all hops."""

    total: Tensor  # weighted sum over hops, terms and counted rows; differentiable
    hops: list[Score]


def regression(state_CD: Tensor, target_CD: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) between states, mean over the width (EAGLE, L_reg): [C]."""
    state_CD = state_CD.float()
    loss_CD = F.smooth_l1_loss(state_CD, target_CD.float(), reduction="none")
    return loss_CD.mean(-1)


@dataclass(frozen=True)
class Logits:
    """Logits, and what the terms derive from them, each computed once."""

    logits_CV: Tensor

    @cached_property
    def softmax_CV(self) -> Tensor:
        """The probabilities."""
        return self.logits_CV.softmax(-1)

    @cached_property
    def log_softmax_CV(self) -> Tensor:
        """The log-probabilities."""
        return self.logits_CV.log_softmax(-1)

    @cached_property
    def best_CK(self) -> Tensor:
        """The columns of the `BEST` most likely tokens, the best first."""
        count = min(BEST, self.logits_CV.shape[-1])
        return self.logits_CV.topk(count).indices

    @cached_property
    def best_softmax_CK(self) -> Tensor:
        """The probabilities of the `BEST` most likely tokens."""
        return self.softmax_CV.gather(1, self.best_CK)


def cross_entropy(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Cross-entropy with the target's distribution (EAGLE, L_cls): [C]."""
    product_CV = target.softmax_CV[row_C] * draft.log_softmax_CV
    return -product_CV.sum(-1)


def top_k(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Cross-entropy over the target's `BEST` most likely tokens: [C].

    Not renormalized (HASS, section 3.1).
    """
    log_draft_CK = draft.log_softmax_CV.gather(1, target.best_CK[row_C])
    product_CK = target.best_softmax_CK[row_C] * log_draft_CK
    return -product_CK.sum(-1)


def l1(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """L1 distance of the two distributions (ViSpec, official code): [C]."""
    difference_CV = draft.softmax_CV - target.softmax_CV[row_C]
    return difference_CV.abs().sum(-1)


def list_mle(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Negative log-likelihood of the target's order of its `BEST` tokens: [C].

    ListMLE, as in the official code of ViSpec.
    """
    score_CK = draft.logits_CV.gather(1, target.best_CK[row_C])
    reversed_CK = score_CK.flip(-1)
    tail_CK = reversed_CK.logcumsumexp(-1).flip(-1)
    return (tail_CK - score_CK).sum(-1)


TERMS: dict[str, Callable[[Logits, Logits, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "top_k": top_k,
    "l1": l1,
    "list_mle": list_mle,
}
"""Terms on logits: the drafter's against rows of the target's."""
NAMES = ("regression", "middle", *TERMS, "confidence")
"""All terms. `regression` and `middle` are on states, `confidence` on the estimated chance
that a guess is accepted."""


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradients were computed along with it."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, gradients: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        """Remember the gradient of `total` for each of the `inputs`."""
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Scale them by the gradient of the scalar."""
        (scale,) = outer
        scaled = [scale.to(gradient.dtype) * gradient for gradient in ctx.gradients]
        return None, None, *scaled


@dataclass(frozen=True)
class Objective:
    """The terms of a stage that have a weight, L of them."""

    names: list[str]
    weight_L: Tensor  # float32 or wider
    has_loss_without_column_L: Tensor
    """bool: the term also has a loss where the target's best token has no column."""

    @classmethod
    def of(
        cls, weights: Mapping[str, float], dtype: torch.dtype, device: torch.device
    ) -> "Objective":
        """Choose the terms that weigh anything; KeyError for an unknown name."""
        if unknown := set(weights) - {*NAMES}:
            choice = ", ".join(NAMES)
            raise KeyError(f"unknown loss {sorted(unknown)}; there are {choice}")
        names = [name for name, weight in weights.items() if weight]
        values = [weights[name] for name in names]
        weight_L = torch.tensor(values, dtype=dtype)
        # `confidence` compares probabilities among all tokens; see `LossChunk.share_U`.
        without_L = torch.tensor([name == "confidence" for name in names])
        return cls(names, place(weight_L, device), place(without_L, device))


@dataclass(frozen=True)
class HopRows:
    """The N rows of a chunk that count at a hop, on the drafter's device."""

    index_N: Tensor  # among all rows
    token_N: Tensor  # the token that the hop is compared with, among the chunk's
    last_N: Tensor  # the id of the token before the guess


@dataclass(frozen=True)
class LossChunk:
    """Adjacent rows, and the target's logits of all tokens that any hop of them needs.

    The tokens of neighbouring rows and hops overlap; each is computed once.
    """

    rows: TargetRows
    first: int  # the chunk's first row
    token_HC: Tensor  # index of each hop's token among the U tokens below
    hidden_UD: Tensor
    middle_UD: Tensor | None
    logits: Logits  # float32, U rows; over the draft vocabulary if there is one
    share_U: Tensor  # the target's probability of all tokens that have a column
    best_U: Tensor  # column of the best token; -1: it has none

    @classmethod
    def of(
        cls,
        rows: TargetRows,
        chunk: slice,
        lm_head_VD: Tensor,
        vocabulary_K: Tensor | None,
    ) -> "LossChunk":
        """Compute the target's logits for the rows in `chunk`."""
        hop_H = torch.arange(len(rows.valid_HR), device=rows.token_R.device)
        last = len(rows.hidden_TD) - 1
        token_HC = rows.token_R[chunk] + hop_H[:, None]
        token_HC = token_HC.clamp(max=last)
        token_U, index_HC = torch.unique(token_HC, return_inverse=True)
        token_U = place(token_U, rows.hidden_TD.device)
        hidden_UD = rows.hidden_TD[token_U]
        logits_UV = F.linear(hidden_UD, lm_head_VD).float()
        best_U = logits_UV.argmax(-1)
        share_U = logits_UV.new_ones(len(logits_UV))
        if vocabulary_K is not None:
            logits_UK = logits_UV[:, vocabulary_K]
            lse_U = logits_UV.logsumexp(-1)
            log_share_U = logits_UK.logsumexp(-1) - lse_U
            share_U = log_share_U.exp()
            column_U, has_column_U = _columns(best_U, vocabulary_K)
            best_U = torch.where(has_column_U, column_U, -1)
            logits_UV = logits_UK
        middle_UD = None if rows.middle_TD is None else rows.middle_TD[token_U]
        return cls(
            rows,
            chunk.start,
            token_HC=index_HC,
            hidden_UD=hidden_UD,
            middle_UD=middle_UD,
            logits=Logits(logits_UV),
            share_U=share_U,
            best_U=best_U,
        )

    def rows_at(self, hop: int, counts_R: Tensor) -> HopRows:
        """The rows of `counts_R` (bool), which are all of this chunk, at a hop."""
        row_N = counts_R.nonzero()[:, 0]
        token_N = self.token_HC[hop, row_N - self.first]
        last_N = self.rows.after(row_N, hop)
        device = self.hidden_UD.device
        return HopRows(*place_all([row_N, token_N, last_N], device))

    def hop_losses(
        self,
        names: Sequence[str],
        token_N: Tensor,
        estimate_ND: Tensor,
        draft_NV: Tensor,
        confidence_N: Tensor | None,
    ) -> Tensor:
        """The named terms of one hop against the chunk's tokens `token_N`: [N, L].

        `draft_NV` are the logits of the estimates; `confidence_N` are the logits of the
        chance that a guess is accepted.
        """
        draft = Logits(draft_NV)
        width = self.hidden_UD.shape[1]
        losses = []
        for name in names:
            if name == "regression":
                own_ND = estimate_ND[:, :width]
                loss_N = regression(own_ND, self.hidden_UD[token_N])
            elif name == "middle":
                assert self.middle_UD is not None, "this drafter has no middle state"
                middle_ND = estimate_ND[:, width:]
                loss_N = regression(middle_ND, self.middle_UD[token_N])
            elif name == "confidence":
                assert confidence_N is not None, "this drafter has no confidence head"
                loss_N = self._confidence_loss(draft, confidence_N, token_N)
            else:
                loss_N = TERMS[name](draft, self.logits, token_N)
            losses.append(loss_N)
        return torch.stack(losses, dim=-1)

    def _confidence_loss(
        self, draft: Logits, confidence_N: Tensor, token_N: Tensor
    ) -> Tensor:
        """Cross-entropy with the chance that a sampled guess is accepted (DSpark): [N]."""
        share_N1 = self.share_U[token_N, None]
        target_NV = self.logits.softmax_CV[token_N] * share_N1
        own_NV = draft.softmax_CV.detach()
        chance_N = own_NV.minimum(target_NV).sum(-1)
        return F.binary_cross_entropy_with_logits(
            confidence_N.float(), chance_N, reduction="none"
        )


def accumulate_gradients(
    gradients: Sequence[Tensor],
    hop: int,
    index_N: Tensor,
    loss_NL: Tensor,
    weight_NL: Tensor,
    inputs: Sequence[Tensor],
) -> None:
    """Add the gradient of one hop's weighted losses, in place.

    `gradients` are those of the estimates of all hops, [R, D], then those of the
    parameters. `inputs` are the estimates of this hop's rows, [N, D], then the parameters.
    """
    estimate_ND, *of_parameters = torch.autograd.grad(
        loss_NL, inputs, weight_NL, allow_unused=True
    )
    gradients[hop][index_N] = estimate_ND
    hops = len(gradients) - len(of_parameters)
    totals = gradients[hops:]
    for total, gradient in zip(totals, of_parameters, strict=True):
        if gradient is not None:
            total += gradient


def pace_weights(chance_HR: Tensor, valid_HR: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights of the hops of each row (arXiv 2605.18810): [H, R].

    A hop weighs by how likely it is reached: w_j is the sum over m >= j of the product
    over i <= m of (1 - a) q_i + a, where q_i is the drafter's probability of the response's
    own token and a the `smoothing`. Hops that are not valid weigh 0.
    """
    factor_HR = (1 - smoothing) * chance_HR + smoothing
    reached_HR = (factor_HR * valid_HR).cumprod(0)
    return reached_HR.flip(0).cumsum(0).flip(0)


def no_confidence(estimate_ND: Tensor, last_N: Tensor) -> Tensor | None:
    """The `confidence` of a drafter without a head for it: None."""
    return None


def score(
    estimates: Sequence[Tensor],
    rows: TargetRows,
    logits: DraftLogits,
    lm_head_VD: Tensor,
    weights: Mapping[str, float],
    *,
    confidence: Callable[[Tensor, Tensor], Tensor | None] = no_confidence,
    parameters: Sequence[Tensor] = (),
    decay: float = 1.0,
    pace: float = 0.0,
    keep_top: int = 0,
    vocabulary_K: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score all hops: the weighted losses of their rows, and agreement with the target.

    Args:
        estimates: The drafter's estimates of the target's states, [R, D] for each hop; with
            `rows.middle_TD` [R, 2D], those of the middle states last.
        rows: The target's side of the rows.
        logits: Computes the drafter's logits.
        lm_head_VD: The target's LM head.
        weights: By the name of a term (`NAMES`) its weight; 0: it is not computed.
        confidence: Computes logits [N] of the chance that a guess is accepted, from the same
            arguments as `logits`; None: the drafter has no such head.
        parameters: What `logits` and `confidence` train.
        decay: Hop n weighs `decay` ** n.
        pace: Above 0, hops weigh in addition as in `pace_weights`, with this smoothing.
        keep_top: Above 0, a row stops counting at the first hop whose target token is not
            among the drafter's `keep_top` best (HiViS, section 3.2).
        vocabulary_K: The target's ids of the columns of `logits`, ascending; None: every
            token has its own. The target's distribution is renormalized over them. A row
            whose target token has no column never agrees, and has no loss but `confidence`.
        chunk_rows: Rows at a time; None: as many as `chunk_bytes` allows.

    Returns:
        The differentiable total, and the result of each hop.

    Raises:
        KeyError: A term is unknown.
    """
    device = estimates[0].device
    exact = torch.promote_types(lm_head_VD.dtype, torch.float32)
    objective = Objective.of(weights, exact, device)
    inputs = [*estimates, *parameters]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    gradients = [torch.zeros_like(x) for x in inputs] if learns else []
    hops, count = rows.valid_HR.shape
    terms = len(objective.names)
    loss_HRL = torch.zeros(hops, count, terms, dtype=exact, device=device)
    count_HR, agree_HR = torch.zeros(2, hops, count, dtype=torch.bool, device=device)

    row_bytes = 4 * len(lm_head_VD)
    size = chunk_rows or max(1, chunk_bytes(device) // row_bytes)
    decays = [decay**hop for hop in range(hops)]
    decay_H = place(torch.tensor(decays, dtype=exact), device)
    hop_weight_HR = decay_H[:, None].repeat(1, count)
    if pace:
        chance_HR = _chances(estimates, rows, logits, vocabulary_K, size)
        valid_HR = place(rows.valid_HR, device)
        hop_weight_HR *= pace_weights(chance_HR.to(exact), valid_HR, pace)

    # A checkpointed backward pass, written by hand: the logits of a chunk, [chunk, V], are
    # the largest tensors of training. Their gradient is taken here, in the forward pass, so
    # that they are freed before the next hop; `_WithGradient` hands it to autograd.
    for start in range(0, count, size):
        chunk_slice = slice(start, start + size)
        chunk = LossChunk.of(rows, chunk_slice, lm_head_VD, vocabulary_K)
        counts_R = rows.valid_HR.new_zeros(count)
        counts_R[chunk_slice] = True
        for hop, estimate_RD in enumerate(estimates):
            counts_R = counts_R & rows.valid_HR[hop]
            hop_rows = chunk.rows_at(hop, counts_R)
            index_N = hop_rows.index_N
            token_N = hop_rows.token_N
            estimate_ND = estimate_RD.detach()[index_N].requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                draft_NV = logits(estimate_ND, hop_rows.last_N)
                confidence_N = confidence(estimate_ND, hop_rows.last_N)
                loss_NL = chunk.hop_losses(
                    objective.names, token_N, estimate_ND, draft_NV, confidence_N
                )

            draft_NV = draft_NV.detach()
            best_N = chunk.best_U[token_N]
            kept_N = _kept(draft_NV, best_N, keep_top)
            has_column_N1 = (best_N >= 0)[:, None]
            has_loss_NL = has_column_N1 | objective.has_loss_without_column_L
            has_loss_NL = kept_N[:, None] & has_loss_NL
            counted_NL = loss_NL.detach() * has_loss_NL
            loss_HRL[hop, index_N] = counted_NL.to(exact)
            count_HR[hop, index_N] = kept_N
            draft_best_N = draft_NV.argmax(-1)
            agree_HR[hop, index_N] = draft_best_N == best_N
            if learns:
                hop_weight_N1 = hop_weight_HR[hop, index_N, None]
                weight_NL = hop_weight_N1 * objective.weight_L * has_loss_NL
                weight_NL = weight_NL.to(loss_NL.dtype)
                of_hop = [estimate_ND, *parameters]
                accumulate_gradients(
                    gradients, hop, index_N, loss_NL, weight_NL, of_hop
                )
            if keep_top and hop + 1 < hops:
                # A wait for a GPU. To go on with rows that no longer count costs more.
                kept_N = place(kept_N, counts_R.device)
                counts_R = counts_R.masked_scatter(counts_R, kept_N)

    weighted_HR = loss_HRL @ objective.weight_L
    total = (weighted_HR * hop_weight_HR).sum()
    if learns:
        total = _WithGradient.apply(total, gradients, *inputs)  # type: ignore[no-untyped-call]
    scores = []
    for hop in range(hops):
        sums_L = loss_HRL[hop].sum(0)
        sums = dict(zip(objective.names, sums_L, strict=True))
        hop_score = Score(sums, count_HR[hop], agree_HR[hop], weighted_HR[hop])
        scores.append(hop_score)
    return Scores(total, scores)


def _kept(draft_NV: Tensor, best_N: Tensor, keep_top: int) -> Tensor:
    """Rows whose target token is among the drafter's `keep_top` best; 0: all of them. [N]"""
    if not keep_top:
        return torch.ones_like(best_N, dtype=torch.bool)
    count = min(keep_top, draft_NV.shape[-1])
    best_NK = draft_NV.topk(count).indices
    return (best_NK == best_N[:, None]).any(-1)


def _columns(ids_N: Tensor, vocabulary_K: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of tokens in an ascending draft vocabulary, and whether they have one."""
    last = len(vocabulary_K) - 1
    column_N = torch.searchsorted(vocabulary_K, ids_N).clamp(max=last)
    return column_N, vocabulary_K[column_N] == ids_N


@torch.no_grad()
def _chances(
    estimates: Sequence[Tensor],
    rows: TargetRows,
    logits: DraftLogits,
    vocabulary_K: Tensor | None,
    size: int,
) -> Tensor:
    """The drafter's probabilities of the response's own tokens; 0 without a column: [H, R]."""
    device = estimates[0].device
    chance_HR = torch.zeros(rows.valid_HR.shape, device=device)
    row_R = torch.arange(len(rows.token_R), device=rows.token_R.device)
    for hop, estimate_RD in enumerate(estimates):
        for row_N in torch.split(row_R, size):
            last_N = rows.after(row_N, hop)
            own_N = rows.after(row_N, hop + 1)
            index_N, last_N, own_N = place_all([row_N, last_N, own_N], device)
            draft_NV = logits(estimate_RD[index_N], last_N)
            softmax_NV = draft_NV.softmax(-1)
            column_N = own_N
            if vocabulary_K is not None:
                column_N, has_column_N = _columns(own_N, vocabulary_K)
                softmax_NV = softmax_NV * has_column_N[:, None]
            chance_N1 = softmax_NV.gather(1, column_N[:, None])
            chance_HR[hop, index_N] = chance_N1[:, 0].to(chance_HR.dtype)
    return chance_HR
