"""A store takes more features later: it is then read, checked and shared like one captured at once."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.stores.samples import (
    FEATURES,
    MORE,
    add,
    bf16,
    head,
    info,
    make,
    more,
    provenance,
    same,
    sample,
    whole,
    write,
)
from vlmdistill.cli.store import app
from vlmdistill.stores.annexes import annex_folder
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.sharing.merge import merge, send
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info as summary
from vlmdistill.stores.views.filters import filter_store

ALL = tuple(sorted(FEATURES + MORE))
ANNEX = annex_folder(MORE)
INT8 = {"layer3.text": "int8"}


def completed(path: Path) -> Store:
    """Six samples in two shards, and an annex with them in other groups and in another order."""
    store = make(path, [range(3), range(3, 6)])
    add(store, "a0", (5, 0, 3), encoding=INT8)
    add(store, "a1", (1, 2, 4))
    return Store.open(path)


def at_once(path: Path) -> Store:
    """The same samples in a store that was made for all features."""
    store = Store.create(path, provenance(features=ALL), info(), head(), INT8)
    for shard, numbers in enumerate((range(3), range(3, 6))):
        write(store, f"u{shard}", map(whole, numbers))
    return store


def files(path: Path) -> dict[str, bytes]:
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def test_a_completed_store_reads_as_one_that_was_captured_at_once(
    tmp_path: Path,
) -> None:
    mine, theirs = completed(tmp_path / "mine"), at_once(tmp_path / "theirs")
    assert mine.features == theirs.features
    for number in range(6):
        assert same(mine[f"k{number:04}"], theirs[f"k{number:04}"])
    for features in (
        None,
        ["layer3.text"],
        ["hidden.text", "layer1.text"],
        ["hidden.text"],
        [],
    ):
        epochs = [
            Epoch(one, features, token_budget=60, seed=3) for one in (mine, theirs)
        ]
        for one, other in zip(*epochs, strict=True):
            assert one.keys == other.keys
            assert one.features.keys() == other.features.keys()
            assert all(
                np.array_equal(rows, other.features[name])
                for name, rows in one.features.items()
            )


def test_adding_features_changes_no_file_that_is_there(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [range(6)])
    before = files(tmp_path / "store")
    add(store, "a", range(6))
    after = files(tmp_path / "store")
    assert before.items() <= after.items()
    assert all(name.startswith(ANNEX) for name in after.keys() - before.keys())


def test_a_sample_that_an_annex_lacks_is_read_without_and_not_trained_on(
    tmp_path: Path,
) -> None:
    store = make(tmp_path / "store", [range(6)])
    add(store, "a", range(4))
    store = Store.open(tmp_path / "store")
    assert {*store["k0003"].features} == {*map(Feature.parse, ALL)}
    assert {*store["k0004"].features} == {*map(Feature.parse, FEATURES)}
    with pytest.raises(StoreError, match=r"k0004.*layer1\.text"):
        store.read("k0004", ["layer1.text"])
    with pytest.raises(
        StoreError,
        match=r"2 of 6 samples, such as k0004, lack layer1\.text, layer3\.text",
    ):
        Epoch(store, ["layer1.text"], token_budget=100)
    assert len(list(Epoch(store, ["hidden.text"], token_budget=1000))) == 1
    filter_store(store, "begun", expressions=["words < 4"])
    assert (
        len(list(Epoch(store, ["layer1.text"], view="begun", token_budget=1000))) == 1
    )


def test_features_of_other_tokens_are_never_read_as_those_of_a_sample(
    tmp_path: Path,
) -> None:
    store = make(tmp_path / "store", [range(2)])
    other = more(1)
    ids = other.ids_T.copy()
    ids[0] ^= 1
    write(store.annex(MORE), "a", [more(0), replace(other, ids_T=ids)])
    store = Store.open(tmp_path / "store")
    assert {*store["k0001"].features} == {*map(Feature.parse, FEATURES)}
    with pytest.raises(StoreError, match="1 of 2 samples, such as k0001"):
        Epoch(store, ["layer1.text"], token_budget=100)


def test_an_annex_has_features_that_its_store_has_not(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [range(2)])
    with pytest.raises(StoreError, match=r"has hidden\.text already"):
        store.annex(("hidden.text", "layer1.text"))
    add(store, "a", range(2), encoding=INT8)
    with pytest.raises(
        StoreError,
        match=r"has layer1\.text already, but not together with all of layer0",
    ):
        store.annex(("layer0.text", "layer1.text"))
    with pytest.raises(StoreError, match="was made with encoding"):
        store.annex(MORE, {})
    assert store.annex(MORE).keys() == store.keys()


def exchanged(root: Path, other: Store) -> str:
    add(other, "a", range(2))
    shutil.rmtree(root / ANNEX)
    shutil.copytree(Path(other.path) / ANNEX, root / ANNEX)
    return f"{ANNEX}/store.json"


def other_origin(root: Path) -> str:
    changed = provenance(template_hash="other")
    return exchanged(root, Store.create(root.parent / "other", changed, info(), head()))


def other_dtype(root: Path) -> str:
    changed = provenance(dtype="float16")
    other = Store.create(root.parent / "other", changed, info(), head())
    other.annex(MORE)
    shutil.rmtree(root / ANNEX)
    shutil.copytree(Path(other.path) / ANNEX, root / ANNEX)
    return f"{ANNEX}/store.json"


def other_target(root: Path) -> str:
    changed = info(rope_theta=1e6)
    return exchanged(
        root, Store.create(root.parent / "other", provenance(), changed, head())
    )


def other_head(root: Path) -> str:
    return exchanged(
        root,
        Store.create(root.parent / "other", provenance(), info(), head(tied=False)),
    )


def renamed(root: Path) -> str:
    (root / ANNEX).rename(root / "annexes/mine")
    return "annexes/mine/store.json"


def doubled(root: Path) -> str:
    shutil.copytree(root / ANNEX, root / "annexes/0123456789abcdef")
    return "annexes/0123456789abcdef/store.json"


def store_in_store(root: Path) -> str:
    folder = root / annex_folder(FEATURES)
    shutil.copytree(root, root.parent / "copy")
    shutil.copytree(root.parent / "copy", folder)
    return f"{folder.relative_to(root).as_posix()}/store.json"


def record_lost(root: Path) -> str:
    (root / ANNEX / "store.json").unlink()
    return f"{ANNEX}/store.json"


def linked(root: Path) -> str:
    (root / ANNEX).rename(root.parent / "elsewhere")
    (root / ANNEX).symlink_to(root.parent / "elsewhere")
    return ANNEX


def all_linked(root: Path) -> str:
    (root / "annexes").rename(root.parent / "elsewhere")
    (root / "annexes").symlink_to(root.parent / "elsewhere")
    return "annexes"


def no_folder(root: Path) -> str:
    shutil.rmtree(root / "annexes")
    (root / "annexes").write_text("file")
    return "annexes"


@pytest.mark.parametrize(
    "spoil",
    [
        other_origin, other_dtype, other_target, other_head, renamed, doubled, store_in_store, record_lost,
        linked, all_linked, no_folder,
    ],
)  # fmt: skip
def test_an_annex_that_is_not_of_its_store_is_refused_and_found(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    root = tmp_path / "store"
    add(make(root, [range(2)]), "a", range(2))
    name = spoil(root)
    with pytest.raises(StoreError, match=name.removesuffix("/store.json")):
        Store.open(root).read("k0000")
    assert same(Store.open(root).read("k0000", FEATURES), sample(0))
    with pytest.raises(StoreError):
        send(root, tmp_path / "there")
    assert [one.name for one in verify(root).damage] == [name]
    said = CliRunner().invoke(app, ["verify", str(root)])
    assert said.exit_code == 1
    assert f"Remove {name.removesuffix('store.json')}" in str(said.exception)


def test_nothing_is_collected_or_written_through_a_link(tmp_path: Path) -> None:
    victim, store = (
        make(tmp_path / "victim", [range(2)]),
        make(tmp_path / "store", [range(2)]),
    )
    add(victim, "a", range(2))
    left = tmp_path / "victim" / ANNEX / "shards" / "left-0123456789abcdef"
    left.mkdir()
    (tmp_path / "store" / "annexes").symlink_to(tmp_path / "victim" / "annexes")
    before = files(tmp_path / "victim")
    for act in (
        lambda: collect(Store.open(store.path), grace=0),
        lambda: add(store, "b", range(2)),
    ):
        with pytest.raises(StoreError, match="symbolic link"):
            act()
    assert left.is_dir()
    assert files(tmp_path / "victim") == before


def test_what_is_damaged_in_an_annex_is_named_and_the_rest_is_read(
    tmp_path: Path,
) -> None:
    store = completed(tmp_path / "store")
    victim = next((tmp_path / "store" / ANNEX).glob("shards/a0-*/layer1.text*/c/*/*"))
    data = victim.read_bytes()
    victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    name = victim.relative_to(tmp_path / "store").as_posix()
    assert [one.name for one in verify(store.path).damage] == [name]
    store = Store.open(store.path)
    with pytest.raises(StoreError, match="damaged"):
        store.read("k0005")
    assert same(store.read("k0005", FEATURES), sample(5))
    assert {*store["k0001"].features} == {*map(Feature.parse, ALL)}


def test_what_dead_writers_left_in_an_annex_is_collected(tmp_path: Path) -> None:
    store = completed(tmp_path / "store")
    left = tmp_path / "store" / ANNEX / "shards" / "left-0123456789abcdef"
    left.mkdir()
    (left / "index.arrow").write_bytes(b"left")
    assert [one.kind for one in verify(store.path).findings] == ["orphan"]
    removed = collect(store, grace=0)
    assert {one.name.split("/shards/")[0] for one in removed} == {ANNEX}
    assert not verify(store.path).findings
    assert same(Store.open(store.path)["k0000"], at_once(tmp_path / "other")["k0000"])


def test_sizes_count_annexes_and_add_up(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [range(6)])
    add(store, "a", range(4), encoding=INT8)
    facts = summary(Store.open(store.path), {"one": [Feature.parse("layer1.text")]})
    assert facts["annexes"] == [{"features": [*MORE], "samples": 4}]
    assert facts["fields"]["layer3.text"]["encoding"] == "int8"
    assert 0 < facts["fields"]["layer3.text"]["relative_error"] < 0.01
    assert (
        facts["fields"]["layer1.text"]["rows"] < facts["fields"]["hidden.text"]["rows"]
    )
    assert facts["drafters"]["one"]["missing"] == []
    fields = sum(one["bytes"] for one in facts["fields"].values())
    assert (
        facts["bytes"]
        == fields + facts["index_bytes"] + facts["head_bytes"] + facts["records_bytes"]
    )
    assert facts["bytes"] == sum(map(len, files(Path(store.path)).values()))
    assert sum(one["bytes"] for one in facts["datasets"].values()) == pytest.approx(
        fields, abs=4
    )
    said = CliRunner().invoke(app, ["info", store.path])
    assert "2 of 6 samples lack layer1.text, layer3.text" in said.output


@pytest.mark.parametrize("view", [None, "some"])
def test_a_pushed_store_brings_its_annexes(tmp_path: Path, view: str | None) -> None:
    store = completed(tmp_path / "store")
    filter_store(store, "some", expressions=["words > 2"])
    kept = store.view(view)["key"].to_list()
    first = send(store.path, tmp_path / "there", view=view)
    assert (first.copied, first.annexes) == (len(kept), (len(kept),))
    there = Store.open(tmp_path / "there")
    assert sorted(there.keys()) == kept
    assert all(same(there[key], store[key]) for key in kept)
    again = send(store.path, tmp_path / "there", view=view)
    assert (again.copied, again.present, again.annexes) == (0, len(kept), (0,))
    assert not verify(there.path).findings


def test_what_was_added_after_a_push_is_pushed_by_the_next(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [range(6)])
    send(store.path, tmp_path / "there")
    add(store, "a", range(6))
    again = send(store.path, tmp_path / "there")
    assert (again.copied, again.present, again.annexes) == (0, 6, (6,))
    assert same(Store.open(tmp_path / "there")["k0002"], whole(2))


def test_a_copy_of_some_features_takes_those_of_annexes(tmp_path: Path) -> None:
    store = completed(tmp_path / "store")
    chosen = [Feature.parse(name) for name in ("hidden.text", "layer1.text")]
    send(store.path, tmp_path / "there", features=chosen)
    there = Store.open(tmp_path / "there")
    assert [*there.features] == chosen
    assert same(there["k0004"], store.read("k0004", chosen))
    with pytest.raises(StoreError, match="needs at least one of the features that"):
        send(store.path, tmp_path / "none", features=chosen[1:])
    assert not (tmp_path / "none").exists()


def test_a_merge_brings_annexes_of_the_samples_that_it_brings(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", [range(4)]), make(tmp_path / "two", [range(2, 6)])
    add(one, "a", range(4))
    add(two, "a", range(2, 5))
    brought = merge(tmp_path / "both", [one.path, two.path])
    assert [(done.copied, done.annexes) for done in brought] == [(4, (4,)), (2, (1,))]
    both = Store.open(tmp_path / "both")
    assert all(same(both[f"k{number:04}"], whole(number)) for number in range(5))
    assert {*both["k0005"].features} == {*map(Feature.parse, FEATURES)}
    assert not verify(both.path).findings


def test_a_merge_refuses_what_would_not_fit_before_it_copies(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", [range(2)]), make(tmp_path / "two", [range(2, 4)])
    add(one, "a", range(2))
    annex = two.annex(("layer1.text",))
    rows = bf16(np.zeros((len(more(2).ids_T), 8)))
    write(annex, "a", [replace(more(2), features={Feature.parse("layer1.text"): rows})])
    before = one.keys()
    with pytest.raises(StoreError, match="not together with all of layer1"):
        merge(one.path, [two.path])
    assert Store.open(one.path).keys() == before
    add(
        other := make(tmp_path / "other", [range(4, 6)]),
        "a",
        range(4, 6),
        encoding=INT8,
    )
    with pytest.raises(StoreError, match="was made with encoding"):
        merge(one.path, [other.path])
    assert Store.open(one.path).keys() == before


def test_an_annex_at_a_url_is_read_with_and_without_a_cache(tmp_path: Path) -> None:
    store = completed(tmp_path / "store")
    send(store.path, url := f"memory://{tmp_path.name}/annexes")
    assert all(same(Store.open(url)[key], store[key]) for key in store)
    cached = Store.open(url, cache=f"{tmp_path}/cache:1GB")
    assert all(same(cached[key], store[key]) for key in store)
    kept = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*"))
    fields = summary(store)["fields"]
    assert kept > fields["layer1.text"]["bytes"] + fields["hidden.text"]["bytes"]


def test_two_that_make_an_annex_at_once_make_one(tmp_path: Path) -> None:
    make(tmp_path / "store", [range(6)])
    failed = list[StoreError]()

    def capture(numbers: range) -> None:
        try:
            add(Store.open(tmp_path / "store"), f"a{numbers.start}", numbers)
        except StoreError as error:
            failed.append(error)

    threads = [
        threading.Thread(target=capture, args=[range(at, at + 1)]) for at in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    store = Store.open(tmp_path / "store")
    assert len(store.annexes) == 1
    assert all(same(store[f"k{number:04}"], whole(number)) for number in range(6))
