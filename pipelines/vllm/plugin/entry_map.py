"""Which entries of a prompt a drafter has when visual tokens are dropped, and what each is made of.

In vLLM, entry t pairs the embedding of token t + 1 with the target's state of token t.
Shapes: P prompt tokens, N rows of one step of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmdistill.drafters.core.config import ModelConfig


class Fed(Protocol):
    """What decides on the entries of a prompt: an `EagleDrafter`, or `TextStates`."""

    config: ModelConfig

    @property
    def after_image(self) -> Literal["visual", "text"]:
        """See `EagleDrafter`."""
        ...

    @property
    def compresses(self) -> Literal["embed", "hidden"] | None:
        """See `EagleDrafter`."""
        ...

    @property
    def joins(self) -> bool:
        """See `EagleDrafter`."""
        ...

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """See `EagleDrafter`."""
        ...

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """See `EagleDrafter`."""
        ...


class TextStates:
    """A block drafter with `context=text`, which reads the states of text at compact positions."""

    config = ModelConfig(positions="compact")
    after_image: Literal["visual", "text"] = "text"
    compresses: Literal["embed", "hidden"] | None = None
    joins = False

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """Nothing is compressed."""
        raise NotImplementedError

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """Nothing is compressed."""
        raise NotImplementedError


class Shown(NamedTuple):
    """The visual tokens of an image, or a contiguous run of those of a video."""

    start: int
    length: int


@dataclass(frozen=True)
class EntryMap:
    """The entries of one prompt; all entries after it are kept, each with its own state."""

    kept_P: NDArray[np.bool_]
    source_P: NDArray[np.int64]
    """The token whose state an entry is paired with; -1: none, and the entry is dropped."""
    before_P: NDArray[np.int64]
    """Kept entries before each: its slot in the drafter's KV cache."""
    query_P: NDArray[np.int64]
    """The compressed entry of its image that a row carries; -1: an entry of its own."""
    image_P: NDArray[np.int64]
    """The last image that begins before an entry or at it; -1: none."""
    turned_P: NDArray[np.int64]
    """Rotary position less the index in the expanded sequence."""
    images: Sequence[Shown]

    @classmethod
    def of(
        cls,
        visual_P: NDArray[np.bool_],
        drafter: Fed,
        images: Sequence[Shown] = (),
    ) -> "EntryMap":
        """Drop the entries of visual tokens, but those that carry what `drafter` leaves of `images`.

        If it reads no visual states, the first token after an image is paired with the state of the last
        text token before it, and dropped where no text comes before.
        """
        own_P = np.arange(len(visual_P))
        text_P = (
            own_P if drafter.after_image == "visual" else np.where(visual_P, -1, own_P)
        )
        source_P = np.maximum.accumulate(text_P)
        next_is_visual_P = np.append(visual_P, False)[1:]
        kept_P = ~next_is_visual_P & (source_P >= 0)
        query_P, turned_P = np.full_like(own_P, -1), np.zeros_like(own_P)
        if drafter.compresses is not None:
            for start, length in images:
                # The last rows of an image carry its entries: by then all its states are known.
                (place_C,) = drafter.places(
                    torch.tensor([start]), torch.tensor([length])
                ).numpy()
                place_C = place_C[place_C >= 0][:length]
                query_C = np.arange(len(place_C))
                row_C = start - 1 + length - len(place_C) + query_C
                inside_C = (row_C >= 0) & (row_C < len(own_P))
                row_X = row_C[inside_C]
                kept_P[row_X], query_P[row_X] = True, query_C[inside_C]
                turned_P[row_X] = (np.maximum(place_C - 1, 0) - row_C)[inside_C]
        starts = [image.start for image in images]
        image_P = np.searchsorted(starts, own_P + 1, side="right") - 1
        return cls(
            kept_P,
            source_P,
            np.cumsum(kept_P) - kept_P,
            query_P,
            image_P,
            turned_P,
            images,
        )

    @property
    def dropped(self) -> int:
        """Entries of the whole prompt that are dropped."""
        return len(self.kept_P) - int(self.kept_P.sum())

    def step(self, first: int, count: int) -> "StepRows":
        """The rows of a step over the entries from `first` on.

        A step that has only visual tokens keeps its last entry, because attention needs a query. The next
        step overwrites its slot, and vLLM discards its draft because the prompt is unfinished.
        """
        inside = max(min(len(self.kept_P) - first, count), 0)
        after_N = np.arange(first + inside, first + count)
        rest = slice(first, first + inside)
        kept_N = np.append(self.kept_P[rest], np.ones(len(after_N), dtype=bool))
        source_N = np.append(self.source_P[rest], after_N)
        slot_N = np.append(self.before_P[rest], after_N - self.dropped)
        if not kept_N.any():
            kept_N[-1] = True
        return StepRows(
            kept_N,
            source_N - first,
            np.arange(first, first + count) - slot_N,
            np.append(self.query_P[rest], np.full_like(after_N, -1)),
            np.append(self.image_P[rest], np.full_like(after_N, len(self.images) - 1)),
            np.append(self.turned_P[rest], np.zeros_like(after_N)),
        )


@dataclass(frozen=True)
class StepRows:
    """The rows of one request in one step."""

    kept_N: NDArray[np.bool_]
    source_N: NDArray[np.int64]
    """The row whose state an entry is paired with; negative: the state was in an earlier step."""
    dropped_N: NDArray[np.int64]
    """Entries dropped before each: its position less its slot."""
    query_N: NDArray[np.int64]
    image_N: NDArray[np.int64]
    turned_N: NDArray[np.int64]

    @property
    def changed(self) -> bool:
        """Some rows are not entries of their own."""
        return self.dropped > 0 or bool((self.query_N >= 0).any())

    @property
    def dropped(self) -> int:
        """Entries of the sequence that are dropped, up to the end of this step."""
        last = int(self.dropped_N[-1])
        return last + (not self.kept_N[-1])
