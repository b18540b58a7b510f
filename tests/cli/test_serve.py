"""`vlmdistill serve`: what it refuses to start with, and how it ends."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from vlmdistill.cli.main import main


@pytest.fixture(autouse=True)
def _no_key(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMDISTILL_KEY", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["--host", "::"], "VLMDISTILL_KEY"),
        (["--host", "example"], "--host example"),
        (["--key", ""], "ASCII"),
        (["--key", "clé"], "ASCII"),
        (["--media", "nowhere"], "--media nowhere"),
        (["--tree", "oak"], "'oak'"),
        (["--tree", "chain-4"], "--tree chain-4"),
        (["--drafter", "absent"], "absent"),
        (["--model", "no-such-model"], "'no-such-model'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, failing: Callable[..., str]
) -> None:
    assert words in failing("serve", "--quiet", "--port", "0", *arguments)


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    message = f"error: port {port} is in use: give another --port (0: any)\n"
    assert capsys.readouterr().err == message


def test_an_address_of_another_machine_is_one_line(failing: Callable[..., str]) -> None:
    line = failing("serve", "--host", "192.0.2.1", "--key", "k", "--port", "0")
    assert "--host 192.0.2.1 --port 0: " in line
    assert "traceback" not in line


def test_a_missing_package_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "vlmdistill.pipelines.endpoint.app", raising=False)
    monkeypatch.delattr("vlmdistill.pipelines.endpoint.app", raising=False)
    assert main(["serve"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert "fastapi" in line
    assert "pip install 'vlmdistill[serve]'" in line


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_ends_the_server(number: signal.Signals, status: int) -> None:
    options = ["--drafter", "lookahead", "--port", "0"]
    command = [sys.executable, "-m", "vlmdistill", "serve", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            assert line.startswith(
                "serving demo-small with lookahead at http://127.0.0.1:"
            )
            port = int(line.partition(";")[0].rpartition(":")[2])
            with closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=400)
            ) as connection:
                connection.request("GET", "/health")
                assert connection.getresponse().read() == b'{"status":"ok"}'
            run.send_signal(number)
            out, err = run.communicate(timeout=400)
        finally:
            run.kill()
    assert (run.returncode, out) == (status, "")
    stopped = "stopped\n" if number == signal.SIGINT else ""
    assert err == f"loading demo-small ...\n{stopped}"


LATE = """
import sys, time
from vlmdistill.pipelines import request_log as recording
append = recording._append
def late(file, line):  # as on a disk that hangs
    while not (file.parent / "go on").exists():
        time.sleep(0.01)
    append(file, line)
recording._append = late
from vlmdistill.cli.entry import main
sys.exit(main())
"""


def test_sigterm_ends_the_server_once_its_log_is_written(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        LATE,
        "serve",
        "--record",
        str(tmp_path),
        "--port",
        "0",
    ]
    body = {
        "model": "demo-small",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 2,
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            port = int(run.stdout.readline().partition(";")[0].rpartition(":")[2])
            with closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=400)
            ) as connection:
                kind = {"Content-Type": "application/json"}
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), kind
                )
                assert connection.getresponse().status == 200
            run.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(5)
            (tmp_path / "go on").touch()
            assert run.wait(400) == -signal.SIGTERM
        finally:
            run.kill()
    (day,) = tmp_path.glob("*.jsonl")
    assert json.loads(day.read_text())["response"]["usage"]["completion_tokens"] == 2
