"""Whether a logged response has the reasoning that its prompt asks for.

A server may have read the prompt with another mode of thinking, or returned the answer without the reasoning.
The marks of reasoning tell that, in the response and at the end of the prompt (`Expected`).
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.data.prompts.row import has_content
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

REASONING_FIELDS = (
    "reasoning_content",
    "reasoning",
    "thinking",  # Ollama
    "thinking_blocks",  # LiteLLM
    "reasoning_details",  # OpenRouter
)
"""Fields of a message that have its reasoning, a text in the first three."""
TAIL = 40  # tokens at the end of a prompt that may have a mark
UNSURE = "maybe without its reasoning"
EMPTY_REASONING = re.compile(
    rf"\s*(?:{REASONING_START.pattern})\s*(?:{REASONING_END.pattern})"
)


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
        self,
        exchange: Exchange,
        response: str,
        prompt_ids: Sequence[int],
        *,
        is_thinking: bool | None,
        is_whole: bool,
    ) -> None:
        """BadRowError if a response is of another mode of thinking, or may lack its reasoning.

        Args:
            exchange: The tokens of its prompt, where logged, are compared already.
            response: The text with its special tokens, where they are known.
            prompt_ids: The prompt in the mode of the workspace.
            is_thinking: That mode for this prompt, as of `thinks`.
            is_whole: Whether the log tells that no token of the response is missing.
        """
        expected = self._expected(prompt_ids, is_thinking)
        is_known = self._is_mode_known(exchange)
        if _contradicts(exchange, expected, response) and not is_known:
            raise BadRowError("reasoning of another prompt")
        if not _lacks_reasoning(exchange, expected, response):
            return
        if not is_known:
            raise BadRowError(UNSURE, "log the tokens of the prompt, or the usage")
        if not is_whole:
            raise BadRowError(UNSURE, "log all its tokens, or their number (n = 1)")

    def _expected(
        self, prompt_ids: Sequence[int], is_thinking: bool | None
    ) -> Expected:
        prompt_end = self._target.tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
        if _ends_with(REASONING_START, prompt_end):
            return Expected.REST
        if _ends_with(REASONING_END, prompt_end):
            return Expected.ANSWER
        on, off = self._prompts["on"], self._prompts["off"]
        by_default = self._prompts[""]
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
    """Whether a response has reasoning that its prompt does not ask for, or begins within it."""
    start, end = REASONING_START.search(response), REASONING_END.search(response)
    opens = _begins_with(REASONING_START, response)
    closes = end is not None and (start is None or end.start() < start.start())
    if expected is Expected.REST:
        return opens
    if expected is Expected.REASONING:
        return closes
    if expected is Expected.ANYTHING:
        return False
    if expected is Expected.NO_REASONING and EMPTY_REASONING.match(response):
        return False
    return opens or closes or bool(reasoning_of(exchange))


def _lacks_reasoning(exchange: Exchange, expected: Expected, response: str) -> bool:
    """Whether a response does not show the reasoning that its prompt asks for."""
    if reasoning_of(exchange):  # its tokens have it
        return False
    if expected is Expected.REST:
        return REASONING_END.search(response) is None
    return expected is Expected.REASONING and not _begins_with(
        REASONING_START, response
    )


def _begins_with(mark: re.Pattern[str], text: str) -> bool:
    return mark.match(text.lstrip()) is not None


def _ends_with(mark: re.Pattern[str], text: str) -> bool:
    ends = [match.end() for match in mark.finditer(text)]
    return bool(ends) and ends[-1] == len(text)


def reasoning_of(exchange: Exchange) -> Any:
    """The reasoning that a response has in a field or a part of its own; None without any."""
    message = exchange.choice.get("message")
    if not isinstance(message, Mapping):
        return None
    for name in REASONING_FIELDS:
        value = message.get(name)
        if has_content(value) and str(value).strip():
            return value
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return parts if "thinking" in kinds else None  # Mistral
