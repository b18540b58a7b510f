"""What a server's middleware and a bucket of logs give to a harvest, and that they leave nothing behind."""

import asyncio
import base64
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.traffic.conftest import ANSWER, asked, data_url, exchange, said
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.media.urls import cache
from vlmdistill.pipelines.request_log import DAY, Recorder
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.traffic.harvest import harvest
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.vllm.plugin.recording import Recording, with_tokens
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import DataError


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.of("demo-small", tmp_path / "runs")


MARK = "\n</think>\n\n"


class Server:
    """An application that answers as vLLM does, whole or as a stream, with tokens if asked.

    Its parser writes the `reasoning` of a response into a field of its own.
    """

    def __init__(self, encoder: TargetModel, reasoning: str = "") -> None:
        self.encoder, self.seen = encoder, list[dict[str, Any]]()
        self.reasoning = reasoning

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        request = json.loads(body)
        self.seen.append(request)
        text = ANSWER.format(len(self.seen))
        whole = f"{self.reasoning}{MARK}{text}" if self.reasoning else text
        ids = [*self.encoder.tokenizer.encode(whole), self.encoder.info.eos_ids[0]]
        assert request["return_token_ids"] is True
        if request.get("stream"):
            events: list[Any] = [
                {
                    "choices": [
                        {"index": 0, "delta": {"role": "assistant", "content": ""}}
                    ]
                },
                {"choices": [{"index": 0, "delta": {"reasoning": self.reasoning}}]},
                {
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": text[:9]},
                            "token_ids": ids[:3],
                        }
                    ]
                },
                {
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": text[9:]},
                            "token_ids": ids[3:],
                        }
                    ]
                },
                {
                    "choices": [
                        {
                            "index": 0,
                            "delta": {},
                            "finish_reason": "stop",
                            "token_ids": [],
                        }
                    ]
                },
            ]
            parts = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [
                b"data: [DONE]\n\n"
            ]
        else:
            response = said(text, token_ids=ids)
            response["choices"][0]["message"]["reasoning"] = self.reasoning
            parts = [json.dumps(response).encode()]
        status = 400 if request.get("user") == "refused" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def ask(app: Any, body: bytes) -> bytes:
    """Send a body in two pieces; what comes back."""
    left = [
        {"type": "http.request", "body": body[:20], "more_body": True},
        {"type": "http.request", "body": body[20:], "more_body": False},
    ]
    back = list[bytes]()

    async def receive() -> Any:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        back.append(message.get("body", b""))

    names = (
        b"authorization",
        b"cookie",
        b"x-goog-iap-jwt-assertion",
        b"x-forwarded-for",
        b"dpop",
    )
    headers = [*((name, b"word") for name in names), (b"content-length", b"0")]
    headers += [(b"X-Team", b"red"), (b"X-Team", b"blue")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": headers,
    }
    asyncio.run(app(scope, receive, send))
    return b"".join(back)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the middleware records."""
    folder = tmp_path / "log"
    monkeypatch.setenv("VLMDISTILL_RECORD", str(folder))
    return folder


def test_what_passes_the_middleware_is_harvested_with_the_tokens_of_the_server(
    workspace: Workspace,
    encoder: TargetModel,
    log: Path,
    tmp_path: Path,
) -> None:
    policy = write_policy(log, x_team="blue")
    server = Server(encoder)
    app = Recording(server)
    bodies = [
        asked("What is here?", data_url(1)),
        asked("And what is there?", stream=True),
        asked("No.", user="refused"),
        {
            "model": "demo-small",
            "messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        },
    ]
    back = [ask(app, json.dumps(body).encode()) for body in bodies]
    app.recorder.close()
    assert (app.recorder.recorded, app.recorder.lost) == (3, 0)
    assert json.loads(back[0])["choices"][0]["message"]["content"] == ANSWER.format(1)
    assert back[1].endswith(b"data: [DONE]\n\n")
    assert [{**body, "return_token_ids": True} for body in bodies] == server.seen
    made = harvest(workspace, [str(log)])
    assert (made.exchanges, made.kept, made.tokens, made.media) == (3, 2, {"ids": 2}, 1)
    assert {row.text for row in dataset.read(workspace.responses)} == {
        ANSWER.format(1),
        ANSWER.format(2),
    }
    (file,) = log.glob("*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["headers"] == {
        "x-team": ["red", "blue"]
    }
    assert "word" not in file.read_text()
    again = Workspace.of("demo-small", tmp_path / "again")
    assert harvest(again, [str(log)], policy).dropped == {"denied": 3}


def test_reasoning_that_a_parser_has_taken_out_is_harvested_with_its_tokens(
    workspace: Workspace,
    encoder: TargetModel,
    log: Path,
) -> None:
    app = Recording(Server(encoder, "I see a board."))
    for stream in (False, True):
        ask(
            app, json.dumps(asked(f"Is it a stream: {stream}?", stream=stream)).encode()
        )
    app.recorder.close()
    assert harvest(workspace, [str(log)]).tokens == {"ids": 2}
    assert {row.text for row in dataset.read(workspace.responses)} == {
        f"I see a board.{MARK}{ANSWER.format(number)}" for number in (1, 2)
    }


def write_policy(folder: Path, **deny: str) -> Policy:
    """A policy in the folder of a log, which says what of the headers is recorded."""
    folder.mkdir(exist_ok=True)
    lines = [
        f'{name.replace("_", "-")} = "{pattern}"' for name, pattern in deny.items()
    ]
    (folder / "policy.toml").write_text("\n".join(["[deny]", *lines]))
    return Policy.read(folder / "policy.toml")


def test_without_a_policy_no_header_is_recorded_and_none_is_taken_for_missing(
    workspace: Workspace,
    encoder: TargetModel,
    log: Path,
) -> None:
    app = Recording(Server(encoder))
    ask(app, json.dumps(asked("What is here?")).encode())
    app.recorder.close()
    policy = write_policy(log, x_team="blue")  # too late
    made = harvest(workspace, [str(log)], policy)
    assert made.dropped == {"unknown headers": 1}
    assert harvest(workspace, [str(log)]).kept == 1


def test_a_log_is_for_its_user_alone_and_follows_no_link(tmp_path: Path) -> None:
    def modes(folder: Path) -> set[int]:
        paths = [folder, *folder.rglob("*")]
        return {stat.S_IMODE(path.stat().st_mode) for path in paths}

    log = tmp_path / "log"
    for _ in range(2):
        with Recorder(log) as recorder:
            recorder.add(lambda keep: {"image": keep(b"x")})
        assert modes(log) == {0o600, 0o700}
        (day,) = log.glob("*.jsonl")
        day.chmod(0o644)  # as an earlier version did
    victim = tmp_path / "victim"
    day.unlink()
    day.symlink_to(victim)
    for is_link in (True, False):
        day.unlink()
        if is_link:
            day.symlink_to(victim)
        else:
            os.mkfifo(day)
        with Recorder(log) as recorder:
            recorder.add(lambda keep: {})
        assert (recorder.recorded, recorder.lost) == (0, 1)
    assert not victim.exists()


def test_a_folder_of_the_user_is_made_private_if_it_holds_a_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    for folder, name in ((own, "policy.toml"), (shared, "notes.txt")):
        folder.mkdir(0o755)
        (folder / name).touch()
        Recorder(folder).close()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (warning,) = caplog.messages
    assert "notes.txt" in warning
    assert "chmod 700" in warning


def test_of_a_request_with_a_key_twice_no_value_is_lost(
    encoder: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDISTILL_RECORD", str(tmp_path / "log"))
    app = Recording(Server(encoder))
    start = json.dumps(asked("What is here?"))[:-1]
    for users in ('"user": "ann", "user": "ann"', '"user": "ann", "user": "bob"'):
        ask(app, f"{start}, {users}}}".encode())
    app.recorder.close()
    assert (app.recorder.recorded, app.recorder.lost) == (1, 1)


@pytest.mark.parametrize("text", ["[deny", "deny = 1"])
def test_a_policy_that_cannot_be_read_starts_no_server(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(DataError, match=r"policy\.toml"):
        Recorder(tmp_path)


def test_what_waits_to_be_written_is_written_when_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDISTILL_RECORD", str(tmp_path))
    server = """
import time
from vlmdistill.pipelines.vllm.plugin.recording import Recording
Recording(None).recorder.add(lambda keep: time.sleep(1) or {"late": True})
"""
    subprocess.run([sys.executable, "-c", server], check=True, timeout=400)
    (file,) = tmp_path.glob("*.jsonl")
    assert json.loads(file.read_text())["late"]


def test_a_body_that_is_no_object_passes_as_it_is() -> None:
    for body in (b"", b"[1]", b"{}", b" { } ", b"hello"):
        assert with_tokens(body) == body
    assert json.loads(with_tokens(b'{"a": {}} \n')) == {
        "a": {},
        "return_token_ids": True,
    }


def test_what_cannot_be_recorded_is_counted_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    def failing(keep: Any) -> Any:
        raise ZeroDivisionError

    (tmp_path / "1999-01-01.jsonl").write_text("{}")
    with Recorder(tmp_path, keep_seconds=DAY) as recorder:
        recorder.add(failing)
        recorder.add(lambda keep: {"image": keep(b"x")})
    assert (recorder.recorded, recorder.lost) == (1, 1)
    (file,) = tmp_path.glob("*.jsonl")
    assert abs(json.loads(file.read_text())["time"] - time.time()) < DAY
    assert [one.read_bytes() for one in (tmp_path / "media").iterdir()] == [b"x"]


def test_no_copy_of_a_remote_log_stays_on_this_machine(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "cache"))
    bucket = open_backend("memory://logs")
    image = exchange(1, request=asked("What is it?", "1.png"))
    lines = [image, exchange(2), exchange(3, headers={"user": "secret"})]
    bucket.replace(
        "day.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()
    )
    bucket.replace("1.png", base64.b64decode(data_url(3).partition(",")[2]))
    made = harvest(workspace, ["memory://logs"])
    assert (made.exchanges, made.kept, made.media) == (3, 3, 1)
    assert not [file for file in cache().rglob("*") if file.is_file()]
    assert harvest(workspace, ["memory://logs"]).unchanged == 1
