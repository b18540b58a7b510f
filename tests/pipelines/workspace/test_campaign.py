"""Three machines, faults and killed processes: no content is lost."""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.pipelines.workspace.disks import On, there, write
from vlmdistill.pipelines.workspace import mirror
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError

NAMES = (
    "prompts.parquet",
    "responses/part-1.parquet",
    "responses/settings.json",
    "reports/hivis.json",
    "reports/.1.unfinished",
    "drafters/hivis/model.safetensors",
    "drafters/hivis/config.json",
    "drafters/hivis.training/metrics.jsonl",
)


@pytest.mark.parametrize("seed", range(12))
def test_no_content_is_lost_that_nobody_has_replaced_or_removed(
    seed: int, runs: str, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    living, trouble = set[str](), 0.0

    def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            if random.random() < trouble:
                raise ConnectionError("before")
            result = call(*given)
            if random.random() < trouble:
                raise ConnectionError("after")
            return result

        return run

    for name in ("create", "replace", "remove", "versions", "read_range"):
        monkeypatch.setattr(Remote, name, faulty(getattr(Remote, name)))

    def everywhere() -> set[str]:
        files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
        return {*files, *(data.decode() for data in there(runs).values())}

    for step in range(60):
        workspace = on(random.choice("abc"))
        assert workspace.mirror
        trouble = random.choice((0.0, 0.0, 0.1))
        if random.random() < 0.3:  # the process was killed: what it knew but has not recorded is gone
            workspace.mirror.stop()
            mirror._mirror.cache_clear()
            workspace = on(socket.gethostname())
        assert workspace.mirror
        with suppress(DataError, ConnectionError):
            for part in mirror.PARTS:
                workspace.mirror.fetch(part)
            for name in random.sample(NAMES, random.randrange(4)):
                path = workspace.root / name
                if path.exists():
                    living.discard(path.read_text())
                if random.random() < 0.2:
                    path.unlink(missing_ok=True)
                else:
                    write(path, content := f"{step} {name}")
                    living.add(content)
            workspace.mirror.send(*random.choice(((), ("responses", "drafters/hivis"))))
            if random.random() < 0.5:
                workspace.close()
        assert living <= everywhere(), living - everywhere()
