"""Samples of a store as packed batches, and which samples an epoch takes.

Shapes: B samples, T text tokens, M visual spans, V vocabulary.
"""

import hashlib
import random
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage, TrainConfig
from vlmdistill.drafters.training import ranks
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import Feature, PackedSamples
from vlmdistill.stores.store import Store


def as_batch(samples: PackedSamples, dtype: str) -> Batch:
    """A torch batch; features share memory. `dtype` is the dtype of the store (bfloat16 comes as uint16)."""
    tokens_4T = torch.from_numpy(samples.tokens_T4).long().T.contiguous()
    ids_T, position_T, rope_T, response_T = tokens_4T
    segment_M, start_M, length_M = torch.from_numpy(samples.span_M3).T.contiguous()
    text_tokens_B = torch.from_numpy(samples.text_tokens_B)
    segment_B = torch.arange(len(samples))
    features = {
        feature: as_torch(states, dtype) for feature, states in samples.features.items()
    }
    return Batch(
        ids_T=ids_T,
        response_T=response_T.bool(),
        position_T=position_T,
        rope_T=rope_T,
        segment_T=torch.repeat_interleave(segment_B, text_tokens_B),
        start_M=start_M,
        length_M=length_M,
        segment_M=segment_M,
        features=features,
    )


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one optimizer step, on the device."""

    packed: list[PackedSamples]
    batches: list[Batch | None]  # None: a rank without samples at the end of an epoch
    state: dict[str, Any]  # of the reader, after them
    waited: float  # seconds for the reader


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """The batches that one rank reads of a store."""

    store: Store
    features: Collection[Feature]
    rank: int
    world: int
    micro_batches: int  # of an optimizer step
    micro_tokens: int  # of a micro-batch
    device: torch.device
    dtype: torch.dtype  # of features on the device

    def epoch(
        self,
        keys: Collection[str],
        seed: int = 0,
        start_state: dict[str, Any] | None = None,
    ) -> Epoch:
        """This rank's packed samples of an epoch over some keys."""
        return Epoch(
            self.store,
            self.features,
            keys=keys,
            token_budget=self.micro_tokens,
            seed=seed,
            rank=self.rank,
            world=self.world,
            start_state=start_state,
            keep=self.micro_batches,
        )

    def batch(self, samples: PackedSamples) -> Batch:
        """Packed samples as a batch on the device."""
        batch = as_batch(samples, self.store.provenance.dtype)
        return batch.to(self.device, self.dtype)

    def single(self, key: str) -> Batch:
        """A batch of one sample, the same on all ranks."""
        (samples,) = Epoch(self.store, self.features, keys=[key], token_budget=1)
        return self.batch(samples)

    def steps(self, reader: Epoch, batches: int) -> Iterator[MicroBatches]:
        """The micro-batches of each optimizer step in turn, at most `batches` of them in all."""
        while batches > 0 and len(reader):
            began = time.perf_counter()
            count = min(self.micro_batches, batches, len(reader))
            packed = [next(reader) for _ in range(count)]
            waited = time.perf_counter() - began
            state = reader.state
            batches -= count
            on_device = [self.batch(samples) if samples else None for samples in packed]
            yield MicroBatches(packed, on_device, state, waited)


class Prefetched(Iterator[MicroBatches]):
    """The micro-batches of each step; those of the next step can be fetched ahead."""

    def __init__(self, steps: Iterator[MicroBatches]) -> None:
        self._steps = steps
        self._waiting: MicroBatches | None = None

    def fetch(self) -> None:
        """Read the micro-batches of the next step and send them to the device, if that is not done yet."""
        if self._waiting is None:
            self._waiting = next(self._steps, None)

    def __next__(self) -> MicroBatches:
        self.fetch()
        if self._waiting is None:
            raise StopIteration
        fetched = self._waiting
        self._waiting = None
        return fetched


@dataclass(frozen=True)
class DataSplit:
    """The keys of a run: samples with images, text-only ones, and held-out ones."""

    visual: Sequence[str]
    text: Sequence[str]
    held_out: Sequence[str]

    @property
    def trained(self) -> list[str]:
        """The keys of all samples to train on."""
        return [*self.visual, *self.text]

    def lacks(self, stage: Stage) -> str:
        """The kind that a stage mixes with another and that is not there; empty if both are or neither is."""
        is_mixed = any(0 < share < 1 for share in stage.visual)
        if not is_mixed or bool(self.visual) == bool(self.text):
            return ""
        return "of text alone" if self.visual else "with images or videos"

    def draw(self, stage: Stage, progress: float, seed: int) -> list[str]:
        """The samples of one epoch: the share with images moves with `progress` (0 to 1) of the stage.

        An epoch of one kind takes every sample of that kind. A mixed epoch is as long as the shorter kind, as
        in MSD's code; where the store holds one kind only, it takes that.
        """
        start, end = stage.visual
        visual_share = start + (end - start) * progress
        if visual_share == 0:
            return list(self.text)
        if visual_share == 1:
            return list(self.visual)
        if not (self.visual and self.text):
            return self.trained
        rng = random.Random(seed)
        length = min(len(self.visual), len(self.text))
        images = sum(rng.random() < visual_share for _ in range(length))
        drawn_visual = rng.sample(self.visual, images)
        drawn_text = rng.sample(self.text, length - images)
        return drawn_visual + drawn_text


def split(
    store: Store, view: str | None, config: TrainConfig, held_out: float
) -> DataSplit:
    """Sort the samples of a view, without any longer than `config.longest`.

    Whether a sample is held out depends on its key only, so it stays held out when the store grows.
    """
    visual: list[str] = []
    text: list[str] = []
    held_out_keys: list[str] = []
    rows = store.view(view).select(
        "key", "text_tokens", "visual_tokens", "response_tokens"
    )
    for key, text_tokens, visual_tokens, response_tokens in rows.iter_rows():
        if text_tokens + visual_tokens > config.longest or response_tokens < 2:
            continue
        if _hash_share(key) < held_out:
            held_out_keys.append(key)
        elif visual_tokens:
            visual.append(key)
        else:
            text.append(key)
    return DataSplit(visual, text, held_out_keys)


def _hash_share(key: str) -> float:
    """A number from 0 to 1 that depends on the key only."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return int(digest[:8], 16) / 2**32


def occurrences(reader: Iterable[PackedSamples], vocab_size: int) -> Tensor:
    """How often each token [V] occurs in the responses of some batches."""
    count_V = torch.zeros(vocab_size, dtype=torch.float64)
    for samples in reader:
        ids_R = torch.from_numpy(samples.ids_T[samples.response_T]).long()
        count_V += torch.bincount(ids_R, minlength=vocab_size)
    return count_V


def advice_on_step(
    step: Iterable[PackedSamples], store: Store, features: Collection[Feature]
) -> str:
    """What to do about a step whose loss is not finite, by the samples of the step on all ranks."""
    keys = chain.from_iterable(samples.keys for samples in step)
    broken = [key for key in keys if not _is_finite(store, key, features)]
    broken_of_each = [rank_keys for _, rank_keys in ranks.of_each(broken)]
    if key := next(chain.from_iterable(broken_of_each), None):
        return (
            f"features of sample {key} are not finite in {store.path}, so train on a --view without it, made "
            f"by `vlmdistill store filter --where \"key <> '{key}'\"`, or capture it again into another store"
        )
    return "lower the learning rate, and start over with --force"


def _is_finite(store: Store, key: str, features: Collection[Feature]) -> bool:
    """Whether all states of a sample are finite numbers."""
    sample = store.read(key, features)
    return all(
        bool(as_torch(states, store.provenance.dtype).isfinite().all())
        for states in sample.features.values()
    )
