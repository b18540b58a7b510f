"""A page of HTML, as a test reads it."""

from html.parser import HTMLParser
from pathlib import Path

from vlmdistill.pipelines.report.page import ReportPage, read, write
from vlmdistill.pipelines.workspace.workspace import Workspace

VOID = {"meta", "link", "img", "br", "input"}


def make(workspace: Workspace) -> ReportPage:
    """Write the page of a workspace."""
    found = read(workspace)
    write(found.html, found.page)
    return found


class Page(HTMLParser):
    """A parsed page: its elements, texts, and table rows by label; unbalanced tags fail."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.rows: list[dict[str, str]] = []
        self.open: list[str] = []
        self.label = ""
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.label = self.elements[-1][1].get(
            "data-label", "" if tag in ("th", "td") else self.label
        )
        if tag == "tr":
            self.rows.append({})
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.open), data))
        if "tr" in self.open:
            self.rows[-1][self.label] = self.rows[-1].get(self.label, "") + data

    @property
    def scripts(self) -> list[str]:
        """The text of each script."""
        return [data for tags, data in self.texts if tags[-1:] == ("script",)]

    @property
    def text(self) -> str:
        """All visible text, on one line."""
        visible = (
            data
            for tags, data in self.texts
            if tags[-1:] not in (("style",), ("script",))
        )
        return " ".join(" ".join(visible).split())

    def attributes(self, name: str, tag: str | None = None) -> list[str]:
        return [
            attrs[name]
            for kind, attrs in self.elements
            if name in attrs and tag in (None, kind)
        ]
