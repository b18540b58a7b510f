"""Epochs: every sample once, in a seeded order, in batches packed to a token budget.

The plan of an epoch is a list of batches that depends on the samples, the budget, the seed and
the epoch alone; ranks take turns along it. Where the batches do not divide among the ranks, the
largest are split until they do, so that every rank gets the same number of batches and no sample
is dropped or repeated; only when no batch has two samples left do some ranks end with an empty
batch. A state is the list of (ranks, steps) taken so far: what remains is planned again for any
other number of ranks.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.schema import Array, Feature, Sample, content_hash
from vlmdistill.stores.store import Store

WINDOW = 4096  # samples sorted by length together: batches of like length, yet a different mix each epoch
NEAR, FAR = 2, 8  # threads that read ahead: a disk is soon busy, requests mostly wait
Plan = list[Array]  # positions of samples, one array per batch


def plan(tokens: Array, budget: int, seed: int, epoch: int) -> Plan:
    """Cut all samples into batches of at most `budget` tokens; a longer sample is a batch alone.

    `tokens` [n]: the cost of each sample.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(tokens))
    batches: Plan = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        window = window[np.argsort(tokens[window], kind="stable")]
        ends = np.cumsum(tokens[window])
        first = 0
        while first < len(window):
            spent = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, spent + budget, side="right")))
            batches.append(window[first:last])
            first = last
    return [batches[i] for i in rng.permutation(len(batches))]


def level(batches: Sequence[Array], world: int) -> Plan:
    """Split the largest batches until their number divides by `world`."""
    even = [batch for batch in batches if len(batch)]
    while len(even) % world:
        large = max(range(len(even)), key=lambda i: (len(even[i]), i))
        half = len(even[large]) // 2
        if half:
            even[large : large + 1] = [even[large][:half], even[large][half:]]
        else:
            even.append(np.empty(0, np.int64))
    return even


class Epoch(Iterator[list[Sample]]):
    """The batches of one rank; threads read ahead. Use `epoch` to make one."""

    def __init__(
        self,
        store: Store,
        features: Collection[Feature] | None,
        *,
        view: str | None = None,
        keys: Collection[str] | None = None,
        token_budget: int,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world: int = 1,
        start_state: Mapping[str, Any] | None = None,
        prefetch: int = 2,
    ) -> None:
        if token_budget < 1 or not 0 <= rank < world:
            given = f"{token_budget}, {rank}, {world}"
            raise StoreError(f"an epoch needs token_budget >= 1 and 0 <= rank < world, not {given}")
        self._store = store
        self._features = store.layout.choose(features)
        self._rows = select(store, view, keys)
        tokens = self._cost()
        about = [self._rows["key"].to_list(), tokens.tolist(), token_budget, seed, epoch]
        self._identity = content_hash(about)
        self._history: list[tuple[int, int]] = []
        batches = plan(tokens, token_budget, seed, epoch)
        if start_state is not None:
            if start_state.get("identity") != self._identity:
                raise StoreError(
                    "this epoch cannot be continued: its samples, token budget, seed or number differ from "
                    "those of the saved state. Train on a view: later writes do not change it"
                )
            self._history = [(int(ranks), int(steps)) for ranks, steps in start_state["history"]]
            for ranks, steps in self._history:
                batches = level(batches, ranks)[ranks * steps :]
        self._world = world
        self._steps = 0
        self._mine = level(batches, world)[rank::world]
        self._next = 0
        self._depth = max(prefetch, 0 if store.place.here else FAR)
        self._ahead: deque[Future[list[Sample]]] = deque()
        threads = NEAR if store.place.here else FAR
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="vlmdistill-read")

    def _cost(self) -> Array:
        """Tokens of each sample that its batch is charged for: the rows that will be read."""
        places = {feature.where for feature in self._features}
        tokens = self._rows["text_tokens"].to_numpy().astype(np.int64)
        if "visual" in places:
            tokens = tokens + self._rows["visual_tokens"].to_numpy()
        if "span" in places:
            tokens = tokens + self._rows["spans"].list.len().to_numpy()
        cost: Array = np.maximum(tokens, 1)
        return cost

    def __len__(self) -> int:
        """Batches still to come: the same on every rank."""
        return len(self._mine) - self._steps

    def __next__(self) -> list[Sample]:
        while self._next < len(self._mine) and len(self._ahead) <= self._depth:
            self._ahead.append(self._pool.submit(self._read, self._mine[self._next]))
            self._next += 1
        if not self._ahead:
            self.close()
            raise StopIteration
        batch = self._ahead.popleft().result()
        self._steps += 1
        return batch

    def _read(self, batch: Array) -> list[Sample]:
        return self._store.read_batch(self._rows[batch.tolist()].to_dicts(), self._features)

    @property
    def state(self) -> dict[str, Any]:
        """What `start_state` takes to continue after the batches handed out so far, on any ranks.

        All ranks must have taken the same number of batches; their states are then equal.
        """
        steps = [(self._world, self._steps)] if self._steps else []
        return {"identity": self._identity, "history": [*self._history, *steps]}

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def select(store: Store, view: str | None, keys: Collection[str] | None) -> Any:
    """The index rows of a view, of some keys, or of both; StoreError when a key is not there."""
    import polars as pl

    rows = store.view(view)
    if keys is not None:
        wanted = pl.Series("key", sorted(set(keys)), pl.String)
        rows = rows.filter(pl.col("key").is_in(wanted.implode()))
        if len(rows) < len(wanted):
            missing = min(set(wanted) - set(rows["key"]))
            raise StoreError(f"{store.path} has no sample '{missing}'" + (f" in view {view}" if view else ""))
    return rows


def epoch(
    store: Store,
    features: Collection[Feature] | None = None,
    *,
    view: str | None = None,
    keys: Collection[str] | None = None,
    token_budget: int,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world: int = 1,
    start_state: Mapping[str, Any] | None = None,
) -> Epoch:
    """Iterate over one rank's batches of an epoch, each a list of samples with `features`.

    `token_budget` bounds the rows of a batch: text tokens, and visual tokens or spans where such
    features are asked for. The rows of a batch lie side by side in memory that is used again once
    nothing refers to it: `tensors.packed` joins them without a copy. `start_state` is the `state`
    of an earlier iterator. StoreError when it belongs to other samples, and whenever data are damaged.
    """
    return Epoch(
        store,
        features,
        view=view,
        keys=keys,
        token_budget=token_budget,
        seed=seed,
        epoch=epoch,
        rank=rank,
        world=world,
        start_state=start_state,
    )
