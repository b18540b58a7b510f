"""Parts of a workspace: whoever sleeps, dies or loses a reply, no content is lost, doubled or mixed."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.s3 import s3_server
from tests.stores.sharing.machines import Line
from tests.thorough import count
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import DataError, LostError, StoreError
from vlmdistill.stores.sharing.mirror import Mirror, VersionedFolder

Machine = Callable[[str], Mirror]
STEP = count(3, 1)
MOMENTS = [(k, moment) for k in range(1, 24, STEP) for moment in ("before", "after")]


@pytest.fixture(params=["local", "memory"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[], Local | Remote]:
    name = secrets.token_hex(8)
    return lambda: (
        Local(tmp_path / "there")
        if request.param == "local"
        else Remote(f"memory://{name}/part")
    )


@pytest.fixture
def machine(where: Callable[[], Local | Remote], tmp_path: Path) -> Machine:
    """The copy of a machine with a disk of its own, as a new process opens it."""
    return lambda name: Mirror(where(), tmp_path / name, tmp_path / f"{name}.json")


def files(copy: Mirror) -> dict[str, str]:
    return {name: (copy.folder / name).read_text() for name in copy.local_files()}


def write(copy: Mirror, **texts: str) -> None:
    for name, text in texts.items():
        copy.folder.mkdir(exist_ok=True)
        (copy.folder / name).write_text(text)


def work(copy: Mirror, **texts: str) -> None:
    """What a command does: update, change, publish."""
    copy.update()
    write(copy, **texts)
    copy.publish()


def published(machine: Machine, name: str = "reader") -> dict[str, str]:
    reader = machine(name)
    reader.update()
    return files(reader)


def test_a_published_folder_arrives_and_follows_changes_and_removals(
    machine: Machine,
) -> None:
    one = machine("one")
    work(one, config="1", weights="1" * 100)
    assert published(machine) == {"config": "1", "weights": "1" * 100}
    (one.folder / "config").unlink()
    work_again = machine("one")
    work_again.update()
    assert files(work_again)["config"] == "1"  # a lost local file is fetched again
    (one.folder / "config").unlink()
    write(one, weights="2", more="")
    one.publish()
    assert published(machine) == {"weights": "2", "more": ""}


def test_publishing_what_is_there_makes_no_version_and_old_contents_go(
    machine: Machine,
) -> None:
    one = machine("one")
    for text in "abcdef":
        work(one, log=text, kept="x")
    before = one.remote.backend.list_files("")
    one.publish()
    assert one.remote.backend.list_files("") == before
    assert (
        len(one.remote.listed()) == 3
    )  # of the latest version, and one of that before it
    assert published(machine) == {"log": "f", "kept": "x"}


@pytest.mark.parametrize(("request_number", "moment"), MOMENTS)
def test_a_machine_that_sleeps_at_any_request_loses_doubles_and_mixes_nothing(
    machine: Machine, request_number: int, moment: str
) -> None:
    work(machine("first"), config="0", weights="0")
    sleeper = machine("a")
    line = Line(sleeper.remote.backend)
    lost = False
    try:
        with line.asleep(
            lambda: work(sleeper, config="a", weights="a"), request_number, moment
        ) as slept:
            work(machine("b"), config="b", weights="b")
            work(machine("b"), config="bb", weights="bb")
    except LostError:
        lost = True
    if not slept:
        assert line.count < request_number  # it has no such request
    final = published(machine)
    assert final in ({"config": text, "weights": text} for text in ("a", "bb"))
    # Lost is who came too late, and nobody else: the work is then kept on that machine.
    assert lost <= (final["config"] == "bb")
    assert not lost or files(sleeper) == {"config": "a", "weights": "a"}
    again = machine("a")
    again.update()
    assert files(again) == final
    if lost:
        aside = [
            path.read_text()
            for path in again.folder.parent.glob(".aside-*/**/*")
            if path.is_file()
        ]
        assert aside == ["a", "a"]


@pytest.mark.parametrize("request_number", range(1, 24, STEP))
def test_a_lost_reply_costs_nothing(machine: Machine, request_number: int) -> None:
    work(machine("first"), one="0")
    copy = machine("a")
    line = Line(copy.remote.backend)
    copy.update()
    write(copy, two="a")
    line.lose_reply(request_number)
    with suppress(ConnectionError):
        copy.publish()
    line.lose_reply(0)
    write(copy, three="a")
    copy.publish()
    assert published(machine) == {"one": "0", "two": "a", "three": "a"}
    fresh = machine("a")  # and so does a process that ends without a look at its reply
    write(fresh, two="b")
    line = Line(fresh.remote.backend)
    line.lose_reply(request_number)
    with suppress(ConnectionError):
        fresh.publish()
    work(machine("a"))
    assert published(machine, "another") == {"one": "0", "two": "b", "three": "a"}


@pytest.mark.parametrize(("request_number", "moment"), MOMENTS)
def test_files_that_stand_for_themselves_are_added_to_what_others_published(
    where: Callable[[], Local | Remote],
    tmp_path: Path,
    request_number: int,
    moment: str,
) -> None:
    def reports(name: str) -> Mirror:
        return Mirror(where(), tmp_path / name, tmp_path / f"{name}.json", apart=True)

    work(reports("first"), old="0", removed="0")
    sleeper = reports("a")
    line = Line(sleeper.remote.backend)
    with line.asleep(lambda: work(sleeper, sparrow="a"), request_number, moment):
        other = reports("b")
        other.update()
        (other.folder / "removed").unlink()
        write(other, hivis="b", old="1")
        other.publish()
    expected = {"old": "1", "sparrow": "a", "hivis": "b"}
    assert published(reports) == expected
    sleeper.update()
    assert files(sleeper) == expected


def test_what_both_machines_removed_is_no_conflict(
    where: Callable[[], Local | Remote], tmp_path: Path
) -> None:
    one, two = (
        Mirror(where(), tmp_path / name, tmp_path / f"{name}.json", apart=True)
        for name in "ab"
    )
    work(one, half="0")
    two.update()
    for machine, name in ((one, "sparrow"), (two, "hivis")):
        (machine.folder / "half").unlink()
        write(machine, **{name: "made"})
    one.publish()
    two.publish()
    one.update()
    assert files(one) == files(two) == {"sparrow": "made", "hivis": "made"}


def test_both_machines_changed_the_same_report(
    where: Callable[[], Local | Remote], tmp_path: Path
) -> None:
    one, two = (
        Mirror(where(), tmp_path / name, tmp_path / f"{name}.json", apart=True)
        for name in "ab"
    )
    work(one, sparrow="a")
    write(two, sparrow="b")
    with pytest.raises(LostError, match="changed by another machine"):
        two.publish()
    assert files(two) == {"sparrow": "b"}


def test_an_unsent_report_outlives_what_others_publish(
    where: Callable[[], Local | Remote], tmp_path: Path
) -> None:
    def reports(name: str) -> Mirror:
        return Mirror(where(), tmp_path / name, tmp_path / f"{name}.json", apart=True)

    work(reports("a"), old="0", removed="0")
    write(
        reports("a"), sparrow="a", old="of a"
    )  # and the command ended before it could publish
    other = reports("b")
    other.update()
    (other.folder / "removed").unlink()
    write(other, hivis="b")
    other.publish()
    again = reports("a")
    work(again)
    assert published(reports) == {"old": "of a", "sparrow": "a", "hivis": "b"}
    assert not list(tmp_path.glob(".aside-*"))


@pytest.mark.parametrize("deletes_first", [False, True])
def test_a_deletion_and_another_report_do_not_add_up(
    where: Callable[[], Local | Remote], tmp_path: Path, deletes_first: bool
) -> None:
    deleting, reporting = (
        Mirror(where(), tmp_path / name, tmp_path / f"{name}.json", apart=True)
        for name in ("one", "two")
    )
    work(deleting, kept="1")
    reporting.update()
    write(reporting, shown="a deleted prompt")
    first: Callable[[], None] = partial(deleting.publish, delete=True)
    second: Callable[[], None] = reporting.publish
    if not deletes_first:
        first, second = second, first
    first()
    with pytest.raises(LostError):
        second()


def test_what_came_after_a_deletion_leaves_no_content_at_the_url(
    machine: Machine,
) -> None:
    work(machine("a"), prompts="old and new")
    late = machine("late")
    late.update()
    write(late, prompts="old, new and more")
    deleting = machine("a")
    deleting.update()
    write(deleting, prompts="new")
    deleting.publish(delete=True)
    with pytest.raises(LostError):
        late.publish()
    latest = deleting.remote.latest()
    assert latest
    assert deleting.remote.listed() == [latest.files["prompts"].file]


def test_unsent_work_is_published_by_the_next_command(machine: Machine) -> None:
    one = machine("one")
    work(one, config="1")
    write(one, config="2", weights="2")
    again = machine("one")
    again.update()
    assert files(again) == {"config": "2", "weights": "2"}
    again.publish()
    assert published(machine) == {"config": "2", "weights": "2"}


def test_what_is_gone_or_damaged_at_the_url_is_an_error(machine: Machine) -> None:
    one = machine("one")
    work(one, config="1")
    there = one.remote.backend
    (content,) = (f"files/{name}" for name in one.remote.listed())
    (version,) = (f"versions/{name}" for name in there.list_names("versions"))
    data, sealed = there.read(content), there.read(version)
    for name, bad in (
        (content, b"2"),
        (version, sealed[:-9]),
        (version, sealed.replace(b"config", b"../fig")),
    ):
        there.replace(name, bad)
        with pytest.raises(StoreError, match="damaged"):
            published(machine, secrets.token_hex(4))
        there.replace(name, data if name == content else sealed)
    there.remove(content)
    with pytest.raises(StoreError, match="missing"):
        published(machine, "new")
    there.remove("versions")
    with pytest.raises(DataError, match="is empty"):
        one.update()
    assert files(one) == {"config": "1"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    import fsspec

    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        given = {"endpoint_url": url, "key": "a", "secret": "b"}
        patch.setitem(fsspec.config.conf, "s3", given)
        fsspec.filesystem("s3", **given).mkdir("parts")
        yield "s3://parts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_number", "moment"), [(k, m) for k, m in MOMENTS if 4 <= k <= 10]
)
def test_s3_keeps_the_promise(
    bucket: str, tmp_path: Path, request_number: int, moment: str
) -> None:
    url = f"{bucket}/{secrets.token_hex(4)}"

    def machine(name: str) -> Mirror:
        return Mirror(Remote(url), tmp_path / name, tmp_path / f"{name}.json")

    test_a_machine_that_sleeps_at_any_request_loses_doubles_and_mixes_nothing(
        machine, request_number, moment
    )


def test_a_name_that_leads_out_of_the_folder_is_no_version(machine: Machine) -> None:
    one = machine("one")
    work(one, config="1")
    latest = VersionedFolder(one.remote.backend).latest()
    assert latest
    for name in ("../a", "a/../../b", "/a", "a//b", "a\\b", "a\0b"):
        assert replace(latest, files={name: next(iter(latest.files.values()))}).wrong(
            "versions/000000000001.json"
        )
