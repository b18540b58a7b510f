"""Which entries of a prompt a drafter has when visual tokens are dropped, and what each is made of.

In vLLM, entry t pairs the embedding of token t + 1 with the target's state of token t.
Shapes: P prompt tokens, N rows of one step of a request.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmdistill.drafters.checkpoints.serving import AfterImage


@dataclass(frozen=True)
class EntryMap:
    """The entries of one prompt; all entries after it are kept, each with its own state."""

    kept_P: NDArray[np.bool_]
    source_P: NDArray[np.int64]
    """The token whose state an entry is paired with; -1: none, and the entry is dropped."""
    before_P: NDArray[np.int64]
    """Kept entries before each: its slot in the drafter's KV cache."""

    @classmethod
    def of(cls, visual_P: NDArray[np.bool_], after_image: AfterImage) -> "EntryMap":
        """Drop the entries of visual tokens.

        With `after_image="text"` the first token after an image is paired with the state of the last text
        token before it (HiViS eq. 3), and dropped where no text comes before.
        """
        own_P = np.arange(len(visual_P))
        text_P = own_P if after_image == "visual" else np.where(visual_P, -1, own_P)
        source_P = np.maximum.accumulate(text_P)
        next_is_visual_P = np.append(visual_P, False)[1:]
        kept_P = ~next_is_visual_P & (source_P >= 0)
        return cls(kept_P, source_P, np.cumsum(kept_P) - kept_P)

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
        return StepRows(kept_N, source_N - first, np.arange(first, first + count) - slot_N)


@dataclass(frozen=True)
class StepRows:
    """The rows of one request in one step."""

    kept_N: NDArray[np.bool_]
    source_N: NDArray[np.int64]
    """The row whose state an entry is paired with; negative: the state was in an earlier step."""
    dropped_N: NDArray[np.int64]
    """Entries dropped before each: its position less its slot."""

    @property
    def dropped(self) -> int:
        """Entries of the sequence that are dropped, up to the end of this step."""
        last = int(self.dropped_N[-1])
        return last + (not self.kept_N[-1])
