"""From states of the whole expanded sequence to ragged rows: text, visual and span positions apart.

Shapes: B samples, L positions, T text tokens, U visual tokens, M spans, D hidden width.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmdistill.drafters.base import Batch
from vlmdistill.pipelines.targets.prompt import Prompt
from vlmdistill.stores.schema import Array, Feature, Sample, Span, Where
from vlmdistill.stores.tensors import as_numpy

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Transcript:
    """A prompt with its response: where text and visual tokens stand. All tensors on the CPU."""

    ids_L: Tensor
    rope_AL: Tensor
    kind_L: Tensor  # 0 at text, 1 at image, 2 at video tokens
    response_L: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, prompt: Prompt, response: Collection[int] = ()) -> "Transcript":
        """Append the response to the prompt; placeholders that it may contain are ordinary tokens."""
        answer = torch.tensor(tuple(response), dtype=torch.long)
        rope_R = prompt.next_rope + torch.arange(len(answer))
        return cls(
            ids_L=torch.cat([prompt.ids_L, answer]),
            rope_AL=torch.cat([prompt.rope_AL, rope_R.expand(len(prompt.rope_AL), -1)], 1),
            kind_L=torch.nn.functional.pad(prompt.kind_L, (0, len(answer))),
            response_L=torch.arange(prompt.length + len(answer)) >= prompt.length,
            spans=prompt.spans,
        )

    @property
    def visual_L(self) -> Tensor:
        """Which positions are visual tokens."""
        return self.kind_L > 0

    def places(self, where: Where) -> Tensor:
        """The positions of the rows that a feature has at `where`."""
        if where == "span":
            return torch.tensor([s.start + s.length - 1 for s in self.spans], dtype=torch.long)
        return torch.nonzero(self.visual_L == (where == "visual")).flatten()

    def batch(self, states: Mapping[str, Tensor], features: Collection[Feature]) -> Batch:
        """This one sequence for a decoder, on the device of `states` (by source, [L, D])."""
        device = next(iter(states.values())).device
        places = {where: self.places(where).to(device) for where in {f.where for f in features}}
        text_T = self.places("text")
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
        rows = {f: states[f.source].index_select(0, places[f.where]) for f in features}
        return batch.having(rows)

    def sample(self, key: str, features: Mapping[Feature, Array]) -> Sample:
        """This sequence for the store, with its rows of features."""
        text_T = self.places("text")
        return Sample(
            key=key,
            ids_T=_int32(self.ids_L[text_T]),
            response_T=self.response_L[text_T].numpy(),
            position_T=_int32(text_T),
            rope_T=_int32(self.rope_AL[0, text_T]),
            spans=self.spans,
            features=features,
        )


def samples(
    sequences: list[Transcript],
    keys: list[str],
    states: Mapping[str, Tensor],
    features: Collection[Feature],
    dtype: str,
) -> list[Sample]:
    """Cut states of a right-padded batch (by source, [B, L, D]) into samples; bfloat16 becomes uint16.

    Each feature leaves the device in one transfer.
    """
    rows: list[dict[Feature, Array]] = [{} for _ in sequences]
    for feature in sorted(features):
        state_BLD = states[feature.source]
        places = [sequence.places(feature.where) for sequence in sequences]
        flat = torch.cat([place + i * state_BLD.shape[1] for i, place in enumerate(places)])
        chosen_ND = state_BLD.flatten(0, 1).index_select(0, flat.to(state_BLD.device))
        stored_ND = as_numpy(chosen_ND.to(DTYPES[dtype]))
        ends = np.cumsum([len(place) for place in places])
        for row, part in zip(rows, np.split(stored_ND, ends[:-1]), strict=True):
            row[feature] = part
    return [s.sample(key, row) for s, key, row in zip(sequences, keys, rows, strict=True)]


def _int32(value: Tensor) -> Any:
    return value.to(torch.int32).numpy()
