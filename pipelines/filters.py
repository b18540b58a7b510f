"""Which answers are worth learning from. Every drop has a reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from vlmdistill.stores.errors import DataError

NGRAM = 8  # tokens: phrases repeat in honest text, eight tokens in a row hardly do


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Thresholds; an answer that passes all of them is kept."""

    min_words: int = 6  # HiViS drops multimodal answers of five words or fewer
    max_repetition: float = 0.5  # share of token n-grams that were there before
    max_length: int | None = None  # prompt and answer together; None: what the target can hold

    def check(self) -> None:
        """DataError on a threshold that makes no sense."""
        if self.min_words < 0:
            raise DataError(f"--min-words {self.min_words}: give 0 or more")
        if not 0 < self.max_repetition <= 1:
            raise DataError(f"--max-repetition {self.max_repetition}: give a share above 0, at most 1")
        if self.max_length is not None and self.max_length < 1:
            raise DataError(f"--max-length {self.max_length}: give a number of tokens above 0")

    def verdict(self, text: str, ids: Sequence[int], prompt_tokens: int, limit: int) -> str:
        """Why the answer is dropped; empty when it is kept. `limit` is the longest sequence allowed."""
        words = len(text.split())
        if words == 0:
            return "empty"
        if words < self.min_words:
            return "short"
        if prompt_tokens + len(ids) > limit:
            return "over length"
        if repetition(ids) > self.max_repetition:
            return "repetition"
        return ""


def repetition(ids: Sequence[int]) -> float:
    """The share of n-grams that occurred before in the same answer: 0 for prose, near 1 for a loop."""
    grams = [tuple(ids[start : start + NGRAM]) for start in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
