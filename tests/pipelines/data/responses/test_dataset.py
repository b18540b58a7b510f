"""Many responses and prompts: files are packed and columns planned, and nothing is lost or there twice."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import facts_of, load, read
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import ResponseRow
from vlmdistill.pipelines.data.responses.responder import plan
from vlmdistill.stores.errors import DataError


def row(key: str) -> ResponseRow:
    kept = not key.endswith("3")
    return ResponseRow(
        key=key, ids=[7, 8, int(key[1:])], text=f"text {key}", prompt_tokens=5, keep=kept,
        reason="" if kept else "short", temperature=1.0, top_p=1.0, max_new_tokens=9, target="t",
    )  # fmt: skip


def test_packed_parts_hold_every_response_once_also_when_a_kill_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "PACKED", 3)
    names = [f"k{number}" for number in range(8)]
    for name in names[:6]:
        dataset.write_part(tmp_path, name[1:], [row(name)])
    aside = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-aside"))
    dataset.pack(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    shutil.copytree(
        aside, tmp_path, dirs_exist_ok=True
    )  # killed before the parts were removed
    for name in names[6:]:
        dataset.write_part(tmp_path, name[1:], [row(name)])
    for _ in range(2):
        found = {
            one.key: (list(one.ids), one.text, one.keep)
            for one in dataset.read(tmp_path, kept=False)
        }
        assert found == {
            name: (row(name).ids, row(name).text, row(name).keep) for name in names
        }
        facts = dataset.facts(tmp_path)
        assert sorted(facts["key"]) == names
        assert set(facts["tokens"]) == {3}
        assert dataset.counted(facts["reason"]) == {"short": 1}
        dataset.pack(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # packs
    kept = dataset.Responses(tmp_path)
    assert [list(kept.row(at).ids) for at in kept.facts["row"]] == [
        row(key).ids for key in kept.facts["key"]
    ]


def test_of_a_prompt_with_two_responses_the_first_file_by_name_counts(
    tmp_path: Path,
) -> None:
    dataset.write_part(
        tmp_path, "b", [replace(row(key), text="second") for key in ("k1", "k2")]
    )
    dataset.write_part(
        tmp_path, "a", [row("k2"), row("k3"), replace(row("k2"), text="third")]
    )
    texts = {one.key: one.text for one in dataset.read(tmp_path, kept=False)}
    assert texts == {"k1": "second", "k2": "text k2", "k3": "text k3"}
    assert [one.key for one in dataset.read(tmp_path, kept=False)] == ["k2", "k3", "k1"]
    assert dataset.facts(tmp_path)["key"].to_list() == ["k2", "k3", "k1"]
    kept = dataset.Responses(tmp_path)
    assert [kept.row(at).text for at in kept.facts["row"]] == ["text k2", "second"]


def test_prompts_with_media_are_as_long_in_columns_as_they_are_one_by_one(
    prompts_file: Path,
) -> None:
    assert facts_of(load(prompts_file)).drop("row").equals(facts_of(read(prompts_file)))


def test_a_damaged_pack_is_named(tmp_path: Path) -> None:
    dataset.write_part(tmp_path, "1", [row("k1")])
    pack = tmp_path / dataset.PACK.format("0")
    pack.write_bytes(b"PAR1")
    for use in (
        dataset.keys,
        dataset.facts,
        dataset.Responses,
        lambda out: list(dataset.read(out)),
    ):
        with pytest.raises(DataError, match=pack.name):
            use(tmp_path)


def pack_all(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "PACKED", 1)
    dataset.pack(out)


def add_first(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.write_part(out, "0", [row("k7")])


@pytest.mark.parametrize("meanwhile", [pack_all, add_first])
def test_a_reading_while_another_run_writes_is_of_one_moment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    names = ["k1", "k2", "k4"]
    for name in names:
        dataset.write_part(tmp_path, name[1:], [row(name)])
    plain = pq.ParquetFile

    def opened(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(pq, "ParquetFile", plain)
        meanwhile(tmp_path, monkeypatch)
        return plain(*given, **named)

    monkeypatch.setattr(pq, "ParquetFile", opened)
    kept = dataset.Responses(tmp_path)
    assert sorted(kept.facts["key"]) == names
    assert [kept.row(at).key for at in kept.facts["row"]] == list(kept.facts["key"])


def test_prompts_as_columns_are_the_prompts_of_the_file_and_make_the_same_tasks(
    tmp_path: Path,
) -> None:
    out = tmp_path / "prompts.parquet"
    texts = [
        f"Describe number {number}" + " please" * (number % 5) for number in range(30)
    ]
    (tmp_path / "texts.jsonl").write_text(
        "".join(f'{{"question": "{text}"}}\n' for text in texts)
    )
    import_prompts([str(tmp_path / "texts.jsonl")], out)
    columns, whole = load(out), read(out)
    assert list(columns) == whole
    assert list(columns[4:9]) == whole[4:9]
    assert list(plan(columns, 4, 0)) == list(plan(whole, 4, 0))
    train = [prompt for prompt in whole if prompt.split == "train"]
    assert list(load(out, split="train", limit=7)) == train[:7]
    (tmp_path / "responses").mkdir()
    dataset.write_part(tmp_path / "responses", "one", [row("k1"), row("k2")])
    assert list(dataset.without_response(columns, tmp_path / "responses")) == whole
    with pytest.raises(DataError, match="of the 30 prompts"):
        load(out, split="nothing")


def test_prompts_and_responses_are_read_where_nothing_can_be_written(
    tmp_path: Path,
) -> None:
    """In /proc/self/fd, where root cannot write either."""
    (tmp_path / "texts.jsonl").write_text('{"question": "What is this?"}\n')
    import_prompts([str(tmp_path / "texts.jsonl")], tmp_path / "prompts.parquet")
    dataset.write_part(tmp_path / "responses", "1", [row("k1")])
    handles = [
        os.open(tmp_path / name, os.O_RDONLY)
        for name in ("prompts.parquet", "responses")
    ]
    prompts, responses = (Path(f"/proc/self/fd/{handle}") for handle in handles)
    assert list(load(prompts)) == read(tmp_path / "prompts.parquet")
    assert dataset.Responses(responses).row(0).text == "text k1"
    for handle in handles:
        os.close(handle)


def test_files_of_earlier_versions_have_no_time_and_lose_old_traffic_by_key(
    tmp_path: Path,
) -> None:
    dataset.write_part(tmp_path, "0", [row("k1"), row("k2")])
    (file,) = tmp_path.iterdir()
    pq.write_table(pq.read_table(file).drop_columns(["time"]), file)
    assert [response.time for response in dataset.read(tmp_path)] == [None, None]
    assert dataset.remove(tmp_path, {"k1"}, before=math.inf) == 1
    assert dataset.keys(tmp_path) == {"k2"}
