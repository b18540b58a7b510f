"""Whether a logged response has the reasoning that its prompt asks for.

A chat template ends a prompt in one of three ways:

- open, with an opening mark: the response goes on with the reasoning, and closes it;
- closed, with a closing mark: the response is the answer alone;
- without a mark: the response opens its reasoning itself, if the target reasons.

A server may have read the prompt with another mode of thinking, or returned the answer without the reasoning.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.targets.checkpoints.template import (
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
MODES: tuple[Thinking, ...] = ("", "on", "off")
TAIL = 40  # tokens at the end of a prompt that may have a mark
OTHER_PROMPT = "reasoning of another prompt"
UNSURE = "maybe without its reasoning"
CUT = "\ufffd"  # ends a text whose last character was cut


class ReasoningCheck:
    """Compares the marks of reasoning of responses with the ends of their prompts, for one target."""

    def __init__(self, target: "TargetModel") -> None:
        self._target = target

    def require(
        self,
        exchange: Exchange,
        prompt_ids: Sequence[int],
        response: str,
        *,
        is_whole: bool,
    ) -> None:
        """BadRowError if a response is of another mode of thinking, or may lack its reasoning.

        Args:
            exchange: The tokens of its prompt, where logged, are compared already.
            prompt_ids: The prompt in the mode of the workspace.
            response: The text with its special tokens, where they are known.
            is_whole: Whether the log tells that no token of the response is missing.
        """
        prompt_end = self._target.tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
        is_open = _ends_with(REASONING_START, prompt_end)
        is_closed = _ends_with(REASONING_END, prompt_end)
        start, end = REASONING_START.search(response), REASONING_END.search(response)
        opens = REASONING_START.match(response.lstrip()) is not None
        closes = end is not None and (start is None or end.start() < start.start())
        # Behind a closing mark is no reasoning, and behind an opening one no other.
        is_wrong = opens if is_open else opens or closes or reasoning_of(exchange)
        if (is_open or is_closed) and is_wrong and not exchange.prompt_ids:
            raise BadRowError(OTHER_PROMPT)
        if is_closed:
            return
        lacks_reasoning = end is None if is_open else self._reasons and not opens
        if lacks_reasoning and not (is_whole and self._is_mode_known(exchange)):
            raise BadRowError(UNSURE, "log the usage, or the tokens of the prompt")

    @cached_property
    def _prompts(self) -> dict[Thinking, list[int]]:
        """The tokens of one prompt in each mode."""
        return {
            mode: self._target.encode([PROBE], mode).ids_L.tolist() for mode in MODES
        }

    @cached_property
    def _reasons(self) -> bool:
        """Whether only a closing mark at the end of the prompt keeps the target from reasoning."""
        prompt_end = self._target.tokenizer.decode(self._prompts["off"][-TAIL:])
        return _ends_with(REASONING_END, prompt_end.rstrip())

    def _is_mode_known(self, exchange: Exchange) -> bool:
        """Whether the log tells the mode by the tokens of the prompt, or by their number."""
        if exchange.prompt_ids:
            return True
        prompts = {tuple(ids) for ids in self._prompts.values()}
        lengths = {len(ids) for ids in prompts}
        has_count = exchange.count("prompt_tokens") is not None
        return has_count and len(lengths) == len(prompts)


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
