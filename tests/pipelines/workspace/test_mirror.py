"""A workspace at a URL: what one machine writes another has, and nothing is overwritten or lost."""

import json
import threading
from pathlib import Path

import fsspec
import pytest

from tests.pipelines.workspace.disks import On, drafter, there, write
from vlmdistill.cli.main import main
from vlmdistill.pipelines.workspace import mirror
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError


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
