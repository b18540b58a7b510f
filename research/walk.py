"""The cycles in which greedy decoding with a chain takes a response, without decoding it.

The states of a response are in the store, so one training forward pass says which guesses are right after
every token. A walk over these takes the cycles that greedy decoding takes: each cycle begins after the token
with which the target corrects the one before. A guess is right if it is the target's most likely token after
the response so far.

Shapes: H hops, R supervised rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.training.unroll import unroll


@dataclass(frozen=True)
class Walk:
    """The cycles of a response."""

    calls: int
    accepted: int


def walk(right: Sequence[int]) -> Walk:
    """The walk over a response by the number of right guesses in a row after each of its tokens."""
    row, calls, accepted = 0, 0, 0
    while row < len(right):
        calls += 1
        accepted += right[row]
        row += right[row] + 1
    return Walk(calls, accepted)


@torch.no_grad()
def right_guesses(drafter: Drafter, batch: Batch, hops: int) -> Tensor:
    """How many guesses in a row are right after each supervised token: [R]."""
    scores = unroll(drafter, batch, Stage(name="walk", hops=hops)).scores
    right_HR = torch.stack([score.agree_R & score.count_R for score in scores])
    return right_HR.cumprod(0).sum(0)
