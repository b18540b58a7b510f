"""A store keeps samples to the last bit, with their origin, and says what is wrong in one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.stores.faults import WRITES, Calls, struck
from tests.stores.samples import (
    FEATURES,
    WIDTH,
    bf16,
    forget,
    head,
    info,
    make,
    provenance,
    same,
    sample,
    write,
)
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index import merged
from vlmdistill.stores.index.arrow import frame_of
from vlmdistill.stores.index.tables import read_table, write_table
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.layout import widen
from vlmdistill.stores.manifest import CacheRecord, seal
from vlmdistill.stores.schema import Array, Feature, Sample, Span
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make(tmp_path / "store", [range(5), range(5, 12)])


def test_samples_come_back_to_the_last_bit(store: Store) -> None:
    reopened = Store.open(store.path)
    assert reopened.keys() == {f"k{number:04}" for number in range(12)}
    for number in range(12):
        assert same(reopened.read(f"k{number:04}"), sample(number))


def test_meta_comes_back_as_given_with_or_without_a_dataset(tmp_path: Path) -> None:
    store = make(tmp_path)
    given = [
        dataclasses.replace(sample(1), meta={}),
        dataclasses.replace(sample(2), meta={"ok": True, "x": 0.5}),
    ]
    write(store, "u", given)
    assert all(same(store.read(item.key), item) for item in given)


def test_eight_bits_keep_a_feature_within_one_percent_even_beside_massive_channels(
    tmp_path: Path,
) -> None:
    store = make(tmp_path, encoding={"hidden.text": "int8"})
    feature = Feature.parse("hidden.text")
    given = sample(1, tokens=300)
    rows = widen(given.features[feature], "bfloat16")
    rows[:, 3] *= 1000
    given = dataclasses.replace(given, features={**given.features, feature: bf16(rows)})
    write(store, "u", [given])
    back = widen(store.read(given.key).features[feature], "bfloat16")
    plain = np.arange(rows.shape[1]) != 3
    error = np.sqrt(
        np.square(back - rows)[:, plain].sum() / np.square(rows)[:, plain].sum()
    )
    assert error < 0.01
    squared, squares = store.commit("u").losses["hidden.text"]
    assert np.sqrt(squared / squares) < 0.01


def test_only_the_features_asked_for_are_read(store: Store) -> None:
    wanted = Feature.parse("hidden.text")
    visual = store.index.filter(store.index["visual_tokens"] > 0)["key"][0]
    for folder in Path(store.path, "shards").iterdir():
        (folder / "layer2.visual/c/0/0").unlink()
    assert set(store.read(visual, [wanted]).features) == {wanted}
    with pytest.raises(StoreError, match=rf"layer2\.visual.*{visual}"):
        store.read(visual)


def test_creating_again_opens_the_store_of_the_same_origin(store: Store) -> None:
    again = Store.create(
        store.path, provenance(target="elsewhere", sampling="t=1"), info(), head()
    )
    assert again.keys() == store.keys()


@pytest.mark.parametrize(
    "field", ["config_hash", "weights_hash", "processor_hash", "template_hash", "dtype"]
)
def test_another_origin_is_refused_by_the_name_of_the_field(
    store: Store, field: str
) -> None:
    other = {"dtype": "float16"}.get(field, "other")
    with pytest.raises(StoreError, match=field):
        Store.create(store.path, provenance(**{field: other}), info(), head())


def test_a_hash_of_an_earlier_version_is_compared_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    former = "0123456789abcdef"
    path = tmp_path / "store"
    Store.create(path, provenance(weights_hash=former), info(), head())
    Store.create(path, provenance(weights_hash=f"{former}01234567"), info(), head())
    for other in (former[:8], f"1{former}0123456"):
        with pytest.raises(StoreError, match="weights_hash"):
            Store.create(path, provenance(weights_hash=other), info(), head())


def test_another_target_or_encoding_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match=r"num_layers.*4.*5"):
        Store.create(store.path, provenance(), info(num_layers=5), head())
    with pytest.raises(StoreError, match="int8"):
        Store.create(store.path, provenance(), info(), head(), {"hidden.text": "int8"})


def test_a_store_in_an_encoding_of_an_earlier_version_is_refused_in_one_line(
    store: Store,
) -> None:
    record = msgspec.structs.replace(store.record, encoding={"hidden.text": "zstd"})
    store.backend.replace("store.json", seal(record))
    with pytest.raises(StoreError, match=r"hidden\.text.*'zstd'"):
        Store.open(store.path)
    assert [found.name for found in verify(store.path).damage] == ["store.json"]


def test_opening_what_is_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*vlmdistill features"):
        Store.open(tmp_path / "nowhere")
    (tmp_path / "store.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(StoreError, match=r"store\.json"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match=r"store\.json"):
        Store.open(tmp_path / "store.json")
    with pytest.raises(StoreError):
        Store.open("")


def test_a_failing_shard_leaves_nothing_that_counts(store: Store) -> None:
    def midway() -> None:
        with store.writer("u9") as writer:
            writer.add(sample(50))
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        midway()
    there = Store.open(store.path).keys()
    assert "k0050" not in there
    assert not any(Path(store.path, "staging").iterdir())


def test_a_shard_with_a_sample_that_was_not_written_to_its_end_never_counts(
    store: Store,
) -> None:
    def full_for_a_moment() -> None:
        with store.writer("u9") as writer:
            writer.add(sample(40))
            with (
                struck(Calls(WRITES, 3)),
                pytest.raises(StoreError, match="No space left"),
            ):
                writer.add(sample(41))
            with pytest.raises(StoreError, match=r"u9.*k0041"):
                writer.add(sample(42))

    with pytest.raises(StoreError, match=r"u9.*k0041"):
        full_for_a_moment()
    assert "k0040" not in Store.open(store.path).keys()  # noqa: SIM118
    write(store, "u9", [40, 41, 42])
    assert all(
        same(store.read(f"k{number:04}"), sample(number)) for number in (40, 41, 42)
    )
    assert not verify(store.path).findings


def test_a_sample_that_eight_bits_cannot_keep_is_refused_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    store = make(tmp_path, encoding={"layer2.visual": "int8"})
    bad = dataclasses.replace(SEEN, key="bad")
    rows = bad.features[Feature.parse("layer2.visual")].copy()
    rows[0, 0] = 0x7FC0  # NaN
    bad = dataclasses.replace(
        bad, features={**bad.features, Feature.parse("layer2.visual"): rows}
    )
    good = dataclasses.replace(SEEN, key="good")
    with store.writer("u") as writer:
        writer.add(SEEN)
        with pytest.raises(StoreError, match="NaN"):
            writer.add(bad)
        writer.add(good)
        writer.add(dataclasses.replace(SEEN, key="bad"))  # mended
    assert not verify(store.path).findings
    assert [store.read(key).key for key in ("bad", "good", SEEN.key)] == [
        "bad",
        "good",
        SEEN.key,
    ]


def test_a_meta_column_of_another_type_is_refused_before_it_counts(
    store: Store,
) -> None:
    def tagged(store: Store, shard: str, number: int, tag: object) -> None:
        write(store, shard, [sample(number, tag=tag)])

    tagged(store, "a", 20, 5)
    for again in (store, Store.open(store.path)):
        with pytest.raises(StoreError, match=r"'tag'.*string.*\bb\b.*int64.*\ba\b"):
            tagged(again, "b", 21, "five")
    for number, tag in (
        (22, 0.5),
        (23, None),
    ):  # numbers go together, and nothing with all
        tagged(store, f"c{number}", number, tag)
    assert store.index["tag"].drop_nulls().to_list() == [5, 0.5]


@pytest.mark.parametrize("url", ["file://{path}", "file://localhost{path}"])
def test_a_file_url_is_the_folder_that_it_names(tmp_path: Path, url: str) -> None:
    assert open_backend(url.format(path=f"{tmp_path}/a%20b")).url == str(
        tmp_path / "a b"
    )
    with pytest.raises(StoreError, match="'elsewhere'"):
        open_backend("file://elsewhere/a")


@pytest.mark.parametrize("text", ["~/a b", "file://~/a%20b"])
def test_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_backend(text).url == str(tmp_path / "a b")


def test_a_second_writer_of_a_shard_changes_nothing(store: Store) -> None:
    before = sorted(path for path in Path(store.path).rglob("*"))
    write(store, "u0", range(5))
    assert sorted(path for path in Path(store.path).rglob("*")) == before


def test_a_shard_that_is_held_back_counts_when_it_is_let(store: Store) -> None:
    with store.writer("held", hold=True) as writer:
        writer.add(sample(50))
    assert writer.held is not None
    assert "k0050" not in Store.open(store.path)
    other = Store.open(store.path)
    other.count(writer.held)
    assert same(other["k0050"], sample(50))
    other.count(writer.held)  # again, as after a kill
    assert not verify(store.path).findings


def test_a_shard_that_is_held_back_and_removed_never_counts(store: Store) -> None:
    with store.writer("held", hold=True) as writer:
        writer.add(sample(50))
    assert writer.held is not None
    collect(store, grace=0)
    with pytest.raises(StoreError, match="shard held were removed"):
        store.count(writer.held)
    assert "k0050" not in Store.open(store.path)


def test_two_writers_of_a_shard_at_once_leave_one(store: Store) -> None:
    with store.writer("u9") as one, store.writer("u9") as two:
        for number in (20, 21):
            one.add(sample(number))
            two.add(sample(number))
    assert store.index["shard"].to_list().count("u9") == 2
    assert (
        len(
            [
                path
                for path in Path(store.path, "shards").iterdir()
                if path.name.startswith("u9-")
            ]
        )
        == 1
    )


def test_a_shard_name_used_for_other_samples_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match=r"u0.*k00"):
        write(store, "u0", range(20, 25))


def test_a_key_in_two_shards_is_one_sample(store: Store) -> None:
    write(store, "a-first", [3, 4, 30])
    assert store.index["key"].is_unique().all()
    shards = dict(store.index.select("key", "shard").iter_rows())
    assert (shards["k0003"], shards["k0005"]) == ("a-first", "u1")


def test_the_index_has_a_line_per_sample_with_its_meta(store: Store) -> None:
    index = store.index
    assert index["key"].to_list() == [f"k{number:04}" for number in range(12)]
    assert index["words"].to_list() == list(range(12))
    given = sample(4)
    row = index.row(4, named=True)
    assert row["text_tokens"] == len(given.ids_T)
    assert row["visual_tokens"] == given.visual_tokens
    assert row["response_tokens"] == given.response_T.sum()


@pytest.mark.parametrize("tied", [True, False])
def test_the_frozen_head_travels_along(tmp_path: Path, tied: bool) -> None:
    given = head(tied)
    back = Store.create(tmp_path, provenance(), info(), given).head()
    assert back.tied == tied
    assert np.array_equal(back.embed_VD, given.embed_VD)
    assert np.array_equal(back.lm_head_VD, given.lm_head_VD)
    assert (back.dtype, back.generation) == (given.dtype, given.generation)


def test_a_sample_that_does_not_fit_is_refused_by_name(store: Store) -> None:
    good = sample(40)
    feature = Feature.parse("hidden.text")
    cut = dataclasses.replace(
        good, features={**good.features, feature: good.features[feature][1:]}
    )
    bare = dataclasses.replace(good, features={})
    odd = dataclasses.replace(good, meta={"text_row": 1})
    with store.writer("u9") as writer:
        for wrong, reason in (
            (cut, r"hidden\.text.*uint16"),
            (bare, r"hidden\.text"),
            (odd, "'text_row'"),
        ):
            with pytest.raises(StoreError, match=f"sample k0040.*{reason}"):
                writer.add(wrong)
        writer.add(good)
        with pytest.raises(StoreError, match="k0040"):
            writer.add(good)
    assert same(store.read("k0040"), good)


SEEN = sample(
    next(number for number in range(40, 99) if len(sample(number).spans) == 2)
)
MOVED = [
    ({"position_T": SEEN.position_T + 1}, "position 0 is empty"),
    ({"position_T": SEEN.position_T[::-1]}, "not in the order"),
    (
        {"position_T": np.arange(len(SEEN.ids_T), dtype=np.int32)},
        "position 1 is taken twice",
    ),
    ({"spans": SEEN.spans[::-1]}, "not in the order"),
    (
        {"spans": (Span(SEEN.spans[0].start, SEEN.visual_tokens), Span(400, 0))},
        "a span is empty",
    ),
    (
        {"spans": (SEEN.spans[0], Span(SEEN.spans[1].start + 1, SEEN.spans[1].length))},
        f"position {SEEN.spans[1].start}",
    ),
]


@pytest.mark.parametrize(("changes", "why"), MOVED)
def test_text_and_spans_must_fill_the_sequence(
    store: Store, changes: dict[str, Any], why: str
) -> None:
    """Refused by the writer, and found by `verify` where another writer let it in."""
    wrong = dataclasses.replace(SEEN, **changes)
    with (
        store.writer("u9") as writer,
        pytest.raises(StoreError, match=f"sample {wrong.key}: .*{why}"),
    ):
        writer.add(wrong)
    assert not verify(store.path).findings
    counts = {
        "text": len(wrong.ids_T),
        "visual": wrong.visual_tokens,
        "response": int(wrong.response_T.sum()),
    }
    line = {f"{name}_tokens": count for name, count in counts.items()}
    spans = [{"start": span.start, "length": span.length} for span in wrong.spans]
    with store.writer("u9") as writer:
        writer.copy(
            {"key": wrong.key, "dataset": "", "spans": spans, **line},
            store.layout.split(wrong, {}),
            {},
        )
    (found,) = verify(store.path).damage
    assert found.name.endswith("/index.arrow")
    assert f"sample {wrong.key}" in found.detail
    assert why in found.detail


def test_images_may_stand_side_by_side_and_at_either_end(store: Store) -> None:
    text = np.array([3, 4], np.int32)
    spans = (Span(0, 2), Span(2, 1), Span(5, 2))
    rows = {"text": 2, "visual": 5, "span": 3}
    features = {
        feature: np.zeros((rows[feature.where], WIDTH), np.uint16)
        for feature in SEEN.features
    }
    given = Sample("edges", text, text > 3, text, text, spans, features)
    write(store, "u9", [given])
    assert same(store.read("edges"), given)
    assert not verify(store.path).findings


def test_a_feature_never_captured_is_named(store: Store) -> None:
    with pytest.raises(StoreError, match=rf"layer9\.text.*{', '.join(FEATURES)}"):
        store.read("k0000", [Feature.parse("layer9.text")])
    with pytest.raises(StoreError, match="'nobody'"):
        store.read("nobody")


def test_a_cached_index_only_saves_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = store.index
    monkeypatch.setattr(merged, "WORTH", 2)
    assert Store.open(store.path).index.equals(truth)
    cached = next(Path(store.path, "cache").glob("*.arrow"))
    assert not verify(store.path).findings
    for path in Path(store.path).glob("shards/*/index.arrow"):
        path.rename(path.with_suffix(".aside"))
    quick = Store.open(store.path)
    assert quick.index.equals(truth)
    assert quick.keys() == set(truth["key"])
    for path in Path(store.path).glob("shards/*/index.aside"):
        path.rename(path.with_suffix(".arrow"))
    write(store, "u9", [30])
    assert Store.open(store.path).index["key"].to_list() == [*truth["key"], "k0030"]
    cached.write_bytes(cached.read_bytes()[:-9])
    assert Store.open(store.path).index["key"].to_list() == [*truth["key"], "k0030"]
    assert not verify(store.path).damage  # it was made anew
    collect(store, grace=0)
    assert not verify(store.path).findings


def test_a_cached_index_without_a_column_loses_no_more_than_that(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "WORTH", 2)
    assert len(Store.open(store.path).index) == 12
    record, table = read_table(store.backend, CacheRecord, "index")
    name = sorted(store.meta)[0]
    write_table(store.backend, record, frame_of(table).drop(name))
    read = Store.open(store.path).read("k0003")
    assert read.meta.items() == sample(3).meta.items() - {(name, sample(3).meta[name])}


def test_a_cached_index_does_not_speak_for_a_shard_that_was_made_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "WORTH", 2)
    assert len(store.index) == 12
    for collected, numbers in ((False, range(1, 8)), (True, range(2, 9))):
        forget(store, "commits/u0.json")
        if collected:
            collect(store, grace=0)
        write(Store.open(store.path), "u0", numbers)
        again = Store.open(store.path)
        assert again.keys() == {f"k{number:04}" for number in {*numbers, *range(5, 12)}}
        assert all(
            same(again.read(f"k{number:04}"), sample(number)) for number in numbers
        )


def test_what_is_committed_or_collected_while_verify_looks_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, read_range = Local.list_files, Local.read_range

    def late(backend: Local, folder: str) -> dict[str, int]:
        found = listed(backend, folder)
        if not folder:
            write(Store.open(store.path), "u9", [20])
        return found

    def gone(backend: Local, name: str, start: int, length: int) -> Array:
        record = Path(store.path, "commits", "u0.json")
        if name.startswith("shards/u0-") and record.exists():
            forget(store, "commits/u0.json")
            collect(Store.open(store.path), grace=0)
        return read_range(backend, name, start, length)

    monkeypatch.setattr(Local, "list_files", late)
    assert not verify(store.path).damage
    assert "k0020" in Store.open(store.path).keys()  # noqa: SIM118
    monkeypatch.setattr(Local, "list_files", listed)
    monkeypatch.setattr(Local, "read_range", gone)
    assert not verify(store.path, threads=1).damage
    assert Store.open(store.path).keys().isdisjoint({"k0000", "k0004"})


def test_asking_for_the_size_of_a_file_looks_at_no_other(store: Store) -> None:
    """A writer asks whether its shard is there: that must not take longer the more shards there are."""
    with struck(Calls(frozenset({"scandir", "listdir"}), None)) as calls:
        sizes = [
            store.backend.size(name)
            for name in ("store.json", "commits", "nothing", "store.json/x")
        ]
    assert sizes == [Path(store.path, "store.json").stat().st_size, None, None, None]
    assert calls.count == 0


@pytest.mark.parametrize("name", ["store.json", "commits/u1.json", "views/v.json"])
def test_a_record_of_a_newer_version_is_no_damage(store: Store, name: str) -> None:
    filter_store(store, "v", expressions=["words > 1"])
    content = json.loads(store.backend.read(name))
    del content["blake3"]
    store.backend.replace(name, seal({**content, "schema": 3}))
    with pytest.raises(StoreError, match=rf"{name}.*\b3\b.*\b2\b"):
        verify(store.path)


@pytest.mark.parametrize("url", ["{tmp}", "memory://{tmp}"])
def test_a_store_is_not_made_where_other_things_lie(tmp_path: Path, url: str) -> None:
    path = url.format(tmp=tmp_path / "full")
    backend = open_backend(path)
    backend.create("cache/data.bin", b"mine")
    what = r"full.*cache.*store\.json"
    with pytest.raises(StoreError, match=what):
        make(path)
    with pytest.raises(StoreError, match=what):
        send(make(tmp_path / "here", [range(3)]).path, path)
    assert set(backend.list_files("")) == {"cache/data.bin"}


def test_a_store_is_made_in_an_empty_folder_and_where_making_one_was_interrupted(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    assert make(tmp_path / "empty", [range(3)]).keys() == {"k0000", "k0001", "k0002"}
    for folder in ("heads", "staging"):
        (tmp_path / "begun" / folder).mkdir(parents=True)
    (tmp_path / "begun" / ".DS_Store").touch()  # nobody put it there
    assert make(tmp_path / "begun", [range(3)]).keys() == {"k0000", "k0001", "k0002"}
    with pytest.raises(StoreError, match=r"store\.json.*Not a directory"):
        make(tmp_path / "begun" / "store.json")


def test_a_store_that_another_process_makes_at_the_same_time_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Local.list_names

    def late(backend: Local, folder: str) -> list[str]:
        monkeypatch.setattr(Local, "list_names", listed)
        make(tmp_path, [range(3)])
        return listed(backend, folder)

    monkeypatch.setattr(Local, "list_names", late)
    assert make(tmp_path).keys() == {"k0000", "k0001", "k0002"}
