"""A disk that is full: one line that names the file, and the same command again once there is room."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drafters import synthetic
from tests.pipelines.traffic.conftest import exchange
from tests.stores.samples import make, sample, write
from vlmdistill.cli.main import main
from vlmdistill.pipelines.workspace import rates
from vlmdistill.stores.backends.local import atomic_folder, atomic_write
from vlmdistill.stores.errors import FOR_USER


@contextmanager
def full(size: int) -> Iterator[None]:
    """No file grows beyond a size: each write beyond it fails as on a full disk, and names no file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("size", [0, 300, 3000])
@pytest.mark.parametrize("verb", ["prompts", "harvest"])
def test_a_command_names_the_file_and_is_done_again(
    verb: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [exchange(number) for number in range(40)]
    rows = [line["request"] for line in lines] if verb == "prompts" else lines
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    command = [verb, str(tmp_path / "rows.jsonl"), "--runs", str(tmp_path / "runs")]
    with full(size):
        assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert str(tmp_path / "runs") in line
    assert "traceback" not in line
    assert main(command) == 0


def test_a_store_names_the_file(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    for size in (0, 50, 200, 600):
        with full(size), pytest.raises(FOR_USER, match=str(tmp_path)):
            write(store, "a", [sample(0)])
    write(store, "a", [sample(0)])


def test_what_is_replaced_or_grows_is_named(tmp_path: Path) -> None:
    with full(0):
        with (
            pytest.raises(OSError, match="file"),
            atomic_write(tmp_path / "file.json") as new,
        ):
            new.write_text("{}")
        with (
            pytest.raises(OSError, match="folder"),
            atomic_folder(tmp_path / "folder") as inside,
        ):
            (inside / "a").write_text("{}")
        with pytest.raises(OSError, match=rates.FILE):
            rates.record(tmp_path, "train", 1e6, 1e3)
        with pytest.raises(FOR_USER, match="sparrow"):
            synthetic.save("sparrow", tmp_path / "sparrow")
    assert os.listdir(tmp_path) in ([], [rates.FILE])
