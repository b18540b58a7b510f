"""The tree is as `docs/architecture.md` draws it: every folder, one class for one name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TOP = ("src/vlmdistill", "cli", "pipelines", "drafters", "stores")
FOLDERS = sorted(
    {file.parent for top in TOP for file in (ROOT / top).rglob("__init__.py")}
)


def modules(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.glob("*.py") if not file.name.startswith("__")
    )


def twice(named: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that stand for several things, with their files."""
    found = defaultdict(list)
    for name, file in named:
        found[name].append(str(file.relative_to(ROOT)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_every_file_and_folder_on_the_page_exists() -> None:
    named = re.findall(r"`([\w./-]+(?:\.py|/))`", PAGE)
    assert len(named) > len(FOLDERS)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_package_folder_is_on_the_page() -> None:
    names = [f"{folder.relative_to(ROOT)}/" for folder in FOLDERS]
    assert [name for name in names if f"| `{name}` |" not in PAGE] == []


def test_no_class_name_is_defined_twice() -> None:
    classes = [
        (statement.name, file)
        for folder in FOLDERS
        for file in modules(folder)
        for statement in ast.parse(file.read_text()).body
        if isinstance(statement, ast.ClassDef)
    ]
    assert len(classes) > 100
    assert twice(classes) == {}
