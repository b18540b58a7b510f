"""The tables of the report, in cells of text."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.bench.served_records import (
    LoadFigures,
    Quartiles,
    RunFigures,
)
from vlmdistill.pipelines.bench.statistics import (
    OF_CYCLES,
    Checks,
    Figures,
    Interval,
    Rate,
    SectionRates,
)
from vlmdistill.pipelines.report import charts
from vlmdistill.pipelines.report.results import (
    DrafterResult,
    ServerResult,
    marked,
)

Column = Callable[[DrafterResult], str]
CALIBRATED = 8  # drafted tokens whose calibration is shown
UNKNOWN = "-"
PARTS = ("drafter", "T", "prompts", "count", "tau", "accepted", "speedup")
PHASES = ("draft", "verify", "accept", "plain step", "ideal decode speedup")
SERVED = (
    *("server", "T", "concurrency", "tokens/s", "first token ms", "ms/token"),
    *("tau", "accepted", "speedup", "identical", "failed"),
)


def _rate_column(name: Rate) -> Column:
    return lambda result: rate(result.figures, name)


def _temperature(result: DrafterResult) -> str:
    return f"{result.temperature:g}"


def _parameters(result: DrafterResult) -> str:
    count = result.evaluation.parameters
    return f"{count}" if count < 1e6 else f"{count / 1e6:.2f}M"


COLUMNS: dict[str, Column] = {
    "drafter": lambda result: result.label,
    "T": _temperature,
    "tau": _rate_column("tau"),
    "accepted": _rate_column("accepted"),
    "speedup": _rate_column("speedup"),
    "decode speedup": _rate_column("decode_speedup"),
    "cycle cost": _rate_column("cycle_cost"),
    "prefill": lambda result: f"{result.figures.prefill_share:.0%}",
    "tokens/s": lambda result: f"{result.figures.tokens_per_second:.0f}",
    "plain tokens/s": lambda result: f"{result.figures.plain_tokens_per_second:.0f}",
    "responses at T=0": lambda result: responses(result.figures.lossless),
    "tree": lambda result: result.evaluation.tree,
    "parameters": _parameters,
    "calls": lambda result: f"{result.figures.calls}",
}


def result_rows(results: Iterable[DrafterResult]) -> list[list[str]]:
    """The rows of `COLUMNS`."""
    columns = COLUMNS.values()
    return [[column(result) for column in columns] for result in results]


def calibrations(results: Sequence[DrafterResult]) -> list[list[str]]:
    """A header and rows: the calibration error of the first drafted tokens.

    Of the drafters that report the chances of their tokens; empty if there are none.
    """
    calibrated = [result for result in results if result.figures.calibration]
    if not calibrated:
        return []
    longest = max(len(result.figures.calibration) for result in calibrated)
    count = min(CALIBRATED, longest)
    header = ["calibration error of", "T"]
    header += [f"token {position + 1}" for position in range(count)]
    rows = [header]
    for result in calibrated:
        errors = result.figures.calibration[:count]
        row = [result.count_label, _temperature(result)]
        row += [f"{error:.3f}" for error in errors]
        row += [UNKNOWN] * (count - len(errors))
        rows.append(row)
    return rows


def budgets(results: Sequence[DrafterResult]) -> list[list[str]]:
    """A header and rows: the milliseconds of a cycle by phase, beside a step of plain decoding."""
    rows = [["milliseconds per cycle of", "T", *PHASES]]
    for result in results:
        budget = result.figures.budget
        if not result.figures.calls:
            continue
        *cycle, _ = charts.milliseconds(result, charts.CYCLE).values()
        numbers = [*cycle, 1e3 * budget.plain_step, budget.ideal]
        row = [result.label, _temperature(result)]
        rows.append(row + [f"{number:.2f}" for number in numbers])
    return rows if len(rows) > 1 else []


def divided(results: Sequence[DrafterResult]) -> list[list[str]]:
    """A row of `PARTS` for the prompts of each kind and dataset, and for each part of the responses.

    Of each only where there are several.
    """
    rows = []
    for result in results:
        rows += [_part_row(name, part) for name, part in _prompt_parts(result)]
        rows += [_response_row(result, part) for part in result.figures.sections]
    return rows


def _prompt_parts(result: DrafterResult) -> Iterator[tuple[str, DrafterResult]]:
    """Its results on each kind, and on each dataset unless datasets divide the prompts as kinds do."""
    divisions = set[frozenset[tuple[str, ...]]]()
    for label in LABELS.values():
        parts = result.by(label)
        division = frozenset(_keys(part) for part in parts.values())
        if len(parts) > 1 and division not in divisions:
            divisions.add(division)
            yield from sorted(parts.items())


def _keys(result: DrafterResult) -> tuple[str, ...]:
    return tuple(prompt.key for prompt in result.measurement.prompts)


def _part_row(name: str, part: DrafterResult) -> list[str]:
    figures = part.figures
    row = [part.label, _temperature(part), name, str(figures.prompts)]
    row += [rate(figures, shown) for shown in ("tau", "accepted", "speedup")]
    return row


def _response_row(result: DrafterResult, part: SectionRates) -> list[str]:
    row = [result.count_label, _temperature(result), part.section, str(part.prompts)]
    row += [cell(part.tau), cell(part.accepted), UNKNOWN]
    return row


def served(results: Sequence[ServerResult]) -> list[list[str]]:
    """The rows of `SERVED`: each server at each temperature and concurrency, then its baseline."""
    rows = []
    for result in results:
        rows.append(_server_row(result))
        if result.figures.baseline is not None:
            rows.append(_baseline_row(result, result.figures.baseline))
    return rows


def _server_row(result: ServerResult) -> list[str]:
    load = result.figures
    interval = load.intervals.get("speedup") if load.intervals else None
    over_baseline = UNKNOWN if result.no_speedup else cell(load.speedup, interval)
    identical = f"{load.identical}/{load.compared}" if load.compared else UNKNOWN
    against_baseline = [over_baseline, identical]
    name = marked(result.name, result.no_speedup)
    return _run_row(name, load, load.server, against_baseline)


def _baseline_row(result: ServerResult, baseline: RunFigures) -> list[str]:
    return _run_row("baseline", result.figures, baseline, [UNKNOWN, UNKNOWN])


def _run_row(
    name: str, load: LoadFigures, run: RunFigures, against_baseline: Sequence[str]
) -> list[str]:
    """A row of `SERVED`; `against_baseline` are its speedup and its identical responses."""
    row = [name, f"{load.temperature:g}", str(load.concurrency)]
    speed = run.tokens_per_second
    row.append(UNKNOWN if speed is None else f"{speed:.0f}")
    row.append(_milliseconds(run.first_seconds))
    row.append(_milliseconds(run.seconds_per_token))
    row += [cell(run.tau), cell(run.accepted)]
    return [*row, *against_baseline, str(run.failed)]


def _milliseconds(seconds: Quartiles | None) -> str:
    if seconds is None:
        return UNKNOWN
    median = 1e3 * seconds.median
    low, high = 1e3 * seconds.low, 1e3 * seconds.high
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def rate(figures: Figures, name: Rate) -> str:
    """A rate with its confidence interval, as one cell; a dash if nothing was drafted."""
    if name in OF_CYCLES and not figures.calls:
        return UNKNOWN
    return cell(getattr(figures, name), figures.intervals.get(name))


def cell(value: float | None, interval: Interval | None = None) -> str:
    """A number, with its interval if it has one; a dash where it is not known."""
    number = UNKNOWN if value is None else f"{value:.2f}"
    if interval is None:
        return number
    return f"{number} ({interval.low:.2f}-{interval.high:.2f})"


def responses(count: Checks, kind: str = " identical") -> str:
    """How many responses equal the target's own, as one cell."""
    text = f"{count.identical}/{count.total}{kind}" if count.total else UNKNOWN
    if count.near_tie:
        text += f", {count.near_tie} near-tie"
    if count.different:
        text += f", {count.different} DIFFERENT"
    return text
