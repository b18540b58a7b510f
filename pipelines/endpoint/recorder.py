"""`serve --record`: a response and its request as a line of a log."""

from pathlib import Path
from typing import Any

from vlmdistill.pipelines.endpoint.chat import image_source
from vlmdistill.pipelines.endpoint.served_decoder import ServedResponse
from vlmdistill.pipelines.request_log import Headers, Keep
from vlmdistill.stores.input_files import read_bytes


def exchange(response: ServedResponse, headers: Headers, keep: Keep) -> dict[str, Any]:
    """The line of a response that has ended, with its tokens."""
    counts = response.decoding
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": response.text},
        "finish_reason": response.finish,
        "token_ids": [token for cycle in response.cycles for token in cycle.ids],
    }
    usage = {
        "prompt_tokens": response.prompt_tokens,
        "completion_tokens": counts.tokens,
    }
    return {
        "headers": headers,
        "request": _request(response, keep),
        "response": {
            "model": response.decoder.model,
            "choices": [choice],
            "usage": usage,
        },
        "decoding": {
            "drafter": response.drafter_name,
            "calls": counts.calls,
            "accepted": counts.accepted,
            "seconds": round(counts.seconds, 6),
        },
    }


def _request(response: ServedResponse, keep: Keep) -> dict[str, Any]:
    """The request with its images as files of the log, and its temperature: other servers' default is 1."""
    request = response.request
    found = {
        "temperature": request.temperature,
        **request.model_dump(exclude_unset=True),
    }
    for turn, message in zip(found["messages"], request.messages, strict=True):
        for part, given in zip(turn["content"], message.content, strict=True):
            if given.image_url is not None:
                source = image_source(given.image_url.url, response.media)
                content = (
                    read_bytes(source)
                    if isinstance(source, Path)
                    else source.getvalue()
                )
                part["image_url"] = {"url": keep(content)}
    return found
