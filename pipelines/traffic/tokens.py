"""The tokens of a logged response: as the server sent them, else made again of its text, and checked.

A drafter is trained on what the target said token by token. A text has several tokenizations, so that of our
own counts only if it decodes to the text and has as many tokens as the server counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from vlmdistill.pipelines.data.prompts.row import has_content
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.traffic.dialects import (
    INPUT,
    MESSAGES,
    REASONING_APART,
    SYSTEM,
    Exchange,
)
from vlmdistill.stores.errors import PanicError, one_line, without_panics

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.target_model import TargetModel

Origin = Literal["ids", "logprobs", "text"]
CUT = "\ufffd"  # ends a text whose last character was cut
STOPS = ("stop", "stop_token_ids")
"""Keys of a request (the second is vLLM's): what ends its response beside an EOS."""
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
OTHER_NAMES = {"completion_tokens": "output_tokens", "prompt_tokens": "input_tokens"}
"""Of counts, in the responses API."""
BY_ID = "token_id:"  # vLLM writes tokens so with return_tokens_as_token_ids
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",  # Ollama
    "thinking_blocks",  # LiteLLM
    "reasoning_details",  # OpenRouter
)
"""Fields of a message that have its reasoning, a text in the first three."""
TAIL = 40  # tokens at the end of a prompt that may have a mark of reasoning
BEHIND_EOS = "text behind an EOS"  # of a request with ignore_eos


class ResponseTokens:
    """Finds the tokens of responses of one target."""

    def __init__(self, target: "TargetModel") -> None:
        self._tokenizer, self._info = target.tokenizer, target.info
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

    def text(self, exchange: Exchange) -> str:
        """The text of a response, with its reasoning; BadRowError if that is in a field of its own alone.

        Servers may return the reasoning in another field than the answer; the tokens have both.
        """
        answer = response_text(exchange)
        reasoning = _reasoning(exchange.choice)
        logged_ids = self._logged(exchange.choice)
        if not reasoning:
            text = self._text(logged_ids or ())
            return text if _is_behind_marks(answer, text) else answer
        if logged_ids is None or not isinstance(reasoning, str):
            raise BadRowError(REASONING_APART)
        text = self._text(logged_ids)
        if not _has_both(exchange, text, reasoning.strip(), answer):
            raise BadRowError("tokens differ from the text")
        return text

    def of(
        self, exchange: Exchange, response: str, redacted: str
    ) -> tuple[list[int], Origin]:
        """The tokens of a response with its EOS, and where they come from; BadRowError if none are sure.

        `response` is its `text`, and `redacted` what the redaction has made of it: if that is another text,
        only the text is left to go by.
        """
        ids, origin = self._original(exchange, response)
        if redacted == response:
            return ids, origin
        if self._has_special(ids):
            raise BadRowError("redaction would remove special tokens")
        return self._with_eos(exchange, self._encoded(redacted.rstrip(CUT))), "text"

    def _original(self, exchange: Exchange, text: str) -> tuple[list[int], Origin]:
        """The tokens of a response as it was logged, with its EOS; BadRowError if none are sure."""
        choice = exchange.choice
        logged_ids = self._logged(choice)
        if logged_ids is not None:
            self._check_logged(exchange, logged_ids, text)
            ids = self._with_eos(exchange, logged_ids)
            return ids, "ids" if choice.get("token_ids") else "logprobs"
        if exchange.request.get("ignore_eos"):
            raise BadRowError(BEHIND_EOS)
        text_ids = self._encoded(text)
        ids = self._with_eos(exchange, text_ids)
        counted = _counted(exchange, "completion_tokens")
        # A server may count the EOS, or not.
        possible = {len(ids), len(ids) - _ended_by_eos(exchange)}
        if counted is not None and counted not in possible:
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
        is_stopped = _has_stops(exchange) and decoded.startswith(text)
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

    def _logged(self, choice: Mapping[str, Any]) -> list[int] | None:
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

    def require_marks(
        self, exchange: Exchange, text: str, prompt_ids: Sequence[int]
    ) -> None:
        """BadRowError if a response has not the marks of reasoning of the end of its prompt.

        A server may have read the prompt with another mode, which may be as long, or returned the answer
        without its reasoning. Where it tells the tokens of the prompt, these are compared.
        """
        from vlmdistill.pipelines.targets.encode import (  # which imports torch
            REASONING_END,
            REASONING_START,
        )

        if exchange.response.get("prompt_token_ids"):
            return
        end_of_prompt = self._tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
        is_open = _ends_with(REASONING_START, end_of_prompt)
        is_closed = _ends_with(REASONING_END, end_of_prompt)
        if is_closed and _reasoning(exchange.choice):
            raise BadRowError("reasoning of another prompt")
        logged_ids = self._logged(exchange.choice)
        if logged_ids is not None:  # marks may be special tokens
            text = self._tokenizer.decode(logged_ids, skip_special_tokens=False)
        start, end = REASONING_START.search(text), REASONING_END.search(text)
        begins = REASONING_START.match(text.lstrip()) is not None
        closes = end is not None and (start is None or end.start() < start.start())
        if (begins and (is_open or is_closed)) or (closes and is_closed):
            raise BadRowError("reasoning of another prompt")
        has_tokens = logged_ids is not None
        has_tokens |= _counted(exchange, "completion_tokens") is not None
        if is_open and end is None and _ended_by_eos(exchange) and not has_tokens:
            raise BadRowError(REASONING_APART)

    def _with_eos(self, exchange: Exchange, ids: list[int]) -> list[int]:
        """With the EOS that ended the response, which most servers leave out."""
        has_eos = bool(ids) and ids[-1] in self._ends
        if has_eos or not _ended_by_eos(exchange):
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


def _has_stops(exchange: Exchange) -> bool:
    """Whether the request names what else may end its response."""
    return any(exchange.request.get(name) for name in STOPS)


def _ended_by_eos(exchange: Exchange) -> bool:
    return exchange.choice.get("finish_reason") == "stop" and not _has_stops(exchange)


def require_same_prompt(exchange: Exchange, ids: Sequence[int]) -> None:
    """BadRowError if the server read a prompt of another length than `ids`, or with other tokens."""
    logged = exchange.response.get("prompt_token_ids")
    if isinstance(logged, list) and logged and list(ids) != logged:
        raise BadRowError(
            "another prompt", "the tokens that the server has read differ"
        )
    counted = _counted(exchange, "prompt_tokens")
    if counted is not None and counted != len(ids):
        raise BadRowError(
            "another prompt",
            f"the server has read {counted} tokens, and it has {len(ids)}",
        )


def is_counted(exchange: Exchange) -> bool:
    """Whether the log has the tokens of the prompt that the server has read, or their number."""
    has_count = _counted(exchange, "prompt_tokens") is not None
    return has_count or bool(exchange.response.get("prompt_token_ids"))


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
    if not content and finish == "length" and _reasoning(choice):
        return ""
    if not isinstance(content, str) or not content:
        raise BadRowError("no text")
    return content


def _reasoning(choice: Mapping[str, Any]) -> Any:
    """The reasoning that a response has in a field or a part of its own; None without any."""
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return None
    for name in REASONING:
        if message.get(name):
            return message[name]
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return parts if "thinking" in kinds else None  # Mistral


def _is_behind_marks(answer: str, text: str) -> bool:
    """Whether a response is an answer behind the marks of reasoning, which a server leaves out."""
    from vlmdistill.pipelines.targets.encode import REASONING_END  # which imports torch

    answer, text = answer.rstrip(CUT), text.rstrip(CUT)
    marks = text.removesuffix(answer).rstrip()
    return text.endswith(answer) and _ends_with(REASONING_END, marks)


def _ends_with(mark: re.Pattern[str], text: str) -> bool:
    ends = [match.end() for match in mark.finditer(text)]
    return bool(ends) and ends[-1] == len(text)


def _has_both(exchange: Exchange, text: str, reasoning: str, answer: str) -> bool:
    """Whether a response has its reasoning, and ends with its answer or with what its request stops at."""
    start = text.find(reasoning)
    if start < 0:
        return False
    behind = text[start + len(reasoning) :].rstrip()
    if not answer:
        return not behind.rstrip(CUT)
    answer = answer.rstrip(CUT).strip()
    is_stopped = _has_stops(exchange) and answer in behind
    return is_stopped or behind.rstrip(CUT).endswith(answer)


def _counted(exchange: Exchange, name: str) -> int | None:
    """A number of tokens that the server has counted; None if it is not told."""
    usage = exchange.response.get("usage")
    if not isinstance(usage, Mapping):
        return None
    count = usage.get(name, usage.get(OTHER_NAMES[name]))
    return count if type(count) is int else None
