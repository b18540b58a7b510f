"""JSON is read as a stream: memory holds a row, whatever a file is or unpacks to."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmdistill.pipelines.data.prompts import json_rows, sources
from vlmdistill.stores.errors import DataError

ROW, ROWS = 100_000, 200  # bytes of a row
LIMIT = 80 * ROW


def lines(rows: list[str]) -> str:
    return "\n".join(rows)


def array(rows: list[str]) -> str:
    return f"[{', '.join(rows)}]"


def indented(rows: list[str]) -> str:
    return json.dumps([json.loads(row) for row in rows], indent=2, ensure_ascii=False)


def rows(count: int, size: int = 1) -> list[str]:
    return [
        json.dumps({"number": number, "text": "ä" * size}) for number in range(count)
    ]


@pytest.mark.parametrize("form", [lines, array])
def test_a_file_is_never_whole_in_memory(
    form: Callable[[list[str]], str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json.gz"
    file.write_bytes(gzip.compress(form(rows(ROWS, ROW // 6)).encode(), 1))
    tracemalloc.start()
    try:
        assert sum(row.problem is None for row in sources.read(str(file))) == ROWS
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at_once", [1, 2, 7, 64])
@pytest.mark.parametrize("form", [lines, array, indented])
def test_where_a_file_is_cut_changes_no_row(
    form: Callable[[list[str]], str],
    at_once: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [*rows(3), "12", "-1.5e3", '"]"', "null", "[[1], {}]"]
    (tmp_path / "rows.json").write_text(form(given), encoding="utf-8")
    whole = [*sources.read(str(tmp_path / "rows.json"))]
    monkeypatch.setattr(json_rows, "AT_ONCE", at_once)
    assert [*sources.read(str(tmp_path / "rows.json"))] == whole
    expected = [json.loads(row) for row in given]
    if form is not lines:
        assert [row.value for row in whole] == expected
    else:  # JSON lines begin with an object
        assert [row.value for row in whole if not row.problem] == expected


def test_a_line_that_is_too_long_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "MOST_ROW", 500)
    fits = json.dumps({"text": 488 * "x"})
    (tmp_path / "a.jsonl").write_text(
        lines([*rows(2), *rows(1, 2000), fits, *rows(2), fits])
    )
    found = [*sources.read(str(tmp_path / "a.jsonl"))]
    assert len(fits) == 500
    assert [row.number for row in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.number for row in found if row.problem] == [3]


@pytest.mark.parametrize("form", [lines, array])
def test_what_unpacks_to_one_endless_row_is_refused(
    form: Callable[[list[str]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_ROW", "MOST_SKIPPED", "AT_ONCE"):
        monkeypatch.setattr(json_rows, name, ROW)
    file = tmp_path / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(form(rows(1, 4 * ROW)).encode(), 1))
    with pytest.raises(DataError, match=r"bomb\.jsonl\.gz"):
        assert all(row.problem for row in sources.read(str(file)))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[1,\n2,\n\n}]", 4),
        ("[1,\n2\n3]", 3),
        ("[1]\n\n2", 3),
        ("[\n" + "[" * 100_000, 2),
        ("[1,\n2", 2),
    ],
)
def test_an_array_that_is_invalid_is_refused_with_its_line(
    text: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(text)
    for at_once in (1, json_rows.AT_ONCE):
        monkeypatch.setattr(json_rows, "AT_ONCE", at_once)
        with pytest.raises(DataError, match=f"at line {line}$"):
            list(sources.read(str(tmp_path / "a.json")))
