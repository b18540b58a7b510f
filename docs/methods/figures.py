"""Draw the figures of docs/papers.md: `python docs/methods/figures.py` reads figures.toml beside it.

A figure has two panels. A panel is a row of passes, a pass the name on its bar and its columns, a column the
cells that enter at one place, from top to bottom: `h4+e5` is the state h4 over the embedding e5, `-` a place
where nothing enters, `.` one that has an output alone. `*` asks for the output above a column, named after
its last cell or after what follows the star. An arrow hands the last output of a pass to the next: a hop.
"""

import re
import tomllib
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH, PANEL, GAP = 640, 313, 14
COLUMN, CELL, BREAK, EDGE = 36, 20, 16, 12
OUT, BAR, IN = 52, 84, 114  # where outputs, bars and entries begin
FEED = 80  # height of the part that an image is fed through
PRIME = "\N{PRIME}"
INDEX = re.compile(r"\b(lmh|mid|[a-z])(\d+)('?)")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
TINTS = {
    "text": ("e", "x"),
    "visual": ("v", "c", "glob"),
    "state": ("h", "mid", "lmh", "z"),
    "own": ("g", "w", "t", "n"),
    "plain": ("m", "s", ""),
}
STYLE = HERE / "figures.css"


def label(text: str) -> str:
    """Numbers after a cell's letters as subscripts, the mark of a guess as a prime."""
    return INDEX.sub(
        lambda cell: cell[1] + cell[2].translate(SUBSCRIPTS) + PRIME * len(cell[3]),
        escape(text, quote=False),
    )


def words(
    x: float, y: float, text: str, kind: str = "faint", anchor: str = "middle"
) -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{label(text)}</text>'


def box(
    x: float, y: float, width: float, height: float, kind: str, text: str = ""
) -> str:
    """A rectangle with its name in the middle."""
    shape = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
    small = " small" if len(text) > 4 and width < COLUMN else ""
    return shape + (
        words(x + width / 2, y + height / 2 + 4, text, "ink" + small) if text else ""
    )


def cell(x: float, y: float, height: float, name: str) -> str:
    """What enters or leaves a column, in the colour of its letters."""
    letters = name.rstrip("0123456789'")
    tint = next(tint for tint, known in TINTS.items() if letters in known)
    return box(x + 2, y, COLUMN - 4, height, tint, name.replace("z", "c"))


def path(kind: str, steps: str) -> str:
    """A line along SVG path commands."""
    return f'<path class="{kind}" d="{steps}"/>'


class Panel:
    """Half a figure: its shapes, gathered from left to right."""

    def __init__(self, spec: dict[str, Any], left: float, height: float) -> None:
        self.spec, self.left = spec, left
        self.x = left + EDGE
        self.edges: list[float] = []  # of the columns
        self.tall = tall(spec)
        self.shapes = [
            f'<rect class="panel" x="{left:g}" y="0" width="{PANEL}" height="{height:g}" rx="8"/>',
            words(left + EDGE, 19, spec["title"], "ink", "start"),
        ]
        handed = False
        for hop, (name, columns) in enumerate(spec["passes"]):
            handed = self.draw_pass(name, columns.split(), hop if handed else 0)
        if spec.get("more"):
            self.shapes.append(words(self.x - 8, BAR + 15, "…", "ink"))
        self.draw_places()
        foot = IN + self.tall + 22
        if "feed" in spec:
            self.draw_feed(foot, *spec["feed"])
            foot += FEED
        for line, text in enumerate(spec.get("note", ())):
            self.shapes.append(
                words(left + EDGE, foot + 14 + 15 * line, text, "faint", "start")
            )

    def draw_pass(self, name: str, columns: list[str], hop: int) -> bool:
        """A pass at the present place; whether it hands an output on."""
        begin = self.x
        for column in columns:
            self.draw_column(column, bool(name))
        if name:
            self.shapes.append(
                box(begin + 2, BAR, self.x - begin - 4, 22, "pass", name)
            )
        if hop:
            first = self.tall / (columns[0].count("+") + 1) / 2
            arrow = f"M{begin - BREAK - 2:g} {OUT + 10}h{BREAK / 2 + 2:g}V{IN + first:g}H{begin + 2:g}"
            self.shapes.append(path("hop", arrow))
            self.shapes.append(
                words(begin + COLUMN / 2, IN + self.tall + 17, f"hop {hop}")
            )
        self.x += BREAK
        return "*" in columns[-1]

    def draw_column(self, column: str, named: bool) -> None:
        """What enters at one place, and what comes out there."""
        inside, star, output = column.partition("*")
        middle, parts = self.x + COLUMN / 2, inside.split("+")
        if inside == "-":
            self.shapes.append(box(self.x + 2, IN, COLUMN - 4, self.tall, "none"))
        elif inside != ".":
            each = self.tall / len(parts)
            self.shapes += [
                cell(self.x, IN + row * each, each, part)
                for row, part in enumerate(parts)
            ]
            self.shapes += [path("line", f"M{middle:g} {IN}V{BAR + 22}")] * named
        if star:
            output = output or "g" + parts[-1].strip("abcdefghijklmnopqrstuvwxyz'")
            self.shapes += [
                path("line", f"M{middle:g} {BAR}V{OUT + 20}"),
                cell(self.x, OUT, 20, output),
            ]
            if output[0] == "g":
                token = f"x{int(output[1:]) + 1}" + "'" * self.spec.get(
                    "guesses", False
                )
                self.shapes.append(words(middle, OUT - 6, token))
        self.edges.append(self.x)
        self.x += COLUMN

    def draw_places(self) -> None:
        """What stands where, below the columns; an image that is fed stands below its own part."""
        for first, count, name in self.spec.get(
            "places", [[0, 1, "text"], [1, 3, "image"], [4, 1, "text"]]
        ):
            y = (
                IN
                + self.tall
                + 5
                + (76 if "feed" in self.spec and name == "image" else 0)
            )
            start, end = (
                self.edges[first] + 3,
                self.edges[first + count - 1] + COLUMN - 3,
            )
            self.shapes += [
                path("line", f"M{start:g} {y:g}H{end:g}"),
                words((start + end) / 2, y + 12, name),
            ]

    def draw_feed(self, y: float, name: str, cells: str, columns: list[int]) -> None:
        """What an image goes through, what that reads, and the columns that it feeds."""
        first, wide = self.edges[1], 3 * COLUMN - 4
        self.shapes.append(box(first + 2, y + 8, wide, 20, "pass", name))
        for place, one in enumerate(cells.split()):
            self.shapes.append(cell(first + place * COLUMN, y + 32, CELL, one))
        for column in columns:
            middle = self.edges[column] + COLUMN / 2
            above, beside = (
                f"M{middle:g} {y + 8:g}V{y - 20:g}",
                f"M{first + 2 + wide:g} {y + 18:g}H{middle:g}V{y - 2:g}",
            )
            self.shapes.append(path("feed", above if column < 4 else beside))


def tall(panel: dict[str, Any]) -> int:
    """The height of the tallest column's cells."""
    columns = " ".join(columns for _, columns in panel["passes"]).split()
    return CELL * max(column.partition("*")[0].count("+") + 1 for column in columns)


def figure(spec: dict[str, Any]) -> str:
    """Both panels of a method, as SVG."""
    panels = spec["panel"]
    height = max(
        IN + tall(one) + 34 + FEED * ("feed" in one) + 15 * len(one.get("note", ()))
        for one in panels
    )
    drawn = [
        Panel(one, number * (PANEL + GAP), height) for number, one in enumerate(panels)
    ]
    return frame(
        spec["title"],
        spec["text"],
        height,
        [shape for one in drawn for shape in one.shapes],
    )


def legend(spec: dict[str, Any]) -> str:
    """What the shapes stand for, as SVG."""
    shapes = [f'<rect class="panel" x="0" y="0" width="{WIDTH}" height="188" rx="8"/>']
    for number, (kind, text) in enumerate(spec["shapes"]):
        x, y = (EDGE, 330)[number % 2], 12 + 26 * (number // 2)
        if kind in ("hop", "feed"):
            shapes.append(path(kind, f"M{x} {y + 10}h30"))
        elif kind in ("none", "pass"):
            shapes.append(
                box(x + 2, y, COLUMN - 4, CELL, kind, "layer" if kind == "pass" else "")
            )
        else:
            shapes.append(cell(x, y, CELL, kind))
        shapes.append(words(x + 44, y + 14, text, "faint", "start"))
    for number, text in enumerate(spec["note"]):
        shapes.append(words(EDGE + 2, 158 + 16 * number, text, "faint", "start"))
    return frame(spec["title"], spec["text"], 188, shapes)


def frame(title: str, text: str, height: float, shapes: list[str]) -> str:
    """The shapes within an SVG that reads its colours from the page's scheme."""
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 8 4 0 8z"/></marker>'
        for name in ("hop", "feed")
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        'role="img" aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(text)}</desc>\n'
        f"<style>\n{STYLE.read_text()}</style>\n<defs>{markers}</defs>\n"
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write every figure beside this file."""
    for name, spec in tomllib.loads((HERE / "figures.toml").read_text()).items():
        (HERE / f"{name}.svg").write_text(
            legend(spec) if name == "legend" else figure(spec)
        )


if __name__ == "__main__":
    main()
