"""The capability to score only some tokens of the target's vocabulary.

Shapes: K tokens of the draft vocabulary, V vocabulary of the target.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


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
