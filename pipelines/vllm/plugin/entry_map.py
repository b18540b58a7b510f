"""Which entries of a prompt a drafter has when visual tokens are dropped, and the state of each.

In vLLM, entry t pairs the embedding of token t + 1 with the target's state of token t.
Shapes: P prompt tokens, C compressed entries of an image, N rows of one step of a request.
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
    """Decides on the entries of a prompt: an `EagleDrafter`, or `TextStates`."""

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
        """Drop the entries of visual tokens, except rows that carry the compressed entries of `images`.

        If the drafter reads no visual states, the first token after an image is paired with the state of the
        last text token before it, and dropped where no text comes before.
        """
        # The state of each entry: its own, or that of the last text token.
        own_P = np.arange(len(visual_P))
        text_P = own_P
        if drafter.after_image == "text":
            text_P = np.where(visual_P, -1, own_P)
        source_P = np.maximum.accumulate(text_P)

        # An entry is kept if its embedding, of the next token, is text, and if it has a state.
        next_is_visual_P = np.append(visual_P, False)[1:]
        kept_P = ~next_is_visual_P & (source_P >= 0)

        # Rows of images that carry compressed entries are kept as well.
        query_P = np.full_like(own_P, -1)
        turned_P = np.zeros_like(own_P)
        if drafter.compresses is not None:
            for image in images:
                row_C, carrying_query_C, turned_C = _carrying_rows(image, drafter)
                inside_C = (row_C >= 0) & (row_C < len(own_P))
                row_X = row_C[inside_C]
                kept_P[row_X] = True
                query_P[row_X] = carrying_query_C[inside_C]
                turned_P[row_X] = turned_C[inside_C]

        starts = [image.start for image in images]
        image_P = np.searchsorted(starts, own_P + 1, side="right") - 1
        return cls(
            kept_P=kept_P,
            source_P=source_P,
            before_P=np.cumsum(kept_P) - kept_P,
            query_P=query_P,
            image_P=image_P,
            turned_P=turned_P,
            images=images,
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
        # The step has rows of the prompt, then rows after it, which are entries of their own.
        of_prompt = max(min(len(self.kept_P) - first, count), 0)
        prompt = slice(first, first + of_prompt)
        after_N = np.arange(first + of_prompt, first + count)
        last_image = len(self.images) - 1

        kept_N = np.append(self.kept_P[prompt], np.ones(len(after_N), dtype=bool))
        if not kept_N.any():
            kept_N[-1] = True
        source_N = np.append(self.source_P[prompt], after_N)
        slot_N = np.append(self.before_P[prompt], after_N - self.dropped)
        return StepRows(
            kept_N=kept_N,
            source_N=source_N - first,
            dropped_N=np.arange(first, first + count) - slot_N,
            query_N=np.append(self.query_P[prompt], np.full_like(after_N, -1)),
            image_N=np.append(self.image_P[prompt], np.full_like(after_N, last_image)),
            turned_N=np.append(self.turned_P[prompt], np.zeros_like(after_N)),
        )


def _carrying_rows(
    image: Shown, drafter: Fed
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The rows that carry the compressed entries of an image: which, of which entry, and `turned_P` of each.

    They are the last rows of the image: by then all its states are known.
    """
    (place_Q,) = drafter.places(
        torch.tensor([image.start]), torch.tensor([image.length])
    ).numpy()
    place_C = place_Q[place_Q >= 0][: image.length]
    query_C = np.arange(len(place_C))
    end = image.start + image.length
    row_C = end - 1 - len(place_C) + query_C
    turned_C = np.maximum(place_C - 1, 0) - row_C
    return row_C, query_C, turned_C


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
