"""Connections of a server: a time limit for each of their requests, and fewer of them than descriptors."""

import asyncio
import json
import os
import resource
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from vlmdistill.pipelines.endpoint.gate import RETRY_SECONDS, ApiError, error_body

HEADER_SECONDS = 10  # for the headers of a request, from the end of the one before it
UNREAD_SECONDS = 60  # in which a client reads nothing of its response
MOST_CONNECTIONS = 4096
MOST_AT_ONCE = 128


@dataclass(frozen=True)
class Capacity:
    """How many connections a server accepts, by the descriptors that this process has left."""

    connections: int
    at_once: int
    """Accepted in one turn of the event loop, before any of them is counted."""

    @classmethod
    def now(cls) -> "Capacity":
        """Of descriptors, three times `at_once` are left for files, and for connections that are closing."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = MOST_CONNECTIONS
        if allowed != resource.RLIM_INFINITY:
            free = allowed - _open_descriptors()
        at_once = max(1, min(MOST_AT_ONCE, free // 5))
        connections = min(MOST_CONNECTIONS, free - 3 * at_once)
        return cls(max(1, connections), at_once)


def _open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


class Connection(H11Protocol):
    """Ends when a request does not come, or a response is not read, in time.

    More than `limit_concurrency` connections are not kept: the one that has waited longest for a request
    gives way, or the new one is refused if all have one.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _waits_since = 0.0  # in the time of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first request, and keep the number of connections."""
        super().connection_made(transport)
        self._await_request()
        limit = self.limit_concurrency
        if limit is None or len(self.connections) < limit:
            return
        oldest = min(self._waiting, key=lambda connection: connection._waits_since)
        if oldest is self:
            self.transport.write(_refusal())
        oldest._end()

    @property
    def _waiting(self) -> "list[Connection]":
        """The connections without a request, this one included."""
        own = [one for one in self.connections if isinstance(one, Connection)]
        return [connection for connection in own if connection.waits]

    @property
    def waits(self) -> bool:
        """Whether it has no request that is being answered."""
        running: Any = self.cycle
        return running is None or running.response_complete

    def on_response_complete(self) -> None:
        """Start the time for the next request, unless it has come."""
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered:
            self._await_request()

    def pause_writing(self) -> None:
        """Start the time in which the client must read."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        _cancel(self._unread)
        if self.waits:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the times."""
        _cancel(self._timer)
        _cancel(self._unread)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        _cancel(self._timer)
        self._waits_since = self.loop.time()
        self._timer = self.loop.call_later(
            HEADER_SECONDS, self._end_if_silent, self.cycle
        )

    def _end_if_silent(self, answered: object) -> None:
        if self.cycle is answered and self.waits and not self.flow.write_paused:
            self._end()

    def _end(self) -> None:
        """Close, without waiting for a client that reads nothing."""
        self.connections.discard(self)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _refusal() -> bytes:
    """The response to a connection for which there is no room."""
    error = ApiError(
        503, "the server has too many connections: try again later", code="busy"
    )
    body = json.dumps(error_body(error))
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        "Connection: close",
        f"Retry-After: {RETRY_SECONDS}",
        f"Content-Length: {len(body)}",
        "",
        body,
    ]
    return "\r\n".join(lines).encode()
