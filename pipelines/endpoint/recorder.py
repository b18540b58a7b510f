"""`serve --record`: a response and its request as a line of a log."""

from pathlib import Path
from typing import Any

from vlmdistill.pipelines.endpoint.chat import image_source
from vlmdistill.pipelines.endpoint.served_decoder import ServedResponse
from vlmdistill.pipelines.request_log import Headers, Keep
from vlmdistill.stores.input_files import read_bytes
from vlmdistill.stores.json_text import loads_once


def exchange(
    response: ServedResponse, body: bytes, headers: Headers, keep: Keep
) -> dict[str, Any]:
    """The line of a response that has ended, with its tokens; `keep` stores the request's images.

    ValueError if the `body` of the request has a key with two values: the line would have one of them.
    """
    loads_once(body.decode())
    counts = response.decoding
    decoding = {
        "drafter": response.drafter_name,
        "calls": counts.calls,
        "accepted": counts.accepted,
        "seconds": round(counts.seconds, 6),
    }
    return {
        "headers": headers,
        "request": _request(response, keep),
        "response": _completion(response),
        "decoding": decoding,
    }


def _completion(response: ServedResponse) -> dict[str, Any]:
    """The response in the form of the OpenAI API, with the ids of its tokens."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": response.text},
        "finish_reason": response.finish,
        "token_ids": [token for cycle in response.cycles for token in cycle.ids],
    }
    usage = {
        "prompt_tokens": response.prompt_tokens,
        "completion_tokens": response.decoding.tokens,
    }
    return {"model": response.decoder.model, "choices": [choice], "usage": usage}


def _request(response: ServedResponse, keep: Keep) -> dict[str, Any]:
    """The request, with its images as files of the log.

    Its temperature is written even if the request leaves it out: other servers' default is 1.
    """
    request = response.request
    row: dict[str, Any] = {"temperature": request.temperature}
    row |= request.model_dump(exclude_unset=True)
    for turn, message in zip(row["messages"], request.messages, strict=True):
        for part, content in zip(turn["content"], message.content, strict=True):
            if content.image_url is not None:
                image = _image_bytes(content.image_url.url, response.media)
                part["image_url"] = {"url": keep(image)}
    return row


def _image_bytes(url: str, media: Path | None) -> bytes:
    source = image_source(url, media)
    return read_bytes(source) if isinstance(source, Path) else source.getvalue()
