"""A workspace at a URL: what one machine writes another has, and nothing is overwritten or lost."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.pipelines import mirror, remote_lock
from vlmdistill.pipelines.media.urls import at_hand
from vlmdistill.pipelines.prompts import prompt_table
from vlmdistill.pipelines.prompts.importing import import_prompts
from vlmdistill.pipelines.workspace import Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError

On = Callable[[str], Workspace]


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


def there(runs: str) -> dict[str, bytes]:
    """The files at the URL."""
    files = fsspec.filesystem("memory")
    base = runs.removeprefix("memory:/") + "/demo/"
    return {path.removeprefix(base): files.cat_file(path) for path in files.find(base)}


def write(path: Path, text: str) -> None:
    with atomic_write(path) as new:
        new.write_text(text)


def drafter(workspace: Workspace, name: str, text: str) -> None:
    folder = workspace.drafter(name)
    write(folder / "model.safetensors", f"weights {text}")
    write(folder / "config.json", f"config {text}")


def test_what_one_machine_writes_another_has(runs: str, on: On) -> None:
    a = on("a")
    write(a.prompts, "prompts")
    write(a.responses / "part-1.parquet", "responses")
    write(a.reports / "hivis.json", "evaluation")
    write(a.reports / ".0123.unfinished", "half of an evaluation")
    write(a.drafter("hivis").with_name("hivis.training") / "metrics.jsonl", "step 1")
    drafter(a, "hivis", "1")
    a.close()
    b = on("b")
    assert b.root != a.root
    assert b.prompts.read_text() == "prompts"
    assert (b.responses / "part-1.parquet").read_text() == "responses"
    assert (b.reports / "hivis.json").read_text() == "evaluation"
    assert (b.reports / ".0123.unfinished").read_text() == "half of an evaluation"
    assert (b.drafter("hivis") / "config.json").read_text() == "config 1"
    assert (b.root / "drafters/hivis.training/metrics.jsonl").read_text() == "step 1"
    write(b.responses / "part-1.parquet", "other responses")
    b.close()
    assert (on("a").responses / "part-1.parquet").read_text() == "other responses"


def test_what_is_unfinished_or_has_a_url_of_its_own_is_not_sent(runs: str, on: On) -> None:
    a = on("a")
    for name in (
        "responses/.part-2.parquet.123.tmp",
        "drafters/.hivis.7/config.json",
        "drafters/hivis.training/step20.safetensors",
        "drafters/hivis.training/checkpoint.json",
        "features/store.json",
        "served/log",
        "notes.txt",
    ):
        write(a.root / name, "")
    a.close()
    assert there(runs) == {}


def test_only_the_parts_that_are_asked_for_are_fetched(runs: str, on: On) -> None:
    a = on("a")
    write(a.responses / "part-1.parquet", "responses")
    drafter(a, "hivis", "1")
    drafter(a, "eagle2", "1")
    a.close()
    b = on("b")
    b.drafter("hivis")
    assert sorted(path.name for path in b.root.rglob("*.*") if not path.name.startswith(".")) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_file_that_has_changed_at_both_ends_is_overwritten_at_neither(runs: str, on: On) -> None:
    a = on("a")
    write(a.reports / "hivis.json", "1")
    a.close()
    b = on("b")
    write(b.reports / "hivis.json", "of b")
    a = on("a")
    write(a.reports / "hivis.json", "of a")
    write(a.reports / "eagle2.json", "of a")
    a.close()
    write(b.reports / "msd.json", "of b")
    with pytest.raises(DataError, match=r"reports/hivis\.json has changed both in .*/b/"):
        b.close()
    assert (b.root / "reports/hivis.json").read_text() == "of b"
    found = there(runs)
    assert found["reports/hivis.json"] == b"of a"
    assert found["reports/msd.json"] == b"of b"  # the others are sent
    with pytest.raises(DataError, match="remove one of the two"):
        _ = on("b").reports
    (b.root / "reports/hivis.json").unlink()
    assert (on("b").reports / "hivis.json").read_text() == "of a"
    assert (b.root / "reports/eagle2.json").read_text() == "of a"


def test_equal_changes_at_both_ends_are_no_conflict(runs: str, on: On) -> None:
    a, b = on("a"), on("b")
    for one in (a, b):
        write(one.reports / "hivis.json", "same")
    a.close()
    b.close()
    assert there(runs)["reports/hivis.json"] == b"same"


@pytest.mark.parametrize("damage", ["killed before it was written", "damaged"])
def test_without_a_whole_record_files_are_compared_by_their_content(damage: str, runs: str, on: On) -> None:
    a = on("a")
    record = a.root / ".mirror.json"
    before = record.read_bytes()
    write(a.reports / "hivis.json", "1")
    write(a.reports / "eagle2.json", "1")
    a.close()
    record.write_bytes(before if damage.startswith("killed") else b"{")
    write(a.root / "reports/eagle2.json", "2")
    with pytest.raises(DataError, match=r"reports/eagle2\.json has changed both"):
        a.close()
    write(a.root / "reports/eagle2.json", "1")
    a.close()
    assert set(there(runs).values()) == {b"1"}


def test_what_is_removed_by_a_command_is_removed_at_the_url_and_elsewhere(runs: str, on: On) -> None:
    a = on("a")
    for name in ("part-1", "part-2"):
        write(a.responses / name, name)
    a.close()
    b = on("b")
    assert len(list(b.responses.iterdir())) == 2
    a = on("a")
    (a.responses / "part-1").unlink()
    a.close()
    assert "responses/part-1" not in there(runs)
    write(b.responses / "part-2", "changed here")
    on("b")
    b.close()
    assert (on("b").responses / "part-2").read_text() == "changed here"
    assert not (b.responses / "part-1").exists()


def test_what_vanishes_between_commands_is_fetched_again(runs: str, on: On) -> None:
    a = on("a")
    write(a.responses / "part-1", "1")
    a.close()
    (a.root / "responses/part-1").unlink()  # by somebody who cleans caches
    a = on("a")
    assert (a.responses / "part-1").read_text() == "1"
    a.close()
    assert there(runs)["responses/part-1"] == b"1"


def test_no_machine_sees_new_weights_with_an_old_description(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on("a")
    drafter(a, "hivis", "1")
    a.close()
    drafter(a, "hivis", "2")
    seen = list[dict[str, bytes]]()
    replace = Remote.replace

    def watched(self: Remote, name: str, data: bytes | Path) -> None:
        replace(self, name, data)
        seen.append(there(runs))

    monkeypatch.setattr(Remote, "replace", watched)
    a.close()
    monkeypatch.undo()
    assert seen
    for found in seen:
        texts = {text.split()[-1] for text in found.values()}
        assert texts == {b"2"} or "drafters/hivis/config.json" not in found
    assert there(runs)["drafters/hivis/config.json"] == b"config 2"


def test_of_a_drafter_that_two_machines_have_replaced_none_is_mixed(runs: str, on: On) -> None:
    a, b = on("a"), on("b")
    drafter(a, "hivis", "0")
    a.close()
    on("b").drafter("hivis")
    for one, text in ((a, "of a"), (b, "of b")):
        write(one.root / "drafters/hivis/model.safetensors", f"weights {text}")  # the same settings
    a.close()
    write(b.root / "drafters/hivis/config.json", "config of b")
    with pytest.raises(DataError, match=r"drafters/hivis/.* as have 1 others"):
        b.close()
    assert there(runs)["drafters/hivis/model.safetensors"] == b"weights of a"
    assert there(runs)["drafters/hivis/config.json"] == b"config 0"


def test_a_failure_loses_nothing_and_the_next_command_sends_it(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on("a")
    replace = Remote.replace

    def broken(self: Remote, name: str, data: bytes | Path) -> None:
        if name == "prompts.parquet":
            raise ConnectionError("the network is down")
        replace(self, name, data)

    monkeypatch.setattr(Remote, "replace", broken)
    words = ["prompts", "demo", "--limit", "3", "--runs", runs]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "cannot be written to (the network is down)" in err
    assert "the next command with this --runs sends it" in err
    assert "prompts.parquet" not in there(runs)
    monkeypatch.setattr(Remote, "replace", replace)
    assert main(["report", "--runs", runs]) == 1  # there is nothing to report
    assert "prompts.parquet" in there(runs)


def test_a_command_that_fails_sends_what_it_has_done(runs: str, on: On) -> None:
    a = on("a")
    write(a.responses / "part-1", "1")
    assert main(["train", "hivis", "--runs", runs, "--recipe", "unknown"]) == 1
    assert there(runs)["responses/part-1"] == b"1"


def test_changes_are_sent_while_a_command_runs(runs: str, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    a = on("a")
    assert a.mirror
    monkeypatch.setattr(mirror, "EVERY", 0.02)
    write(a.responses / "part-1", "1")
    sent = threading.Event()
    send = a.mirror.send

    def watched(last: bool = False) -> None:
        send(last)
        if "responses/part-1" in there(runs):
            sent.set()

    monkeypatch.setattr(a.mirror, "send", watched)
    a.mirror.stop()
    a.mirror.start()
    assert sent.wait(60)


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
        left = json.dumps({"host": "a", "process": process, "token": "x"})
        fsspec.filesystem("memory").pipe_file(f"{runs}/demo/.responses.lock", left.encode())
        with held(a):
            pass
    assert there(runs) == {}


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


def rows(folder: Path, image: str) -> str:
    tiny.picture(28, 28, 1).save(folder / "1.png")
    talk = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A house."}]
    (folder / "rows.json").write_text(json.dumps([{"image": image, "conversations": talk}]))
    return str(folder / "rows.json")


def data_url(folder: Path) -> str:
    import base64

    tiny.picture(28, 28, 1).save(folder / "1.png")
    return "data:image/png;base64," + base64.b64encode((folder / "1.png").read_bytes()).decode()


def test_images_of_a_workspace_are_fetched_when_they_are_read(runs: str, on: On, tmp_path: Path) -> None:
    a = on("a")
    import_prompts([rows(tmp_path, data_url(tmp_path))], a.prompts)
    a.close()
    b = on("b")
    (prompt,) = prompt_table.load(b.prompts, "demo")
    (file,) = prompt.files
    assert file.startswith(f"{runs}/demo/images/")
    assert not (b.root / "images").exists()
    assert at_hand(file).read_bytes() == (tmp_path / "1.png").read_bytes()
    assert at_hand(file).is_relative_to(b.root)
    assert prompt_table.read(b.prompts)[0] == prompt
    again = import_prompts([rows(tmp_path, data_url(tmp_path))], b.prompts)
    assert (again.present, again.added) == (1, 0)


def test_a_local_workspace_can_be_moved_with_its_images(tmp_path: Path) -> None:
    here = tmp_path / "here"
    import_prompts([rows(tmp_path, data_url(tmp_path))], here / "prompts.parquet")
    here.rename(tmp_path / "moved")
    (prompt,) = prompt_table.load(tmp_path / "moved/prompts.parquet")
    assert Path(prompt.files[0]).read_bytes() == (tmp_path / "1.png").read_bytes()


def test_images_and_videos_may_be_in_an_object_store(
    runs: str, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("a")
    files = fsspec.filesystem("memory")
    tiny.picture(28, 28, 1).save(tmp_path / "1.png")
    for name in ("1.png", "film/1.png", "film/2.png"):
        files.pipe_file(f"{runs}/data/{name}", (tmp_path / "1.png").read_bytes())
    talk: list[dict[str, Any]] = [{"from": "human", "value": "What?"}]
    made = [
        {"image": f"{runs}/data/1.png", "conversations": talk},
        {"video": f"{runs}/data/film", "conversations": talk},
        {"image": f"{runs}/data/2.png", "conversations": talk},
        {"image": f"{runs}/../2.png", "conversations": talk},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(made))
    summary = import_prompts([str(tmp_path / "rows.json")], tmp_path / "prompts.parquet")
    assert summary.added == 2
    assert sum(summary.skipped.values()) == 2
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "another"))
    image, video = prompt_table.read(tmp_path / "prompts.parquet")
    assert image.files == [f"{runs}/data/1.png"]
    assert at_hand(image.files[0]).read_bytes() == (tmp_path / "1.png").read_bytes()
    assert sorted(path.name for path in at_hand(video.files[0]).iterdir()) == ["1.png", "2.png"]


def test_names_at_a_url_lead_nowhere_else(runs: str, on: On, tmp_path: Path) -> None:
    a = on("a")

    def versions(self: Remote, name: str) -> dict[str, str]:
        return {"reports/../../../../x": "1", "reports//y": "1"} if name == "reports" else {}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Remote, "versions", versions)
        patched.setattr(Remote, "size", lambda self, name: 0)
        _ = a.reports
    assert [path for path in tmp_path.rglob("*") if path.name in "xy"] == [a.root / "reports/y"]


@pytest.mark.parametrize("url", ["http://example.org/runs", "ftp://x/runs", "s3://", "s3://bucket/../x"])
def test_a_url_that_cannot_hold_a_workspace_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--runs", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert url.rstrip("/") in line
