"""Epochs: every sample once, in a seeded order, in batches packed to a token budget.

The plan of an epoch is a list of batches that depends on the samples, the budget, the seed and
the epoch alone; ranks take turns along it. Where the batches do not divide among the ranks, the
largest are split until they do, so that every rank gets the same number of batches and no sample
is dropped or repeated; only when no batch has two samples left do some ranks end with an empty
batch. A state is the list of (token budget, ranks, steps) taken so far: the remaining samples are planned
again for any other budget and number of ranks.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.schema import Array, Feature, PackedSamples, content_hash
from vlmdistill.stores.store import Store

WINDOW = 4096  # samples sorted by length together: batches of like length, yet a different mix each epoch
# Batches read ahead, each by a thread: a disk is soon busy, requests mostly wait.
LOCAL_DEPTH = 2
REMOTE_DEPTH = 8
EpochPlan = list[Array]  # positions of samples, one array per batch


def cost(samples: pl.DataFrame, features: Collection[Feature]) -> Array:
    """Tokens of each sample that its batch is charged for, [n]: the rows of these features that are read."""
    where = {feature.where for feature in features}
    tokens = samples["text_tokens"].to_numpy().astype(np.int64)
    if "visual" in where:
        tokens = tokens + samples["visual_tokens"].to_numpy()
    if "span" in where:
        tokens = tokens + samples["spans"].list.len().to_numpy()
    charged: Array = np.maximum(tokens, 1)
    return charged


def plan(tokens: Array, budget: int, seed: int, epoch: int) -> EpochPlan:
    """Cut all samples into batches of at most `budget` tokens; a longer sample is a batch alone.

    `tokens` [n]: the cost of each sample, see `cost`.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(tokens))
    batches: EpochPlan = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        window = window[np.argsort(tokens[window], kind="stable")]
        ends = np.cumsum(tokens[window])
        first = 0
        while first < len(window):
            spent = ends[first - 1] if first else 0
            fitting = int(np.searchsorted(ends, spent + budget, side="right"))
            last = max(first + 1, fitting)
            batches.append(window[first:last])
            first = last
    return [batches[number] for number in rng.permutation(len(batches))]


def level(batches: Sequence[Array], world: int) -> EpochPlan:
    """Split the largest batches until their number divides by `world`."""
    leveled = [batch for batch in batches if len(batch)]
    while len(leveled) % world:
        numbers = range(len(leveled))
        largest = max(numbers, key=lambda number: (len(leveled[number]), number))
        batch = leveled[largest]
        half = len(batch) // 2
        if half:
            leveled[largest : largest + 1] = [batch[:half], batch[half:]]
        else:
            leveled.append(np.empty(0, np.int64))
    return leveled


def _rest(
    tokens: Array,
    history: Sequence[tuple[int, int, int]],
    budget: int,
    seed: int,
    epoch: int,
) -> tuple[EpochPlan, Fraction]:
    """The batches of an epoch that remain after a history, cut for `budget`; and their share of the epoch."""
    packed_for = history[0][0] if history else budget
    batches = plan(tokens, packed_for, seed, epoch)
    share = Fraction(1)
    for history_budget, ranks, steps in [*history, (budget, 1, 0)]:
        if history_budget != packed_for:
            rows = np.sort(np.concatenate([np.empty(0, np.int64), *batches]))
            packed = plan(tokens[rows], history_budget, seed, epoch)
            batches = [rows[batch] for batch in packed]
            packed_for = history_budget
        if steps:
            batches = level(batches, ranks)
            taken = min(ranks * steps, len(batches))
            share *= 1 - Fraction(taken, max(1, len(batches)))
            batches = batches[taken:]
    return batches, share


class Epoch(Iterator[PackedSamples]):
    """One rank's batches of an epoch, with the `features` asked for (all when None); threads read ahead.

    `token_budget` bounds the rows of a batch: text tokens, and visual tokens or spans where such features
    are asked for. The arrays of a batch are overwritten once `keep` further batches were taken, or by the
    next epoch. `start_state` is the `state` of an earlier iterator. StoreError when it belongs to other
    samples, and when data is damaged.
    """

    def __init__(
        self,
        store: Store,
        features: Collection[str | Feature] | None = None,
        *,
        view: str | None = None,
        keys: Collection[str] | None = None,
        token_budget: int,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world: int = 1,
        start_state: Mapping[str, Any] | None = None,
        keep: int = 1,
    ) -> None:
        if not isinstance(token_budget, int) or token_budget < 1:
            raise StoreError(f"tokens={token_budget!r}: a batch holds 1 or more")
        if not 0 <= rank < world:
            raise StoreError(
                f"rank={rank}: the ranks of world={world} count from 0 to {world - 1}"
            )
        self._store = store
        self._features = store.choose(features)
        self._rows = select(store, view, keys)
        # Many records at once of a URL: each batch would fetch its own, one after the other.
        for source, lines in store.lines(self._rows, self._features):
            for _ in source.backend.map(source.commit, lines["shard"].unique()):
                pass
        tokens = cost(self._rows, self._features)
        keys_in_order = self._rows["key"].to_list()
        self._identity = content_hash([keys_in_order, tokens.tolist(), seed, epoch])
        self._history: list[tuple[int, int, int]] = []  # budget, ranks and steps
        if start_state is not None:
            self._history = self._history_of(start_state)
        batches, share = _rest(tokens, self._history, token_budget, seed, epoch)
        self._budget = token_budget
        self._world = world
        self._steps = 0
        self._batches = level(batches, world)[rank::world]
        self.epoch_batches = self._epoch_batches(share)
        """Batches of one rank in the whole epoch, as if its ranks and budget had always been the present."""
        self._next = 0
        self._depth = LOCAL_DEPTH if store.backend.is_local else REMOTE_DEPTH
        self._buffers: list[dict[Feature, Array]] = []
        for _ in range(self._depth + keep):
            self._buffers.append(store.buffers.pop() if store.buffers else {})
        self._ahead: deque[Future[PackedSamples]] = deque()
        self._pool = ThreadPoolExecutor(
            self._depth, thread_name_prefix="vlmdistill-read"
        )

    def _history_of(self, state: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        """The history of a saved state; StoreError when the state is of another epoch."""
        if state.get("identity") != self._identity:
            raise StoreError(
                "this epoch cannot be continued: its samples, seed or number differ from the "
                "saved state. Train on a view: later writes do not change it"
            )
        return [
            (int(budget), int(ranks), int(steps))
            for budget, ranks, steps in state["history"]
        ]

    def _epoch_batches(self, share: Fraction) -> int | float:
        """The batches of the whole epoch, of which `share` remains."""
        whole = Fraction(sum(steps for _, _, steps in self._history))
        if share:
            whole = len(self._batches) / share
        return int(whole) if whole.denominator == 1 else float(whole)

    def __len__(self) -> int:
        """Batches still to come: the same on every rank."""
        return len(self._batches) - self._steps

    def __next__(self) -> PackedSamples:
        while self._next < len(self._batches) and len(self._ahead) <= self._depth:
            buffers = self._buffers[self._next % len(self._buffers)]
            batch = self._batches[self._next]
            self._ahead.append(self._pool.submit(self._read, batch, buffers))
            self._next += 1
        if not self._ahead:
            self.close()
            raise StopIteration
        samples = self._ahead.popleft().result()
        self._steps += 1
        return samples

    def _read(self, batch: Array, buffers: dict[Feature, Array]) -> PackedSamples:
        lines = self._rows[batch.tolist()].to_dicts()
        return self._store.read_batch(lines, self._features, buffers)

    @property
    def state(self) -> dict[str, Any]:
        """The `start_state` that continues after the batches handed out so far, on any ranks and budget.

        All ranks must have taken the same number of batches; their states are then equal.
        """
        steps = [(self._budget, self._world, self._steps)] if self._steps else []
        return {"identity": self._identity, "history": [*self._history, *steps]}

    def close(self) -> None:
        """Stop reading ahead, and leave the buffers to the next epoch."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._store.buffers += self._buffers
        self._buffers = []


def select(store: Store, view: str | None, keys: Collection[str] | None) -> Any:
    """The index rows of a view, of some keys, or of both; StoreError when a key is not there."""
    import polars as pl

    rows = store.view(view)
    if keys is not None:
        wanted = pl.Series("key", sorted(set(keys)), pl.String)
        rows = rows.filter(pl.col("key").is_in(wanted.implode()))
        if len(rows) < len(wanted):
            missing = min(set(wanted) - set(rows["key"]))
            place = f"in view {view} of {store.path}" if view else f"in {store.path}"
            raise StoreError(f"there is no sample '{missing}' {place}")
    return rows
