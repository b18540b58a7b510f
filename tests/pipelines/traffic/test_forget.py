"""Deletion by age: nothing of a forgotten request is in any file of the workspace, and the rest is whole."""

import base64
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import polars as pl
import pytest

from tests.cli.test_full_disk import full
from tests.pipelines.bench.made_up import evaluation, measured, shown
from tests.pipelines.traffic import marks
from tests.pipelines.traffic.conftest import ANSWER, asked, data_url, said, write
from tests.stores.samples import make, sample
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.evaluate import Settings, evaluate
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.pipelines.data.responses.responder import respond
from vlmdistill.pipelines.flow import capture_features
from vlmdistill.pipelines.report import page
from vlmdistill.pipelines.traffic import forget as deletion
from vlmdistill.pipelines.traffic.forget import Forgotten, forget
from vlmdistill.pipelines.traffic.harvest import MEDIA, harvest
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.workspace import parts
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import FOR_USER, DataError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.sharing.retention import Expired, expire
from vlmdistill.stores.store import Store
from vlmdistill.stores.writer import Writer

DAY = 86400
NOW = time.time()
OLD, NEW = NOW - 40 * DAY, NOW - DAY


def lines(word: str, when: float, seed: int) -> list[dict[str, Any]]:
    """Three requests, two of them with an image, that name a word."""
    return [
        {
            "time": when + number,
            "request": asked(
                f"Is {word} on board {number}?",
                data_url(seed + number) if number else None,
            ),
            "response": said(ANSWER.format(f"{word} and {number}")),
        }
        for number in range(3)
    ]


@pytest.fixture(autouse=True)
def own_temporary_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion sees what other processes are sending to a URL, such as those of other tests."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Old and new traffic, a prompt that is none, a store with samples of both times, and an evaluation."""
    here = Workspace.of("demo-small", tmp_path / "runs")
    own = [{"messages": [{"role": "user", "content": "Mine?"}]}]
    import_prompts([str(write(tmp_path / "own.jsonl", own))], here.prompts)
    write(tmp_path / "log" / "1.jsonl", lines("Zebedee", OLD, 0))
    write(tmp_path / "log" / "2.jsonl", lines("Florence", NEW, 10))
    assert harvest(here, [str(tmp_path / "log")]).kept == 6
    store = make(Path(here.features))
    with store.writer("a") as writer:
        for number, when in enumerate((OLD, OLD, NEW)):
            writer.add(sample(number, time=int(when)))
    return here


def holding(folder: Path, content: bytes) -> list[str]:
    return [
        str(file)
        for file in folder.rglob("*")
        if file.is_file() and content in file.read_bytes()
    ]


def raw(workspace: Workspace, word: str) -> list[str]:
    """Files that name a word, those that are compressed included."""
    found = holding(workspace.root, word.encode())
    if any(word in str(vars(one)) for one in prompt_table.read(workspace.prompts)):
        found.append("prompts")
    if any(word in row.text for row in dataset.read(workspace.responses)):
        found.append("responses")
    return found


def test_what_is_too_old_is_in_no_file_and_all_else_is(workspace: Workspace) -> None:
    keys = {one.key: one.time for one in prompt_table.read(workspace.prompts)}
    old = next(key for key, when in keys.items() if when and when < NEW - DAY)
    showing = evaluation(
        "hawk",
        measured(shown=(shown(old, prompt="Is Zebedee there?"),)),
        not_again="Zebedee cannot be read",
    )
    file = records.new_file(workspace.reports, "hawk")
    records.write(showing, file)
    (workspace.reports / "index.html").write_text("Zebedee")
    dataset.write_failed(
        workspace.responses, {old: "Zebedee cannot be read", "another": "too long"}
    )
    for name in (
        ".prompts.parquet.0123abcd.tmp",
        "responses/.part-0.parquet.0123abcd.tmp",
        "served/hawk.log",
        "served/core.123",
    ):
        (workspace.root / name).parent.mkdir(exist_ok=True)
        (workspace.root / name).write_text("Zebedee")  # of a run that was killed
    state = sample(0).features[Feature("hidden", "text")].tobytes()[:64]
    images = [one.read_bytes() for one in (workspace.root / MEDIA).iterdir()]
    assert holding(workspace.root, state)
    assert len(images) == 4
    assert raw(workspace, "Zebedee")
    tried = forget(workspace, 30 * DAY, dry_run=True)
    assert raw(workspace, "Zebedee")
    done = forget(workspace, 30 * DAY)
    assert replace(tried, dry_run=False, bytes=done.bytes, before=done.before) == done
    assert (done.samples, done.responses, done.prompts, done.media, done.reports) == (
        2,
        3,
        3,
        2,
        1,
    )
    assert not raw(workspace, "Zebedee")
    assert not holding(workspace.root, state)
    assert sum(bool(holding(workspace.root, image)) for image in images) == 2
    assert raw(workspace, "Florence")
    assert raw(workspace, "too long")
    assert {one.time is None for one in prompt_table.read(workspace.prompts)} == {
        True,
        False,
    }
    assert len(prompt_table.read(workspace.prompts)) == 4
    assert Store.open(workspace.features).keys() == {"k0002"}
    assert not verify(workspace.features).damage
    left = records.read(file)
    assert [at.shown for at in left.temperatures] == [()] * len(left.temperatures)
    assert [at.prompts for at in left.temperatures] == [
        at.prompts for at in showing.temperatures
    ]
    assert forget(workspace, 30 * DAY).prompts == 0


def test_stopped_before_the_prompts_are_written_it_is_done_by_the_next_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prompt_table, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            forget(workspace, 30 * DAY)
    assert forget(workspace, 30 * DAY).prompts == 3
    assert not raw(workspace, "Zebedee")


def test_a_page_is_gone_before_what_tells_that_it_must(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = next(
        one.key
        for one in prompt_table.read(workspace.prompts)
        if one.time and one.time < NEW - DAY
    )
    showing = evaluation(
        "hawk", measured(shown=(shown(old, prompt="Is Zebedee there?"),))
    )
    for _ in range(2):
        records.write(showing, records.new_file(workspace.reports, "hawk"))
    (workspace.reports / "index.html").write_text("Zebedee")
    writing, times = records.write, list[int]()

    def killed(*given: Any) -> None:
        writing(*given)
        times.append(1)
        if len(times) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            forget(workspace, 30 * DAY)
    forget(workspace, 30 * DAY)
    assert not raw(workspace, "Zebedee")


@pytest.mark.parametrize("other", ["nothing", "harvest", "prompts", "both"])
def test_what_a_killed_harvest_left_without_a_prompt_is_deleted(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    log = write(tmp_path / "log" / "3.jsonl", lines("Dougal", OLD, 20))
    with monkeypatch.context() as patch:
        patch.setattr("vlmdistill.pipelines.data.prompts.importing.write", killed)
        with pytest.raises(KeyboardInterrupt):
            harvest(workspace, [str(log)])
    log.unlink()
    assert raw(workspace, "Dougal")
    if other in ("prompts", "both"):
        import_prompts([str(asking(tmp_path, "Dougal", 1))], workspace.prompts)
    if other in ("harvest", "both"):
        later = write(tmp_path / "later.jsonl", texts("Ermintrude", NEW))
        assert harvest(workspace, [str(later)]).kept == 3
    assert forget(workspace, 30 * DAY).responses == 6
    # An imported prompt is no traffic.
    is_imported = other in ("prompts", "both")
    assert ("prompts" in raw(workspace, "Dougal")) == is_imported
    assert "Dougal" not in str(dataset.table(workspace.responses))
    assert raw(workspace, "Florence")


def test_responses_to_the_prompts_of_another_workspace_go_when_they_are_old(
    held_out: Workspace, tmp_path: Path
) -> None:
    other = Workspace.of("demo", tmp_path / "runs")
    respond(
        prompt_table.load(held_out.prompts, split="all"),
        other.responses,
        "demo-small",
        dataset.SamplingSettings(max_new_tokens=4),
        options=WorkerOptions(workers=0),
    )
    assert forget(other, 30 * DAY).responses == 3
    new = {
        prompt.key
        for prompt in prompt_table.read(held_out.prompts)
        if (prompt.time or 0) > NOW - 30 * DAY
    }
    assert dataset.keys(other.responses) == new
    assert forget(other, 0).responses == 3


def test_responses_go_when_they_are_old_although_the_prompts_are_lost(
    held_out: Workspace,
) -> None:
    held_out.prompts.unlink()
    assert forget(held_out, 30 * DAY).responses == 3
    assert "Zebedee" not in str(dataset.table(held_out.responses))
    assert "Florence" in str(dataset.table(held_out.responses))


def texts(word: str, when: float, count: int = 3) -> list[dict[str, Any]]:
    """Requests without images that name a word."""
    return [
        {
            "time": when + number,
            "request": asked(f"Is {word} on board {number}?"),
            "response": said(ANSWER.format(f"{word} and {number}")),
        }
        for number in range(count)
    ]


def asking(folder: Path, word: str, count: int = 3) -> Path:
    """A file of the same questions, which is imported and no traffic."""
    return write(
        folder / "asking.jsonl", [one["request"] for one in texts(word, OLD, count)]
    )


def test_the_response_to_a_prompt_that_is_imported_too_is_deleted(
    held_out: Workspace, tmp_path: Path
) -> None:
    import_prompts([str(asking(tmp_path, "Zebedee"))], held_out.prompts)
    made = forget(held_out, 30 * DAY)
    assert (made.responses, made.prompts) == (3, 3)
    assert not raw(held_out, "Zebedee")
    assert raw(held_out, "Florence")


def test_an_imported_prompt_stays_when_a_sample_of_another_machine_is_old(
    tmp_path: Path,
) -> None:
    here = Workspace.of("demo-small", tmp_path / "runs")
    import_prompts([str(asking(tmp_path, "Zebedee", 1))], here.prompts)
    (prompt,) = prompt_table.read(here.prompts)
    with make(Path(here.features)).writer("a") as writer:
        writer.add(replace(sample(0, time=int(OLD)), key=prompt.key))
    own = make(here.root / "own")
    with own.writer("a") as writer:
        writer.add(replace(sample(0), key=prompt.key))
    forgotten = forget(here, 30 * DAY)
    assert (forgotten.samples, forgotten.prompts) == (1, 0)
    assert prompt_table.read(here.prompts) == [prompt]
    assert own.keys() == {prompt.key}


def test_a_harvested_image_does_not_become_the_one_of_an_import(
    workspace: Workspace, tmp_path: Path
) -> None:
    image, row = tmp_path / "board.png", {"type": "image", "image": "board.png"}
    file = tmp_path / "mine.jsonl"
    for content in (lines("Zebedee", OLD, 0)[1], lines("Florence", NEW, 50)[1]):
        shown_part, text = content["request"]["messages"][0]["content"]
        image.write_bytes(
            base64.b64decode(shown_part["image_url"]["url"].partition(",")[2])
        )
        question = {**text, "text": "Is Zebedee on board 1?"}
        write(file, [{"messages": [{"role": "user", "content": [row, question]}]}])
        before = len(prompt_table.read(workspace.prompts))
        import_prompts([str(file)], workspace.prompts)
    assert len(prompt_table.read(workspace.prompts)) == before + 1
    assert forget(workspace, 30 * DAY).responses == 3
    assert len(dataset.keys(workspace.responses)) == 3


def test_traffic_does_not_answer_a_prompt_that_was_imported(tmp_path: Path) -> None:
    here = Workspace.of("demo-small", tmp_path / "runs")
    import_prompts([str(asking(tmp_path, "Zebedee"))], here.prompts)
    log = write(
        tmp_path / "log.jsonl", [*texts("Zebedee", OLD), *texts("Florence", NEW)]
    )
    made = harvest(here, [str(log)])
    assert (made.known, made.kept) == (3, 3)
    forget(here, 30 * DAY)
    assert raw(here, "Zebedee") == [str(here.prompts), "prompts"]
    assert dataset.keys(here.responses) == {
        one.key for one in prompt_table.read(here.prompts) if one.time is not None
    }


@pytest.fixture
def held_out(tmp_path: Path) -> Workspace:
    """Old and new traffic, all of it held out."""
    here = Workspace.of("demo-small", tmp_path / "runs")
    log = write(
        tmp_path / "log.jsonl", [*texts("Zebedee", OLD), *texts("Florence", NEW)]
    )
    assert harvest(here, [str(log)], eval_share=0.999).kept == 6
    return here


def test_rotated_logs_bring_nothing_back_that_is_older_than_the_policy_allows(
    held_out: Workspace, tmp_path: Path
) -> None:
    forget(held_out, 30 * DAY)
    log = tmp_path / "log.jsonl"
    rotated = tmp_path / "rotated"
    rotated.mkdir()
    (rotated / "log.jsonl.2.gz").write_bytes(gzip.compress(log.read_bytes()))
    log.rename(rotated / "log.jsonl.1")
    made = harvest(held_out, [str(rotated)], Policy(max_age="30d"))
    assert (made.kept, made.known, made.dropped) == (0, 3, {"too old": 3})
    assert "log.jsonl.1" in made.other_files
    assert not raw(held_out, "Zebedee")
    assert harvest(held_out, [str(rotated)]).kept == 3  # without it, they come back


@pytest.mark.parametrize("stopped", [False, True])
def test_an_evaluation_that_runs_meanwhile_shows_no_deleted_prompt(
    held_out: Workspace, stopped: bool
) -> None:
    calls = list[int]()

    def meanwhile(done: int, total: int, remark: str = "") -> None:
        calls.append(done)
        if len(calls) == 2:
            assert forget(held_out, 30 * DAY).prompts == 3
        if done == 6 and stopped:
            raise KeyboardInterrupt

    settings = Settings(max_new_tokens=4, threads=1)
    with pytest.raises(KeyboardInterrupt) if stopped else nullcontext():
        evaluate(
            held_out,
            open_drafters(held_out, ["lookahead"]),
            settings,
            on_prompt=meanwhile,
        )
    assert len(calls) == 6
    assert not raw(held_out, "Zebedee")
    assert holding(held_out.reports, b"Florence")
    if not stopped:
        (file,) = records.files_in(held_out.reports)
        (measurement,) = records.read(file).temperatures
        assert len(measurement.prompts) == 6
        assert len(measurement.shown) == 3


def test_what_an_evaluation_has_left_of_deleted_prompts_goes_with_any_later_deletion(
    held_out: Workspace,
) -> None:
    evaluate(
        held_out,
        open_drafters(held_out, ["lookahead"]),
        Settings(max_new_tokens=4, threads=1),
    )
    (file,) = records.files_in(held_out.reports)
    own = held_out.reports / "hawk.json"
    records.write(
        evaluation("hawk"), own
    )  # of prompts that are no traffic, and stand elsewhere
    record, kept = file.read_bytes(), own.read_bytes()
    forget(held_out, 30 * DAY)
    file.write_bytes(record)  # as one that did not look again
    (held_out.reports / "index.html").write_text("Zebedee")
    torn = held_out.reports / ".0123.4567.unfinished"
    torn.write_bytes(b'{"number": 1, "shown": {"hawk": {"prompt": "Zebedee')
    copy = held_out.root / "before" / torn.name
    copy.parent.mkdir()
    shutil.copy(torn, copy)
    done = forget(held_out, 30 * DAY)
    assert (done.prompts, done.reports) == (0, 1)
    assert not raw(held_out, "Zebedee")
    assert holding(held_out.reports, b"Florence")
    assert own.read_bytes() == kept


def test_a_page_that_is_written_meanwhile_is_removed(
    held_out: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(
        held_out,
        open_drafters(held_out, ["lookahead"]),
        Settings(max_new_tokens=4, threads=1),
    )
    deletion = Thread(target=forget, args=(held_out, 30 * DAY))
    writing = page.write

    def late(content: str | bytes, file: Path) -> None:
        deletion.start()
        deletion.join(2)  # it waits for the page
        writing(content, file)

    monkeypatch.setattr(page, "write", late)
    page.make(held_out)
    deletion.join()
    assert not raw(held_out, "Zebedee")


@pytest.mark.parametrize(
    "name", ["page.html", "reports/a/page.html", "reports/page", "reports/page.json"]
)
def test_a_page_is_not_written_where_it_would_stay(
    workspace: Workspace, name: str
) -> None:
    for step in (page.make, page.read):  # of a page, and of a table
        with pytest.raises(DataError, match=r"NAME\.html"):
            step(workspace, workspace.root / name)


def test_prompts_that_were_read_before_a_deletion_are_not_answered_after_it(
    workspace: Workspace,
) -> None:
    file = workspace.prompts
    listed = prompt_table.load(file, split="all")
    mine = listed.without(
        pl.Series([row.key for row in prompt_table.read(file) if row.time])
    )
    forget(workspace, 30 * DAY)
    with pytest.raises(DataError, match="3 prompts were deleted"):
        respond(
            listed, workspace.responses, "demo-small", options=WorkerOptions(workers=0)
        )
    assert not raw(workspace, "Zebedee")
    prompt_table.require_listed(mine)


def test_copies_of_evaluations_and_prompts_in_the_workspace_lose_it_too(
    workspace: Workspace,
) -> None:
    reports = workspace.reports
    old = next(row.key for row in prompt_table.read(workspace.prompts) if row.time)
    results = measured(shown=(shown(old, prompt="Is Zebedee there?"),))
    for folder in (reports, reports / "before", workspace.root / "kept"):
        folder.mkdir(parents=True, exist_ok=True)
        records.write(evaluation("wren", results), folder / "wren.json")
        page.make(workspace, reports / "page.html")
        if folder != reports:
            shutil.copy(reports / "page.html", folder)
    (workspace.root / "kept" / "draft.html").write_text("<p>a draft of mine</p>")
    copy = workspace.root / "kept" / "copy.parquet"
    labelled = pl.read_parquet(workspace.prompts).with_columns(label=pl.lit("good"))
    labelled.write_parquet(copy)
    (copy.parent / ".copy.parquet.0123abcd.tmp").write_text("Zebedee")
    theirs = shutil.copy(workspace.prompts, workspace.root.with_name("theirs.parquet"))
    link = copy.parent / "link.parquet"
    link.symlink_to(theirs)
    (part,) = workspace.responses.glob("part-*.parquet")
    shutil.copy(part, workspace.root / "kept" / "responses.parquet")
    forgotten = forget(workspace, 30 * DAY)
    assert (forgotten.prompts, forgotten.responses, forgotten.reports) == (6, 6, 3)
    assert holding(workspace.root, b"Zebedee") == [str(link)]
    assert [file.name for file in workspace.root.rglob("*.html")] == ["draft.html"]
    assert link.is_symlink()
    left = [prompt.key for prompt in prompt_table.read(workspace.prompts)]
    assert [prompt.key for prompt in prompt_table.read(copy)] == left
    assert {*pl.read_parquet(copy)["label"]} == {"good"}
    rows = pl.read_parquet(workspace.root / "kept" / "responses.parquet")
    assert {*rows["key"]} == dataset.keys(workspace.responses)


def test_a_copy_whose_times_are_no_numbers_stops_the_deletion_before_it_begins(
    workspace: Workspace,
) -> None:
    copy = workspace.root / "dated.parquet"
    dated = pl.read_parquet(workspace.prompts).with_columns(pl.from_epoch("time"))
    dated.write_parquet(copy)
    with pytest.raises(DataError, match=r"dated.parquet: its times are timestamp"):
        forget(workspace, 30 * DAY)
    assert Store.open(workspace.features).keys() == {"k0000", "k0001", "k0002"}
    copy.unlink()
    assert forget(workspace, 30 * DAY).samples == 2


def test_what_a_copy_of_the_files_of_a_url_has_set_aside_goes(
    workspace: Workspace,
) -> None:
    aside = workspace.root / ".parts" / ".aside-0123abcd" / "prompts.parquet"
    aside.parent.mkdir(parents=True)
    shutil.copy(workspace.prompts, aside)
    forget(workspace, 30 * DAY)
    assert not holding(workspace.root, b"Zebedee")


def test_a_command_that_is_about_to_make_a_folder_for_old_prompts_makes_it_fail(
    held_out: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(model: str) -> Any:
        with pytest.raises(DataError, match=r"writing to .*june"):
            forget(held_out, 30 * DAY)
        raise KeyboardInterrupt

    monkeypatch.setattr(responder, "checkpoint", meanwhile)
    listed = prompt_table.load(held_out.prompts)
    with pytest.raises(KeyboardInterrupt):
        respond(listed, held_out.root / "of" / "june", "demo-small")
    assert forget(held_out, 30 * DAY).prompts == 3


@pytest.mark.parametrize("target", ["features", "a", "of/new"])
def test_a_copy_between_stores_meanwhile_brings_no_sample_back(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    other = workspace.root / "b"
    shutil.copytree(workspace.features, other)
    shutil.copytree(workspace.features, workspace.root / "a")
    calls = list[str]()

    def meanwhile(store: Store, *given: Any, **named: Any) -> Expired:
        calls.append(store.path)
        if len(calls) == 3:
            send(other, workspace.root / target)
        return expire(store, *given, **named)

    monkeypatch.setattr(deletion, "expire", meanwhile)
    assert forget(workspace, 30 * DAY).samples == 2
    left = Store.open(workspace.root / target)
    assert left.keys() == {"k0002"}


def test_what_a_running_command_still_reads_is_no_success(held_out: Workspace) -> None:
    with held_out.staging() as folder:
        (folder / "prompts").write_text("Zebedee")
        with pytest.raises(DataError, match="running"):
            forget(held_out, 30 * DAY)
        assert holding(held_out.root, b"Zebedee") == [str(folder / "prompts")]
    assert forget(held_out, 30 * DAY).prompts == 0
    assert not raw(held_out, "Zebedee")


@pytest.mark.parametrize("size", [0, 300, 5000])
def test_on_a_full_disk_a_deletion_that_ends_well_has_left_nothing(
    workspace: Workspace, size: int
) -> None:
    with suppress(*FOR_USER), full(size):
        forget(workspace, 30 * DAY)
        assert not raw(workspace, "Zebedee")
    forget(workspace, 30 * DAY)
    assert not raw(workspace, "Zebedee")
    assert raw(workspace, "Florence")


def test_traffic_of_the_future_is_told_and_goes_with_all_traffic(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: NOW - 300 * DAY)
        with pytest.raises(DataError, match=r"future.*0s"):
            forget(workspace, 30 * DAY)
        assert forget(workspace, 0).prompts == 6
    assert not raw(workspace, "Zebedee")
    assert not raw(workspace, "Florence")


def test_samples_and_responses_of_the_future_are_no_success_without_their_prompts(
    workspace: Workspace, tmp_path: Path
) -> None:
    later = int(NOW + 300 * DAY)
    with make(tmp_path / "theirs").writer("b") as writer:
        writer.add(sample(7, time=later))
    shutil.copytree(tmp_path / "theirs", workspace.root / "theirs")
    with pytest.raises(FOR_USER, match="1 samples stay that were asked in the future"):
        forget(workspace, 30 * DAY)
    shutil.rmtree(workspace.root / "theirs")
    row = next(dataset.read(workspace.responses))
    dataset.write_part(workspace.responses, "x", [replace(row, key="x", time=later)])
    with pytest.raises(DataError, match=r"1 prompts and responses stay.*0s"):
        forget(workspace, 30 * DAY)
    assert forget(workspace, 0).responses == 4
    assert not dataset.keys(workspace.responses)


def test_what_was_left_before_a_store_has_a_record_goes(held_out: Workspace) -> None:
    left = Path(held_out.features) / "staging" / f"{1:016}"
    left.mkdir(parents=True)
    (left / "record").write_text("Zebedee")
    forget(held_out, 30 * DAY)
    assert not raw(held_out, "Zebedee")


def test_responses_and_stores_under_other_names_in_the_workspace_lose_it_too(
    workspace: Workspace,
) -> None:
    root = workspace.root
    names = ("", "of/june", ".hidden", "annexes", "harvested")
    folders = [root / name for name in names]
    for folder in folders:
        shutil.copytree(workspace.responses, folder / "greedy")
        shutil.copytree(workspace.features, folder / "int8")
    shutil.copytree(workspace.responses, root, dirs_exist_ok=True)
    forgotten = forget(workspace, 30 * DAY)
    assert (forgotten.responses, forgotten.samples) == (21, 2)
    assert dataset.keys(root) == dataset.keys(workspace.responses)
    for folder in folders:
        left = dataset.keys(folder / "greedy")
        assert left == dataset.keys(workspace.responses)
        assert len(Store.open(folder / "int8")) == 1


@pytest.mark.parametrize("name", ["features", "of/june"])
def test_a_store_that_has_lost_its_record_is_no_success(
    workspace: Workspace, name: str
) -> None:
    shutil.copytree(workspace.features, workspace.root / "of" / "june")
    record = workspace.root / name / "store.json"
    content = record.read_bytes()
    record.unlink()
    with pytest.raises(DataError, match=rf"{name}/store\.json is lost"):
        forget(workspace, 30 * DAY)
    record.write_bytes(content)
    assert forget(workspace, 30 * DAY).samples == 2


STORES_AT_URL = (
    "features",
    "int8",
    "of/june",
    "features/june",
    *(
        f"{folder}/of/june"
        for folder in (
            "annexes",
            "drafters",
            "harvested",
            "images",
            "prompts",
            "reports",
            "responses",
            "traffic",
        )
    ),
)


def test_other_stores_at_the_url_of_the_workspace_lose_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "cache"))
    here = Workspace.of("demo-small", f"memory://{tmp_path.name}/runs")
    assert here.parts
    paths = [f"{here.parts.url}/{name}" for name in STORES_AT_URL]
    for path in paths:
        with make(path).writer("a") as writer:
            for number, when in enumerate((OLD, NEW)):
                writer.add(sample(number, time=int(when)))
    with here:
        assert forget(here, 30 * DAY).samples == 1
    for path in paths:
        assert Store.open(path).keys() == {"k0001"}


@pytest.mark.parametrize(
    "name", ["prompts.parquet", "responses/part-*", "harvested/*", "features/shards/*"]
)
def test_a_link_to_what_would_stay_is_no_success(
    workspace: Workspace, tmp_path: Path, name: str
) -> None:
    linked = next(workspace.root.glob(name))
    elsewhere = linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(elsewhere)
    with pytest.raises(DataError, match="symbolic link"):
        forget(workspace, 30 * DAY)
    linked.unlink()
    elsewhere.rename(linked)
    assert forget(workspace, 30 * DAY).prompts == 3
    assert not raw(workspace, "Zebedee")


def test_a_link_to_responses_in_a_folder_below_is_no_success(
    workspace: Workspace, tmp_path: Path
) -> None:
    shutil.copytree(workspace.responses, tmp_path / "june")
    (workspace.root / "of").mkdir()
    (workspace.root / "of" / "june").symlink_to(tmp_path / "june")
    with pytest.raises(DataError, match="symbolic link"):
        forget(workspace, 30 * DAY)


def test_links_of_the_users_that_lead_to_nothing_that_would_stay_are_allowed(
    workspace: Workspace, tmp_path: Path
) -> None:
    mine = workspace.root / "wandb"
    (mine / "run-1").mkdir(parents=True)
    shutil.copytree(workspace.responses, workspace.root / "of" / "june")
    (tmp_path / "notes").touch()
    targets = (
        "run-1",
        "run-0",
        "latest-2",
        "../of/june",
        "..",
        str(tmp_path / "notes"),
    )
    for number, target in enumerate(targets):
        (mine / f"latest-{number}").symlink_to(target)
    assert forget(workspace, 30 * DAY).responses == 6
    assert not raw(workspace, "Zebedee")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("june", "../../gone"),
        ("of/june", "../../gone"),
        ("of/june", "../../elsewhere"),
        ("of/june", ".parts"),
    ],
)
def test_a_link_to_a_folder_that_is_not_searched_is_no_success(
    workspace: Workspace, tmp_path: Path, name: str, target: str
) -> None:
    link = workspace.root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(workspace.root / target)
    for folder in (workspace.root / ".parts", tmp_path / "elsewhere"):
        folder.mkdir()
    with pytest.raises(DataError, match="symbolic link"):
        forget(workspace, 30 * DAY)


def test_a_folder_that_cannot_be_listed_is_no_success(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = workspace.root / "of" / "june"
    shutil.copytree(workspace.responses, closed)
    listing = os.scandir

    def refusing(folder: Any = ".") -> Any:
        if str(folder) == str(closed):
            raise PermissionError(13, "Permission denied", str(folder))
        return listing(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refusing)
        with pytest.raises(DataError, match=r"june cannot be searched: Permission"):
            forget(workspace, 30 * DAY)
    assert forget(workspace, 30 * DAY).responses == 6


def test_links_are_allowed_where_no_traffic_is(
    workspace: Workspace, tmp_path: Path
) -> None:
    for folder in ("drafters", "images"):
        (workspace.root / folder).mkdir()
        (workspace.root / folder / "elsewhere").symlink_to(tmp_path)
    assert forget(workspace, 30 * DAY).prompts == 3


def test_a_part_may_be_a_link_to_a_folder(workspace: Workspace, tmp_path: Path) -> None:
    for part in ("responses", "harvested", "features"):
        (workspace.root / part).rename(tmp_path / part)
        (workspace.root / part).symlink_to(tmp_path / part)
    made = forget(workspace, 30 * DAY)
    assert (made.samples, made.responses, made.media) == (2, 3, 2)
    assert not raw(workspace, "Zebedee")
    assert len([*(tmp_path / "harvested").iterdir()]) == 2


def test_images_stay_whose_folder_was_a_link_when_they_were_harvested(
    workspace: Workspace, tmp_path: Path
) -> None:
    folder = workspace.root / MEDIA
    folder.rename(tmp_path / "large")
    folder.symlink_to(tmp_path / "large")
    log = write(tmp_path / "dylan.jsonl", lines("Dylan", NEW, 30))
    assert harvest(workspace, [str(log)]).media == 2
    folder.unlink()
    (tmp_path / "large").rename(folder)
    assert forget(workspace, 30 * DAY).media == 2
    assert len([*folder.iterdir()]) == 4


def test_shards_that_a_killed_process_was_sending_go(
    held_out: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = Remote("memory://somewhere")
    sent = here.workspace()
    left = sent.with_name("vlmdistill-unsent-0")
    shutil.copytree(sent, left)  # without the lock
    forget(held_out, 30 * DAY)
    assert sent.is_dir()
    assert not left.exists()
    left.symlink_to(tmp_path / "elsewhere")  # which is not removed
    with pytest.raises(DataError, match="vlmdistill-unsent-0 cannot be removed"):
        forget(held_out, 30 * DAY)
    here.release(sent)


def test_at_a_url_nothing_stays_of_the_version_before_nor_of_what_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = f"memory://{tmp_path.name}/runs"

    def on(machine: str) -> Workspace:
        monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / machine))
        parts._opened.clear()
        return Workspace.of("demo-small", runs)

    def at_url() -> list[str]:
        files = fsspec.filesystem("memory")
        names = files.find(runs.removeprefix("memory:/"))
        copies = tmp_path / "objects"
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir()
        for number, name in enumerate(names):
            (copies / f"{number}").write_bytes(files.cat_file(name))
        return [names[int(number)] for number in marks.found(copies, [b"Zebedee"])]

    own = write(
        tmp_path / "own.jsonl", [{"messages": [{"role": "user", "content": "Mine?"}]}]
    )
    log = write(tmp_path / "log.jsonl", texts("Zebedee", OLD))
    with on("a") as a:
        harvest(a, [str(log)])
    late = Workspace.of("demo-small", tmp_path / "elsewhere")
    harvest(late, [str(log)], eval_share=0.999)
    with on("b") as b:
        import_prompts([str(own)], b.prompts)
    late.prompts.replace(a.root / "prompts.parquet")
    with on("a") as a:  # what it has is moved aside
        import_prompts([str(own)], a.prompts)
    assert at_url()
    assert any(".aside-" in name for name in marks.found(tmp_path / "a", [b"Zebedee"]))
    Remote(f"{a.parts.url if a.parts else ''}/responses").create(
        "files/killed", b"Zebedee"
    )
    with on("a") as a:
        assert a.parts
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        sending = a.parts.remote.workspace()  # as of a worker whose driver was killed
        with pytest.raises(DataError, match="running"):
            forget(a, 30 * DAY)
        a.parts.remote.release(sending)
        assert forget(a, 30 * DAY).prompts == 0
    assert not at_url()
    assert not marks.found(tmp_path / "a", [b"Zebedee"])
    with on("b") as b:
        assert forget(b, 30 * DAY).prompts == 0
        assert len(prompt_table.read(b.prompts)) == 1
    assert not marks.found(tmp_path / "b", [b"Zebedee"])


def test_at_a_url_a_capture_that_sleeps_during_a_deletion_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(machine: str) -> Workspace:
        monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / machine))
        return Workspace.of("demo-small", f"memory://{tmp_path.name}/runs")

    for word, when in (("Zebedee", OLD), ("Florence", NEW)):
        log = write(tmp_path / f"{word}.jsonl", texts(word, when))
        with on("a") as a:
            harvest(a, [str(log)])
    deletions = list[Forgotten]()
    begin = Writer.__enter__

    def asleep(writer: Writer) -> Writer:
        if not deletions:  # the lock of a process of this number counts as abandoned
            deletions.append(forget(on("a"), 30 * DAY))
            on("b")
        return begin(writer)

    b = on("b")
    job = CaptureJob.of(
        b,
        split="all",
        settings=CaptureSettings(drafters=["wren"]),
        workers=WorkerOptions(workers=0),
    )
    monkeypatch.setattr(Writer, "__enter__", asleep)
    with pytest.raises(DataError, match="3 prompts were deleted"):
        capture_features(job)
    assert [done.prompts for done in deletions] == [3]
    left = {prompt.key for prompt in prompt_table.read(on("a").prompts)}
    assert Store.open(b.features).keys() == left


def test_at_a_url_images_leave_that_other_machines_have_harvested_and_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(machine: str) -> Workspace:
        monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / machine))
        parts._opened.clear()
        return Workspace.of("demo-small", f"memory://{tmp_path.name}/runs")

    def images(workspace: Workspace) -> int:
        assert workspace.parts
        return len(workspace.parts.remote.list_files(MEDIA))

    own = write(
        tmp_path / "own.jsonl", [{"messages": [{"role": "user", "content": "Mine?"}]}]
    )
    for word, when, seed in (("Zebedee", OLD, 0), ("Florence", NEW, 10)):
        with on("a") as a:
            harvest(
                a, [str(write(tmp_path / f"{word}.jsonl", lines(word, when, seed)))]
            )
    assert images(a) == 4
    with on("b") as b:
        assert forget(b, 30 * DAY).media == 2
    for machine in "ab":
        with on(machine) as here:
            import_prompts([str(own)], here.prompts)
        assert images(here) == 2
    with on("a") as a:  # asked again
        assert (
            harvest(
                a, [str(write(tmp_path / "again.jsonl", lines("Zebedee", NEW, 0)))]
            ).media
            == 2
        )
    assert images(a) == 4


def test_the_command_says_what_it_deleted(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    failing: Callable[..., str],
) -> None:
    where = ["--model", "demo-small", "--runs", str(workspace.root.parent)]
    assert main(["forget", "--older-than", "1w", "--dry-run", *where]) == 0
    assert "prompts    3" in capsys.readouterr().out
    assert "30d" in failing("forget", "--older-than", "a while", *where)


def test_a_clock_that_is_far_ahead_deletes_nothing_unless_it_is_said_twice(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic, before = time.monotonic, time.monotonic()
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: NOW + 400 * DAY)
        # The machine started an hour ago.
        clock.setattr(time, "monotonic", lambda: 3600 + monotonic() - before)
        for dry_run in (True, False):
            with pytest.raises(DataError, match="400 days"):
                forget(workspace, 30 * DAY, dry_run=dry_run)
        # Another command has written under the same clock.
        (workspace.traffic / ".clock").unlink()
        written = NOW + 400 * DAY - 10
        os.utime(workspace.traffic / "audit.jsonl", (written, written))
        with pytest.raises(DataError, match=r"started on .* 400 days"):
            forget(workspace, 30 * DAY)
    assert len(prompt_table.read(workspace.prompts)) == 7
    long_ago = NOW - 90 * DAY
    for file in workspace.root.rglob("*"):
        os.utime(
            file, (long_ago, long_ago)
        )  # nothing was written since, and the clock is right
    with pytest.raises(DataError, match="again"):
        forget(workspace, DAY / 2)
    assert forget(workspace, DAY / 2).prompts == 6
