"""Refuses requests before their bodies are read, and writes errors in the form of the OpenAI API."""

import asyncio
import hmac
import json
import re
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/", "/health")  # paths that need no key: they show no data
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")  # a name or an address, and a port
MAX_BODY = 32 * 1024**2  # bytes
BODY_SECONDS = 120  # for a whole body
PASSING = (429, 503)  # statuses of failures that may pass
RETRY_SECONDS = "1"  # after which a client may try again
MAX_BODIES = 8 * MAX_BODY  # of all requests that are read, wait or are decoded


class ApiError(HTTPException):
    """An HTTP status, a message, and the request's parameter that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(status, message)
        self.param, self.code = param, code


def server_stopped() -> ApiError:
    """The error of a server that ends; clients of the API send the request again."""
    return ApiError(
        503, "this server ends: send the request again", code="server_stopped"
    )


def json_response(content: Any, status: int = 200) -> Response:
    """JSON in ASCII: a message may quote half a character, which UTF-8 cannot encode."""
    return Response(json.dumps(content), status, media_type="application/json")


def error_body(error: HTTPException) -> dict[str, Any]:
    """An error in the form of the OpenAI API."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    facts = {
        "message": error.detail,
        "type": kind,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return {"error": facts}


def error_response(error: HTTPException) -> Response:
    """The response to a request that fails with `error`."""
    response = json_response(error_body(error), error.status_code)
    if error.status_code in PASSING:
        response.headers["Retry-After"] = RETRY_SECONDS
    return response


class Gate:
    """ASGI middleware that refuses a request to another host, without the key, or with too large a body.

    Too large is a body beyond MAX_BODY, or beyond the part of MAX_BODIES that other requests leave.
    """

    def __init__(self, app: ASGIApp, key: str | None, hosts: Collection[str]) -> None:
        self.app, self.key, self.hosts = app, key, hosts
        self.body_bytes = 0  # of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with a limit on its body."""
        body = _LimitedBody(self, receive)
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return

        response_started = False

        async def send_noted(message: Message) -> None:
            nonlocal response_started
            response_started = True
            await send(message)

        try:
            await self.app(scope, body.receive, send_noted)
        except asyncio.CancelledError:
            # The server has ended, and its time for running responses is over.
            if response_started:
                raise
            await error_response(server_stopped())(scope, receive, send)
        finally:
            self.body_bytes -= body.size

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        """The reason to refuse a request by its headers; None: pass it on."""
        if not self._names_host(headers.get("host", "")):
            message = f"the Host header must name one of {', '.join(self.hosts)}"
            return ApiError(400, message, code="invalid_host")
        if path not in OPEN and not self._has_key(headers.get("authorization", "")):
            message = "the key is missing or wrong: send the header 'Authorization: Bearer KEY'"
            return ApiError(401, message, code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY:
            return _too_large()
        return None

    def _names_host(self, header: str) -> bool:
        if "*" in self.hosts:
            return True
        host = HOST.fullmatch(header.lower())
        return host is not None and host[1] in self.hosts

    def _has_key(self, header: str) -> bool:
        if self.key is None:
            return True
        scheme, _, sent = header.partition(" ")
        # Compared in constant time, whatever the scheme.
        is_key = hmac.compare_digest(sent.encode(), self.key.encode())
        return is_key and scheme.lower() == "bearer"


class _LimitedBody:
    """The body of one request, which has to arrive in time and within the limits of size."""

    def __init__(self, gate: Gate, receive: Receive) -> None:
        self.size = 0  # bytes that have arrived
        self._gate, self._receive = gate, receive
        self._is_complete = False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive(self) -> Message:
        """The next message of the client; ApiError beyond a limit."""
        try:
            async with asyncio.timeout_at(
                None if self._is_complete else self._deadline
            ):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body has not come within {BODY_SECONDS} s"
            ) from None
        self._is_complete = not message.get("more_body")
        size = len(message.get("body", b""))
        self.size += size
        self._gate.body_bytes += size
        if self.size > MAX_BODY:
            raise _too_large()
        if self._gate.body_bytes > MAX_BODIES:
            raise ApiError(
                429,
                "the requests here are too large together: try again later",
                code="busy",
            )
        return message


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body is larger than {MAX_BODY} bytes: send smaller images"
    )
