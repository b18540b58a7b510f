"""The capability to score only some tokens of the target's vocabulary.

Shapes: K tokens of the draft vocabulary, V vocabulary of the target.
"""

from bisect import bisect_left
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.schema import TargetInfo

ENOUGH = 0.98  # of the tokens of responses, for a draft vocabulary


@runtime_checkable
class DraftVocabulary(Protocol):
    """A drafter whose logits have a column for some of the target's tokens only."""

    @property
    def vocabulary_K(self) -> Tensor | None:
        """The target's ids of the columns, ascending; None: all of them."""
        ...

    def choose_vocabulary(self, count_V: Tensor) -> None:
        """Choose the tokens by their counts in the responses of the training set.

        Called before training. A resumed run does not call it: the choice must be part of the
        checkpoint.
        """
        ...


class FrequentTokens(nn.Module):
    """A draft vocabulary of the most frequent tokens of the training responses."""

    info: TargetInfo
    lm_head_VD: Tensor
    d2t: Tensor | None
    """Draft id k is target id k + d2t[k], as published: a buffer. None: all tokens."""
    _head_KD: Tensor | None = None
    """The rows of `lm_head_VD` for the draft vocabulary; None: not copied yet."""

    def register_vocabulary(self, tokens: int) -> None:
        """Make room for the ids of so many tokens of the target, at most all; 0: score all of them."""
        size = min(tokens, self.info.vocab_size)
        offset_K = torch.zeros(size, dtype=torch.long)
        self.register_buffer("d2t", offset_K if size else None)

    @property
    def vocabulary_K(self) -> Tensor | None:
        """See `DraftVocabulary`."""
        if self.d2t is None or len(self.d2t) == self.info.vocab_size:
            return None
        draft_K = torch.arange(len(self.d2t), device=self.d2t.device)
        return self.d2t + draft_K

    @property
    def head_KD(self) -> Tensor:
        """The target's LM head for the draft vocabulary."""
        copied_KD = self._head_KD
        if copied_KD is not None and _alike(copied_KD, self.lm_head_VD):
            return copied_KD
        vocabulary_K = self.vocabulary_K
        if vocabulary_K is None:
            return self.lm_head_VD
        # A training step cannot use what was copied in inference mode.
        with torch.inference_mode(False):
            self._head_KD = self.lm_head_VD[vocabulary_K]
        return self._head_KD

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load weights, and with them another draft vocabulary."""
        self._head_KD = None
        return super().load_state_dict(*arguments, **options)

    def choose_vocabulary(self, count_V: Tensor) -> None:
        """The most frequent tokens; those that never occur by id."""
        if self.d2t is None:
            return
        self._head_KD = None
        frequent_V = torch.sort(count_V, descending=True, stable=True).indices
        most_frequent_K = frequent_V[: len(self.d2t)]
        chosen_K = most_frequent_K.sort().values
        draft_K = torch.arange(len(chosen_K), device=chosen_K.device)
        self.d2t.copy_(chosen_K - draft_K)


def _alike(some: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same device and dtype."""
    return some.device == other.device and some.dtype == other.dtype


def coverage(count_V: Tensor, size: int) -> str:
    """What a draft vocabulary of `size` tokens covers of the counted ones, and which size covers 98%."""
    sorted_V = count_V.sort(descending=True).values
    total = sorted_V.sum().clamp(min=1)
    share_V = (sorted_V.cumsum(0) / total).tolist()
    enough = bisect_left(share_V, ENOUGH) + 1
    return (
        f"draft_vocab={size}: these tokens are {share_V[size - 1]:.1%} of the responses; "
        f"{enough} tokens are {ENOUGH:.0%}"
    )


def columns_of(drafter: object) -> Tensor | None:
    """The target's ids of the columns of a drafter's logits; None: every token has its own."""
    return drafter.vocabulary_K if isinstance(drafter, DraftVocabulary) else None


def check_columns(source: object, drafter: object, vocabulary: int) -> None:
    """TrainingError if a drafter has columns for tokens beyond the target's `vocabulary`.

    `source` is where its weights come from, for the error.
    """
    columns_K = columns_of(drafter)
    if columns_K is None:
        return
    ascends = bool((columns_K.diff() > 0).all())
    first = int(columns_K[0])
    last = int(columns_K[-1])
    if not ascends or first < 0 or last >= vocabulary:
        raise TrainingError(
            f"{source}: d2t is not an ascending choice of the target's "
            f"{vocabulary} tokens"
        )
