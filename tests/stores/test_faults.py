"""Whatever is killed, full or flipped: a sample is there once and whole, or not at all."""

import filecmp
import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.stores.campaign import NUMBERS
from tests.stores.faults import CALLS, WRITES, Calls, struck
from tests.stores.samples import add, forget, make, same, sample, write
from tests.stores.syscalls import CHANGES, REFUSED
from tests.stores.syscalls import NUMBERS as WRITTEN
from tests.thorough import count
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.tables import view_keys
from vlmdistill.stores.integrity import gc
from vlmdistill.stores.integrity.gc import Removed, collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import SHARDS
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

pytestmark = pytest.mark.slow

KILLS = count(30, 200)
FLIPS = count(100, 1000)
EVERY = count(5, 1)  # of the system calls at which a writer can be killed
LEFT = "0123456789abcdef"  # as writers name their folders
ROOT = Path(__file__).parents[2]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_killed_writers_leave_the_very_bytes_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    calm = make(tmp_path / "calm")
    for shard, numbers in NUMBERS.items():
        write(calm, shard, numbers)
    storm = tmp_path / "storm"
    command = [
        sys.executable,
        "-m",
        "tests.stores.campaign",
        str(storm),
        str(KILLS),
        "1",
    ]
    facts = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    )
    assert facts["killed"] >= KILLS
    for path in storm.iterdir():
        store = Store.open(path)
        assert not verify(path).damage
        collect(store, grace=0)
        assert tree(path) == tree(Path(calm.path))
        assert store.index["key"].to_list() == sorted(calm.keys())
        assert all(
            same(store.read(f"k{number:04}"), sample(number)) for number in range(24)
        )


@pytest.mark.skipif(
    platform.machine() not in CHANGES, reason="system calls have other numbers here"
)
def test_a_writer_killed_between_any_two_system_calls_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    calm = make(tmp_path / "calm")
    write(calm, "u", WRITTEN)
    add(calm, "a", WRITTEN[:1])
    collect(calm, grace=0)
    storm = tmp_path / "storm"
    command = [sys.executable, "-m", "tests.stores.syscalls", str(storm), str(EVERY)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, cwd=ROOT)
    if done.returncode == REFUSED:
        pytest.skip("processes may not trace their children here")
    assert json.loads(done.stdout)["killed"] > 100 // EVERY
    for path in storm.iterdir():
        assert tree(path) == tree(tmp_path / "calm"), path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with every kind of file and every encoding."""
    encoding = {"embed.span": "int8"}
    store = make(
        tmp_path_factory.mktemp("whole"), [range(3), range(3, 6)], encoding=encoding
    )
    filter_store(store, "some", expressions=["words > 2"])
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    add(store, "a", range(5), encoding={"layer1.text": "int8"})
    return Store.open(store.path)


def spoilt(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    if rng.random() < 0.3:
        return data[:at]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def test_every_flip_and_cut_is_found_and_never_read(whole: Store) -> None:
    root = Path(whole.path)
    truth = {key: whole.read(key) for key in sorted(whole.keys())}
    kept = view_keys(whole.backend, "some")
    kept_index = whole.index
    head = whole.head()
    files = sorted(
        path for path in root.rglob("*") if path.is_file() and path.stat().st_size
    )
    rng = random.Random(0)
    for turn in range(FLIPS):
        path = files[turn % len(files)]
        good = path.read_bytes()
        path.write_bytes(spoilt(good, rng))
        name = path.relative_to(root).as_posix()
        assert name in {finding.name for finding in verify(root, threads=1).damage}, (
            name
        )
        refused = 0
        try:
            store = Store.open(root)
            assert head.embed_VD.tobytes() == store.head().embed_VD.tobytes()
            assert view_keys(store.backend, "some").equals(kept)
            for key in truth:
                assert same(store.read(key), truth[key])
            index = store.index  # without the statistics of a damaged run: a view that needs them is refused
            assert index.equals(kept_index.select(index.columns))
            if "kept" not in index.columns:
                filter_store(store, "late", expressions=["kept > 0"])
        except StoreError as error:
            refused += "damaged" in str(error)
        # What describes the arrays to other readers is not read by this one, nor are copies of records.
        assert (
            refused
            or name.endswith(("zarr.json", "c/0/0"))
            or "ledger" in name.split("/")
        ), name
        path.write_bytes(good)
    assert not verify(root).findings


def test_missing_files_and_orphans_are_named(whole: Store, tmp_path: Path) -> None:
    root = Path(whole.path)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        aside = path.rename(tmp_path / "aside")
        found = {
            finding.name: finding.kind for finding in verify(root, threads=1).findings
        }
        at = name.find("ledger/")
        expected = {name: "missing"} if at < 0 else {f"{name[:at]}ledger": "note"}
        if name == "store.json":
            expected[next(root.glob("heads/*/*")).relative_to(root).as_posix()] = (
                "orphan"
            )
        assert found == expected
        aside.rename(path)
    stray = root / "shards" / "stray"
    stray.touch()
    assert [(finding.kind, finding.name) for finding in verify(root).findings] == [
        ("orphan", "shards/stray")
    ]
    stray.unlink()


def places_to_fail(tmp_path: Path) -> Iterator[int]:
    calls = Calls(WRITES, None)
    with struck(calls):
        write(make(tmp_path / "count"), "u", range(3))
    yield from range(1, calls.count + 1, count(3, 1))


def test_a_disk_that_fills_up_at_any_write_leaves_a_store_that_verifies(
    tmp_path: Path,
) -> None:
    failed = 0
    for at in places_to_fail(tmp_path):
        path = tmp_path / str(at)
        try:
            with struck(Calls(WRITES, at)):
                write(make(path), "u", range(3))
        except StoreError as error:
            failed += "No space left" in str(error)
        if (path / "store.json").exists():
            store = Store.open(path)
            assert not verify(path).damage
            assert store.keys() in (set(), {"k0000", "k0001", "k0002"})
        store = make(path)
        write(store, "u", range(3))
        assert all(
            same(store.read(f"k{number:04}"), sample(number)) for number in range(3)
        )
    assert failed > count(16, 50)


def test_a_disk_that_stays_full_leaves_a_store_that_verifies(tmp_path: Path) -> None:
    alone = ["unshare", "-Urm"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, "true"], check=False).returncode
    ):
        pytest.skip("processes may not mount a small disk here")
    command = [
        *alone,
        sys.executable,
        "-m",
        "tests.stores.fulldisk",
        str(tmp_path / "disk"),
    ]
    facts = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    )
    assert facts["full"] > 40


def test_gc_removes_what_the_dead_left_and_spares_the_living(tmp_path: Path) -> None:
    store = make(tmp_path, [range(3)])
    orphan = tmp_path / SHARDS / "dead-0123456789abcdef"
    orphan.mkdir()
    (orphan / "index.arrow").write_bytes(b"left")
    (tmp_path / "staging" / LEFT).mkdir()
    with store.writer("living") as writer:
        writer.add(sample(7))
        for path in (tmp_path / "staging").iterdir():
            os.utime(path, (0, 0))  # a clock that jumped years ahead: old is not dead
        assert [item.name for item in collect(store, grace=3600)] == [f"staging/{LEFT}"]
        assert [item.name for item in collect(store, grace=0)] == [
            f"{SHARDS}/{orphan.name}"
        ]
    assert same(store.read("k0007"), sample(7))
    assert not verify(tmp_path).findings


FOREIGN = [
    "cache/data.bin",
    "commits/log.txt",
    "heads/mine/weights.bin",
    "notes.txt",
    "shards/x/y",
    "staging/p.txt",
    "stats/table.csv",
    "views/index.html",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_gc_never_removes_what_no_writer_can_have_made(
    tmp_path: Path, name: str
) -> None:
    store = make(tmp_path, [range(3)])
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    os.utime(tmp_path / name, (0, 0))
    assert collect(store, grace=0) == []
    assert (tmp_path / name).read_text() == "mine"
    assert not verify(tmp_path).damage


def with_an_orphan(path: Path) -> Store:
    store = make(path, [range(2)])
    orphan = path / SHARDS / "dead-0123456789abcdef"
    orphan.mkdir()
    (orphan / "index.arrow").write_bytes(b"left")
    return store


def test_a_collector_that_dies_anywhere_harms_nothing(tmp_path: Path) -> None:
    counted = with_an_orphan(tmp_path / "count")
    with struck(Calls(CALLS, None)) as calls:
        collect(counted, grace=0)
    died = 0
    for at in range(1, calls.count + 1, count(6, 2)):
        store = with_an_orphan(tmp_path / str(at))
        try:
            with struck(Calls(CALLS, at)):
                collect(store, grace=0)
        except OSError:
            died += 1
        assert not verify(store.path).damage
        collect(store, grace=0)
        assert not verify(store.path).findings
        write(store, "u9", [7])
        assert all(
            same(store.read(f"k{number:04}"), sample(number)) for number in (0, 1, 7)
        )
    assert died > count(3, 10)


def test_a_dry_run_of_gc_names_what_it_would_remove_and_writes_nothing(
    tmp_path: Path,
) -> None:
    store = with_an_orphan(tmp_path)
    with struck(Calls(WRITES, None)) as writes:
        (found,) = collect(store, grace=0, dry_run=True)
    assert writes.count == 0
    assert found.name.startswith(f"{SHARDS}/dead-")


def test_gc_forgets_replaced_views_but_not_the_present_ones(tmp_path: Path) -> None:
    store = make(tmp_path, [range(6)])
    filter_store(store, "v", expressions=["words > 1"])
    filter_store(store, "v", expressions=["words > 3"])
    assert len(collect(store, grace=0)) == 1
    assert store.view("v")["words"].to_list() == [4, 5]
    assert not verify(tmp_path).findings


@pytest.mark.parametrize("url", ["{tmp}", "memory://{tmp}"])
def test_an_old_shard_that_a_writer_publishes_again_is_too_young_for_gc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A writer that died before its commit left the shard long ago; `gc` runs just before the next commit."""
    store = make(url.format(tmp=tmp_path), [range(3)])
    forget(store, "commits/u0.json")
    shard = f"{SHARDS}/{store.backend.list_names(SHARDS)[0]}"
    grow_old(store, days=2)
    assert [item.name for item in collect(store, dry_run=True)] == [shard]
    met = meet_before_commit(
        monkeypatch, store, lambda: collect(Store.open(store.path))
    )
    write(store, "u0", range(3))
    assert met == [[]]
    assert not verify(store.path).findings
    assert all(same(store.read(f"k{number:04}"), sample(number)) for number in range(3))


def test_files_that_vanish_before_the_commit_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(f"memory://{tmp_path}", [range(3)])
    shard = f"{SHARDS}/{store.commit('u0').folder}"
    forget(store, "commits/u0.json")
    meet_before_commit(monkeypatch, store, lambda: store.backend.remove(shard))
    write(store, "u0", range(3))
    assert not verify(store.path).findings
    assert all(same(store.read(f"k{number:04}"), sample(number)) for number in range(3))


def test_gc_keeps_what_was_committed_after_it_read_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(f"memory://{tmp_path}", [range(3)])
    whole, met = gc._unnamed, list[str]()

    def late(*given: Any) -> Iterator[str]:
        write(store, "u1", range(3, 6))
        met.extend(whole(*given))
        return iter(met)

    monkeypatch.setattr(gc, "_unnamed", late)
    assert collect(store, grace=0) == []
    assert any(name.startswith(f"{SHARDS}/u1-") for name in met)
    assert not verify(store.path).findings


def grow_old(store: Store, days: int) -> None:
    """Set the time of the last write of everything in a store back."""
    if isinstance(store.backend, Local):
        for path in store.backend.root.rglob("*"):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - days * 86400))
    else:
        for name, file in MemoryFileSystem.store.items():
            if name.startswith(store.path.removeprefix("memory://")):
                file.created = file.modified = file.created - timedelta(days=days)


def meet_before_commit(
    monkeypatch: pytest.MonkeyPatch, store: Store, act: Callable[[], Any]
) -> list[Any]:
    """Let something happen once, just before a record is created; what it returned."""
    kind, met = type(store.backend), list[Any]()
    create = kind.create

    def meet(backend: Any, name: str, data: bytes) -> bool:
        if name.startswith("commits/") and not met:
            met.append(act())
        return create(backend, name, data)

    monkeypatch.setattr(kind, "create", meet)
    return met


def test_gc_removes_nothing_when_a_record_cannot_be_read(tmp_path: Path) -> None:
    store = make(tmp_path, [range(3), range(3, 6)])
    (tmp_path / "commits" / "u0.json").write_bytes(b"{}")
    with pytest.raises(StoreError, match="damaged"):
        collect(Store.open(tmp_path), grace=0)
    assert len(list((tmp_path / SHARDS).iterdir())) == 2
    del store


@pytest.mark.parametrize("spoil", ["a flipped byte", "a cut", "a missing file"])
@pytest.mark.parametrize("url", ["{tmp}", "memory://{tmp}"])
def test_a_shard_that_lies_there_damaged_is_written_anew_before_it_counts(
    tmp_path: Path, spoil: str, url: str
) -> None:
    """The way to mend a shard, and what a writer meets whose forerunner died before its commit."""
    store = make(url.format(tmp=tmp_path), [range(3), range(3, 6)])
    with pytest.raises(StoreError, match="damaged"):
        spoilt_shard(store, "u0", spoil)
    store.backend.remove("commits/u0.json")
    write(store, "u0", range(3))
    assert not verify(store.path).findings
    assert all(same(store.read(f"k{number:04}"), sample(number)) for number in range(6))


def test_a_collector_leaves_alone_what_a_shard_is_mended_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, [range(3)])
    with pytest.raises(StoreError, match="damaged"):
        spoilt_shard(store, "u0", "a flipped byte")
    forget(store, "commits/u0.json")
    compare, removed = filecmp.cmp, list[Removed]()

    def meet(*files: Any, **options: Any) -> bool:
        removed.extend(collect(Store.open(tmp_path), grace=0))
        return compare(*files, **options)

    monkeypatch.setattr(filecmp, "cmp", meet)
    write(store, "u0", range(3))
    assert not any(one.name.startswith(("staging", "shards")) for one in removed)
    assert not verify(store.path).findings
    assert all(same(store.read(f"k{number:04}"), sample(number)) for number in range(3))


def spoilt_shard(store: Store, shard: str, spoil: str) -> None:
    name = f"{SHARDS}/{store.commit(shard).folder}/hidden.text/c/0/0"
    data = store.backend.read(name)
    if spoil == "a missing file":
        store.backend.remove(name)
    else:
        store.backend.replace(
            name, data[:9] if spoil == "a cut" else bytes([data[0] ^ 1]) + data[1:]
        )
    store.read("k0000")
