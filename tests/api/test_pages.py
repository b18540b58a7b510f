"""The pages of the site are complete: what is made from the commands is current, and each page is listed."""

import re
from pathlib import Path

from docs.commands import PAGE, page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), "make it again: python -m docs.commands"


def test_the_contents_list_every_page_once() -> None:
    lists = re.findall(
        r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL
    )
    lines = [
        line
        for part in lists
        for line in part.splitlines()
        if line and not line.startswith(":")
    ]
    listed = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    pages = [str(file.relative_to(DOCS).with_suffix("")) for file in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(
        ["self", *(page for page in pages if page != "index")]
    )
