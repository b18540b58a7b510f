"""Statistics of training runs add columns to the index, and never stop a store from being read."""

import logging
import re
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.stores.samples import make, same, sample, write
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.run_stats import write_stats
from vlmdistill.stores.index.tables import write_table
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.manifest import STATS, RunRecord, ViewRecord
from vlmdistill.stores.schema import SCHEMA_VERSION
from vlmdistill.stores.sharing.merge import send
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info, stats
from vlmdistill.stores.views.filters import filter_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = make(tmp_path / "store", [range(6)])
    store.write_stats("old", {"key": ["k0001", "k0002"], "kept": [0.1, 0.2]})
    store.write_stats("new", {"key": ["k0002", "k0003"], "kept": [0.8, 0.9]})
    return store


def spoil(store: Store, name: str) -> str:
    """Damage a file of the statistics; what to remove to be rid of it."""
    (path,) = Path(store.path, STATS).glob(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return str(Path(store.path, STATS, "new.json"))


@pytest.mark.parametrize("name", ["new-*.arrow", "new.json"])
def test_damaged_statistics_of_a_run_stop_no_reader_and_only_views_that_need_them(
    store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = spoil(store, name)
    opened = Store.open(store.path)
    with caplog.at_level(logging.WARNING, "vlmdistill.stores"):
        assert same(opened.read("k0002"), sample(2))
    assert record in caplog.text
    assert opened.index["old.kept"].drop_nulls().to_list() == [0.1, 0.2]
    assert stats(opened)["words"]["count"] == 6
    assert (
        filter_store(opened, "v", expressions=["words > 2", '"old.kept" is null']).kept
        == 3
    )
    for text in ("kept > 0.5", '"new.kept" > 0.5', "new.kept > 0.5"):
        with pytest.raises(StoreError, match=re.escape(record)):
            filter_store(opened, "v", expressions=["words > 2", text])
    opened.write_stats("newest", {"key": ["k0004"], "kept": [0.5]})
    Path(record).unlink()
    mended = Store.open(store.path)
    assert filter_store(mended, "v", expressions=["kept > 0.1"]).kept == 2
    assert mended.view("v")["key"].to_list() == ["k0002", "k0004"]


def test_a_run_written_again_needs_not_be_read(store: Store) -> None:
    spoil(store, "new-*.arrow")
    store.write_stats("new", {"key": ["k0003"], "kept": [1.0]})
    assert Store.open(store.path).index["kept"].to_list() == [
        None,
        0.1,
        0.2,
        1.0,
        None,
        None,
    ]


def test_a_column_has_one_kind_of_values_in_all_runs(store: Store) -> None:
    with pytest.raises(StoreError, match=r"'kept'.*String.*'old'"):
        store.write_stats("odd", {"key": ["k0001"], "kept": ["most"]})
    store.write_stats("whole", {"key": ["k0001"], "kept": [1]})
    store.write_stats("empty", {"key": ["k0001"], "kept": [None]})
    assert Store.open(store.path).index["kept"].to_list() == [
        None,
        1.0,
        0.8,
        0.9,
        None,
        None,
    ]


def test_a_run_keeps_clear_of_the_columns_of_the_samples(tmp_path: Path) -> None:
    store = dotted(tmp_path)
    with pytest.raises(StoreError, match=r"'run\.loss'.*'run'"):
        store.write_stats("run", {"key": ["k0001"], "loss": [0.5]})


def dotted(path: Path) -> Store:
    """A store of one sample that came with a column `run.loss`."""
    store, meta = make(path), dict[str, Any]({"run.loss": 7})
    write(store, "u", [sample(1, **meta)])
    return store


def foreign(store: Store, run: str, table: dict[str, Any]) -> None:
    """Statistics as another version wrote them, or as they came from another store."""
    write_table(
        store.backend,
        RunRecord(schema=SCHEMA_VERSION, name=run, order=9),
        pl.DataFrame(table),
    )


@pytest.mark.parametrize("keys", [["k0001", "k0001"], ["k0001", None]])
def test_a_table_that_has_a_key_twice_or_none_is_damaged(
    store: Store,
    tmp_path: Path,
    keys: list[str | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    foreign(store, "twice", {"key": keys, "kept": [1.0, 2.0]})
    with caplog.at_level(logging.WARNING, "vlmdistill.stores"):
        assert len(Store.open(store.path).index) == 6
    assert "'twice' are left out" in caplog.text
    (found,) = verify(store.path).damage
    assert re.fullmatch(r"stats/twice-\w+\.arrow", found.name)
    with pytest.raises(StoreError, match=r"stats/twice-.*damaged"):
        send(store.path, tmp_path / "copy")
    assert not list(Path(tmp_path, "copy", STATS).glob("twice*"))
    with pytest.raises(StoreError):
        store.write_stats("own", {"key": keys, "kept": [1.0, 2.0]})


@pytest.mark.parametrize(
    "table",
    [
        {"key": ["k0001", "k0002"]},
        {"key": ["k0001", "k0002"], "reason": [1, 2]},
        {"key": ["k0001", "k0001"], "reason": [None, "short"]},
        {"key": ["k0001", "k0002"], "reason": [None, "short"], "more": [1, 2]},
    ],
)
def test_a_view_that_is_no_view_is_damaged(
    store: Store,
    tmp_path: Path,
    table: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = ViewRecord(
        schema=SCHEMA_VERSION,
        name="odd",
        base=None,
        filters=(),
        rows=2,
        kept=2,
        dropped={},
    )
    write_table(store.backend, record, pl.DataFrame(table))
    with caplog.at_level(logging.WARNING, "vlmdistill.stores"):
        assert info(store)["views"] == {"odd": None}
    assert [re.sub(r"-\w+", "", one.name) for one in verify(store.path).damage] == [
        "views/odd.arrow"
    ]
    with pytest.raises(StoreError, match=r"views/odd-.*damaged"):
        send(store.path, tmp_path / "copy")


def test_opening_takes_a_time_linear_in_the_columns_of_runs(tmp_path: Path) -> None:
    store = dotted(tmp_path)
    columns = {f"c{number}": [1.0] for number in range(3000)}
    write_stats(store.backend, "wide", {"key": ["k0001"], **columns})
    before = time.process_time()
    assert len(Store.open(store.path).index.columns) > 6000
    assert (
        time.process_time() - before < 3
    )  # 8 when all columns were looked at for each


def test_statistics_from_elsewhere_that_meet_a_name_or_a_kind_stop_no_reader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = dotted(tmp_path)
    write_stats(store.backend, "first", {"key": ["k0001"], "loss": [0.5], "hop": [1]})
    foreign(store, "run", {"key": ["k0001"], "loss": [0.1], "hop": ["one"]})
    foreign(store, "a", {"key": ["k0001"], "b.c": [1]})
    foreign(store, "a.b", {"key": ["k0001"], "c": [2]})
    with caplog.at_level(logging.WARNING, "vlmdistill.stores"):
        (row,) = store.index.to_dicts()
    assert (row["run.loss"], row["first.loss"], row["loss"]) == (7, 0.5, 0.5)
    assert (row["run.hop"], row["first.hop"], row["hop"]) == ("one", 1, "one")
    assert row["a.b.c"] == 1
    assert caplog.messages == [
        "statistics are left out: the index has a column 'a.b.c' already",
        "statistics are left out: the index has a column 'run.loss' already",
    ]
