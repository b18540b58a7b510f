"""Ray crews: work goes on when workers die, and errors come back as they were raised."""

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vlmdistill.pipelines.workers import ATTEMPTS, Crew, gpus_each, reach, session
from vlmdistill.stores.errors import DataError, StoreError, VlmdistillError

pytestmark = pytest.mark.usefixtures("ray")


def worker(deeds: Callable[[int], None]) -> Callable[[], Any]:
    """A worker that does `deeds` for a unit and returns its square; local, so that it travels by value."""

    class Toy:
        def facts(self) -> str:
            return "ready"

        def work(self, unit: int) -> int:
            deeds(unit)
            return unit * unit

    return Toy


def squares(crew: Crew[int, int], units: list[int]) -> list[tuple[int, int]]:
    return sorted((done.unit, done.result) for done in crew.run(units))


def test_every_unit_is_done_once_by_any_number_of_workers() -> None:
    with Crew[int, int](worker(lambda unit: None), 2) as crew:
        assert crew.facts() == "ready"
        assert squares(crew, list(range(7))) == [(i, i * i) for i in range(7)]


def test_the_unit_of_a_killed_worker_goes_to_another(tmp_path: Path) -> None:
    def die_once(unit: int, marker: str) -> None:
        if unit == 2 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    with Crew[int, int](worker(partial(die_once, marker=str(tmp_path / "died"))), 1) as crew:
        assert squares(crew, [1, 2, 3]) == [(1, 1), (2, 4), (3, 9)]


def test_a_unit_that_always_fails_is_an_error_after_the_others_are_done(tmp_path: Path) -> None:
    def fail(unit: int, log: str) -> None:
        if unit == 2:
            with open(log, "a") as file:
                file.write("x")
            raise RuntimeError("out of luck")

    done: list[int] = []
    words = r"1 of 3 units failed 3 times.*out of luck.*2 units\) is kept"
    with (
        Crew[int, int](worker(partial(fail, log=str(tmp_path / "log"))), 1) as crew,
        pytest.raises(VlmdistillError, match=words),
    ):
        done.extend(outcome.unit for outcome in crew.run([1, 2, 3]))
    assert done == [1, 3]
    assert len((tmp_path / "log").read_text()) == ATTEMPTS


def test_a_users_error_ends_the_run_as_it_is() -> None:
    def refuse(unit: int) -> None:
        raise StoreError("no space left")

    with Crew[int, int](worker(refuse), 1) as crew, pytest.raises(StoreError) as caught:
        list(crew.run([1, 2]))
    assert str(caught.value) == "no space left"


def test_an_error_while_loading_is_the_users() -> None:
    def broken() -> Any:
        raise DataError("no such target")

    with Crew[int, int](broken, 1) as crew, pytest.raises(DataError, match=r"^no such target$"):
        crew.facts()


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(DataError, match=r"no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:.*refused"):
            reach(f"127.0.0.1:{free.getsockname()[1]}")


@pytest.mark.parametrize(
    ("nodes", "workers", "each"),
    [
        ([8], 8, 1),
        ([8], 4, 2),
        ([8], 3, 2),
        ([8], 1, 8),
        ([8, 8], 3, 4),  # five each would leave the third worker without a machine
        ([4, 2], 3, 2),
        ([1], 2, 1 / 2),
        ([3], 4, 1 / 2),  # three quarters each would leave the fourth worker without a GPU
        ([8], 9, 1 / 2),
    ],
)
def test_gpus_are_shared_so_that_every_worker_has_its_part(
    nodes: list[int], workers: int, each: float
) -> None:
    assert gpus_each(nodes, workers) == each
    per_gpu = round(1 / each) if each < 1 else 0
    assert sum(gpus * per_gpu if per_gpu else gpus // int(each) for gpus in nodes) >= workers


def test_a_number_of_workers_below_one_is_refused() -> None:
    with pytest.raises(DataError, match="--workers 0"), session(0):
        pass
