"""A client of an OpenAI-compatible server: its models, its metrics, and chat completions by the clock.

Metrics are Prometheus counters, by the names of vLLM, SGLang and `vlmdistill serve`.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx2
import msgspec
from msgspec import Struct

from vlmdistill.pipelines.bench.served_records import (
    OPENING,
    ServerCounts,
    TimedRequest,
)
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.stores.errors import VlmdistillError, one_line
from vlmdistill.stores.schema import content_hash

KEY_VARIABLE = "OPENAI_API_KEY"
SILENCE_SECONDS = 600  # after which a request has failed
CONNECT_SECONDS = 10
PAUSE = 0.2  # seconds between looks at the metrics
PATIENCE = 5.0  # seconds for all looks, until the metrics stand still
OTHER = "is not a server of the OpenAI API"
NOT_FINITE = (
    "it repeats one token that has no log-probability: the target's logits are not finite, use another "
    "dtype"
)
FINISHES: Final = ("stop", "length", "content_filter", "tool_calls", "abort")
REPEATED = re.compile(r"((.{1,16}?)\2+)?", re.DOTALL)
"""The text of one token, repeated, or no text."""
TOO_LONG = re.compile(r"max_(?:completion_)?tokens|maximum context length")
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? ([0-9.eE+]+)$", re.MULTILINE)
POSITION = re.compile(r'(?:^|,)position="(\d+)"')

NAMES: Final = {
    "vllm:generation_tokens_total": "generated",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "chain_accepted",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:mm_cache_queries_total": "images",
    "vllm:mm_cache_hits_total": "cached_images",
    "sglang:generation_tokens_total": "generated",
    "sglang:spec_verify_calls_total": "drafts",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:cached_tokens_total": "cached_tokens",
    "vlmdistill_completion_tokens_total": "generated",
    "vlmdistill_drafts_total": "drafts",
    "vlmdistill_accepted_tokens_total": "accepted",
    "vlmdistill_chain_tried_tokens_total": "chain_tried",
    "vlmdistill_chain_accepted_tokens_total": "chain_accepted",
}
"""Counters, and what we call them."""

Counters = Mapping[tuple[str, int], int]
"""Values by name and position in a draft, 0 where a counter has no positions."""


class ServerError(VlmdistillError):
    """A server cannot be reached or used."""


class RequestError(ServerError):
    """A request got no whole response.

    `kind` says why in our words alone: the server's text may quote the prompt, and must not be recorded.
    """

    def __init__(self, kind: str, said: str = "", *, too_long: bool = False) -> None:
        super().__init__(f"{kind}: {said}" if said else kind)
        self.kind = kind
        self.too_long = too_long  # `max_tokens` is more than the server has room for


class ServedModel(Struct):
    """An entry of GET /v1/models; all but `id` is our own server's addition."""

    id: str
    drafter: str | None = None
    dtype: str = ""
    thinking: Thinking = ""
    """Whether the target reasons, unless a request says; empty: the server does not tell."""


class Models(Struct):
    """GET /v1/models."""

    data: list[ServedModel]


class Delta(Struct):
    """New text of a response; a model that reasons has two kinds, under three names."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """All new text."""
        reasoning = self.reasoning or self.reasoning_content or ""
        return reasoning + (self.content or "")


class StreamChoice(Struct):
    """One response of a chunk."""

    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class Usage(Struct):
    """The lengths of a response."""

    completion_tokens: int


class StreamChunk(Struct):
    """A server-sent event of a chat completion."""

    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: Any = None


class TokenLogprob(Struct):
    """A token of a response; None: its log-probability is no number."""

    logprob: float | None = None


class Logprobs(Struct):
    """The log-probabilities of a response."""

    content: list[TokenLogprob] = []


class CompletionChoice(Struct):
    """A response that was not streamed."""

    logprobs: Logprobs | None = None


class Completion(Struct):
    """A chat completion that was not streamed."""

    choices: list[CompletionChoice]

    @property
    def logprobs(self) -> list[float | None]:
        """Of all tokens, as far as the server gives them."""
        return [
            token.logprob
            for choice in self.choices
            if choice.logprobs
            for token in choice.logprobs.content
        ]


@dataclass(frozen=True)
class Answer:
    """A response of a server."""

    request: TimedRequest
    repeats: bool  # a single token, as after logits that are not finite


@dataclass
class _Stream:
    """What a streamed response has shown so far; times are in seconds since the request."""

    start: float = field(default_factory=time.perf_counter)
    texts: list[str] = field(default_factory=list)
    tokens: int | None = None
    finish: str = ""
    first_text: float = 0.0
    end: float = 0.0

    def add(self, chunk: StreamChunk) -> None:
        """Take an event; RequestError if it says that the request failed."""
        now = time.perf_counter() - self.start
        if chunk.error:
            raise RequestError("the stream has an error", _message(chunk.error))
        if chunk.usage:
            self.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text = choice.delta.text
            if text and not self.first_text:
                self.first_text = now
            self.texts.append(text)
            self.finish = choice.finish_reason or self.finish
            self.end = now

    def answer(self, key: str) -> Answer:
        """The whole response to a prompt; RequestError if it has not ended."""
        if not self.finish:
            raise RequestError("the stream ends before the response does")
        text = "".join(self.texts)
        request = TimedRequest(
            key=key,
            tokens=self.tokens,
            seconds=self.end,
            first_seconds=self.first_text or self.end,
            finish=self.finish if self.finish in FINISHES else "other",
            response=content_hash([text]),
            opening=content_hash([text[:OPENING]]),
        )
        several = self.tokens is not None and self.tokens > 1
        return Answer(request, several and REPEATED.fullmatch(text) is not None)


class ServerClient:
    """One server. ServerError when the URL is none; close it after use."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise ServerError(f"'{url}' is not a URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ServerError(
                f"'{url}' is not a URL of a server: write http://127.0.0.1:8000"
            )
        if parsed.userinfo:
            raise ServerError(
                f"the URL of {parsed.host} has a password: set {KEY_VARIABLE} to a key instead"
            )
        self.address = f"{parsed.host}-{parsed.port}" if parsed.port else parsed.host
        self._shows_metrics = False
        key = os.environ.get(KEY_VARIABLE)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            # A server may close a connection after a fault, or while it is idle: each request has its own.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def request(
        self, method: str, path: str, body: Any = None
    ) -> httpx2.Response:
        """A response of any status; ServerError when the server cannot be reached."""
        try:
            return await self._http.request(method, f"{self.url}/{path}", json=body)
        except httpx2.HTTPError as error:
            reason = one_line(error) or type(error).__name__
            raise ServerError(f"{self.url} cannot be reached: {reason}") from None

    async def models(self) -> list[ServedModel]:
        """The served models; ServerError when it cannot be reached or is no server of the OpenAI API."""
        response = await self.request("GET", "v1/models")
        if response.status_code in (401, 403):
            problem = f"needs a key: set {KEY_VARIABLE}"
            if KEY_VARIABLE in os.environ:
                problem = f"refuses the key in {KEY_VARIABLE}"
            raise ServerError(f"{self.url} {problem}")
        if response.status_code != 200:
            raise ServerError(
                f"{self.url} {OTHER}: GET /v1/models gives {response.status_code}"
            )
        try:
            return msgspec.json.decode(response.content, type=Models).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(
                f"{self.url} {OTHER}: GET /v1/models gives no list ({error})"
            ) from None

    async def settled(self) -> Counters:
        """Its counters once they stand still; empty if it shows no metrics.

        Servers count some events after they have sent the response. Where the server has shown metrics
        before, an empty page is a failed read, and is read again.
        """
        latest = await self._counters()
        deadline = time.perf_counter() + PATIENCE
        while (latest or self._shows_metrics) and time.perf_counter() < deadline:
            await asyncio.sleep(PAUSE)
            now = await self._counters()
            if now and now == latest:
                break
            latest = now or latest
        self._shows_metrics |= bool(latest)
        return latest

    async def counters(self) -> Counters:
        """Its counters now; empty if it shows no metrics; ServerError as `request`."""
        response = await self.request("GET", "metrics")
        return parse(response.text) if response.status_code == 200 else {}

    async def _counters(self) -> Counters:
        try:
            return await self.counters()
        except ServerError:
            return {}

    async def chat(
        self, key: str, messages: Sequence[Any], options: Mapping[str, Any]
    ) -> Answer:
        """Stream the chat completion of a prompt; RequestError says why there is no whole response."""
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode({"messages": messages, **options, **streaming})
        stream = _Stream()
        try:
            async with aclosing(self._events(body)) as events:
                async for data in events:
                    stream.add(msgspec.json.decode(data, type=StreamChunk))
        except httpx2.HTTPError as error:
            raise RequestError(type(error).__name__, one_line(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(
                "it is not the stream of a chat completion", one_line(error)
            ) from None
        return stream.answer(key)

    async def _events(self, body: bytes) -> AsyncGenerator[str]:
        """The data of each server-sent event but the last, which says that there is no more."""
        url = f"{self.url}/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        async with self._http.stream(
            "POST", url, content=body, headers=headers
        ) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                is_event = data != line
                if is_event and data != "[DONE]":
                    yield data

    async def check_finite(
        self, messages: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """ServerError if the logits after a prompt, whose response repeats a token, are not finite.

        The argmax of NaN is token 0, for ever. Such a token has no log-probability, or the server fails to
        write it, as JSON has no NaN. A server that gives no log-probabilities at all (4xx) is believed.
        """
        body = {**options, "max_tokens": 1, "messages": messages, "logprobs": True}
        response = await self.request("POST", "v1/chat/completions", body)
        if 400 <= response.status_code < 500:
            return
        try:
            completion = msgspec.json.decode(response.content, type=Completion)
            finite = None not in completion.logprobs
        except (msgspec.DecodeError, UnicodeDecodeError):
            finite = False
        if not finite:
            raise ServerError(f"{self.url}: {NOT_FINITE}")


def parse(text: str) -> Counters:
    """The counters of a page of metrics, summed over the engines that it lists."""
    counters: dict[tuple[str, int], int] = {}
    for name, labels, value in SAMPLE.findall(text):
        if name in NAMES:
            position = POSITION.search(labels)
            key = NAMES[name], int(position[1]) if position else 0
            counters[key] = counters.get(key, 0) + int(float(value))
    return counters


def between(before: Counters, after: Counters) -> ServerCounts:
    """The counts between two pages of metrics.

    Counters that a page lacks are None, and so are all after a restart of the server. All are None, too, if
    the first page is empty: the later one counts since the server started. Counters of drafts are None when
    there was no draft.
    """
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    if not before or any(value < 0 for value in gained.values()):
        return ServerCounts()
    counts = ServerCounts(
        generated=gained.get(("generated", 0)),
        prompt_tokens=gained.get(("prompt_tokens", 0)),
        cached_tokens=gained.get(("cached_tokens", 0)),
        images=gained.get(("images", 0)),
        cached_images=gained.get(("cached_images", 0)),
    )
    drafts = gained.get(("drafts", 0))
    if not drafts:
        return counts
    accepted = _by_position(gained, "chain_accepted")
    tried = _by_position(gained, "chain_tried")
    if not tried:
        # Every draft is a whole chain: a position is verified after all before it were accepted.
        tried = (drafts, *accepted[:-1])[: len(accepted)]
    return replace(
        counts,
        drafts=drafts,
        accepted=gained.get(("accepted", 0)),
        chain_tried=tried,
        chain_accepted=accepted,
    )


def _by_position(counters: Counters, wanted: str) -> tuple[int, ...]:
    return tuple(
        value for (name, _), value in sorted(counters.items()) if name == wanted
    )


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        message = _message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    too_long = status == 400 and TOO_LONG.search(message) is not None
    return RequestError(f"HTTP {status}", message, too_long=too_long)


def _message(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return one_line(ValueError(message))
