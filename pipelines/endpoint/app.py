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
    explained,
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
from vlmdistill.stores.errors import DataError, PromptError

CLIENT_GONE = 499  # nginx's status for it
COUNTS = (  # of `bench.records.DecodingCounts`, that a response tells
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
    html = templates().get_template("endpoint/page.html.jinja").render(script=script)

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
        model = {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "vlmdistill",
        }
        return {
            "object": "list",
            "data": [{**model, "drafter": switch.current.drafter_name}],
        }

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        if body.model != name:
            message = f"there is no model '{body.model}': this server has '{name}'"
            raise ApiError(404, message, param="model", code="model_not_found")
        response = ServedResponse(switch.current, body, media)
        completion, stream = _Completion(response), measured(response, request)
        try:
            if not body.stream:
                return json_response(
                    await _unless_gone(request, completion.whole(stream))
                )
            first = await _unless_gone(request, anext(stream, None))
            unbuffered = {"X-Accel-Buffering": "no"}  # by nginx
            return StreamingResponse(
                completion.events(first, stream), 200, unbuffered, "text/event-stream"
            )
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
        start, outcome = time.perf_counter(), "disconnected"
        try:
            async with aclosing(
                queue.stream(response.pieces(), response.abandoned)
            ) as pieces:
                async for piece in pieces:
                    if start:
                        metrics.first_text.observe(time.perf_counter() - start)
                        start = 0
                    yield piece
            outcome = response.finish
            switch.ended(response)
            if recorder:
                recorder.add(partial(exchange, response, request.headers.items()))
        except Exception as error:
            refusals = (
                QueueFullError,
                QueueClosedError,
                HTTPException,
                DataError,
                PromptError,
            )
            known = isinstance(error, refusals)
            outcome = "refused" if known else "error"
            raise
        finally:
            metrics.ended(response, outcome)

    return app


class _ClientGoneError(Exception):
    """No one waits for the response any more."""


async def _unless_gone(request: Request, work: Awaitable[Value]) -> Value:
    """The result of `work`, which is cancelled when the client disconnects; then _ClientGoneError."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = working, _ = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(disconnected()),
    )
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
    if (
        isinstance(error, HTTPException)
        and not isinstance(error, ApiError)
        and error.status_code in (404, 405)
    ):
        routes = "POST /v1/chat/completions, GET /v1/models, /metrics, /health and the page /"
        return ApiError(error.status_code, f"this server has {routes}")
    if isinstance(error, DataError | PromptError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, QueueClosedError):
        return server_stopped()
    if not isinstance(error, RequestValidationError):
        return explained(error)
    return refusal(error.errors()[0])


class _Completion:
    """A response in the JSON of the OpenAI API, with the additions of docs/serve.md."""

    def __init__(self, response: ServedResponse) -> None:
        self._response, decoder = response, response.decoder
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": decoder.model,
        }

    async def whole(self, pieces: AsyncGenerator[Piece]) -> dict[str, Any]:
        """The response at once."""
        text = "".join([piece.text async for piece in pieces])
        message = {"role": "assistant", "content": text}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": self._response.finish,
        }
        kind = {"object": "chat.completion", "choices": [choice]}
        return {
            **self._head,
            **kind,
            "usage": self._usage(),
            "decoding": self._decoding(),
        }

    async def events(
        self, first: Piece | None, rest: AsyncGenerator[Piece]
    ) -> AsyncGenerator[str]:
        """The response as server-sent events, a chunk for each piece; what fails later is the last event."""
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
        return self._event(
            choices=[{"index": 0, "delta": delta, "finish_reason": finish}], **more
        )

    def _event(self, **more: Any) -> str:
        return f"data: {json.dumps({**self._head, 'object': 'chat.completion.chunk', **more})}\n\n"

    def _usage(self) -> dict[str, int]:
        prompt, tokens = self._response.prompt_tokens, self._response.decoding.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def _decoding(self) -> dict[str, Any]:
        counts = self._response.decoding
        tokens_per_call = (counts.tokens - 1) / max(1, counts.calls)
        return {
            "drafter": self._response.drafter_name,
            **{name: getattr(counts, name) for name in COUNTS},
            "tokens_per_call": tokens_per_call,
        }
