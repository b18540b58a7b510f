"""Samples of a store as packed batches, and which samples an epoch takes."""

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlmdistill.drafters.base import Batch, DrafterConfig, Stage
from vlmdistill.stores.schema import Feature, Sample
from vlmdistill.stores.store import Store
from vlmdistill.stores.tensors import packed


def pack(samples: Sequence[Sample], features: Collection[Feature], dtype: str) -> Batch:
    """Samples side by side, unpadded; `dtype` is that of the stored features (bfloat16 comes as uint16)."""
    spans = [(number, span.start, span.length) for number, one in enumerate(samples) for span in one.spans]
    span_M3 = torch.tensor(spans, dtype=torch.long).reshape(-1, 3)

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(one, name) for one in samples]))

    lengths = [len(one.ids_T) for one in samples]
    return Batch(
        ids_T=joined("ids_T").long(),
        response_T=joined("response_T").bool(),
        position_T=joined("position_T").long(),
        rope_T=joined("rope_T").long(),
        segment_T=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        start_M=span_M3[:, 1],
        length_M=span_M3[:, 2],
        segment_M=span_M3[:, 0],
        features={feature: packed([one.features[feature] for one in samples], dtype) for feature in features},
    )


@dataclass(frozen=True)
class Split:
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
        return random_.sample(self.visual, images) + random_.sample(self.text, length - images)


def split(store: Store, view: str | None, config: DrafterConfig, held_out: float) -> Split:
    """Sort the samples of a view; those longer than `config.max_length` are left out.

    What is held out hangs on each key alone, so that it stays held out when the store grows.
    """
    visual: list[str] = []
    text: list[str] = []
    apart: list[str] = []
    rows = store.view(view).select("key", "text_tokens", "visual_tokens", "response_tokens")
    for key, text_tokens, visual_tokens, response_tokens in rows.iter_rows():
        if text_tokens + visual_tokens > config.max_length or response_tokens < 2:
            continue
        if int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) < held_out * 2**32:
            apart.append(key)
        else:
            (visual if visual_tokens else text).append(key)
    return Split(visual, text, apart)
