"""The forms of log lines that are read, as exchanges of a request and its response.

- `RecordedLine`: `vlmdistill serve --record`, the recorder for vLLM, and what docs/traffic.md converts to.
- `BatchRequest` and `BatchAnswer`: the input and the output files of OpenAI's batch API.
- `LiteLLMLine`: the standard logging payload of LiteLLM (docs.litellm.ai/docs/proxy/logging_spec).

A line of any other form is refused, and an error names the field: what is not read could hide a value that a
policy denies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.resolver import BadRowError

BODY_NAMES = ("user", "model")  # what a policy may name of the request's body
HIDING = ("headers", "extra_headers", "request_headers", "header_names")
OK = 200  # status of HTTP
LITELLM_HEADERS = "x-"  # begins the names of headers that LiteLLM logs
CHAT = ("chat/completions", "/responses")  # the URLs of requests that are read

Seconds = Annotated[float, Meta(ge=1e9, lt=1e11)]
"""Since 1970: a time after 2001, and no milliseconds."""
Headers = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Exchange:
    """One request and the response to it, as they were logged."""

    row: Row  # where it stands
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    time: float | None = None  # in seconds since 1970
    headers: Mapping[str, Sequence[str]] | None = None
    """Of the request, by name in lower case; None: not logged."""
    logs_header: Callable[[str], bool] = lambda name: True
    """Whether a header of this name would have been logged."""

    @property
    def messages(self) -> Any:
        """The conversation that was sent; the row is bad if it is not a list."""
        messages = self.request.get("messages", self.request.get("input"))
        system = self.request.get("instructions")
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

    def values(self, name: str) -> Sequence[str] | None:
        """The values that a policy's list meets: of the `user`, the `model`, or a header in lower case.

        Empty if the request has none of this name; None if the log does not tell.
        """
        is_body_name = name in BODY_NAMES
        body_value = self.request.get(name) if is_body_name else None
        if not isinstance(body_value, str | int | float | NoneType):
            return None
        values = [] if body_value is None else [str(body_value)]
        if self.headers is not None and self.logs_header(name):
            return [*values, *self.headers.get(name, [])]
        return values if is_body_name else None


def _choice_of_responses_api(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message of a response of the responses API, as a choice; BadRowError if it is not one message."""
    output = response.get("output")
    if not isinstance(output, list) or len(output) != 1:
        raise BadRowError("no response")
    message = output[0]
    if not isinstance(message, Mapping) or message.get("type") != "message":
        raise BadRowError("no response")
    finish = "stop" if response.get("status") == "completed" else "length"
    return {"message": message, "finish_reason": finish}


class RecordedLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of our recorder."""

    request: dict[str, Any]
    response: dict[str, Any]
    time: Seconds | None = None
    headers: dict[str, str | list[str]] | None = None
    header_names: list[str] | None = None  # that would have been logged; None: all
    decoding: Any = None  # facts of our server

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
    url: str = CHAT[0]
    method: str = "POST"


class BatchResponse(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of HTTP in the output of a batch."""

    status_code: int = OK
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
        if self.response.status_code != OK:
            raise BadRowError("failed request", f"status {self.response.status_code}")
        if self.response.body is None:
            raise BadRowError("no response")
        return self.response.body

    def exchange(self, row: Row, request: Mapping[str, Any]) -> Exchange:
        """The exchange of a line and its request; BadRowError if the request failed."""
        body = self.body()
        _require_no_headers(request)
        time = body.get("created", body.get("created_at"))
        return Exchange(row, request, body, time=_converted(time, Seconds | None))


class LiteLLMMetadata(msgspec.Struct, kw_only=True):
    """Facts that LiteLLM logs of the client."""

    requester_custom_headers: dict[str, str] | None = None


class LiteLLMLine(msgspec.Struct, kw_only=True):
    """A standard logging payload. Of its many fields, only those that are read are declared."""

    status: str
    messages: list[Any] | dict[str, Any] | str | None
    response: dict[str, Any] | list[Any] | str | None
    model: str
    start_time: Seconds = msgspec.field(name="startTime")
    model_parameters: dict[str, Any] = {}
    metadata: LiteLLMMetadata | None = None
    end_user: str | None = None

    def exchange(self, row: Row) -> Exchange:
        """The exchange of a line; BadRowError if it failed, or its parts are not those of a chat."""
        if self.status != "success":
            raise BadRowError("failed request")
        if not isinstance(self.response, dict):
            raise BadRowError("no response")
        _require_no_headers(self.model_parameters)
        body = {**self.model_parameters, "messages": self.messages, "model": self.model}
        metadata = self.metadata or LiteLLMMetadata()
        headers: dict[str, list[str]] | None = None
        if metadata.requester_custom_headers is not None:
            headers = _by_lower_name(metadata.requester_custom_headers)
        if self.end_user:
            body.setdefault("user", self.end_user)
            if body["user"] != self.end_user:
                raise BadRowError("unreadable line", "user and end_user differ")
        return Exchange(
            row,
            body,
            self.response,
            time=self.start_time,
            headers=headers,
            logs_header=lambda name: name.startswith(LITELLM_HEADERS),
        )


def is_batch_request(value: Any) -> bool:
    """Whether a row is a request of a batch, which is answered elsewhere."""
    if not isinstance(value, Mapping) or "response" in value:
        return False
    return "custom_id" in value and "body" in value


def read_batch_request(value: Any) -> BatchRequest:
    """The request of a batch; BadRowError if it is none for a chat."""
    request: BatchRequest = _converted(value, BatchRequest)
    if not request.url.endswith(CHAT):
        raise BadRowError("no conversation", f"a request to {request.url}")
    return request


def read_line(value: Any) -> RecordedLine | BatchAnswer | LiteLLMLine:
    """The line of a log in its form; BadRowError names the field that is wrong, or says that no form fits."""
    if not isinstance(value, Mapping):
        raise BadRowError("not an object")
    line: RecordedLine | BatchAnswer | LiteLLMLine = _converted(value, _form_of(value))
    return line


def _form_of(value: Mapping[str, Any]) -> type[msgspec.Struct]:
    """The form of a line by its names."""
    if "custom_id" in value:
        return BatchAnswer
    if "startTime" in value:
        return LiteLLMLine
    if "request" in value or "response" in value:
        return RecordedLine
    raise BadRowError(
        "unknown form of a line", "write request and response; see docs/traffic.md"
    )


def _converted(value: Any, form: Any) -> Any:
    """A value in a form; BadRowError names the field that is wrong, and never what it holds."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise BadRowError(f"unreadable line: {str(error)[:200]}") from None


def _by_lower_name(headers: Headers) -> dict[str, list[str]]:
    """The values of headers by name in lower case; an empty list is a value, too."""
    values: dict[str, list[str]] = {}
    for name, value in headers.items():
        listed = [value] if isinstance(value, str) else [*value] or [""]
        values.setdefault(name.strip().lower(), []).extend(
            text.strip() for text in listed
        )
    return values


def _require_no_headers(body: Mapping[str, Any]) -> None:
    """BadRowError if a body has headers, or a name that a policy is about in another spelling."""
    for name in body:
        plain = name.strip().lower().replace("-", "_")
        if plain in HIDING:
            raise BadRowError("headers in the request", f"'{name}': put them beside it")
        if plain in BODY_NAMES and name != plain:
            raise BadRowError("unreadable line", f"'{name}': write {plain}")
