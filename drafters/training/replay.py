"""Draft again over stored responses: where would the target have rejected?

The states of a response are in the store, so that one training forward pass says which guesses are right
after every token, and a walk over these takes the cycles that greedy decoding takes: each one begins after
the guess that the target has corrected. No target is needed, and no token is generated (Draft-OPD, section 3,
replays in the same way from where verification rejected). A guess is right if it is the target's most likely
token after the response so far.

Shapes: H hops, R supervised rows, T text tokens.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.drafters.training.unroll import supervised, unroll
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import PackedSamples, content_hash
from vlmdistill.stores.store import Store

REJECTED, DEPTHS = "rejected", "rejected_depths"
RUN = ".replay"  # ends the name of a replay among the statistics of a store


@dataclass(frozen=True)
class Walk:
    """The cycles of drafting one response again."""

    calls: int
    accepted: int
    rejected: tuple[
        int, ...
    ]  # the rows at which the cycles began that the target cut short
    depths: tuple[int, ...]  # how many guesses it accepted in each

    @property
    def tau(self) -> float:
        """Tokens for each call."""
        return (self.calls + self.accepted) / max(1, self.calls)


def walk(right: Sequence[int], able: Sequence[int], token: Sequence[int] = ()) -> Walk:
    """The walk over a response by the right guesses after each token, of those that it is able to check.

    `token` is where each of these is in the sample; of several responses, each begins with a cycle.
    """
    token = token or range(len(right))
    at, calls, accepted = 0, 0, 0
    rejected, depths = list[int](), list[int]()
    while at < len(right):
        if right[at] < able[at]:
            rejected.append(at)
            depths.append(right[at])
        calls, accepted = calls + 1, accepted + right[at]
        at = bisect_left(token, token[at] + right[at] + 1)
    return Walk(calls, accepted, tuple(rejected), tuple(depths))


@torch.no_grad()
def right_guesses(drafter: Drafter, batch: Batch, hops: int) -> tuple[Tensor, Tensor]:
    """After each supervised token, the guesses in a row that are right, and those that have a token: [R]."""
    scores = unroll(drafter, batch, Stage(name="replay", hops=hops)).scores
    count_HR = torch.stack([one.count_R for one in scores])
    agree_HR = torch.stack([one.agree_R for one in scores]) & count_HR
    return agree_HR.cumprod(0).sum(0), count_HR.cumprod(0).sum(0)


def chain_of(drafter: Drafter) -> int:
    """How many tokens the drafter guesses in a row."""
    return min(drafter.tree.depth + 1, drafter.config.max_hops or 2**31)


def replay(
    drafter: Drafter, store: Store, keys: Sequence[str], batch_tokens: int = 4096
) -> Iterator[tuple[str, Walk]]:
    """Draft the responses of some samples again; the rows of a walk are text tokens of the sample."""
    hops, like = chain_of(drafter), drafter.lm_head_VD
    reader = Epoch(
        store, drafter.config.needs(store.info), keys=keys, token_budget=batch_tokens
    )
    for samples in reader:
        batch = as_batch(samples, store.provenance.dtype)
        guesses = right_guesses(drafter, batch.to(like.device, like.dtype), hops)
        right_R, able_R = torch.stack(guesses).cpu()  # a wait for a GPU
        token_R = supervised(batch).nonzero()[:, 0]
        segment_R, first = batch.segment_T[token_R], 0
        for number, key in enumerate(samples.keys):
            mine_R = segment_R == number
            token = (token_R[mine_R] - first).tolist()
            found = walk(right_R[mine_R].tolist(), able_R[mine_R].tolist(), token)
            yield (
                key,
                Walk(
                    found.calls,
                    found.accepted,
                    tuple(token[row] for row in found.rejected),
                    found.depths,
                ),
            )
            first += int(samples.text_tokens_B[number])


def table(walks: Iterable[tuple[str, Walk]]) -> dict[str, list[Any]]:
    """The columns of `Store.write_stats`: views select by `replayed_tau`, training reads the others."""
    found = list(walks)
    return {
        "key": [key for key, _ in found],
        "replayed_tau": [one.tau for _, one in found],
        REJECTED: [list(one.rejected) for _, one in found],
        DEPTHS: [list(one.depths) for _, one in found],
    }


class Failures:
    """Where drafting has failed: of the samples of a store, by its latest replay of each."""

    def __init__(self, store: Store, keys: Collection[str]) -> None:
        """TrainingError if no replay is in the store."""
        if REJECTED not in store.index.columns:
            raise TrainingError(
                f"anchors=failed needs a replay, and {store.path} has none: run `vlmdistill replay DRAFTER`"
            )
        rows = store.index.select("key", REJECTED, DEPTHS).filter(
            pl.col("key").is_in(list(keys))
        )
        rows = rows.drop_nulls()
        self._of: Mapping[str, tuple[list[int], list[int]]] = {
            key: (begins, depths) for key, begins, depths in rows.iter_rows()
        }
        self.hash = content_hash([sorted(self._of.items())])

    def mark(self, samples: PackedSamples, hops: int) -> Tensor:
        """The tokens to train after with so many hops: bool [T]; all of a sample without a replay.

        A guess that was rejected deeper than there are hops is the last one of a row that begins later.
        """
        failed_T = torch.zeros(int(samples.text_tokens_B.sum()), dtype=torch.bool)
        first = 0
        for key, length in zip(
            samples.keys, samples.text_tokens_B.tolist(), strict=True
        ):
            if key in self._of:
                begins, depths = (
                    torch.tensor(one, dtype=torch.long) for one in self._of[key]
                )
                failed_T[first + begins + (depths - (hops - 1)).clamp(min=0)] = True
            else:
                failed_T[first : first + length] = True
            first += length
        return failed_T
