"""The forms of log lines that are read, as exchanges of a request and its response.

- `RecordedLine`: `vlmdistill serve --record`, the recorder for vLLM, and what docs/traffic.md converts to.
- `BatchRequest` and `BatchAnswer`: the input and the output files of OpenAI's batch API.
- `LiteLLMLine`: the standard logging payload of LiteLLM (docs.litellm.ai/docs/proxy/logging_spec).

A line of any other form is refused. So is one with a field that is not declared here: it could hold a value
that a policy denies. Only LiteLLM's payload may have other fields, which its specification describes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.resolver import BadRowError

BODY_NAMES = ("user", "model")  # fields of a request that a policy may name
# Fields of a request in which clients send headers, out of a policy's sight.
HEADER_FIELDS = ("headers", "extra_headers", "request_headers", "header_names")
HTTP_OK = 200
MESSAGES, INPUT = "messages", "input"  # of chat completions, and of the responses API
SYSTEM = "instructions"  # of the responses API
STOPS = ("stop", "stop_token_ids")
"""Keys of a request (the second is vLLM's): what ends its response beside an EOS."""
REASONING_APART = "reasoning apart from the text"  # the reason of a dropped response
LITELLM_PREFIX = "x-"  # LiteLLM logs only headers whose names begin with it
CHAT_URLS = (
    "chat/completions",
    "/responses",
)  # ends of the URLs of requests that are read

Seconds = Annotated[float, Meta(ge=1e9, lt=1e11)]
"""Since 1970. The bounds, in the years 2001 and 5138, refuse milliseconds."""
Headers = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Exchange:
    """One request and the response to it, as they were logged."""

    row: Row  # the line of the log
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    time: float | None = None  # in seconds since 1970
    headers: Mapping[str, Sequence[str]] | None = None
    """Of the request, by name in lower case; None: not logged."""
    logs_header: Callable[[str], bool] = lambda name: True
    """Whether the log would have a header of this name if the request had it."""

    @property
    def messages(self) -> Any:
        """The messages that were sent, `instructions` first. What is no list is refused by who reads it."""
        messages = self.request.get(MESSAGES, self.request.get(INPUT))
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        system = self.request.get(SYSTEM)
        if isinstance(messages, list) and isinstance(system, str):
            return [{"role": "system", "content": system}, *messages]
        return messages

    @property
    def choice(self) -> Mapping[str, Any]:
        """The first response; BadRowError if there is none."""
        choices = self.response.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            return choices[0]
        return _choice_of_responses_api(self.response)

    @property
    def prompt_ids(self) -> list[Any] | None:
        """The tokens of the prompt that the server has read; None if the log does not tell."""
        ids = self.response.get("prompt_token_ids")
        return ids if isinstance(ids, list) and ids else None

    @property
    def prompt_count(self) -> int | None:
        """How many tokens of the prompt the server has read; None if the log does not tell."""
        return self._count("prompt_tokens", "input_tokens")

    @property
    def response_count(self) -> int | None:
        """How many tokens the response has; None if the log does not tell, or counts several together."""
        choices = self.response.get("choices")
        has_several = isinstance(choices, list) and len(choices) > 1
        if has_several or self.request.get("n") not in (None, 1):
            return None
        return self._count("completion_tokens", "output_tokens")

    def _count(self, *names: str) -> int | None:
        """The first of some counts that the log has; the second name is the responses API's."""
        usage = self.response.get("usage")
        if not isinstance(usage, Mapping):
            return None
        counts = [usage.get(name) for name in names]
        return next((n for n in counts if type(n) is int and n > 0), None)

    @property
    def has_stops(self) -> bool:
        """Whether the request names what else than an EOS may end its response."""
        return any(self.request.get(name) for name in STOPS)

    @property
    def ended_by_eos(self) -> bool:
        """Whether an EOS has ended the response."""
        return self.choice.get("finish_reason") == "stop" and not self.has_stops

    def values(self, name: str) -> Sequence[str] | None:
        """The values of a name that a policy lists: `user`, `model`, or a header in lower case.

        Empty if the request has none of this name; None if the log does not tell.
        """
        in_body = name in BODY_NAMES
        body_value = self.request.get(name) if in_body else None
        if not isinstance(body_value, str | int | float | NoneType):
            return None
        values = [] if body_value is None else [str(body_value)]
        if self.headers is not None and self.logs_header(name):
            # A header may be called `user`, too: a policy that denies a user denies both.
            return [*values, *self.headers.get(name, [])]
        return values if in_body else None


def _choice_of_responses_api(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """A response of the responses API as a choice; BadRowError unless its output is one message."""
    output = response.get("output")
    items = output if isinstance(output, list) else []
    kinds = [item.get("type") if isinstance(item, Mapping) else None for item in items]
    if sorted(map(str, kinds)) == ["message", "reasoning"]:
        raise BadRowError(REASONING_APART)
    if kinds != ["message"]:
        raise BadRowError("no response")
    message = items[0]
    # A message with another status is incomplete, as one that was cut off by its length.
    finish_reason = "stop" if response.get("status") == "completed" else "length"
    return {"message": message, "finish_reason": finish_reason}


class RecordedLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of our recorder."""

    request: dict[str, Any]
    response: dict[str, Any]
    time: Seconds | None = None
    headers: dict[str, str | list[str]] | None = None
    header_names: list[str] | None = (
        None  # the only ones that are logged; None: all are
    )
    decoding: Any = None  # figures of our server, which are not read

    def exchange(self, row: Row) -> Exchange:
        """The exchange of a line; BadRowError if its request has headers of its own."""
        _require_no_headers(self.request)
        logged = None
        if self.header_names is not None:
            logged = {name.lower() for name in self.header_names}
        return Exchange(
            row,
            self.request,
            self.response,
            time=self.time,
            headers=None if self.headers is None else _by_lower_name(self.headers),
            logs_header=lambda name: logged is None or name in logged,
        )


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of the input of a batch."""

    custom_id: str
    body: dict[str, Any]
    url: str = CHAT_URLS[0]
    method: str = "POST"


class BatchResponse(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of HTTP in the output of a batch."""

    status_code: int = HTTP_OK
    request_id: str | None = None
    body: dict[str, Any] | None = None


class BatchAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of the output of a batch."""

    custom_id: str
    response: BatchResponse | None = None
    id: str | None = None
    error: Any = None

    def body(self) -> dict[str, Any]:
        """The body of the response; BadRowError if the request failed."""
        if self.error:
            raise BadRowError("failed request")
        if self.response is None:
            raise BadRowError("no response")
        if self.response.status_code != HTTP_OK:
            raise BadRowError("failed request", f"status {self.response.status_code}")
        if self.response.body is None:
            raise BadRowError("no response")
        return self.response.body

    def exchange(self, row: Row, request: Mapping[str, Any]) -> Exchange:
        """The exchange of a line and its request; BadRowError if the request failed."""
        body = self.body()
        _require_no_headers(request)
        created = body.get("created", body.get("created_at"))
        time: float | None = _typed(created, Seconds | None)
        return Exchange(row, request, body, time=time)


class LiteLLMMetadata(msgspec.Struct, kw_only=True):
    """What LiteLLM logs of the requester."""

    requester_custom_headers: dict[str, str] | None = None


class LiteLLMLine(msgspec.Struct, kw_only=True):
    """A standard logging payload. Only the fields that are read are declared."""

    status: str
    messages: list[Any] | dict[str, Any] | str | None
    response: dict[str, Any] | list[Any] | str | None
    model: str
    start_time: Seconds = msgspec.field(name="startTime")
    model_parameters: dict[str, Any] = {}
    metadata: LiteLLMMetadata | None = None
    end_user: str | None = None

    def exchange(self, row: Row) -> Exchange:
        """The exchange of a line; BadRowError if the request failed, has headers, or has two users."""
        if self.status != "success":
            raise BadRowError("failed request")
        if not isinstance(self.response, dict):
            raise BadRowError("no response")
        _require_no_headers(self.model_parameters)
        request = {
            **self.model_parameters,
            MESSAGES: self.messages,
            "model": self.model,
        }
        metadata = self.metadata or LiteLLMMetadata()
        headers: dict[str, list[str]] | None = None
        if metadata.requester_custom_headers is not None:
            headers = _by_lower_name(metadata.requester_custom_headers)
        if self.end_user:
            user = request.setdefault("user", self.end_user)
            if user != self.end_user:
                raise BadRowError("unreadable line", "user and end_user differ")
        return Exchange(
            row,
            request,
            self.response,
            time=self.start_time,
            headers=headers,
            logs_header=lambda name: name.startswith(LITELLM_PREFIX),
        )


def is_batch_request(value: Any) -> bool:
    """Whether a row is a request of a batch, whose answer is in another file."""
    if not isinstance(value, Mapping) or "response" in value:
        return False
    return "custom_id" in value and "body" in value


def read_batch_request(value: Any) -> BatchRequest:
    """The request of a batch; BadRowError if it is not for a chat."""
    request: BatchRequest = _typed(value, BatchRequest)
    if not request.url.endswith(CHAT_URLS):
        raise BadRowError("no conversation", f"a request to {request.url}")
    return request


def read_line(value: Any) -> RecordedLine | BatchAnswer | LiteLLMLine:
    """A line of a log, in its form; BadRowError names the field that is wrong, or says that no form fits."""
    if not isinstance(value, Mapping):
        raise BadRowError("not an object")
    line: RecordedLine | BatchAnswer | LiteLLMLine = _typed(value, _form_of(value))
    return line


def _form_of(value: Mapping[str, Any]) -> type[msgspec.Struct]:
    """The form of a line, by the names of its fields."""
    if "custom_id" in value:
        return BatchAnswer
    if "startTime" in value:
        return LiteLLMLine
    if "request" in value or "response" in value:
        return RecordedLine
    raise BadRowError(
        "unknown form of a line", "write request and response; see docs/traffic.md"
    )


def _typed(value: Any, form: Any) -> Any:
    """A value as an object of a form; BadRowError says where it is wrong, without any text of the value."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise BadRowError(f"unreadable line: {_without_names(str(error))}") from None
    except UnicodeEncodeError:  # of a text in the place of an object, or of a name
        raise BadRowError("text is not Unicode") from None


def _without_names(problem: str) -> str:
    """A problem without the name of an unknown field, which may be private text, unless it means headers."""
    match = re.search(r"unknown field `(.*)`", problem, re.DOTALL)
    if match is None or _plain_field(match[1]) in HEADER_FIELDS:
        return problem
    return problem.replace(f" `{match[1]}`", "")


def _plain_field(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _by_lower_name(headers: Headers) -> dict[str, list[str]]:
    """The values of headers by name in lower case; a header without a value has an empty one."""
    values: dict[str, list[str]] = {}
    for name, value in headers.items():
        listed = [value] if isinstance(value, str) else [*value] or [""]
        values.setdefault(name.strip().lower(), []).extend(
            text.strip() for text in listed
        )
    return values


def _require_no_headers(body: Mapping[str, Any]) -> None:
    """BadRowError if a body has headers, or `user` or `model` in a spelling that no policy would meet."""
    for name in body:
        plain_name = _plain_field(name)
        if plain_name in HEADER_FIELDS:
            raise BadRowError("headers in the request", f"'{name}': put them beside it")
        if plain_name in BODY_NAMES and name != plain_name:
            raise BadRowError("unreadable line", f"'{name}': write {plain_name}")
