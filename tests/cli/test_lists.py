"""Lists and values are written in one way: items by commas or repeats, and help names them in one style."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.pipelines.bench.conftest import Save, save, workspace
from vlmdistill.cli.main import app, main

__all__ = ["save", "workspace"]

pytestmark = pytest.mark.usefixtures("workplace")


@pytest.mark.parametrize(
    "command",
    [
        ["features", "--for"],
        ["run", "--drafters"],
        ["plan", "demo", "--for"],
        ["serve", "--compare"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("several", ["wren,nowhere", "wren nowhere"])
def test_a_list_is_separated_by_commas_or_repeated(
    command: list[str], several: str, failing: Callable[..., str]
) -> None:
    """Each item is looked at: the second does not exist."""
    *verb, option = command
    words = [word for item in several.split() for word in (option, item)]
    if command == ["serve", "--compare"]:
        words = [word.replace("wren", "lookahead") for word in words]
    assert "nowhere" in failing(*verb, *words)


@pytest.mark.parametrize("words", [["a,b"], ["a", "b"], ["a, b"]], ids=" ".join)
def test_drafters_of_an_evaluation_are_separated_by_spaces_or_commas(
    words: list[str], save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        save(name)
    where = ["--runs", str(tmp_path / "runs")]
    assert main(["eval", *words, "--list", "--json", *where]) == 0
    rows = json.loads(capsys.readouterr().out)["evaluations"]
    assert {row["drafter"] for row in rows} == {"a", "b"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("--concurrency", "1.5"), ("--concurrency", "0"), ("--temperature", "nan")],
)
def test_a_number_of_a_list_that_does_not_fit_is_refused_as_it_is_written(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ["--engine", "openai:http://127.0.0.1:9/v1"]
    assert main(["eval", *server, option, f"2,{value}"]) == 2
    assert f"'{value}'" in capsys.readouterr().err


def test_help_names_every_value_in_one_style(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FILE, N, NAME or a|b: never a type of Python."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="vlmdistill")
    for words in _verbs(command, context):
        assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--dtype auto|bfloat16|float32" in text
    assert not re.findall(r"<(?:str|int|float|path|list|Path)[^>]*>", text)


def _verbs(command: Any, context: typer.Context) -> Iterator[list[str]]:
    """The words of each command."""
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if hasattr(inner, "list_commands"):
            yield from ([name, *words] for words in _verbs(inner, context))
        else:
            yield [name]
