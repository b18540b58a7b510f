"""Writes the report: all evaluations of a workspace as one self-contained HTML page.

The page loads nothing: it includes styles, charts, and small copies of images. Evaluations that cannot be
compared are in separate groups (`comparison.gather`).
"""

import base64
import io
import math
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vlmdistill.pipelines.evaluation import served_records
from vlmdistill.pipelines.evaluation.comparison import DrafterResult, Group, differing, gather
from vlmdistill.pipelines.evaluation.records import Evaluation, ShownResponse
from vlmdistill.pipelines.evaluation.served_records import ServedEvaluation
from vlmdistill.pipelines.workspace import Workspace, atomic_write

IMAGE_SIDE = 320  # pixels of the longer side of an embedded image
WIDTH, HEIGHT = 400.0, 220.0  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 44.0, 386.0, 10.0, 180.0  # of its plot area
BAR = 40.0  # height of a bar with its label

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or bar of a chart: its values and their coordinates."""

    name: str
    style: int  # of color, marker and dashes
    values: list[float]
    points: list[Point]
    span: Point | None = None  # of a bar: the ends of its interval


@dataclass(frozen=True)
class Chart:
    """A chart in its own coordinates; a tick is a value and its coordinate."""

    series: list[Series]
    x_ticks: list[Point]
    y_ticks: list[Point]
    height: float


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with its images, and by temperature the response of each drafter, the fastest first."""

    prompt: str
    media: list[dict[str, str]]
    responses: dict[float, list[tuple[str, ShownResponse]]]


@dataclass(frozen=True)
class GroupView:
    """The charts and samples of a group."""

    group: Group
    styles: Mapping[str, int]  # of each drafter, the same on the whole page

    @property
    def acceptance(self) -> list[tuple[float, Chart]]:
        """Acceptance per position, a chart for each temperature."""
        charts = []
        for ranking in self.group.rankings:
            lines = {
                one.name: (self.styles[one.name], list(enumerate(one.figures.alpha, 1)))
                for one in ranking.results
                if one.figures.alpha
            }
            if lines:
                charts.append((ranking.temperature, _lines(lines)))
        return charts

    @property
    def speed(self) -> list[tuple[float, Chart]]:
        """Speedup (bar) and decode speedup (mark), a chart for each temperature, all on one scale."""
        most = max(1.0, *(max(_speeds(one)) for one in self.group.results)) * 1.05
        x = _scale(0, most, 2, WIDTH - 14)
        ticks = [(tick, x(tick)) for tick in sorted({1.0, *_ticks(0, most)})]
        charts = []
        for ranking in self.group.rankings:
            bars = []
            for number, one in enumerate(ranking.results):
                values = [one.figures.speedup, one.figures.decode_speedup]
                points = [(x(value), BAR * number) for value in values]
                found = one.figures.intervals.get("speedup")
                span = (x(found.low), x(found.high)) if found else None
                bars.append(Series(one.name, self.styles[one.name], values, points, span))
            charts.append((ranking.temperature, Chart(bars, ticks, [], BAR * len(bars))))
        return charts

    @property
    def samples(self) -> list[ShownPrompt]:
        """The prompts whose responses were kept."""
        shown: dict[str, ShownPrompt] = {}
        for one in self.group.results:
            for sample in one.measurement.shown:
                if sample.key not in shown:
                    media = [_embedded(Path(file)) for file in sample.files]
                    shown[sample.key] = ShownPrompt(sample.prompt, media, {})
                shown[sample.key].responses.setdefault(one.temperature, []).append((one.name, sample))
        return list(shown.values())

    @property
    def learning(self) -> list[tuple[Evaluation, Chart | None]]:
        """Each evaluation with its held-out agreement during training, a mark for each drafted token."""
        charts: list[tuple[Evaluation, Chart | None]] = []
        for one in sorted(self.group.evaluations, key=lambda one: one.name):
            points: dict[str, tuple[int, list[Point]]] = {}
            for entry in one.training.history:
                for ahead, share in enumerate(entry.held_out_agreement, 1):
                    points.setdefault(f"token {ahead}", (ahead - 1, []))[1].append((entry.step, share))
            charts.append((one, _lines(points) if points else None))
        return charts


@dataclass(frozen=True)
class ReportPage:
    """The file of the page, and what is on it."""

    page: Path
    groups: list[Group]
    served: list[ServedEvaluation]  # of servers, by name


def make(workspace: Workspace, out: Path | None = None) -> ReportPage:
    """Write the page of a workspace's evaluations to `out`, by default `reports/index.html`.

    DataError if there are none, or if a JSON file in their folder is not an evaluation.
    """
    groups = gather(workspace)
    served = [served_records.read(file) for file in sorted(workspace.reports.glob("served/*.json"))]
    report = ReportPage(out or workspace.reports / "index.html", groups, served)
    page = _page(workspace.root.name, groups, served)
    with atomic_write(report.page) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")  # JSON may contain a lone surrogate
    return report


def _page(title: str, groups: Sequence[Group], served: Sequence[ServedEvaluation]) -> str:
    from jinja2 import Environment, StrictUndefined

    names = sorted({one.name for group in groups for one in group.evaluations})
    styles = {name: number for number, name in enumerate(names)}
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    formats = {"fixed": "{:.2f}", "percent": "{:.0%}", "short": "{:g}", "grouped": "{:,.0f}"}
    environment.filters |= {name: form.format for name, form in formats.items()}
    template = resources.files("vlmdistill.pipelines.evaluation") / "report.html.jinja"
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        views=[GroupView(group, styles) for group in groups],
        differing=differing(groups),
        served=[(one.measured, line) for one in served for line in served_records.table([one])],
        columns=served_records.TABLE,
        plane={"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "bar": BAR},
    )


def _speeds(result: DrafterResult) -> list[float]:
    """All values that the speed chart shows of a result."""
    found = result.figures.intervals.get("speedup")
    upper = [found.high] if found else []
    return [result.figures.speedup, result.figures.decode_speedup, *upper]


def _embedded(path: Path) -> dict[str, str]:
    """Name and kind of a prompt's file, and for an image a small copy as a data URI."""
    from PIL import Image

    from vlmdistill.pipelines.media.images import BROKEN, upright

    if (mimetypes.guess_type(path.name)[0] or "").startswith("video/"):
        return {"name": path.name, "kind": "video"}
    try:
        with Image.open(path) as image:
            image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
            small = upright(image, "RGBA")
    except BROKEN:
        return {"name": path.name, "kind": "missing"}
    opaque = Image.new("RGB", small.size, "white")
    opaque.paste(small, mask=small.getchannel("A"))
    copies = []
    for kind in ("png", "jpeg"):  # drawings are smaller as PNG, photos as JPEG
        buffer = io.BytesIO()
        opaque.save(buffer, kind, optimize=True)
        copies.append((len(buffer.getvalue()), kind, base64.b64encode(buffer.getvalue()).decode()))
    _, kind, data = min(copies)
    return {"name": path.name, "kind": "image", "uri": f"data:image/{kind};base64,{data}"}


def _lines(lines: Mapping[str, tuple[int, Sequence[Point]]]) -> Chart:
    """A chart of shares over positions or steps; `lines` are style and points by name."""
    xs = [x for _, points in lines.values() for x, _ in points]
    across, down = _scale(min(xs), max(xs), LEFT + 10, RIGHT), _scale(0, 1, BOTTOM, TOP)
    series = [
        Series(name, style, [y for _, y in points], [(across(x), down(min(1, y))) for x, y in points])
        for name, (style, points) in lines.items()
    ]
    x_ticks = [(x, across(x)) for x in _ticks(min(xs), max(xs), least=1)]
    return Chart(series, x_ticks, [(y, down(y)) for y in (0, 0.25, 0.5, 0.75, 1)], HEIGHT)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Map low..high to start..end, in tenths; everything to the middle if low equals high."""
    if high <= low:
        return lambda value: (start + end) / 2
    return lambda value: round(start + (end - start) * (value - low) / (high - low), 1)


def _ticks(low: float, high: float, least: float = 0.1) -> list[float]:
    """Round numbers in low..high, at most about eight, at least `least` apart."""
    rough = max((high - low) / 8, least)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
