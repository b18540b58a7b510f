"""`make test-engine`: `eval --engine vllm` starts servers, counts what `eval` counts, and leaves none.

Not collected by name: it starts vLLM twice.
"""

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.serving import SIZE, captured
from vlmdistill.cli.main import main
from vlmdistill.pipelines.workspace.workspace import Workspace

MODEL = "demo-small"

pytestmark = pytest.mark.timeout(1800)


def test_eval_with_servers_of_its_own_counts_what_eval_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a target without videos, which go over HTTP in no exact form."""
    where, workspace = (
        captured(tmp_path, MODEL, 100, ["sparrow"]),
        Workspace.of(MODEL, tmp_path),
    )
    assert main(["train", "sparrow", *SIZE, *where]) == 0
    common = ["--limit", "8", "--max-new-tokens", "256", "--json", *where]
    capsys.readouterr()
    concurrencies = ["--concurrency", "1", "--concurrency", "4"]
    assert main(["eval", "sparrow", "--engine", "vllm", *concurrencies, *common]) == 0
    loads = json.loads(capsys.readouterr().out)["sparrow"]["loads"]
    assert main(["eval", "sparrow", "--tree", "chain-4", *common]) == 0
    (offline,) = json.loads(capsys.readouterr().out)["sparrow"]["temperatures"]
    assert [one["concurrency"] for one in loads] == [1, 4]
    for one in loads:
        found = one["server"]
        assert (found["drafts"], found["tokens"]) == (
            offline["calls"],
            offline["tokens"],
        )
        for name in ("tau", "accepted", "alpha"):
            assert found[name] == pytest.approx(offline[name])
        assert found["accepted"] > 0
        assert (one["identical"], one["warnings"]) == (8, [])
    assert main(["report", *where]) == 0
    assert "sparrow" in capsys.readouterr().out
    deadline = time.monotonic() + 60  # what was killed may take a while to end
    while left := [
        one
        for one in Path("/proc").glob("[0-9]*/cmdline")
        if named(workspace.root, one)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def named(folder: Path, command: Path) -> bool:
    """Whether a process has a folder in its command line."""
    with suppress(OSError):  # it has ended
        return str(folder).encode() in command.read_bytes()
    return False
