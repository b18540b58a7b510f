"""What is refused before the body of a request is read, and errors in the form of the OpenAI API."""

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

OPEN = ("/", "/health")  # need no key: they show no data
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")  # a name or an address, and a port
MAX_BODY = 32 * 1024**2  # bytes
BODY_SECONDS = 120  # for a whole body
PASSING, RETRY_SECONDS = (
    (429, 503),
    "1",
)  # what another try may not meet, and when to try
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
    """What a server answers that ends; clients of the API send the request again."""
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
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return {"error": {"message": error.detail, "type": kind, **facts}}


def error_response(error: HTTPException) -> Response:
    """The response to a request that fails with `error`."""
    response = json_response(error_body(error), error.status_code)
    if error.status_code in PASSING:
        response.headers["Retry-After"] = RETRY_SECONDS
    return response


class Gate:
    """ASGI middleware that refuses a request to another host, without the key, or with too large a body.

    That is one larger than MAX_BODY, or than what the other requests leave of MAX_BODIES.
    """

    def __init__(self, app: ASGIApp, key: str | None, hosts: Collection[str]) -> None:
        self.app, self.key, self.hosts = app, key, hosts
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with a `receive` that counts the bytes of its body."""
        headers, held, whole = Headers(scope=scope), 0, False
        latest = asyncio.get_running_loop().time() + BODY_SECONDS
        too_large = ApiError(
            413, f"the body is larger than {MAX_BODY} bytes: send smaller images"
        )

        async def limited() -> Message:
            nonlocal held, whole
            try:
                async with asyncio.timeout_at(None if whole else latest):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"the body has not come within {BODY_SECONDS} s"
                ) from None
            whole = not message.get("more_body")
            size = len(message.get("body", b""))
            held, self._held = held + size, self._held + size
            if held > MAX_BODY:
                raise too_large
            if self._held > MAX_BODIES:
                raise ApiError(
                    429,
                    "the requests here are too large together: try again later",
                    code="busy",
                )
            return message

        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        length = headers.get("content-length", "")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(
            given.encode(), (self.key or "").encode()
        )
        host = HOST.fullmatch(headers.get("host", "").lower())
        if "*" not in self.hosts and not (host and host[1] in self.hosts):
            message = f"the Host header must name one of {', '.join(self.hosts)}"
            await error_response(ApiError(400, message, code="invalid_host"))(
                scope, receive, send
            )
        elif self.key is not None and scope["path"] not in OPEN and not known:
            message = "the key is missing or wrong: send the header 'Authorization: Bearer KEY'"
            await error_response(ApiError(401, message, code="invalid_api_key"))(
                scope, receive, send
            )
        elif length.isdecimal() and int(length) > MAX_BODY:
            await error_response(too_large)(scope, receive, send)
        else:
            try:
                await self.app(scope, limited, watched)
            except (
                asyncio.CancelledError
            ):  # the server has ended, and waited for as long as it does
                if started:
                    raise
                await error_response(server_stopped())(scope, receive, send)
            finally:
                self._held -= held
