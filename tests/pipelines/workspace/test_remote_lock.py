"""Locks in an object store: one writer on all machines, also after one is lost."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from tests.pipelines.workspace.disks import On, there, write
from vlmdistill.pipelines.workspace import remote_lock
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError


@contextmanager
def held(workspace: Workspace) -> Iterator[None]:
    with only_writer(workspace.responses):
        yield


def test_a_part_has_one_writer_on_all_machines(runs: str, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = on("a"), on("b")
    on("a")
    monkeypatch.setattr(remote_lock, "TOUCHED", 0.02)
    with held(a):
        on("b")
        with pytest.raises(DataError, match=r"on a, is writing to memory://"), held(b):
            pass
        with only_writer(b.drafter("hivis")):  # another part
            pass
    with held(b):
        pass
    assert not [name for name in there(runs) if name.endswith(".lock")]


def test_a_lock_that_nobody_touches_is_taken_over(runs: str, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = on("a"), on("b")
    on("a")
    lost = held(a)
    lost.__enter__()
    monkeypatch.setattr(remote_lock, "ABANDONED", 0.2)
    on("b")
    with held(b):
        write(b.responses / "part-1", "of b")
    assert there(runs) == {"responses/part-1": b"of b"}
    lost.__exit__(None, None, None)  # it was not lost: it leaves the lock of others alone
    assert there(runs) == {"responses/part-1": b"of b"}


def test_the_lock_of_a_process_that_was_killed_here_is_taken_over_at_once(runs: str, on: On) -> None:
    a = on("a")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for process in (ended.pid, os.getpid()):  # the second: of an earlier container, with the same numbers
        holder = {"host": "a", "machine": remote_lock.machine(), "process": process, "token": "x"}
        left = json.dumps(holder)
        fsspec.filesystem("memory").pipe_file(f"{runs}/demo/.responses.lock", left.encode())
        with held(a):
            pass
    assert there(runs) == {}


def test_a_lock_of_an_impossible_process_is_taken_over(runs: str, on: On) -> None:
    a = on("a")
    lock = {"host": "a", "machine": remote_lock.machine(), "process": 1 << 62, "token": ""}
    fsspec.filesystem("memory").pipe_file(f"{runs}/demo/.responses.lock", json.dumps(lock).encode())
    with only_writer(a.responses):
        pass


def test_a_writer_begins_with_what_the_writer_before_has_left(runs: str, on: On) -> None:
    a, b = on("a"), on("b")
    assert not (b.responses / "part-1").exists()  # fetched before
    on("a")
    with held(a):
        write(a.responses / "part-1", "of a")
    on("b")
    with held(b):
        assert (b.responses / "part-1").read_text() == "of a"


def test_a_store_at_a_url_has_one_writer_on_all_machines(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lock, "POLL", 0.05)
    monkeypatch.setattr(remote_lock, "TOUCHED", 0.02)
    store = f"{runs}/store"
    with only_writer(store):
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with pytest.raises(DataError, match=f"is writing to {store}"), only_writer(store):
            pass
    with only_writer(store):
        pass
    assert there(runs.removesuffix("runs") + "runs") == {}
