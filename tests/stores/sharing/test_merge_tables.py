"""What does not go together is refused before anything is copied; what stores say of samples is joined."""

import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.thorough import count
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.tables import read_table
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import ViewRecord
from vlmdistill.stores.schema import Feature, Sample
from vlmdistill.stores.sharing.merge import Copied, merge, send
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

pytestmark = pytest.mark.slow


class StoppedError(Exception):
    pass


def kept(store: Store, view: str) -> list[str]:
    return list(store.view(view)["key"])


def losses(store: Store, run: str) -> dict[str, float]:
    return dict(store.index.select("key", f"{run}.loss").drop_nulls().iter_rows())


# What goes together


@pytest.mark.parametrize("encodings", [("raw", "int8"), ("int8", "raw")])
def test_eight_bits_are_not_mixed_with_all(
    tmp_path: Path, encodings: tuple[str, str]
) -> None:
    for at, encoding in enumerate(encodings):
        make(
            tmp_path / str(at),
            [range(at * 4, at * 4 + 4)],
            encoding={"hidden.text": encoding},
        )
    with pytest.raises(
        StoreError, match=rf"hidden\.text.*{encodings[0]}.*/0.*{encodings[1]}"
    ):
        merge(tmp_path / "all", [tmp_path / "0", tmp_path / "1"])
    assert not (tmp_path / "all").exists()
    with pytest.raises(StoreError, match=r"hidden\.text"):
        send(tmp_path / "0", tmp_path / "1")
    assert len(Store.open(tmp_path / "1").keys()) == 4


def test_meta_columns_of_other_types_are_refused_by_name(tmp_path: Path) -> None:
    for name, value in (("one", 5), ("two", "x5")):
        write(make(tmp_path / name), f"u-{name}", [sample(value == 5, id=value)])
    with pytest.raises(StoreError, match=r"'id'.*Int64.*/one.*String.*/two"):
        merge(tmp_path / "all", [tmp_path / "one", tmp_path / "two"])
    assert not (tmp_path / "all").exists()
    with pytest.raises(StoreError, match=r"'id'.*Int64"):
        send(tmp_path / "two", tmp_path / "one")
    assert len(Store.open(tmp_path / "one").index) == 1


def test_a_column_of_two_types_within_a_store_says_which_shard_to_write_anew(
    tmp_path: Path,
) -> None:
    store = make(tmp_path / "one")
    for at, value in enumerate([None, 5, "x5"]):
        other = make(tmp_path / f"other{at}")
        write(other, f"u{at}", [sample(at, id=value)])
        shutil.copytree(other.path, store.path, dirs_exist_ok=True)
    with pytest.raises(StoreError, match=r"Int64.*u1.*String.*u2.*commits/u2\.json"):
        len(store.index)
    (tmp_path / "one" / "commits" / "u2.json").unlink()
    write(store, "u2", [sample(2, id=7)])
    assert Store.open(store.path).index["id"].to_list() == [None, 5, 7]


@pytest.mark.parametrize("value", [2**70, 2**63 + 1, "\ud800", {"text": "\ud800"}])
def test_meta_that_no_column_can_hold_is_refused_by_name(
    tmp_path: Path, value: Any
) -> None:
    store = make(tmp_path, [[1]])
    with pytest.raises(StoreError, match=r"'id'.*64"):
        write(store, "u1", [sample(2), sample(3, id=value)])
    assert list(Store.open(tmp_path).index["key"]) == ["k0001"]


def test_whole_numbers_that_lose_digits_beside_fractions_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(tmp_path)
    write(store, "u0", [sample(0, id=2**53, other=2**53 + 1), sample(1)])
    write(store, "u1", [sample(2, id=0.5, other=5)])
    with caplog.at_level(logging.WARNING, "vlmdistill.stores"):
        assert Store.open(tmp_path).index["other"].to_list() == [2**53 + 1, None, 5]
        assert caplog.messages == []
        write(store, "u2", [sample(3), sample(4, id=-(2**53) - 1)])
        assert Store.open(tmp_path).index["id"].to_list() == [
            2**53,
            None,
            0.5,
            None,
            -(2**53),
        ]
    (line,) = caplog.messages
    assert line.startswith(
        "the meta column 'id' has whole numbers beyond 2^53 in shard u2, and fractions"
    )


def test_whole_numbers_of_more_than_64_bits_in_all_are_kept(tmp_path: Path) -> None:
    store = make(tmp_path)
    for number in range(64):  # as many as are worth a cache
        value: Any = np.uint64(2**63 + 1) if number else -1
        write(store, f"u{number}", [sample(number, id=value)])
    assert store.index["id"].to_list() == [-1, *[2**63 + 1] * 63]


def test_an_empty_list_has_the_type_of_the_lists_of_others(tmp_path: Path) -> None:
    store = make(tmp_path / "one")
    write(store, "u0", [sample(0, tags=[])])
    write(store, "u1", [sample(1, tags=["chart"])])
    assert store.index["tags"].to_list() == [[], ["chart"]]


def test_a_store_of_some_features_says_what_it_can_take(tmp_path: Path) -> None:
    make(tmp_path / "here", [range(4)])
    part = tmp_path / "part"
    send(tmp_path / "here", part, features=[Feature.parse("hidden.text")])
    for wanted in (None, [Feature.parse("layer2.visual")]):
        with pytest.raises(StoreError, match=r"store push .* hidden\.text$"):
            send(tmp_path / "here", part, features=wanted)
    with pytest.raises(StoreError, match=r"store push --features hidden\.text$"):
        merge(part, [tmp_path / "here"])


def test_a_view_that_is_not_there_leaves_no_store_behind(tmp_path: Path) -> None:
    make(tmp_path / "here", [range(4)])
    with pytest.raises(StoreError, match="'nope'"):
        send(tmp_path / "here", tmp_path / "there", view="nope")
    assert not (tmp_path / "there").exists()


# The same content under two keys


def twins(path: Path) -> Store:
    """Three samples of one content, the first by key in the last shard, and one of its own."""
    store = make(path)
    for shard, key in (("u0", "k9"), ("u1", "k5"), ("u2", "k1")):
        write(store, shard, [dataclasses.replace(sample(1), key=key)])
    write(store, "u3", [2])
    return store


@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_a_copy_holds_does_not_depend_on_interruptions(
    tmp_path: Path, after: int
) -> None:
    twins(tmp_path / "here")

    def stop(done: int, total: int) -> None:
        if done == after:
            raise StoppedError

    def copied(act: Callable[..., Any], expected: set[str]) -> None:
        calm, cut = tmp_path / f"calm-{act.__name__}", tmp_path / f"cut-{act.__name__}"
        act(calm)
        try:
            act(cut, progress=stop)
        except StoppedError:
            act(cut)
        assert Store.open(calm).keys() == Store.open(cut).keys() == expected

    def sent(target: Path, **options: Any) -> None:
        send(tmp_path / "here", target, **options)

    def merged(target: Path, **options: Any) -> None:
        merge(target, [tmp_path / "here"], **options)

    copied(sent, {"k9", "k5", "k1", "k0002"})
    copied(merged, {"k1", "k0002"})


def test_samples_that_differ_in_features_left_behind_are_all_copied(
    tmp_path: Path,
) -> None:
    names = ("embed.text", "embed.visual")
    store = Store.create(tmp_path / "here", provenance(features=names), info(), head())
    one = next(
        one for number in range(50) if (one := sample(number, names)).visual_tokens
    )
    image = Feature.parse("embed.visual")
    other = dataclasses.replace(
        one, key="other", features={**one.features, image: one.features[image] ^ 1}
    )
    write(store, "u0", [one])
    text = [Feature.parse("embed.text")]
    send(store.path, tmp_path / "part", features=text)
    write(store, "u1", [other])
    assert send(store.path, tmp_path / "part", features=text).copied == 1
    assert Store.open(tmp_path / "part").keys() == {one.key, "other"}


# Views and statistics


def said(path: Path, numbers: Iterable[int], loss: float, least: int = 0) -> Store:
    """A store with a view and a run that speak of all its samples."""
    store = make(path)
    write(store, f"u-{path.name}", numbers)
    filter_store(store, "long", expressions=[f"words > {least}"])
    keys = list(store.index["key"])
    store.write_stats("run", {"key": keys, "loss": [loss] * len(keys)})
    return store


def test_a_copy_follows_what_its_source_says(tmp_path: Path) -> None:
    here = said(tmp_path / "here", [1, 2, 3], 1.0)
    assert send(here.path, tmp_path / "there").replaced == ()
    filter_store(here, "long", expressions=["words > 2"])
    here.write_stats("run", {"key": ["k0001", "k0003"], "loss": [0.5, 0.25]})
    assert send(here.path, tmp_path / "there").replaced == ("views/long", "stats/run")
    there = Store.open(tmp_path / "there")
    assert (kept(there, "long"), losses(there, "run")) == (
        ["k0003"],
        {"k0001": 0.5, "k0003": 0.25},
    )
    before = sorted((tmp_path / "there").rglob("*"))
    assert send(here.path, there.path) == Copied(0, 3, 0, ())
    assert sorted((tmp_path / "there").rglob("*")) == before


def test_a_copy_keeps_what_is_said_of_samples_that_its_source_does_not_have(
    tmp_path: Path,
) -> None:
    one, two = said(tmp_path / "one", [1, 2], 1.0), said(tmp_path / "two", [2, 3], 2.0)
    send(one.path, tmp_path / "both")
    facts = send(two.path, tmp_path / "both")
    both = Store.open(tmp_path / "both")
    assert (facts.replaced, facts.left) == (("stats/run",), ())
    assert kept(both, "long") == ["k0001", "k0002", "k0003"]
    assert losses(both, "run") == {"k0001": 1.0, "k0002": 2.0, "k0003": 2.0}
    assert send(two.path, both.path) == Copied(0, 2, 0, ())


def test_an_older_run_does_not_replace_a_later_one(tmp_path: Path) -> None:
    here = said(tmp_path / "here", [1, 2], 1.0)
    send(here.path, tmp_path / "there")
    there = Store.open(tmp_path / "there")
    there.write_stats("other", {"key": ["k0001"], "kept": [0.5]})
    there.write_stats("run", {"key": ["k0001"], "loss": [0.125]})
    assert send(here.path, there.path).left == ("stats/run",)
    assert losses(Store.open(there.path), "run") == {"k0001": 0.125, "k0002": 1.0}


def test_a_merge_joins_what_the_teams_say_and_keeps_what_is_there(
    tmp_path: Path,
) -> None:
    one, two = said(tmp_path / "one", [1, 2], 1.0), said(tmp_path / "two", [2, 3], 2.0)
    facts = merge(tmp_path / "both", [one.path, two.path])
    both = Store.open(tmp_path / "both")
    assert [(one.replaced, one.left) for one in facts] == [
        ((), ()),
        ((), ("stats/run",)),
    ]
    assert kept(both, "long") == ["k0001", "k0002", "k0003"]
    assert losses(both, "run") == {"k0001": 1.0, "k0002": 1.0, "k0003": 2.0}
    before = sorted((tmp_path / "both").rglob("*"))
    merge(both.path, [one.path, two.path])
    assert sorted((tmp_path / "both").rglob("*")) == before


def test_a_view_that_is_replaced_has_the_reasons_of_its_own_filters_alone(
    tmp_path: Path,
) -> None:
    here = said(tmp_path / "here", [1, 2, 3], 1.0, least=2)
    there = said(tmp_path / "there", [1, 2, 3], 1.0, least=1)
    filter_store(there, "long", expressions=["loss > 2"])
    assert send(here.path, there.path).replaced == ("views/long",)
    mine, theirs = (
        read_table(store.backend, ViewRecord, "long")[0] for store in (here, there)
    )
    assert theirs == mine
    assert theirs.dropped == {"words > 2": 2}


def test_views_whose_teams_dropped_some_for_reasons_are_joined(tmp_path: Path) -> None:
    one, two = (
        said(tmp_path / "one", [0], 1.0, least=2),
        said(tmp_path / "two", [0, 3], 1.0, least=2),
    )
    assert (kept(one, "long"), kept(two, "long")) == ([], ["k0003"])
    merge(tmp_path / "both", [one.path, two.path])
    assert kept(Store.open(tmp_path / "both"), "long") == ["k0003"]


def test_views_of_other_filters_are_not_mixed_and_are_named(tmp_path: Path) -> None:
    one, two = (
        said(tmp_path / "one", [1, 2], 1.0),
        said(tmp_path / "two", [3], 1.0, least=5),
    )
    assert merge(tmp_path / "both", [one.path, two.path])[1].left == ("views/long",)
    assert kept(Store.open(tmp_path / "both"), "long") == ["k0001", "k0002"]


def test_runs_of_two_teams_that_disagree_on_a_type_are_both_there(
    tmp_path: Path,
) -> None:
    one, two = make(tmp_path / "one", [[1]]), make(tmp_path / "two", [[1]])
    one.write_stats("first", {"key": ["k0001"], "loss": [0.5]})
    two.write_stats("second", {"key": ["k0001"], "loss": ["low"]})
    merge(one.path, [two.path])
    assert Store.open(one.path).index.select("first.loss", "second.loss").rows() == [
        (0.5, "low")
    ]


def test_what_is_said_of_a_sample_that_was_not_copied_does_not_travel(
    tmp_path: Path,
) -> None:
    one, two = make(tmp_path / "one", [[1, 2]]), make(tmp_path / "two", [[3]])
    changed = sample(2)
    changed.features[Feature.parse(FEATURES[1])][0, 0] ^= 1
    write(two, "u", [changed, dataclasses.replace(sample(1), key="renamed")])
    filter_store(two, "long", expressions=["words > 0"])
    two.write_stats(
        "run", {"key": ["k0002", "k0003", "renamed"], "loss": [1.0, 2.0, 3.0]}
    )
    facts = merge(one.path, [two.path])[0]
    assert (facts.copied, facts.duplicates, facts.conflicts) == (1, 1, ("k0002",))
    one = Store.open(one.path)
    assert (kept(one, "long"), losses(one, "run")) == (["k0003"], {"k0003": 2.0})


# Any teams

NOTES = {"none": None, "whole": 5, "real": 5.5, "text": "five"}


@st.composite
def teams(draw: st.DrawFn) -> dict[str, Any]:
    numbers = st.sets(st.integers(0, 8), min_size=1, max_size=4)
    return {
        "shards": draw(st.lists(numbers, min_size=1, max_size=2)),
        "renamed": draw(
            st.sets(st.integers(0, 8), max_size=2)
        ),  # numbers that have another key here
        "note": draw(st.sampled_from(["none", "whole", "real", "real", "text"])),
        "least": draw(st.sampled_from([2, 2, 3])),
    }


def build(path: Path, team: dict[str, Any]) -> dict[str, Sample]:
    """The store of a team, and its samples by key."""
    store = make(path)
    samples: dict[str, Sample] = {}
    for at, numbers in enumerate(team["shards"]):
        named = [sample(number, note=NOTES[team["note"]]) for number in sorted(numbers)]
        named = [
            dataclasses.replace(one, key=f"r{one.key}")
            if one.meta["words"] in team["renamed"]
            else one
            for one in named
        ]
        write(store, f"u{at}", named)
        samples |= {one.key: one for one in named}
    filter_store(store, "long", expressions=[f"words > {team['least']}"])
    store.write_stats(
        "run", {"key": sorted(samples), "loss": [float(path.name)] * len(samples)}
    )
    return samples


@settings(max_examples=count(12, 60), deadline=None)
@given(stores=st.lists(teams(), min_size=1, max_size=3), stop=st.integers(1, 6))
def test_any_merge_is_the_union_of_samples_and_of_what_is_said_of_them(
    stores: list[dict[str, Any]], stop: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        held = [build(root / str(at), team) for at, team in enumerate(stores)]
        sources = [root / str(at) for at in range(len(stores))]
        if (
            len({team["note"] == "text" for team in stores if team["note"] != "none"})
            > 1
        ):
            with pytest.raises(StoreError, match="'note'"):
                merge(root / "all", sources)
            assert not (root / "all").exists()
            return
        samples: dict[str, Sample] = {}
        long: set[str] = set()
        loss: dict[str, float] = {}
        for at, (team, mine) in enumerate(zip(stores, held, strict=True)):
            contents = {one.meta["words"] for one in samples.values()}
            for key, one in sorted(mine.items()):
                if key not in samples and one.meta["words"] not in contents:
                    contents.add(one.meta["words"])
                    samples[key] = one
                if key not in samples:
                    continue
                if (
                    team["least"] == stores[0]["least"]
                    and one.meta["words"] > team["least"]
                ):
                    long.add(key)
                loss.setdefault(key, float(at))
        calls = 0

        def interrupt(done: int, total: int, remark: str = "") -> None:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise StoppedError

        try:
            merge(root / "all", sources, progress=interrupt)
        except StoppedError:
            merge(root / "all", sources)
        merged = Store.open(root / "all")
        assert set(merged.index["key"]) == set(samples)
        for key, one in samples.items():
            meta = {
                name: value for name, value in one.meta.items() if value is not None
            }
            assert same(merged.read(key), dataclasses.replace(one, meta=meta))
        assert (set(kept(merged, "long")), losses(merged, "run")) == (long, loss)
        assert not verify(merged.path).damage
