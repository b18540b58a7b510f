"""The clock outside the decoders, beside other programs and threads."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vlmdistill.drafters.decoding import clock
from vlmdistill.drafters.decoding.clock import Spent, clocked

CPU = torch.device("cpu")
BLOCK = bytes(10_000_000)
needs_delays = pytest.mark.skipif(
    not clock.SCHEDULED.exists(), reason="the system does not tell of delays"
)


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    """PyTorch computes in one thread, and this one has a single CPU."""
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cpus)})
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)


def work(cpu_seconds: float = 0.3) -> None:
    """Until this thread had the CPU for so long; other threads may run meanwhile."""
    end = time.thread_time() + cpu_seconds
    while time.thread_time() < end:
        hashlib.sha256(BLOCK)


def spent(run: object = work) -> Spent:
    assert callable(run)
    return clocked(run, CPU)[1]


@contextmanager
def another_program() -> Iterator[None]:
    """It has the same CPU, and is always ready to run."""
    code = "print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        yield
        program.kill()


@needs_delays
def test_seconds_of_another_program_are_delays_and_those_of_sleep_are_not() -> None:
    with another_program():
        beside, asleep = spent(), spent(lambda: time.sleep(0.3))
    assert beside.delayed_seconds is not None
    assert asleep.delayed_seconds is not None
    # Both are ready all the time, and take turns.
    assert beside.delayed_seconds > 0.2 * beside.cpu_seconds
    accounted = beside.cpu_seconds + beside.delayed_seconds
    assert accounted == pytest.approx(beside.seconds, rel=0.05)
    assert asleep.delayed_seconds < 0.5 * asleep.seconds


@needs_delays
def test_delays_by_own_threads_do_not_count() -> None:
    """A drafter that computes in threads of its own would be faster by them."""
    had_cpu = []

    def help_on() -> None:
        work()
        had_cpu.append(time.thread_time())

    def run() -> None:
        helper = threading.Thread(target=help_on)
        helper.start()
        work()
        helper.join()

    beside = spent(run)
    assert beside.delayed_seconds is not None
    # One CPU has all three in turn: this thread, its helper, and other programs.
    accounted = beside.cpu_seconds + beside.delayed_seconds + had_cpu[0]
    assert accounted <= 1.05 * beside.seconds


@needs_delays
def test_delays_are_not_known_of_several_threads() -> None:
    assert spent(list).delayed_seconds is not None
    torch.set_num_threads(2)
    assert spent(list).delayed_seconds is None


@pytest.mark.parametrize("counts", [None, "", "0 0 0", "no numbers"])
def test_delays_are_not_known_where_the_system_does_not_count_them(
    counts: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schedstat"
    if counts is not None:
        file.write_text(counts)
    monkeypatch.setattr(clock, "SCHEDULED", file)
    assert spent(list).delayed_seconds is None
