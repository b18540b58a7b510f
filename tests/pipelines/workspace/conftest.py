"""Machines with disks of their own, and a workspace at a URL."""

import secrets
import socket
from pathlib import Path

import pytest

from tests.pipelines.workspace.disks import On
from vlmdistill.pipelines.workspace import parts
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores import lease


@pytest.fixture
def runs() -> str:
    return f"memory://{secrets.token_hex(8)}/runs"


@pytest.fixture
def on(runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> On:
    """The workspace as a new process of a machine sees it that has a name and a disk of its own."""
    monkeypatch.setattr(lease, "POLL", 0.05)

    def on(machine: str) -> Workspace:
        monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / machine))
        monkeypatch.setattr(socket, "gethostname", lambda: machine)
        parts._opened.clear()
        return Workspace.of("demo-small", runs)

    return on
