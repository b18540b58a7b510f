"""Servers are measured with the thinking of the drafters' training, as `eval` without a server measures."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import tiny
from tests.drafters import synthetic
from tests.pipelines.bench.conftest import held_out
from tests.pipelines.bench.test_served import Toy, toy
from tests.pipelines.targets.test_thinking import with_switch
from tests.served_app import serving
from tests.stores import web
from vlmdistill.cli.main import main
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.pipelines.bench.plan import held_out as chosen
from vlmdistill.pipelines.bench.served_records import ServedEvaluation
from vlmdistill.pipelines.cluster.engine_environment import VARIABLE
from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder, open_decoder
from vlmdistill.pipelines.targets.checkpoints.template import Thinking, thinks
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.workspace import Workspace

PROMPTS = 8
SWITCHED = "enable_thinking"  # by the template of the target
PYTHON = """#!/bin/sh
case "$2" in *distributions*) echo 0.32.0 ;; *) exec {real} "$@" ;; esac
"""
VLLM = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"data": [{"id": option("--served-model-name")}]}
        self.send(json.dumps(body) if "models" in self.path else "")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        variables = asked.get("chat_template_kwargs")
        print(json.dumps([asked["messages"], variables]), flush=True)
        text = {"delta": {"content": "A word"}, "finish_reason": "stop"}
        events = [{"choices": [text]}, {"usage": {"completion_tokens": 2}}]
        self.send("".join(f"data: {json.dumps(event)}\\n\\n" for event in events))

    def send(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(option("--port"))), Answering).serve_forever()
"""
"""It writes down what it is asked; its log is what eval keeps of it."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Held-out prompts for a target with a switch, and drafters that were trained in each mode."""
    folder = tmp_path_factory.mktemp("modes")
    plain = tiny.checkpoint("qwen2_5_vl", folder / "plain", layers=2)
    model = str(with_switch(plain, folder / "target"))
    texts = [f"What is thing number {number}?" for number in range(PROMPTS)]
    workspace = held_out(model, folder, texts)
    modes: tuple[Thinking, ...] = ("", "on", "off", "mixed")
    for mode in modes:
        drafter = workspace.drafter(f"wren-{mode or 'default'}")
        synthetic.save("wren", drafter, target=load(model, thinking=mode))
    return workspace


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment whose vLLM answers every request with a word."""
    for name, text in {"python": PYTHON, "vllm": VLLM}.items():
        (tmp_path / name).write_text(text.replace("{real}", sys.executable))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))


def arguments(workspace: Workspace, *more: str) -> list[str]:
    where = ("--model", workspace.model, "--runs", str(workspace.root.parent))
    return ["eval", *where, "--max-new-tokens", "8", *more]


def record(workspace: Workspace, name: str) -> ServedEvaluation:
    """The last one of that name."""
    files = (workspace.reports / "served").glob(f"{name}.*.json")
    latest = max(files, key=lambda file: file.stat().st_mtime_ns)
    return msgspec.json.decode(latest.read_bytes(), type=ServedEvaluation)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("trained", "more", "mode"),
    [
        ("off", [], "off"),
        ("mixed", [], "mixed"),
        ("default", [], ""),
        ("off", ["--thinking", "on"], "on"),
    ],
)
def test_each_request_to_vllm_has_the_mode_of_the_training(
    trained: str, more: list[str], mode: Thinking, workspace: Workspace
) -> None:
    name = f"wren-{trained}"
    command = arguments(workspace, name, "--engine", "vllm", *more)
    assert main(command) == 0
    assert record(workspace, name).thinking == mode
    for log in (f"{name}.log", "baseline.log"):
        lines = (workspace.root / "served" / log).read_text().splitlines()
        requests = [json.loads(line) for line in lines]
        assert len(requests) > PROMPTS  # one warms up
        reasons = [(variables or {}).get(SWITCHED) for _, variables in requests]
        assert reasons == [thinks(mode, messages) for messages, _ in requests]
        assert len({*reasons}) == (2 if mode == "mixed" else 1)


@pytest.mark.usefixtures("engine")
def test_drafters_of_several_modes_need_one_mode(
    workspace: Workspace, failing: Callable[..., str]
) -> None:
    command = arguments(workspace, "wren-on", "wren-off", "--engine", "vllm")
    assert "different reasoning (wren-on: on, wren-off: off)" in failing(*command)
    assert main([*command, "--thinking", "off", "--limit", "2"]) == 0
    for name in ("wren-on", "wren-off"):
        assert record(workspace, name).thinking == "off"


@dataclass(frozen=True)
class Asked(ServedDecoder):
    """Keeps the lengths of the prompts as it reads them."""

    lengths: list[int] = field(default_factory=list)

    def decode(
        self, request: ChatRequest, media: Path | None
    ) -> tuple[int, Iterator[Cycle]]:
        length, cycles = super().decode(request, media)
        self.lengths.append(length)
        return length, cycles


def asked(workspace: Workspace, drafter: str | None = None) -> Asked:
    opened = open_decoder(workspace, drafter, tree="chain-4" if drafter else None)
    facts = (opened.model, opened.target, opened.drafter, opened.drafter_name)
    return Asked(*facts, opened.tree)


@pytest.mark.parametrize(
    ("trained", "more", "mode"),
    [
        ("off", [], "off"),  # as the server with the drafter has it
        ("mixed", [], ""),  # served in the default mode
        ("off", ["--thinking", "mixed"], "mixed"),
        ("off", ["--thinking", "on"], "on"),
    ],
)
def test_a_running_server_and_its_baseline_read_the_same_prompts(
    trained: str,
    more: list[str],
    mode: Thinking,
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafting, alone = asked(workspace, f"wren-{trained}"), asked(workspace)
    with serving(drafting) as served, serving(alone) as plain:
        urls = [f"http://127.0.0.1:{server.port}" for server in (served, plain)]
        engine = ("--engine", f"openai:{urls[0]}", "--baseline", urls[1])
        capsys.readouterr()
        named = ("--name", f"served-{mode}", "--json")
        assert main(arguments(workspace, *engine, *named, *more)) == 0
    (load_facts,) = json.loads(capsys.readouterr().out)["loads"]
    assert load_facts["identical"] == load_facts["compared"] == PROMPTS
    assert record(workspace, f"served-{mode}").thinking == mode
    where = ("--model", workspace.model, "--runs", str(workspace.root.parent))
    assert main(["report", "--json", *where]) == 0
    served_facts = json.loads(capsys.readouterr().out)["served"]
    modes = {facts.get("thinking", "") for facts in served_facts}
    assert mode in modes
    target = load(workspace.model, thinking=mode)
    prompts = chosen(workspace.prompts, PROMPTS, workspace.model)
    lengths = [target.encode(prompt.messages).length for prompt in prompts]
    for decoder in (drafting, alone):
        assert sorted(decoder.lengths[1:]) == sorted(lengths)  # the first warms up


def test_a_server_accepts_what_eval_accepts_of_each_mode(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*more: str) -> Any:
        capsys.readouterr()
        assert main(arguments(workspace, "--json", *more)) == 0
        return json.loads(capsys.readouterr().out)

    name = "wren-mixed"
    offline = measure(name, "--tree", "chain-4")[name]
    (counts,) = offline["temperatures"]
    with serving(asked(workspace, name)) as served:
        engine = ("--engine", f"openai:http://127.0.0.1:{served.port}")
        served_facts = measure(*engine, "--thinking", "mixed")
    (load_facts,) = served_facts["loads"]
    assert served_facts["thinking"] == offline["thinking"] == "mixed"
    assert load_facts["server"]["drafts"] == counts["calls"]
    assert load_facts["server"]["tokens"] == counts["tokens"]


def refuse_mode(self: Toy) -> None:
    """Answer as a server that refuses what the OpenAI API does not have."""
    body = self.rfile.read(int(self.headers["Content-Length"]))
    assert "chat_template_kwargs" in json.loads(body)
    message = "Unrecognized request argument supplied: chat_template_kwargs"
    self.answer(400, {"error": {"message": message}})


def test_a_server_that_takes_no_mode_is_told(
    workspace: Workspace, failing: Callable[..., str]
) -> None:
    with web.serving(toy(do_POST=refuse_mode)) as http:
        engine = ("--engine", f"openai:http://127.0.0.1:{http.server_port}")
        more = ("--served-model", "toy", "--thinking", "off")
        line = failing(*arguments(workspace, *engine, *more))
    assert "all 8 requests failed" in line
    assert "chat_template_kwargs" in line


def test_a_target_without_a_switch_is_told_before_a_server_is_asked(
    workspace: Workspace, failing: Callable[..., str], tmp_path: Path
) -> None:
    plain = str(Path(workspace.model).parent / "plain")
    other = held_out(plain, tmp_path, ["What is this?"])
    engine = ("--engine", "openai:http://127.0.0.1:1", "--thinking", "off")
    assert "no switch for reasoning" in failing(*arguments(other, *engine))
