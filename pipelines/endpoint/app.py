"""The HTTP server: chat completions of the OpenAI API, models, health, metrics, and a page to try them."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.endpoint.decoder_queue import (
    DecoderQueue,
    QueueClosedError,
    QueueFullError,
)
from vlmdistill.pipelines.endpoint.gate import (
    ApiError,
    error_body,
    json_response,
    server_stopped,
)
from vlmdistill.pipelines.endpoint.hosting import (
    STOPPABLE,
    application,
    page,
)
from vlmdistill.pipelines.endpoint.metrics import ServingMetrics
from vlmdistill.pipelines.endpoint.recorder import exchange
from vlmdistill.pipelines.endpoint.refusals import refusal
from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder, ServedResponse
from vlmdistill.pipelines.endpoint.switch import Switch
from vlmdistill.pipelines.report.templates import script_hash, source, templates
from vlmdistill.pipelines.request_log import Recorder
from vlmdistill.pipelines.streaming.pieces import Piece
from vlmdistill.pipelines.targets.embedded import limits
from vlmdistill.stores.errors import DataError, PromptError

CLIENT_GONE = 499  # nginx's status for it
ROUTES = "POST /v1/chat/completions, GET /v1/models, /metrics, /health and the page /"
REFUSALS = (QueueFullError, QueueClosedError, HTTPException, DataError, PromptError)
"""Errors that are not of the server."""
COUNTS = (  # of `bench.records.DecodingCounts`, in the JSON of a response
    *("tokens", "calls", "accepted", "seconds", "prefill_seconds", "decode_seconds"),
    *("chain_tried", "chain_accepted"),
)

Value = TypeVar("Value")


def build_app(
    decoder: ServedDecoder | Switch,
    *,
    recorder: Recorder | None = None,
    key: str | None = None,
    media: Path | None = None,
    queue_limit: int = 16,
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """The application. Without a `key` anyone may use it; a request's Host header must be one of `hosts`.

    `media` is the folder that file:// images may come from; `queue_limit` requests may wait. A `recorder`
    gets each response that has ended. Of a `Switch`, each request has the decoder in use when it comes.
    """
    switch = decoder if isinstance(decoder, Switch) else Switch(decoder)
    name = switch.current.model
    app = application(key, hosts, _api_error)
    queue = DecoderQueue(queue_limit, switch.current.thread)
    setattr(app.state, STOPPABLE, queue)
    metrics = ServingMetrics(queue, switch, recorder)
    started = int(time.time())
    script = source("report/replay.js") + source("endpoint/page.js")
    template = templates().get_template("endpoint/page.html.jinja")
    html = template.render(script=script, limits=limits(name))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page(html, script_hash(script))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", include_in_schema=False)
    async def metrics_text() -> Response:
        return PlainTextResponse(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        target = switch.current.target
        model = {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "vlmdistill",
            "drafter": switch.current.drafter_name,
            "drafters": switch.current.drafters,
            "dtype": target.dtype_name,
            "thinking": target.thinking,
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        if body.model != name:
            message = f"there is no model '{body.model}': this server has '{name}'"
            raise ApiError(404, message, param="model", code="model_not_found")
        response = ServedResponse(switch.current, body, media)
        completion = _Completion(response)
        stream = measured(response, request)
        try:
            if not body.stream:
                content = await _unless_gone(request, completion.whole(stream))
                return json_response(content)
            first = await _unless_gone(request, anext(stream, None))
            unbuffered = {"X-Accel-Buffering": "no"}  # by nginx
            events = completion.events(first, stream)
            return StreamingResponse(events, 200, unbuffered, "text/event-stream")
        except QueueFullError:
            message = f"{queue_limit} requests are waiting: try again later"
            raise ApiError(429, message, code="queue_full") from None
        except QueueClosedError as error:
            raise _api_error(error) from None
        except _ClientGoneError:
            return Response(status_code=CLIENT_GONE)

    async def measured(
        response: ServedResponse, request: Request
    ) -> AsyncGenerator[Piece]:
        """The pieces of a response, which is counted and recorded when it ends."""
        start = time.perf_counter()
        has_text = False
        outcome = "disconnected"
        pieces = queue.stream(response.pieces(), response.abandoned)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    if not has_text:
                        metrics.first_text.observe(time.perf_counter() - start)
                        has_text = True
                    yield piece
            outcome = response.finish
            switch.ended(response)
            if recorder:
                body = await request.body()
                recorder.add(partial(exchange, response, body, request.headers.items()))
        except Exception as error:
            outcome = "refused" if isinstance(error, REFUSALS) else "error"
            raise
        finally:
            metrics.ended(response, outcome)

    return app


class _ClientGoneError(Exception):
    """The client has disconnected before its response."""


async def _unless_gone(request: Request, work: Awaitable[Value]) -> Value:
    """The result of `work`, which is cancelled when the client disconnects; then _ClientGoneError."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = working, asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _ClientGoneError
    finally:
        for task in tasks:
            task.cancel()


def _api_error(error: Exception) -> HTTPException:
    """An error as the client sees it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        if error.status_code in (404, 405):
            return ApiError(error.status_code, f"this server has {ROUTES}")
        return error
    if isinstance(error, DataError | PromptError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, QueueClosedError):
        return server_stopped()
    if isinstance(error, RequestValidationError):
        return refusal(error.errors()[0])
    return ApiError(500, "the server failed; its log has the error")


class _Completion:
    """A response in the JSON of the OpenAI API, with the additions of docs/serve.md."""

    def __init__(self, response: ServedResponse) -> None:
        self._response = response
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": response.decoder.model,
        }

    async def whole(self, pieces: AsyncGenerator[Piece]) -> dict[str, Any]:
        """The response at once."""
        text = "".join([piece.text async for piece in pieces])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": self._response.finish,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage(),
            "decoding": self._decoding(),
        }

    async def events(
        self, first: Piece | None, rest: AsyncGenerator[Piece]
    ) -> AsyncGenerator[str]:
        """The response as server-sent events, a chunk for each piece; a later error is the last event."""
        yield self._chunk({"role": "assistant", "content": ""})
        async with aclosing(rest):
            piece = first
            while piece is not None:
                timing = {"drafted": piece.drafted, "seconds": piece.seconds}
                yield self._chunk({"content": piece.text}, piece=timing)
                try:
                    piece = await anext(rest, None)
                except Exception as error:
                    yield f"data: {json.dumps(error_body(_api_error(error)))}\n\n"
                    if isinstance(error, QueueClosedError):
                        return
                    raise
        yield self._chunk({}, self._response.finish, decoding=self._decoding())
        if self._response.request.stream_options.include_usage:
            yield self._event(choices=[], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _chunk(
        self, delta: dict[str, str], finish: str | None = None, **more: Any
    ) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return self._event(choices=[choice], **more)

    def _event(self, **more: Any) -> str:
        event = {**self._head, "object": "chat.completion.chunk", **more}
        return f"data: {json.dumps(event)}\n\n"

    def _usage(self) -> dict[str, int]:
        prompt = self._response.prompt_tokens
        tokens = self._response.decoding.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def _decoding(self) -> dict[str, Any]:
        decoding = self._response.decoding
        counts = {name: getattr(decoding, name) for name in COUNTS}
        return {
            "drafter": self._response.drafter_name,
            **counts,
            "tokens_per_call": (decoding.tokens - 1) / max(1, decoding.calls),
        }
