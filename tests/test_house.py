"""The repository is what its own papers say: packages, files, commands."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from vlmdistill.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def packaging() -> dict[str, Any]:
    """What pyproject.toml says of packages and their files."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return dict(tool["setuptools"])


def test_every_package_is_shipped() -> None:
    tool = packaging()
    on_disk = {
        ".".join((package, *file.parent.relative_to(ROOT / folder).parts))
        for package, folder in tool["package-dir"].items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert set(tool["packages"]) == on_disk


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else() -> None:
    tool = packaging()
    roots, data, wheel = tool["package-dir"], tool["package-data"], set[Path]()
    assert not set(roots.values()) & {".", "examples", "benchmarks", "tests"}
    for package in tool["packages"]:
        root = max((root for root in roots if f"{package}.".startswith(f"{root}.")), key=len)
        folder = ROOT.joinpath(roots[root], *package.removeprefix(root).split("."))
        for pattern in ("*.py", *data["*"], *data.get(package, ())):
            wheel.update(folder.glob(pattern))
    files = {file for folder in roots.values() for file in (ROOT / folder).rglob("*.*")}
    assert wheel == {file for file in files if file.suffix != ".pyc"}
    assert {file.parent.name for file in wheel if file.name == "model.safetensors"} == {"demo", "demo-video"}


def commands(page: Path) -> list[str]:
    """The `vlmdistill` lines of a page's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
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


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    facts = re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)
    assert set(phony.split()) == set(facts)
