"""Stores are merged, pushed and pulled without losing, doubling or mixing up a sample."""

import contextlib
import dataclasses
import errno
import fcntl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.stores.samples import (
    FEATURES,
    head,
    info,
    make,
    provenance,
    same,
    sample,
    write,
)
from vlmdistill.stores import summary
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.remote import Remote
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.schema import Array, Feature
from vlmdistill.stores.sharing import transfer
from vlmdistill.stores.sharing.merge import merge, send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

READ_RANGE = Local.read_range


def numbers(store: Store) -> list[int]:
    return [int(key[1:]) for key in store.index["key"]]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def breaking(
    store: Store, fetched: list[str], limit: int
) -> Callable[[Local, str, int, int], Array]:
    """Reads of parts of a store's arrays, added to `fetched`, over a line that dies at one of them."""

    def read(backend: Local, name: str, start: int, length: int) -> Array:
        if backend.url == store.path and "/c/0/0" in name:
            fetched.append(name)
            if len(fetched) == limit:
                raise ConnectionError("the line is dead")
        return READ_RANGE(backend, name, start, length)

    return read


def test_merging_two_teams_keeps_each_sample_once(tmp_path: Path) -> None:
    make(tmp_path / "one", [range(4), range(4, 8)])
    make(
        tmp_path / "two", [range(20, 24), range(6, 12)]
    )  # the same shard names, other samples
    facts = merge(tmp_path / "both", [tmp_path / "one", tmp_path / "two"])
    both = Store.open(tmp_path / "both")
    assert numbers(both) == [*range(12), *range(20, 24)]
    assert [(one.copied, one.present) for one in facts] == [(8, 0), (8, 2)]
    assert all(
        same(both.read(f"k{number:04}"), sample(number)) for number in numbers(both)
    )
    assert not verify(both.path).findings


@pytest.mark.parametrize(
    "field", ["config_hash", "processor_hash", "template_hash", "features"]
)
def test_a_merge_refuses_another_origin_by_field(tmp_path: Path, field: str) -> None:
    make(tmp_path / "one", [range(4)])
    other = provenance(**{field: FEATURES[:1] if field == "features" else "other"})
    Store.create(tmp_path / "two", other, info(), head())
    with pytest.raises(StoreError, match=field):
        merge(tmp_path / "both", [tmp_path / "one", tmp_path / "two"])
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("url", ["{tmp}/there", "memory://{name}"])
def test_push_and_pull_bring_everything_back(tmp_path: Path, url: str) -> None:
    there = url.format(tmp=tmp_path, name=tmp_path.name)
    encoding = {"embed.span": "int8"}
    store = make(tmp_path / "here", [range(5), range(5, 9)], encoding=encoding)
    filter_store(store, "long", expressions=["words > 3"])
    store.write_stats("run", {"key": ["k0004"], "kept": [0.5]})
    assert send(store.path, there).copied == 9
    assert not verify(there).findings
    assert send(there, tmp_path / "back").copied == 9
    back = Store.open(tmp_path / "back")
    assert back.index.equals(store.index)
    assert back.view("long").equals(store.view("long"))
    assert all(same(back.read(key), store.read(key)) for key in store.index["key"])
    write(store, "u9", [30])
    assert send(store.path, there).copied == 1


def test_a_view_and_some_features_are_all_that_is_copied(tmp_path: Path) -> None:
    encoding = {"hidden.text": "int8"}
    store = make(tmp_path / "here", [range(5), range(5, 9)], encoding=encoding)
    filter_store(store, "long", expressions=["words >= 3"])
    wanted = Feature.parse("hidden.text")
    send(store.path, tmp_path / "part", view="long", features=[wanted])
    part = Store.open(tmp_path / "part")
    assert numbers(part) == list(range(3, 9))
    assert part.provenance.features == ("hidden.text",)
    for key in part.index["key"]:
        assert same(part.read(key), store.read(key, [wanted]))
    assert not list((tmp_path / "part").rglob("layer2.visual"))
    assert not verify(part.path).findings
    send(store.path, tmp_path / "part", features=[wanted])
    assert numbers(part) == list(range(9))


def test_what_eight_bits_lost_is_told_of_the_very_samples_that_were_copied(
    tmp_path: Path,
) -> None:
    encoding = {"hidden.text": "int8", "layer2.visual": "int8"}
    store = make(tmp_path / "here", [range(9)], encoding=encoding)
    filter_store(store, "some", expressions=["words in (2, 3, 7)"])
    wanted = Feature.parse("hidden.text")
    send(store.path, tmp_path / "part", view="some", features=[wanted])
    direct = Store.create(
        tmp_path / "direct",
        provenance(features=("hidden.text",)),
        info(),
        head(),
        {"hidden.text": "int8"},
    )
    with direct.writer("u") as writer:
        for number in (2, 3, 7):
            whole = sample(number)
            writer.add(
                dataclasses.replace(whole, features={wanted: whole.features[wanted]})
            )
    part = summary.info(Store.open(tmp_path / "part"))["fields"]
    assert part == summary.info(direct)["fields"]
    assert part["hidden.text"]["relative_error"] > 0


def test_an_interrupted_pull_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "here", [range(9)])
    large = max(
        (tmp_path / "here" / "shards").rglob("0"), key=lambda path: path.stat().st_size
    )
    fetched: list[str] = []
    monkeypatch.setattr(transfer, "BLOCK", large.stat().st_size // 8)
    monkeypatch.setattr(Local, "read_range", breaking(store, fetched, 9))
    with pytest.raises(StoreError, match="the line is dead"):
        send(store.path, tmp_path / "there")
    assert Store.open(tmp_path / "there").keys() == set()
    fetched.clear()
    monkeypatch.setattr(Local, "read_range", breaking(store, fetched, -1))
    send(store.path, tmp_path / "again")
    whole = len(fetched)
    fetched.clear()
    send(store.path, tmp_path / "there")
    assert len(fetched) == whole - 8
    assert Store.open(tmp_path / "there").keys() == store.keys()
    assert not verify(tmp_path / "there").findings


def test_what_was_damaged_in_an_interrupted_pull_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "here", [range(9)])
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "BLOCK", 64)
        patch.setattr(Local, "read_range", breaking(store, [], 9))
        with pytest.raises(StoreError, match="the line is dead"):
            send(store.path, tmp_path / "there")
    for part in (tmp_path / "there").glob("staging/copy-*/*/c/0/0"):
        flip(part)
    send(store.path, tmp_path / "there")
    assert Store.open(tmp_path / "there").keys() == store.keys()
    assert not verify(tmp_path / "there").findings


def test_a_damaged_shard_that_lies_there_already_does_not_count_as_the_copy(
    tmp_path: Path,
) -> None:
    store = make(tmp_path / "here", [range(4)])
    send(store.path, tmp_path / "there")
    flip(next((tmp_path / "there").glob("shards/u0-*/hidden.text/c/0/0")))
    (tmp_path / "there" / "commits" / "u0.json").unlink()
    assert send(store.path, tmp_path / "there").copied == 4
    assert not verify(tmp_path / "there").findings
    assert all(
        same(Store.open(tmp_path / "there").read(key), store.read(key))
        for key in store.index["key"]
    )


def test_shards_of_the_longest_names_are_copied_by_view_and_beside_others(
    tmp_path: Path,
) -> None:
    name = "u" * 200
    store, other = make(tmp_path / "here"), make(tmp_path / "other")
    write(store, name, range(5))
    write(other, name, range(5, 8))
    filter_store(store, "long", expressions=["words > 3"])
    assert send(store.path, tmp_path / "part", view="long").copied == 1
    merge(tmp_path / "both", [store.path, other.path])
    assert numbers(Store.open(tmp_path / "both")) == list(range(8))


@pytest.mark.parametrize("url", ["{tmp}/there", "memory://{name}"])
def test_damage_does_not_travel(tmp_path: Path, url: str) -> None:
    there = url.format(tmp=tmp_path, name=tmp_path.name)
    store = make(tmp_path / "here", [range(4)])
    flip(next((tmp_path / "here").glob("shards/*/hidden.text/c/0/0")))
    with pytest.raises(StoreError, match=r"here/shards/.*hidden\.text/c/0/0"):
        send(store.path, there)
    assert Store.open(there).keys() == set()


def test_a_push_sends_files_from_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, copies = Remote.publish, list[Path]()

    def look(backend: Remote, folder: Path, name: str) -> None:
        if name.startswith("shards"):
            copies.extend(
                file
                for file in folder.rglob("*")
                if file.is_file() and not file.is_symlink()
            )
        publish(backend, folder, name)

    store = make(tmp_path / "here", [range(4), range(4, 8)])
    monkeypatch.setattr(Remote, "publish", look)
    assert send(store.path, f"memory://{tmp_path.name}").copied == 8
    assert not copies


def test_a_pulled_store_needs_nothing_of_the_target(tmp_path: Path) -> None:
    store = make(tmp_path / "here", [range(4)])
    send(store.path, tmp_path / "there")
    for path in sorted((tmp_path / "here").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    pulled = Store.open(tmp_path / "there")
    assert np.array_equal(pulled.head().embed_VD, head().embed_VD)
    assert pulled.info == info()


def test_two_pulls_at_once_commit_whole_shards_where_folders_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    pull_at_once(tmp_path, monkeypatch)


def test_two_pulls_at_once_commit_whole_shards_where_locks_hold_on_one_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    pull_at_once(tmp_path, monkeypatch)


def pull_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pulls, each of whose reads waits for one of the other."""
    source = make(path / "source", [range(9)])
    make(path / "target")
    monkeypatch.setattr(transfer, "BLOCK", 1 << 9)
    both = threading.Barrier(2)

    def read(backend: Local, name: str, start: int, length: int) -> Array:
        if backend.url == source.path and "/c/0/0" in name:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
        return READ_RANGE(backend, name, start, length)

    def pull(number: int) -> None:
        with contextlib.suppress(
            StoreError
        ):  # it may give way to the other, and say so
            send(source.path, path / "target")

    monkeypatch.setattr(Local, "read_range", read)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(pull, range(2)))
    assert not verify(path / "target").damage
    send(source.path, path / "target")
    assert Store.open(path / "target").index.equals(source.index)
