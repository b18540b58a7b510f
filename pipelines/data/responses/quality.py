"""Filters that drop responses not worth learning from, each with a reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from vlmdistill.stores.errors import DataError

LENIENT = {"short": "--min-words 0", "repetition": "--max-repetition 1"}
"""By reason, the option that keeps such responses."""
NGRAM = 8
"""Tokens: ordinary text repeats phrases, but hardly ever eight tokens in a row."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Thresholds; a response that passes all of them is kept."""

    min_words: int = 6  # HiViS drops multimodal responses of five words or fewer
    max_repetition: float = 0.5  # share of token n-grams that occurred before
    max_length: int | None = None
    """Tokens of prompt and response; None: the target's limit."""

    def check(self) -> None:
        """DataError if a threshold is out of range."""
        if self.min_words < 0:
            raise DataError(f"--min-words {self.min_words}: give 0 or more")
        if not 0 < self.max_repetition <= 1:
            raise DataError(
                f"--max-repetition {self.max_repetition}: give a share above 0, at most 1"
            )
        if self.max_length is not None and self.max_length < 1:
            raise DataError(
                f"--max-length {self.max_length}: give a number of tokens above 0"
            )

    def reason(self, words: int, repeated: float, length: int, limit: int) -> str:
        """Why a response is dropped; empty if it is kept. `length` is in tokens, at most `limit`."""
        if words == 0:
            return "empty"
        if words < self.min_words:
            return "short"
        if length > limit:
            return "over length"
        if repeated > self.max_repetition:
            return "repetition"
        return ""


def repetition(ids: Sequence[int]) -> float:
    """The share of n-grams that occurred before in the same response: 0 for prose, near 1 for a loop."""
    grams = [tuple(ids[start : start + NGRAM]) for start in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
