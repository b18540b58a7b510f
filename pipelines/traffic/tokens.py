"""The tokens of a logged response: as the server sent them, else made again of its text, and checked.

A drafter is trained on what the target said token by token. A text has several tokenizations, so that of our
own counts only if it decodes to the text and has as many tokens as the server counted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.traffic.logs import Exchange
from vlmdistill.stores.errors import PanicError, one_line, without_panics

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.target_model import TargetModel

Origin = Literal["ids", "logprobs", "text"]
CUT = "\ufffd"  # ends a text whose last character was cut
STOPS = (
    "stop",
    "stop_token_ids",
)  # of a request (the second of vLLM): what ends its response beside an EOS
OWN_PROMPT = (
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)  # of vLLM: another prompt is read
TRUNCATED = re.compile(r"\(litellm_truncated\b")
BY_ID = "token_id:"  # vLLM writes tokens so with return_tokens_as_token_ids


class ResponseTokens:
    """Finds the tokens of responses of one target."""

    def __init__(self, target: "TargetModel") -> None:
        self._tokenizer, self._info = target.tokenizer, target.info
        self._most = target.max_characters

    @cached_property
    def _by_text(self) -> Mapping[str, int]:
        """The tokens whose text no other token has."""
        found: dict[str, int] = {}
        texts = self._tokenizer.batch_decode(
            [[one] for one in range(len(self._tokenizer))]
        )
        for one, text in enumerate(texts):
            found[text] = -1 if text in found else one
        return {text: one for text, one in found.items() if one >= 0}

    def of(
        self, exchange: Exchange, text: str, altered: bool
    ) -> tuple[list[int], Origin]:
        """The tokens of a response with its EOS, and where they come from; BadRowError if none are sure.

        `text` is the response, which the redaction has `altered`: then only the text is left to go by.
        """
        choice = exchange.choice
        stops = any(exchange.request.get(name) for name in STOPS)
        ended = choice.get("finish_reason") == "stop" and not stops
        ids = None if altered else self._logged(choice)
        if ids is not None:
            origin: Origin = "ids" if choice.get("token_ids") else "logprobs"
            if not all(0 <= one < self._info.vocab_size for one in ids):
                raise BadRowError("tokens of another target")
            whole, text = (one.rstrip(CUT) for one in (self._text(ids), text))
            if whole != text and not (stops and whole.startswith(text)):
                raise BadRowError("tokens differ from the text")
            return self._ended(ids) if ended else ids, origin
        if not altered and _reasoning(choice):
            raise BadRowError("reasoning without tokens")
        if len(text) > self._most:
            raise BadRowError("over length")
        try:
            with without_panics():
                ids = self._tokenizer.encode(text, add_special_tokens=False)
        except PanicError as error:
            raise BadRowError(
                "text that the tokenizer refuses", one_line(error)
            ) from None
        if self._text(ids) != text:
            raise BadRowError("text does not decode to itself")
        ids = self._ended(ids) if ended else ids
        counted = _counted(exchange, "completion_tokens")
        if (
            not altered
            and counted is not None
            and counted not in (len(ids), len(ids) - ended)
        ):
            raise BadRowError("another number of tokens")
        return ids, "text"

    def _logged(self, choice: Mapping[str, Any]) -> list[int] | None:
        """The tokens that a line has, None if it has none, or some of which it is unsure."""
        ids = choice.get("token_ids")
        if isinstance(ids, list) and ids and all(type(one) is int for one in ids):
            return list(ids)
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if not isinstance(content, list) or not content:
            return None
        found = []
        for one in content:
            token = one.get("token") if isinstance(one, Mapping) else None
            if not isinstance(token, str):
                return None
            number = token.removeprefix(BY_ID)
            known = (
                int(number)
                if number != token and number.isdecimal()
                else self._by_text.get(token)
            )
            if known is None:
                return None
            found.append(known)
        return found

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _ended(self, ids: list[int]) -> list[int]:
        """With the EOS that ended it, which most servers leave out."""
        return ids if ids and ids[-1] in self._info.eos_ids else [*ids, self._eos]

    @property
    def _eos(self) -> int:
        """The EOS of the chat template where the target has several."""
        own = self._tokenizer.eos_token_id
        return int(own if own in self._info.eos_ids else self._info.eos_ids[0])


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


def require_whole(exchange: Exchange) -> None:
    """BadRowError if the log says that the prompt was another one, or has only a part of a text.

    A prompt of the request's own template is known by its tokens, where the server has counted them.
    """
    own = [name for name in OWN_PROMPT if exchange.request.get(name)]
    counted = _counted(exchange, "prompt_tokens") is not None
    if own and not (counted or exchange.response.get("prompt_token_ids")):
        raise BadRowError("another prompt", f"the request has its own {own[0]}")
    if any(
        TRUNCATED.search(text) for text in _texts([exchange.messages, exchange.choice])
    ):
        raise BadRowError(
            "cut text", "the log has a part of it: LiteLLM's spend logs cut long texts"
        )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def response_text(exchange: Exchange) -> str:
    """The text of the response; BadRowError if it is not a whole one of plain text."""
    choice = exchange.choice
    if (finish := choice.get("finish_reason")) not in ("stop", "length"):
        raise BadRowError("not ended", f"finish_reason {str(finish)[:40]}")
    if exchange.request.get("tools") or exchange.request.get("functions"):
        raise BadRowError("tools")
    message = choice.get("message")
    content = (
        message.get("content") if isinstance(message, Mapping) else choice.get("text")
    )
    if isinstance(content, list):  # of the responses API
        content = "".join(
            str(one.get("text", "")) for one in content if isinstance(one, Mapping)
        )
    if not isinstance(content, str) or not content:
        raise BadRowError("no text")
    return content


def _reasoning(choice: Mapping[str, Any]) -> bool:
    message = choice.get("message")
    names = ("reasoning_content", "reasoning")
    return isinstance(message, Mapping) and any(message.get(name) for name in names)


def _counted(exchange: Exchange, name: str) -> int | None:
    """A number of tokens that the server has counted; None if it is not told."""
    usage = exchange.response.get("usage")
    other = {"completion_tokens": "output_tokens", "prompt_tokens": "input_tokens"}[
        name
    ]
    found = usage.get(name, usage.get(other)) if isinstance(usage, Mapping) else None
    return found if type(found) is int else None
