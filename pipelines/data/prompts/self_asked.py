"""Questions that a target writes itself, for users without data.

A chat template marks where the user's turn begins. A target that was tuned on conversations goes on
from there with a question, if it samples (Magpie: Alignment Data Synthesis from Scratch by Prompting
Aligned LLMs with Nothing, 2024, section 2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from vlmdistill.pipelines.data.prompts.same_text import folded
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.views.text_stats import words_of

if TYPE_CHECKING:
    from torch import Tensor

    from vlmdistill.pipelines.targets.encode import EncodedPrompt, EncodedResponse
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

TOKENS = 128  # of a question at most; longer ones are dropped
FEWEST_WORDS = 3
TOP_P = 0.95
ROUND = 64  # questions that are sampled at a time
FRUITLESS_ROUNDS = 5
"""Rounds without a new question after which the target is taken to have none."""


@dataclass(frozen=True)
class _UserTurn:
    """The template around a user's text."""

    target: "VisionLanguageTarget"
    prefix: "EncodedPrompt"
    after: tuple[int, ...]
    """The tokens that follow the user's text, such as those of `<|im_end|>` or "ASSISTANT:"."""

    @classmethod
    def of(cls, target: "VisionLanguageTarget") -> "_UserTurn":
        """Found by what the encodings of two different texts have in common."""
        first, second = (
            target.encode([{"role": "user", "content": text}]) for text in ("A", "7")
        )
        ids_L, other_L = first.ids_L, second.ids_L
        before = _common(ids_L, other_L)
        after = _common(ids_L.flip(0), other_L.flip(0))
        prefix = replace(
            first,
            ids_L=ids_L[:before],
            rope_AL=first.rope_AL[:, :before],
            kind_L=first.kind_L[:before],
        )
        return cls(target, prefix, tuple(ids_L[len(ids_L) - after :].tolist()))

    def question(self, response: "EncodedResponse") -> str | None:
        """The user's part of what was sampled after `prefix`; None if it does not end."""
        if self._mark is not None:
            # A word of the text may be that of a role, such as "assistant".
            if self._mark in response.ids:
                return self._text(response.ids[: response.ids.index(self._mark)])
        elif (end := self._text(self.after)) and end in response.text:
            # Tokens of a text may differ after another text.
            return response.text.partition(end)[0].strip()
        return response.text.strip() if response.finish == "stop" else None

    @cached_property
    def _mark(self) -> int | None:
        """The first token that no text has behind the user's; None if there is none."""
        tokenizer = self.target.tokenizer
        marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        return next((token for token in self.after if token in marks), None)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.target.tokenizer.decode([*ids], skip_special_tokens=True)
        return text.strip()


def _common(ids_L: "Tensor", other_L: "Tensor") -> int:
    """The length of the common beginning of two sequences of ids."""
    shortest = min(len(ids_L), len(other_L))
    equal_L = ids_L[:shortest] == other_L[:shortest]
    return int(equal_L.long().cumprod(0).sum())


def questions(
    target: "VisionLanguageTarget",
    number: int,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> Iterator[str]:
    """Different questions that the target writes, up to `number` of them.

    Dropped are texts that do not end within 128 tokens, that have fewer than three words, and that
    differ from an earlier one in case, blanks and punctuation alone.

    Raises:
        DataError: The target writes no questions, as a target that was not tuned on conversations does.
    """
    turn = _UserTurn.of(target)
    seen: set[str] = set()
    fruitless = 0
    while len(seen) < number:
        sampled = target.generate(
            [turn.prefix] * ROUND, max_new_tokens=TOKENS, top_p=TOP_P, seed=seed
        )
        seed += 1
        before = len(seen)
        for response in sampled:
            question = turn.question(response)
            if question is None or len(words_of(question)) < FEWEST_WORDS:
                continue
            text = folded(question)
            if text in seen or len(seen) == number:
                continue
            seen.add(text)
            yield question
        progress(len(seen), number)
        fruitless = 0 if len(seen) > before else fruitless + 1
        if fruitless == FRUITLESS_ROUNDS:
            break
    if not seen:
        raise DataError(
            f"the target writes no questions: none of {FRUITLESS_ROUNDS * ROUND} texts after the "
            "beginning of a user's turn ends and has three words; give a file of prompts"
        )
