"""Functions in processes of their own: what they report arrives, and none outlives what started it."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmdistill.pipelines.cluster.processes import (
    FunctionDone,
    FunctionProgress,
    Processes,
    Threads,
)
from vlmdistill.stores.errors import (
    DataError,
    LostRankError,
    StoppedError,
    TrainingError,
)
from vlmdistill.stores.progress import Progress

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/src")


# What the children do


def count(report: Progress) -> None:
    report(1, int(os.environ["STEPS"]), f"torch is {'torch' in sys.modules}")


def count_threads(report: Progress) -> None:
    """Report how many threads this process has, until they change."""
    import torch

    before = torch.get_num_threads()
    while torch.get_num_threads() == before:
        report(before, 0, "")
        time.sleep(0.01)
    report(torch.get_num_threads(), 0, "")


def warn(report: Progress) -> None:
    logging.getLogger("vlmdistill.child").warning("the disk is %s", "slow")


def saving(file: Path, report: Progress) -> None:
    """Wait for a signal; then write how often one came."""
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
    report(os.getpid(), 0, "")
    while not heard:
        time.sleep(0.01)
    time.sleep(0.2)
    file.write_text(f"{heard}")
    raise StoppedError("all saved", heard[0])


def follow(report: Progress) -> None:
    raise LostRankError("another has gone")


def break_off(line: str, report: Progress) -> None:
    time.sleep(0.5)
    if line:
        raise DataError(line)
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_reports_from_an_environment_set_before_anything_is_imported() -> None:
    with Processes() as processes:
        for number in (3, 4):
            processes.start(f"p{number}", count, (), {"STEPS": str(number)})
        said = list(processes.messages())
    reports = sorted(
        (name, one) for name, one in said if isinstance(one, FunctionProgress)
    )
    assert reports == [
        (f"p{number}", FunctionProgress(1, number, "torch is False"))
        for number in (3, 4)
    ]
    ends = [(name, one) for name, one in said if isinstance(one, FunctionDone)]
    assert sorted(name for name, _ in ends) == ["p3", "p4"]
    assert all(end.cpu_seconds > 0 for _, end in ends)


def test_a_function_uses_the_threads_that_it_is_given_later() -> None:
    with Processes() as processes:
        processes.start("one", count_threads, (), {"OMP_NUM_THREADS": "1"})
        said = processes.messages()
        next(said)
        processes.use(Threads(2))
        counts = [
            message.done for _, message in said if isinstance(message, FunctionProgress)
        ]
    assert {*counts[:-1]} <= {1}
    assert counts[-1] == 2


def test_what_each_logs_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    with Processes() as processes:
        for name in ("p1", ""):
            processes.start(name, warn, (), {})
        assert {type(one) for _, one in processes.messages()} == {FunctionDone}
    said = sorted((one.name, one.levelname, one.getMessage()) for one in caplog.records)
    assert said == [
        ("vlmdistill.child", "WARNING", "p1: the disk is slow"),
        ("vlmdistill.child", "WARNING", "the disk is slow"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_once_and_all_save_their_work(
    number: int, tmp_path: Path
) -> None:
    with Processes() as processes:
        for name in "ab":
            processes.start(name, saving, (tmp_path / name,), {})
        said = processes.messages()
        for _ in "ab":
            next(said)
        os.kill(os.getpid(), number)
        with pytest.raises(StoppedError) as caught:
            next(said)
    assert caught.value.signal == number
    assert sorted(str(caught.value).split("; ")) == ["a: all saved", "b: all saved"]
    assert {(tmp_path / name).read_text() for name in "ab"} == {f"[{int(number)}]"}


@pytest.mark.parametrize(
    ("line", "says"), [("no room", "second: no room"), ("", "second: .*signal 9")]
)
def test_the_first_failure_ends_the_others_and_is_told_not_what_follows_from_it(
    line: str, says: str, tmp_path: Path
) -> None:
    with Processes() as processes:
        processes.start("third", saving, (tmp_path / "saved",), {})
        said = processes.messages()
        next(said)
        processes.start("first", follow, (), {})
        processes.start("second", break_off, (line,), {})
        with pytest.raises(TrainingError, match=says):
            next(said)
    assert (tmp_path / "saved").read_text() == f"[{int(signal.SIGTERM)}]"


PARENT = """
import sys, time
from pathlib import Path
from tests.pipelines.cluster.test_processes import beating
from vlmdistill.pipelines.cluster.processes import Processes
with Processes() as processes:
    processes.start("", beating, (Path(sys.argv[1]),), {})
    for _, said in processes.messages():
        print(said.done, flush=True)
"""


def beating(file: Path, report: Progress) -> None:
    try:
        while True:
            report(os.getpid(), 0, "")
            time.sleep(0.05)
    finally:
        file.write_text("saved")


def test_a_child_whose_parent_was_killed_saves_its_work_and_ends(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "file")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert any(_gone(child))
    assert (tmp_path / "file").read_text() == "saved"


def _gone(child: int) -> Iterator[bool]:
    for _ in range(1000):
        time.sleep(0.02)
        yield (
            not Path(f"/proc/{child}").exists()
            or "State:\tZ" in Path(f"/proc/{child}/status").read_text()
        )
