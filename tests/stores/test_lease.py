"""Locks at a store: one writer on all machines, also after one is lost, whatever the clocks say."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import pytest

from vlmdistill.stores import lease
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.lease import Holder, Lease, leased, machine


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setattr(lease, "POLL", 0.02)
    return Remote(f"memory://{secrets.token_hex(8)}/store")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def move() -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")

    return move


def test_a_lock_has_one_holder(
    there: Remote, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TOUCHED", 0.02)
    with leased(there, "a/lock"):
        elsewhere()
        with (
            pytest.raises(
                DataError, match=rf"process {os.getpid()} on .* is writing to"
            ),
            leased(there, "a/lock"),
        ):
            pass
        with leased(there, "b/lock"):
            pass
    with leased(there, "a/lock"):
        pass
    assert there.list_files("") == {}


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 360.0, 3600.0])
def test_a_lock_is_abandoned_by_the_waiting_process_alone(
    there: Remote,
    elsewhere: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    ahead: float,
) -> None:
    lost = Lease(there, "lock")
    lost.acquire()  # and no sign of life for a minute
    elsewhere()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead)
    monkeypatch.setattr(lease, "ABANDONED", 0.2)
    begun = time.monotonic()
    with leased(there, "lock"):
        assert time.monotonic() - begun >= 0.2
        lost.release()  # it was not lost: it leaves the lock of others alone
        assert there.list_files("")
    assert there.list_files("") == {}


@pytest.mark.parametrize("process", ["ended", "own", "impossible"])
def test_the_lock_of_a_process_that_was_killed_here_is_taken_over_at_once(
    there: Remote, process: str
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    number = {"ended": ended.pid, "own": os.getpid(), "impossible": 1 << 62}[process]
    there.create(
        "lock.7.json", msgspec.json.encode(Holder("a", machine(), number, "x"))
    )
    with leased(there, "lock"):
        pass
    assert there.list_files("") == {}
