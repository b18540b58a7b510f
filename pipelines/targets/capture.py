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
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.loader.tensors import as_numpy
from vlmdistill.stores.schema import Array, Feature, Sample, Span, Where

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Transcript:
    """A prompt with its response, and the positions of its text and visual tokens. All tensors on the CPU."""

    ids_L: Tensor
    rope_AL: Tensor
    kind_L: Tensor  # 0 at text, 1 at image, 2 at video tokens
    response_L: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, prompt: EncodedPrompt, response: Collection[int] = ()) -> "Transcript":
        """Append the response to the prompt; placeholders in the response are ordinary tokens."""
        response_R = torch.tensor(tuple(response), dtype=torch.long)
        rope_R = prompt.next_rope + torch.arange(len(response_R))
        return cls(
            ids_L=torch.cat([prompt.ids_L, response_R]),
            rope_AL=torch.cat([prompt.rope_AL, rope_R.expand(len(prompt.rope_AL), -1)], 1),
            kind_L=torch.nn.functional.pad(prompt.kind_L, (0, len(response_R))),
            response_L=torch.arange(prompt.length + len(response_R)) >= prompt.length,
            spans=prompt.spans,
        )

    @property
    def visual_L(self) -> Tensor:
        """Which positions are visual tokens."""
        return self.kind_L > 0

    def positions(self, where: Where) -> Tensor:
        """The positions that a feature at `where` has a row for."""
        if where == "span":
            return torch.tensor([s.start + s.length - 1 for s in self.spans], dtype=torch.long)
        return torch.nonzero(self.visual_L == (where == "visual")).flatten()

    def batch(self, states: Mapping[str, Tensor], features: Collection[Feature]) -> Batch:
        """The sequence as a batch for a decoder, on the device of `states` (by source, [L, D])."""
        device = next(iter(states.values())).device
        position = {where: self.positions(where).to(device) for where in {f.where for f in features}}
        text_T = self.positions("text")
        start_M = torch.tensor([span.start for span in self.spans], dtype=torch.long)
        length_M = torch.tensor([span.length for span in self.spans], dtype=torch.long)
        batch = Batch(
            ids_T=self.ids_L[text_T],
            response_T=self.response_L[text_T],
            position_T=text_T,
            rope_T=self.rope_AL[0, text_T],
            segment_T=torch.zeros_like(text_T),
            start_M=start_M,
            length_M=length_M,
            segment_M=torch.zeros_like(start_M),
        ).to(device)
        rows = {f: states[f.source].index_select(0, position[f.where]) for f in features}
        return batch.having(rows)

    def sample(self, key: str, features: Mapping[Feature, Array]) -> Sample:
        """The sequence with its features as a sample for the store; DataError if float16 cannot hold one."""
        for feature, rows_ND in features.items():
            if rows_ND.dtype == np.float16 and not np.isfinite(rows_ND).all():
                raise DataError(
                    f"sample {key}: {feature.name} is beyond the range of float16: use --dtype bfloat16, "
                    "and another --store"
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
class Leaving:
    """The features of a batch on their way off the device, each in one transfer."""

    sequences: Sequence[Transcript]
    keys: Sequence[str]
    features: Mapping[Feature, Callable[[], Tensor]]  # waits for a transfer [rows of all sequences, D]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Transcript],
        keys: Sequence[str],
        states: Mapping[str, Tensor],
        features: Collection[Feature],
        dtype: str,
    ) -> "Leaving":
        """Choose rows of a right-padded batch's states (by source, [B, L, D]), and begin their transfers."""
        rows: dict[Feature, Callable[[], Tensor]] = {}
        for feature in sorted(features):
            state_BLD = states[feature.source]
            positions = [sequence.positions(feature.where) for sequence in sequences]
            flat = torch.cat([rows + i * state_BLD.shape[1] for i, rows in enumerate(positions)])
            chosen_ND = state_BLD.flatten(0, 1).index_select(0, flat.to(state_BLD.device))
            rows[feature] = to_cpu(chosen_ND.to(DTYPES[dtype]))
        return cls(sequences, keys, rows)

    def samples(self) -> list[Sample]:
        """The samples, once all has arrived; bfloat16 becomes uint16."""
        rows: list[dict[Feature, Array]] = [{} for _ in self.sequences]
        for feature, arrived in self.features.items():
            stored_ND = as_numpy(arrived())
            ends = np.cumsum([len(one.positions(feature.where)) for one in self.sequences])
            for row, part in zip(rows, np.split(stored_ND, ends[:-1]), strict=True):
                row[feature] = part
        return [s.sample(key, row) for s, key, row in zip(self.sequences, self.keys, rows, strict=True)]


def to_cpu(rows_ND: Tensor) -> Callable[[], Tensor]:
    """Begin to copy rows into pinned memory while the GPU goes on; the call waits for them."""
    if rows_ND.device.type != "cuda":
        return lambda: rows_ND
    stream = _copy_stream(rows_ND.device)
    stream.wait_stream(torch.cuda.current_stream(rows_ND.device))
    with torch.cuda.stream(stream):
        copy_ND = torch.empty(rows_ND.shape, dtype=rows_ND.dtype, pin_memory=True)
        copy_ND.copy_(rows_ND, non_blocking=True)
        rows_ND.record_stream(stream)  # its memory is not reused before
        done = stream.record_event()

    def arrived() -> Tensor:
        done.synchronize()
        return copy_ND

    return arrived


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _int32(value: Tensor) -> Any:
    return value.to(torch.int32).numpy()
