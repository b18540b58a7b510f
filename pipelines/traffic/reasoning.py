"""Whether a logged response has the reasoning that its prompt asks for.

A server may have read the prompt with another mode of thinking, or returned the answer without the reasoning.
The marks of reasoning tell that, in the response and at the end of the prompt (`Expected`).
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.targets.checkpoints.template import (
    MODE_OF,
    PROBE,
    REASONING_END,
    REASONING_START,
    Thinking,
)
from vlmdistill.pipelines.traffic.dialects import Exchange

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.target_model import TargetModel

FIELDS = (
    "reasoning_content",
    "reasoning",
    "thinking",  # Ollama
    "thinking_blocks",  # LiteLLM
    "reasoning_details",  # OpenRouter
)
"""Fields of a message that have its reasoning, a text in the first three."""
TAIL = 40  # tokens at the end of a prompt that may have a mark
CUT = "\ufffd"  # ends a text whose last character was cut


class Expected(Enum):
    """What a response has to begin with, by the end of its prompt and the mode of thinking."""

    REST = auto()  # of the reasoning, whose opening mark ends the prompt
    REASONING = auto()  # with its opening mark: the mode is on
    ANSWER = auto()  # alone: a closing mark ends the prompt
    NO_REASONING = auto()  # or an empty one: the mode is off
    ANYTHING = auto()  # the template tells nothing


class ReasoningCheck:
    """Compares the reasoning of responses with their prompts, for one target."""

    def __init__(self, target: "TargetModel") -> None:
        self._target = target

    def require(
        self, exchange: Exchange, expected: Expected, response: str, *, is_whole: bool
    ) -> None:
        """BadRowError if a response is of another mode of thinking, or may lack its reasoning.

        Args:
            exchange: The tokens of its prompt, where logged, are compared already.
            expected: In the mode of the workspace.
            response: The text with its special tokens, where they are known.
            is_whole: Whether the log tells that no token of the response is missing.
        """
        is_known = self._is_mode_known(exchange)
        if _contradicts(exchange, expected, response) and not is_known:
            raise BadRowError("reasoning of another prompt")
        if _lacks_reasoning(exchange, expected, response) and not (
            is_known and is_whole
        ):
            raise BadRowError(
                "maybe without its reasoning",
                "log the tokens of prompt and response, or the usage, with n = 1",
            )

    def expected(self, prompt_ids: Sequence[int], is_thinking: bool | None) -> Expected:
        """What the response to a prompt has to begin with; `is_thinking` is what `thinks` returns."""
        prompt_end = self._target.tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
        if _ends_with(REASONING_START, prompt_end):
            return Expected.REST
        if _ends_with(REASONING_END, prompt_end):
            return Expected.ANSWER
        by_default, on, off = self._prompts.values()
        if on == off:
            return Expected.ANYTHING
        if is_thinking or (is_thinking is None and by_default == on):
            return Expected.REASONING
        if is_thinking is False or by_default == off:
            return Expected.NO_REASONING
        return Expected.ANYTHING

    @cached_property
    def _prompts(self) -> dict[Thinking, list[int]]:
        """The tokens of one prompt in each mode."""
        return {
            mode: self._target.encode([PROBE], mode).ids_L.tolist()
            for mode in MODE_OF.values()
        }

    def _is_mode_known(self, exchange: Exchange) -> bool:
        """Whether the log tells the mode by the tokens of the prompt, or by their number."""
        if exchange.prompt_ids:
            return True
        prompts = {tuple(ids) for ids in self._prompts.values()}
        lengths = {len(ids) for ids in prompts}
        return exchange.prompt_count is not None and len(lengths) == len(prompts)


def _contradicts(exchange: Exchange, expected: Expected, response: str) -> bool:
    """Whether a response has reasoning that its prompt does not ask for."""
    start, end = REASONING_START.search(response), REASONING_END.search(response)
    opening = REASONING_START.match(response.lstrip())
    closes = end is not None and (start is None or end.start() < start.start())
    if expected is Expected.REST:
        return opening is not None
    has_reasoning = bool(opening or closes or reasoning_of(exchange))
    if expected is Expected.NO_REASONING and opening is not None:
        behind = response.lstrip()[opening.end() :].lstrip()
        return REASONING_END.match(behind) is None
    return has_reasoning and expected in (Expected.ANSWER, Expected.NO_REASONING)


def _lacks_reasoning(exchange: Exchange, expected: Expected, response: str) -> bool:
    """Whether the text of a response does not show the reasoning that its prompt asks for."""
    if expected is Expected.REST:
        is_cut_in_it = bool(reasoning_of(exchange))
        return REASONING_END.search(response) is None and not is_cut_in_it
    begins = REASONING_START.match(response.lstrip()) is not None
    return expected is Expected.REASONING and not begins


def _ends_with(mark: re.Pattern[str], text: str) -> bool:
    """Whether a mark is the last of a text."""
    ends = [match.end() for match in mark.finditer(text)]
    return bool(ends) and ends[-1] == len(text)


def reasoning_of(exchange: Exchange) -> Any:
    """The reasoning that a response has in a field or a part of its own; None without any."""
    message = exchange.choice.get("message")
    if not isinstance(message, Mapping):
        return None
    for name in FIELDS:
        if message.get(name):
            return message[name]
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return parts if "thinking" in kinds else None  # Mistral


def is_answer_of(exchange: Exchange, answer: str, text: str) -> bool:
    """Whether a text ends with an answer behind a closing mark, which the server has left out."""
    answer = answer.rstrip(CUT).lstrip()
    behind_marks = [
        text[mark.end() :].rstrip(CUT).lstrip() for mark in REASONING_END.finditer(text)
    ]
    if exchange.has_stops:  # the text ends before a stop word
        return any(behind.startswith(answer) for behind in behind_marks)
    return answer in behind_marks


def has_both(exchange: Exchange, reasoning: str, answer: str, text: str) -> bool:
    """Whether a text has the reasoning of a response, and then its answer."""
    start = text.find(reasoning)
    if start < 0:
        return False
    behind = text[start + len(reasoning) :].rstrip(CUT).strip()
    if not answer:  # cut in its reasoning, or right behind
        return not behind or REASONING_END.fullmatch(behind) is not None
    answer = answer.rstrip(CUT).strip()
    is_stopped = exchange.has_stops and answer in behind
    return is_stopped or behind.endswith(answer)
