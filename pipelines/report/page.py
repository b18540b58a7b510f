"""Writes the report: all evaluations of a workspace as one self-contained HTML page, and charts as files.

The page loads nothing: it includes styles, charts, small copies of images, and one script, which its policy
names by hash. The page is complete without it: the script sorts and filters tables and replays responses.
Evaluations that cannot be compared are in separate groups (`comparison.group`).
"""

import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlmdistill.pipelines.bench.records import LABELS, Evaluation, Training, stages_run
from vlmdistill.pipelines.bench.statistics import (
    FEWEST,
    FEWEST_OF_KIND,
    SectionRates,
    figures,
)
from vlmdistill.pipelines.bench.unfinished import Interim, interim, measurements
from vlmdistill.pipelines.report import charts, selection, tables, trainings
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.charts import Chart
from vlmdistill.pipelines.report.comparison import Group, Ranking, differing, group
from vlmdistill.pipelines.report.results import DrafterResult, ServerResult
from vlmdistill.pipelines.report.samples import OwnFiles, ShownPrompt, samples
from vlmdistill.pipelines.report.templates import script_hash, source, templates
from vlmdistill.pipelines.report.trainings import TrainingRun
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

NAME_LENGTH = 120  # of a chart's file
FONT = "Vera"  # of PDF and PNG
PIXELS = 2.0  # of PNG, for each point of a PDF
PlotFormat = Literal["svg", "pdf", "png"]
NOT_IN_NAMES = re.compile(r"[^\w.@+]+")
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class GroupView:
    """The charts and samples of a group."""

    group: Group
    own: OwnFiles
    styles: Mapping[str, int]  # of each drafter, the same on the whole page
    differing: Sequence[
        str
    ]  # conditions in which the groups of the page differ; none for a single group
    of: int  # groups of the page

    @cached_property
    def html(self) -> "Markup":
        """The section of the group."""
        from markupsafe import Markup

        said = {
            "fewest": FEWEST,
            "fewest_of_kind": FEWEST_OF_KIND,
            "answers": answers(self.group),
        }
        return Markup(_template("group.html.jinja").render(view=self, **said))

    @cached_property
    def charts(self) -> dict[str, list[Chart]]:
        """Its charts in the order of the page: one for each temperature that has what they show."""
        styles, everything = self.styles, self.group.results
        kinds: dict[str, Callable[[Ranking], Chart | None]] = {
            "speed": lambda one: charts.speed(one, styles, everything),
            "against_tau": lambda one: charts.against_tau(one, styles, everything),
            "pareto": lambda one: charts.pareto(one, styles, everything),
            "cycles": lambda one: charts.cycle(one, styles),
            "prefills": lambda one: charts.prefill(one, styles),
        }
        drawn = {
            name: _found(map(draw, self.group.rankings)) for name, draw in kinds.items()
        }
        acceptance = _found(
            charts.acceptance(one, styles) for one in self.group.rankings
        )
        return {**drawn, "trees": self._trees, "acceptance": acceptance}

    @property
    def budgets(self) -> list[tuple[DrafterResult, dict[str, float], dict[str, float]]]:
        """The milliseconds of a cycle and of the prefill, by phase."""
        return [
            (
                one,
                charts.milliseconds(one, charts.CYCLE),
                charts.milliseconds(one, charts.PREFILL),
            )
            for one in self.group.results
            if one.figures.budget is not None
        ]

    @property
    def _trees(self) -> list[Chart]:
        """Decode speedup and tau by tree, a chart for each temperature and drafter with several trees."""
        found: dict[tuple[float, str], list[DrafterResult]] = {}
        for one in sorted(self.group.results, key=lambda one: one.figures.tau):
            found.setdefault((one.temperature, one.drafter), []).append(one)
        several = [found[key] for key in sorted(found) if len(found[key]) > 1]
        return [charts.trees(some, self.styles) for some in several]

    @property
    def divided(self) -> list[tuple[str, dict[str, list[DrafterResult]]]]:
        """The results by kind and by dataset of the prompts, if there are several."""
        divided = [(name, self.group.by(label)) for name, label in LABELS.items()]
        return [(name, results) for name, results in divided if len(results) > 1]

    @property
    def parts(self) -> list[tuple[DrafterResult, SectionRates]]:
        """The parts of the responses, where there are several."""
        return [
            (one, part) for one in self.group.results for part in one.figures.sections
        ]

    @property
    def samples(self) -> list[ShownPrompt]:
        """The prompts whose responses were kept."""
        return samples(self.group, self.own)


@dataclass(frozen=True)
class Trained:
    """How a drafter was trained: what its run recorded, and what an evaluation says of it."""

    name: str
    run: TrainingRun | None
    evaluation: Evaluation | None = None  # of the drafter that this run trained

    @property
    def unfinished(self) -> bool:
        """Whether its run is under way, or was interrupted."""
        return self.run is not None and not self.run.finished

    @property
    def charts(self) -> list[Chart]:
        """Its loss, and its agreement with the target."""
        if self.run is not None:
            run = self.run
            learned = charts.learning(
                self.name, run.held_out, run.agreement, run.stages
            )
            return _found([charts.losses(self.name, run.loss, run.stages), learned])
        history = self.evaluation.training.history if self.evaluation else ()
        longest = max((len(one.held_out_agreement) for one in history), default=0)
        curves = [
            [
                (one.step, one.held_out_agreement[at])
                for one in history
                if at < len(one.held_out_agreement)
            ]
            for at in range(longest)
        ]
        return _found([charts.learning(self.name, curves)])


@dataclass(frozen=True)
class ReportPage:
    """The file of the page, and what is on it."""

    page: Path
    title: str
    views: list[GroupView]
    served: list[ServerResult]  # by name
    runs: list[TrainingRun]
    interim: list[Interim]  # evaluations that are not finished
    live: bool = False  # it follows the workspace
    trouble: str = ""  # why there are no evaluations, or not the latest ones

    @property
    def groups(self) -> list[Group]:
        """The evaluations, in groups that compare."""
        return [view.group for view in self.views]

    @property
    def trained(self) -> list[Trained]:
        """The trainings of all evaluated drafters, and all others of the workspace, by name."""
        runs = {run.name: run for run in self.runs}
        found = dict[tuple[str, Training], Trained]()
        for one in (one for view in self.views for one in view.group.evaluations):
            run = runs.get(re.split(r"[@ ]", one.name, maxsplit=1)[0])
            mine = run if run is not None and run.made(one.training) else None
            found.setdefault((one.name, one.training), Trained(one.name, mine, one))
        shown = {one.run.name for one in found.values() if one.run is not None}
        rest = (Trained(run.name, run) for run in self.runs if run.name not in shown)
        return sorted([*found.values(), *rest], key=lambda one: one.name)

    @property
    def served_warnings(self) -> list[str]:
        """Problems of the figures of servers, with the drafters' names."""
        return [warning for one in self.served for warning in one.warnings]

    @property
    def script(self) -> str:
        """The script of the page."""
        names = ("replay.js", "report.js", *(["live.js"] if self.live else []))
        return "".join(source(f"report/{name}") for name in names)

    @property
    def html(self) -> str:
        """The page itself."""
        script = self.script
        under_way = [one for one in self.trained if one.unfinished]
        return _template("report.html.jinja").render(
            title=self.title,
            views=self.views,
            differing=differing(self.groups),
            trouble=self.trouble,
            live=self.live,
            interim=[
                (
                    one,
                    [
                        (*at, figures(some))
                        for at, some in measurements(one.decoded).items()
                    ],
                )
                for one in self.interim
            ],
            under_way=under_way,
            trained=[one for one in self.trained if not one.unfinished],
            stages_run=stages_run,
            served=[
                (one.evaluation.measured, row)
                for one in self.served
                for row in tables.served([one])
            ],
            of_servers=tables.SERVED,
            served_warnings=self.served_warnings,
            script=script,
            script_hash=script_hash(script),
        )


def read(
    workspace: Workspace, out: Path | None = None, where: Sequence[str] = ()
) -> ReportPage:
    """The latest selected evaluations of a workspace for a page in `out`, by default `reports/index.html`.

    DataError if there are none, or if a JSON file in their folder is not an evaluation; StoreError on a
    mistake in `where`.
    """
    found = of(workspace, *evaluated(workspace, where))
    return replace(found, page=out or found.page)


def make(
    workspace: Workspace, out: Path | None = None, where: Sequence[str] = ()
) -> ReportPage:
    """Read as `read` does, and write the page; in the workspace, what it shows is not deleted meanwhile.

    DataError if `out` is in the workspace where `forget` does not look for pages.
    """
    own = out is None or out.resolve().is_relative_to(workspace.root.resolve())
    if out is not None and own and not _is_page_of(workspace, out):
        raise DataError(
            f"--out {out}: in a workspace, pages are {workspace.reports}/NAME.html: `forget` removes those "
            "that show what is deleted"
        )
    with only_writer(workspace.reports, wait=True) if own else nullcontext():
        made = read(workspace, out, where)
        write(made.html, made.page)
    return made


def _is_page_of(workspace: Workspace, file: Path) -> bool:
    """Whether a file is where the pages of a workspace are."""
    return (
        file.resolve().parent == workspace.reports.resolve() and file.suffix == ".html"
    )


def of(
    workspace: Workspace, views: list[GroupView], served: list[ServerResult]
) -> ReportPage:
    """The page of these evaluations, and of what is under way."""
    file, runs = workspace.reports / "index.html", trainings.read(workspace)
    return ReportPage(
        file, workspace.root.name, views, served, runs, interim(workspace.reports)
    )


def evaluated(
    workspace: Workspace, where: Sequence[str] = ()
) -> tuple[list[GroupView], list[ServerResult]]:
    """The groups of the latest selected evaluations, and the results of servers; errors as of `read`."""
    found = selection.latest(workspace.reports, workspace.model, where)
    groups, own = group(found.own), OwnFiles(workspace)
    names = sorted({one.name for some in groups for one in some.evaluations})
    styles = {name: number for number, name in enumerate(names)}
    views = [
        GroupView(some, own, styles, differing(groups), len(groups)) for some in groups
    ]
    return views, sorted(found.served, key=lambda one: one.evaluation.name)


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
    names: list[str] = []
    several = len(report.groups) > 1
    drawn = [
        (f"group-{view.group.number}-" if several else "", one)
        for view in report.views
        for some in view.charts.values()
        for one in some
    ]
    for group_name, chart in (
        *drawn,
        *(("", chart) for one in report.trained for chart in one.charts),
    ):
        name = group_name + NOT_IN_NAMES.sub("-", chart.title)[:NAME_LENGTH].lower()
        names.append(name)
        same = names.count(name)
        svg = as_svg(chart)
        file = folder / (f"{name}~{same}.{form}" if same > 1 else f"{name}.{form}")
        write(svg if form == "svg" else _drawn(svg, form), file)


def as_svg(chart: charts.Chart) -> str:
    """A chart as a file that needs nothing else."""
    return NOT_IN_XML.sub(
        "", _template("chart.svg.jinja").render(chart=chart, styles=_light_styles())
    )


def _drawn(svg: str, form: PlotFormat) -> bytes:
    """An SVG file as PDF or PNG."""
    from reportlab.graphics import renderPDF
    from reportlab.graphics.shapes import STATE_DEFAULTS
    from reportlab.graphics.shapes import Group as Shapes
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont
    from reportlab.pdfgen.canvas import Canvas
    from svglib.svglib import svg2rlg

    pdfmetrics.registerFont(
        TTFont(FONT, f"{FONT}.ttf")
    )  # comes with reportlab; Helvetica is not embedded
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
    canvas = Canvas(
        pdf, (drawing.width, drawing.height), invariant=True, initialFontName=FONT
    )
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
    margins = {
        "left": charts.LEFT,
        "right": charts.RIGHT,
        "top": charts.TOP,
        "below": charts.BELOW,
    }
    found.filters["at"] = lambda seconds: time.strftime(
        "%Y-%m-%d %H:%M:%S", time.localtime(seconds)
    )
    found.globals["plane"] = {"width": charts.WIDTH, "bar": charts.BAR, **margins}
    return found.get_template(f"report/{name}")


def _found(maybe: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in maybe if chart is not None]
