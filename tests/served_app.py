"""A server of our own in a thread, and requests to it without the `openai` client."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import openai
from fastapi import FastAPI

from vlmdistill.pipelines.endpoint.app import build_app
from vlmdistill.pipelines.endpoint.hosting import Server, server
from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder
from vlmdistill.pipelines.endpoint.switch import Switch


@dataclass
class Served:
    """A running server."""

    port: int
    opened: ExitStack
    running: Server | None = None  # None: in another process

    def client(self, key: str = "none") -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return self.opened.enter_context(
            openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=400)
        )

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        chunked: bool = False,
        **headers: str,
    ) -> tuple[int, bytes]:
        """The status and the body of a response."""
        return self.exchange(method, path, body, chunked, **headers)[:2]

    def exchange(
        self,
        method: str,
        path: str,
        body: Any = None,
        chunked: bool = False,
        **headers: str,
    ) -> tuple[int, bytes, dict[str, str]]:
        """A response with its headers, in lower case."""
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        with closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=400)
        ) as connection:
            connection.request(method, path, body, sent, encode_chunked=chunked)
            response = connection.getresponse()
            return (
                response.status,
                response.read(),
                {k.lower(): v for k, v in response.getheaders()},
            )

    def metric(self, name: str) -> float:
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")
        )

    def wait_for(self, name: str, value: float) -> None:
        end = time.monotonic() + 300
        while self.metric(f"vlmdistill_{name}") != value:
            assert time.monotonic() < end, f"{name} does not become {value}"
            time.sleep(0.01)


def serving(
    decoder: ServedDecoder | Switch, **options: Any
) -> AbstractContextManager[Served]:
    """A server of a decoder."""
    return running_app(build_app(decoder, **options))


@contextmanager
def running_app(app: FastAPI) -> Iterator[Served]:
    """A server in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = server(app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with ExitStack() as opened:
            yield Served(listener.getsockname()[1], opened, running)
    finally:
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
