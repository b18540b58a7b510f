"""The command line and the functions behind it tell the truth about a store."""

import dataclasses
import json
import logging
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.stores.samples import make, sample, write
from vlmdistill.cli.store import app
from vlmdistill.drafters import catalogue
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info, stats
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make(
        tmp_path / "store", [range(5), range(5, 9)], encoding={"hidden.text": "int8"}
    )


def run(*arguments: str) -> Any:
    return json.loads(text(*arguments, "--json"))


def text(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception:
        raise result.exception
    return result.stdout


def test_info_counts_samples_bytes_and_datasets(store: Store) -> None:
    facts = info(store)
    samples = [sample(number) for number in range(9)]
    assert (facts["samples"], facts["shards"]) == (9, 2)
    assert facts["datasets"]["a"]["samples"] == 5
    assert facts["datasets"]["b"]["text_tokens"] == sum(
        len(item.ids_T) for item in samples[1::2]
    )
    assert 0 < facts["fields"]["hidden.text"]["relative_error"] < 0.02
    assert "relative_error" not in facts["fields"]["layer2.visual"]
    assert facts["provenance"]["features"] == store.provenance.features


def test_what_info_says_of_sizes_adds_up_to_what_lies_there(store: Store) -> None:
    filter_store(store, "long", expressions=["words > 5"])
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    write(store, "u2", [3, 8, 9])  # 3 and 8 are there already
    for number in range(64):  # as many as are worth a cache
        write(store, f"v{number}", [number])
    assert len(store.index) == 64
    facts = run("info", store.path)
    assert (facts["samples"], facts["shards"], facts["shadowed"]) == (64, 67, 12)
    parts = [facts["head_bytes"], facts["index_bytes"], facts["records_bytes"]]
    parts += [field["bytes"] for field in facts["fields"].values()]
    files = [path for path in Path(store.path).rglob("*") if path.is_file()]
    assert facts["bytes"] == sum(parts) == sum(path.stat().st_size for path in files)
    assert any(path.parent.name == "cache" for path in files)
    assert facts["index_bytes"] == sum(
        path.stat().st_size for path in files if path.match("shards/*/*")
    )
    assert "64 in 67 shards, and 12 duplicates" in text("info", store.path)


def test_names_of_a_stranger_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path,
) -> None:
    evil = "\x1b]0;pwn\x07\u202ex\x9b31m"
    store = make(tmp_path / "store")
    with store.writer("u") as writer:
        given = sample(1, dataset=evil)
        writer.add(dataclasses.replace(given, meta={**given.meta, evil: 1}))
    store.write_stats("run", {"key": ["k0001"], evil: [0.5]})
    filter_store(store, "v", filters=[Filter(evil, lambda rows: rows["words"] > 5)])
    shown = [text("info", store.path), text("stats", store.path)]
    with pytest.raises(StoreError) as raised:
        run("filter", store.path, "--name", "w", "--where", f"nothing > '{evil}'")
    for line in "\n".join([*shown, str(raised.value)]).split("\n"):
        assert line.isprintable()
    assert "pwn" in shown[0]
    assert "pwn" in shown[1]


def test_samples_that_only_one_shard_has_need_no_word(store: Store) -> None:
    assert "samples   9 in 2 shards\n" in text("info", store.path)


def test_a_view_of_samples_that_are_gone_says_how_many_are_there(store: Store) -> None:
    filter_store(store, "late", expressions=["words > 3"])
    filter_store(store, "early", expressions=["words < 3"])
    assert "early 3, late 5\n" in text("info", store.path)
    Path(store.path, "commits", "u1.json").unlink()
    facts = run("info", store.path)
    assert facts["views"] == {"early": 3, "late": 5}
    assert facts["views_there"] == {"early": 3, "late": 1}
    assert "early 3, late 5 (1 present)\n" in text("info", store.path)


def test_a_damaged_view_is_told_and_stops_nothing_else(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("aview", "bview"):
        filter_store(store, name, expressions=["words > 5"])
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    record = Path(store.path, "views", "aview.json")
    record.write_bytes(record.read_bytes()[:-2] + b"!}")
    assert run("info", store.path)["views"] == {"aview": None, "bview": 3}
    assert run("info", store.path)["views_there"] == {"aview": None, "bview": 3}
    assert "aview unreadable, bview 3" in text("info", store.path)
    with caplog.at_level(logging.WARNING, "vlmdistill.stores"):
        info(store)
    assert str(record) in caplog.text
    there = str(tmp_path / "there")
    for verb in (["push", store.path, there], ["merge", there, store.path]):
        with pytest.raises(StoreError, match=r"views/aview\.json"):
            text(*verb)
    copy = Store.open(there)
    assert (len(copy.index), copy.view("bview")["words"].to_list()) == (9, [6, 7, 8])
    assert copy.index["run.kept"].drop_nulls().to_list() == [0.5]


def test_info_says_what_each_drafter_would_cost_or_lack(store: Store) -> None:
    needs = {
        "small": [Feature.parse("hidden.text")],
        "large": [Feature.parse("layer9.visual")],
    }
    facts = info(store, needs)["drafters"]
    assert facts["large"]["missing"] == ["layer9.visual"]
    assert facts["small"]["missing"] == []
    assert facts["small"]["bytes"] > facts["large"]["bytes"] > 0


def test_the_command_tells_the_cost_of_every_drafter_of_the_catalogue(
    store: Store,
) -> None:
    facts = run("info", store.path)["drafters"]
    assert set(facts) == {
        name for name in catalogue.NAMES if catalogue.is_trained(name)
    }
    for name, cost in facts.items():
        needs = catalogue.config(name).model.needs(store.info)
        assert {*cost["features"], *cost["missing"]} == {
            feature.name for feature in needs
        }
        assert cost["bytes"] >= facts["medusa"]["bytes"] or cost["missing"]
    assert "sparrow" in text("info", store.path)


def test_stats_describe_every_numeric_column_of_a_view(store: Store) -> None:
    store.write_stats("run", {"key": ["k0001", "k0002"], "kept": [0.25, 0.75]})
    facts = stats(store)
    words = {
        name: value for name, value in facts["words"].items() if name != "histogram"
    }
    assert words == {
        "count": 9,
        "not_finite": 0,
        "mean": 4,
        "min": 0,
        "p10": 0.8,
        "p50": 4,
        "p90": 7.2,
        "max": 8,
    }
    assert facts["kept"]["mean"] == 0.5
    assert sum(facts["text_tokens"]["histogram"]["counts"]) == 9
    assert not {"text_row", "xxh3.tokens"} & set(facts)


def test_what_a_diverged_run_left_is_counted_beside_the_numbers(store: Store) -> None:
    keys = ["k0001", "k0002", "k0003", "k0004"]
    nan, inf = float("nan"), float("inf")
    assert "not finite" not in text("stats", store.path)
    store.write_stats(
        "run",
        {"key": keys, "loss": [1.0, inf, nan, -inf], "gone": [nan, None, None, inf]},
    )
    facts = run("stats", store.path)
    assert (
        facts["loss"]["count"],
        facts["loss"]["not_finite"],
        facts["loss"]["max"],
    ) == (1, 3, 1.0)
    assert (
        facts["gone"]["count"],
        facts["gone"]["not_finite"],
        facts["gone"]["mean"],
    ) == (0, 2, None)
    assert "not finite" in text("stats", store.path)


@pytest.mark.parametrize(
    "values",
    [
        [0.3, 0.1 + 0.2],
        [10**17, 10**17 + 16, 10**17 + 64],
        [1e308, -1e308],
        [1e308, 1.2e308, 1.5e308],
        [5e-324, 1e-323, 0.0],
        [0.0, 0.0],
        [-7.0],
    ],
)
def test_numbers_close_together_or_huge_have_a_distribution(
    store: Store, values: list[float]
) -> None:
    store.write_stats(
        "run", {"key": [f"k{at:04}" for at in range(len(values))], "loss": values}
    )
    facts = run("stats", store.path)["loss"]
    assert (facts["min"], facts["max"]) == (min(values), max(values))
    assert facts["mean"] == pytest.approx(
        float(sum(Fraction(value) for value in values) / len(values))
    )
    assert (
        sorted(values)[0]
        <= facts["p10"]
        <= facts["p50"]
        <= facts["p90"]
        <= sorted(values)[-1]
    )
    histogram = facts["histogram"]
    assert (histogram["from"], histogram["to"]) == (min(values), max(values))
    assert sum(histogram["counts"]) == len(values)
    assert (
        bool(histogram["counts"][0])
        == bool(histogram["counts"][-1])
        == (min(values) < max(values))
    )
    assert "loss" in text("stats", store.path)


def test_each_verb_answers_in_json_and_in_words(store: Store, tmp_path: Path) -> None:
    path = store.path
    assert run("info", path)["samples"] == 9
    assert "hidden.text" in text("info", path)
    assert run("stats", path)["words"]["max"] == 8
    assert "█" in text("stats", path)
    view = run("filter", path, "--where", "words > 5", "--name", "long")
    assert view == {"view": "long", "rows": 9, "kept": 3, "dropped": {"words > 5": 6}}
    assert "3 of 9" in text("filter", path, "--where", "words > 5", "--name", "long")
    nobody = CliRunner().invoke(
        app, ["filter", path, "--where", "words > 99", "--name", "none"]
    )
    assert "keeps none of 9 samples" in nobody.stderr
    assert run("verify", path)["findings"] == []
    there = str(tmp_path / "there")
    assert (
        run("push", path, there, "--view", "long", "--features", "hidden.text")[
            "copied"
        ]
        == 3
    )
    nothing: dict[str, list[str]] = {
        "conflicts": [],
        "replaced": [],
        "left": [],
        "annexes": [],
    }
    counts = {"copied": 9, "present": 0, "duplicates": 0}
    assert run("pull", path, str(tmp_path / "all")) == counts | nothing
    assert run("merge", str(tmp_path / "merged"), path)[path]["copied"] == 9
    assert "copied" in text("merge", str(tmp_path / "merged"), path)
    assert "copied" in text("push", path, there, "--features", "hidden.text")
    assert "findings" in text("verify", path)
    left = "staging/0123456789abcdef"
    (Path(path) / left).mkdir()
    assert run("gc", path, "--grace", "0", "--dry-run")["removed"] == [
        {"name": left, "bytes": 0}
    ]
    assert left in text("gc", path, "--grace", "0")


def test_an_empty_list_of_features_is_refused_before_anything_is_copied(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="''"):
        text("push", store.path, str(tmp_path / "there"), "--features", "")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("shards/u0-*/index.arrow", "ledger/commits/"),
        ("commits/u0.json", "ledger/commits/u0.json"),
        ("views/long.json", "ledger/views/long.json"),
        ("stats/run-*.arrow", "ledger/stats/"),
        ("ledger/stats/run.json", "store gc"),
        ("heads/*/head.safetensors", "heads/"),
        ("store.json", "heads/"),
    ],
)
def test_what_verify_advises_fits_what_is_damaged(
    store: Store, file: str, advice: str
) -> None:
    filter_store(store, "long", expressions=["words > 5"])
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    (path,) = Path(store.path).glob(file)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"\b1\b") as raised:
        text("verify", store.path)
    assert advice in str(raised.value)
    assert ("commits/" in str(raised.value)) == ("commits/" in advice)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_verify_advises_no_copy_of_a_record_that_has_no_good_one(
    store: Store, damage: Callable[[Path], Any]
) -> None:
    Path(store.path, "commits/u0.json").write_bytes(b"{}")
    damage(Path(store.path, "ledger/commits/u0.json"))
    with pytest.raises(StoreError, match="damaged") as raised:
        text("verify", store.path)
    assert "back from" not in str(raised.value)
    assert "remove its record" in str(raised.value)


def test_what_a_merge_found_to_differ_is_named(store: Store, tmp_path: Path) -> None:
    other = make(tmp_path / "other", encoding={"hidden.text": "int8"})
    changed = sample(3)
    changed.ids_T[0] ^= 1
    write(other, "u", [changed])
    for one, least in ((store, 2), (other, 1)):
        filter_store(one, "long", expressions=[f"words > {least}"])
    facts = run("merge", store.path, other.path)[other.path]
    assert (facts["conflicts"], facts["left"]) == (["k0003"], [])
    words = text("merge", store.path, other.path)
    assert f"conflicts of {other.path}: k0003" in words
    write(other, "v", [sample(1)])
    filter_store(other, "long", expressions=["words > 0"])
    assert f"left of {other.path}: views/long" in text("merge", store.path, other.path)
    assert run("push", other.path, store.path)["conflicts"] == ["k0003"]


def test_a_store_named_twice_is_merged_once(store: Store, tmp_path: Path) -> None:
    facts = run("merge", str(tmp_path / "all"), store.path, store.path)[store.path]
    assert (facts["copied"], facts["present"]) == (9, 0)
