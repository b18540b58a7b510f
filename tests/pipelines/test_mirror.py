"""A workspace at a URL: what one machine writes another has, and nothing is overwritten or lost."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.pipelines import mirror, remote_lock
from vlmdistill.pipelines.media.frames import check_unchanged, media_file
from vlmdistill.pipelines.media.images import MediaError
from vlmdistill.pipelines.media.urls import at_hand
from vlmdistill.pipelines.prompts import prompt_table
from vlmdistill.pipelines.prompts.importing import import_prompts
from vlmdistill.pipelines.runtime.shared import some_media
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


def test_prompts_that_two_machines_have_imported_are_a_conflict(runs: str, on: On) -> None:
    a, b = on("a"), on("b")
    write(a.prompts, "of a")
    write(b.prompts, "of b")
    a.close()
    with pytest.raises(DataError, match=r"prompts\.parquet has changed both"):
        b.close()


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


def test_what_a_writer_removes_is_removed_at_the_url_and_elsewhere(runs: str, on: On) -> None:
    a = on("a")
    for name in ("settings.json", "old.json"):
        write(a.responses / name, name)
    write(a.reports / ".1.unfinished", "half")
    a.close()
    b = on("b")
    assert len(list(b.responses.iterdir())) == 2
    a = on("a")
    with only_writer(a.responses):
        (a.responses / "old.json").unlink()
    (a.reports / ".1.unfinished").unlink()
    a.close()
    assert there(runs) == {"responses/settings.json": b"settings.json"}
    write(b.responses / "settings.json", "changed here")
    on("b")
    b.close()
    assert (on("b").responses / "settings.json").read_text() == "changed here"
    assert not (b.responses / "old.json").exists()


def test_what_a_cleaner_removes_during_a_command_stays_at_the_url(runs: str, on: On) -> None:
    a = on("a")
    drafter(a, "hivis", "1")
    write(a.responses / "part-1", "1")
    a.close()
    a = on("a")
    assert a.drafter("hivis")
    with only_writer(a.responses):
        (a.root / "drafters/hivis/config.json").unlink()
    a.close()
    assert there(runs)["drafters/hivis/config.json"] == b"config 1"


def test_copies_of_a_workspace_that_has_vanished_are_kept(runs: str, on: On) -> None:
    a = on("a")
    write(a.responses / "part-1", "1")
    a.close()
    fsspec.filesystem("memory").rm(f"{runs}/demo", recursive=True)
    a = on("a")
    with pytest.raises(DataError, match=r"is empty, and .* has copies of it"):
        _ = a.responses
    assert (a.root / "responses/part-1").read_text() == "1"


def test_a_machine_that_comes_back_takes_what_another_has_made_meanwhile(runs: str, on: On) -> None:
    a, b = on("a"), on("b")
    for one, text in ((a, "of a"), (b, "of b")):
        write(one.responses / "part-1.parquet", text)
        write(one.reports / ".1.unfinished", text)
        write(one.drafter("hivis.training") / "metrics.jsonl", text)
    b.close()
    a = on("a")  # it was off: nothing was sent
    a.close()
    a = on("a")
    assert (a.responses / "part-1.parquet").read_text() == "of b"
    assert (a.reports / ".1.unfinished").read_text() == "of b"
    assert (a.drafter("hivis.training") / "metrics.jsonl").read_text() == "of b"
    (left,) = a.responses.glob(".part-1.parquet.*.unsent")
    assert left.read_text() == "of a"
    assert set(there(runs).values()) == {b"of b"}


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
    replace, create = Remote.replace, Remote.create

    def replaced(self: Remote, name: str, data: bytes | Path) -> None:
        replace(self, name, data)
        seen.append(there(runs))

    def created(self: Remote, name: str, data: bytes) -> bool:
        made = create(self, name, data)
        seen.append(there(runs))
        return made

    monkeypatch.setattr(Remote, "replace", replaced)
    monkeypatch.setattr(Remote, "create", created)
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
    create = Remote.create

    def broken(self: Remote, name: str, data: bytes) -> bool:
        if name == "prompts.parquet":
            raise ConnectionError("the network is down")
        return create(self, name, data)

    monkeypatch.setattr(Remote, "create", broken)
    words = ["prompts", "demo", "--limit", "3", "--runs", runs]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "cannot be written to (the network is down)" in err
    assert "the next command with this --runs sends it" in err
    assert "prompts.parquet" not in there(runs)
    monkeypatch.setattr(Remote, "create", create)
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

    def watched(*parts: str) -> None:
        send(*parts)
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
        holder = {"host": "a", "machine": remote_lock.machine(), "process": process, "token": "x"}
        left = json.dumps(holder)
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


def test_prompts_are_found_behind_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    source, out = rows(tmp_path, data_url(tmp_path)), tmp_path / "link/prompts.parquet"
    import_prompts([source], out)
    assert prompt_table.read(out) == prompt_table.read(tmp_path / "real/prompts.parquet")
    (row,) = pq.read_table(out).to_pylist()
    paths = [part["path"] for turn in row["messages"] for part in turn["content"] if part["type"] == "image"]
    assert [Path(path).parts[0] for path in paths] == ["images"]


def test_a_cache_behind_a_symbolic_link_is_the_same_cache(
    runs: str, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on("a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    linked = on("link")
    assert (linked.root, linked.mirror) == (a.root, a.mirror)
    import_prompts([rows(tmp_path, data_url(tmp_path))], linked.prompts)
    ((file,),) = (prompt.files for prompt in prompt_table.read(linked.prompts))
    assert file.startswith(f"{runs}/demo/images/")


def test_the_check_of_machines_keeps_files_that_the_driver_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_prompts([rows(tmp_path, "1.png")], tmp_path / "prompts.parquet")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read all
    assert some_media(prompt_table.read(tmp_path / "prompts.parquet")) == (str(tmp_path / "1.png"),)


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
    files.pipe_file(f"{runs}/data/1.png", b"an older image")
    stale = at_hand(f"{runs}/data/1.png")
    files.pipe_file(f"{runs}/data/1.png", (tmp_path / "1.png").read_bytes())
    assert stale.read_bytes() == b"an older image"
    summary = import_prompts([str(tmp_path / "rows.json")], tmp_path / "prompts.parquet")
    assert summary.added == 2
    assert sum(summary.skipped.values()) == 2
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "another"))
    image, video = prompt_table.read(tmp_path / "prompts.parquet")
    assert image.files == [f"{runs}/data/1.png"]
    assert at_hand(image.files[0]).read_bytes() == (tmp_path / "1.png").read_bytes()
    assert sorted(path.name for path in at_hand(video.files[0]).iterdir()) == ["1.png", "2.png"]
    copy = at_hand(image.files[0])
    copy.write_bytes(b"of another time")
    assert media_file(image.media[0]).read_bytes() == (tmp_path / "1.png").read_bytes()
    files.pipe_file(f"{runs}/data/1.png", b"changed")
    media_file(image.media[0])  # as it was imported
    copy.unlink()
    media_file(image.media[0])
    with pytest.raises(MediaError, match=f"{runs}/data/1.png has changed"):
        check_unchanged(image.media[0])


def test_two_machines_that_write_a_report_at_once_lose_neither(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = on("a"), on("b")
    write(a.reports / "hivis.json", "a")
    write(b.reports / "hivis.json", "b")
    versions, raced = Remote.versions, list[str]()

    def slow(self: Remote, name: str) -> dict[str, str]:
        found = versions(self, name)
        if not raced:
            raced.append(name)
            b.close()  # between the look of a and its PUT
        return found

    monkeypatch.setattr(Remote, "versions", slow)
    with pytest.raises(DataError, match=r"reports/hivis\.json has changed both"):
        a.close()
    assert there(runs)["reports/hivis.json"] == b"b"
    assert (a.root / "reports/hivis.json").read_text() == "a"


def test_a_url_with_empty_parts_is_the_url_without(runs: str, on: On) -> None:
    a = on("a")
    write(a.reports / "hivis.json", "1")
    a.close()
    again = Workspace.of("demo", runs.replace("/runs", "//runs/"))
    assert (again.root, again.mirror) == (a.root, a.mirror)


@pytest.mark.parametrize(
    "words",
    [
        ["prompts", "demo", "--out", "s3://bucket/p.parquet"],
        ["responses", "--prompts", "s3://bucket/p.parquet"],
        ["export", "hivis", "--out", "gs://bucket/drafter"],
        ["report", "--runs", "s3:/bucket/runs"],
    ],
)
def test_a_url_that_an_option_does_not_take_is_refused_and_makes_no_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) in (1, 2)
    assert "URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_names_at_a_url_lead_nowhere_else(runs: str, on: On, tmp_path: Path) -> None:
    a = on("a")

    def versions(self: Remote, name: str) -> dict[str, str]:
        return {"reports/../../../../x": "1", "reports//y": "1"} if name == "reports" else {}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Remote, "versions", versions)
        patched.setattr(Remote, "size", lambda self, name: 0)
        _ = a.reports
    assert not [path for path in tmp_path.rglob("*") if path.name in "xy"]


@pytest.mark.parametrize("url", ["http://example.org/runs", "ftp://x/runs", "s3://", "s3://bucket/../x"])
def test_a_url_that_cannot_hold_a_workspace_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--runs", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert url.rstrip("/") in line


def test_a_drafter_survives_a_lost_reply_to_the_removal_of_its_description(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on("a")
    drafter(a, "hivis", "1")
    a.close()
    write(a.drafter("hivis") / "model.safetensors", "weights 2")
    remove = Remote.remove

    def lost(self: Remote, name: str) -> None:
        remove(self, name)
        raise ConnectionError("no reply")

    with monkeypatch.context() as fault:
        fault.setattr(Remote, "remove", lost)
        with pytest.raises(DataError):
            a.close()
    assert (a.drafter("hivis") / "config.json").read_text() == "config 1"
    a.close()
    assert there(runs)["drafters/hivis/config.json"] == b"config 1"


def test_a_lock_of_an_impossible_process_is_taken_over(runs: str, on: On) -> None:
    a = on("a")
    lock = {"host": "a", "machine": remote_lock.machine(), "process": 1 << 62, "token": ""}
    fsspec.filesystem("memory").pipe_file(f"{runs}/demo/.responses.lock", json.dumps(lock).encode())
    with only_writer(a.responses):
        pass


def test_a_record_leads_nowhere_else(on: On) -> None:
    a = on("a")
    outside = a.root.parent / "outside.unfinished"
    write(outside, "mine")
    info = outside.stat()
    one = {"version": "", "stat": [info.st_size, info.st_mtime_ns]}
    names = ("responses/../../outside.unfinished", "responses/\0", "")
    write(a.root / mirror.RECORD, json.dumps(dict.fromkeys(names, one)))
    assert a.responses
    a.close()
    assert outside.read_text() == "mine"


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
