"""Views drop samples for a reason, are counted, and touch no tensor."""

import math
import random
import re
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores.samples import make, sample, write
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.tables import read_table
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.manifest import STATS, ViewRecord, record_names
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info
from vlmdistill.stores.views.filters import filter_store, named
from vlmdistill.stores.views.text_stats import (
    BAND,
    SKETCH,
    code_ratio,
    repetition,
    sketch,
    text_stats,
)

PROSE = (
    "A small brown dog runs along the wet beach while two children watch it from a red towel. "
    "Behind them the sea is grey, and a single white sail leans in the wind close to the horizon."
)
LOOP = "the cat sat on the mat " * 20
CODE = "for (int i = 0; i < n; i++) { total += values[i]; }\nreturn total / n;"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = make(tmp_path)
    texts = [
        PROSE,
        PROSE.replace("red", "blue"),
        LOOP,
        CODE,
        "Yes, it is.",
        "A dog and a cat play in a garden.",
    ]
    with store.writer("u") as writer:
        for number, text in enumerate(texts):
            writer.add(sample(number, **text_stats(text)))  # type: ignore[arg-type]
    return store


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("many"), [range(7), range(7, 30)])


CHINESE = "图中是一只红色的苹果。放在桌子上。窗外下着小雨。远处有两个人撑着伞慢慢走过。"


def test_words_are_counted_in_scripts_without_spaces_too(tmp_path: Path) -> None:
    store = make(tmp_path)
    texts = {
        "long": CHINESE,
        "short": "苹果。",
        "loop": "一只红色的苹果。" * 20,
        "spaced": PROSE,
    }
    with store.writer("u") as writer:
        for number, text in enumerate(texts.values()):
            writer.add(sample(number, **text_stats(text)))  # type: ignore[arg-type]
    view = filter_store(store, "good", filters=["min_words", "max_repetition"])
    assert dict(view.dropped) == {
        "fewer than 6 words": 1,
        "more than 0.3 repetition": 1,
    }
    assert text_stats(PROSE)["words"] == len(PROSE.split())


def test_the_filters_of_the_papers_drop_what_they_name(store: Store) -> None:
    view = filter_store(
        store, "good", filters=["min_words", "max_code", "max_repetition", "unique"]
    )
    assert dict(view.dropped) == {
        "fewer than 6 words": 1,
        "more than 0.05 code": 1,
        "more than 0.3 repetition": 1,
        "near-duplicate answer": 1,
    }
    assert store.view("good")["key"].to_list() == ["k0000", "k0005"]


def test_each_dropped_sample_is_kept_with_its_reason(store: Store) -> None:
    filter_store(store, "v", filters=["min_words"], expressions=["code_ratio < 0.05"])
    record, table = read_table(store.backend, ViewRecord, "v")
    frame = pl.DataFrame(table)
    assert dict(frame.filter(pl.col("reason").is_not_null()).iter_rows()) == {
        "k0003": "code_ratio < 0.05",
        "k0004": "fewer than 6 words",
    }
    assert (record.rows, record.kept) == (6, 4)


@settings(max_examples=40, deadline=None)
@given(
    least=st.integers(-1, 31), dataset=st.sampled_from("abc"), length=st.integers(0, 60)
)
def test_a_view_keeps_what_a_plain_loop_would(
    many: Store, least: int, dataset: str, length: int
) -> None:
    texts = [f"words >= {least}", f"dataset != '{dataset}' or text_tokens < {length}"]
    view = filter_store(many, "v", expressions=texts)
    expected = []
    for number in range(30):
        item = sample(number)
        if number >= least and (
            item.meta["dataset"] != dataset or len(item.ids_T) < length
        ):
            expected.append(item.key)
    assert many.view("v")["key"].to_list() == expected
    assert view.kept == len(expected)
    assert view.rows - view.kept == sum(view.dropped.values())


def test_a_sample_without_the_value_is_dropped_as_unknown(many: Store) -> None:
    many.write_stats("facts", {"key": ["k0001", "k0002"], "seen": [0.1, 0.5]})
    view = filter_store(many, "v", expressions=["seen > 0.2", "words > 1"])
    assert dict(view.dropped) == {
        "seen > 0.2": 1,
        "unknown: seen > 0.2": 28,
        "words > 1": 0,
    }
    reasons = dict(
        pl.DataFrame(read_table(many.backend, ViewRecord, "v")[1]).iter_rows()
    )
    assert (reasons["k0001"], reasons["k0002"]) == ("seen > 0.2", None)
    assert reasons["k0003"] == "unknown: seen > 0.2"


def test_no_column_of_the_samples_is_in_the_way_of_a_filter(tmp_path: Path) -> None:
    store = make(tmp_path)
    with store.writer("u") as writer:
        for number in range(4):
            writer.add(
                sample(
                    number,
                    at=number,
                    index=number,
                    keep=number,
                    lot=number,
                    reason="none",
                )
            )
    assert (
        filter_store(
            store, "v", expressions=["at > 0", "keep < 3"], filters=["mix=a:1,b:1"]
        ).kept
        == 2
    )
    assert store.view("v")["at"].to_list() == [1, 2]


def test_who_has_no_sketch_is_nobodys_duplicate(tmp_path: Path) -> None:
    store = make(tmp_path, [range(3)])
    write(
        store, "facts", (sample(number, sketch=sketch(PROSE)) for number in range(3, 6))
    )
    assert dict(filter_store(store, "v", filters=["unique"]).dropped) == {
        "near-duplicate answer": 2
    }
    assert store.view("v")["key"].to_list() == ["k0000", "k0001", "k0002", "k0003"]


def test_a_measure_that_is_no_number_is_named(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store, "u", [sample(1, words="many")])
    with pytest.raises(StoreError, match="'words'"):
        filter_store(store, "v", filters=["min_words"])


def test_views_stack(many: Store) -> None:
    filter_store(many, "late", expressions=["words >= 20"])
    filter_store(many, "late-a", base="late", expressions=["dataset = 'a'"])
    assert many.view("late-a")["words"].to_list() == [20, 22, 24, 26, 28]


def test_a_mix_keeps_the_shares_and_the_same_samples_each_time(many: Store) -> None:
    filter_store(many, "mix", filters=["mix=a:0.75,b:0.25"])
    first = many.view("mix")
    counts = dict(first["dataset"].value_counts().iter_rows())
    assert counts == {"a": 15, "b": 5}
    filter_store(many, "mix", filters=["mix=a:0.75,b:0.25"])
    assert many.view("mix").equals(first)


def test_statistics_of_training_make_a_curriculum(many: Store) -> None:
    many.write_stats(
        "sparrow",
        {
            "key": ["k0001", "k0002", "k0003"],
            "kept": [0.1, 0.5, 0.9],
            "loss": [3.0, 2.0, 1.0],
        },
    )
    filter_store(many, "almost", expressions=["kept > 0.2"])
    assert many.view("almost")["key"].to_list() == ["k0002", "k0003"]
    many.write_stats("later", {"key": ["k0002"], "kept": [0.0]})
    filter_store(many, "almost", expressions=["kept > 0.2"])
    assert many.view("almost")["key"].to_list() == ["k0003"]
    filter_store(many, "almost", expressions=['"sparrow.kept" > 0.2'])
    assert many.view("almost")["key"].to_list() == ["k0002", "k0003"]
    many.write_stats("sparrow", {"key": ["k0009"], "kept": [1.0]})
    assert many.index.filter(pl.col("sparrow.kept").is_not_null())["key"].to_list() == [
        "k0009"
    ]


def test_a_column_that_came_with_the_samples_keeps_its_name(store: Store) -> None:
    store.write_stats("run", {"key": ["k0001"], "words": [-1]})
    assert store.index["words"].min() == 3
    assert store.index["run.words"].drop_nulls().to_list() == [-1]
    assert (
        Store.open(store.path).read("k0001").meta["words"]
        == sample(1, **text_stats(PROSE)).meta["words"]  # type: ignore[arg-type]
    )


def test_an_empty_store_has_empty_views_and_epochs(tmp_path: Path) -> None:
    empty = make(tmp_path / "empty")
    assert filter_store(empty, "v", filters=["max_tokens"]).kept == 0
    assert empty.view("v").is_empty()
    assert list(Epoch(empty, view="v", token_budget=9)) == []
    assert info(empty)["samples"] == 0
    assert not verify(empty.path).findings


def test_statistics_that_cannot_be_joined_are_refused(many: Store) -> None:
    with pytest.raises(StoreError, match="'text_tokens'"):
        many.write_stats("r", {"key": ["k0001"], "text_tokens": [1]})
    with pytest.raises(StoreError, match="two rows"):
        many.write_stats("r", {"key": ["k0001", "k0001"], "kept": [1, 2]})
    with pytest.raises(StoreError, match="'key'"):
        many.write_stats("r", {"kept": [1]})
    with pytest.raises(StoreError, match="'tokens'"):
        many.write_stats("xxh3", {"key": ["k0001"], "tokens": [1]})
    with pytest.raises(StoreError, match=r"'b\.c'"):  # would be column c of a run a.b
        many.write_stats("a", {"key": ["k0001"], "b.c": [1]})
    assert "r" not in record_names(many.backend, STATS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("wrds > 5", "no column 'wrds'.*did you mean words.*Columns: key, dataset"),
        ("words >", "words >"),
        ("words > 5 garbage", "'garbage'"),
        ('words > 5 ""', "unexpected ''"),
        ("words + 1", r"words \+ 1"),
        ("max(words) > 1", r"max\(words\) > 1"),
        ("dataset > 3", "dataset > 3"),
    ],
)
def test_a_mistaken_expression_is_explained(
    many: Store, text: str, reason: str
) -> None:
    with pytest.raises(StoreError, match=reason):
        filter_store(many, "v", expressions=[text])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("sparrow.kept > 0.9", '"sparrow.kept"'),
        ("eagle2-s1.kept > 0.9 and words > 5", '"eagle2-s1.kept"'),
        ("sparrow.kpt > 0.9", '"sparrow.kept"'),
    ],
)
def test_a_name_with_a_dot_wants_quotes_and_is_told_so_in_a_short_line(
    tmp_path: Path, text: str, meant: str
) -> None:
    store = make(tmp_path, [range(3)])
    for run in ["sparrow", "eagle2-s1", *(f"other{number}" for number in range(30))]:
        store.write_stats(run, {"key": ["k0001"], "kept": [0.5]})
    with pytest.raises(StoreError, match=meant) as raised:
        filter_store(store, "v", expressions=[text])
    assert len(str(raised.value)) < 200
    assert filter_store(store, "v", expressions=[f"{meant} > 0.1"]).kept == 1


def test_a_mistaken_name_is_explained(many: Store) -> None:
    with pytest.raises(StoreError, match=r"shorter=3.*min_words"):
        named("shorter=3")
    with pytest.raises(StoreError, match="many"):
        named("max_tokens=many").keep(many.index)
    with pytest.raises(StoreError, match="'nan'"):
        filter_store(many, "v", filters=["max_tokens=nan"])
    for mistaken in ("a:inf", "a:0.5,a:0.5", "a:0", "a:-1", "a", "a:nan,b:1"):
        with pytest.raises(StoreError, match=f"'{mistaken}'"):
            filter_store(many, "v", filters=[f"mix={mistaken}"])
    with pytest.raises(StoreError, match="unique=3"):
        filter_store(many, "v", filters=["unique=3"])
    with pytest.raises(StoreError, match=r"v{201}.*200"):
        filter_store(many, "v" * 201)
    with pytest.raises(StoreError, match="'nope'"):
        many.view("nope")
    with pytest.raises(StoreError, match="'sketch'"):
        filter_store(many, "v", filters=["unique"])
    with pytest.raises(StoreError, match=r"zebra.*a, b"):
        filter_store(many, "v", filters=["mix=a:0.5,zebra:0.5"])


def test_a_view_made_from_another_takes_a_name_of_its_own(many: Store) -> None:
    filter_store(many, "own", expressions=["words > 5"])
    with pytest.raises(StoreError, match="'own'"):
        filter_store(many, "own", base="own", expressions=["words > 9"])
    assert len(many.view("own")) == 24


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Samples of 0 to 4 words, with losses of a run that diverged and a share of code that is no number."""
    store = make(tmp_path_factory.mktemp("diverged"))
    with store.writer("u") as writer:
        for number in range(5):
            writer.add(
                sample(
                    number,
                    code_ratio=math.nan if number == 2 else 0.0,
                    part=float(number),
                )
            )
    losses = [1.0, 2.0, math.nan, math.inf, -math.inf]
    store.write_stats(
        "run", {"key": [f"k{number:04}" for number in range(5)], "l": losses}
    )
    return store


@pytest.mark.parametrize(
    ("text", "kept", "unknown"),
    [
        ("l > 1.5", [1, 3], 1),
        ("l <= 1.5", [0, 4], 1),
        ("not l > 1.5", [0, 4], 1),
        ("l != 1", [1, 3, 4], 1),
        ("l not in (1, 2)", [3, 4], 1),
        ("l between 0 and 9", [0, 1], 1),
        ("l is null", [2], 0),
        ('"run.l" > 1.5', [1, 3], 1),
        ("l > 1.5 or words >= 2", [1, 2, 3, 4], 0),
        ("words / 0 > 1", [1, 2, 3, 4], 1),
        ("not words / 0 < 1", [1, 2, 3, 4], 1),
        ("part / words >= 0 and words < 3", [1, 2], 1),
        ("l - l < 1", [0, 1], 3),
        ("sqrt(part - 2) >= 0", [2, 3, 4], 2),
        ("part / words between 0 and 1", [1, 2, 3, 4], 1),
        ("words = 0 or part / words > 0", [0, 1, 2, 3, 4], 0),
        ("dataset = 'a' or words > 9", [0, 2, 4], 0),
    ],
)
def test_what_is_no_number_is_unknown_and_infinities_are_numbers(
    diverged: Store, text: str, kept: list[int], unknown: int
) -> None:
    view = filter_store(diverged, "v", expressions=[text])
    assert diverged.view("v")["words"].to_list() == kept
    assert view.dropped.get(f"unknown: {text}", 0) == unknown


def test_a_measure_that_is_no_number_is_unknown_to_a_named_filter(
    diverged: Store,
) -> None:
    dropped = filter_store(diverged, "v", filters=["max_code"]).dropped
    assert dict(dropped) == {
        "more than 0.05 code": 0,
        "unknown: more than 0.05 code": 1,
    }


@pytest.mark.parametrize("text", ["sum(words) >= 0", "1 = 1", "count(*) > 0"])
def test_what_is_said_of_all_samples_at_once_is_no_filter_of_one(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(StoreError, match=re.escape(text)):
        filter_store(make(tmp_path, [[1]]), "v", expressions=[text])


def test_one_sample_is_compared_with_all_there_are(tmp_path: Path) -> None:
    assert (
        filter_store(
            make(tmp_path, [[5]]), "v", expressions=["words >= sum(words)"]
        ).kept
        == 1
    )


def test_any_of_a_list_is_a_filter(many: Store) -> None:
    filter_store(many, "v", expressions=["words = any(array[1, 2])"])
    assert many.view("v")["words"].to_list() == [1, 2]


def test_what_a_parser_says_is_cut(many: Store) -> None:
    text = "words > 5 and " * 50
    with pytest.raises(StoreError, match="words > 5") as raised:
        filter_store(many, "v", expressions=[text])
    assert len(str(raised.value).replace(text, "")) < 300


@pytest.mark.parametrize(
    "name", ["../commits/u0", "../stats/r", "v/../v", "", "v" * 300]
)
def test_only_the_name_of_a_view_is_one(tmp_path: Path, name: str) -> None:
    store = make(tmp_path / "store", [range(3)])
    store.write_stats("r", {"key": ["k0001"], "kept": [0.5]})
    filter_store(store, "v", expressions=["words > 1"])
    why = f"{re.escape(store.path)}.*'{re.escape(name)}'.* v$"
    with pytest.raises(StoreError, match=why):
        store.view(name)
    with pytest.raises(StoreError, match=why):
        filter_store(store, "w", base=name)
    with pytest.raises(StoreError, match=why):
        send(store.path, tmp_path / "there", view=name)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "The chart (from 2019) shows that 20% came by train; the rest walked. Prices rose by $3.",
            True,
        ),
        (
            "**Overview**\n\nA *busy* market:\n\n* Fruit stands\n* Two children\n\n**Colors**: red.",
            True,
        ),
        ("Its area is 3 * 4 / 2 = 6, and the perimeter is 3 + 4 + 5 = 12.", True),
        (
            "If you look for a place to return to while it rains, try the new public library.",
            True,
        ),
        ("| Fruit | Count |\n|---|---|\n| Apples | 3 |", True),
        (
            "As shown in [1], results were better [2, 3]; see [the guide](https://example.org/a_b).",
            True,
        ),
        ("def area(r):\n    return 3.14 * r ** 2\n\nprint(area(2))", False),
        ("SELECT name, count(*) FROM users WHERE age > 30 GROUP BY name;", False),
        ('{"name": "cat", "age": 3, "tags": ["a", "b"]}', False),
        ('<div class="row"><p>Hello</p></div>', False),
        ("import os\nfor name in os.listdir(path):\n    total += 1", False),
        (
            "Use it like this:\n```\npass\n```\nThat is all there is to it, and it works everywhere.",
            False,
        ),
    ],
)
def test_the_share_of_code_drops_code_and_keeps_prose_with_its_markup(
    tmp_path: Path, text: str, kept: bool
) -> None:
    store = make(tmp_path)
    with store.writer("u") as writer:
        writer.add(sample(1, **text_stats(text)))  # type: ignore[arg-type]
    assert filter_store(store, "v", filters=["max_code"]).kept == kept


def alike(rng: random.Random, changes: int) -> tuple[float, bool]:
    """Two made-up answers that differ in some words: their likeness, and whether they share a band."""
    words = [f"w{rng.randrange(800)}" for _ in range(120)]
    other = list(words)
    for _ in range(changes):
        other[rng.randrange(len(other))] = "other"
    triples = [
        set(zip(text, text[1:], text[2:], strict=False)) for text in (words, other)
    ]
    one, two = (sketch(" ".join(text)) for text in (words, other))
    shared = any(
        one[at : at + BAND] == two[at : at + BAND] for at in range(0, SKETCH, BAND)
    )
    return len(triples[0] & triples[1]) / len(triples[0] | triples[1]), shared


@pytest.mark.parametrize(
    ("changes", "likeness", "least", "most"), [(2, 0.9, 0.9, 1), (24, 0.38, 0, 0.08)]
)
def test_near_duplicates_share_a_band_and_others_hardly_do(
    changes: int, likeness: float, least: float, most: float
) -> None:
    rng = random.Random(0)
    pairs = [alike(rng, changes) for _ in range(300)]
    assert abs(sum(like for like, _ in pairs) / len(pairs) - likeness) < 0.02
    assert least <= sum(shared for _, shared in pairs) / len(pairs) <= most


def test_over_five_words_means_six(tmp_path: Path) -> None:
    store = make(tmp_path, [range(9)])  # their words are their numbers
    filter_store(store, "v", filters=["min_words"])
    assert store.view("v")["words"].to_list() == [6, 7, 8]


def test_measures_tell_code_loops_and_prose_apart() -> None:
    assert code_ratio(PROSE) < 0.01
    assert code_ratio(CODE) > 0.3
    assert code_ratio("Use it like this:\n```python\npass\n```") == 1
    assert repetition(PROSE) < 0.01
    assert repetition(LOOP) > 0.9
    assert repetition("") == code_ratio("") == 0
    assert text_stats("")["words"] == 0
