"""What every HTTP server of vlmdistill has: the gate, time limits, errors, and pages that load nothing."""

import asyncio
from collections.abc import Callable, Sequence

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlmdistill.pipelines.endpoint.gate import ApiError, Gate, error_response
from vlmdistill.stores.errors import DataError

GRACE_SECONDS = 10  # for running responses, after SIGINT or SIGTERM
HEADER_SECONDS = 10  # for the headers of the first request of a connection
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
    app = FastAPI(title="vlmdistill", docs_url=None, redoc_url=None)  # pages that load scripts from a CDN
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
    safe = {"Content-Security-Policy": POLICY.format(script), "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(html.encode(errors="replace"), headers=safe | headers)  # of JSON


class Connection(H11Protocol):
    """Closes a connection that has not sent the headers of its first request after HEADER_SECONDS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time."""
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        first: object = self.cycle
        if first is None:
            self.transport.close()


def server(app: FastAPI) -> uvicorn.Server:
    """A server that ends at SIGINT or SIGTERM: running responses have GRACE_SECONDS more."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
