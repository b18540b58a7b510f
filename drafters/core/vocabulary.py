"""The capability to score only some tokens of the target's vocabulary.

Shapes: K tokens of the draft vocabulary, V vocabulary of the target.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from vlmdistill.stores.errors import TrainingError


@runtime_checkable
class DraftVocabulary(Protocol):
    """A drafter whose logits have a column for some of the target's tokens only."""

    @property
    def vocabulary_K(self) -> Tensor | None:
        """The target's ids of the columns, ascending; None: all of them."""
        ...

    def choose_vocabulary(self, count_V: Tensor) -> None:
        """Choose the tokens by their counts in the responses of the training set.

        Called before training. The choice must be in the checkpoint: a resumed run does not call it.
        """
        ...


def columns_of(drafter: object) -> Tensor | None:
    """The target's ids of the columns of a drafter's logits; None: every token has its own."""
    return drafter.vocabulary_K if isinstance(drafter, DraftVocabulary) else None


def check_columns(source: object, drafter: object, vocabulary: int) -> None:
    """TrainingError if the tokens that a drafter has columns for are none of the target's `vocabulary`."""
    columns_K = columns_of(drafter)
    if columns_K is not None and not (
        bool((columns_K.diff() > 0).all()) and int(columns_K[0]) >= 0 and int(columns_K[-1]) < vocabulary
    ):
        raise TrainingError(f"{source}: d2t is not an ascending choice of the target's {vocabulary} tokens")
