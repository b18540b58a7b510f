"""Samples of a store as packed batches, and which samples an epoch takes."""

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.training import ranks
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import Feature, PackedSamples
from vlmdistill.stores.store import Store


def as_batch(samples: PackedSamples, dtype: str) -> Batch:
    """A torch batch; features share memory. `dtype` is the dtype of the store (bfloat16 comes as uint16)."""
    ids_T, position_T, rope_T, response_T = (
        torch.from_numpy(samples.tokens_T4).long().T.contiguous()
    )
    segment_M, start_M, length_M = torch.from_numpy(samples.span_M3).T.contiguous()
    text_tokens_B = torch.from_numpy(samples.text_tokens_B)
    return Batch(
        ids_T=ids_T,
        response_T=response_T.bool(),
        position_T=position_T,
        rope_T=rope_T,
        segment_T=torch.repeat_interleave(torch.arange(len(samples)), text_tokens_B),
        start_M=start_M,
        length_M=length_M,
        segment_M=segment_M,
        features={
            feature: as_torch(rows, dtype) for feature, rows in samples.features.items()
        },
    )


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one optimizer step, on the device."""

    samples: list[PackedSamples]
    batches: list[Batch | None]  # None: a rank without samples at the end of an epoch
    state: dict[str, Any]  # of the reader, after them
    waited: float  # seconds for the reader


class Ahead(Iterator[MicroBatches]):
    """Groups, the next of which can be fetched before it is asked for."""

    def __init__(self, groups: Iterator[MicroBatches]) -> None:
        self._groups = groups
        self._fetched: list[MicroBatches] = []

    def fetch(self) -> None:
        """Read the next group and send it on its way, if there is one and it was not yet."""
        if not self._fetched and (group := next(self._groups, None)):
            self._fetched.append(group)

    def __next__(self) -> MicroBatches:
        self.fetch()
        if not self._fetched:
            raise StopIteration
        return self._fetched.pop()


@dataclass(frozen=True)
class DataSplit:
    """The keys of a run: samples with images, text-only ones, and those kept apart."""

    visual: Sequence[str]
    text: Sequence[str]
    held_out: Sequence[str]

    def draw(self, stage: Stage, progress: float, seed: int) -> list[str]:
        """The samples of one epoch: the share with images moves with `progress` (0 to 1) of the stage.

        An unmixed epoch takes every sample of its kind. A mixed one is as long as the shorter kind, as in
        MSD's code; where the store holds one kind alone, it takes that.
        """
        start, end = stage.visual
        share = start + (end - start) * progress
        if share in (0.0, 1.0):
            return list(self.visual if share else self.text)
        if not (self.visual and self.text):
            return [*self.visual, *self.text]
        random_ = random.Random(seed)
        length = min(len(self.visual), len(self.text))
        images = sum(random_.random() < share for _ in range(length))
        return random_.sample(self.visual, images) + random_.sample(
            self.text, length - images
        )


def split(
    store: Store, view: str | None, config: TrainConfig, held_out: float
) -> DataSplit:
    """Sort the samples of a view, without any longer than `config.longest`.

    What is held out hangs on each key alone, so that it stays held out when the store grows.
    """
    visual: list[str] = []
    text: list[str] = []
    apart: list[str] = []
    rows = store.view(view).select(
        "key", "text_tokens", "visual_tokens", "response_tokens"
    )
    for key, text_tokens, visual_tokens, response_tokens in rows.iter_rows():
        if text_tokens + visual_tokens > config.longest or response_tokens < 2:
            continue
        if int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) < held_out * 2**32:
            apart.append(key)
        else:
            (visual if visual_tokens else text).append(key)
    return DataSplit(visual, text, apart)


def occurrences(reader: Iterable[PackedSamples], vocab_size: int) -> Tensor:
    """How often each token [V] occurs in the responses of some batches."""
    count_V = torch.zeros(vocab_size, dtype=torch.float64)
    for samples in reader:
        ids_R = torch.from_numpy(samples.ids_T[samples.response_T]).long()
        count_V += torch.bincount(ids_R, minlength=vocab_size)
    return count_V


def cure_of(
    step: Iterable[PackedSamples], store: Store, needs: Collection[Feature]
) -> str:
    """Advice for a step whose loss is not finite, by its samples on all ranks."""
    odd = [
        key
        for key in chain.from_iterable(samples.keys for samples in step)
        for rows in store.read(key, needs).features.values()
        if not as_torch(rows, store.provenance.dtype).isfinite().all()
    ]
    if key := next((key for _, keys in ranks.of_each(odd) for key in keys), None):
        return (
            f"features of sample {key} are not finite in {store.path}, so train on a --view without it, made "
            f"by `vlmdistill store filter --where \"key <> '{key}'\"`, or capture it again into another store"
        )
    return "lower the learning rate, and start over with --force"
