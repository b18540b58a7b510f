"""`vlmdistill report`: all evaluations of a workspace as a page and tables, or what changed between two."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmdistill.cli import console
from vlmdistill.cli.evaluate import without_nulls

if TYPE_CHECKING:
    from vlmdistill.pipelines.bench.statistics import Rate
    from vlmdistill.pipelines.report.changes import Change, ChangedDrafter, Changes
    from vlmdistill.pipelines.report.comparison import Group
    from vlmdistill.pipelines.report.page import ReportPage
    from vlmdistill.pipelines.report.results import DrafterResult, ServerResult
    from vlmdistill.pipelines.report.seeds import OverSeeds, SeededDrafter

HIGHER, LOWER = "++", "--"


def report(
    two: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="A B",
            help="Print instead what changed from A to B: workspaces, folders of evaluations, or files.",
        ),
    ] = None,
    model: console.Model = "demo",
    runs: console.Runs = None,
    form: Annotated[
        Literal["html", "md", "csv", "latex", "json"],
        typer.Option(
            "--format",
            help="html: the page and a printed table; the others are printed, or written to --out.",
        ),
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write; default of html: the workspace's reports/index.html.",
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write each chart of the page there as a file."
        ),
    ] = None,
    plot_format: Annotated[
        Literal["svg", "pdf", "png"],
        typer.Option(help="Of the files of --plots; pdf and png need the extra plots."),
    ] = "svg",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Only evaluations for which it is true, such as \"drafter = 'wren' and temperature = 0\"; "
            "its columns are those of `eval --list --json`; may be repeated.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the result as JSON, whatever the --format of the file.",
        ),
    ] = False,
) -> None:
    """Write an HTML page of the evaluations and print their table.

    Of several evaluations of one kind (drafter, name, tree, prompts, temperature, settings, machine), the
    latest counts, among those that --where selects.

    Evaluations with different prompts, settings or hardware do not compare; each such group has its own
    table, and those of serving engines another.

    With A and B, drafters are compared on the same prompts, by name and temperature: a rate has changed if
    the 95% interval of its ratio, over prompts, excludes 1. The exit status is 0 whatever has changed.
    """
    if two:
        if len(two) != 2:
            raise typer.BadParameter(
                "give two evaluations to compare, or none", param_hint="A B"
            )
        if out or plots or form not in ("html", "json"):
            raise typer.BadParameter(
                "not available when two are compared: use --json",
                param_hint="--format, --out, --plots",
            )
        _compare(two[0], two[1], where or [], as_json or form == "json")
        return
    if plot_format != "svg" and plots is None:
        raise typer.BadParameter("requires --plots", param_hint="--plot-format")

    from vlmdistill.pipelines.report import selection

    workspace = console.workspace(model, runs)
    selection.check(workspace.reports, model)  # before torch
    from vlmdistill.pipelines.report import page as pipeline

    read = pipeline.make if form == "html" else pipeline.read
    page = read(workspace, out, where or [])
    written: dict[str, str] = {}
    if form == "html":
        written["page"] = str(page.page)
    elif out is not None:
        pipeline.write(_text(page, form), out)
        written[form] = str(out)
    if plots is not None:
        pipeline.plot(page, plots, plot_format)
        written["plots"] = str(plots)

    if as_json:
        console.result({**written, **_report_facts(page)}, as_json=True)
    elif form == "html":
        _show(page)
        console.result(written, as_json=False)
    elif out is not None:
        console.result(written, as_json=False)
    else:
        typer.echo(_text(page, form), nl=False)


def _text(page: "ReportPage", form: str) -> str:
    """The report in a format other than HTML."""
    from vlmdistill.pipelines.report import documents
    from vlmdistill.pipelines.report.latex import latex

    if form == "md":
        return documents.markdown(page)
    if form == "csv":
        return documents.csv(page)
    if form == "latex":
        return latex(page)
    return json.dumps(_report_facts(page)) + "\n"


def _show(page: "ReportPage") -> None:
    """Print a table for each group, and one for serving engines."""
    from vlmdistill.pipelines.report.comparison import differing
    from vlmdistill.pipelines.report.tables import SERVED, served

    conditions = differing(page.groups)
    if conditions:
        console.echo(
            f"{len(page.groups)} groups that do not compare; they differ in {', '.join(conditions)}"
        )
    for group in page.groups:
        title = _joined(group.conditions)
        if conditions:
            title = f"\ngroup {group.number}: {title}"
        console.echo(title)
        _show_group(group)
    if page.served:
        console.echo("\nserving engines, by eval --engine")
        console.rows(SERVED, served(page.served))
    if conditions:
        typer.echo()


def _joined(conditions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())


def _show_group(group: "Group") -> None:
    """Print the tables of a group, its conclusions, and its warnings on stderr."""
    from vlmdistill.pipelines.report.answer import answers
    from vlmdistill.pipelines.report.seeds import HEADER, NOTE, over_seeds, seed_rows
    from vlmdistill.pipelines.report.tables import COLUMNS, PARTS, divided, result_rows

    console.rows([*COLUMNS], result_rows(group.results))
    if compared := over_seeds(group.results):
        console.rows(HEADER, seed_rows(compared))
        console.echo(NOTE)
    part_rows = divided(group.results)
    if part_rows:
        console.rows(PARTS, part_rows)
    for answer in answers(group):
        console.echo(answer.text)
    console.echo(group.verdict.text)
    for warning in group.warnings:
        console.note(f"warning: {warning}")


def _report_facts(page: "ReportPage") -> dict[str, Any]:
    """The report as JSON."""
    from vlmdistill.pipelines.report.comparison import differing

    rows = [
        {"group": group.number, **_facts(result), "conditions": group.conditions}
        for group in page.groups
        for result in group.results
    ]
    served = [_served_facts(result) for result in page.served]
    warnings = [text for group in page.groups for text in group.warnings]
    facts = {
        "differing": differing(page.groups),
        "rows": rows,
        "served": served,
        "warnings": [*warnings, *page.served_warnings],
    }
    if seeds := [*_seed_facts(page)]:
        facts["seeds"] = seeds
    return facts


def _seed_facts(page: "ReportPage") -> "Iterator[dict[str, Any]]":
    """The drafters with several seeds as JSON."""
    from vlmdistill.pipelines.report.seeds import SHOWN, over_seeds

    for group in page.groups:
        for compared in over_seeds(group.results):
            for drafter in compared.drafters:
                yield {
                    "group": group.number,
                    "drafter": drafter.name,
                    "temperature": drafter.temperature,
                    "seeds": [*drafter.results],
                    "of_seeds": drafter.of_seeds,
                    "mismatch": drafter.mismatch or None,
                    "rates": {
                        rate: _over_seeds(compared, drafter, rate) for rate in SHOWN
                    },
                }


def _over_seeds(
    compared: "OverSeeds", drafter: "SeededDrafter", rate: "Rate"
) -> dict[str, Any] | None:
    """Mean, spread and distance from the best of a rate; None if it is in doubt."""
    if not compared.known(drafter, rate):
        return None
    below = compared.below_best(drafter, rate)
    return {
        "mean": drafter.mean(rate),
        "spread": drafter.spread(rate),
        "below_best": asdict(below) if below else None,
    }


def _facts(result: "DrafterResult") -> dict[str, Any]:
    """A result of a drafter as JSON."""
    from vlmdistill.pipelines.bench.statistics import as_facts

    evaluation = result.evaluation
    return {
        "name": evaluation.name,
        "drafter": evaluation.drafter,
        "tree": evaluation.tree,
        "parameters": evaluation.parameters,
        "title": evaluation.title,
        "measured": evaluation.measured,
        "software": asdict(evaluation.software),
        "temperature": result.temperature,
        "not_ranked": result.no_speedup,
        **as_facts(result.figures),
    }


def _served_facts(result: "ServerResult") -> Any:
    """A result of a server as JSON, without numbers that it does not report."""
    facts = asdict(result.figures)
    facts["name"] = result.evaluation.name
    facts["thinking"] = result.evaluation.thinking or None
    facts["software"] = asdict(result.evaluation.software)
    facts["not_ranked"] = result.no_speedup
    return without_nulls(facts)


def _compare(before: Path, after: Path, where: list[str], as_json: bool) -> None:
    """Print what changed."""
    from vlmdistill.pipelines.report import changes

    compared = changes.compare(before, after, where)
    if as_json:
        facts = {"before": str(before), "after": str(after)}
        console.result({**facts, **_change_facts(compared)}, as_json=True)
        return
    console.echo(f"A  {before}\nB  {after}")
    _show_differences(compared)
    if compared.drafters:
        _show_rates(compared, compared.rates)
        _show_changed(compared)
    else:
        console.echo("nothing compares")


def _change_facts(compared: "Changes") -> dict[str, Any]:
    """A comparison as JSON, with the verdict on each rate."""
    facts = asdict(compared)
    for drafter_facts, drafter in zip(
        facts["drafters"], compared.drafters, strict=True
    ):
        for rate, change in zip(drafter_facts["rates"], drafter.rates, strict=True):
            rate["verdict"] = change.verdict
    return facts


def _show_differences(compared: "Changes") -> None:
    """Print the facts that differ, and what does not compare."""
    for fact in compared.differing:
        drafters = ""
        if len(fact.drafters) < len(compared.both):
            drafters = f" ({', '.join(fact.drafters)})"
        console.echo(f"{fact.name}: {fact.before} -> {fact.after}{drafters}")
    if compared.only_before:
        console.echo(f"only in A: {', '.join(compared.only_before)}")
    if compared.only_after:
        console.echo(f"only in B: {', '.join(compared.only_after)}")
    for reason, drafters in _by_reason(compared.refused).items():
        console.echo(f"not compared, {drafters}: {reason}")
    for reason, drafters in _by_reason(compared.untimed).items():
        console.echo(f"times not compared, {drafters}: {reason}")


def _by_reason(reasons: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By reason, the names of the drafters; `reasons` are by drafter."""
    names: dict[str, list[str]] = {}
    for drafter, texts in reasons.items():
        names.setdefault(" and ".join(texts), []).append(drafter)
    return {reason: ", ".join(drafters) for reason, drafters in names.items()}


def _show_rates(compared: "Changes", rates: Sequence[Any]) -> None:
    """Print a table of both values of each rate; warnings on stderr."""
    from vlmdistill.pipelines.report.results import in_words

    typer.echo()
    header = ["drafter", "T", *map(in_words, rates)]
    rows = [_rates_row(drafter, rates) for drafter in compared.drafters]
    console.rows(header, rows)
    console.echo(
        f"A -> B; in parentheses the 95% interval of the ratio, over prompts; {HIGHER} higher, {LOWER} lower"
    )
    for drafter in compared.drafters:
        for warning in drafter.warnings:
            console.note(f"warning: {_at_temperature(drafter)} in {warning}")


def _rates_row(drafter: "ChangedDrafter", rates: Sequence[Any]) -> list[str]:
    cells = [_change(drafter.of(rate)) for rate in rates]
    return [drafter.name, f"{drafter.temperature:g}", *cells]


def _change(change: "Change | None") -> str:
    """Both values, the interval of their ratio, and a mark if they differ, as one cell."""
    if change is None:
        return "-"
    cell = f"{change.before:.2f} -> {change.after:.2f}"
    if change.ratio:
        cell += f" ({change.ratio.low:.2f}-{change.ratio.high:.2f})"
    if change.verdict == "higher":
        return f"{cell} {HIGHER}"
    return f"{cell} {LOWER}" if change.verdict == "lower" else cell


def _show_changed(compared: "Changes") -> None:
    """Print the rates that changed, in sentences."""
    count = sum(len(drafter.rates) for drafter in compared.drafters)
    changed = compared.changed
    console.echo(f"\n{len(changed)} of {count} rates changed by more than noise")
    for drafter, change in changed:
        console.echo(f"{_at_temperature(drafter)}: {change.sentence}")


def _at_temperature(drafter: "ChangedDrafter") -> str:
    return f"{drafter.name} at temperature {drafter.temperature:g}"
