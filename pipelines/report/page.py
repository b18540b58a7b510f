"""Writes the report: all evaluations of a workspace as one self-contained HTML page, and charts as files.

The page loads nothing: it includes styles, charts, small copies of images, and one script, which its policy
names by hash. The page is complete without it: the script sorts and filters tables and replays responses.
Evaluations that cannot be compared are in separate groups (`comparison.gather`).
"""

import base64
import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlmdistill.pipelines.bench import served_records
from vlmdistill.pipelines.bench.records import LABELS, Decoding, Evaluation, ShownResponse
from vlmdistill.pipelines.bench.served_records import ServedEvaluation
from vlmdistill.pipelines.bench.statistics import FEWEST, FEWEST_OF_KIND
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses.pieces import Piece
from vlmdistill.pipelines.media.urls import at_hand, is_url
from vlmdistill.pipelines.report import charts, selection
from vlmdistill.pipelines.report.charts import Chart
from vlmdistill.pipelines.report.comparison import DrafterResult, Group, differing, group
from vlmdistill.pipelines.report.templates import script_hash, source, templates
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

IMAGE_SIDE = 320  # pixels of the longer side of an embedded image
NAME_LENGTH = 120  # of a chart's file
FONT = "Vera"  # of PDF and PNG
PIXELS = 2.0  # of PNG, for each point of a PDF
PlotFormat = Literal["svg", "pdf", "png"]
NOT_IN_NAMES = re.compile(r"[^\w.@+]+")
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Playback:
    """A response with the time of each piece, and the counts and times of its decoding."""

    pieces: tuple[Piece, ...]
    decoding: Decoding


@dataclass(frozen=True)
class Replay:
    """A drafter's response, and the plain one that was measured beside it."""

    name: str
    temperature: float
    drafted: Playback
    plain: Playback


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with its images, and by temperature the response of each drafter, the fastest first."""

    prompt: str
    media: list[dict[str, str]]
    responses: dict[float, list[tuple[str, ShownResponse]]] = field(default_factory=dict)
    replays: list[Replay] = field(default_factory=list)  # of the responses whose times were recorded

    @property
    def plains(self) -> list[Playback]:
        """The plain responses of its replays: drafters that were measured together have the same one."""
        return list(dict.fromkeys(one.plain for one in self.replays))


@dataclass(frozen=True)
class OwnFiles:
    """The files that a page may show: below the workspace, or media of its prompts.

    A record may come from a stranger, and name any file of this machine or bucket of its user.
    """

    workspace: Workspace

    def __contains__(self, file: str) -> bool:
        if not is_url(file) and Path(file).resolve().is_relative_to(self.workspace.root.resolve()):
            return True
        return file in self._media

    @cached_property
    def _media(self) -> set[str]:
        sets = sorted((self.workspace.root / "benchmarks").glob("*.parquet"))
        media: set[str] = set()
        for file in (self.workspace.prompts, *sets):
            with contextlib.suppress(DataError):  # no held-out prompts
                media.update(
                    path for prompt in prompt_table.load(file, split="eval") for path in prompt.files
                )
        return media


@dataclass(frozen=True)
class GroupView:
    """The charts and samples of a group."""

    group: Group
    own: OwnFiles
    styles: Mapping[str, int]  # of each drafter, the same on the whole page

    @property
    def speed(self) -> list[Chart]:
        """Speedup and decode speedup, a chart for each temperature."""
        return [charts.speed(one, self.styles, self.group.results) for one in self.group.rankings]

    @property
    def against_tau(self) -> list[Chart]:
        """Decode speedup over tau, a chart for each temperature."""
        everything = self.group.results
        return _found(charts.against_tau(one, self.styles, everything) for one in self.group.rankings)

    @property
    def pareto(self) -> list[Chart]:
        """Speedup over memory, a chart for each temperature."""
        everything = self.group.results
        return _found(charts.pareto(one, self.styles, everything) for one in self.group.rankings)

    @property
    def cycles(self) -> list[Chart]:
        """The milliseconds of a cycle, a chart for each temperature."""
        return _found(charts.cycle(one, self.styles) for one in self.group.rankings)

    @property
    def prefills(self) -> list[Chart]:
        """The milliseconds of the prefill, a chart for each temperature."""
        return _found(charts.prefill(one, self.styles) for one in self.group.rankings)

    @property
    def budgets(self) -> list[tuple[DrafterResult, dict[str, float], dict[str, float]]]:
        """The milliseconds of a cycle and of the prefill, by phase."""
        return [
            (one, charts.milliseconds(one, charts.CYCLE), charts.milliseconds(one, charts.PREFILL))
            for one in self.group.results
            if one.figures.budget is not None
        ]

    @property
    def trees(self) -> list[Chart]:
        """Decode speedup and tau by tree, a chart for each temperature and drafter with several trees."""
        found: dict[tuple[float, str], list[DrafterResult]] = {}
        for one in sorted(self.group.results, key=lambda one: one.figures.tau):
            found.setdefault((one.temperature, one.name.partition("@")[0]), []).append(one)
        several = [found[key] for key in sorted(found) if len(found[key]) > 1]
        return [charts.trees(some, self.styles) for some in several]

    @property
    def acceptance(self) -> list[Chart]:
        """Acceptance per position, a chart for each temperature."""
        return _found(charts.acceptance(one, self.styles) for one in self.group.rankings)

    @property
    def divided(self) -> list[tuple[str, dict[str, list[DrafterResult]]]]:
        """The results by kind and by dataset of the prompts, if there are several."""
        divided = [(name, self.group.by(label)) for name, label in LABELS.items()]
        return [(name, results) for name, results in divided if len(results) > 1]

    @property
    def charts(self) -> list[Chart]:
        """All charts, in the order of the page."""
        drawn = [*self.speed, *self.against_tau, *self.pareto, *self.cycles, *self.prefills, *self.trees]
        return [*drawn, *self.acceptance, *_found(chart for _, chart in self.learning)]

    @property
    def samples(self) -> list[ShownPrompt]:
        """The prompts whose responses were kept."""
        shown: dict[str, ShownPrompt] = {}
        for one in self.group.results:
            measured = {prompt.key: prompt for prompt in one.measurement.prompts}
            for sample in one.measurement.shown:
                if sample.key not in shown:
                    shown[sample.key] = ShownPrompt(
                        sample.prompt, [_embedded(file, self.own) for file in sample.files]
                    )
                prompt, counts = shown[sample.key], measured.get(sample.key)
                prompt.responses.setdefault(one.temperature, []).append((one.name, sample))
                if counts is not None and _timed(sample.pieces) and _timed(sample.plain):
                    drafted = Playback(sample.pieces, counts.drafted)
                    plain = Playback(sample.plain, counts.plain)
                    prompt.replays.append(Replay(one.name, one.temperature, drafted, plain))
        return list(shown.values())

    @property
    def learning(self) -> list[tuple[Evaluation, Chart | None]]:
        """Each evaluation with its held-out agreement during training."""
        trained = {(one.name, one.training): one for one in self.group.evaluations}
        return [(one, charts.learning(one)) for one in sorted(trained.values(), key=lambda one: one.name)]


@dataclass(frozen=True)
class ReportPage:
    """The file of the page, and what is on it."""

    page: Path
    title: str
    groups: list[Group]
    served: list[ServedEvaluation]  # of servers, by name
    own: OwnFiles

    @property
    def views(self) -> list[GroupView]:
        """The charts and samples of each group."""
        names = sorted({one.name for group in self.groups for one in group.evaluations})
        styles = {name: number for number, name in enumerate(names)}
        return [GroupView(group, self.own, styles) for group in self.groups]

    @property
    def html(self) -> str:
        """The page itself."""
        template = _template("report.html.jinja")
        script = "".join(source(f"report/{name}") for name in ("replay.js", "report.js"))
        return template.render(
            title=self.title,
            views=self.views,
            differing=differing(self.groups),
            served=[(one.measured, line) for one in self.served for line in served_records.table([one])],
            columns=served_records.TABLE,
            fewest=FEWEST,
            fewest_of_kind=FEWEST_OF_KIND,
            script=script,
            script_hash=script_hash(script),
        )


def read(workspace: Workspace, out: Path | None = None, where: Sequence[str] = ()) -> ReportPage:
    """The latest selected evaluations of a workspace for a page in `out`, by default `reports/index.html`.

    DataError if there are none, or if a JSON file in their folder is not an evaluation; StoreError on a
    mistake in `where`.
    """
    found = selection.latest(workspace.reports, workspace.model, where)
    return ReportPage(
        out or workspace.reports / "index.html",
        workspace.root.name,
        group(found.own),
        found.servers,
        OwnFiles(workspace),
    )


def make(workspace: Workspace, out: Path | None = None) -> ReportPage:
    """Read a workspace's evaluations and write their page."""
    report = read(workspace, out)
    write(report.html, report.page)
    return report


def write(content: str | bytes, file: Path) -> None:
    """Replace the file atomically; DataError on what is no file."""
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is not a file: name another")
    with atomic_write(file) as aside:
        text = content.encode(errors="replace") if isinstance(content, str) else content
        aside.write_bytes(text)  # JSON may contain a lone surrogate


def plot(report: ReportPage, folder: Path, form: PlotFormat = "svg") -> None:
    """Write each chart of the page as a file that needs nothing else, named after its title.

    PDF and PNG are the SVG drawn by svglib, with embedded fonts; ModuleNotFoundError without it.
    """
    template, styles = _template("chart.svg.jinja"), _light_styles()
    names: list[str] = []
    for view in report.views:
        for chart in view.charts:
            name = NOT_IN_NAMES.sub("-", chart.title)[:NAME_LENGTH].lower()
            if len(report.groups) > 1:
                name = f"group-{view.group.number}-{name}"
            names.append(name)
            same = names.count(name)
            svg = NOT_IN_XML.sub("", template.render(chart=chart, styles=styles))
            file = folder / (f"{name}~{same}.{form}" if same > 1 else f"{name}.{form}")
            write(svg if form == "svg" else _drawn(svg, form), file)


def _drawn(svg: str, form: PlotFormat) -> bytes:
    """An SVG file as PDF or PNG."""
    from reportlab.graphics import renderPDF
    from reportlab.graphics.shapes import STATE_DEFAULTS
    from reportlab.graphics.shapes import Group as Shapes
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont
    from reportlab.pdfgen.canvas import Canvas
    from svglib.svglib import svg2rlg

    pdfmetrics.registerFont(TTFont(FONT, f"{FONT}.ttf"))  # comes with reportlab; Helvetica is not embedded
    STATE_DEFAULTS["fontName"] = FONT

    def shapes(group: Shapes) -> Iterator[Any]:
        for shape in group.contents:
            yield shape
            yield from shapes(shape) if isinstance(shape, Shapes) else ()

    drawing = svg2rlg(io.BytesIO(svg.encode()))
    for shape in shapes(drawing):
        if hasattr(shape, "fontName"):
            shape.fontName = FONT
    pdf = io.BytesIO()
    canvas = Canvas(pdf, (drawing.width, drawing.height), invariant=True, initialFontName=FONT)
    renderPDF.draw(drawing, canvas, 0, 0)
    canvas.save()
    if form == "pdf":
        return pdf.getvalue()
    from pypdfium2 import PdfDocument

    png = io.BytesIO()
    PdfDocument(pdf)[0].render(scale=PIXELS).to_pil().save(png, "png", optimize=True)
    return png.getvalue()


def _light_styles() -> str:
    """The styles of charts on light paper, with plain colors: many programs know no variables."""
    page, drawn = (source(f"report/{name}") for name in ("page.css", "charts.css"))
    light = dict(re.findall(r"--([\w-]+): (#\w+)", page.partition("@media")[0]))
    return re.sub(r"var\(--([\w-]+)\)", lambda found: light[found[1]], drawn)


def _template(name: str) -> "Template":
    found = templates()
    margins = {"left": charts.LEFT, "right": charts.RIGHT, "top": charts.TOP, "below": charts.BELOW}
    found.globals["plane"] = {"width": charts.WIDTH, "bar": charts.BAR, **margins}
    return found.get_template(f"report/{name}")


def _timed(pieces: Sequence[Piece]) -> bool:
    return bool(pieces) and all(piece.seconds is not None for piece in pieces)


def _found(maybe: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in maybe if chart is not None]


def _embedded(file: str, own: OwnFiles) -> dict[str, str]:
    """Name and kind of a prompt's file, and for an image a small copy as a data URI."""
    from PIL import Image

    from vlmdistill.pipelines.media.images import MediaError, decoding, kind_of, open_image, upright

    path = Path(file)
    if kind_of(path.name) == "video":
        return {"name": path.name, "kind": "video"}
    try:
        local = at_hand(file) if file in own else None
        if local is not None and local.is_dir():
            return {"name": path.name, "kind": "video"}
        if local is None or not local.is_file():  # a FIFO would never end
            return {"name": path.name, "kind": "missing"}
        with open_image(local) as image:
            with decoding():
                image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
            small = upright(image, "RGBA")
    except (MediaError, OSError):
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
