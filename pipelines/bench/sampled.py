"""What a sampled response tells of the distribution that it is from.

Each token is one draw from the target's distribution p at that place. Summed over a response, the difference
between what was drawn and its mean is a martingale, whose variance is the sum of the variances; `audit.py`
compares the two.

Shapes: N tokens, V vocabulary, R ranks.
"""

import secrets
from typing import Final, get_args

import torch
from torch import Tensor

from vlmdistill.pipelines.bench.records import Rank

RARE: Final = 0.02  # probability of a token up to which it is rare
SEED_BITS: Final = 53
"""Of a seed that is drawn: a server may read the numbers of a request as float64."""
RANKS: Final[tuple[Rank, ...]] = get_args(Rank)


def prompt_seed(seed: int | None, number: int) -> int:
    """The seed with which every decoder samples a response to prompt `number` of an evaluation.

    Without a `seed`, one that no drafter can guess: it would draft what the same noise draws.
    """
    if seed is None:
        return secrets.randbits(SEED_BITS)
    return seed * 1_000_003 + number


def surprise(log_NV: Tensor, ids_N: Tensor) -> Tensor:
    """The sum of -log p(token) less its mean, the entropy of p, and the variance of that sum: float64 [2]."""
    share_NV = log_NV.exp()
    entropy_N = -torch.special.xlogy(share_NV, share_NV).sum(-1)
    square_N = (share_NV * log_NV.clamp(min=-1e3).square()).sum(-1)
    variance_N = (square_N - entropy_N.square()).clamp(min=0)
    log_N = log_NV.gather(-1, ids_N[:, None])[:, 0]
    surprise_N = -log_N - entropy_N
    return torch.stack([surprise_N.sum(), variance_N.sum()])


def ranks(log_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Tokens of each rank, as many as are expected, and the variance: float64 [R, 3].

    Tokens of the same probability have the same rank.
    """
    share_NV = log_NV.exp()
    first_NV = share_NV == share_NV.amax(-1, keepdim=True)
    rest_NV = share_NV.masked_fill(first_NV, 0)
    highest_rest_N1 = rest_NV.amax(-1, keepdim=True)
    second_NV = ~first_NV & (rest_NV == highest_rest_N1)
    later_NV = ~first_NV & ~second_NV
    rare_NV = share_NV <= RARE
    rows = []
    for of_rank_NV in (first_NV, second_NV, later_NV, rare_NV):
        chance_N = (share_NV * of_rank_NV).sum(-1).clamp(max=1)
        count = of_rank_NV.gather(-1, ids_N[:, None]).sum()
        variance = (chance_N * (1 - chance_N)).sum()
        rows.append(torch.stack([count.double(), chance_N.sum(), variance]))
    return torch.stack(rows)
