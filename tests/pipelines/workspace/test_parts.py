"""A workspace at a URL: what one machine writes another has, and nothing is overwritten or lost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pipelines.workspace.disks import On, drafter, names_at, published, write
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench.records import new_file
from vlmdistill.pipelines.bench.unfinished import Decoded, Unfinished
from vlmdistill.pipelines.workspace import parts
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores import lease
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError, LostError


def test_what_one_machine_writes_another_has(runs: str, on: On) -> None:
    a = on("a")
    write(a.prompts, "prompts")
    write(a.responses / "part-1.parquet", "responses")
    write(a.reports / "hivis.json", "evaluation")
    write(a.reports / ".0123.unfinished", "half of an evaluation")
    drafter(a, "hivis", "1")
    a.close()
    b = on("b")
    assert b.root != a.root
    assert b.prompts.read_text() == "prompts"
    assert (b.responses / "part-1.parquet").read_text() == "responses"
    assert (b.reports / "hivis.json").read_text() == "evaluation"
    assert (b.reports / ".0123.unfinished").read_text() == "half of an evaluation"
    assert (b.drafter("hivis") / "config.json").read_text() == "config 1"
    write(b.responses / "part-1.parquet", "other responses")
    b.close()
    assert (on("a").responses / "part-1.parquet").read_text() == "other responses"


def test_only_parts_that_were_asked_for_are_fetched_and_nothing_hidden_is_published(
    runs: str, on: On
) -> None:
    a = on("a")
    drafter(a, "hivis", "1")
    for name in (
        "responses/.part-2.parquet.123.tmp",
        "drafters/.hivis.7/config.json",
        "served/log",
        "notes.txt",
    ):
        write(a.root / name, "")
    _ = a.responses
    a.close()
    assert {
        name.partition("/versions/")[0].partition("/files/")[0]
        for name in names_at(runs)
    } == {"drafters/hivis"}
    b = on("b")
    _ = b.responses
    assert [
        path.name
        for path in b.root.rglob("*")
        if path.is_file() and ".parts" not in path.parts
    ] == []


def test_a_writer_begins_with_what_the_writer_before_has_left(
    runs: str, on: On
) -> None:
    b = on("b")
    assert not (b.responses / "part-1").exists()
    a = on("a")
    with only_writer(a.responses):
        write(a.responses / "part-1", "of a")
    b = on("b")
    with only_writer(b.responses):
        assert (b.responses / "part-1").read_text() == "of a"
        (b.responses / "part-1").unlink()
        write(b.responses / "pack-1", "of a")
    assert published(runs, "responses") == {"pack-1": "of a"}
    assert sorted(path.name for path in on("a").responses.iterdir()) == ["pack-1"]


def test_a_part_is_published_while_it_is_written(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on("a")
    with only_writer(a.responses) as part:
        write(a.responses / "part-1", "1")
        part.save()
        assert published(runs, "responses") == {}  # no minute has passed
        monkeypatch.setattr(parts, "EVERY", 0.0)
        part.save()
        assert published(runs, "responses") == {"part-1": "1"}
        write(a.responses / "part-2", "2")
    assert published(runs, "responses") == {"part-1": "1", "part-2": "2"}


def test_prompts_that_two_machines_have_imported_are_not_mixed(
    runs: str, on: On
) -> None:
    a = on("a")
    write(a.prompts, "of a")
    b = on("b")
    write(b.prompts, "of b")
    b.close()
    with pytest.raises(
        LostError,
        match=r"prompts was changed by another machine \(b, version 1\).* run again",
    ):
        a.close()
    assert published(runs, "prompts") == {"prompts.parquet": "of b"}
    assert (a.root / "prompts.parquet").read_text() == "of a"
    again = on("a")
    assert again.prompts.read_text() == "of b"
    (aside,) = again.root.glob(".parts/.aside-*/prompts/prompts.parquet")
    assert aside.read_text() == "of a"


def test_what_a_killed_command_has_left_is_not_published_after_a_deletion(
    runs: str, on: On
) -> None:
    b = on("b")  # is killed before it publishes
    _ = b.prompts
    write(b.reports / "hivis.json", "shows a prompt")
    write(b.reports / ".0123.unfinished", "shows another one")
    write(b.root / "harvested" / "1.png", "the image of a prompt")
    assert b.parts
    b.parts.send_later(["harvested/1.png"])
    a = on("a")
    for path in (a.reports, a.prompts):
        with only_writer(path) as part:
            part.deletes = True
    again = on("b")
    _ = again.prompts, again.reports
    write(again.reports / "wren.json", "shows no prompt")
    again.close()
    assert published(runs, "reports") == {"wren.json": "shows no prompt"}
    assert not any("harvested" in name for name in names_at(runs))
    (aside,) = again.root.glob(".parts/.aside-*/reports")
    assert {path.name for path in aside.iterdir()} == {
        "hivis.json",
        ".0123.unfinished",
    }


def test_of_a_drafter_that_two_machines_have_made_one_is_published_whole(
    runs: str, on: On
) -> None:
    a = on("a")
    drafter(a, "hivis", "a")
    b = on("b")
    drafter(b, "hivis", "b")
    b.close()
    with pytest.raises(LostError):
        a.close()
    assert published(runs, "drafters/hivis") == {
        "model.safetensors": "weights b",
        "config.json": "config b",
    }


def test_evaluations_of_two_machines_at_once_are_both_published(
    runs: str, on: On
) -> None:
    a = on("a")
    write(a.reports / "hivis.json", "a")
    b = on("b")
    write(b.reports / "eagle2.json", "b")
    write(b.reports / "index.html", "page")
    b.close()
    a.close()
    assert published(runs, "reports") == {
        "hivis.json": "a",
        "eagle2.json": "b",
        "index.html": "page",
    }
    assert (a.reports / "eagle2.json").read_text() == "b"


def test_two_machines_that_finish_the_same_interrupted_evaluation_both_add_theirs(
    runs: str, on: On
) -> None:
    done = Decoded(temperature=0, number=0, threads=1, trees={}, results={}, shown={})
    interrupted = on("a")
    Unfinished(interrupted.reports, {"seed": 1}).add(done)
    interrupted.close()
    machines = on("a"), on("b")
    under_way = [Unfinished(one.reports, {"seed": 1}) for one in machines]
    for number, (machine, unfinished) in enumerate(
        zip(machines, under_way, strict=True), 1
    ):
        assert unfinished.read() == {(0, 0): done}
        unfinished.add(replace(done, number=number))
        write(new_file(machine.reports, "sparrow"), f"{number}")
        unfinished.remove()
    for machine in machines:
        machine.close()
    found = published(runs, "reports")
    assert sorted(found.values()) == ["1", "2"]
    assert all(name.startswith("sparrow.") for name in found)


def test_what_could_not_be_sent_is_an_error_and_sent_by_the_next_command(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Remote, name: str, data: object) -> None:
        raise PermissionError(13, "Access Denied", name)

    a = on("a")
    write(a.reports / "hivis.json", "1")
    with monkeypatch.context() as fault:
        fault.setattr(Remote, "replace", refused)
        with pytest.raises(
            DataError,
            match=r"cannot be written to \(Access Denied.* next command .* sends it",
        ):
            a.close()
    again = on("a")
    assert (again.reports / "hivis.json").read_text() == "1"
    again.close()
    assert published(runs, "reports") == {"hivis.json": "1"}


def test_a_store_without_conditional_put_holds_no_workspace(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on("a")
    monkeypatch.setattr(Remote, "exclusive", False)
    with pytest.raises(DataError, match="no conditional PUT"), only_writer(a.responses):
        pass


def test_media_are_never_replaced(runs: str, on: On) -> None:
    a = on("a")
    write(a.root / "images/1.png", "one image")
    write(a.prompts, "prompts")
    a.close()
    b = on("b")
    write(b.root / "images/1.png", "another")
    write(b.root / "images/2.png", "two")
    write(b.prompts, "prompts and more")
    with pytest.raises(DataError, match=r"images/1\.png is another file"):
        b.close()
    assert published(runs, "prompts") == {"prompts.parquet": "prompts"}


def test_a_part_has_one_writer_on_all_machines(
    runs: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TOUCHED", 0.02)
    a = on("a")
    with only_writer(a.responses):
        b = on("b")
        with (
            pytest.raises(DataError, match=r"on a, is writing to memory://"),
            only_writer(b.responses),
        ):
            pass
        with only_writer(b.drafter("hivis")):  # another part
            pass
    with only_writer(b.responses):
        pass
    assert not [name for name in names_at(runs) if "lock" in name]


def test_a_url_with_empty_parts_is_the_url_without(runs: str, on: On) -> None:
    a = on("a")
    again = Workspace.of("demo-small", runs.replace("/runs", "//runs/"))
    assert (again.root, again.parts) == (a.root, a.parts)


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
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) in (1, 2)
    assert "URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "url", ["http://example.org/runs", "ftp://x/runs", "s3://", "s3://bucket/../x"]
)
def test_a_url_that_cannot_hold_a_workspace_is_refused(
    url: str, failing: Callable[..., str]
) -> None:
    assert url.rstrip("/") in failing("report", "--runs", url)
