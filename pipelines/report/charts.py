"""The charts of the report in coordinates, which `charts.html.jinja` draws."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal

from vlmdistill.pipelines.bench.statistics import Interval, Rate
from vlmdistill.pipelines.report.comparison import Ranking
from vlmdistill.pipelines.report.results import DrafterResult, in_words, rate_of

WIDTH: Final = 400.0  # of a chart
HEIGHT: Final = 220.0
SQUARE: Final = 300.0  # the height of a chart with equal axes
# The edges of the plot area; BELOW is its distance from the bottom.
LEFT: Final = 44.0
RIGHT: Final = 386.0
TOP: Final = 10.0
BELOW: Final = 40.0
BAR: Final = 40.0  # height of a bar with its label
BAR_ENDS: Final = (2.0, WIDTH - 14)  # of the axis of bars
MARGIN: Final = 1.05  # of an axis, beyond the largest value
SHARES: Final = (0, 0.25, 0.5, 0.75, 1)

CYCLE = ("draft", "verify", "accept", "other")
PREFILL = ("vision", "prefill", "draft_prefill")

Point = tuple[float, float]
Curve = list[Point]
Span = tuple[Point, Point]
Scale = Callable[[float], float]
Styles = Mapping[str, int]
"""Of each drafter."""
Drawn = Literal["marks", "line", "both"]


@dataclass(frozen=True)
class Series:
    """One line, bar or mark of a chart: its values and their coordinates."""

    name: str
    style: int  # of color, marker and dashes
    values: list[float]
    points: list[Point]
    spans: tuple[Span, ...] = ()  # intervals, and other thin lines
    note: str = ""  # its values in words
    drawn: Drawn = "both"  # of lines


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
    line: tuple[Point, ...] = ()  # of a scatter: the line that its marks are judged by
    legend: tuple[str, ...] = ()  # of a stack: the names of its parts
    key: str = ""  # the meaning of its marks, for a chart without the page's text
    parts: tuple[tuple[str, float], ...] = ()
    """Of the axis across: their names, and where each begins."""

    @property
    def named(self) -> list[Series]:
        """The series that its legend names: one for each style."""
        by_style: dict[int, Series] = {}
        for series in self.series:
            by_style.setdefault(series.style, series)
        return [*by_style.values()]

    @property
    def label(self) -> str:
        """The chart in words, for readers who do not see it."""
        shows_shares = self.kind == "lines" and not self.up
        form = "{:.0%}" if shows_shares else "{:.2f}"
        texts = []
        for series in self.series:
            values = [form.format(value) for value in series.values]
            text = " ".join(values)
            if series.drawn == "line":
                text = f"{values[0]} to {values[-1]}"
            texts.append(f"{series.name}: {text}")
        return f"{self.title}. {'. '.join(texts)}."


@dataclass(frozen=True)
class Line:
    """The values of one line of a chart."""

    name: str
    style: int
    points: Sequence[Point]
    drawn: Drawn = "both"


def acceptance(ranking: Ranking, styles: Styles) -> Chart | None:
    """Acceptance per position; None if nothing was drafted."""
    lines = [
        Line(
            result.count_label,
            styles[result.name],
            [*enumerate(result.figures.alpha, 1)],
        )
        for result in ranking.results
        if result.figures.alpha
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
        Line(f"token {position + 1}", position, points, "marks")
        for position, points in enumerate(held_out)
        if points
    ]
    lines += [
        Line(f"token {position + 1} of batches", position, points, "line")
        for position, points in enumerate(batches)
        if points
    ]
    if not lines:
        return None
    title, key = f"Agreement of {name} during training", ""
    if batches:
        title = f"Agreement of {name} during training"
        key = "marks: validation samples; lines: batches"
    return curves(title, "training steps", lines, stages=stages, key=key)


def losses(name: str, points: Sequence[Point], stages: Mapping[str, float]) -> Chart:
    """The loss over the steps of a training."""
    title = f"Loss of {name} during training"
    line = Line("loss", 0, points, "line")
    return curves(title, "training steps", [line], up="loss", stages=stages)


def curves(
    title: str,
    across: str,
    lines: Sequence[Line],
    up: str = "",
    stages: Mapping[str, float] = MappingProxyType({}),
    key: str = "",
) -> Chart:
    """A chart of shares, or of the quantity `up`, over the quantity `across`.

    `stages` begin at those places.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    first, last = min(xs), max(xs)
    top = MARGIN * max(1e-9, *ys) if up else 1.0
    x_of = _scale(first, last, LEFT + 10, RIGHT)
    y_of = _scale(0, top, HEIGHT - BELOW, TOP)

    def drawn(line: Line) -> Series:
        values = [y for _, y in line.points]
        points = [(x_of(x), y_of(max(0, min(top, y)))) for x, y in line.points]
        return Series(line.name, line.style, values, points, drawn=line.drawn)

    y_values = _ticks(0, top, least=1e-3) if up else SHARES
    parts = [(name, x_of(x)) for name, x in stages.items() if first < x <= last]
    series = [drawn(line) for line in lines]
    x_ticks = _placed(_ticks(first, last, least=1), x_of)
    y_ticks = _placed(y_values, y_of)
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
        parts=tuple(parts),
    )


def speed(
    ranking: Ranking, styles: Styles, everything: Sequence[DrafterResult]
) -> Chart:
    """Speedup (bar) and decode speedup (mark), on one scale for `everything`."""
    title = f"Speedup against plain decoding at temperature {ranking.temperature:g}"
    return _bars(
        title, ranking.results, styles, "speedup", "decode_speedup", everything
    )


def trees(results: Sequence[DrafterResult], styles: Styles) -> Chart:
    """Decode speedup (bar) and tau (mark) of one drafter by its trees."""
    drafter, temperature = results[0].drafter, results[0].temperature
    title = (
        f"Decode speedup and tau of {drafter} by tree at temperature {temperature:g}"
    )
    return _bars(title, results, styles, "decode_speedup", "tau", results)


def cycle(ranking: Ranking, styles: Styles) -> Chart | None:
    """The milliseconds of a cycle by phase, beside a step of plain decoding; None if nothing was drafted."""
    title = f"Milliseconds of a cycle at temperature {ranking.temperature:g}"
    return _stack(title, ranking, styles, CYCLE)


def prefill(ranking: Ranking, styles: Styles) -> Chart | None:
    """The milliseconds of a response before its first cycle by phase; None if nothing was drafted."""
    title = f"Milliseconds of the prefill at temperature {ranking.temperature:g}"
    return _stack(title, ranking, styles, PREFILL)


def milliseconds(result: DrafterResult, phases: Sequence[str]) -> dict[str, float]:
    """The time of each phase of a cycle, or of a response's prefill."""
    figures = result.figures
    count = max(1, figures.calls if phases == CYCLE else figures.prompts)
    spent = {}
    for phase in phases:
        seconds = max(0.0, getattr(figures.budget, phase))
        spent[phase.replace("_", " ")] = 1e3 * seconds / count
    return spent


def against_tau(
    ranking: Ranking, styles: Styles, everything: Sequence[DrafterResult]
) -> Chart | None:
    """Decode speedup over tau, with the line where they are equal, on one scale for `everything`."""
    results = [result for result in ranking.results if result.figures.calls]
    if not results:
        return None
    largest = [_largest(result, ("tau", "decode_speedup")) for result in everything]
    end = MARGIN * max(2.0, *largest)
    x_of = _scale(0, end, LEFT, RIGHT)
    y_of = _scale(0, end, SQUARE - BELOW, TOP)
    ticks = _ticks(0, end)
    line = [(x_of(value), y_of(value)) for value in (0, ticks[-1])]
    marks = [_tau_mark(result, styles, x_of, y_of) for result in results]
    return Chart(
        "scatter",
        f"Decode speedup against tau at temperature {ranking.temperature:g}",
        marks,
        _placed(ticks, x_of),
        _placed(ticks, y_of),
        SQUARE,
        across="tau",
        up="decode speedup",
        line=tuple(line),
        key="dashed: drafting and verifying for free; crossbar: verifying as fast as a plain step",
    )


def _tau_mark(
    result: DrafterResult, styles: Styles, x_of: Scale, y_of: Scale
) -> Series:
    """Tau and decode speedup of a drafter with their intervals, and its ideal decode speedup."""
    figures = result.figures
    x, y = x_of(figures.tau), y_of(figures.decode_speedup)
    values = [figures.tau, figures.decode_speedup]
    points = [(x, y)]
    note = f"tau {figures.tau:.2f}, decode speedup {figures.decode_speedup:.2f}"
    spans = []
    tau = figures.intervals.get("tau")
    speedup = figures.intervals.get("decode_speedup")
    if tau:
        spans.append(_across(x_of, tau, y))
    if speedup:
        spans.append(_upright(y_of, speedup, x))
    ideal = figures.budget.ideal
    values.append(ideal)
    points.append((x, y_of(ideal)))
    note += f", ideal {ideal:.2f}"
    style = styles[result.name]
    return Series(result.label, style, values, points, tuple(spans), note)


def pareto(
    ranking: Ranking, styles: Styles, everything: Sequence[DrafterResult]
) -> Chart | None:
    """Speedup over the memory of the drafters' weights, with the front of those that none beats in both.

    The front begins with plain decoding. None if fewer than two drafters have a memory that is known.
    """
    megabytes = {}
    for result in ranking.results:
        memory = _megabytes(result)
        if memory is not None:
            megabytes[result.name] = memory
    if len(megabytes) < 2:
        return None
    memories = [_megabytes(result) or 0 for result in everything]
    speedups = [_largest(result, ("speedup",)) for result in everything]
    right = MARGIN * max(1e-3, *memories)
    top = MARGIN * max(1.0, *speedups)
    x_of = _scale(0, right, LEFT, RIGHT)
    y_of = _scale(0, top, SQUARE - BELOW, TOP)
    front = _front(ranking, megabytes, right)
    marks = []
    for result in ranking.results:
        if result.name in megabytes:
            megabytes_of = megabytes[result.name]
            mark = _memory_mark(result, megabytes_of, styles, x_of, y_of)
            marks.append(mark)
    line = [(x_of(x), y_of(y)) for x, y in front]
    x_ticks = _placed(_ticks(0, right, least=1e-4), x_of)
    y_ticks = _placed(_ticks(0, top), y_of)
    return Chart(
        "scatter",
        f"Speedup against memory at temperature {ranking.temperature:g}",
        marks,
        x_ticks,
        y_ticks,
        SQUARE,
        across="weights of the drafter, MB",
        up="speedup",
        line=tuple(line),
        key="dashed: the best speedup with so much memory; bars: 95% intervals",
    )


def _front(
    ranking: Ranking, megabytes: Mapping[str, float], right: float
) -> list[Point]:
    """The corners of the best speedup by memory, from plain decoding to the right end."""

    def least_memory_first(result: DrafterResult) -> tuple[float, float]:
        return megabytes[result.name], -result.figures.speedup

    sound = [
        result
        for result in ranking.results
        if result.name in megabytes and not result.no_speedup
    ]
    best = 1.0
    corners = [(0.0, best)]
    for result in sorted(sound, key=least_memory_first):
        memory, speedup = megabytes[result.name], result.figures.speedup
        if speedup > best:
            corners += [(memory, best), (memory, speedup)]
            best = speedup
    return [*corners, (right, best)]


def _memory_mark(
    result: DrafterResult,
    memory: float,
    styles: Styles,
    x_of: Scale,
    y_of: Scale,
) -> Series:
    """Memory and speedup of a drafter, with its interval."""
    speedup = result.figures.speedup
    interval = result.figures.intervals.get("speedup")
    x = x_of(memory)
    spans: tuple[Span, ...] = ()
    if interval:
        spans = (_upright(y_of, interval, x),)
    note = f"{memory:.2f} MB, speedup {speedup:.2f}"
    values, points = [memory, speedup], [(x, y_of(speedup))]
    return Series(result.label, styles[result.name], values, points, spans, note)


def _megabytes(result: DrafterResult) -> float | None:
    """The weights of a drafter in the dtype of the evaluation; None for a dtype of unknown size."""
    bits = re.search(r"float(\d+)$", result.evaluation.dtype)
    return result.evaluation.parameters * int(bits[1]) / 8e6 if bits else None


def _bars(
    title: str,
    results: Sequence[DrafterResult],
    styles: Styles,
    bar: Rate,
    mark: Rate,
    everything: Sequence[DrafterResult],
) -> Chart:
    """A bar with its interval and a mark for each result, on one scale for `everything`."""
    largest = [_largest(result, (bar, mark)) for result in everything]
    end = MARGIN * max(1.0, *largest)
    x_of = _scale(0, end, *BAR_ENDS)
    series = []
    for number, result in enumerate(results):
        figures, top = result.figures, BAR * number
        values = [rate_of(result, bar), rate_of(result, mark)]
        points = [(x_of(value), top) for value in values]
        interval = figures.intervals.get(bar)
        spans: tuple[Span, ...] = ()
        if interval:
            spans = (_across(x_of, interval, top + 35),)
        note = f"{values[0]:.2f} ({values[1]:.2f})"
        style = styles[result.name]
        series.append(Series(result.label, style, values, points, spans, note))
    ticks = _placed(sorted({1.0, *_ticks(0, end)}), x_of)
    height = BAR * len(series) + 30
    named, marked = in_words(bar), in_words(mark)
    key = f"bar: {named}, 95% interval; diamond, and in parentheses: {marked}"
    return Chart("bars", title, series, ticks, [], height, key=key)


def _stack(
    title: str, ranking: Ranking, styles: Styles, phases: tuple[str, ...]
) -> Chart | None:
    """A bar for each drafter, of the milliseconds of each phase; a cycle has a line at a plain step."""
    results = [result for result in ranking.results if result.figures.calls]
    if not results:
        return None
    stacks = [[*milliseconds(result, phases).values()] for result in results]
    plain_steps = []
    if phases == CYCLE:
        plain_steps = [1e3 * result.figures.budget.plain_step for result in results]
    end = max(1e-3, *map(sum, stacks), *plain_steps) * MARGIN
    x_of = _scale(0, end, *BAR_ENDS)
    series = []
    for number, (result, stack) in enumerate(zip(results, stacks, strict=True)):
        top = BAR * number
        ends = [x_of(sum(stack[:count])) for count in range(len(stack) + 1)]
        line: tuple[Span, ...] = ()
        if plain_steps:
            x = x_of(plain_steps[number])
            line = (((x, top + 17), (x, top + 36)),)
        note = f"{sum(stack):.2f} ms"
        bars = list(pairwise(ends))
        style = styles[result.name]
        series.append(Series(result.label, style, stack, bars, line, note))
    ticks = _placed(_ticks(0, end, least=1e-4), x_of)
    height = BAR * len(series) + 30
    legend = tuple(phase.replace("_", " ") for phase in phases)
    key = "line: a step of plain decoding" if plain_steps else ""
    return Chart("stack", title, series, ticks, [], height, legend=legend, key=key)


def _largest(result: DrafterResult, rates: Sequence[Rate]) -> float:
    """The highest of these rates, of the ends of their intervals and, beside tau, of the ideal speedup."""
    figures = result.figures
    values = [rate_of(result, rate) for rate in rates]
    for rate in rates:
        interval = figures.intervals.get(rate)
        if interval:
            values.append(interval.high)
    if "tau" in rates:
        values.append(figures.budget.ideal)
    return float(max(values))


def _across(x_of: Scale, interval: Interval, y: float) -> Span:
    """A horizontal line over an interval."""
    return (x_of(interval.low), y), (x_of(interval.high), y)


def _upright(y_of: Scale, interval: Interval, x: float) -> Span:
    """A vertical line over an interval."""
    return (x, y_of(interval.low)), (x, y_of(interval.high))


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Map low..high to start..end, in tenths; everything to the middle if low equals high."""
    if high <= low:
        return lambda value: (start + end) / 2
    size = high - low
    return lambda value: round(start + (end - start) * (value - low) / size, 1)


def _placed(ticks: Iterable[float], scale: Scale) -> list[Point]:
    """Ticks with their coordinates."""
    return [(tick, scale(tick)) for tick in ticks]


def _ticks(low: float, high: float, least: float = 0.1) -> list[float]:
    """Round numbers in low..high, at most about eight, at least `least` apart."""
    rough = max((high - low) / 8, least)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * count for count in range(first, last + 1)]
