"""Packed batches of a store as torch tensors, alone or behind a `DataLoader`."""

from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field, fields

from torch.utils.data import IterableDataset, get_worker_info

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store


def iterate_batches(
    store: Store,
    *,
    tokens: int = 4096,
    features: Collection[str | Feature] | None = None,
    view: str | None = None,
    keys: Collection[str] | None = None,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Iterate over one epoch of packed batches: every sample once, in a seeded order, without padding.

    Samples of similar length share a batch. Threads read ahead, and every byte is checked against its
    checksum.

    Args:
        store: An open store.
        tokens: Maximum size of a batch: its text tokens, plus its visual tokens if a feature of them is read.
            A longer sample is a batch of its own.
        features: The features to read; all features of the store by default.
        view: Name of a view of the store: read only the samples that it keeps.
        keys: Read only the samples with these keys.
        seed: Seed of the order of the samples.
        epoch: Number of the epoch; the order differs from epoch to epoch.
        rank: Number of this process, from 0. Processes take turns along the batches of the epoch.
        world: Number of processes. All get the same number of batches, unless there are fewer samples than
            processes.

    Yields:
        Batches on the CPU, with features in the dtype of the store. T counts the text tokens of all samples
        of the batch, U the visual ones, M the spans. `ids_T`, `response_T` (bool), `position_T`, `rope_T` and
        `segment_T` (which sample) are [T]; `features` maps each `Feature` to [T, U or M, hidden size].

    Raises:
        DataError: A name is not a feature.
        StoreError: The store lacks a feature, view or key; `tokens`, `rank` or `world` is out of range; or
            data that are read are damaged.

    Example:
        >>> for batch in vlmdistill.iterate_batches(store, tokens=4096, seed=0):
        ...     hidden_TD = batch.feature("hidden", "text")
    """
    batches = Epoch(
        store,
        features,
        view=view,
        keys=keys,
        token_budget=tokens,
        seed=seed,
        epoch=epoch,
        rank=rank,
        world=world,
    )
    return _packed(batches, store.provenance.dtype)


def _packed(batches: Epoch, dtype: str) -> Iterator[Batch]:
    """Copies, because the epoch reads later batches into the same memory."""
    try:
        for samples in batches:
            if samples:
                batch = as_batch(samples, dtype)
                yield batch.having(
                    {name: value.clone() for name, value in batch.features.items()}
                )
    finally:
        batches.close()


class WorkerError(DataError):
    """A StoreDataset was iterated in a worker process of a `DataLoader`.

    torch raises it again in the user's process, with the worker's traceback as its text: that is dropped.
    """

    def __init__(self, *torch_text: object) -> None:
        super().__init__(
            "a StoreDataset reads ahead with its own threads: set num_workers=0"
        )


@dataclass(eq=False)
class StoreDataset(IterableDataset[Batch]):
    """A store as a dataset of packed batches for `torch.utils.data.DataLoader`.

    The dataset yields whole batches and reads ahead with its own threads: pass `batch_size=None` and leave
    `num_workers` at 0.
    Call `set_epoch` before each epoch, as with a `DistributedSampler`.

    Args:
        store: An open store.
        tokens: Maximum size of a batch; see `iterate_batches` for this and all other arguments.
        features: The features to read.
        view: Name of a view of the store.
        keys: Read only the samples with these keys.
        seed: Seed of the order of the samples.
        rank: Number of this process, from 0.
        world: Number of processes.

    Raises:
        DataError: When iterated in a worker process of a `DataLoader`.
        VlmdistillError: At once, as `iterate_batches`.

    Example:
        >>> loader = DataLoader(vlmdistill.StoreDataset(store, tokens=4096), batch_size=None)
    """

    store: Store
    _: KW_ONLY
    tokens: int = 4096
    features: Collection[str | Feature] | None = None
    view: str | None = None
    keys: Collection[str] | None = None
    seed: int = 0
    rank: int = 0
    world: int = 1
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._batches()  # raises what is wrong with the arguments

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise WorkerError
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        arguments = {item.name: getattr(self, item.name) for item in fields(self)}
        return iterate_batches(**arguments)
