"""What every HTTP server of vlmdistill has: the gate, time limits, errors, and pages that load nothing."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from vlmdistill.pipelines.endpoint.connections import Capacity, Connection
from vlmdistill.pipelines.endpoint.gate import ApiError, Gate, error_response
from vlmdistill.stores.errors import DataError

GRACE_SECONDS = 10  # for running responses, after SIGINT or SIGTERM
ANSWER_SECONDS = 5  # to send what they are answered if that is not enough
STOPPABLE = "stoppable"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src '{}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(
    key: str | None, hosts: Sequence[str], explain: Callable[[Exception], HTTPException]
) -> FastAPI:
    """An application behind the gate that reports errors as `explain` does.

    Without a `key` anyone may use it; a request's Host header must be one of `hosts`.
    """
    app = FastAPI(
        title="vlmdistill", docs_url=None, redoc_url=None
    )  # pages that load scripts from a CDN
    app.add_middleware(Gate, key=key, hosts=tuple(host.lower() for host in hosts))

    async def reported(_: Request, error: Exception) -> Response:
        return error_response(explain(error))

    for kind in (HTTPException, RequestValidationError, DataError, Exception):
        app.add_exception_handler(kind, reported)
    return app


def explained(error: Exception) -> HTTPException:
    """An error as the client sees it."""
    if isinstance(error, HTTPException):
        return error
    return ApiError(500, "the server failed; its log has the error")


def page(html: str, script: str, **headers: str) -> Response:
    """A page, and the policy that allows no script but the one with the hash `script`."""
    safe = {
        "Content-Security-Policy": POLICY.format(script),
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(
        html.encode(errors="replace"), headers=safe | headers
    )  # of JSON


class Stoppable(Protocol):
    """What answers requests, and is told that the server ends."""

    def close(self) -> None:
        """Answer what waits, and take no more."""

    def give_up(self) -> None:
        """Answer what is running."""


class Server(uvicorn.Server):
    """Ends at SIGINT or SIGTERM: what waits is answered, running responses have GRACE_SECONDS more."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer all requests, then close their connections."""
        app: Any = self.config.app
        stoppable: Stoppable | None = getattr(app.state, STOPPABLE, None)
        if stoppable is not None:
            stoppable.close()
            asyncio.get_running_loop().call_later(GRACE_SECONDS, stoppable.give_up)
        await super().shutdown(sockets)


def server(app: FastAPI) -> Server:
    """A server of an application, whose `app.state.stoppable` is told of its end."""
    capacity = Capacity.now()
    return Server(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=capacity.connections + 1,
            backlog=capacity.at_once,
            timeout_graceful_shutdown=GRACE_SECONDS + ANSWER_SECONDS,
        )
    )
