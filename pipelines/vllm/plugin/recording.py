"""vLLM's requests and responses as a log that `harvest` reads: a middleware of its HTTP server.

    VLMDISTILL_RECORD=log vllm serve ... --middleware vlmdistill.pipelines.vllm.plugin.recording.Recording

A request is asked for its tokens, in bytes, without parsing it. What else is done comes after the response,
in a thread. Responses have the fields `prompt_token_ids` and `token_ids` by it.
"""

import atexit
import base64
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.request_log import Headers, Keep, Recorder
from vlmdistill.stores.schema import seconds

FOLDER, FOR = "VLMDISTILL_RECORD", "VLMDISTILL_RECORD_FOR"
ASKED = b', "return_token_ids": true}'
PATH = "/v1/chat/completions"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Recording:
    """The middleware. ValueError when it is not told where to record, or a wrong time."""

    def __init__(self, app: App) -> None:
        self.app = app
        folder, keep = os.environ.get(FOLDER), os.environ.get(FOR)
        if not folder:
            raise ValueError(f"set {FOLDER} to the folder that gets the log")
        self.recorder = Recorder(Path(folder), seconds(keep, FOR) if keep else None)
        atexit.register(self.recorder.close)  # vLLM tells a middleware no end

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, and keep what is answered with status 200."""
        if (
            scope["type"] != "http"
            or scope["path"] != PATH
            or scope["method"] != "POST"
        ):
            await self.app(scope, receive, send)
            return
        asked, said, status = bytearray(), bytearray(), 0
        while (message := await receive())["type"] == "http.request":
            asked += message.get("body", b"")
            if not message.get("more_body", False):
                break
        sent = with_tokens(bytes(asked))
        left: list[Message] = [
            {"type": "http.request", "body": sent, "more_body": False}
        ]
        if message["type"] != "http.request":  # the client has gone
            left = [message]
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() != b"content-length"
        ]
        headers.append((b"content-length", str(len(sent)).encode()))

        async def again() -> Message:
            return left.pop() if left else await receive()

        async def kept(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and status == 200:
                said.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    texts = [
                        (name.decode("latin-1"), value.decode("latin-1"))
                        for name, value in headers
                    ]
                    self.recorder.add(
                        partial(exchange, bytes(asked), bytes(said), texts)
                    )
            await send(message)

        await self.app({**scope, "headers": headers}, again, kept)


def with_tokens(body: bytes) -> bytes:
    """The JSON object of a request that asks for the tokens, too; what is no object stays."""
    text = body.rstrip()
    if not text.endswith(b"}") or re.fullmatch(rb"\s*\{\s*\}", text):
        return body
    return text[:-1] + ASKED


def exchange(asked: bytes, said: bytes, headers: Headers, keep: Keep) -> dict[str, Any]:
    """The line of a response that has ended; ValueError if it is none."""
    request = json.loads(asked)
    response = (
        joined(said) if said.lstrip().startswith((b"data:", b":")) else json.loads(said)
    )
    for turn in request["messages"]:
        content = turn.get("content")  # a turn of tool calls has none
        for part in content if isinstance(content, list) else ():
            url = (
                (part.get("image_url") or {}).get("url", "")
                if part.get("type") == "image_url"
                else ""
            )
            head, _, data = url.partition(",")
            if head.startswith("data:") and head.endswith(";base64"):
                part["image_url"] = {"url": keep(base64.b64decode(data))}
    return {"headers": headers, "request": request, "response": response}


def joined(stream: bytes) -> dict[str, Any]:
    """A stream of server-sent events as one response, of its first choice."""
    content, ids, found = list[str](), list[int](), dict[str, Any]()
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    for line in stream.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        found |= {
            name: event[name]
            for name in ("model", "usage", "prompt_token_ids")
            if event.get(name)
        }
        for one in event.get("choices", ()):
            if one.get("index", 0) == 0:
                content.append(one.get("delta", {}).get("content") or "")
                ids += one.get("token_ids") or []
                choice["finish_reason"] = (
                    one.get("finish_reason") or choice["finish_reason"]
                )
    choice |= {
        "message": {"role": "assistant", "content": "".join(content)},
        "token_ids": ids,
    }
    return {**found, "choices": [choice]}
