"""Cuts the states of whole sequences into features: the rows at text, visual and span positions.

Shapes: B samples, L positions, T text tokens, U visual tokens, M spans, D hidden width.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.transfer import place
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.loader.tensors import as_numpy
from vlmdistill.stores.schema import Array, Feature, Sample, Span, Where

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Transcript:
    """A prompt with its response, and the positions of text and visual tokens, on the CPU."""

    ids_L: Tensor
    rope_AL: Tensor
    kind_L: Tensor  # 0 at text, 1 at image, 2 at video tokens
    response_L: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, prompt: EncodedPrompt, response: Collection[int] = ()) -> "Transcript":
        """Append the response to the prompt; placeholders in the response are ordinary tokens."""
        response_R = torch.tensor(tuple(response), dtype=torch.long)
        count = len(response_R)
        rope_R = prompt.next_rope + torch.arange(count)
        rope_AR = rope_R.expand(len(prompt.rope_AL), -1)
        position_L = torch.arange(prompt.length + count)
        return cls(
            ids_L=torch.cat([prompt.ids_L, response_R]),
            rope_AL=torch.cat([prompt.rope_AL, rope_AR], 1),
            kind_L=torch.nn.functional.pad(prompt.kind_L, (0, count)),
            response_L=position_L >= prompt.length,
            spans=prompt.spans,
        )

    @property
    def visual_L(self) -> Tensor:
        """Which positions are visual tokens."""
        return self.kind_L > 0

    def positions(self, where: Where) -> Tensor:
        """The positions that a feature at `where` has a row for."""
        if where == "span":
            ends = [span.start + span.length - 1 for span in self.spans]
            return torch.tensor(ends, dtype=torch.long)
        return torch.nonzero(self.visual_L == (where == "visual")).flatten()

    def batch(
        self, states: Mapping[str, Tensor], features: Collection[Feature]
    ) -> Batch:
        """The sequence as a batch for a decoder, on the device of `states` (by source, [L, D])."""
        device = next(iter(states.values())).device
        rows = FeatureRows.of([self], features, device)
        text_T = self.positions("text")
        starts = [span.start for span in self.spans]
        lengths = [span.length for span in self.spans]
        start_M = torch.tensor(starts, dtype=torch.long)
        length_M = torch.tensor(lengths, dtype=torch.long)
        batch = Batch(
            ids_T=self.ids_L[text_T],
            response_T=self.response_L[text_T],
            position_T=text_T,
            rope_T=self.rope_AL[0, text_T],
            segment_T=torch.zeros_like(text_T),
            start_M=start_M,
            length_M=length_M,
            segment_M=torch.zeros_like(start_M),
        )
        batched = {source: state_LD[None] for source, state_LD in states.items()}
        return batch.to(device).having(rows.select(batched))

    def sample(self, key: str, features: Mapping[Feature, Array]) -> Sample:
        """The sequence with its features as a sample for the store.

        DataError if a feature exceeds the range of float16.
        """
        for feature, rows_ND in features.items():
            is_half = rows_ND.dtype == np.float16
            if is_half and not np.isfinite(rows_ND).all():
                raise DataError(
                    f"sample {key}: {feature.name} is beyond the range of float16: use "
                    "--dtype bfloat16, and another --store"
                )
        text_T = self.positions("text")
        return Sample(
            key=key,
            ids_T=_int32(self.ids_L[text_T]),
            response_T=self.response_L[text_T].numpy(),
            position_T=_int32(text_T),
            rope_T=_int32(self.rope_AL[0, text_T]),
            spans=self.spans,
            features=features,
        )


@dataclass(frozen=True)
class FeatureRows:
    """The rows of each feature in a right-padded batch, known before the batch runs."""

    rows: Mapping[Where, Tensor]
    """Of the flattened batch [B * L], on the target's device."""
    features: Sequence[Feature]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Transcript],
        features: Collection[Feature],
        device: torch.device,
    ) -> "FeatureRows":
        """The rows of these features, on their way to `device`."""
        length = max(len(sequence.ids_L) for sequence in sequences)
        rows: dict[Where, Tensor] = {}
        for where in {feature.where for feature in features}:
            parts = [
                sequence.positions(where) + number * length
                for number, sequence in enumerate(sequences)
            ]
            rows[where] = place(torch.cat(parts), device)
        return cls(rows, sorted(features))

    def select(self, states: Mapping[str, Tensor]) -> dict[Feature, Tensor]:
        """Each feature of a batch whose states are [B, L, D] by source: [N, D]."""
        selected = {}
        for feature in self.features:
            state_ND = states[feature.source].flatten(0, 1)
            selected[feature] = state_ND.index_select(0, self.rows[feature.where])
        return selected


@dataclass(frozen=True)
class Leaving:
    """The features of a batch on their way off the device."""

    sequences: Sequence[Transcript]
    keys: Sequence[str]
    features: Mapping[Feature, Tensor]
    """Each [rows of all sequences, D], complete after `wait`."""
    wait: Callable[[], None]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Transcript],
        keys: Sequence[str],
        features: Mapping[Feature, Tensor],
        dtype: str,
    ) -> "Leaving":
        """Begin the transfers of features [rows of all sequences, D], in `dtype`."""
        cast = [rows_ND.to(DTYPES[dtype]) for rows_ND in features.values()]
        copies, wait = to_cpu(cast)
        return cls(sequences, keys, dict(zip(features, copies, strict=True)), wait)

    def samples(self) -> list[Sample]:
        """Wait for the features, and return the samples; bfloat16 becomes uint16."""
        self.wait()
        features_of: list[dict[Feature, Array]] = [{} for _ in self.sequences]
        for feature, batch_ND in self.features.items():
            counts = [
                len(sequence.positions(feature.where)) for sequence in self.sequences
            ]
            ends = np.cumsum(counts)
            parts = np.split(as_numpy(batch_ND), ends[:-1])
            for features, part_ND in zip(features_of, parts, strict=True):
                features[feature] = part_ND
        return [
            sequence.sample(key, features)
            for sequence, key, features in zip(
                self.sequences, self.keys, features_of, strict=True
            )
        ]


def to_cpu(states: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Begin to copy states into pinned memory while the GPU goes on.

    Returns the copies, and a function that waits until all are complete.
    """
    if not states or states[0].device.type != "cuda":
        return list(states), lambda: None
    device = states[0].device
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(stream):
        for state in states:
            copy = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
            copy.copy_(state, non_blocking=True)
            state.record_stream(stream)  # its memory is not reused before the copy
            copies.append(copy)
        done = stream.record_event()
    return copies, done.synchronize


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _int32(value: Tensor) -> Any:
    return value.to(torch.int32).numpy()
