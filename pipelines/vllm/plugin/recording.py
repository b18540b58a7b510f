"""vLLM's requests and responses as a log that `harvest` reads: a middleware of its HTTP server.

    VLMDISTILL_RECORD=log vllm serve ... --middleware vlmdistill.pipelines.vllm.plugin.recording.Recording

Each request is made to ask for its tokens, by bytes appended to it, without parsing it. All other work comes
after the response, in a thread. So responses have the fields `prompt_token_ids` and `token_ids`.
"""

import atexit
import base64
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.request_log import Headers, Keep, Recorder
from vlmdistill.stores.json_text import loads_once
from vlmdistill.stores.schema import seconds

FOLDER, FOR = "VLMDISTILL_RECORD", "VLMDISTILL_RECORD_FOR"
ASKED = b', "return_token_ids": true}'
PATH = "/v1/chat/completions"
TEXTS = ("content", "reasoning_content", "reasoning")  # of a message

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Recording:
    """The middleware. ValueError when it is not told where to record, or a wrong time."""

    def __init__(self, app: App) -> None:
        self.app = app
        folder = os.environ.get(FOLDER)
        kept_for = os.environ.get(FOR)
        if not folder:
            raise ValueError(f"set {FOLDER} to the folder that gets the log")
        max_age = seconds(kept_for, FOR) if kept_for else None
        self.recorder = Recorder(Path(folder), max_age)
        atexit.register(self.recorder.close)  # vLLM tells a middleware no end

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, and keep what is answered with status 200."""
        is_chat = scope["type"] == "http" and scope["path"] == PATH
        if not is_chat or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        message = await receive()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
            message = await receive()
        changed_body = with_tokens(bytes(body))
        if message["type"] == "http.request":
            message = {
                "type": "http.request",
                "body": changed_body,
                "more_body": False,
            }
        # Else the client has gone, which the application is told.
        replayed = [message]
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() != b"content-length"
        ]
        headers.append((b"content-length", str(len(changed_body)).encode()))

        async def receive_changed() -> Message:
            return replayed.pop() if replayed else await receive()

        status = 0
        answer = bytearray()

        async def send_and_keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and status == 200:
                answer.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    line = partial(
                        exchange, bytes(body), bytes(answer), _texts(headers)
                    )
                    self.recorder.add(line)
            await send(message)

        changed_scope = {**scope, "headers": headers}
        await self.app(changed_scope, receive_changed, send_and_keep)


def _texts(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in headers
    ]


def with_tokens(body: bytes) -> bytes:
    """The JSON object of a request that asks for the tokens, too; what is no object stays."""
    text = body.rstrip()
    if not text.endswith(b"}") or re.fullmatch(rb"\s*\{\s*\}", text):
        return body
    return text[:-1] + ASKED


def exchange(asked: bytes, said: bytes, headers: Headers, keep: Keep) -> dict[str, Any]:
    """The line of a response that has ended; ValueError if it is none, or a key has two values."""
    request = loads_once(asked.decode())
    is_stream = said.lstrip().startswith((b"data:", b":"))
    response = joined(said) if is_stream else json.loads(said)
    for turn in request["messages"]:
        content = turn.get("content")  # a turn of tool calls has none
        if isinstance(content, list):
            for part in content:
                _keep_image(part, keep)
    return {"headers": headers, "request": request, "response": response}


def _keep_image(part: dict[str, Any], keep: Keep) -> None:
    """Keep the image of a part of a turn as a file, if it is inline, and refer to that file."""
    if part.get("type") != "image_url":
        return
    url = (part.get("image_url") or {}).get("url", "")
    head, _, data = url.partition(",")
    if head.startswith("data:") and head.endswith(";base64"):
        part["image_url"] = {"url": keep(base64.b64decode(data))}


def joined(stream: bytes) -> dict[str, Any]:
    """A stream of server-sent events as one response, of its first choice."""
    response = dict[str, Any]()
    texts = {name: list[str]() for name in TEXTS}
    ids = list[int]()
    finish = None
    for line in stream.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        for name in ("model", "usage", "prompt_token_ids"):
            if event.get(name):
                response[name] = event[name]
        for delta in event.get("choices", ()):
            if delta.get("index", 0) == 0:
                for name, pieces in texts.items():
                    pieces.append(delta.get("delta", {}).get(name) or "")
                ids += delta.get("token_ids") or []
                finish = delta.get("finish_reason") or finish
    message = {name: "".join(pieces) for name, pieces in texts.items()}
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", **message},
        "token_ids": ids,
    }
    return {**response, "choices": [choice]}
