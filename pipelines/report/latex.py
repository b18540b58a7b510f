"""The report as tables for a paper: methods over sets of prompts; all other facts are in comments."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.report.documents import (
    Section,
    group_section,
    line,
    served_section,
)
from vlmdistill.pipelines.report.results import (
    NOT_LOSSLESS,
)
from vlmdistill.pipelines.report.seeds import (
    MARK,
    SHOWN,
    OverSeeds,
    SeededDrafter,
    is_significant,
    over_seeds,
)
from vlmdistill.pipelines.report.tables import rate

if TYPE_CHECKING:
    from vlmdistill.pipelines.report.comparison import Group
    from vlmdistill.pipelines.report.page import ReportPage
    from vlmdistill.pipelines.report.results import DrafterResult

WIDE = 8  # columns, above which a table is as wide as the page
ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
ESCAPED |= {character: f"\\{character}" for character in "&%$#_{}"}
# After the end of a line, these would be its arguments.
ESCAPED |= {character: f"{{{character}}}" for character in "[]*"}
INTERVAL = re.compile(r"\(([\d.]+)-([\d.]+)\)")
DAGGER = r"\textsuperscript{\dag}"
LOSSY = rf"; {DAGGER} not lossless"
UNSOUND = rf"; {DAGGER} not sound"
MISSING = "--"
SEEDS = (
    r" Over seeds: mean $\pm$ standard deviation, and \textsuperscript{*} where a test paired by seed (95\,\%"
    " interval over seeds and prompts) tells it from the best."
)
COMMENT = (
    "% set | method | T | prompts | tau | speedup; the mean gives each set equal weight"
)


@dataclass(frozen=True)
class _Cell:
    """The rates of a method on a set."""

    tau: float | None  # None: a warning doubts it
    speedup: float | None  # likewise
    tau_note: str = ""
    speedup_note: str = ""

    @property
    def shown(self) -> "_Printed":
        """As printed."""
        printed = _Printed()
        if self.tau is not None:
            tau = f"{self.tau:.2f}"
            printed = replace(printed, tau=tau, tau_note=self.tau_note)
        if self.speedup is not None:
            speedup, note = f"{self.speedup:.2f}", self.speedup_note
            printed = replace(printed, speedup=speedup, speedup_note=note)
        return printed


@dataclass(frozen=True)
class _Printed:
    """The rates of a method on a set as printed; empty: not measured, or in doubt."""

    tau: str = ""
    speedup: str = ""
    tau_note: str = ""
    """Of several seeds, their spread and whether it is significantly below the best."""
    speedup_note: str = ""


@dataclass
class _Method:
    """A method at one temperature."""

    lossless: bool = True
    sound: bool = True  # but for losslessness, its counts are not in doubt
    ranked: bool = True
    quiet: bool = True  # other programs did not have most of the CPU
    cells: dict[str, _Cell] = field(default_factory=dict)  # by set

    def shown(self, sets: Sequence[str]) -> list[_Printed]:
        """Its cells of these sets and, of several, their mean."""
        cells = [self.cells.get(name) for name in sets]
        if len(sets) > 1:
            cells.append(self._mean(sets))
        return [_Printed() if cell is None else cell.shown for cell in cells]

    def _mean(self, sets: Sequence[str]) -> _Cell | None:
        """The mean over all sets; None if one was not measured."""
        if any(name not in self.cells for name in sets):
            return None
        cells = [self.cells[name] for name in sets]
        tau = _mean_of_all([cell.tau for cell in cells])
        return _Cell(tau, _mean_of_all([cell.speedup for cell in cells]))


_Methods = dict[str, _Method]


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean; None if one is not known."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def latex(report: "ReportPage") -> str:
    """Tables for the package booktabs; groups that differ only in their prompts share one.

    A set is a dataset, or a kind of prompts where there is one dataset. Bold are the best values as
    printed, of the methods that are ranked; of speedups only if other programs never had most of the CPU.
    """
    lines = [r"% \usepackage{booktabs}, then \input this file"]
    count = len(report.groups)
    for groups in _alike(report.groups):
        group_sections = [group_section(group, count) for group in groups]
        lines += ["", *_comments(group_sections)]
        lines += [*_intervals(groups), *_table(groups)]
    if report.served:
        section = served_section(report)
        caption = f"Drafters of {report.title} in serving engines."
        lines += ["", *_comments([section]), *_served_table(caption, section)]
    return "\n".join(lines) + "\n"


def _alike(groups: "Sequence[Group]") -> "list[list[Group]]":
    """The groups that differ in nothing but their prompts, together."""
    by_conditions: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        conditions = {**group.conditions}
        del conditions["prompts"]
        by_conditions.setdefault(tuple(conditions.values()), []).append(group)
    return [*by_conditions.values()]


def _served_table(caption: str, section: Section) -> list[str]:
    header = [r"$\tau$" if name == "tau" else escaped(name) for name in section.header]
    rows = [[escaped(cell) for cell in row] for row in section.rows]
    return _framed(caption, "l" * len(header), [_row(header)], rows)


def _table(groups: "Sequence[Group]") -> list[str]:
    """A row for each method and temperature, and two columns for each set."""
    by_temperature: dict[float, _Methods] = {}
    results_of_sets = dict(_sets(groups))
    has_seeds = False
    measured: dict[str, set[tuple[str, ...]]] = {}  # by name, what has it
    for result in (one for results in results_of_sets.values() for one in results):
        measured.setdefault(result.name, set()).add(_version(result))
    for name, results in results_of_sets.items():
        names: dict[str, str] = {}  # of a result with a seed, the name of its row
        for compared in over_seeds(results):
            has_seeds = True
            methods = by_temperature.setdefault(compared.drafters[0].temperature, {})
            for drafter in compared.drafters:
                if drafter.mismatch:
                    continue  # each of its seeds has a row
                row_name = f"{drafter.name} ({drafter.count} seeds)"
                method = methods.setdefault(row_name, _Method())
                method.cells[name] = _cell_over_seeds(compared, drafter)
                for result in drafter.results.values():
                    names[result.name] = row_name
        for result in results:
            methods = by_temperature.setdefault(result.temperature, {})
            own_name = result.name
            if len(measured[own_name]) > 1:  # their mean would be of no drafter
                own_name = " ".join(filter(None, (own_name, *_version(result))))
            method = methods.setdefault(names.get(result.name, own_name), _Method())
            method.lossless &= result.evaluation.lossless
            method.sound &= not {*result.wrong_counts} - {NOT_LOSSLESS}
            method.ranked &= not result.unranked
            method.quiet &= not result.disturbed
            if result.name not in names:
                method.cells[name] = _cell(result)
    sets = sorted(results_of_sets)
    columns = [*sets, "mean"] if len(sets) > 1 else sets
    rows: list[list[str]] = []
    for temperature, methods in sorted(by_temperature.items()):
        if len(by_temperature) > 1:
            rows.append([_temperature_line(temperature, 1 + 2 * len(columns))])
        rows += _rows(methods, sets)
    caption = _caption(groups[0], by_temperature) + (SEEDS if has_seeds else "")
    alignment = "l" + "r" * 2 * len(columns)
    return _framed(caption, alignment, _header(columns), rows)


def _version(result: "DrafterResult") -> tuple[str, ...]:
    """What may differ between evaluations of one name on several sets."""
    evaluation = result.evaluation
    return evaluation.title, evaluation.tree, (evaluation.weights or "")[:8]


def _cell(result: "DrafterResult") -> _Cell:
    return _Cell(result.figures.tau, result.speedup)


def _cell_over_seeds(compared: OverSeeds, drafter: SeededDrafter) -> _Cell:
    tau, speedup = [
        drafter.mean(name) if compared.known(drafter, name) else None for name in SHOWN
    ]
    notes = []
    for name in SHOWN:
        below = compared.below_best(drafter, name)
        mark = rf"\textsuperscript{{{MARK}}}" if is_significant(below) else ""
        notes.append(rf" {{\scriptsize$\pm$ {drafter.spread(name):.2f}}}{mark}")
    return _Cell(tau, speedup, *notes)


def _temperature_line(temperature: float, width: int) -> str:
    """A line over so many columns."""
    text = rf"\emph{{temperature {temperature:g}}}"
    return rf"\multicolumn{{{width}}}{{@{{}}l}}{{{text}}}"


def _caption(group: "Group", by_temperature: dict[float, _Methods]) -> str:
    target = group.conditions["target"].partition(" (")[0]
    at_temperature = ""
    if len(by_temperature) == 1:
        at_temperature = f" at temperature {min(by_temperature):g}"
    every_method = [
        method for methods in by_temperature.values() for method in methods.values()
    ]
    dagger = ""
    if not all(method.lossless for method in every_method):
        dagger = LOSSY
    if not all(method.sound for method in every_method):
        dagger = UNSOUND
    return (
        rf"Tokens per call ($\tau$) and speedup over plain decoding of "
        f"{escaped(target)}{at_temperature} "
        f"(best in bold{dagger})."
    )


def _header(columns: Sequence[str]) -> list[str]:
    """The names of the sets, rules below them, and the names of the two rates of each."""
    spans = [rf"\multicolumn{{2}}{{c}}{{{escaped(name)}}}" for name in columns]
    starts = range(2, 2 + 2 * len(columns), 2)
    rules = [rf"\cmidrule(lr){{{start}-{start + 1}}}" for start in starts]
    names = ["method", *[r"$\tau$", "speedup"] * len(columns)]
    return [_row(["", *spans]), "".join(rules), _row(names)]


def _sets(
    groups: "Sequence[Group]",
) -> "Iterator[tuple[str, Sequence[DrafterResult]]]":
    """The results on each set.

    Where several groups have a set of one name, its label has the number of its prompts.
    """
    divided = [group.by(LABELS["dataset"]) for group in groups]
    if len(groups) == 1 and len(divided[0]) == 1:
        divided = [groups[0].by(LABELS["kind"])]
    names = [name for sets in divided for name in sets]
    used: set[str] = set()
    for group, sets in zip(groups, divided, strict=True):
        for name, results in sets.items():
            label = name
            if names.count(name) > 1:
                label = f"{name} ({results[0].figures.prompts})"
            if label in used:
                label = f"{label}, group {group.number}"
            used.add(label)
            yield label, results


def _rows(methods: _Methods, sets: Sequence[str]) -> list[list[str]]:
    """The rows of methods, with the best of the ranked ones in bold."""
    cells = {name: method.shown(sets) for name, method in methods.items()}
    ranked = [cells[name] for name, method in methods.items() if method.ranked]
    best = [_best(column) for column in zip(*ranked, strict=True)]
    is_quiet = all(method.quiet for method in methods.values())
    rows = []
    for name, method in methods.items():
        dagger = "" if method.lossless and method.sound else DAGGER
        row = [escaped(name) + dagger]
        for number, cell in enumerate(cells[name]):
            bold = best[number] if method.ranked else _Printed()
            tau = _printed(cell.tau, bold.tau)
            speedup = _printed(cell.speedup, bold.speedup if is_quiet else "")
            row += [tau + cell.tau_note, speedup + cell.speedup_note]
        rows.append(row)
    return rows


def _best(column: Sequence[_Printed]) -> _Printed:
    """The largest of each rate, but for speedups that are all below 1."""
    taus = [cell.tau for cell in column if cell.tau]
    speedups = [cell.speedup for cell in column if float(cell.speedup or 0) >= 1]
    return _Printed(
        max(taus, key=float, default=""), max(speedups, key=float, default="")
    )


def _printed(number: str, bold: str) -> str:
    """A number, in bold if it equals `bold`; a dash without a number."""
    if not number:
        return MISSING
    return rf"\textbf{{{number}}}" if number == bold else number


def _framed(
    caption: str, columns: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[str]:
    """A whole table; `columns` is the alignment of each."""
    kind = "table*" if len(columns) > WIDE else "table"
    lines = [rf"\begin{{{kind}}}", r"\centering", r"\small"]
    lines += [rf"\caption{{{caption}}}", r"\smallskip"]
    lines += [rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule"]
    lines += [*header, r"\midrule", *map(_row, rows)]
    return [*lines, r"\bottomrule", r"\end{tabular}", rf"\end{{{kind}}}"]


def _comments(about: Sequence[Section]) -> Iterator[str]:
    """Conditions, conclusions and warnings, and all columns with their intervals."""
    for section in about:
        texts = [section.title] if section.title else []
        texts += [f"{name}: {value}" for name, value in section.facts.items()]
        texts += section.sentences
        texts += [" | ".join(row) for row in (section.header, *section.rows)]
        for text in texts:
            yield f"% {line(text)}"


def _intervals(groups: "Sequence[Group]") -> Iterator[str]:
    """The rates on each set."""
    yield COMMENT
    for name, results in _sets(groups):
        for result in results:
            figures = result.figures
            facts = [name, result.label, f"{result.temperature:g}"]
            facts.append(f"{figures.prompts}")
            facts += [rate(figures, "tau"), rate(figures, "speedup")]
            yield f"% {line(' | '.join(facts))}"


def _row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is, on one line, with dashes between the ends of intervals."""
    plain = "".join(ESCAPED.get(character, character) for character in line(text))
    return INTERVAL.sub(r"(\1--\2)", plain)
