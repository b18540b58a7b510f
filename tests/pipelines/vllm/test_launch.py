"""`vllm serve` as our process: it ends whatever happens to us, and says why it cannot be used."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.drafters import synthetic
from vlmdistill.cli.main import main
from vlmdistill.pipelines.cluster.engine_environment import VARIABLE
from vlmdistill.pipelines.vllm import launch
from vlmdistill.pipelines.vllm.launch import EngineError

PYTHON = """#!/bin/sh
case "$2" in *distributions*) echo 0.32.0 ;; *) exec {real} "$@" ;; esac
"""
SERVER = """#!{real}
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = subprocess.Popen(["sleep", "600"])
open("pids", "w").write(f"{{os.getpid()}} {{child.pid}}")
{first}
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
BROKEN = "sys.exit('loading\\nValueError: no room for the KV cache')"
ASLEEP = "import time; time.sleep(600)"
IN_BLOCK = """
import sys, time
from pathlib import Path
from vlmdistill.pipelines.vllm.launch import vllm_server
with vllm_server(Path("target"), "demo", "float32", Path(sys.argv[1]), whole_images=False):
    print("healthy", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """An environment that says it has vLLM 0.32, with a server and a process that the server starts."""

    def made(first: str) -> None:
        bin = tmp_path / "bin"
        bin.mkdir()
        for name, text in {"python": PYTHON, "vllm": SERVER}.items():
            (bin / name).write_text(text.format(real=sys.executable, first=first))
            (bin / name).chmod(0o755)
        monkeypatch.setenv(VARIABLE, str(bin / "python"))

    return made


def server(folder: Path) -> AbstractContextManager[str]:
    return launch.vllm_server(
        Path("target"), "demo", "float32", folder / "log", whole_images=False
    )


def assert_ended(folder: Path) -> None:
    """The server and its process are gone, or wait to be reaped."""

    def alive() -> Iterator[str]:
        for pid in (folder / "pids").read_text().split():
            stat = Path(f"/proc/{pid}/stat")
            if stat.exists() and ") Z" not in stat.read_text():
                yield pid

    end = time.monotonic() + 20
    while (left := list(alive())) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        (
            "ValueError: no room\nRuntimeError: Engine core initialization failed. See",
            1,
            "no room",
        ),
        (
            "Model architectures ['EagleVlmdistill'] are not supported: KeyError",
            1,
            "no plugin vlmdistill",
        ),
        ("ValueError: no room", -9, "SIGKILL"),
        ("loading\ngone\n", 3, "gone"),
        ("", 3, "exit status 3"),
    ],
)
def test_the_reason_is_the_error_that_names_the_cause(
    log: str, status: int, words: str
) -> None:
    found = launch.reason(log, status)
    assert words in found
    assert "Engine core" not in found


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_server_ends_with_its_block(
    error: type[BaseException], tmp_path: Path, engine: Callable[[str], None]
) -> None:
    engine("")
    with pytest.raises(error), server(tmp_path):
        raise error
    assert_ended(tmp_path)


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_server_ends_when_we_are_ended(
    signal: str, tmp_path: Path, engine: Callable[[str], None]
) -> None:
    engine(
        "import signal; signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(0)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", IN_BLOCK, str(tmp_path / "log")], stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"healthy\n"
        subprocess.run(["kill", f"-{signal}", str(run.pid)], check=True)
        assert run.wait(20) == (143 if signal == "TERM" else -9)
    assert_ended(tmp_path)


def test_a_server_that_is_not_healthy_in_time_is_ended(
    tmp_path: Path, engine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(ASLEEP)
    monkeypatch.setattr(launch, "PATIENCE", 2.0)
    with (
        pytest.raises(EngineError, match="not healthy after 2 seconds"),
        server(tmp_path),
    ):
        pass
    assert_ended(tmp_path)


def test_the_openmp_of_an_engine_environment_is_loaded_first(tmp_path: Path) -> None:
    """vLLM on a CPU asks for it; what the environment says takes precedence."""
    python = tmp_path / "bin/python"
    assert launch.preloaded(python) == {}
    library = tmp_path / launch.OPENMP
    library.parent.mkdir()
    library.touch()
    assert launch.preloaded(python) == {"LD_PRELOAD": str(library)}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two drafters and a prompt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMDISTILL_RUNS", raising=False)
    for name in ("sparrow", "eagle2"):
        synthetic.save(name, Path("runs/demo-small/drafters", name))
    Path("talks.json").write_text(json.dumps([{"question": "Why?"}]))
    assert main(["prompts", "talks.json", "--split", "eval"]) == 0
    return tmp_path / "runs/demo-small"


def test_eval_says_of_each_drafter_why_vllm_does_not_serve_it(
    workspace: Path, engine: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(BROKEN)
    capsys.readouterr()
    assert main(["eval", "sparrow", "eagle2", "--engine", "vllm"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        shown.err.count("loading\nValueError: no room for the KV cache\n") == 2
    )  # the ends of the logs
    for name in ("sparrow", "eagle2"):
        (line,) = [one for one in shown.err.splitlines() if one.startswith(name)]
        assert "ValueError: no room for the KV cache" in line
    assert_ended(workspace / "served")


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["sparrow"], "nowhere/python"),
        (["lookahead"], "lookahead"),
        (["../drafters/sparrow"], "sparrow"),
    ],
)
def test_what_eval_cannot_serve_is_one_line_and_starts_nothing(
    names: list[str],
    word: str,
    workspace: Path,
    engine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine("")
    if "/" in word:
        monkeypatch.setenv(VARIABLE, word)
    capsys.readouterr()
    assert main(["eval", *names, "--engine", "vllm"]) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.strip().splitlines()
    assert word in line
    assert not list(workspace.glob("served/*.log"))
    assert os.path.exists(workspace / "drafters/sparrow/config.json")
