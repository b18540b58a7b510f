"""Two machines in one workspace: one sleeps at any of its requests, the other works to the end, it wakes.

Whatever the stage, nothing is lost, doubled or mixed, and the machine that came too late is told so. The
clock of one machine may be wrong. A third machine reads what there is.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.pipelines.workspace.disks import drafter, write
from tests.stores.samples import make
from tests.stores.samples import write as write_unit
from tests.stores.sharing.machines import Line
from tests.thorough import count
from vlmdistill.drafters.training import saved
from vlmdistill.drafters.training.deepspeed_engine import PartEntry
from vlmdistill.drafters.training.saved import Position, RemoteRun, Saved
from vlmdistill.pipelines.cluster.pool import WorkerOptions, no_check
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.pipelines.data.responses.dataset import ResponseRow
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.responses.responder import ResponseResult
from vlmdistill.pipelines.media import urls
from vlmdistill.pipelines.workspace import parts
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores import lease
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import (
    FOR_USER,
    DataError,
    LostError,
    TrainingError,
    VlmdistillError,
)
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.store import Store

KEYS = 12
MOST = 400  # requests of the longest stage
here = threading.local()


@dataclass
class Machines:
    """Machines with disks of their own. The requests of machine `a` are counted."""

    runs: str
    disks: Path
    line: Line

    def on(self, machine: str) -> Workspace:
        """The workspace as a new process of a machine opens it."""
        here.machine = machine
        parts._opened.clear()
        return Workspace.of("demo-small", self.runs)

    def rows(self, name: str, questions: list[str]) -> str:
        talk = [
            [{"from": "human", "value": text}, {"from": "gpt", "value": "So."}]
            for text in questions
        ]
        path = self.disks / f"{name}.json"
        path.write_text(json.dumps([{"conversations": turns} for turns in talk]))
        return str(path)


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Machines]:
    found = Machines(
        f"memory://{request.node.name}-{time.time_ns()}/runs", tmp_path, Line()
    )
    opened = Remote.__init__

    def watched(self: Remote, url: str) -> None:
        opened(self, url)
        if getattr(here, "machine", "") == "a":
            found.line.watch(self)

    def disk() -> Path:
        return found.disks / getattr(here, "machine", "none")

    monkeypatch.setattr(Remote, "__init__", watched)
    for module in (urls, parts):
        monkeypatch.setattr(module, "cache", disk)
    monkeypatch.setattr(parts, "EVERY", 0.0)
    monkeypatch.setattr(lease, "POLL", 0.001)
    monkeypatch.setattr(
        lease, "ABANDONED", 0.002
    )  # so that nobody waits for a machine that sleeps
    monkeypatch.setattr(responder, "checkpoint", lambda model: "demo-small")
    yield found
    here.machine = "none"


class Answers:
    """A worker without a target, whose responses tell the machine."""

    def __init__(self, *given: object) -> None:
        pass

    def facts(self) -> dict[str, str]:
        return {"target": "demo-small"}

    def work(self, task: responder.ResponseTask) -> ResponseResult:
        return ResponseResult(
            [
                ResponseRow(
                    key=key, ids=[7], text=here.machine, keep=True, temperature=1.0, top_p=1.0,
                    max_new_tokens=8, target="demo-small",
                )
                for key in task.keys
            ]
        )  # fmt: skip


class Prompts:
    """Each machine imports prompts of its own."""

    def before(self, machines: Machines) -> None:
        self.work(machines, "first")

    def work(self, machines: Machines, name: str) -> None:
        workspace = machines.on(name)
        import_prompts([machines.rows(name, [f"What is {name}?"])], workspace.prompts)
        workspace.close()

    def check(self, machines: Machines, error: VlmdistillError | None) -> None:
        texts = [
            prompt.messages[0]["content"][0]["text"]
            for prompt in prompt_table.read(machines.on("c").prompts)
        ]
        expected = {"What is first?", "What is b?", *([] if error else ["What is a?"])}
        assert sorted(texts) == sorted({*texts})
        assert expected <= {*texts} <= {*expected, "What is a?"}


class Responses:
    """Both machines generate the missing responses, in tasks of other sizes."""

    def before(self, machines: Machines) -> None:
        workspace = machines.on("first")
        questions = [f"What is {number}?" for number in range(KEYS)]
        import_prompts([machines.rows("first", questions)], workspace.prompts)
        workspace.close()

    def work(self, machines: Machines, name: str) -> None:
        workspace = machines.on(name)
        prompts = prompt_table.load(workspace.prompts, "demo-small")
        size = 1 if name == "a" else 5
        summary = responder.respond(
            prompts,
            workspace.responses,
            "demo-small",
            filters=Filters(),
            options=WorkerOptions(workers=0),
            task_size=size,
            work=responder.ResponseWork(Answers, shared=lambda *_: no_check),  # type: ignore[arg-type]
        )
        workspace.close()
        assert summary.kept == KEYS

    def check(self, machines: Machines, error: VlmdistillError | None) -> None:
        rows = [one.key for one in dataset.read(machines.on("c").responses)]
        assert len(rows) == len({*rows}) == KEYS
        files = dataset.table(machines.on("c").responses, ["key"])["key"].to_pylist()
        assert len(files) == KEYS  # not one row more on the disk


class Features:
    """Both machines write the same samples into a store, in other units."""

    def before(self, machines: Machines) -> None:
        here.machine = "first"
        make(machines.on("first").features)

    def work(self, machines: Machines, name: str) -> None:
        url = machines.on(name).features
        with only_writer(url):
            for numbers in {"a": ((0, 1), (2, 3)), "b": ((0,), (1, 2), (3,))}[name]:
                store = Store.open(url)
                there = {*store.index["key"]}
                missing = [one for one in numbers if f"k{one:04}" not in there]
                if missing:
                    write_unit(store, "-".join(map(str, missing)), missing)

    def check(self, machines: Machines, error: VlmdistillError | None) -> None:
        store = Store.open(machines.on("c").features)
        keys = store.index["key"].to_list()
        assert len(keys) == len({*keys})
        assert {f"k{one:04}" for one in range(4)} <= {*keys}
        assert not verify(store.backend.url).damage


class Drafter:
    """Both machines publish a drafter of that name."""

    def before(self, machines: Machines) -> None:
        pass

    def work(self, machines: Machines, name: str) -> None:
        workspace = machines.on(name)
        with only_writer(workspace.drafter("hivis")):
            drafter(workspace, "hivis", name)
        workspace.close()

    def check(self, machines: Machines, error: VlmdistillError | None) -> None:
        folder = machines.on("c").drafter("hivis")
        text = (folder / "config.json").read_text().removeprefix("config ")
        assert (folder / "model.safetensors").read_text() == f"weights {text}"
        assert text in ({"b"} if error else {"a", "b"})


class Checkpoints:
    """Both machines train on from the same checkpoint; the further one must stay."""

    def before(self, machines: Machines) -> None:
        self.train(machines, "first", 2)

    def work(self, machines: Machines, name: str) -> None:
        self.train(machines, name, {"a": 4, "b": 9}[name])

    def train(self, machines: Machines, name: str, steps: int) -> None:
        workspace = machines.on(name)
        url = workspace.checkpoints("hivis")
        assert url
        folder = workspace.root / "drafters/hivis.training"
        copied = RemoteRun(folder, url)
        copied.begin("run")
        begun = saved.read(folder)
        for step in range(begun.position.total if begun else 0, steps):
            now = Saved(
                signature="run",
                settings={},
                ranks=1,
                dtype="f",
                position=Position(total=step + 1),
            )
            saved.write(folder, now, {"weight": torch.full((2,), float(step + 1))})
            write(folder / "metrics.jsonl", f"{name} {step + 1}")
            if why := copied.send():
                raise DataError(why)

    def check(self, machines: Machines, error: VlmdistillError | None) -> None:
        workspace = machines.on("c")
        folder = workspace.root / "drafters/hivis.training"
        url = workspace.checkpoints("hivis")
        assert url
        RemoteRun(folder, url).begin("run")
        last = saved.read(folder)
        assert last
        assert last.position.total == 9
        assert saved.tensors(
            folder, last, {"weight": PartEntry("weight", (2,), torch.float32)}
        )
        assert (folder / "metrics.jsonl").read_text() == "b 9"


class Reports:
    """Each machine adds an evaluation of its own, and writes the page."""

    def before(self, machines: Machines) -> None:
        pass

    def work(self, machines: Machines, name: str) -> None:
        workspace = machines.on(name)
        write(workspace.reports / f".{name}.unfinished", "half")
        workspace.close()
        write(workspace.reports / f"{name}.json", name)
        (workspace.reports / f".{name}.unfinished").unlink()
        workspace.close()

    def check(self, machines: Machines, error: VlmdistillError | None) -> None:
        assert error is None
        found = machines.on("c").reports
        assert sorted(path.name for path in found.iterdir()) == ["a.json", "b.json"]


Stage = Prompts | Responses | Features | Drafter | Checkpoints | Reports
STAGES: list[type[Stage]] = [
    Prompts,
    Responses,
    Features,
    Drafter,
    Checkpoints,
    Reports,
]


def requests(machines: Machines, stage: Stage) -> int:
    """How many requests the work of machine `a` is, when nobody disturbs it."""
    stage.before(machines)
    machines.line.count = 0
    stage.work(machines, "a")
    return machines.line.count


@pytest.mark.parametrize("ahead", [0.0, *count(0, 1) * [360.0, -3600.0]])
@pytest.mark.parametrize("stage", STAGES)
def test_a_machine_that_sleeps_at_any_request(
    machines: Machines,
    stage: type[Stage],
    ahead: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = requests(machines, stage())
    assert 5 < total < MOST
    step = count(max(1, total // 6), 1)
    now, base, disks, lost = time.time, machines.runs, machines.disks, 0
    monkeypatch.setattr(
        time,
        "time",
        lambda: now() + (ahead if getattr(here, "machine", "") == "b" else 0.0),
    )
    for number in range(1, total + 1, step):
        for moment in ("before", "after"):
            machines.runs = f"{base}-{number}-{moment}"
            machines.disks = disks / f"{number}-{moment}"
            machines.disks.mkdir()
            one = stage()
            error: VlmdistillError | None = None
            one.before(machines)

            def work(one: Stage = one) -> None:
                one.work(machines, "a")

            try:
                with machines.line.asleep(work, number, moment) as slept:
                    one.work(machines, "b")
            except (LostError, TrainingError) as told:
                error = told
                lost += 1
            assert error is None or "another machine" in str(error)
            assert (
                slept or number > total // 2 or moment == "after"
            )  # of a request that fails
            one.check(machines, error)
    assert lost or stage in (Features, Reports)


@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_reply_to_any_request_costs_a_repetition_at_most(
    machines: Machines, stage: type[Stage]
) -> None:
    total, base, disks = requests(machines, stage()), machines.runs, machines.disks
    for number in range(1, total + 1, count(max(1, total // 6), 1)):
        machines.runs = f"{base}-{number}"
        machines.disks = disks / f"{number}"
        machines.disks.mkdir()
        one = stage()
        one.before(machines)
        machines.line.lose_reply(number)
        with suppress(*FOR_USER):
            one.work(machines, "a")
        machines.line.lose_reply(0)
        one.work(machines, "a")  # the same command again
        one.work(machines, "b")
        one.check(machines, None)
