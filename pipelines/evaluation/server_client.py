"""A client of an OpenAI-compatible server: its models, its metrics, and chat completions by the clock."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from vlmdistill.pipelines.evaluation.server_metrics import Counters, parse
from vlmdistill.stores.errors import VlmdistillError, one_line

KEY_VARIABLE = "OPENAI_API_KEY"
SILENCE_SECONDS = 600  # after which a request has failed
CONNECT_SECONDS = 10
OTHER = "is not a server of the OpenAI API"


class ServerError(VlmdistillError):
    """A server cannot be reached or used."""


class ServedModel(Struct):
    """An entry of GET /v1/models; `drafter` is our own server's addition."""

    id: str
    drafter: str | None = None


class Models(Struct):
    """GET /v1/models."""

    data: list[ServedModel]


class Delta(Struct):
    """New text of a response; a model that reasons has two kinds, under three names."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


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


class Streamed(Struct, frozen=True):
    """A response, and when it came."""

    text: str
    tokens: int | None
    finish: str
    seconds: float
    first_seconds: float


class ServerClient:
    """One server. ServerError when the URL is none; close it after use."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY_VARIABLE)
        try:
            parsed = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise ServerError(f"'{url}' is not a URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ServerError(f"'{url}' is not a URL of a server: write http://127.0.0.1:8000")
        if parsed.userinfo:
            raise ServerError(f"the URL of {parsed.host} has a password: set {KEY_VARIABLE} to a key instead")
        self.address = f"{parsed.host}-{parsed.port}" if parsed.port else parsed.host
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            # A server may close a connection after a fault, or while it is idle: each request has its own.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def models(self) -> list[ServedModel]:
        """What it serves; ServerError when it cannot be reached or is no server of the OpenAI API."""
        try:
            response = await self._http.get(f"{self.url}/v1/models")
        except httpx2.HTTPError as error:
            raise ServerError(f"{self.url} cannot be reached: {_text(error)}") from None
        if response.status_code in (401, 403):
            known = KEY_VARIABLE in os.environ
            what = f"refuses the key in {KEY_VARIABLE}" if known else f"needs a key: set {KEY_VARIABLE}"
            raise ServerError(f"{self.url} {what}")
        if response.status_code != 200:
            raise ServerError(f"{self.url} {OTHER}: GET /v1/models gives {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=Models).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"{self.url} {OTHER}: GET /v1/models gives no list ({error})") from None

    async def counters(self) -> Counters:
        """What it has counted so far; empty if it shows no metrics."""
        try:
            response = await self._http.get(f"{self.url}/metrics")
        except httpx2.HTTPError:
            return {}
        return parse(response.text) if response.status_code == 200 else {}

    async def chat(self, messages: Sequence[Any], options: Mapping[str, Any]) -> Streamed:
        """Stream a chat completion; ServerError says why there is no whole response."""
        body = msgspec.json.encode(
            {"messages": messages, **options, "stream": True, "stream_options": {"include_usage": True}}
        )
        headers = {"Content-Type": "application/json"}
        text: list[str] = []
        tokens, finish = None, ""
        start = time.perf_counter()
        first = end = 0.0
        try:
            async with self._http.stream(
                "POST", f"{self.url}/v1/chat/completions", content=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise ServerError(_refusal(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == line or data == "[DONE]":  # not an event; the last
                        continue
                    now = time.perf_counter() - start
                    chunk = msgspec.json.decode(data, type=StreamChunk)
                    if chunk.error:
                        raise ServerError(f"the stream has an error: {_message(chunk.error)}")
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                    for choice in chunk.choices:
                        delta = choice.delta
                        new = (delta.reasoning or delta.reasoning_content or "") + (delta.content or "")
                        first = first or (now if new else 0.0)
                        text.append(new)
                        finish, end = choice.finish_reason or finish, now
        except httpx2.HTTPError as error:
            raise ServerError(_text(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"the stream is not that of a chat completion: {error}") from None
        if not finish:
            raise ServerError("the stream ends before the response does")
        return Streamed("".join(text), tokens, finish, end, first or end)


def _refusal(status: int, body: bytes) -> str:
    try:
        message = _message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"HTTP {status}: {message}"


def _message(error: Any) -> str:
    return one_line(ValueError(error.get("message", error) if isinstance(error, dict) else error))


def _text(error: httpx2.HTTPError) -> str:
    return one_line(error) or type(error).__name__
