"""Small tables that a notebook shows of a value in the last line of a cell."""

from collections.abc import Iterable, Sequence
from html import escape


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in HTML; all cells are text, and the header may be empty."""
    lines = [_row("th", header)] if header else []
    lines += [_row("td", row) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[object]) -> str:
    texts = [f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells]
    return f"<tr>{''.join(texts)}</tr>"
