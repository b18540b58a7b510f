"""Machines with disks of their own, and a workspace at a URL."""

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.workspace.disks import On
from vlmdistill.pipelines.workspace import mirror, remote_lock
from vlmdistill.pipelines.workspace.workspace import Workspace


@pytest.fixture
def runs() -> str:
    return f"memory://{secrets.token_hex(8)}/runs"


@pytest.fixture
def on(runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[On]:
    """The workspace as a machine sees it that has a name and a disk of its own."""
    monkeypatch.setattr(mirror, "EVERY", 3600.0)
    monkeypatch.setattr(remote_lock, "POLL", 0.05)
    opened = list[Workspace]()

    def on(machine: str) -> Workspace:
        monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / machine))
        monkeypatch.setattr(socket, "gethostname", lambda: machine)
        opened.append(Workspace.of("demo", runs))
        return opened[-1]

    yield on
    for one in opened:
        if one.mirror:
            one.mirror.stop()
