"""What is missing is missed: a lost, renamed, copied or swapped record is damage, and gc spares its data."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.stores.samples import forget, make, same, sample, write
from vlmdistill.cli.main import app
from vlmdistill.stores.errors import StoreError, VersionError
from vlmdistill.stores.index import merged
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import seal
from vlmdistill.stores.schema import SCHEMA_VERSION
from vlmdistill.stores.sharing.merge import merge, send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

ALL = {
    "commits/u0.json",
    "commits/u1.json",
    "views/v.json",
    "views/w.json",
    "stats/a.json",
    "stats/b.json",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of two shards, two views and two runs."""
    store = make(tmp_path / "store", [range(3), range(3, 6)])
    for view, least in (("v", 1), ("w", 4)):
        filter_store(store, view, expressions=[f"words > {least}"])
    for run in ("a", "b"):
        store.write_stats(run, {"key": ["k0001"], "kept": [0.5]})
    return tmp_path / "store"


def damage(root: Path) -> dict[str, str]:
    return {finding.name: finding.kind for finding in verify(root, threads=1).damage}


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_lost_record_is_named_and_comes_back_from_the_ledger(
    root: Path, name: str
) -> None:
    (root / name).unlink()
    assert [(found.kind, found.name) for found in verify(root).findings] == [
        ("missing", name)
    ]
    with pytest.raises(StoreError, match=rf"\b1\b.*{name}"):
        collect(Store.open(root), grace=0)
    shutil.copy(root / "ledger" / name, root / name)
    assert collect(Store.open(root), grace=0) == []
    assert not verify(root).findings
    assert all(
        same(Store.open(root).read(f"k{number:04}"), sample(number))
        for number in range(6)
    )


@pytest.mark.parametrize("folder", ["commits", "views", "stats"])
def test_a_removed_folder_of_records_is_missed(root: Path, folder: str) -> None:
    shutil.rmtree(root / folder)
    assert {name for name in ALL if name.startswith(folder)} <= damage(root).keys()
    with pytest.raises(StoreError, match=r"^2\b"):
        collect(Store.open(root), grace=0)
    assert len(list((root / "shards").iterdir())) == 2


def copied(one: Path, other: Path) -> None:
    shutil.copy(one, other)


def swapped(one: Path, other: Path) -> None:
    aside = one.rename(one.parent.parent / "aside")
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize(
    ("change", "one", "other", "bad"),
    [
        (
            Path.rename,
            "commits/u0.json",
            "commits/x.json",
            {"commits/u0.json", "commits/x.json"},
        ),
        (Path.rename, "views/v.json", "views/x.json", {"views/v.json", "views/x.json"}),
        (copied, "commits/u0.json", "commits/u1.json", {"commits/u1.json"}),
        (copied, "views/v.json", "views/w.json", {"views/w.json"}),
        (copied, "stats/a.json", "stats/b.json", {"stats/b.json"}),
        (
            swapped,
            "commits/u0.json",
            "commits/u1.json",
            {"commits/u0.json", "commits/u1.json"},
        ),
        (swapped, "views/v.json", "views/w.json", {"views/v.json", "views/w.json"}),
    ],
)
def test_a_record_in_the_place_of_another_is_named_and_nothing_is_removed(
    root: Path,
    change: Callable[[Path, Path], object],
    one: str,
    other: str,
    bad: set[str],
) -> None:
    change(root / one, root / other)
    assert damage(root).keys() == bad
    with pytest.raises(StoreError, match="damaged"):
        collect(Store.open(root), grace=0)


@pytest.mark.parametrize("change", [Path.rename, swapped])
def test_a_shard_under_another_name_is_named_and_stays(
    root: Path, change: Callable[[Path, Path], object]
) -> None:
    first, second = sorted((root / "shards").iterdir())
    change(
        first, second if change is swapped else first.with_name("x-0123456789abcdef")
    )
    assert any(name.startswith(f"shards/{first.name}") for name in damage(root))
    collect(Store.open(root), grace=0)
    assert len(list((root / "shards").iterdir())) == 2


def test_what_is_dropped_on_purpose_is_not_missed(root: Path) -> None:
    store = Store.open(root)
    forget(store, "commits/u0.json", "views/v.json", "views/w.json", "stats/a.json")
    assert not verify(root).damage
    assert len(collect(store, grace=0)) == 4
    assert not verify(root).findings


def test_a_store_without_a_ledger_is_read_and_gets_one_from_gc(root: Path) -> None:
    shutil.rmtree(root / "ledger")
    assert [(found.kind, found.name) for found in verify(root).findings] == [
        ("note", "ledger")
    ]
    assert collect(Store.open(root), grace=0, dry_run=True) == []
    assert not (root / "ledger").exists()
    collect(Store.open(root), grace=0)
    assert not verify(root).findings
    (root / "commits" / "u0.json").unlink()
    assert damage(root) == {"commits/u0.json": "missing"}


def test_a_damaged_copy_of_a_record_is_made_again(root: Path) -> None:
    (root / "ledger" / "views" / "v.json").write_bytes(b"{}")
    assert damage(root) == {"ledger/views/v.json": "damaged"}
    collect(Store.open(root), grace=0)
    assert not verify(root).findings


def test_a_replaced_view_replaces_its_copy(root: Path) -> None:
    filter_store(Store.open(root), "v", expressions=["words > 2"])
    (root / "views" / "v.json").unlink()
    shutil.copy(root / "ledger" / "views" / "v.json", root / "views" / "v.json")
    assert not verify(root).damage
    assert Store.open(root).view("v")["words"].to_list() == [3, 4, 5]


def test_the_name_of_a_lost_shard_is_not_given_to_other_samples(
    root: Path, tmp_path: Path
) -> None:
    (root / "commits" / "u0.json").unlink()
    store = Store.open(root)
    with pytest.raises(StoreError, match=r"k0002.*ledger"):
        write(store, "u0", [0, 1, 7])
    other = make(tmp_path / "other", [[8, 9]])
    assert merge(root, [other.path])[0].copied == 2
    shutil.copy(root / "ledger" / "commits" / "u0.json", root / "commits" / "u0.json")
    assert Store.open(root).keys() == {f"k{number:04}" for number in (*range(6), 8, 9)}
    assert not verify(root).damage


def test_a_lost_shard_that_is_written_again_is_whole_again(root: Path) -> None:
    (root / "commits" / "u0.json").unlink()
    write(Store.open(root), "u0", range(3))
    assert not verify(root).findings


def test_a_copy_of_a_store_has_a_ledger_of_its_own(root: Path, tmp_path: Path) -> None:
    send(root, tmp_path / "there")
    assert not verify(tmp_path / "there").findings
    shutil.rmtree(tmp_path / "there" / "views")
    assert damage(tmp_path / "there") == {
        "views/v.json": "missing",
        "views/w.json": "missing",
    } | {
        finding.name: "missing"
        for finding in verify(tmp_path / "there").damage
        if ".arrow" in finding.name
    }


def test_the_command_fails_on_a_lost_record_and_says_how_to_bring_it_back(
    root: Path,
) -> None:
    assert CliRunner().invoke(app, ["store", "verify", str(root)]).exit_code == 0
    (root / "commits" / "u0.json").unlink()
    facts = CliRunner().invoke(app, ["store", "verify", str(root)])
    assert facts.exit_code != 0
    assert "ledger/commits/u0.json" in str(facts.exception)


def test_gc_keeps_a_merged_index_until_a_shard_of_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "WORTH", 2)
    store = make(tmp_path / "store", [range(2), range(2, 4)])
    assert len(store) == 4
    cache = sorted(os.listdir(tmp_path / "store/cache"))
    write(store, "more", range(4, 6))
    assert collect(Store.open(store.path), grace=0) == []
    assert len(cache) == 2
    forget(store, "commits/u0.json")
    gone = {one.name for one in collect(Store.open(store.path), grace=0)}
    assert gone >= {f"cache/{name}" for name in cache}


@pytest.mark.parametrize(
    ("version", "cure"),
    [(SCHEMA_VERSION + 1, "update vlmdistill"), (1, "write it again")],
)
def test_a_copy_of_another_version_is_named_with_what_to_do(
    tmp_path: Path, version: int, cure: str
) -> None:
    store = make(tmp_path / "store", [range(2)])
    record = json.loads(store.backend.read("commits/u0.json"))
    del record["blake3"]
    store.backend.replace("ledger/commits/u0.json", seal({**record, "schema": version}))
    with pytest.raises(
        VersionError, match=rf"ledger/commits/u0\.json has schema {version}.*{cure}"
    ):
        verify(store.path)
