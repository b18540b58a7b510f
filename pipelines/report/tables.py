"""The tables of the report as Markdown and CSV."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.bench.served_records import cell
from vlmdistill.pipelines.bench.statistics import Checks, Figures, Rate, figures
from vlmdistill.stores.errors import printable

if TYPE_CHECKING:
    from vlmdistill.pipelines.report.comparison import DrafterResult
    from vlmdistill.pipelines.report.page import ReportPage

CALIBRATED = 8  # drafted tokens whose calibration is shown
COLUMNS: "dict[str, Callable[[DrafterResult], str]]" = {
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
RATES = ("tau", "accepted", "speedup", "decode_speedup", "cycle_cost", "cpu_speedup")
FORMULA = ("=", "+", "-", "@")  # what a formula of a spreadsheet begins with


@dataclass(frozen=True)
class Section:
    """A table with its conditions, and what is said of it."""

    title: str
    facts: dict[str, str]
    sentences: list[str]
    header: list[str]
    rows: list[list[str]]


def sections(report: "ReportPage") -> Iterator[Section]:
    """A section for each group that compares, and one for serving engines."""
    from vlmdistill.pipelines.bench.served_records import TABLE, table

    for group in report.groups:
        title = f"group {group.number} of {len(report.groups)}" if len(report.groups) > 1 else ""
        measured = ", ".join(sorted({one.measured for one in group.evaluations}))
        yield Section(
            title,
            {**group.conditions, "measured": measured, **group.facts},
            [
                *(ranking.text for ranking in group.rankings),
                group.verdict.text,
                *(f"Warning: {one}." for one in group.warnings),
                "In parentheses: 95% intervals over prompts.",
            ],
            [*COLUMNS],
            [[cell(one) for cell in COLUMNS.values()] for one in group.results],
        )
    if report.served:
        said = "In parentheses: quartiles of times, and the 95% interval of the speedup over the baseline."
        yield Section("serving engines", {}, [said], [*TABLE], table(report.served))


def markdown(report: "ReportPage") -> str:
    """All sections as Markdown."""
    lines = [f"# {_markdown(report.title)}: evaluation of drafters"]
    for one in sections(report):
        lines += ["", f"## {one.title.capitalize()}"] if one.title else []
        lines += ["", *(f"- {name}: {_markdown(value)}" for name, value in one.facts.items())]
        for sentence in one.sentences:
            lines += ["", _markdown(sentence)]
        table = [
            one.header,
            ["---"] * len(one.header),
            *([_markdown(cell) for cell in row] for row in one.rows),
        ]
        lines += ["", *(f"| {' | '.join(row)} |" for row in table)]
    return "\n".join(lines) + "\n"


def csv(report: "ReportPage") -> str:
    """Rows for each drafter and temperature: all prompts, each kind and each dataset; then servers."""
    import polars as pl

    rows = [
        {name: _inert(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in (*_own_rows(report), *_served_rows(report))
    ]
    return pl.DataFrame(rows, infer_schema_length=None).write_csv()


def _inert(text: str) -> str:
    """Text that a spreadsheet does not take for a formula, nor a terminal for a command."""
    plain = "\n".join(map(printable, text.split("\n")))
    return f"'{plain}" if plain.startswith(FORMULA) else plain


def _own_rows(report: "ReportPage") -> Iterator[dict[str, Any]]:
    for group in report.groups:
        for result in group.results:
            one, at = result.evaluation, result.measurement
            parts = [("all", "", result.figures)]
            for by, label in LABELS.items():
                parts += [(by, name, figures(part)) for name, part in at.by(label).items()]
            software = asdict(one.software) if one.software else {}
            facts = {
                **{"drafter": one.name, "method": one.drafter, "temperature": at.temperature},
                **{"tree": one.tree, "parameters": one.parameters, "comparison_group": group.number},
            }
            conditions = {**group.conditions, "prompt set": one.prompt_set}
            del conditions["prompts"]
            for by, part, found in parts:
                yield {
                    **facts,
                    **{"by": by, "part": part, **_numbers(asdict(found))},
                    **{name.replace(" ", "_"): value for name, value in conditions.items()},
                    **{"measured": one.measured, **software},
                }


def _served_rows(report: "ReportPage") -> Iterator[dict[str, Any]]:
    from vlmdistill.pipelines.bench.served_records import load_figures

    for one in report.served:
        for load in map(load_figures, one.loads):
            found = asdict(load.server)
            figures = {**found, "prompts": found["requests"], "speedup": load.speedup}
            figures |= {"decode_speedup": load.decode_speedup, "intervals": asdict(load)["intervals"] or {}}
            yield {
                **{"drafter": one.name, "temperature": load.temperature, "by": "server"},
                **{"part": f"concurrency {load.concurrency}", **_numbers(figures)},
                **{"measured": one.measured, **(asdict(one.software) if one.software else {})},
            }


def _numbers(figures: dict[str, Any]) -> dict[str, Any]:
    """Rates, the ends of their intervals, counts and seconds."""
    ends = {
        f"{name}_{end}": figures["intervals"].get(name, {}).get(end)
        for name in RATES
        for end in ("low", "high")
    }
    checks = figures.get("lossless") or {}
    by_position = {
        f"{name}_{position}": one
        for name in ("alpha", "calibration")
        for position, one in enumerate(figures.get(name) or (), 1)
    }
    budget = {f"budget_{phase}": one for phase, one in (figures.get("budget") or {}).items()}
    numbers = {name: one for name, one in figures.items() if isinstance(one, int | float)}
    return {**numbers, **ends, **checks, **by_position, **budget}


def calibrations(results: "Sequence[DrafterResult]") -> list[list[str]]:
    """A header and rows: the calibration error of the first drafted tokens, where chances were told."""
    told = [one for one in results if one.figures.calibration]
    if not told:
        return []
    most = min(CALIBRATED, max(len(one.figures.calibration) for one in told))
    rows = [["calibration error of", "T", *(f"token {position}" for position in range(1, most + 1))]]
    for one in told:
        shown = [f"{error:.3f}" for error in one.figures.calibration[:most]]
        rows.append([one.name, f"{one.temperature:g}", *shown, *["-"] * (most - len(shown))])
    return rows


PARTS = ("drafter", "T", "prompts", "count", "tau", "accepted", "speedup")


def divided(results: "Sequence[DrafterResult]") -> list[list[str]]:
    """A row of `PARTS` for the prompts of each kind and dataset, and for each part of the responses.

    Of each only where there are several.
    """
    rows, seen = [], set()
    for one in results:
        for label in LABELS.values():
            parts = one.measurement.by(label)
            cut = (
                one.name,
                one.temperature,
                frozenset(tuple(p.key for p in at.prompts) for at in parts.values()),
            )
            if len(parts) > 1 and cut not in seen:  # datasets may be what kinds are
                seen.add(cut)
                for part, at in sorted(parts.items()):
                    found = figures(at)
                    rates = [rate(found, which) for which in ("tau", "accepted", "speedup")]
                    rows.append([one.name, f"{one.temperature:g}", part, str(found.prompts), *rates])
        for within in one.figures.parts:
            shown = [str(within.prompts), f"{within.tau:.2f}", f"{within.accepted:.2f}", "-"]
            rows.append([one.name, f"{one.temperature:g}", within.part, *shown])
    return rows


def _markdown(text: str) -> str:
    """Text on one line that Markdown shows as it is; an underscore within a word needs nothing."""
    plain = line(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", plain)


def line(text: str) -> str:
    """Text on one line, without what a terminal would not print."""
    return "".join(one for one in " ".join(text.split()) if one.isprintable())


def _count(parameters: int) -> str:
    return f"{parameters}" if parameters < 1e6 else f"{parameters / 1e6:.2f}M"


def rate(figures: Figures, name: Rate) -> str:
    """A rate with its confidence interval, as one cell."""
    value = getattr(figures, name)
    return "-" if value is None else cell(value, figures.intervals.get(name))


def responses(count: Checks, kind: str = " identical") -> str:
    """How many responses equal the target's own, as one cell."""
    text = f"{count.identical}/{count.total}{kind}" if count.total else "-"
    text += f", {count.near_tie} near-tie" if count.near_tie else ""
    return text + (f", {count.different} DIFFERENT" if count.different else "")
