"""The report as Markdown and CSV."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.bench.statistics import Rate
from vlmdistill.pipelines.report.tables import COLUMNS, SERVED, served
from vlmdistill.pipelines.targets.software import PACKAGES
from vlmdistill.stores.errors import printable

if TYPE_CHECKING:
    from vlmdistill.pipelines.report.page import ReportPage

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
    for group in report.groups:
        title = (
            f"group {group.number} of {len(report.groups)}"
            if len(report.groups) > 1
            else ""
        )
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
        said_of = [*(f"Warning: {one}." for one in report.served_warnings), said]
        yield Section("serving engines", {}, said_of, [*SERVED], served(report.served))


def markdown(report: "ReportPage") -> str:
    """All sections as Markdown."""
    lines = [f"# {_markdown(report.title)}: evaluation of drafters"]
    for one in sections(report):
        lines += ["", f"## {one.title.capitalize()}"] if one.title else []
        lines += [
            "",
            *(f"- {name}: {_markdown(value)}" for name, value in one.facts.items()),
        ]
        for sentence in one.sentences:
            lines += ["", _markdown(sentence)]
        table = [
            one.header,
            ["---"] * len(one.header),
            *([_markdown(cell) for cell in row] for row in one.rows),
        ]
        lines += ["", *(f"| {' | '.join(row)} |" for row in table)]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Text on one line that Markdown shows as it is; an underscore within a word needs nothing."""
    plain = line(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", plain)


def line(text: str) -> str:
    """Text on one line, without what a terminal would not print."""
    return "".join(one for one in " ".join(text.split()) if one.isprintable())


def csv(report: "ReportPage") -> str:
    """Rows for each drafter and temperature: all prompts, each kind and each dataset; then servers."""
    import polars as pl

    rows = [
        {
            name: _inert(value) if isinstance(value, str) else value
            for name, value in row.items()
        }
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
            one = result.evaluation
            parts = [("all", "", result)]
            for by, label in LABELS.items():
                parts += [(by, name, part) for name, part in result.by(label).items()]
            software = asdict(one.software) if one.software else {}
            facts = {
                **{
                    "drafter": one.name,
                    "method": one.drafter,
                    "temperature": result.temperature,
                },
                **{
                    "tree": one.tree,
                    "parameters": one.parameters,
                    "comparison_group": group.number,
                },
            }
            conditions = {**group.conditions, "prompt set": one.prompt_set}
            for name in (
                "prompts",
                *PACKAGES,
            ):  # the versions of all packages are columns of their own
                conditions.pop(name, None)
            for by, part, found in parts:
                yield {
                    **facts,
                    **{"by": by, "part": part, **_numbers(asdict(found.figures))},
                    **{
                        name.replace(" ", "_"): value
                        for name, value in conditions.items()
                    },
                    **{"measured": one.measured, **software},
                }


def _served_rows(report: "ReportPage") -> Iterator[dict[str, Any]]:
    for result in report.served:
        one, load = result.evaluation, result.figures
        found = {
            **asdict(load.server),
            "prompts": load.server.requests,
            "speedup": load.speedup,
        }
        found |= {
            "decode_speedup": load.decode_speedup,
            "intervals": asdict(load)["intervals"] or {},
        }
        yield {
            **{"drafter": one.name, "temperature": load.temperature, "by": "server"},
            **{"part": f"concurrency {load.concurrency}", **_numbers(found)},
            **{
                "measured": one.measured,
                **(asdict(one.software) if one.software else {}),
            },
        }


def _numbers(figures: dict[str, Any]) -> dict[str, Any]:
    """Rates, the ends of their intervals, counts and seconds."""
    ends = {
        f"{name}_{end}": figures["intervals"].get(name, {}).get(end)
        for name in get_args(Rate)
        for end in ("low", "high")
    }
    checks = figures.get("lossless") or {}
    by_position = {
        f"{name}_{position}": one
        for name in ("alpha", "calibration")
        for position, one in enumerate(figures.get(name) or (), 1)
    }
    budget = {
        f"budget_{phase}": one for phase, one in (figures.get("budget") or {}).items()
    }
    numbers = {
        name: one for name, one in figures.items() if isinstance(one, int | float)
    }
    return {**numbers, **ends, **checks, **by_position, **budget}
