"""A server that takes drafters while it runs follows the version in use, and gives back what accepts less."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.drafters import synthetic
from tests.stores.web import serving
from vlmdistill.cli.main import main
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.traffic.follow import DRAFTS, Follower, FollowError
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace


class Server(ThreadingHTTPServer):
    """The calls that reach vLLM's workers, and its metrics; it answers with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.loaded, self.refusal, self.status = list[str](), "", 200
        self.emptied, self.empties = list[str](), 200
        self.drafts, self.accepted, self.looked_up = 1000, 3000, 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def drafted(self, accepted: int, drafts: int = DRAFTS) -> None:
        self.drafts, self.accepted = self.drafts + drafts, self.accepted + accepted


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        counters = {
            "generation_tokens": self.server.accepted,
            "spec_decode_num_drafts": self.server.drafts,
            "spec_decode_num_accepted_tokens": self.server.accepted,
            "prefix_cache_queries": self.server.looked_up,
        }
        lines = [f"vllm:{name}_total {value}.0\n" for name, value in counters.items()]
        self.answer(200, "".join(lines))

    def do_POST(self) -> None:
        body = json.loads(
            self.rfile.read(int(self.headers.get("content-length") or 0)) or "null"
        )
        server = self.server
        if self.path.startswith("/reset_prefix_cache"):
            server.emptied.append(self.path)
            return self.answer(server.empties, '{"success": true}')
        if server.status == 200 and self.path == "/collective_rpc":
            assert body["method"] == "load_drafter"
            if not server.refusal:
                server.loaded.append(Path(body["args"][0]).name)
        self.answer(server.status, json.dumps({"results": [server.refusal]}))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as made:
        yield made


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A tiny target's, with a drafter `hawk` and a version of it."""
    folder = tiny.checkpoint("qwen2_5_vl", tmp_path / "target")
    here, target = Workspace.of(str(folder), tmp_path / "runs"), load(str(folder))
    for seed, name in enumerate(("hawk", "hawk.r1")):
        synthetic.save(
            "eagle2",
            here.drafter(name),
            synthetic.untrained("eagle2", target, seed),
            target=target,
        )
    return here


def publish(workspace: Workspace, version: str) -> None:
    versions.record(workspace, "hawk", version, base="hawk", published=True, why="test")


def test_a_server_gets_the_version_in_use_and_the_one_before_if_that_accepts_less(
    workspace: Workspace, server: Server
) -> None:
    """Eight looks at each are enough, however many drafts are between two looks."""
    with Follower(workspace, "hawk", server.url, dtype="float32") as follower:
        follower.look()
        for number in range(8):
            server.drafted(accepted=600 + number % 2, drafts=200)
            follower.look()
        assert server.loaded == ["hawk"]
        publish(workspace, "hawk.r1")
        follower.look()
        assert server.loaded == ["hawk", "hawk.r1"]
        for number in range(7):
            server.drafted(accepted=DRAFTS + number % 2)
            follower.look()
        server.drafted(accepted=DRAFTS)
        server.status = 503
        with pytest.raises(FollowError):
            follower.look()
        server.status = 200
        follower.look()
        follower.look()
        assert server.loaded == ["hawk", "hawk.r1", "hawk"]
    last = versions.rounds(workspace, "hawk")[-1]
    assert (versions.current(workspace, "hawk"), last.base) == ("hawk", "hawk.r1")
    assert "tokens for each call" in last.why


def test_a_prefix_cache_forgets_the_version_before_although_requests_run(
    workspace: Workspace, server: Server
) -> None:
    call = "/reset_prefix_cache?reset_running_requests=true"
    with Follower(workspace, "hawk", server.url, dtype="float32") as follower:
        follower.look()
        assert server.emptied == []  # nothing was looked up in a prefix cache
        server.looked_up = 100
        publish(workspace, "hawk.r1")
        server.empties = 500
        follower.look()
        assert server.loaded == ["hawk", "hawk.r1"]
        server.empties = 200
        follower.look()
        follower.look()
    assert server.emptied == [call, call]


def test_a_server_that_was_restarted_gets_its_version_again(
    workspace: Workspace, server: Server
) -> None:
    with Follower(workspace, "hawk", server.url, dtype="float32") as follower:
        follower.look()
        server.drafts = server.accepted = 10
        follower.look()
        follower.look()
    assert server.loaded == ["hawk", "hawk"]


def test_a_server_that_takes_no_drafters_or_is_not_there_is_one_line(
    workspace: Workspace, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def follow(url: str) -> tuple[int, str]:
        where = [
            "--model",
            workspace.model,
            "--runs",
            str(workspace.root.parent),
            "--dtype",
            "float32",
        ]
        status = main(["follow", "hawk", "--server", url, "--once", *where])
        out, err = capsys.readouterr()
        return status, out + err

    assert follow(server.url) == (0, f"{server.url} drafts with hawk\n")
    server.refusal = "hawk is not another version: a.weight differs"
    status, said = follow(server.url)
    assert (status, "a.weight differs" in said) == (1, True)
    for answer in (404, 500):
        server.status = answer
        status, said = follow(server.url)
        assert (status, "VLLM_SERVER_DEV_MODE=1" in said) == (1, True)
    status, said = follow("http://127.0.0.1:9")
    assert (status, "cannot be reached" in said) == (1, True)
