"""What the log of a vLLM costs a request: the middleware against none, in alternation on one server.

    python -m benchmarks.recording [--requests 300] [--tokens 4]

Each round sends the same request three times, in an order of its own: recorded, passed by, and passed by
again. The floor is the difference of the two that were passed by. Times are by a client's clock, one request
at a time; differences are medians over rounds with 95% intervals of a bootstrap. It needs `make engine`.
"""

import argparse
import base64
import io
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from vlmdistill.pipelines.vllm.plugin.recording import (
    FOLDER,
    Message,
    Receive,
    Recording,
    Send,
)

PASS = b"x-pass"
TURNS = ("recorded", "passed by", "passed by again")
DRAWS = 2000


class Sometimes(Recording):
    """The middleware for requests without the header `x-pass` alone."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request by, or record it."""
        passed = scope["type"] == "http" and PASS in dict(scope["headers"])
        await (
            self.app(scope, receive, send)
            if passed
            else super().__call__(scope, receive, send)
        )


def measure(requests: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of a request, and how much longer a recorded one takes, with its floor."""
    import httpx2

    from vlmdistill.pipelines.demo import scenes
    from vlmdistill.pipelines.targets.embedded import EMBEDDED
    from vlmdistill.pipelines.vllm.launch import vllm_server

    rng = random.Random(0)
    spent: dict[str, list[float]] = {turn: [] for turn in TURNS}
    with tempfile.TemporaryDirectory() as folder, httpx2.Client(timeout=600) as client:
        os.environ |= {
            FOLDER: f"{folder}/log",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        more = ("--middleware", "benchmarks.recording.Sometimes")
        target, log = EMBEDDED["demo-small"], Path(folder) / "vllm.log"
        with vllm_server(
            target, "demo-small", "float32", log, whole_images=False, arguments=more
        ) as url:
            for number in range(-4, requests):
                body = asked(scenes.draw(scenes.random_scene(rng, "drafter")), tokens)
                for turn in rng.sample(TURNS, len(TURNS)):
                    headers = {} if turn == "recorded" else {PASS.decode(): "1"}
                    start = time.perf_counter()
                    client.post(
                        f"{url}/v1/chat/completions", json=body, headers=headers
                    ).raise_for_status()
                    if number >= 0:  # the first ones warm up
                        spent[turn].append(1000 * (time.perf_counter() - start))
        lines = sum(
            len(file.read_text().splitlines()) for file in Path(folder).rglob("*.jsonl")
        )
    recorded, first, again = (spent[turn] for turn in TURNS)
    return {
        "requests": requests,
        "lines of the log": lines,
        "milliseconds of a request": median(first),
        "recorded - passed by, ms": interval(
            [a - b for a, b in zip(recorded, first, strict=True)]
        ),
        "floor: passed by twice, ms": interval(
            [a - b for a, b in zip(again, first, strict=True)]
        ),
    }


def asked(image: Any, tokens: int) -> dict[str, Any]:
    """A request that shows an image, and is answered with this many tokens at most."""
    file = io.BytesIO()
    image.save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Describe the image."},
    ]
    messages = [{"role": "user", "content": content}]
    return {
        "model": "demo-small",
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
    }


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95% interval."""
    rng = random.Random(0)
    drawn = sorted(
        median(rng.choices(differences, k=len(differences))) for _ in range(DRAWS)
    )
    return median(differences), drawn[DRAWS // 40], drawn[-DRAWS // 40]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=4)
    given = parser.parse_args()
    for name, value in measure(given.requests, given.tokens).items():
        sys.stdout.write(f"{name}: {value}\n")


if __name__ == "__main__":
    main()
