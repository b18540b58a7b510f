"""The repository is what its own papers say: packages, files, commands."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from vlmdistill.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def test_the_wheel_has_every_file_of_the_packages() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    folders = [
        ROOT / name
        for name in ("src/vlmdistill", "cli", "pipelines", "drafters", "stores")
    ]
    wheel = {
        file
        for folder in folders
        for pattern in ("*.py", *data["*"])
        for file in folder.rglob(pattern)
    }
    for package, patterns in data.items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        wheel |= {
            file
            for pattern in patterns
            if package != "*"
            for file in folder.glob(pattern)
        }
    files = {file for folder in folders for file in folder.rglob("*.*")}
    assert wheel >= {file for file in files if file.suffix != ".pyc"}
    assert all(
        (file.parent / "__init__.py").is_file()
        for file in files
        if file.suffix == ".py"
    )


def commands(page: Path) -> list[str]:
    """The `vlmdistill` lines of a page's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [
        line for block in blocks for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith("vlmdistill ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_the_docs_is_one_that_the_program_takes(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line, comments=True)[1:]
        command = typer.main.get_command(app)
        context = command.make_context("vlmdistill", list(words))
        while hasattr(command, "resolve_command"):
            rest = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, rest)
            assert command is not None, line
            context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_in_the_docs_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_no_settings_of_the_packages_name_a_folder_of_a_machine() -> None:
    configs = sorted((ROOT / "pipelines").rglob("*.json"))
    assert configs
    named = [file.name for file in configs if re.search(r'"/\w', file.read_text())]
    assert named == []


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    facts = re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)
    assert set(phony.split()) == set(facts)
