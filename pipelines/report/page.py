"""Writes the report: all evaluations of a workspace as one self-contained HTML page, and charts as files.

The page loads nothing: it includes styles, charts, small copies of images, and one script, which its policy
names by hash. The page is complete without it: the script sorts and filters tables and replays responses.
Evaluations that cannot be compared are in separate groups (`comparison.group`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vlmdistill.drafters.checkpoints.description import weights_hash
from vlmdistill.pipelines.bench.records import LABELS, Evaluation, Training, stages_run
from vlmdistill.pipelines.bench.statistics import (
    FEWEST,
    FEWEST_OF_KIND,
    Figures,
    SectionRates,
    figures,
)
from vlmdistill.pipelines.bench.unfinished import Interim, interim, measurements
from vlmdistill.pipelines.report import charts, seeds, selection, tables, trainings
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.chart_files import (
    PlotFormat,
    chart_file,
    report_template,
)
from vlmdistill.pipelines.report.charts import Chart, Curve
from vlmdistill.pipelines.report.comparison import Group, differing, group
from vlmdistill.pipelines.report.results import (
    DrafterResult,
    ServerResult,
    timed_label,
    without_clock,
)
from vlmdistill.pipelines.report.samples import OwnFiles, ShownPrompt, samples
from vlmdistill.pipelines.report.templates import script_hash, source
from vlmdistill.pipelines.report.trainings import TrainingRun
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, naming

if TYPE_CHECKING:
    from markupsafe import Markup

NAME_LENGTH = 120  # characters of a chart's file
NOT_IN_NAMES = re.compile(r"[^\w.@+]+")
NAME_END = re.compile(r"[@ ]")  # after a drafter's name, where facts follow
KINDS = ("speed", "against_tau", "pareto", "cycles", "prefills", "trees", "acceptance")
GENERATOR = b'<meta name="generator" content="vlmdistill">'
LENGTH_OF_HEAD = 1024  # bytes of a page, which have that
OTHER_WEIGHTS = "it was measured with other weights than the drafter has now"
SCRIPTS = ("report/replay.js", "report/report.js")

Milliseconds = dict[str, float]
"""By phase."""


@dataclass(frozen=True)
class GroupView:
    """The charts and samples of a group."""

    group: Group
    own: OwnFiles
    styles: Mapping[str, int]  # of each drafter, the same on the whole page
    differing: Sequence[str]
    """Conditions in which the groups of the page differ; none for a single group."""
    of: int  # groups of the page

    @cached_property
    def html(self) -> "Markup":
        """The section of the group."""
        from markupsafe import Markup

        html = report_template("group.html.jinja").render(
            view=self,
            fewest=FEWEST,
            fewest_of_kind=FEWEST_OF_KIND,
            answers=answers(self.group),
            seeds=seeds,
        )
        return Markup(html)

    @cached_property
    def charts(self) -> dict[str, list[Chart]]:
        """Its charts in the order of the page: one for each temperature that has their data."""
        styles, everything = self.styles, self.group.results
        drawn: dict[str, list[Chart | None]] = {kind: [] for kind in KINDS}
        for ranking in self.group.rankings:
            drawn["speed"].append(charts.speed(ranking, styles, everything))
            drawn["against_tau"].append(charts.against_tau(ranking, styles, everything))
            drawn["pareto"].append(charts.pareto(ranking, styles, everything))
            drawn["cycles"].append(charts.cycle(ranking, styles))
            drawn["prefills"].append(charts.prefill(ranking, styles))
            drawn["acceptance"].append(charts.acceptance(ranking, styles))
        drawn["trees"] += self._trees
        return {kind: _drawn(maybe) for kind, maybe in drawn.items()}

    @property
    def _trees(self) -> list[Chart]:
        """Decode speedup and tau by tree, a chart for each temperature and drafter with several trees."""
        alike: dict[tuple[float, str], list[DrafterResult]] = {}
        by_tau = sorted(self.group.results, key=lambda result: result.figures.tau)
        for result in by_tau:
            key = result.temperature, result.drafter
            alike.setdefault(key, []).append(result)
        return [
            charts.trees(results, self.styles)
            for _, results in sorted(alike.items())
            if len(results) > 1
        ]

    @property
    def budgets(self) -> list[tuple[DrafterResult, Milliseconds, Milliseconds]]:
        """The milliseconds of a cycle, and of the prefill."""
        budgets = []
        for result in self.group.results:
            cycle = charts.milliseconds(result, charts.CYCLE)
            prefill = charts.milliseconds(result, charts.PREFILL)
            budgets.append((result, cycle, prefill))
        return budgets

    @property
    def divided(self) -> list[tuple[str, dict[str, list[DrafterResult]]]]:
        """The results by kind and by dataset of the prompts, if there are several."""
        divided = [(name, self.group.by(label)) for name, label in LABELS.items()]
        return [(name, results) for name, results in divided if len(results) > 1]

    @property
    def parts(self) -> list[tuple[DrafterResult, SectionRates]]:
        """The parts of the responses, where there are several."""
        parts = []
        for result in self.group.results:
            parts += [(result, part) for part in result.figures.sections]
        return parts

    @property
    def seeds(self) -> list[list[str]]:
        """A row for each drafter with several seeds."""
        return seeds.seed_rows(seeds.over_seeds(self.group.results))

    @property
    def samples(self) -> list[ShownPrompt]:
        """The prompts whose responses were kept."""
        return samples(self.group, self.own)


@dataclass(frozen=True)
class DrafterOrigin:
    """How a drafter was trained: the figures that its run recorded, and an evaluation of it."""

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
        run = self.run
        if run is None:
            return _drawn([charts.learning(self.name, self._history)])
        loss = charts.losses(self.name, run.loss, run.stages)
        agreement = charts.learning(self.name, run.held_out, run.agreement, run.stages)
        return _drawn([loss, agreement])

    @property
    def _history(self) -> list[Curve]:
        """The agreement that its evaluation recorded, by drafted token."""
        curves: list[Curve] = []
        history = self.evaluation.training.history if self.evaluation else ()
        for measured in history:
            for token, share in enumerate(measured.held_out_agreement):
                if token == len(curves):
                    curves.append([])
                curves[token].append((measured.step, share))
        return curves


@dataclass(frozen=True)
class ReportPage:
    """The file of the page, and its contents."""

    page: Path
    title: str
    views: list[GroupView]
    served: list[ServerResult]  # by name
    runs: list[TrainingRun]
    interim: list[Interim]  # evaluations that are not finished

    @property
    def groups(self) -> list[Group]:
        """The evaluations, in groups that compare."""
        return [view.group for view in self.views]

    @property
    def trained(self) -> list[DrafterOrigin]:
        """The trainings of all evaluated drafters, and all others of the workspace, by name."""
        runs = {run.name: run for run in self.runs}
        trained: dict[tuple[str, Training], DrafterOrigin] = {}
        for evaluation in self._evaluations:
            name, training = evaluation.name, evaluation.training
            run = runs.get(NAME_END.split(name, maxsplit=1)[0])
            if run is not None and not run.made(training):
                run = None
            trained.setdefault((name, training), DrafterOrigin(name, run, evaluation))
        shown = {entry.run.name for entry in trained.values() if entry.run is not None}
        rest = [
            DrafterOrigin(run.name, run) for run in self.runs if run.name not in shown
        ]
        return sorted([*trained.values(), *rest], key=lambda entry: entry.name)

    @property
    def _evaluations(self) -> Iterator[Evaluation]:
        for each_group in self.groups:
            yield from each_group.evaluations

    @property
    def served_warnings(self) -> list[str]:
        """Problems of the figures of servers, with the drafters' names."""
        return [warning for result in self.served for warning in result.warnings]

    @property
    def html(self) -> str:
        """The page itself."""
        trained = self.trained
        under_way = [entry for entry in trained if entry.unfinished]
        finished = [entry for entry in trained if not entry.unfinished]
        evaluations = [(unfinished, _so_far(unfinished)) for unfinished in self.interim]
        script = "".join(map(source, SCRIPTS))
        return report_template("report.html.jinja").render(
            title=self.title,
            views=self.views,
            differing=differing(self.groups),
            interim=evaluations,
            under_way=under_way,
            trained=finished,
            stages_run=stages_run,
            served=self._served_rows,
            of_servers=tables.SERVED,
            served_warnings=self.served_warnings,
            script=script,
            script_hash=script_hash(script),
        )

    @property
    def _served_rows(self) -> list[tuple[str, list[str]]]:
        """The rows of servers, with when they were measured."""
        return [
            (result.evaluation.measured, row)
            for result in self.served
            for row in tables.served([result])
        ]


def _so_far(evaluation: Interim) -> list[tuple[str, float, Figures]]:
    """The figures of an unfinished evaluation, with drafter and temperature."""
    rows = []
    for (drafter, temperature), prompts in measurements(evaluation.decoded).items():
        rated = figures(prompts)
        doubts = [*rated.doubts]
        if reason := without_clock(rated):
            doubts.append(reason)
        rows.append((timed_label(drafter, rated, doubts), temperature, rated))
    return rows


def read(
    workspace: Workspace, out: Path | None = None, where: Sequence[str] = ()
) -> ReportPage:
    """The latest selected evaluations of a workspace for a page in `out`, by default `reports/index.html`.

    Raises:
        DataError: There are no evaluations, or a JSON file in their folder is not one; or `out` is in the
            workspace where `forget` does not look for pages.
        StoreError: `where` has a mistake.
    """
    if out is not None:
        _require_place(workspace, out)
    reports = workspace.reports
    selected = selection.latest(reports, workspace.model, where)
    served = sorted(selected.server_results, key=lambda result: result.evaluation.name)
    results = beside_present_weights(workspace, selected.drafter_results)
    return ReportPage(
        page=out or reports / "index.html",
        title=workspace.root.name,
        views=_views(workspace, results),
        served=served,
        runs=trainings.read(workspace),
        interim=interim(reports),
    )


def beside_present_weights(
    workspace: Workspace, results: Sequence[DrafterResult]
) -> list[DrafterResult]:
    """The results, the latest first, with a remark where a drafter has other weights now.

    Not where a later one under the same conditions tells what the drafter does now.
    """
    last: dict[tuple[object, ...], str] = {}  # when it was measured
    for result in results:
        last.setdefault(_measured_alike(result), result.evaluation.measured)
    names = {result.drafter for result in results}
    weights_of = {name: _present_weights(workspace, name) for name in names}
    remarked = []
    for result in results:
        measured, present = result.evaluation.weights, weights_of[result.drafter]
        is_last = result.evaluation.measured == last[_measured_alike(result)]
        if is_last and measured and present and measured != present:
            result = replace(result, remarks=(OTHER_WEIGHTS,))
        remarked.append(result)
    return remarked


def _measured_alike(result: DrafterResult) -> tuple[object, ...]:
    """Equal for results of a drafter that one group ranks at one temperature."""
    return result.drafter, result.temperature, *result.alike


def _present_weights(workspace: Workspace, name: str) -> str | None:
    """The hash of a drafter's weights; None if the workspace does not have it."""
    with suppress(DataError):  # a record may have any name
        return weights_hash(workspace.drafter(name))
    return None


def _views(workspace: Workspace, results: Sequence[DrafterResult]) -> list[GroupView]:
    """The results in groups that compare, with the style of each drafter's marks."""
    groups = group(results)
    names = {
        evaluation.name
        for each_group in groups
        for evaluation in each_group.evaluations
    }
    styles = {name: number for number, name in enumerate(sorted(names))}
    own = OwnFiles(workspace)
    return [
        GroupView(each_group, own, styles, differing(groups), len(groups))
        for each_group in groups
    ]


def make(
    workspace: Workspace, out: Path | None = None, where: Sequence[str] = ()
) -> ReportPage:
    """Read as `read` does, and write the page.

    For a page in the workspace, nothing that it shows is deleted meanwhile.
    """
    is_inside = out is None or _is_inside(workspace, out)
    with only_writer(workspace.reports, wait=True) if is_inside else nullcontext():
        report = read(workspace, out, where)
        write(report.html, report.page)
    return report


def is_report(file: Path) -> bool:
    """Whether an HTML file is such a page, by its first lines."""
    with naming(file), file.open("rb") as page:
        return GENERATOR in page.read(LENGTH_OF_HEAD)


def _require_place(workspace: Workspace, out: Path) -> None:
    """DataError if a report, of any format, would be in the workspace where `forget` looks for no pages."""
    if _is_inside(workspace, out) and not _is_page_of(workspace, out):
        raise DataError(
            f"--out {out}: in a workspace, reports are {workspace.reports}/NAME.html, where `forget` finds "
            f"what shows deleted prompts: write it there, or outside of {workspace.root}"
        )


def _is_inside(workspace: Workspace, file: Path) -> bool:
    return file.resolve().is_relative_to(workspace.root.resolve())


def _is_page_of(workspace: Workspace, file: Path) -> bool:
    """Whether a file is where the pages of a workspace are."""
    is_beside = file.resolve().parent == workspace.reports.resolve()
    return is_beside and file.suffix == ".html"


def write(content: str | bytes, file: Path) -> None:
    """Replace the file atomically; DataError if it cannot be written, or is no file."""
    if file.exists() and not file.is_file():
        raise DataError(f"{file} is not a file: name another")
    if isinstance(content, str):
        # A record, which is JSON, may contain a lone surrogate.
        content = content.encode(errors="replace")
    try:
        with atomic_write(file) as aside:
            aside.write_bytes(content)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}") from None


def plot(report: ReportPage, folder: Path, form: PlotFormat = "svg") -> None:
    """Write each chart of the page as a file that needs nothing else, named after its title.

    ModuleNotFoundError without the package that draws PDF and PNG.
    """
    count_of_names: Counter[str] = Counter()
    for prefix, chart in _every_chart(report):
        title = NOT_IN_NAMES.sub("-", chart.title)[:NAME_LENGTH].lower()
        name = prefix + title
        count_of_names[name] += 1
        count = count_of_names[name]
        suffix = f"~{count}" if count > 1 else ""
        file = folder / f"{name}{suffix}.{form}"
        write(chart_file(chart, form), file)


def _every_chart(report: ReportPage) -> Iterator[tuple[str, Chart]]:
    """The charts of the page, and how the names of their files begin."""
    for view in report.views:
        prefix = f"group-{view.group.number}-" if len(report.views) > 1 else ""
        for drawn in view.charts.values():
            for chart in drawn:
                yield prefix, chart
    for trained in report.trained:
        for chart in trained.charts:
            yield "", chart


def _drawn(maybe: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in maybe if chart is not None]
