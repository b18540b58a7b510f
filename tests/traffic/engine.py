"""The whole loop with vLLM: it serves and records, and takes over what is adapted from its record.

Not collected by name: it needs the environment that `make engine` creates, and minutes.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.drafters import synthetic
from tests.traffic.conftest import fresh
from tests.traffic.loop import adaptation, command, embedded, text
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.pipelines.bench.server_client import Counters, between, parse
from vlmdistill.pipelines.cluster.engine_environment import engine_python
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.traffic.follow import Follower
from vlmdistill.pipelines.vllm.launch import vllm_server
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace

PLUGIN = "vlmdistill.pipelines.vllm.plugin"
MORE = (
    "--middleware",
    f"{PLUGIN}.recording.Recording",
    "--worker-extension-cls",
    f"{PLUGIN}.swap.Swap",
    *("--enable-prefix-caching", "--block-size", "32"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("ray"),
]


@dataclass
class Running:
    """A vLLM with the drafter `hawk`, its workspace, and what the target alone responds."""

    url: str
    workspace: Workspace
    bodies: list[dict[str, Any]]
    plain: list[str]
    recorded: Path

    def ask(
        self, bodies: Sequence[dict[str, Any]], at_once: int = 1
    ) -> list[dict[str, Any]]:
        """The responses, in order."""
        return answers(self.url, bodies, at_once)

    def counters(self) -> Counters:
        return parse(httpx2.get(f"{self.url}/metrics").text)

    def accepted_per_draft(self, asked: int = 24) -> float:
        """Of the first requests, one after another; their responses are the target's."""
        before = self.counters()
        responses = [text(response) for response in self.ask(self.bodies[:asked])]
        assert responses == self.plain[:asked]
        found = between(before, self.counters())
        assert found.drafts
        return (found.accepted or 0) / found.drafts

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command of ours on the workspace."""
        where = ("--model", "demo-small", "--runs", str(self.workspace.root.parent))
        return subprocess.run(
            command(*words, *where),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "RAY_ADDRESS": "local"},
        )

    def follow(self) -> "subprocess.CompletedProcess[str]":
        return self.run(
            "follow", "hawk", "--server", self.url, "--dtype", "float32", "--once"
        )


def answers(
    url: str, bodies: Sequence[dict[str, Any]], at_once: int = 1
) -> list[dict[str, Any]]:
    with httpx2.Client(timeout=600) as client, ThreadPoolExecutor(at_once) as pool:
        said = list(
            pool.map(
                lambda body: client.post(f"{url}/v1/chat/completions", json=body),
                bodies,
            )
        )
    assert {one.status_code for one in said} == {200}, said[0].text
    return [one.json() for one in said]


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, target: VisionLanguageTarget, log: Path
) -> Iterator[Running]:
    """Started once; what a test changes is there for those after it."""
    engine_python()  # fails at once without one
    folder = tmp_path_factory.mktemp("engine")
    workspace, recorded = fresh(folder, target), folder / "recorded"
    lines = [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]
    bodies = [embedded(line, log) for line in lines]
    served = export(
        workspace.drafter("hawk"), workspace.root / "served" / "hawk", "float32"
    )
    what = EMBEDDED["demo-small"], "demo-small", "float32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMDISTILL_RECORD", str(recorded))
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with vllm_server(*what, folder / "plain.log", whole_images=False) as url:
            plain = list(map(text, answers(url, bodies, 8)))
        with vllm_server(
            *what, folder / "vllm.log", served, whole_images=False, arguments=MORE
        ) as url:
            yield Running(url, workspace, bodies, plain, recorded)


def test_what_is_recorded_adapts_the_drafter_and_is_taken_over(
    running: Running,
) -> None:
    every = len(running.bodies)
    before = running.accepted_per_draft(every)
    said = running.ask(running.bodies[:8])
    run = running.run(*adaptation(running.recorded))
    assert run.returncode == 0, run.stderr
    assert "hawk.r1 is in use from now on" in run.stdout
    audit = json.loads(
        (running.workspace.traffic / "audit.jsonl").read_text().splitlines()[0]
    )
    assert audit["tokens"] == {"ids": audit["kept"]}
    harvested = {
        row.text: [int(one) for one in row.ids]
        for row in dataset.read(running.workspace.responses)
    }
    assert {
        text(one): one["choices"][0]["token_ids"] for one in said
    }.items() <= harvested.items()
    taken = running.follow()
    assert taken.returncode == 0, taken.stderr
    assert "drafts with hawk.r1" in taken.stdout
    assert running.accepted_per_draft(every) > 0.1 + before


def test_responses_do_not_change_while_drafters_are_swapped_ten_times(
    running: Running,
) -> None:
    """Nor does what the last one accepts, although requests are read again when the cache is emptied."""
    before = running.accepted_per_draft()
    said = list[str]()
    with (
        Follower(
            running.workspace, "hawk", running.url, dtype="float32", trial=10**6
        ) as follower,
        ThreadPoolExecutor(1) as asking,
    ):
        follower.look()
        bodies = (running.bodies * 3)[:200]
        for start in range(0, 200, 20):
            answering = asking.submit(running.ask, bodies[start : start + 20], 4)
            publish(
                running.workspace,
                "hawk" if follower.trials.current == "hawk.r1" else "hawk.r1",
            )
            follower.look()
            assert not answering.done()
            said += map(text, answering.result())
        assert follower.trials.swaps == 11
    assert said == (running.plain * 3)[:200]
    assert running.accepted_per_draft() == pytest.approx(before, rel=0.01)
    assert versions.current(running.workspace, "hawk") == "hawk.r1"


def test_a_version_that_accepts_less_is_withdrawn(running: Running) -> None:
    work, asked = running.workspace, 0
    assert versions.current(work, "hawk") == "hawk.r1"  # as the first test leaves it
    shutil.copytree(work.drafter("hawk"), work.drafter("hawk.r2"))
    with Follower(work, "hawk", running.url, dtype="float32") as follower:
        follower.look()
        for number in range(12):
            running.ask(running.bodies[8 * (number % 12) :][:8], 4)
            follower.look()
        publish(work, "hawk.r2")
        follower.look()
        assert follower.trials.current == "hawk.r2"
        while follower.trials.current == "hawk.r2":
            assert asked < 64
            running.ask(running.bodies[asked % 64 :][:4], 4)
            follower.look()
            asked += 4
        assert (follower.trials.rollbacks, follower.trials.current) == (1, "hawk.r1")
    last = versions.rounds(work, "hawk")[-1]
    assert (last.drafter, last.base) == ("hawk.r1", "hawk.r2")
    assert "tokens for each call" in last.why
    assert running.accepted_per_draft() > 0.5


def test_a_drafter_of_another_shape_is_refused_and_the_old_one_goes_on(
    running: Running, target: VisionLanguageTarget
) -> None:
    before = running.accepted_per_draft()
    synthetic.save("msd", running.workspace.drafter("hawk.r3"), target=target)
    publish(running.workspace, "hawk.r3")
    taken = running.follow()
    assert taken.returncode == 1
    assert "is not another version of the drafter in" in taken.stderr
    assert running.accepted_per_draft() == pytest.approx(before, abs=0.05)


def publish(workspace: Workspace, version: str) -> None:
    """Put a version into use."""
    used = versions.current(workspace, "hawk")
    versions.record(workspace, "hawk", version, base=used, published=True, why="test")
