"""The report: all evaluations of a workspace as one page that stands alone.

The page loads nothing: styles and drawings are in it, and images as small copies. What does not compare
stands apart (`evaluations.gather`).
"""

import base64
import io
import math
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.evaluations import Evaluation, Group, differing, gather
from vlmdistill.pipelines.workspace import Workspace, written_aside

IMAGE_SIDE = 320  # pixels of the longer side of an embedded image
WIDTH, HEIGHT = 400.0, 220.0  # of a drawing
LEFT, RIGHT, TOP, BOTTOM = 44.0, 386.0, 10.0, 180.0  # of its plane
BAR = 40.0  # height of one bar with its label

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or bar of a drawing: its values, and where they are drawn."""

    name: str
    style: int  # which colour, marker and dashes
    values: list[float]
    points: list[Point]


@dataclass(frozen=True)
class Chart:
    """A drawing in its own coordinates; a tick is a value and where it stands."""

    series: list[Series]
    x_ticks: list[Point]
    y_ticks: list[Point]
    height: float


@dataclass(frozen=True)
class View:
    """What the page shows of a group."""

    group: Group
    styles: Mapping[str, int]  # of each drafter, the same on the whole page

    @property
    def acceptance(self) -> list[tuple[float, Chart]]:
        """Acceptance per position, a drawing for each temperature."""
        charts = []
        for temperature in sorted({row["temperature"] for row in self.group.rows}):
            lines = {
                row["name"]: (self.styles[row["name"]], list(enumerate(row["alpha"], 1)))
                for row in self.group.rows
                if row["temperature"] == temperature and row["alpha"]
            }
            if lines:
                charts.append((temperature, _lines(lines)))
        return charts

    @property
    def speed(self) -> list[tuple[float, Chart]]:
        """Speedup end to end, and of decoding alone: a bar and a mark each, all temperatures on one scale."""
        rows = self.group.rows
        most = max(1.0, *(row[kind] for row in rows for kind in ("speedup", "decode_speedup"))) * 1.05
        place = _scale(0, most, 2, WIDTH - 14)
        ticks = [(tick, place(tick)) for tick in sorted({1.0, *_ticks(0, most)})]
        charts: dict[float, list[Series]] = {}
        for row in rows:
            bars = charts.setdefault(row["temperature"], [])
            values = [row["speedup"], row["decode_speedup"]]
            points = [(place(value), BAR * len(bars)) for value in values]
            bars.append(Series(row["name"], self.styles[row["name"]], values, points))
        return [(heat, Chart(bars, ticks, [], BAR * len(bars))) for heat, bars in charts.items()]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The shown prompts with their images, and the answers of all drafters by temperature."""
        shown: dict[str, dict[str, Any]] = {}
        for row in self.group.rows:
            for sample in row["samples"]:
                if sample["key"] not in shown:
                    media = [_embedded(Path(file)) for file in sample["files"]]
                    shown[sample["key"]] = {"prompt": sample["prompt"], "media": media, "answers": {}}
                answers = shown[sample["key"]]["answers"].setdefault(row["temperature"], [])
                answers.append({"name": row["name"], "pieces": sample["pieces"], "tau": sample["tau"]})
        return list(shown.values())

    @property
    def learning(self) -> list[tuple[Evaluation, Chart | None]]:
        """Each evaluation with held-out agreement over its training, a line for each token ahead."""
        told = []
        for one in sorted(self.group.evaluations, key=lambda one: str(one["name"])):
            lines: dict[str, tuple[int, list[Point]]] = {}
            for entry in one["training"].get("history", []):
                for ahead, share in enumerate(entry["held_out_agreement"], 1):
                    lines.setdefault(f"token {ahead}", (ahead - 1, []))[1].append((entry["step"], share))
            told.append((one, _lines(lines) if lines else None))
        return told


@dataclass(frozen=True)
class Report:
    """The page that was written, and the groups that it shows."""

    page: Path
    groups: list[Group]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows without their samples, each with the conditions that it was measured under."""
        return [
            {
                **{name: value for name, value in row.items() if name != "samples"},
                "conditions": group.conditions,
            }
            for group in self.groups
            for row in group.rows
        ]


def make(workspace: Workspace, out: Path | None = None) -> Report:
    """Write the page of a workspace's evaluations to `out`, by default `reports/index.html`.

    DataError when there are none, or when a JSON file in their folder is not one of them.
    """
    report = Report(out or workspace.reports / "index.html", gather(workspace))
    page = _page(workspace.root.name, report.groups)
    with written_aside(report.page) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")  # JSON may hold half a character
    return report


def _page(title: str, groups: Sequence[Group]) -> str:
    from jinja2 import Environment, StrictUndefined

    names = sorted({row["name"] for group in groups for row in group.rows})
    styles = {name: number for number, name in enumerate(names)}
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["fixed"] = lambda value: f"{value:.2f}"
    environment.filters["percent"] = lambda value: f"{100 * value:.0f}%"
    environment.filters["short"] = lambda value: f"{value:g}"
    environment.filters["grouped"] = lambda value: f"{value:,.0f}"
    source = resources.files("vlmdistill.pipelines").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title,
        views=[View(group, styles) for group in groups],
        differing=differing(groups),
        plane={"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "bar": BAR},
    )


def _embedded(path: Path) -> dict[str, str]:
    """A file of a prompt: its name and kind, and of an image a small copy as a data URI."""
    from PIL import Image

    from vlmdistill.pipelines.pictures import BROKEN, upright

    if (mimetypes.guess_type(path.name)[0] or "").startswith("video/"):
        return {"name": path.name, "kind": "video"}
    try:
        with Image.open(path) as image:
            image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
            small = upright(image, "RGBA")
    except BROKEN:
        return {"name": path.name, "kind": "missing"}
    paper = Image.new("RGB", small.size, "white")
    paper.paste(small, mask=small.getchannel("A"))
    copies = []
    for kind in ("png", "jpeg"):  # drawings are smaller as the one, photographs as the other
        held = io.BytesIO()
        paper.save(held, kind, optimize=True)
        copies.append((len(held.getvalue()), kind, base64.b64encode(held.getvalue()).decode()))
    _, kind, data = min(copies)
    return {"name": path.name, "kind": "image", "uri": f"data:image/{kind};base64,{data}"}


def _lines(lines: Mapping[str, tuple[int, Sequence[Point]]]) -> Chart:
    """Shares over positions or steps: name -> style and points."""
    xs = [x for _, points in lines.values() for x, _ in points]
    across, down = _scale(min(xs), max(xs), LEFT + 10, RIGHT), _scale(0, 1, BOTTOM, TOP)
    series = [
        Series(name, style, [y for _, y in points], [(across(x), down(min(1, y))) for x, y in points])
        for name, (style, points) in lines.items()
    ]
    x_ticks = [(x, across(x)) for x in _ticks(min(xs), max(xs), least=1)]
    return Chart(series, x_ticks, [(y, down(y)) for y in (0, 0.25, 0.5, 0.75, 1)], HEIGHT)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Maps low..high to start..end, in tenths; everything to the middle when low is high."""
    if high <= low:
        return lambda value: (start + end) / 2
    return lambda value: round(start + (end - start) * (value - low) / (high - low), 1)


def _ticks(low: float, high: float, least: float = 0.1) -> list[float]:
    """Round numbers in low..high, about eight at most and `least` apart."""
    rough = max((high - low) / 8, least)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
