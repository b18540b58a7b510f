"""Options that no other test gives: what each does, or that a wrong value is refused by its name."""

import json
from pathlib import Path

import pytest

from tests.cli.test_options import LISTED
from tests.stores import samples
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts import prompt_table

pytestmark = pytest.mark.usefixtures("workplace")

TESTS = Path(__file__).parents[1]


def test_every_option_is_given_in_some_test() -> None:
    """An option without a test is a constant, or has no user."""
    sources = [file.read_text() for file in TESTS.rglob("*.py")]
    given = {word for source in sources for word in source.split('"')}
    given |= {word.partition("=")[0] for word in given}
    words = {part for word in given for part in word.split()}
    options = {
        word
        for line in LISTED.read_text().splitlines()
        for word in line.split()
        if word.startswith("--")
    }
    assert options - words == set()


def test_text_prompts_are_augmented_by_an_option_of_their_own() -> None:
    command = ["prompts", "talks.json", "--eval-share", "0"]
    assert main([*command, "--augment", "none", "--augment-text", "long"]) == 0
    prompts = prompt_table.read(Path("runs/demo-small/prompts.parquet"))
    assert {prompt.augmentation for prompt in prompts} == {"long"}


def test_a_named_filter_makes_a_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = samples.make(tmp_path / "store", [range(3)])
    command = ["store", "filter", str(store.path), "--name", "short", "--json"]
    assert main([*command, "--filter", "max_tokens=1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["kept"]) == (3, 0)


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("--every", ["adapt", "wren", "--from", "log.jsonl", "--every", "soon"]),
        ("--every", ["follow", "wren", "--server", "http://h", "--every", "soon"]),
        ("--old", ["adapt", "wren", "--from", "log.jsonl", "--old", "2"]),
        ("--tolerance", ["adapt", "wren", "--from", "log.jsonl", "--tolerance", "2"]),
        ("--jobs", ["run", "--jobs", "0"]),
        ("nowhere.toml", ["harvest", "log.jsonl", "--policy", "nowhere.toml"]),
        ("--round", ["harvest", "log.jsonl", "--round", "a/b"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_named_before_anything_is_done(
    option: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("log.jsonl").touch()
    assert main(command) in (1, 2)
    error = capsys.readouterr().err
    assert option in error
    assert "Traceback" not in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("option", "wrong"), [("--init", "nowhere"), ("--checkpoints", "ftp://h/copies")]
)
def test_a_training_names_what_it_cannot_begin_with(
    option: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = samples.make(tmp_path / "store", [range(3)])
    command = ["train", "medusa", "--store", str(store.path), option, wrong]
    assert main(command) == 1
    assert wrong in capsys.readouterr().err
