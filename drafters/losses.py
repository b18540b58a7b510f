"""Losses between drafter and target, on supervised rows alone and never on a whole [rows, vocabulary] block.

Logits of both sides are made in chunks of rows, used, and made again in the backward pass; the
gradient is that of the naive loss. Every term is a sum over rows; the trainer divides by the number
of rows over all ranks.

Shapes: R rows, C rows of one chunk, D hidden, V vocabulary, K best tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20
"""Upper bound of one float32 block of logits."""


@dataclass(frozen=True)
class Rows:
    """The rows of one hop that are scored: what the drafter made, what the target had, which count."""

    state_RD: Tensor
    target_RD: Tensor  # the target's hidden state at the position that `state` estimates
    valid_R: Tensor  # bool: all tokens of the hop are response tokens
    hop: int


@dataclass(frozen=True)
class Score:
    """What one hop made of its rows."""

    total: Tensor  # weighted sum of the terms over the counted rows; differentiable
    terms: dict[str, Tensor]  # each term's unweighted sum over the counted rows, detached
    count_R: Tensor  # bool: rows that counted
    kept_R: Tensor  # bool: those of them that may count at the next hop
    agree_R: Tensor  # bool: drafter and target have the same best token
    loss_R: Tensor  # weighted loss of each row, detached

    @property
    def sums(self) -> Tensor:
        """Loss, rows that agree, rows that count: float64 [3], detached."""
        agree = (self.agree_R & self.count_R).sum()
        return torch.stack([self.total.detach().double(), agree.double(), self.count_R.sum().double()])


def regression(state_CD: Tensor, target_CD: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) between hidden states, mean over the width (EAGLE eq. of L_reg): [C]."""
    return F.smooth_l1_loss(state_CD.float(), target_CD.float(), reduction="none").mean(-1)


def cross_entropy(draft_CV: Tensor, target_CV: Tensor) -> Tensor:
    """Cross-entropy against the target's distribution (EAGLE, L_cls): [C]."""
    return -(target_CV.softmax(-1) * draft_CV.log_softmax(-1)).sum(-1)


def top_k(draft_CV: Tensor, target_CV: Tensor, k: int = 10) -> Tensor:
    """Cross-entropy over the target's k most likely tokens, not renormalised (HASS section 3.1): [C]."""
    best_CK = target_CV.topk(min(k, target_CV.shape[-1])).indices
    return -(target_CV.softmax(-1).gather(1, best_CK) * draft_CV.log_softmax(-1).gather(1, best_CK)).sum(-1)


def l1(draft_CV: Tensor, target_CV: Tensor) -> Tensor:
    """L1 distance of the two distributions (ViSpec, official code): [C]."""
    return (draft_CV.softmax(-1) - target_CV.softmax(-1)).abs().sum(-1)


def list_mle(draft_CV: Tensor, target_CV: Tensor, k: int = 10) -> Tensor:
    """Negative log-likelihood of the target's order of its k best tokens (ViSpec, official code): [C]."""
    best_CK = target_CV.topk(min(k, target_CV.shape[-1])).indices
    score_CK = draft_CV.gather(1, best_CK)
    tail_CK = score_CK.flip(-1).logcumsumexp(-1).flip(-1)
    return (tail_CK - score_CK).sum(-1)


TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "top_k": top_k,
    "l1": l1,
    "list_mle": list_mle,
}
"""Terms on logits; `regression`, the one on states, is apart."""


def score(
    rows: Rows,
    logits: Callable[[Tensor, int], Tensor],
    lm_head_VD: Tensor,
    weights: Mapping[str, float],
    *,
    keep_top: int = 0,
    keep_failing: bool = False,
    vocabulary_K: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Score:
    """Score one hop: weighted losses and agreement of its rows.

    `logits(state_CD, hop)` makes the drafter's float32 logits. With `keep_top`, a row whose target token is
    not among the drafter's `keep_top` best does not count (HiViS section 3.3), or with `keep_failing` does so
    for the last time. With `vocabulary_K`, the target's ids of the columns of those logits, the target's
    distribution is renormalised over them, and a row whose target token has no column loses nothing and
    never agrees. KeyError on an unknown term.
    """
    if unknown := set(weights) - {*TERMS, "regression"}:
        raise KeyError(f"unknown loss {sorted(unknown)}; there are regression, {', '.join(TERMS)}")
    index = rows.valid_R.nonzero()[:, 0]
    state_ND, target_ND = rows.state_RD[index], rows.target_RD[index]
    chunk = chunk_rows or max(1, CHUNK_BYTES // (4 * lm_head_VD.shape[0]))
    names = [name for name, weight in weights.items() if weight]
    if vocabulary_K is not None:
        column_V = vocabulary_K.new_full((len(lm_head_VD),), -1)
        column_V[vocabulary_K] = torch.arange(len(vocabulary_K), device=vocabulary_K.device)

    def part(state_CD: Tensor, target_CD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        draft_CV = logits(state_CD, rows.hop)
        target_CV = F.linear(target_CD, lm_head_VD).float()
        best_C = target_CV.argmax(-1)
        if vocabulary_K is not None:
            best_C, target_CV = column_V[best_C], target_CV[:, vocabulary_K]
        if keep_top:
            kept_C = (draft_CV.topk(keep_top).indices == best_C[:, None]).any(-1)
        else:
            kept_C = torch.ones_like(best_C, dtype=torch.bool)
        losses = [
            regression(state_CD, target_CD) if name == "regression" else TERMS[name](draft_CV, target_CV)
            for name in names
        ]
        return torch.stack(losses) * (best_C >= 0), kept_C, draft_CV.argmax(-1) == best_C

    if len(index) <= chunk:
        parts = [part(state_ND, target_ND)]
    else:
        blocks = zip(torch.split(state_ND, chunk), torch.split(target_ND, chunk), strict=True)
        parts = [checkpoint(part, *block, use_reentrant=False) for block in blocks]
    loss_LN, kept_N, agree_N = (torch.cat(column, dim=-1) for column in zip(*parts, strict=True))

    weight_L = loss_LN.new_tensor([weights[name] for name in names])
    counted_N = torch.ones_like(kept_N) if keep_failing else kept_N
    counted_LN = loss_LN * counted_N
    sums_L = counted_LN.sum(-1)
    blank_R = torch.zeros_like(rows.valid_R)
    weighted_N = (counted_LN.detach() * weight_L[:, None]).sum(0)
    return Score(
        total=(sums_L * weight_L).sum(),
        terms=dict(zip(names, sums_L.detach(), strict=True)),
        count_R=blank_R.index_copy(0, index, counted_N),
        kept_R=blank_R.index_copy(0, index, kept_N),
        agree_R=blank_R.index_copy(0, index, agree_N),
        loss_R=weighted_N.new_zeros(len(rows.valid_R)).index_copy(0, index, weighted_N),
    )
