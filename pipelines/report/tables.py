"""The tables of the report, in cells of text."""

from collections.abc import Callable, Sequence

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.bench.served_records import Quartiles
from vlmdistill.pipelines.bench.statistics import (
    OF_CYCLES,
    Checks,
    Figures,
    Interval,
    Rate,
)
from vlmdistill.pipelines.report import charts
from vlmdistill.pipelines.report.results import DrafterResult, ServerResult

CALIBRATED = 8  # drafted tokens whose calibration is shown
COLUMNS: dict[str, Callable[[DrafterResult], str]] = {
    "drafter": lambda one: one.name,
    "T": lambda one: f"{one.temperature:g}",
    "tau": lambda one: rate(one.figures, "tau"),
    "accepted": lambda one: rate(one.figures, "accepted"),
    "speedup": lambda one: rate(one.figures, "speedup"),
    "CPU speedup": lambda one: rate(one.figures, "cpu_speedup"),
    "decode speedup": lambda one: rate(one.figures, "decode_speedup"),
    "cycle cost": lambda one: rate(one.figures, "cycle_cost"),
    "prefill": lambda one: f"{one.figures.prefill_share:.0%}",
    "tokens/s": lambda one: f"{one.figures.tokens_per_second:.0f}",
    "plain tokens/s": lambda one: f"{one.figures.plain_tokens_per_second:.0f}",
    "responses at T=0": lambda one: responses(one.figures.lossless),
    "tree": lambda one: one.evaluation.tree,
    "parameters": lambda one: _count(one.evaluation.parameters),
    "calls": lambda one: f"{one.figures.calls}",
}
PARTS = ("drafter", "T", "prompts", "count", "tau", "accepted", "speedup")
SERVED = (
    *("server", "T", "concurrency", "tokens/s", "first token ms", "ms/token"),
    *("tau", "accepted", "speedup", "identical", "failed"),
)


def calibrations(results: Sequence[DrafterResult]) -> list[list[str]]:
    """A header and rows: the calibration error of the first drafted tokens, where chances were told."""
    told = [one for one in results if one.figures.calibration]
    if not told:
        return []
    most = min(CALIBRATED, max(len(one.figures.calibration) for one in told))
    rows = [
        [
            "calibration error of",
            "T",
            *(f"token {position}" for position in range(1, most + 1)),
        ]
    ]
    for one in told:
        shown = [f"{error:.3f}" for error in one.figures.calibration[:most]]
        rows.append(
            [one.name, f"{one.temperature:g}", *shown, *["-"] * (most - len(shown))]
        )
    return rows


def budgets(results: Sequence[DrafterResult]) -> list[list[str]]:
    """A header and rows: the milliseconds of a cycle by phase, beside a step of plain decoding."""
    rows = []
    for one in results:
        if (spent := one.figures.budget) is not None and one.figures.calls:
            *cycle, _ = charts.milliseconds(one, charts.CYCLE).values()
            shown = [
                f"{value:.2f}"
                for value in (*cycle, 1e3 * spent.plain_step, spent.ideal)
            ]
            rows.append([one.name, f"{one.temperature:g}", *shown])
    phases = ("draft", "verify", "accept", "plain step", "ideal decode speedup")
    return [["milliseconds per cycle of", "T", *phases], *rows] if rows else []


def divided(results: Sequence[DrafterResult]) -> list[list[str]]:
    """A row of `PARTS` for the prompts of each kind and dataset, and for each part of the responses.

    Of each only where there are several.
    """
    rows, seen = [], set()
    for one in results:
        for label in LABELS.values():
            parts = one.by(label)
            keys = (
                tuple(prompt.key for prompt in at.measurement.prompts)
                for at in parts.values()
            )
            cut = one.name, one.temperature, frozenset(keys)
            if len(parts) > 1 and cut not in seen:  # datasets may be what kinds are
                seen.add(cut)
                for part, at in sorted(parts.items()):
                    rates = [
                        COLUMNS[name](at) for name in ("tau", "accepted", "speedup")
                    ]
                    rows.append(
                        [
                            one.name,
                            f"{one.temperature:g}",
                            part,
                            str(at.figures.prompts),
                            *rates,
                        ]
                    )
        for within in one.figures.sections:
            shown = [
                str(within.prompts),
                f"{within.tau:.2f}",
                f"{within.accepted:.2f}",
                "-",
            ]
            rows.append([one.name, f"{one.temperature:g}", within.section, *shown])
    return rows


def served(results: Sequence[ServerResult]) -> list[list[str]]:
    """The rows of `SERVED`: each server at each temperature and concurrency, then its baseline."""
    rows = []
    for result in results:
        load = result.figures
        speedup = cell(load.speedup, (load.intervals or {}).get("speedup"))
        identical = f"{load.identical}/{load.compared}" if load.compared else "-"
        sides = [
            (result.evaluation.name, load.server, speedup, identical),
            ("baseline", load.baseline, "-", "-"),
        ]
        for name, run, *paired in sides:
            if run is not None:
                pace = (
                    "-"
                    if run.tokens_per_second is None
                    else f"{run.tokens_per_second:.0f}"
                )
                times = [
                    _milliseconds(run.first_seconds),
                    _milliseconds(run.seconds_per_token),
                ]
                counts = [cell(run.tau), cell(run.accepted)]
                under = [f"{load.temperature:g}", str(load.concurrency)]
                rows.append(
                    [name, *under, pace, *times, *counts, *paired, str(run.failed)]
                )
    return rows


def _milliseconds(found: Quartiles | None) -> str:
    return (
        f"{1e3 * found.median:.1f} ({1e3 * found.low:.1f}-{1e3 * found.high:.1f})"
        if found
        else "-"
    )


def _count(parameters: int) -> str:
    return f"{parameters}" if parameters < 1e6 else f"{parameters / 1e6:.2f}M"


def rate(figures: Figures, name: Rate) -> str:
    """A rate with its confidence interval, as one cell; a dash if nothing was drafted."""
    if name in OF_CYCLES and not figures.calls:
        return "-"
    return cell(getattr(figures, name), figures.intervals.get(name))


def cell(value: float | None, within: Interval | None = None) -> str:
    """A number, with its interval if it has one; a dash where it is not known."""
    shown = "-" if value is None else f"{value:.2f}"
    return f"{shown} ({within.low:.2f}-{within.high:.2f})" if within else shown


def responses(count: Checks, kind: str = " identical") -> str:
    """How many responses equal the target's own, as one cell."""
    text = f"{count.identical}/{count.total}{kind}" if count.total else "-"
    text += f", {count.near_tie} near-tie" if count.near_tie else ""
    return text + (f", {count.different} DIFFERENT" if count.different else "")
