"""The report as tables for a paper: methods over sets of prompts; what else is known is in comments."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.report.documents import Section, line, sections
from vlmdistill.pipelines.report.tables import rate

if TYPE_CHECKING:
    from vlmdistill.pipelines.report.comparison import Group
    from vlmdistill.pipelines.report.page import ReportPage
    from vlmdistill.pipelines.report.results import DrafterResult

WIDE = 8  # columns, above which a table is as wide as the page
ESCAPED = {
    "\\": r"\textbackslash{}",
    **{one: f"\\{one}" for one in "&%$#_{}"},
    **{
        one: f"{{{one}}}" for one in "[]*"
    },  # after a line's end they would be its arguments
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
DAGGER = r"\textsuperscript{\dag}"
BROKEN = rf"; {DAGGER} not lossless"
Cell = tuple[float, float | None]  # tau, and the speedup unless a warning doubts it


@dataclass
class _Row:
    """A method at one temperature."""

    lossless: bool = True
    cells: dict[str, Cell] = field(default_factory=dict)  # by set

    def mean(self, sets: Sequence[str]) -> Cell | None:
        """The mean over all sets; None if one was not measured."""
        if any(name not in self.cells for name in sets):
            return None
        cells = [self.cells[name] for name in sets]
        speedups = [speedup for _, speedup in cells if speedup is not None]
        whole = len(speedups) == len(cells)
        return mean(tau for tau, _ in cells), mean(speedups) if whole else None


def latex(report: "ReportPage") -> str:
    """Tables for the package booktabs; groups that differ only in their prompts share one.

    A set is a dataset, or a kind of prompts where there is one dataset. Bold are the best values as
    printed, of the lossless methods.
    """
    lines = [r"% \usepackage{booktabs}, then \input this file"]
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in report.groups:
        key = tuple(
            value for name, value in group.conditions.items() if name != "prompts"
        )
        alike.setdefault(key, []).append(group)
    told = [*sections(report)]
    for groups in alike.values():
        about = [
            one
            for one, group in zip(told, report.groups, strict=False)
            if group in groups
        ]
        lines += ["", *_comments(about), *_intervals(groups), *_table(groups)]
    for served in told[len(report.groups) :]:
        caption = f"Drafters of {report.title} in serving engines."
        rows = [[escaped(cell) for cell in row] for row in served.rows]
        header = [
            r"$\tau$" if name == "tau" else escaped(name) for name in served.header
        ]
        lines += [
            "",
            *_comments([served]),
            *_framed(caption, "l" * len(header), [_row(header)], rows),
        ]
    return "\n".join(lines) + "\n"


def _table(groups: "Sequence[Group]") -> list[str]:
    by_temperature: dict[float, dict[str, _Row]] = {}
    measured = dict(_sets(groups))
    sets = sorted(measured)
    for name, results in measured.items():
        for one in results:
            row = by_temperature.setdefault(one.temperature, {}).setdefault(
                one.name, _Row()
            )
            row.lossless &= one.evaluation.lossless
            row.cells[name] = (
                one.figures.tau,
                None if one.doubts else one.figures.speedup,
            )
    columns = [*sets, "mean"] if len(sets) > 1 else sets
    one_temperature = (
        f" at temperature {min(by_temperature):g}" if len(by_temperature) == 1 else ""
    )
    target = groups[0].conditions["target"].partition(" (")[0]
    broken = any(
        not row.lossless for rows in by_temperature.values() for row in rows.values()
    )
    caption = (
        rf"Tokens per call ($\tau$) and speedup over plain decoding of {escaped(target)}{one_temperature} "
        f"(best in bold{BROKEN if broken else ''})."
    )
    spans = " & ".join(
        rf"\multicolumn{{2}}{{c}}{{{escaped(name)}}}" for name in columns
    )
    rules = "".join(
        rf"\cmidrule(lr){{{at}-{at + 1}}}" for at in range(2, 2 + 2 * len(columns), 2)
    )
    header = [
        rf" & {spans} \\",
        rules,
        _row(["method", *[r"$\tau$", "speedup"] * len(columns)]),
    ]
    body: list[list[str]] = []
    for temperature in sorted(by_temperature):
        if not one_temperature:
            width = 1 + 2 * len(columns)
            body += [
                [
                    rf"\multicolumn{{{width}}}{{@{{}}l}}{{\emph{{temperature {temperature:g}}}}}"
                ]
            ]
        body += _rows(by_temperature[temperature], sets)
    return _framed(caption, "l" + "r" * 2 * len(columns), header, body)


def _number(cell: Cell | None, at: int) -> str:
    """One of the two numbers of a cell; empty if it has none."""
    value = cell[at] if cell else None
    return "" if value is None else f"{value:.2f}"


def _best(column: Sequence[Cell | None], at: int) -> str:
    """The largest of one of the two numbers, as printed; empty if there is none."""
    numbers = [number for cell in column if (number := _number(cell, at))]
    return max(numbers, key=float, default="")


def _sets(groups: "Sequence[Group]") -> "Iterator[tuple[str, Sequence[DrafterResult]]]":
    """The results on each set; of sets of one name in several groups, the name says how many prompts."""
    divided = [group.by(LABELS["dataset"]) for group in groups]
    if len(groups) == 1 and len(divided[0]) == 1:
        divided = [groups[0].by(LABELS["kind"])]
    taken: set[str] = set()
    names = [name for sets in divided for name in sets]
    for group, sets in zip(groups, divided, strict=True):
        for name, results in sets.items():
            count = results[0].figures.prompts
            label = f"{name} ({count})" if names.count(name) > 1 else name
            label = f"{label}, group {group.number}" if label in taken else label
            taken.add(label)
            yield label, results


def _rows(methods: dict[str, _Row], sets: Sequence[str]) -> list[list[str]]:
    cells = {
        name: [
            *(row.cells.get(one) for one in sets),
            *([row.mean(sets)] if len(sets) > 1 else []),
        ]
        for name, row in methods.items()
    }
    ranked = [cells[name] for name, row in methods.items() if row.lossless]
    best = [
        [
            max(
                (_number(one, at) for one in column if _number(one, at)),
                key=float,
                default="",
            )
            for at in (0, 1)
        ]
        for column in zip(*ranked, strict=True)
    ]

    def shown(values: Sequence[Cell | None], lossless: bool) -> Iterator[str]:
        for number, one in enumerate(values):
            for at in (0, 1):
                text = _number(one, at) or "--"
                yield (
                    rf"\textbf{{{text}}}"
                    if lossless and text == best[number][at]
                    else text
                )

    return [
        [
            escaped(name) + ("" if row.lossless else r"\textsuperscript{\dag}"),
            *shown(cells[name], row.lossless),
        ]
        for name, row in methods.items()
    ]


def _framed(
    caption: str, columns: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[str]:
    kind = "table*" if len(columns) > WIDE else "table"
    return [
        *(
            rf"\begin{{{kind}}}",
            r"\centering",
            r"\small",
            rf"\caption{{{caption}}}",
            r"\smallskip",
        ),
        *(
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            *header,
            r"\midrule",
        ),
        *(_row(row) for row in rows),
        *(r"\bottomrule", r"\end{tabular}", rf"\end{{{kind}}}"),
    ]


def _comments(about: Sequence[Section]) -> Iterator[str]:
    """Conditions, conclusions and warnings, and all columns with their intervals."""
    for one in about:
        facts = [f"{name}: {value}" for name, value in one.facts.items()]
        rows = [" | ".join(row) for row in (one.header, *one.rows)]
        for text in (
            *([one.title] if one.title else []),
            *facts,
            *one.sentences,
            *rows,
        ):
            yield f"% {line(text)}"


def _intervals(groups: "Sequence[Group]") -> Iterator[str]:
    """The rates on each set."""
    yield "% set | method | T | prompts | tau | speedup; the mean gives each set equal weight"
    for name, results in _sets(groups):
        for one in results:
            rates = rate(one.figures, "tau"), rate(one.figures, "speedup")
            facts = (
                name,
                one.name,
                f"{one.temperature:g}",
                f"{one.figures.prompts}",
                *rates,
            )
            yield f"% {line(' | '.join(facts))}"


def _row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is, on one line, with dashes between the ends of intervals."""
    plain = "".join(ESCAPED.get(one, one) for one in line(text))
    return re.sub(r"\(([\d.]+)-([\d.]+)\)", r"(\1--\2)", plain)
