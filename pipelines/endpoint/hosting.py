"""The HTTP server around the endpoint: its gate, time limits and errors, and a page that loads nothing."""

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
from vlmdistill.pipelines.endpoint.gate import Gate, error_response
from vlmdistill.stores.errors import DataError

GRACE_SECONDS = 10  # for running responses, after SIGINT or SIGTERM
ANSWER_SECONDS = 5  # after them, to tell clients that the server ends
STOPPABLE = "stoppable"  # the attribute of `app.state` that is told of the end
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
    # FastAPI's own pages of documentation load scripts from elsewhere.
    app = FastAPI(title="vlmdistill", docs_url=None, redoc_url=None)
    app.add_middleware(Gate, key=key, hosts=tuple(host.lower() for host in hosts))

    async def reported(_: Request, error: Exception) -> Response:
        return error_response(explain(error))

    for kind in (HTTPException, RequestValidationError, DataError, Exception):
        app.add_exception_handler(kind, reported)
    return app


def page(html: str, script: str) -> Response:
    """A page, and the policy that allows no script but the one with the hash `script`."""
    headers = {
        "Content-Security-Policy": POLICY.format(script),
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(html.encode(errors="replace"), headers=headers)


class Stoppable(Protocol):
    """Answers requests, and is told that the server ends."""

    def close(self) -> None:
        """Refuse the requests that wait, and new ones."""

    def give_up(self) -> None:
        """End the responses that are running."""


class Server(uvicorn.Server):
    """Ends at SIGINT or SIGTERM: waiting requests are refused, running responses have GRACE_SECONDS more."""

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
