"""The report as Markdown and CSV."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.bench.statistics import OF_CYCLES, Rate, as_facts
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.comparison import Group
from vlmdistill.pipelines.report.results import DrafterResult, ServerResult
from vlmdistill.pipelines.report.seeds import HEADER, NOTE, over_seeds, seed_rows
from vlmdistill.pipelines.report.tables import COLUMNS, SERVED, result_rows, served
from vlmdistill.pipelines.targets.software import PACKAGES
from vlmdistill.stores.errors import printable

if TYPE_CHECKING:
    from vlmdistill.pipelines.report.page import ReportPage

FORMULA = ("=", "+", "-", "@")  # the first characters of a formula of a spreadsheet
MARKS = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)")
"""Characters that Markdown interprets; an underscore within a word is not one of them."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A table with its conditions, conclusions and warnings."""

    title: str
    facts: dict[str, str]
    sentences: list[str]
    header: list[str]
    rows: list[list[str]]


def sections(report: "ReportPage") -> Iterator[Section]:
    """A section for each group that compares, for its seeds if it has any, and one for serving engines."""
    count = len(report.groups)
    for group in report.groups:
        yield group_section(group, count)
        if compared := over_seeds(group.results):
            title = f"group {group.number} of {count}, over seeds" if count > 1 else ""
            rows = seed_rows(compared)
            yield Section(title or "over seeds", {}, [NOTE], [*HEADER], rows)
    if report.served:
        yield served_section(report)


def group_section(group: Group, count: int) -> Section:
    """A group of so many."""
    title = f"group {group.number} of {count}" if count > 1 else ""
    measured = sorted({evaluation.measured for evaluation in group.evaluations})
    facts = {**group.conditions, "measured": ", ".join(measured), **group.facts}
    sentences = [answer.text for answer in answers(group)]
    sentences.append(group.verdict.text)
    sentences += [f"Warning: {warning}." for warning in group.warnings]
    sentences.append("In parentheses: 95% intervals over prompts.")
    return Section(title, facts, sentences, [*COLUMNS], result_rows(group.results))


def served_section(report: "ReportPage") -> Section:
    """The table of serving engines."""
    sentences = [f"Warning: {warning}." for warning in report.served_warnings]
    sentences.append(
        "In parentheses: quartiles of times, and the 95% interval of the speedup over the baseline."
    )
    return Section("serving engines", {}, sentences, [*SERVED], served(report.served))


def markdown(report: "ReportPage") -> str:
    """All sections as Markdown."""
    lines = [f"# {markdown_text(report.title)}: evaluation of drafters"]
    for section in sections(report):
        if section.title:
            lines += ["", f"## {section.title.capitalize()}"]
        lines.append("")
        lines += [
            f"- {name}: {markdown_text(value)}" for name, value in section.facts.items()
        ]
        for sentence in section.sentences:
            lines += ["", markdown_text(sentence)]
        lines += ["", markdown_row(section.header)]
        lines.append(markdown_row(["---"] * len(section.header)))
        lines += [markdown_row(map(markdown_text, row)) for row in section.rows]
    return "\n".join(lines) + "\n"


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a table; the cells are Markdown."""
    return f"| {' | '.join(cells)} |"


def markdown_text(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    plain = line(text).replace("&", "&amp;").replace("<", "&lt;")
    return MARKS.sub(r"\\\g<0>", plain)


def line(text: str) -> str:
    """Text on one line, without characters that a terminal does not print."""
    on_one_line = " ".join(text.split())
    return "".join(character for character in on_one_line if character.isprintable())


def csv(report: "ReportPage") -> str:
    """Rows for each drafter and temperature: all prompts, each kind and each dataset; then servers."""
    import polars as pl

    rows = [*_own_rows(report), *map(_served_row, report.served)]
    inert = [{name: _inert(value) for name, value in row.items()} for row in rows]
    return pl.DataFrame(inert, infer_schema_length=None).write_csv()


def _inert(value: Any) -> Any:
    """A text that neither a spreadsheet takes for a formula nor a terminal for a command; else the value."""
    if not isinstance(value, str):
        return value
    plain = "\n".join(map(printable, value.split("\n")))
    return f"'{plain}" if plain.startswith(FORMULA) else plain


def _own_rows(report: "ReportPage") -> Iterator[Row]:
    """The rows of drafters."""
    for group in report.groups:
        warnings = "; ".join(group.warnings) or None
        conditions = {"warnings": warnings, **_condition_columns(group)}
        for result in group.results:
            yield _own_row(group, result, result, conditions, "all", "")
            for by, label in LABELS.items():
                for name, part in result.by(label).items():
                    yield _own_row(group, result, part, conditions, by, name)


def _condition_columns(group: Group) -> Row:
    """The conditions of a group without those that have columns of their own."""
    return {
        name.replace(" ", "_"): value
        for name, value in group.conditions.items()
        if name not in ("prompts", *PACKAGES)
    }


def _own_row(
    group: Group,
    result: DrafterResult,
    part: DrafterResult,
    conditions: Row,
    by: str,
    part_name: str,
) -> Row:
    """A drafter on some of its prompts: a `part` of the result, `by` kind or dataset."""
    evaluation = result.evaluation
    return {
        "drafter": evaluation.name,
        "method": evaluation.drafter,
        "temperature": result.temperature,
        "tree": evaluation.tree,
        "parameters": evaluation.parameters,
        "comparison_group": group.number,
        "by": by,
        "part": part_name,
        "not_ranked": "; ".join(part.no_speedup) or None,
        **_numbers(as_facts(part.figures)),
        **conditions,
        "prompt_set": evaluation.prompt_set,
        "measured": evaluation.measured,
        **asdict(evaluation.software),
    }


def _served_row(result: ServerResult) -> Row:
    """A server under one load."""
    evaluation, load = result.evaluation, result.figures
    figures = {
        **asdict(load.server),
        "prompts": load.server.requests,
        "speedup": load.speedup,
        "decode_speedup": load.decode_speedup,
        "intervals": asdict(load)["intervals"] or {},
    }
    return {
        "drafter": evaluation.name,
        "temperature": load.temperature,
        "by": "server",
        "part": f"concurrency {load.concurrency}",
        "thinking": evaluation.thinking or None,
        "not_ranked": "; ".join(result.no_speedup) or None,
        "warnings": "; ".join(result.warnings) or None,
        **_numbers(figures),
        "measured": evaluation.measured,
        **asdict(evaluation.software),
    }


def _numbers(figures: Row) -> Row:
    """The columns of figures: rates, the ends of their intervals, counts and seconds."""
    columns = {
        name: value
        for name, value in figures.items()
        if isinstance(value, int | float) or name in OF_CYCLES
    }
    for rate in get_args(Rate):
        interval = figures["intervals"].get(rate, {})
        columns[f"{rate}_low"] = interval.get("low")
        columns[f"{rate}_high"] = interval.get("high")
    columns |= figures.get("lossless") or {}
    for name in ("alpha", "calibration"):
        for position, value in enumerate(figures.get(name) or (), 1):
            columns[f"{name}_{position}"] = value
    for phase, seconds in (figures.get("budget") or {}).items():
        columns[f"budget_{phase}"] = seconds
    return columns
