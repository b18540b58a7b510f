"""Workers on one machine: work continues when one dies, and errors keep their type and text."""

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vlmdistill.pipelines.cluster import pool as workers
from vlmdistill.pipelines.cluster.pool import ActorPool, Pool, WorkerOptions, opened
from vlmdistill.pipelines.cluster.queue import ATTEMPTS, FAILURES, TaskDone
from vlmdistill.pipelines.cluster.session import Machine, WorkerShare, reach
from vlmdistill.stores.errors import DataError, StoreError, VlmdistillError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray")]


@dataclass(frozen=True)
class Numbers:
    """A task of numbers to square."""

    keys: tuple[str, ...]

    def only(self, keys: Collection[str]) -> "Numbers":
        return Numbers(tuple(key for key in self.keys if key in keys))


@dataclass
class Squares:
    squares: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left: Collection[str] = ()


def tasks(*numbers: int) -> list[Numbers]:
    return [Numbers((str(number),)) for number in numbers]


def worker(action: Callable[[int], None], *, parts: bool = False) -> Callable[[], Any]:
    """A worker that calls `action` and returns squares; a local class, so that it is pickled by value.

    With `parts` it returns the square of one number at a time.
    """

    class Toy:
        def facts(self) -> str:
            return "ready"

        def work(self, task: Any) -> Any:
            keys = task.keys[:1] if parts else task.keys
            for key in keys:
                action(int(key))
            squares = {key: int(key) ** 2 for key in keys}
            return Squares(squares, left=task.keys[len(keys) :])

    return Toy


def run(
    pool: Pool[Numbers, Squares], asked: list[Numbers]
) -> tuple[dict[str, int], dict[str, str]]:
    """The squares, and what failed."""
    squares, failed = dict[str, int](), dict[str, str]()
    for done in pool.run(asked):
        failed |= done.failed
        if done.result:
            assert not squares.keys() & done.result.squares.keys()
            squares |= done.result.squares
    return squares, failed


@pytest.mark.parametrize("number", [0, 2])
def test_every_task_is_done_once_by_any_number_of_workers(number: int) -> None:
    with opened(
        worker(lambda number: None), options=WorkerOptions(workers=number)
    ) as pool:
        assert pool.facts() == "ready"
        assert run(pool, tasks(*range(7))) == ({str(i): i * i for i in range(7)}, {})


def test_a_warning_of_workers_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    def warn(number: int) -> None:
        import logging

        logging.getLogger("vlmdistill.pipelines").warning("odd %s", number % 2)

    options = WorkerOptions(workers=2)
    with ActorPool[Numbers, Squares](worker(warn), options=options) as pool:
        run(pool, tasks(*range(6)))
    assert sorted(record.getMessage() for record in caplog.records) == [
        "odd 0",
        "odd 1",
    ]


def test_the_task_of_a_killed_worker_goes_to_another(tmp_path: Path) -> None:
    def die_once(number: int, marker: str) -> None:
        if number == 2 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    make = worker(partial(die_once, marker=str(tmp_path / "died")))
    with ActorPool[Numbers, Squares](make, options=WorkerOptions(workers=1)) as pool:
        assert run(pool, tasks(1, 2, 3)) == ({"1": 1, "2": 4, "3": 9}, {})


def test_parts_of_a_task_are_kept_when_its_worker_is_killed(tmp_path: Path) -> None:
    def die_once(number: int, folder: str) -> None:
        with open(f"{folder}/{number}", "a") as file:
            file.write("x")
            file.flush()
            if number == 3 and file.tell() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    make = worker(partial(die_once, folder=str(tmp_path)), parts=True)
    task = Numbers(("1", "2", "3", "4"))
    with ActorPool[Numbers, Squares](make, options=WorkerOptions(workers=1)) as pool:
        done = list(pool.run([task]))
    assert [ended.task.keys for ended in done] == [("1",), ("2",), ("3",), ("4",)]
    calls = [len((tmp_path / key).read_text()) for key in task.keys]
    assert calls == [1, 1, 2, 1]


@pytest.mark.parametrize(("number", "deadly"), [(0, False), (1, False), (1, True)])
def test_a_task_that_always_fails_is_given_up_and_the_others_are_done(
    tmp_path: Path, number: int, deadly: bool
) -> None:
    def fail(number: int, log: str) -> None:
        if number == 2:
            with open(log, "a") as file:
                file.write("x")
            if deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("out of luck")

    make = worker(partial(fail, log=str(tmp_path / "log")))
    with opened(make, options=WorkerOptions(workers=number)) as pool:
        squares, failed = run(pool, tasks(1, 2, 3))
    assert squares == {"1": 1, "3": 9}
    assert list(failed) == ["2"]
    assert ("died" if deadly else "RuntimeError: out of luck") in failed["2"]
    assert len((tmp_path / "log").read_text()) == ATTEMPTS


@pytest.mark.parametrize("deadly", [False, True])
def test_of_a_task_that_fails_only_the_guilty_sample_is_given_up(
    tmp_path: Path, deadly: bool
) -> None:
    def fail(number: int, broken: str) -> None:
        if number == 2:
            open(f"{broken}-{os.getpid()}", "w").close()
        if os.path.exists(
            f"{broken}-{os.getpid()}"
        ):  # as a CUDA context: nothing works in this process
            if deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("device-side assert triggered")

    make = worker(partial(fail, broken=str(tmp_path / "broken")))
    with ActorPool[Numbers, Squares](make, options=WorkerOptions(workers=1)) as pool:
        squares, failed = run(pool, [Numbers(("1", "2", "3", "4")), *tasks(5)])
    assert list(failed) == ["2"]
    assert squares == {str(number): number**2 for number in (1, 3, 4, 5)}


@pytest.mark.parametrize(("size", "calls"), [(1, ATTEMPTS**2), (64, 14)])
def test_a_run_in_which_every_task_fails_ends_early(
    tmp_path: Path, size: int, calls: int
) -> None:
    def fail(number: int, log: str) -> None:
        with open(log, "a") as file:
            file.write("x")
        raise RuntimeError("out of luck")

    done: list[TaskDone[Numbers, Squares]] = []
    with (
        ActorPool[Numbers, Squares](
            worker(partial(fail, log=str(tmp_path / "log"))),
            options=WorkerOptions(workers=1),
        ) as pool,
        pytest.raises(VlmdistillError, match="out of luck"),
    ):
        done.extend(
            pool.run([Numbers(tuple(map(str, range(size))))] * (20 if size == 1 else 1))
        )
    assert len(done) == ATTEMPTS
    assert len((tmp_path / "log").read_text()) == calls


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_for_the_user_ends_the_run_unchanged(number: int) -> None:
    def refuse(number: int) -> None:
        raise StoreError("no space left")

    with (
        opened(worker(refuse), options=WorkerOptions(workers=number)) as pool,
        pytest.raises(StoreError) as caught,
    ):
        list(pool.run(tasks(1, 2)))
    assert str(caught.value) == "no space left"


@pytest.mark.parametrize("number", [0, 2])
def test_samples_that_fail_on_the_only_machine_have_failed(number: int) -> None:
    class Half:
        def facts(self) -> str:
            return "ready"

        def work(self, task: Any) -> Any:
            odd = {key: "odd" for key in task.keys if int(key) % 2}
            return Squares(
                {key: int(key) ** 2 for key in task.keys if key not in odd}, odd
            )

    with opened(Half, options=WorkerOptions(workers=number)) as pool:
        squares, failed = run(pool, [Numbers(("1", "2", "3")), Numbers(("4",))])
    assert squares == {"2": 4, "4": 16}
    assert failed == {"1": "odd", "3": "odd"}


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_while_loading_is_raised_unchanged(number: int) -> None:
    def broken() -> Any:
        raise DataError("no such target")

    with (
        opened(broken, options=WorkerOptions(workers=number)) as pool,
        pytest.raises(DataError, match=r"^no such target$"),
    ):
        pool.facts()


def test_a_package_that_a_machine_lacks_is_named() -> None:
    class Foreign:
        def __reduce__(self) -> tuple[Any, ...]:
            return importlib.import_module, ("no_such_module",)

        def __call__(self) -> Any: ...

    with (
        ActorPool[Any, Any](Foreign(), options=WorkerOptions(workers=1)) as pool,
        pytest.raises(VlmdistillError) as caught,
    ):
        pool.facts()
    assert str(caught.value) == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.parametrize("number", [0, 2])
def test_a_machine_is_checked_before_anything_loads(
    tmp_path: Path, number: int
) -> None:
    def lacks() -> None:
        raise StoreError("no store here")

    def load(marker: str) -> Any:
        open(marker, "w").close()

    make = partial(load, str(tmp_path / "loaded"))
    with (
        opened(make, lacks, WorkerOptions(workers=number)) as pool,
        pytest.raises(StoreError, match="no store here"),
    ):
        pool.facts()
    assert not (tmp_path / "loaded").exists()


def test_workers_that_die_while_they_load_end_the_run_with_the_cause(
    tmp_path: Path,
) -> None:
    def die() -> Any:
        os._exit(1)

    with (
        ActorPool[Any, Any](die, options=WorkerOptions(workers=1)) as pool,
        pytest.raises(VlmdistillError) as caught,
    ):
        pool.facts()
    assert f"{ATTEMPTS} workers died" in str(caught.value)


def test_no_room_for_a_worker_is_an_error_after_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "GATHER_SECONDS", 1.0)
    with ActorPool[Numbers, Squares](
        worker(lambda number: None), options=WorkerOptions(workers=2)
    ) as pool:
        pool.facts()  # they hold all cores
        greedy = ActorPool[Numbers, Squares](
            worker(lambda number: None), options=WorkerOptions(workers=1, wait=1)
        )
        with greedy, pytest.raises(VlmdistillError, match=r"\b1 s\b"):
            greedy.facts()


def test_an_unreachable_cluster_is_an_error_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(DataError, match=r"RAY_ADDRESS=127\.0\.0\.1:.*refused"):
            reach(f"127.0.0.1:{free.getsockname()[1]}")


@pytest.mark.parametrize(
    ("machines", "workers", "each"),
    [
        ([8], 8, 1),
        ([8], 4, 2),
        ([8], 3, 2),
        ([8], 1, 8),
        ([8, 8], 3, 4),  # five each would leave the third worker without a machine
        ([4, 2], 3, 2),
        ([2, 2], 1, 2),  # no machine has four
        ([1], 2, 1 / 2),
        (
            [3],
            4,
            1 / 2,
        ),  # three quarters each would leave the fourth worker without a GPU
        ([8], 9, 1 / 2),
    ],
)
def test_workers_share_the_machines_evenly(
    machines: list[int], workers: int, each: float
) -> None:
    with_gpus = [
        Machine(str(i), "", "", 64, has, 2**40) for i, has in enumerate(machines)
    ]
    without = [Machine(str(i), "", "", has, 0, 2**40) for i, has in enumerate(machines)]
    assert WorkerShare.of(without, workers, 0).cpus == each
    assert WorkerShare.of(with_gpus, workers, 0).gpus == min(
        each, 1
    )  # no target needs more than it needs
    assert WorkerShare.of(without, workers, 0).room(without) >= workers
    assert WorkerShare.of(with_gpus, workers, 0).room(with_gpus) >= workers


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "each"),
    [(64, 8, None, 4), (8, 4, None, 2), (2, 4, None, 0), (16, 2, 4, 4)],
)
def test_cpus_are_reserved_beside_gpus_on_every_machine(
    cpus: int, gpus: int, workers: int | None, each: float
) -> None:
    there = [
        Machine("a", "", "", cpus, gpus, 2**40),
        Machine("b", "", "", 64, gpus, 2**40),
    ]
    share = WorkerShare.of(there, workers, 0)
    assert share.options == {"num_cpus": each, "num_gpus": share.gpus}
    assert all(
        share.cpus * machine.gpus / share.gpus <= machine.cpus for machine in there
    )


def test_the_number_of_workers_follows_from_cores_and_memory() -> None:
    need = 2**31
    there = [Machine("a", "", "", 4, 0, 3 * need), Machine("b", "", "", 8, 0, need)]
    share = WorkerShare.of(there, None, 0)
    assert share.room(there) == 5
    assert share.room([*there, Machine("c", "", "", 2, 0, 100 * need)]) > 5


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(DataError, match="--workers -1"):
        opened(worker(lambda number: None), options=WorkerOptions(workers=-1))


def test_without_workers_a_broken_process_ends_the_run_after_three_tasks() -> None:
    def fail(number: int) -> None:
        if number > 2:  # as a CUDA context: from then on nothing works in this process
            raise RuntimeError("device-side assert triggered")

    done: list[TaskDone[Numbers, Squares]] = []
    with (
        opened(worker(fail), options=WorkerOptions(workers=0)) as pool,
        pytest.raises(VlmdistillError, match=r"device-side assert.*--workers 1"),
    ):
        done.extend(pool.run(tasks(*range(100))))
    assert [one.task.keys for one in done if one.result] == [("0",), ("1",), ("2",)]
    assert len(done) < 3 + FAILURES


def test_without_workers_no_ray_is_imported() -> None:
    code = """
import sys
from vlmdistill.pipelines.cluster.pool import WorkerOptions, opened
class Toy:
    def facts(self): return "ready"
options = WorkerOptions(workers=0)
with options.session(), opened(Toy, options=options) as pool:
    print(pool.facts(), "ray" in sys.modules)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said == "ready False\n"


WAITS = """
import os, signal, threading, time
import ray
from vlmdistill.pipelines.cluster.session import session

def slow():
    time.sleep(600)

with session():
    call = ray.remote(slow).remote()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    ray.wait([call], timeout=300)
"""


def test_the_exit_status_says_that_a_run_was_terminated_while_ray_waited() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WAITS], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 143, ended.stderr
