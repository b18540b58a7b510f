"""The pages of the site are complete: every command has its section, and each page is listed."""

import re
from pathlib import Path

from docs.commands import page
from tests.cli.test_options import LISTED

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = {
    "log",
    "vllm-upstream",
    "measurements/blocks",
    "measurements/claims",
    "measurements/window",
    "measurements/wren",
}
"""Pages of single questions, which others link to."""


def test_the_page_of_commands_has_each_command_with_its_options() -> None:
    text = page()
    for line in LISTED.read_text().splitlines():
        words = line.split()
        options = [word for word in words if word.startswith("--")]
        command = line.partition(" -")[0]
        section = text.partition(f" {command}\n")[2].partition("\n## ")[0]
        assert section, command
        assert [name for name in options if name not in section] == [], command


def test_the_contents_list_every_page_once() -> None:
    index = (DOCS / "index.md").read_text()
    lists = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    lines = [line for listed in lists for line in listed.splitlines()]
    entries = [line for line in lines if line and not line.startswith(":")]
    listed = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
    files = {str(file.relative_to(DOCS).with_suffix("")) for file in DOCS.rglob("*.md")}
    assert files > RECORDS
    made = {"self", "commands", "settings"}
    assert sorted(listed) == sorted(files - RECORDS - {"index"} | made)
