"""Which entries of a prompt a drafter has when visual tokens are dropped, and the state of each.

In vLLM, entry t pairs the embedding of token t + 1 with the target's state of token t. It is in row t of the
prompt, and in row t - first of a step that reads the prompt from token `first` on. A row whose own entry is
dropped may carry a compressed entry of its image instead.

Shapes: P prompt tokens, N rows of one step of a request, M images, U their visual tokens, Q places for
compressed entries of an image, C entries that it has, X those in the prompt, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmdistill.drafters.core.config import ModelConfig


class FeedingDrafter(Protocol):
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


class ImageSpan(NamedTuple):
    """The visual tokens of an image, or a contiguous run of those of a video."""

    start: int
    length: int


@dataclass(frozen=True)
class EntryMap:
    """The entries of one prompt; all entries after the prompt are kept, each with its own state."""

    kept_P: NDArray[np.bool_]
    source_P: NDArray[np.int64]
    """The token whose state an entry is paired with; -1: there is none."""
    slot_P: NDArray[np.int64]
    """The entry's slot in the drafter's KV cache: how many kept entries come before it."""
    carried_P: NDArray[np.int64]
    """The compressed entry of its image that a row carries; -1: it has its own entry."""
    image_P: NDArray[np.int64]
    """The last image that begins at the token that an entry embeds, or before it; -1: none."""
    rotary_shift_P: NDArray[np.int64]
    """The rotary position of the entry in a row, less the number of the row."""
    images: Sequence[ImageSpan]

    @classmethod
    def of(
        cls,
        visual_P: NDArray[np.bool_],
        drafter: FeedingDrafter,
        images: Sequence[ImageSpan] = (),
    ) -> "EntryMap":
        """Drop the entries that embed visual tokens, except in rows that carry compressed entries.

        If the drafter reads no visual states, the entry of the first token after an image is paired with the
        state of the last text token before the image, and dropped if there is none.
        """
        # The token whose state an entry has: its own, or, where that is not read, the last text token.
        row_P = np.arange(len(visual_P))
        readable_P = row_P
        if drafter.after_image == "text":
            readable_P = np.where(visual_P, -1, row_P)
        source_P = np.maximum.accumulate(readable_P)

        # An entry is kept if the token that it embeds, the next one, is text, and if it has a state.
        next_is_visual_P = np.append(visual_P, False)[1:]
        kept_P = ~next_is_visual_P & (source_P >= 0)

        # Rows of images that carry compressed entries are kept as well.
        carried_P = np.full_like(row_P, -1)
        rotary_shift_P = np.zeros_like(row_P)
        if drafter.compresses is not None:
            for image in images:
                row_C, carried_C, rotary_shift_C = _carrying_rows(image, drafter)
                inside_C = (row_C >= 0) & (row_C < len(row_P))
                inside_X = row_C[inside_C]
                kept_P[inside_X] = True
                carried_P[inside_X] = carried_C[inside_C]
                rotary_shift_P[inside_X] = rotary_shift_C[inside_C]

        starts = [image.start for image in images]
        embedded_P = row_P + 1
        image_P = np.searchsorted(starts, embedded_P, side="right") - 1
        return cls(
            kept_P=kept_P,
            source_P=source_P,
            slot_P=np.cumsum(kept_P) - kept_P,
            carried_P=carried_P,
            image_P=image_P,
            rotary_shift_P=rotary_shift_P,
            images=images,
        )

    @cached_property
    def length(self) -> int:
        """How many tokens the prompt has."""
        return len(self.kept_P)

    @cached_property
    def dropped(self) -> int:
        """How many entries of the whole prompt are dropped."""
        return len(self.kept_P) - int(self.kept_P.sum())

    def step(self, first: int, count: int) -> "StepRows":
        """The rows of a step of `count` tokens, from token `first` on.

        A step whose entries are all dropped keeps the last one, because attention needs a query. The next
        step overwrites its slot, and vLLM discards its draft because the prompt is unfinished.
        """
        # The step has rows of the prompt, then rows after it, which have their own entries.
        of_prompt = max(min(len(self.kept_P) - first, count), 0)
        prompt = slice(first, first + of_prompt)
        after_N = np.arange(first + of_prompt, first + count)
        last_image = len(self.images) - 1

        kept_N = np.append(self.kept_P[prompt], np.ones(len(after_N), dtype=bool))
        if not kept_N.any():
            kept_N[-1] = True
        source_N = np.append(self.source_P[prompt], after_N)
        slot_N = np.append(self.slot_P[prompt], after_N - self.dropped)
        return StepRows(
            kept_N=kept_N,
            source_N=source_N - first,
            dropped_N=np.arange(first, first + count) - slot_N,
            carried_N=np.append(self.carried_P[prompt], np.full_like(after_N, -1)),
            image_N=np.append(self.image_P[prompt], np.full_like(after_N, last_image)),
            rotary_shift_N=np.append(
                self.rotary_shift_P[prompt], np.zeros_like(after_N)
            ),
        )


def _carrying_rows(
    image: ImageSpan, drafter: FeedingDrafter
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The rows that carry the compressed entries of an image: row, compressed entry and rotary shift of each.

    They are the last rows that embed tokens of the image, in the step that reads its end.
    """
    (place_Q,) = drafter.places(
        torch.tensor([image.start]), torch.tensor([image.length])
    ).numpy()
    place_C = place_Q[place_Q >= 0][: image.length]
    carried_C = np.arange(len(place_C))
    # Row t embeds token t + 1.
    last_row = image.start + image.length - 2
    first_row = last_row - len(place_C) + 1
    row_C = first_row + carried_C
    position_C = np.maximum(place_C - 1, 0)
    rotary_shift_C = position_C - row_C
    return row_C, carried_C, rotary_shift_C


@dataclass(frozen=True)
class StepRows:
    """The rows of one request in one step."""

    kept_N: NDArray[np.bool_]
    source_N: NDArray[np.int64]
    """The row whose state an entry is paired with; negative: the state was in an earlier step, or is none."""
    dropped_N: NDArray[np.int64]
    """How many entries before each are dropped: its number less its slot."""
    carried_N: NDArray[np.int64]
    image_N: NDArray[np.int64]
    rotary_shift_N: NDArray[np.int64]

    @property
    def changed(self) -> bool:
        """Whether some rows are dropped, or carry a compressed entry."""
        return self.dropped > 0 or bool((self.carried_N >= 0).any())

    @property
    def dropped(self) -> int:
        """How many entries of the sequence are dropped, up to the end of this step."""
        last = int(self.dropped_N[-1])
        return last + (not self.kept_N[-1])
