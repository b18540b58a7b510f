"""The files of evaluations: read as they were written, and damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, in_sequence, measured
from tests.pipelines.report.html_page import make
from vlmdistill.pipelines.bench.records import heading, read
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError


def test_an_evaluation_is_read_as_it_was_written(save: Save) -> None:
    made = evaluation("hivis", measured(noise=0.1), measured(0.7, noise=0.2))
    assert read(save("hivis", *made.temperatures)) == made


@pytest.mark.parametrize("reading", [read, heading])
def test_an_evaluation_of_a_development_version_is_to_be_measured_again(
    reading: Callable[[Path], object], save: Save
) -> None:
    file = save("sparrow")
    for number in (1, 2):
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "format": number}))
        with pytest.raises(DataError, match=f"format {number}.*measure again"):
            reading(file)


def first(expected: Any) -> Any:
    """The first prompt of an evaluation's JSON."""
    return expected["temperatures"][0]["prompts"][0]


def damaged(change: Callable[[Any], object]) -> bytes:
    """The file of an evaluation after a change of its JSON."""
    expected = json.loads(msgspec.json.encode(evaluation()))
    change(expected)
    return json.dumps(expected).encode()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ""),
        (b'{"format": 3, "name": "spa', ""),
        (b'{"format": 3, "name": "\xff"}', ""),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (b'{"format": 3, "name": ' + b"[" * 100_000, ""),
        (b'{"a": ' * 100_000, ""),
        (b"[1, 2]", ""),
        (b'{"name": "a tokenizer"}', "format"),
        (
            b'{"format": 1, "name": "sparrow", "temperatures": [{"tau": 3.2}]}',
            "format 1",
        ),
        (b'{"format": 3}', "name"),
        (damaged(lambda expected: expected.update(format=4)), "format 4"),
        (damaged(lambda expected: expected.update(threads="one")), "threads"),
        (damaged(lambda expected: expected["target"].pop("family")), "family"),
        (damaged(lambda expected: expected.update(name=None)), "name"),
        (damaged(lambda expected: expected.update(name="")), "- at `$.name`"),
        (damaged(lambda expected: expected.update(training=[])), "training"),
        (damaged(lambda expected: expected.update(temperatures={})), "temperatures"),
        (damaged(lambda expected: expected.update(temperatures=[])), "temperatures"),
        (
            damaged(lambda expected: expected["temperatures"][1].update(prompts=[])),
            "temperatures[1].prompts",
        ),
        (
            damaged(lambda expected: expected["temperatures"][1]["prompts"].pop()),
            "different prompts",
        ),
        (
            damaged(
                lambda expected: first(expected)["plain"].update(seconds=float("nan"))
            ),
            "",
        ),
        (
            damaged(lambda expected: first(expected)["plain"].update(seconds=-1)),
            "plain.seconds",
        ),
        (
            damaged(lambda expected: first(expected)["drafted"].update(tokens=1.5)),
            "drafted.tokens",
        ),
        (
            damaged(lambda expected: first(expected)["drafted"].update(check="fine")),
            "drafted.check",
        ),
        (
            damaged(
                lambda expected: first(expected)["drafted"].update(chain_tried=[1])
            ),
            "chain_tried",
        ),
    ],
    ids=lambda value: (
        "" if isinstance(value, bytes) else value.replace(" ", "-") or "unreadable"
    ),
)
def test_a_file_that_is_not_an_evaluation_is_one_line(
    workspace: Workspace, save: Save, content: bytes, expected: str
) -> None:
    save("good")
    before = make(workspace).page.read_bytes()
    bad = workspace.reports / "bad.json"
    bad.write_bytes(content)
    with pytest.raises(DataError) as caught:
        make(workspace)
    line = str(caught.value)
    assert expected in line
    assert str(bad) in line
    assert "vlmdistill eval" in line
    assert "\n" not in line
    assert (workspace.reports / "index.html").read_bytes() == before


ENDED = "2023-11-14 22:14:53 UTC"  # the last of its prompts


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("2023-11-15 07:14:59", "2023-11-14 22:14:59 UTC"),  # Tokyo
        ("2023-11-14 14:15:10", "2023-11-14 22:15:10 UTC"),  # Los Angeles
        ("2023-11-15 03:59:59", "2023-11-14 22:14:59 UTC"),  # Kathmandu
        ("2023-11-14 22:14:59", "2023-11-14 22:14:59 UTC"),
        (ENDED, ENDED),
        ("2023-12-24 22:14:59", "2023-12-24 22:14:59"),
        ("once", "once"),
    ],
)
def test_the_local_time_of_an_earlier_version_is_read_in_utc(
    save: Save, written: str, expected: str
) -> None:
    file = save("sparrow", in_sequence(measured()), measured=written)
    assert read(file).measured == expected
    assert heading(file).measured == expected
