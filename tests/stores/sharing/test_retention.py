"""Deletion by age: what is too old leaves the disk, the rest stays readable, whoever is killed or at work."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stores.samples import MORE, make, more, same, sample, write
from vlmdistill.cli.main import main
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.schema import Feature, Sample, seconds
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.sharing.retention import expire
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

HIDDEN = Feature("hidden", "text")


def aged(number: int) -> Sample:
    """The sample of a number, asked at that time; those above 100 have none."""
    return sample(number, time=number) if number < 100 else sample(number)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Samples 0 to 5 and 3, 8, 9 (one twice), and two without a time; a view and statistics of all."""
    made = make(tmp_path / "store")
    for name, numbers in {"a": [0, 1, 2, 3, 4, 5], "b": [3, 8, 9, 100, 101]}.items():
        write(made, name, map(aged, numbers))
    filter_store(made, "few", expressions=["words > 1"])
    made.write_stats("run", {"key": sorted(made.keys()), "loss": [0.5] * len(made)})
    return made


def on_disk(folder: Path, content: bytes) -> list[str]:
    return [
        str(file)
        for file in folder.rglob("*")
        if file.is_file() and content in file.read_bytes()
    ]


def test_the_bytes_of_what_is_too_old_leave_the_disk_and_the_rest_stays(
    store: Store,
) -> None:
    folder = Path(store.path)
    secrets = [aged(number).features[HIDDEN].tobytes()[:64] for number in range(4)]
    assert all(on_disk(folder, secret) for secret in secrets)
    found = expire(store, 4)
    assert {*found.keys} == {f"k{number:04}" for number in range(4)}
    assert found.untimed == 2
    assert not any(on_disk(folder, secret) for secret in secrets)
    left = Store.open(folder)
    assert left.keys() == {f"k{number:04}" for number in (4, 5, 8, 9, 100, 101)}
    assert all(same(left.read(key), aged(int(key[1:]))) for key in left.keys())  # noqa: SIM118
    assert left.view("few")["key"].to_list() == sorted(left.keys())
    assert left.index["run.loss"].to_list() == [0.5] * 6
    assert not verify(folder).damage
    assert expire(left, 4).removed == {}


def test_a_dry_run_removes_nothing_and_an_annex_forgets_with_its_store(
    store: Store,
) -> None:
    annex = store.annex(MORE)
    write(
        annex,
        "x",
        (replace(more(number), meta=aged(number).meta) for number in (0, 5, 9)),
    )
    before = sorted(Path(store.path).rglob("*"))
    assert {*expire(store, 1, dry_run=True).keys} == {"k0000"}
    assert sorted(Path(store.path).rglob("*")) == before
    state = more(0).features[Feature("layer1", "text")].tobytes()[:64]
    assert on_disk(Path(store.path), state)
    expire(store, 1)
    assert not on_disk(Path(store.path), state)
    assert same(
        Store.open(store.path).read("k0005", MORE), replace(more(5), meta=aged(5).meta)
    )


def test_what_a_killed_process_left_of_an_annex_without_a_record_goes(
    store: Store,
) -> None:
    folder = Path(store.path) / "annexes" / f"{1:016}" / "staging" / f"{2:016}"
    folder.mkdir(parents=True)
    (folder / "record").write_text("Zebedee")
    assert expire(store, 0).removed == {f"annexes/{1:016}/staging/{2:016}": 7}
    assert not on_disk(Path(store.path), b"Zebedee")


def test_of_a_sample_that_two_shards_have_no_copy_stays(store: Store) -> None:
    folder = Path(store.path)
    write(store, "later", [sample(1, time=50), sample(50, time=50)])
    annex = store.annex(MORE)
    write(
        annex, "x", (replace(more(number), meta=aged(number).meta) for number in (1, 5))
    )
    expire(store, 4)
    left = Store.open(folder)
    assert not on_disk(folder, aged(1).features[HIDDEN].tobytes()[:64])
    assert left.keys() == {f"k{number:04}" for number in (4, 5, 8, 9, 50, 100, 101)}
    assert left.annexes[0].keys() == {"k0005"}
    assert not verify(folder).damage


def test_killed_after_the_rest_was_written_it_is_done_by_the_next_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = type(store.backend)
    removing = backend.remove

    def killed(self: object, name: str) -> None:
        if name.startswith("commits/"):
            raise KeyboardInterrupt
        removing(self, name)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(backend, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            expire(store, 4)
    again = Store.open(store.path)
    assert again.keys() == {
        f"k{number:04}" for number in (0, 1, 2, 3, 4, 5, 8, 9, 100, 101)
    }
    expire(again, 4)
    assert Store.open(store.path).keys() == {
        f"k{number:04}" for number in (4, 5, 8, 9, 100, 101)
    }
    assert not verify(store.path).damage


def test_a_copy_that_began_before_ends_with_an_error_and_then_brings_what_is_left(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, at_work = type(store.backend).read_range, list[bool]()

    def expiring(self: object, name: str, *more: int) -> object:
        if "/tokens/" in name and not at_work:
            at_work.append(True)
            expire(Store.open(store.path), 4)
        return reading(self, name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.backend), "read_range", expiring)
    with pytest.raises(StoreError):
        send(store.path, tmp_path / "copy")
    send(store.path, tmp_path / "copy")
    assert Store.open(tmp_path / "copy").keys() >= {
        f"k{number:04}" for number in (4, 5, 8, 9, 100, 101)
    }
    assert not verify(store.path).damage


def test_the_command_deletes_by_age_and_refuses_what_is_no_age(
    store: Store, capsys: pytest.CaptureFixture[str], failing: Callable[..., str]
) -> None:
    assert main(["store", "gc", store.path, "--older-than", "30d"]) == 0
    assert "8" in capsys.readouterr().out  # all that have a time are of 1970
    assert Store.open(store.path).keys() == {"k0100", "k0101"}
    assert "30d" in failing("store", "gc", store.path, "--older-than", "soon")
    assert [seconds(text, "--age") for text in ("90s", "2h", "1.5d", "1w")] == [
        90,
        7200,
        129600,
        604800,
    ]
    for text in ("-1d", "100001d", "9" * 400 + "d"):
        with pytest.raises(DataError, match="--age"):
            seconds(text, "--age")


def test_a_sample_of_the_future_is_told_after_the_others_are_deleted(
    tmp_path: Path, failing: Callable[..., str]
) -> None:
    made = make(tmp_path / "store")
    for number, days in enumerate((-9, -1, 0.5)):
        when = int(time.time() + days * 86400)
        write(made, f"{number}", [sample(number, time=when)])
    command = ("store", "gc", made.path, "--older-than", "5d")
    assert main([*command]) == 0
    write(made, "late", [sample(3, time=int(time.time() + 9 * 86400))])
    write(made, "old", [sample(4, time=int(time.time() - 9 * 86400))])
    assert "1 samples stay that were asked in the future" in failing(*command)
    assert Store.open(made.path).keys() == {"k0001", "k0002", "k0003"}


def test_a_clock_that_is_far_ahead_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Callable[..., str]
) -> None:
    now = time.time()
    made = make(tmp_path / "of today")
    write(made, "a", [sample(0, time=int(now) - 86400)])
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: now + 400 * 86400)
        assert "400 days" in failing("store", "gc", made.path, "--older-than", "30d")
    assert main(["store", "gc", made.path, "--older-than", "30d"]) == 0
    assert Store.open(made.path).keys() == {"k0000"}
    for file in Path(made.path).rglob("*"):
        os.utime(
            file, (now - 90 * 86400, now - 90 * 86400)
        )  # a store of long ago, by a right clock
    failing("store", "gc", made.path, "--older-than", "1h")
    os.utime(Path(made.path, "store.json"))
    assert main(["store", "gc", made.path, "--older-than", "1h"]) == 0
    assert not Store.open(made.path).keys()


@pytest.mark.parametrize("url", ["{tmp}/there", "memory://{name}"])
def test_garbage_is_as_old_as_the_clock_says_that_stamps_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(url.format(tmp=tmp_path, name=tmp_path.name))
    write(store, "a", [sample(0)])
    left = "shards/b-0123456789abcdef/index.arrow"  # of a writer at work, maybe on another machine
    store.backend.replace(left, b"x")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 400 * 86400)
    assert collect(store) == []
    assert store.backend.size(left) == 1
    assert [one.name for one in collect(store, grace=0)] == [
        "shards/b-0123456789abcdef"
    ]
