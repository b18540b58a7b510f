"""The tokens of a logged response: as the server sent them, else made again of its text, and checked.

A drafter is trained on what the target said token by token. A text has several tokenizations, so that of our
own counts only if it decodes to the text and has as many tokens as the server counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from vlmdistill.pipelines.data.prompts.row import has_content
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.targets.checkpoints.template import REASONING_END
from vlmdistill.pipelines.traffic.dialects import (
    INPUT,
    MESSAGES,
    REASONING_APART,
    SYSTEM,
    Exchange,
)
from vlmdistill.pipelines.traffic.reasoning import ReasoningCheck, reasoning_of
from vlmdistill.stores.errors import PanicError, one_line, without_panics

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.target_model import TargetModel

Origin = Literal["ids", "logprobs", "text"]
CUT = "\ufffd"  # ends a text whose last character was cut
OWN_PROMPT = (
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "documents",
    "data_sources",
    "search_parameters",
    "web_search_options",
    "plugins",
    "transforms",
    "files",
    "rag",
    "context",
    "images",
    INPUT,  # beside messages
    "template",
    "lora_path",
    "reasoning",
    "reasoning_effort",
    "enable_thinking",
    "thinking",
    "think",  # Ollama
    "thinking_budget",
    "reasoning_budget",
    "truncate_prompt_tokens",
    "continue_final_message",
    "echo",
    "previous_response_id",
    "conversation",
    "prompt",
    "system",
    "system_prompt",
)
"""Keys of a request by which a server reads another prompt than the messages, or repeats it."""
EXTRA = "extra_body"  # which clients put their other keys into
NO_TURN = "add_generation_prompt"  # the same, if it is False
TRUNCATED = re.compile(r"\(litellm_truncated\b|^redacted-by-litellm$")  # by LiteLLM
BY_ID = "token_id:"  # vLLM writes tokens so with return_tokens_as_token_ids
BEHIND_EOS = "text behind an EOS"  # of a request with ignore_eos


@dataclass(frozen=True)
class LoggedResponse:
    """A response as its log line has it.

    Args:
        text: With its reasoning.
        ids: Its tokens; None if the line has none, or some of which it is unsure.
    """

    text: str
    ids: list[int] | None


class ResponseTokens:
    """Finds the tokens of responses of one target."""

    def __init__(self, target: "TargetModel") -> None:
        self._tokenizer, self._info = target.tokenizer, target.info
        self._reasoning = ReasoningCheck(target)
        self._most = target.max_characters

    @cached_property
    def _by_text(self) -> Mapping[str, int]:
        """The tokens whose text no other token has."""
        tokens = range(len(self._tokenizer))
        texts = self._tokenizer.batch_decode([[token] for token in tokens])
        counts = Counter(texts)
        return {
            text: token
            for token, text in zip(tokens, texts, strict=True)
            if counts[text] == 1
        }

    def logged(self, exchange: Exchange) -> LoggedResponse:
        """The response of a line; BadRowError if its reasoning is in a field of its own alone.

        Servers may return the reasoning in another field than the answer; the tokens have both.
        """
        answer = response_text(exchange)
        reasoning = reasoning_of(exchange)
        ids = self._logged_ids(exchange.choice)
        text = self._text(ids or ())
        if not reasoning:
            is_shortened = _is_answer_of(exchange, answer, text)
            return LoggedResponse(text if is_shortened else answer, ids)
        if ids is None or not isinstance(reasoning, str):
            raise BadRowError(REASONING_APART)
        if not _has_both(exchange, reasoning.strip(), answer, text):
            raise BadRowError("tokens differ from the text")
        return LoggedResponse(text, ids)

    def of(
        self, exchange: Exchange, response: LoggedResponse, redacted: str
    ) -> tuple[list[int], Origin]:
        """The tokens of a response with its EOS, and where they come from; BadRowError if none are sure.

        `redacted` is its text after the redaction. If that is another one, the tokens are made of it.
        """
        ids, origin = self._original(exchange, response)
        if redacted == response.text:
            return ids, origin
        if self._has_special(ids):
            raise BadRowError("redaction would remove special tokens")
        return self._with_eos(exchange, self._encoded(redacted.rstrip(CUT))), "text"

    def require_reasoning(
        self,
        exchange: Exchange,
        response: LoggedResponse,
        prompt_ids: Sequence[int],
        is_thinking: bool | None,
    ) -> None:
        """BadRowError if a response has not the reasoning that its prompt asks for."""
        text = response.text
        is_whole = exchange.response_count is not None  # `of` has compared it
        if response.ids is not None:  # marks may be special tokens
            text = self._tokenizer.decode(response.ids, skip_special_tokens=False)
            is_whole = self._agrees(exchange, self._with_eos(exchange, response.ids))
        self._reasoning.require(
            exchange, text, prompt_ids, is_thinking=is_thinking, is_whole=is_whole
        )

    @staticmethod
    def _agrees(exchange: Exchange, ids_with_eos: Sequence[int]) -> bool:
        """Whether the server's count, if any, is that of these tokens; it may leave out the EOS."""
        length = len(ids_with_eos)
        counts = {None, length, length - exchange.ended_by_eos}
        return exchange.response_count in counts

    def _original(
        self, exchange: Exchange, response: LoggedResponse
    ) -> tuple[list[int], Origin]:
        """The tokens of a response as it was logged, with its EOS; BadRowError if none are sure."""
        if response.ids is not None:
            self._check_logged(exchange, response.ids, response.text)
            ids = self._with_eos(exchange, response.ids)
            return ids, "ids" if exchange.choice.get("token_ids") else "logprobs"
        if exchange.request.get("ignore_eos"):
            raise BadRowError(BEHIND_EOS)
        ids = self._with_eos(exchange, self._encoded(response.text))
        if not self._agrees(exchange, ids):
            raise BadRowError("another number of tokens")
        return ids, "text"

    def _has_special(self, ids: Sequence[int]) -> bool:
        """Whether tokens have a special one that their text lacks, beside an EOS at the end."""
        inner = ids[:-1] if ids[-1] in self._ends else ids
        whole: str = self._tokenizer.decode(inner, skip_special_tokens=False)
        return whole != self._text(inner)

    def _check_logged(self, exchange: Exchange, ids: list[int], text: str) -> None:
        """BadRowError if logged tokens are not those of the text, or go on behind an EOS."""
        if any(token in self._info.eos_ids for token in ids[:-1]):
            raise BadRowError(BEHIND_EOS)
        decoded = self._text(ids).rstrip(CUT)
        text = text.rstrip(CUT)
        # The text ends before a stop word of the request.
        is_whole = decoded == text
        is_stopped = exchange.has_stops and decoded.startswith(text)
        if not is_whole and not is_stopped:
            raise BadRowError("tokens differ from the text")

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a text; BadRowError if they do not decode to it."""
        if len(text) > self._most:
            raise BadRowError("over length")
        try:
            with without_panics():
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except PanicError as error:
            raise BadRowError(
                "text that the tokenizer refuses", one_line(error)
            ) from None
        if self._text(ids) != text:
            raise BadRowError("text does not decode to itself")
        return ids

    def _logged_ids(self, choice: Mapping[str, Any]) -> list[int] | None:
        """The tokens that a line has, None if it has none, or some of which it is unsure.

        BadRowError if they are another target's.
        """
        ids = self._listed(choice)
        if not all(0 <= token < self._info.vocab_size for token in ids or ()):
            raise BadRowError("tokens of another target")
        return ids

    def _listed(self, choice: Mapping[str, Any]) -> list[int] | None:
        ids = choice.get("token_ids")
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return list(ids)
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if not isinstance(content, list) or not content:
            return None
        tokens = [self._token_of(entry) for entry in content]
        sure_tokens = [token for token in tokens if token is not None]
        return sure_tokens if len(sure_tokens) == len(tokens) else None

    def _token_of(self, entry: Any) -> int | None:
        """The token of an entry of logprobs; None if its text may be another one's."""
        text = entry.get("token") if isinstance(entry, Mapping) else None
        if not isinstance(text, str):
            return None
        number = text.removeprefix(BY_ID)
        if number != text and number.isdecimal():
            return int(number)
        return self._by_text.get(text)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _with_eos(self, exchange: Exchange, ids: list[int]) -> list[int]:
        """With the EOS that ended the response, which most servers leave out."""
        has_eos = bool(ids) and ids[-1] in self._ends
        if has_eos or not exchange.ended_by_eos:
            return ids
        return [*ids, self._eos]

    @property
    def _ends(self) -> set[int | None]:
        """The tokens at which a server ends a response: vLLM's are the tokenizer's EOS as well."""
        return {*self._info.eos_ids, self._tokenizer.eos_token_id}

    @property
    def _eos(self) -> int:
        """The EOS of the chat template where the target has several."""
        own = self._tokenizer.eos_token_id
        return int(own if own in self._info.eos_ids else self._info.eos_ids[0])


def require_same_prompt(exchange: Exchange, ids: Sequence[int]) -> None:
    """BadRowError if the server read a prompt of another length than `ids`, or with other tokens."""
    if exchange.prompt_ids and list(ids) != exchange.prompt_ids:
        raise BadRowError(
            "another prompt", "the tokens that the server has read differ"
        )
    counted = exchange.prompt_count
    if counted is not None and counted != len(ids):
        raise BadRowError(
            "another prompt",
            f"the server has read {counted} tokens, and it has {len(ids)}",
        )


def is_counted(exchange: Exchange) -> bool:
    """Whether the log has the tokens of the prompt that the server has read, or their number."""
    return bool(exchange.prompt_ids) or exchange.prompt_count is not None


def require_whole(exchange: Exchange) -> None:
    """BadRowError if the log says that the prompt was another one, or has only a part of a text.

    A prompt of the request's own template is known by its tokens, where the server has counted them.
    """
    request = exchange.request
    extra = request.get(EXTRA)
    if isinstance(extra, Mapping):
        request = {**request, **extra}
    own = [name for name in OWN_PROMPT if has_content(request.get(name))]
    if MESSAGES not in request and INPUT in own:
        own.remove(INPUT)
    own += [NO_TURN] if request.get(NO_TURN) is False else []
    if not isinstance(request.get(SYSTEM), str | None):  # a list of turns
        own.append(SYSTEM)
    if own and not is_counted(exchange):
        raise BadRowError("another prompt", f"the request has its own {own[0]}")
    texts = _texts([exchange.messages, exchange.choice])
    if any(TRUNCATED.search(text) for text in texts):
        raise BadRowError("cut text", "LiteLLM logs cut or hide it")


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def response_text(exchange: Exchange) -> str:
    """The text of the response; BadRowError if it is not a whole one of plain text.

    It is empty if the response was cut in its reasoning, which is in a field of its own.
    """
    choice = exchange.choice
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise BadRowError("not ended", f"finish_reason {str(finish)[:40]}")
    if exchange.request.get("tools") or exchange.request.get("functions"):
        raise BadRowError("tools")
    content = choice.get("text")
    message = choice.get("message")
    if isinstance(message, Mapping):
        content = message.get("content")
    if isinstance(content, list):  # of the responses API
        parts = [part for part in content if isinstance(part, Mapping)]
        content = "".join(str(part.get("text", "")) for part in parts)
    if not content and finish == "length" and reasoning_of(exchange):
        return ""
    if not isinstance(content, str) or not content:
        raise BadRowError("no text")
    return content


def _is_answer_of(exchange: Exchange, answer: str, text: str) -> bool:
    """Whether a text ends with an answer behind a closing mark, which the server has left out."""
    answer = answer.rstrip(CUT).lstrip()
    behind_marks = [
        text[mark.end() :].rstrip(CUT).lstrip() for mark in REASONING_END.finditer(text)
    ]
    if exchange.has_stops:  # the text ends before a stop word
        return any(behind.startswith(answer) for behind in behind_marks)
    return answer in behind_marks


def _has_both(exchange: Exchange, reasoning: str, answer: str, text: str) -> bool:
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
