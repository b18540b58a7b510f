"""Losses between drafter and target, on supervised rows only.

The logits of all rows, [rows, vocabulary], never exist together: rows are scored in
chunks. A chunk computes the target's logits of each distinct token once for all hops. The
forward pass takes the gradient of a hop's losses right after the losses, so that no logits
are kept for the backward pass, or computed again in it. A row takes two matrix products
with the LM head per hop, and a distinct token one for the target. Every term is a sum
over rows; the trainer divides by the number of rows over all ranks.

Shapes: H hops, R rows, C rows of one chunk, N counted rows of a chunk and hop, T text
tokens, U distinct ones that a chunk needs, L terms, D hidden, V vocabulary, K columns of
the draft vocabulary, B best tokens.
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
"""The same on a GPU with much free memory, see `chunk_of`."""
BLOCKS_FREE = 16
"""Blocks of logits that must fit into a GPU's free memory if they are to be that large."""
BEST = 10
"""Tokens of the target that `top_k` and `list_mle` compare."""

DraftLogits = Callable[[Tensor, Tensor], Tensor]
"""Float32 logits [N, V] of estimates [N, D] after the tokens [N]."""


@cache
def chunk_bytes(device: torch.device) -> int:
    """Most bytes of a block of logits on a device, by its free memory at the first call."""
    if device.type != "cuda":
        return CHUNK_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return chunk_of(free)


def chunk_of(free: int) -> int:
    """Most bytes of a block of logits on a GPU with `free` bytes: 1 GiB, 512 or 256 MiB."""
    for size in (CHUNK_BYTES_GPU, CHUNK_BYTES_GPU // 2):
        if BLOCKS_FREE * size <= free:
            return size
    return CHUNK_BYTES


@dataclass(frozen=True)
class TargetRows:
    """The target's side of the drafter's rows.

    `ids_T`, `token_R` and `valid_HR` may be on the CPU while the states are on a GPU: rows
    are then chosen without a wait for the GPU.

    Args:
        hidden_TD: The target's last hidden states.
        ids_T: The tokens.
        token_R: Hop n of a row estimates the state of token `token_R + n`.
        valid_HR: bool, whether all tokens up to and including the hop's are of the response.
        middle_TD: The states of a lower layer, if the drafter learns from one.
    """

    hidden_TD: Tensor
    ids_T: Tensor
    token_R: Tensor
    valid_HR: Tensor
    middle_TD: Tensor | None = None

    def ids_at(self, index_N: Tensor, hop: int) -> Tensor:
        """The ids of the tokens `token_R + hop` of these rows, at most of the last token: [N]."""
        token_N = self.token_R[index_N] + hop
        last = len(self.ids_T) - 1
        return self.ids_T[token_N.clamp(max=last)]


@dataclass(frozen=True)
class Score:
    """The result of one hop; nothing in it carries a gradient."""

    terms: dict[str, Tensor]  # each term's unweighted sum over the counted rows
    count_R: Tensor  # bool: rows that counted
    agree_R: Tensor  # bool: rows where drafter and target have the same best token
    loss_R: Tensor  # of each counted row, its terms weighted; else 0

    @property
    def total(self) -> Tensor:
        """The loss, summed over the counted rows; the hop's own weight is left out."""
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

    total: Tensor  # sum over hops, terms and counted rows, all weighted; differentiable
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
    def best_CB(self) -> Tensor:
        """The columns of the `BEST` most likely tokens, the best first."""
        count = min(BEST, self.logits_CV.shape[-1])
        return self.logits_CV.topk(count).indices

    @cached_property
    def best_softmax_CB(self) -> Tensor:
        """The probabilities of the `BEST` most likely tokens."""
        return self.softmax_CV.gather(1, self.best_CB)


def cross_entropy(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Cross-entropy with the target's distribution (EAGLE, L_cls): [C]."""
    product_CV = target.softmax_CV[row_C] * draft.log_softmax_CV
    return -product_CV.sum(-1)


def top_k(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Cross-entropy over the target's `BEST` most likely tokens: [C].

    Not renormalized (HASS, section 3.1).
    """
    log_draft_CB = draft.log_softmax_CV.gather(1, target.best_CB[row_C])
    product_CB = target.best_softmax_CB[row_C] * log_draft_CB
    return -product_CB.sum(-1)


def l1(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """L1 distance of the two distributions (ViSpec, official code): [C]."""
    difference_CV = draft.softmax_CV - target.softmax_CV[row_C]
    return difference_CV.abs().sum(-1)


def list_mle(draft: Logits, target: Logits, row_C: Tensor) -> Tensor:
    """Negative log-likelihood of the target's order of its `BEST` tokens: [C].

    ListMLE, as in the official code of ViSpec.
    """
    score_CB = draft.logits_CV.gather(1, target.best_CB[row_C])
    reversed_CB = score_CB.flip(-1)
    tail_CB = reversed_CB.logcumsumexp(-1).flip(-1)
    return (tail_CB - score_CB).sum(-1)


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
        """Scale the remembered gradients by the gradient of the scalar."""
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
        # `confidence` needs no column: `LossChunk.covered_U` stands for the tokens without one.
        without_L = torch.tensor([name == "confidence" for name in names])
        return cls(names, place(weight_L, device), place(without_L, device))


@dataclass(frozen=True)
class HopRows:
    """The N rows of a chunk that count at a hop, on the drafter's device."""

    index_N: Tensor  # the row's index among all rows
    unique_N: Tensor  # the index of its target token among the chunk's U tokens
    last_N: Tensor  # the id of the token before the guess


@dataclass(frozen=True)
class LossChunk:
    """Adjacent rows, and the target's logits of all tokens that any hop of them needs.

    The tokens of neighbouring rows and hops overlap; each is computed once.
    """

    rows: TargetRows
    first: int  # the chunk's first row
    unique_HC: Tensor  # index of each hop's token among the U tokens below
    hidden_UD: Tensor
    middle_UD: Tensor | None
    target: Logits  # float32, U rows; over the draft vocabulary if there is one
    covered_U: Tensor  # the target's probability of the tokens with a column, together
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
        token_U, unique_HC = torch.unique(token_HC, return_inverse=True)
        token_U = place(token_U, rows.hidden_TD.device)
        hidden_UD = rows.hidden_TD[token_U]
        logits_UV = F.linear(hidden_UD, lm_head_VD).float()
        best_U = logits_UV.argmax(-1)
        covered_U = logits_UV.new_ones(len(logits_UV))
        if vocabulary_K is not None:
            logits_UK = logits_UV[:, vocabulary_K]
            lse_U = logits_UV.logsumexp(-1)
            log_covered_U = logits_UK.logsumexp(-1) - lse_U
            covered_U = log_covered_U.exp()
            column_U, has_column_U = _columns(best_U, vocabulary_K)
            best_U = torch.where(has_column_U, column_U, -1)
            logits_UV = logits_UK
        middle_UD = None if rows.middle_TD is None else rows.middle_TD[token_U]
        return cls(
            rows,
            chunk.start,
            unique_HC=unique_HC,
            hidden_UD=hidden_UD,
            middle_UD=middle_UD,
            target=Logits(logits_UV),
            covered_U=covered_U,
            best_U=best_U,
        )

    def rows_at(self, hop: int, counts_R: Tensor) -> HopRows:
        """The rows of this chunk that count at a hop; `counts_R` (bool) marks no others."""
        row_N = counts_R.nonzero()[:, 0]
        unique_N = self.unique_HC[hop, row_N - self.first]
        last_N = self.rows.ids_at(row_N, hop)
        device = self.hidden_UD.device
        return HopRows(*place_all([row_N, unique_N, last_N], device))

    def hop_losses(
        self,
        names: Sequence[str],
        unique_N: Tensor,
        estimate_ND: Tensor,
        draft_NV: Tensor,
        confidence_N: Tensor | None,
    ) -> Tensor:
        """The named terms of one hop against the chunk's tokens `unique_N`: [N, L].

        `draft_NV` are the logits of the estimates; `confidence_N` are the logits of the
        chance that a guess is accepted.
        """
        draft = Logits(draft_NV)
        width = self.hidden_UD.shape[1]
        losses = []
        for name in names:
            if name == "regression":
                state_ND = estimate_ND[:, :width]
                loss_N = regression(state_ND, self.hidden_UD[unique_N])
            elif name == "middle":
                assert self.middle_UD is not None, "this drafter has no middle state"
                middle_ND = estimate_ND[:, width:]
                loss_N = regression(middle_ND, self.middle_UD[unique_N])
            elif name == "confidence":
                assert confidence_N is not None, "this drafter has no confidence head"
                loss_N = self._confidence_loss(draft, confidence_N, unique_N)
            else:
                loss_N = TERMS[name](draft, self.target, unique_N)
            losses.append(loss_N)
        return torch.stack(losses, dim=-1)

    def _confidence_loss(
        self, draft: Logits, confidence_N: Tensor, unique_N: Tensor
    ) -> Tensor:
        """Cross-entropy with the chance that a sampled guess is accepted (DSpark): [N]."""
        covered_N1 = self.covered_U[unique_N, None]
        target_NV = self.target.softmax_CV[unique_N] * covered_N1
        guess_NV = draft.softmax_CV.detach()
        chance_N = guess_NV.minimum(target_NV).sum(-1)
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
    estimate_gradient_ND, *parameter_gradients = torch.autograd.grad(
        loss_NL, inputs, weight_NL, allow_unused=True
    )
    gradients[hop][index_N] = estimate_gradient_ND
    hops = len(gradients) - len(parameter_gradients)
    parameter_totals = gradients[hops:]
    for total, gradient in zip(parameter_totals, parameter_gradients, strict=True):
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
    draft_logits: DraftLogits,
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
        draft_logits: Computes the drafter's logits.
        lm_head_VD: The target's LM head.
        weights: By the name of a term (`NAMES`) its weight; 0: it is not computed.
        confidence: Computes logits [N] of the chance that a guess is accepted, from the same
            arguments as `draft_logits`; None: the drafter has no such head.
        parameters: What `draft_logits` and `confidence` train.
        decay: Hop n weighs `decay` ** n.
        pace: Above 0, hops weigh in addition as in `pace_weights`, with this smoothing.
        keep_top: Above 0, a row counts up to, and without, the first hop whose target token
            is not among the drafter's `keep_top` best (HiViS, section 3.2).
        vocabulary_K: For each column of the logits its token id in the target's vocabulary,
            ascending; None: every token has a column. The target's distribution is
            renormalized over these tokens. A row whose target token has no column never
            agrees, and has no loss but `confidence`; with `keep_top` it does not count.
        chunk_rows: Rows at a time; None: as many as `chunk_bytes` allows.

    Returns:
        The differentiable total, and the result of each hop.

    Raises:
        KeyError: A term is unknown.
    """
    device = estimates[0].device
    sum_dtype = torch.promote_types(lm_head_VD.dtype, torch.float32)
    objective = Objective.of(weights, sum_dtype, device)
    inputs = [*estimates, *parameters]
    takes_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    gradients = [torch.zeros_like(x) for x in inputs] if takes_gradients else []
    hops, row_count = rows.valid_HR.shape
    shape = (hops, row_count, len(objective.names))
    loss_HRL = torch.zeros(shape, dtype=sum_dtype, device=device)
    counted_HR = torch.zeros(hops, row_count, dtype=torch.bool, device=device)
    agree_HR = torch.zeros_like(counted_HR)

    row_bytes = 4 * len(lm_head_VD)
    chunk_size = chunk_rows or max(1, chunk_bytes(device) // row_bytes)
    decays = [decay**hop for hop in range(hops)]
    decay_H = place(torch.tensor(decays, dtype=sum_dtype), device)
    hop_weight_HR = decay_H[:, None].repeat(1, row_count)
    if pace:
        chance_HR = _response_chances(
            estimates, rows, draft_logits, vocabulary_K, chunk_size
        )
        valid_HR = place(rows.valid_HR, device)
        hop_weight_HR *= pace_weights(chance_HR.to(sum_dtype), valid_HR, pace)

    # The logits of a chunk, [chunk, V], are the largest tensors of training. The gradients of
    # the losses are taken here, in the forward pass, so that the drafter's logits of a hop are
    # freed before the next hop; `_WithGradient` hands the gradients to autograd.
    for start in range(0, row_count, chunk_size):
        chunk_slice = slice(start, start + chunk_size)
        chunk = LossChunk.of(rows, chunk_slice, lm_head_VD, vocabulary_K)
        counts_R = rows.valid_HR.new_zeros(row_count)
        counts_R[chunk_slice] = True
        for hop, estimate_RD in enumerate(estimates):
            counts_R = counts_R & rows.valid_HR[hop]
            hop_rows = chunk.rows_at(hop, counts_R)
            index_N = hop_rows.index_N
            unique_N = hop_rows.unique_N
            estimate_ND = estimate_RD.detach()[index_N].requires_grad_(takes_gradients)
            with torch.set_grad_enabled(takes_gradients):
                draft_NV = draft_logits(estimate_ND, hop_rows.last_N)
                confidence_N = confidence(estimate_ND, hop_rows.last_N)
                loss_NL = chunk.hop_losses(
                    objective.names, unique_N, estimate_ND, draft_NV, confidence_N
                )

            draft_NV = draft_NV.detach()
            best_N = chunk.best_U[unique_N]
            kept_N = _kept(draft_NV, best_N, keep_top)
            has_column_N1 = (best_N >= 0)[:, None]
            has_loss_NL = has_column_N1 | objective.has_loss_without_column_L
            has_loss_NL = kept_N[:, None] & has_loss_NL
            counted_NL = loss_NL.detach() * has_loss_NL
            loss_HRL[hop, index_N] = counted_NL.to(sum_dtype)
            counted_HR[hop, index_N] = kept_N
            draft_best_N = draft_NV.argmax(-1)
            agree_HR[hop, index_N] = draft_best_N == best_N
            if takes_gradients:
                hop_weight_N1 = hop_weight_HR[hop, index_N, None]
                weight_NL = hop_weight_N1 * objective.weight_L * has_loss_NL
                weight_NL = weight_NL.to(loss_NL.dtype)
                hop_inputs = [estimate_ND, *parameters]
                accumulate_gradients(
                    gradients, hop, index_N, loss_NL, weight_NL, hop_inputs
                )
            if keep_top and hop + 1 < hops:
                # On a GPU `place` waits for the logits; rows that no longer count cost more.
                kept_N = place(kept_N, counts_R.device)
                # The n-th row that counts so far gets the n-th value of `kept_N`.
                counts_R = counts_R.masked_scatter(counts_R, kept_N)

    weighted_HR = loss_HRL @ objective.weight_L
    total = (weighted_HR * hop_weight_HR).sum()
    if takes_gradients:
        total = _WithGradient.apply(total, gradients, *inputs)  # type: ignore[no-untyped-call]
    scores = []
    for hop in range(hops):
        sums_L = loss_HRL[hop].sum(0)
        sums = dict(zip(objective.names, sums_L, strict=True))
        hop_score = Score(sums, counted_HR[hop], agree_HR[hop], weighted_HR[hop])
        scores.append(hop_score)
    return Scores(total, scores)


def _kept(draft_NV: Tensor, best_N: Tensor, keep_top: int) -> Tensor:
    """Rows whose target token is among the drafter's `keep_top` best; 0: all of them. [N]"""
    if not keep_top:
        return torch.ones_like(best_N, dtype=torch.bool)
    count = min(keep_top, draft_NV.shape[-1])
    best_NB = draft_NV.topk(count).indices
    return (best_NB == best_N[:, None]).any(-1)


def _columns(ids_N: Tensor, vocabulary_K: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of tokens in an ascending draft vocabulary, and whether they have one."""
    last = len(vocabulary_K) - 1
    column_N = torch.searchsorted(vocabulary_K, ids_N).clamp(max=last)
    return column_N, vocabulary_K[column_N] == ids_N


@torch.no_grad()
def _response_chances(
    estimates: Sequence[Tensor],
    rows: TargetRows,
    draft_logits: DraftLogits,
    vocabulary_K: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """The drafter's probabilities of the response's own tokens; 0 without a column: [H, R]."""
    device = estimates[0].device
    chance_HR = torch.zeros(rows.valid_HR.shape, device=device)
    row_R = torch.arange(len(rows.token_R), device=rows.token_R.device)
    for hop, estimate_RD in enumerate(estimates):
        for row_N in torch.split(row_R, chunk_size):
            last_N = rows.ids_at(row_N, hop)
            response_N = rows.ids_at(row_N, hop + 1)
            index_N, last_N, response_N = place_all([row_N, last_N, response_N], device)
            draft_NV = draft_logits(estimate_RD[index_N], last_N)
            softmax_NV = draft_NV.softmax(-1)
            column_N = response_N
            if vocabulary_K is not None:
                column_N, has_column_N = _columns(response_N, vocabulary_K)
                softmax_NV = softmax_NV * has_column_N[:, None]
            chance_N1 = softmax_NV.gather(1, column_N[:, None])
            chance_HR[hop, index_N] = chance_N1[:, 0].to(chance_HR.dtype)
    return chance_HR
