"""The charts of the report in coordinates, which `charts.html.jinja` draws."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from vlmdistill.pipelines.bench.statistics import Rate
from vlmdistill.pipelines.report.comparison import Ranking
from vlmdistill.pipelines.report.results import DrafterResult

WIDTH, HEIGHT, SQUARE = (
    400.0,
    220.0,
    300.0,
)  # of a chart, and the height of one with equal axes
LEFT, RIGHT, TOP, BELOW = 44.0, 386.0, 10.0, 40.0  # the margins of its plot area
BAR = 40.0  # height of a bar with its label

CYCLE = ("draft", "verify", "accept", "other")
PREFILL = ("vision", "prefill", "draft_prefill")

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line, bar or mark of a chart: its values and their coordinates."""

    name: str
    style: int  # of color, marker and dashes
    values: list[float]
    points: list[Point]
    spans: tuple[tuple[Point, Point], ...] = ()  # intervals, and other thin lines
    note: str = ""  # its values in words
    drawn: Literal["marks", "line", "both"] = "both"  # of lines


@dataclass(frozen=True)
class Chart:
    """A chart in its own coordinates; a tick is a value and its coordinate."""

    kind: Literal["lines", "bars", "stack", "scatter"]
    title: str
    series: list[Series]
    x_ticks: list[Point]
    y_ticks: list[Point]
    height: float
    across: str = ""
    up: str = ""
    line: tuple[Point, ...] = ()  # of a scatter: what its marks are judged by
    legend: tuple[str, ...] = ()  # of a stack: what its parts are
    key: str = ""  # what its marks are, for a chart without the page's text
    parts: tuple[
        tuple[str, float], ...
    ] = ()  # of the axis across: their names, and where each begins

    @property
    def named(self) -> list[Series]:
        """The series that its legend names: one for each style."""
        found: dict[int, Series] = {}
        for one in self.series:
            found.setdefault(one.style, one)
        return [*found.values()]

    @property
    def label(self) -> str:
        """The chart in words, for those who do not see it."""
        form = "{:.0%}" if self.kind == "lines" and not self.up else "{:.2f}"
        said = []
        for one in self.series:
            values = [form.format(value) for value in one.values]
            said.append(
                f"{one.name}: "
                + (
                    f"{values[0]} to {values[-1]}"
                    if one.drawn == "line"
                    else " ".join(values)
                )
            )
        return f"{self.title}. {'. '.join(said)}."


@dataclass(frozen=True)
class Line:
    """What one line of a chart is to show."""

    name: str
    style: int
    points: Sequence[Point]
    drawn: Literal["marks", "line", "both"] = "both"


def acceptance(ranking: Ranking, styles: Mapping[str, int]) -> Chart | None:
    """Acceptance per position; None if nothing was drafted."""
    lines = [
        Line(one.name, styles[one.name], list(enumerate(one.figures.alpha, 1)))
        for one in ranking.results
        if one.figures.alpha
    ]
    title = f"Acceptance per position at temperature {ranking.temperature:g}"
    return curves(title, "position of the drafted token", lines) if lines else None


def learning(
    name: str,
    held_out: Sequence[Sequence[Point]],
    batches: Sequence[Sequence[Point]] = (),
    stages: Mapping[str, float] = MappingProxyType({}),
) -> Chart | None:
    """Agreement with the target over the steps of a training, by drafted token; None if there is none.

    Marks are measurements on `held_out` samples, curves are of `batches`; `stages` begin at those steps.
    """
    lines = [
        Line(f"token {at + 1}", at, points, "marks")
        for at, points in enumerate(held_out)
        if points
    ]
    lines += [
        Line(f"token {at + 1} of batches", at, points, "line")
        for at, points in enumerate(batches)
        if points
    ]
    what = "Agreement" if batches else "Held-out agreement"
    title = f"{what} of {name} during training"
    key = "marks: held-out samples; lines: batches" if batches else ""
    return (
        curves(title, "training steps", lines, stages=stages, key=key)
        if lines
        else None
    )


def losses(name: str, points: Sequence[Point], stages: Mapping[str, float]) -> Chart:
    """The loss over the steps of a training."""
    line = Line("loss", 0, points, "line")
    return curves(
        f"Loss of {name} during training",
        "training steps",
        [line],
        up="loss",
        stages=stages,
    )


def curves(
    title: str,
    across: str,
    lines: Sequence[Line],
    up: str = "",
    stages: Mapping[str, float] = MappingProxyType({}),
    key: str = "",
) -> Chart:
    """A chart of values over what `across` names: of shares, or of what `up` names.

    `stages` begin at those places.
    """
    xs, ys = ([value[at] for line in lines for value in line.points] for at in (0, 1))
    most = 1.05 * max(1e-9, *ys) if up else 1.0
    x_of, y_of = (
        _scale(min(xs), max(xs), LEFT + 10, RIGHT),
        _scale(0, most, HEIGHT - BELOW, TOP),
    )
    series = [
        Series(
            line.name,
            line.style,
            [y for _, y in line.points],
            [(x_of(x), y_of(max(0, min(most, y)))) for x, y in line.points],
            drawn=line.drawn,
        )
        for line in lines
    ]
    x_ticks = [(x, x_of(x)) for x in _ticks(min(xs), max(xs), least=1)]
    y_ticks = [
        (y, y_of(y))
        for y in (_ticks(0, most, least=1e-3) if up else (0, 0.25, 0.5, 0.75, 1))
    ]
    parts = tuple(
        (name, x_of(x)) for name, x in stages.items() if min(xs) < x <= max(xs)
    )
    return Chart(
        "lines",
        title,
        series,
        x_ticks,
        y_ticks,
        HEIGHT,
        across,
        up,
        key=key,
        parts=parts,
    )


def speed(
    ranking: Ranking, styles: Mapping[str, int], everything: Sequence[DrafterResult]
) -> Chart:
    """Speedup (bar) and decode speedup (mark), on one scale for `everything`."""
    title = f"Speedup against plain decoding at temperature {ranking.temperature:g}"
    return _bars(
        title, ranking.results, styles, "speedup", "decode_speedup", everything
    )


def trees(results: Sequence[DrafterResult], styles: Mapping[str, int]) -> Chart:
    """Decode speedup (bar) and tau (mark) of one drafter by its trees."""
    name = results[0].drafter
    title = f"Decode speedup and tau of {name} by tree at temperature {results[0].temperature:g}"
    return _bars(title, results, styles, "decode_speedup", "tau", results)


def cycle(ranking: Ranking, styles: Mapping[str, int]) -> Chart | None:
    """The milliseconds of a cycle by phase, beside a step of plain decoding; None if none was measured."""
    title = f"Milliseconds of a cycle at temperature {ranking.temperature:g}"
    return _stack(title, ranking, styles, CYCLE)


def prefill(ranking: Ranking, styles: Mapping[str, int]) -> Chart | None:
    """The milliseconds of a response before its first cycle by phase; None if none was measured."""
    title = f"Milliseconds of the prefill at temperature {ranking.temperature:g}"
    return _stack(title, ranking, styles, PREFILL)


def milliseconds(result: DrafterResult, phases: Sequence[str]) -> dict[str, float]:
    """The time of each phase of a cycle, or of a response's prefill."""
    found = result.figures
    count = max(1, found.calls if phases == CYCLE else found.prompts)
    spent = {phase: max(0.0, getattr(found.budget, phase)) for phase in phases}
    return {
        phase.replace("_", " "): 1e3 * seconds / count
        for phase, seconds in spent.items()
    }


def against_tau(
    ranking: Ranking, styles: Mapping[str, int], everything: Sequence[DrafterResult]
) -> Chart | None:
    """Decode speedup over tau, with the line where they are equal, on one scale for `everything`."""
    shown = [one for one in ranking.results if one.figures.calls]
    if not shown:
        return None
    most = 1.05 * max(
        2.0, *(_most(one, ("tau", "decode_speedup")) for one in everything)
    )
    x, y = _scale(0, most, LEFT, RIGHT), _scale(0, most, SQUARE - BELOW, TOP)
    series = []
    for one in shown:
        found, within = one.figures, one.figures.intervals
        tau, rate = x(found.tau), y(found.decode_speedup)
        values, points = [found.tau, found.decode_speedup], [(tau, rate)]
        note = f"tau {found.tau:.2f}, decode speedup {found.decode_speedup:.2f}"
        spans = []
        if within:
            spans.append(((x(within["tau"].low), rate), (x(within["tau"].high), rate)))
            spans.append(
                (
                    (tau, y(within["decode_speedup"].low)),
                    (tau, y(within["decode_speedup"].high)),
                )
            )
        if found.budget is not None:
            values.append(found.budget.ideal)
            points.append((tau, y(found.budget.ideal)))
            note += f", ideal {found.budget.ideal:.2f}"
        series.append(
            Series(one.name, styles[one.name], values, points, tuple(spans), note)
        )
    ticks = _ticks(0, most)
    return Chart(
        "scatter",
        f"Decode speedup against tau at temperature {ranking.temperature:g}",
        series,
        [(tick, x(tick)) for tick in ticks],
        [(tick, y(tick)) for tick in ticks],
        SQUARE,
        across="tau",
        up="decode speedup",
        line=((x(0), y(0)), (x(ticks[-1]), y(ticks[-1]))),
        key="dashed: drafting and verifying for free; crossbar: verifying as fast as a plain step",
    )


def pareto(
    ranking: Ranking, styles: Mapping[str, int], everything: Sequence[DrafterResult]
) -> Chart | None:
    """Speedup over the memory of the drafters' weights, with the front of those that none beats in both.

    The front begins with plain decoding. None if fewer than two drafters have a memory that is known.
    """
    shown = {
        one.name: memory
        for one in ranking.results
        if (memory := _megabytes(one)) is not None
    }
    if len(shown) < 2:
        return None
    largest = 1.05 * max(1e-3, *(_megabytes(one) or 0 for one in everything))
    most = 1.05 * max(1.0, *(_most(one, ("speedup",)) for one in everything))
    x, y = _scale(0, largest, LEFT, RIGHT), _scale(0, most, SQUARE - BELOW, TOP)
    series, best, corners = [], 1.0, [(0.0, 1.0)]
    for one in sorted(
        ranking.ranked, key=lambda one: (shown.get(one.name, 0), -one.figures.speedup)
    ):
        if one.name in shown and one.figures.speedup > best:
            corners += [(shown[one.name], best), (shown[one.name], one.figures.speedup)]
            best = one.figures.speedup
    for one in (one for one in ranking.results if one.name in shown):
        memory, found = shown[one.name], one.figures.intervals.get("speedup")
        spans = (
            (((x(memory), y(found.low)), (x(memory), y(found.high))),) if found else ()
        )
        note = f"{memory:.2f} MB, speedup {one.figures.speedup:.2f}"
        values, at = [memory, one.figures.speedup], (x(memory), y(one.figures.speedup))
        series.append(Series(one.name, styles[one.name], values, [at], spans, note))
    return Chart(
        "scatter",
        f"Speedup against memory at temperature {ranking.temperature:g}",
        series,
        [(tick, x(tick)) for tick in _ticks(0, largest, least=1e-4)],
        [(tick, y(tick)) for tick in _ticks(0, most)],
        SQUARE,
        across="weights of the drafter, MB",
        up="speedup",
        line=tuple(
            (x(memory), y(speedup)) for memory, speedup in [*corners, (largest, best)]
        ),
        key="dashed: the best speedup with so much memory; bars: 95% intervals",
    )


def _megabytes(result: DrafterResult) -> float | None:
    """The weights of a drafter in the dtype of the evaluation; None for one that is not known."""
    bits = re.search(r"float(\d+)$", result.evaluation.dtype)
    return result.evaluation.parameters * int(bits[1]) / 8e6 if bits else None


def _bars(
    title: str,
    results: Sequence[DrafterResult],
    styles: Mapping[str, int],
    bar: Rate,
    mark: Rate,
    everything: Sequence[DrafterResult],
) -> Chart:
    """A bar with its interval and a mark for each result, on one scale for `everything`."""
    most = 1.05 * max(1.0, *(_most(one, (bar, mark)) for one in everything))
    x = _scale(0, most, 2, WIDTH - 14)
    series = []
    for number, one in enumerate(results):
        values = [getattr(one.figures, bar), getattr(one.figures, mark)]
        top, found = BAR * number, one.figures.intervals.get(bar)
        spans = (
            (((x(found.low), top + 35), (x(found.high), top + 35)),) if found else ()
        )
        note = f"{values[0]:.2f} ({values[1]:.2f})"
        points = [(x(value), top) for value in values]
        series.append(Series(one.name, styles[one.name], values, points, spans, note))
    ticks = [(tick, x(tick)) for tick in sorted({1.0, *_ticks(0, most)})]
    key = f"bar: {bar}, 95% interval; diamond, and in parentheses: {mark}".replace(
        "_", " "
    )
    return Chart("bars", title, series, ticks, [], BAR * len(series) + 30, key=key)


def _stack(
    title: str, ranking: Ranking, styles: Mapping[str, int], phases: tuple[str, ...]
) -> Chart | None:
    """A bar for each drafter, of the milliseconds of each phase; a cycle has a line at a plain step."""
    spent = {
        one.name: (
            list(milliseconds(one, phases).values()),
            1e3 * one.figures.budget.plain_step,
        )
        for one in ranking.results
        if one.figures.budget is not None and one.figures.calls
    }
    if not spent:
        return None
    steps = [step for _, step in spent.values()] if phases == CYCLE else []
    most = max(1e-3, *(sum(values) for values, _ in spent.values()), *steps) * 1.05
    x = _scale(0, most, 2, WIDTH - 14)
    series = []
    for number, (name, (values, step)) in enumerate(spent.items()):
        top = BAR * number
        ends = [x(sum(values[:end])) for end in range(len(values) + 1)]
        line = (((x(step), top + 17), (x(step), top + 36)),) if steps else ()
        series.append(
            Series(
                name,
                styles[name],
                values,
                list(pairwise(ends)),
                line,
                f"{sum(values):.2f} ms",
            )
        )
    ticks = [(tick, x(tick)) for tick in _ticks(0, most, least=1e-4)]
    legend = tuple(phase.replace("_", " ") for phase in phases)
    key = "line: a step of plain decoding" if steps else ""
    return Chart(
        "stack",
        title,
        series,
        ticks,
        [],
        BAR * len(series) + 30,
        legend=legend,
        key=key,
    )


def _most(result: DrafterResult, rates: Sequence[Rate]) -> float:
    """The highest value or end of an interval."""
    found = result.figures
    upper = [within.high for rate, within in found.intervals.items() if rate in rates]
    ideal = [found.budget.ideal] if found.budget is not None and "tau" in rates else []
    values: list[float] = [getattr(found, rate) for rate in rates]
    return max([*values, *upper, *ideal])


def _scale(
    low: float, high: float, start: float, end: float
) -> Callable[[float], float]:
    """Map low..high to start..end, in tenths; everything to the middle if low equals high."""
    if high <= low:
        return lambda value: (start + end) / 2
    return lambda value: round(start + (end - start) * (value - low) / (high - low), 1)


def _ticks(low: float, high: float, least: float = 0.1) -> list[float]:
    """Round numbers in low..high, at most about eight, at least `least` apart."""
    rough = max((high - low) / 8, least)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [
        step * count
        for count in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]
