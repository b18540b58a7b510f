"""The whole loop by its commands: serve and record, adapt from the record, swap, measure, forget."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import tiny
from tests.served_app import Served
from tests.traffic.adapting import SMALL
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "vlmdistill", *words]


@contextmanager
def server(workspace: Workspace, log: Path, errors: Path) -> Iterator[Served]:
    """A `vlmdistill serve` of its own, which looks for versions every second."""
    from contextlib import ExitStack

    words = [
        "serve",
        "--drafter",
        "hawk",
        "--record",
        str(log),
        "--port",
        "0",
        "--reload",
        "1",
    ]
    words += ["--model", "demo-small", "--runs", str(workspace.root.parent)]
    with errors.open("w") as file:
        running = subprocess.Popen(
            command(*words), stdout=subprocess.PIPE, stderr=file, text=True
        )
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            found = re.search(r":(\d+);", line)
            assert found, (line, errors.read_text())
            with ExitStack() as opened:
                yield Served(int(found[1]), opened)
        finally:
            running.terminate()
            running.communicate(timeout=60)


def embedded(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A request of a log with its image as a data URL."""
    body: dict[str, Any] = json.loads(json.dumps(line["request"]))
    for part in body["messages"][0]["content"]:
        if part["type"] == "image_url":
            part["image_url"]["url"] = tiny.data_url(
                (folder / part["image_url"]["url"]).read_bytes()
            )
    return body | {"temperature": 0, "max_tokens": 40}


def ask(
    served: Served, line: dict[str, Any], folder: Path, **more: Any
) -> dict[str, Any]:
    """Send a request of a log."""
    body = embedded(line, folder) | more
    status, said = served.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        Content_Type="application/json",
    )
    assert status == 200, said
    found: dict[str, Any] = json.loads(said)
    return found


def adaptation(recorded: Path) -> list[str]:
    """The words of the command that adapts `hawk` from a log."""
    budget = "--steps 80 --limit 16 --eval-share 0.25 --max-new-tokens 24 --workers 1"
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return ["adapt", "hawk", "--from", str(recorded), *budget.split(), *settings]


def text(said: dict[str, Any]) -> str:
    return str(said["choices"][0]["message"]["content"])


def test_a_served_drafter_is_adapted_to_its_own_log_and_swapped_while_it_serves(
    workspace: Workspace, log: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]
    recorded = tmp_path / "recorded"
    with server(workspace, recorded, tmp_path / "serve.log") as served:
        first = [ask(served, line, log) for line in lines]
        assert {one["decoding"]["drafter"] for one in first} == {"hawk"}
        where = ("--model", "demo-small", "--runs", str(workspace.root.parent))
        run = subprocess.run(
            command(*adaptation(recorded), *where),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "RAY_ADDRESS": "local"},
        )
        assert run.returncode == 0, run.stderr
        assert "hawk.r1 is in use from now on" in run.stdout
        end = time.monotonic() + 120
        while not served.metric('vlmdistill_drafter{version="hawk.r1"}'):
            assert time.monotonic() < end
            time.sleep(0.2)
        second = [ask(served, line, log) for line in lines]
        plain = [ask(served, line, log, speculate=False) for line in lines[::8]]
        assert {one["decoding"]["drafter"] for one in second} == {"hawk.r1"}
        assert list(map(text, first)) == list(map(text, second))
        assert list(map(text, plain)) == list(map(text, second))[::8]
        gained = [
            served.metric(f'vlmdistill_drafter_tokens_per_call{{version="{name}"}}')
            for name in ("hawk", "hawk.r1")
        ]
        assert gained[1] > 1.1 * gained[0]
        assert served.metric("vlmdistill_drafter_rollbacks") == 0
    assert versions.current(workspace, "hawk") == "hawk.r1"
    forgetting = command("forget", "--older-than", "0s", *where)
    assert subprocess.run(forgetting, check=False).returncode == 0
    assert not list((workspace.root / "harvested").iterdir())
