"""`vlmdistill report`: all evaluations of a workspace as a page and tables, or what changed between two."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmdistill.cli import console
from vlmdistill.cli.evaluate import known
from vlmdistill.cli.serve import LOCAL_NAMES, until_stopped

if TYPE_CHECKING:
    from vlmdistill.pipelines.report.changes import Change
    from vlmdistill.pipelines.report.page import ReportPage
    from vlmdistill.pipelines.report.results import DrafterResult
    from vlmdistill.pipelines.workspace.workspace import Workspace

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
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Serve the page to this machine, following what runs in the workspace.",
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of --serve; default 8001, and 0 takes a free one.",
        ),
    ] = None,
) -> None:
    """Write an HTML page of the evaluations and print their table.

    Of several evaluations of one kind (drafter, name, tree, prompts, temperature, settings, machine), the
    latest counts, among those that --where selects.

    Evaluations with different prompts, settings or hardware do not compare; each such group has its own
    table, and those of serving engines another.

    With A and B, drafters are compared on the same prompts, by name and temperature: a rate has changed if
    the 95% interval of its ratio, over prompts, excludes 1. The exit status is 0 whatever has changed.

    With --serve, nothing is written: the page is at the printed address and follows trainings and
    evaluations while they run, until Ctrl-C or SIGTERM.
    """
    if port is not None and not serve:
        raise typer.BadParameter("it needs --serve", param_hint="--port")
    if serve:
        if two or out or plots or as_json or form != "html":
            raise typer.BadParameter(
                "it goes with --where, --model and --runs alone", param_hint="--serve"
            )
        _serve(
            console.workspace(model, runs), where or [], 8001 if port is None else port
        )
        return
    if two:
        if len(two) != 2:
            raise typer.BadParameter(
                "name two, to compare them, or none", param_hint="A B"
            )
        if out or plots or form not in ("html", "json"):
            raise typer.BadParameter(
                "they go with one report; two have only --json",
                param_hint="--format, --out, --plots",
            )
        _compare(two[0], two[1], where or [], as_json or form == "json")
        return
    from vlmdistill.pipelines.report import selection

    if plot_format != "svg" and plots is None:
        raise typer.BadParameter("it needs --plots", param_hint="--plot-format")
    workspace = console.workspace(model, runs)
    selection.check(workspace.reports, model)
    from vlmdistill.pipelines.report import page as pipeline

    read = pipeline.make if form == "html" else pipeline.read
    found = read(workspace, out, where or [])
    written: dict[str, str] = {}
    if form == "html":
        written["page"] = str(found.page)
    elif out is not None:
        pipeline.write(_text(found, form), out)
        written[form] = str(out)
    if plots is not None:
        pipeline.plot(found, plots, plot_format)
        written["plots"] = str(plots)
    if as_json:
        console.result({**written, **_all_facts(found)}, as_json=True)
    elif form != "html" and out is None:
        typer.echo(_text(found, form), nl=False)
    else:
        if form == "html":
            _show(found)
        console.result(written, as_json=False)


def _serve(workspace: "Workspace", where: list[str], port: int) -> None:
    """Serve the page until a signal comes."""
    import socket

    from vlmdistill.pipelines.endpoint.following import build_page_app
    from vlmdistill.pipelines.report.live import LiveReport

    app = build_page_app(LiveReport(workspace, where), LOCAL_NAMES)
    with socket.create_server(("127.0.0.1", port)) as listener:
        until_stopped(
            app, listener, f"the report on {workspace.root.name} is at http://127.0.0.1"
        )


def _text(found: "ReportPage", form: str) -> str:
    """The report in a form that is no page."""
    from vlmdistill.pipelines.report import documents
    from vlmdistill.pipelines.report.latex import latex

    forms = {"md": documents.markdown, "latex": latex, "csv": documents.csv}
    return forms[form](found) if form in forms else json.dumps(_all_facts(found)) + "\n"


def _show(found: "ReportPage") -> None:
    """Print a table for each group."""
    from vlmdistill.pipelines.report.comparison import differing
    from vlmdistill.pipelines.report.tables import (
        COLUMNS,
        PARTS,
        SERVED,
        divided,
        served,
    )

    if apart := differing(found.groups):
        console.echo(
            f"{len(found.groups)} groups that do not compare; they differ in {', '.join(apart)}"
        )
    for group in found.groups:
        conditions = ", ".join(
            f"{name} {value}" for name, value in group.conditions.items()
        )
        console.echo(f"\ngroup {group.number}: {conditions}" if apart else conditions)
        console.rows(
            [*COLUMNS],
            [[cell(one) for cell in COLUMNS.values()] for one in group.results],
        )
        if parts := divided(group.results):
            console.rows(PARTS, parts)
        for text in (*(ranking.text for ranking in group.rankings), group.verdict.text):
            console.echo(text)
        for warning in group.warnings:
            console.note(f"warning: {warning}")
    if found.served:
        console.echo("\nserving engines, by eval --engine")
        console.rows(SERVED, served(found.served))
    if apart:
        typer.echo()


def _all_facts(found: "ReportPage") -> dict[str, Any]:
    """The report as JSON."""
    from vlmdistill.pipelines.report.comparison import differing

    rows = [
        {"group": group.number, **_facts(one), "conditions": group.conditions}
        for group in found.groups
        for one in group.results
    ]
    served = [
        known(
            {
                **asdict(load),
                "name": one.name,
                "software": one.software and asdict(one.software),
            }
        )
        for one, load in (
            (result.evaluation, result.figures) for result in found.served
        )
    ]
    return {"differing": differing(found.groups), "rows": rows, "served": served}


def _facts(result: "DrafterResult") -> dict[str, Any]:
    """A row as JSON."""
    one = result.evaluation
    facts = {
        "name": one.name,
        "drafter": one.drafter,
        "tree": one.tree,
        "parameters": one.parameters,
    }
    facts |= {
        "title": one.title,
        "measured": one.measured,
        "software": one.software and asdict(one.software),
    }
    return {**facts, "temperature": result.temperature, **asdict(result.figures)}


def _compare(before: Path, after: Path, where: list[str], as_json: bool) -> None:
    """Print what changed."""
    from vlmdistill.pipelines.report import changes

    found = changes.compare(before, after, where)
    if as_json:
        facts = asdict(found)
        for drafter, one in zip(facts["drafters"], found.drafters, strict=True):
            for rate, change in zip(drafter["rates"], one.rates, strict=True):
                rate["verdict"] = change.verdict
        console.result(
            {"before": str(before), "after": str(after), **facts}, as_json=True
        )
        return
    console.echo(f"A  {before}\nB  {after}")
    for fact in found.differing:
        some = (
            ""
            if len(fact.drafters) == len(found.both)
            else f" ({', '.join(fact.drafters)})"
        )
        console.echo(f"{fact.name}: {fact.before} -> {fact.after}{some}")
    for side, names in (("A", found.only_before), ("B", found.only_after)):
        if names:
            console.echo(f"only in {side}: {', '.join(names)}")
    for what, differing in (("", found.refused), ("times of ", found.untimed)):
        for reason in dict.fromkeys(map(tuple, differing.values())):
            names = [name for name, one in differing.items() if tuple(one) == reason]
            console.echo(
                f"{what}{', '.join(names)} do not compare: {' and '.join(reason)}"
            )
    if not found.drafters:
        console.echo("nothing compares")
        return
    rates = (*changes.COUNTED, *changes.TIMED)
    typer.echo()
    console.rows(
        ["drafter", "T", *(rate.replace("_", " ") for rate in rates)],
        [
            [
                one.name,
                f"{one.temperature:g}",
                *(_change(one.of(rate)) for rate in rates),
            ]
            for one in found.drafters
        ],
    )
    console.echo(
        f"A -> B; in parentheses the 95% interval of the ratio, over prompts; {HIGHER} higher, {LOWER} lower"
    )
    for one in found.drafters:
        for warning in one.warnings:
            console.note(
                f"warning: {one.name} at temperature {one.temperature:g} in {warning}"
            )
    count = sum(len(one.rates) for one in found.drafters)
    console.echo(f"\n{len(found.changed)} of {count} rates changed by more than noise")
    for one, rate in found.changed:
        console.echo(f"{one.name} at temperature {one.temperature:g}: {rate.sentence}")


def _change(change: "Change | None") -> str:
    """Both values, the interval of their ratio, and a mark if they differ, as one cell."""
    if change is None:
        return "-"
    within = (
        f" ({change.ratio.low:.2f}-{change.ratio.high:.2f})" if change.ratio else ""
    )
    mark = {"higher": f" {HIGHER}", "lower": f" {LOWER}"}.get(change.verdict, "")
    return f"{change.before:.2f} -> {change.after:.2f}{within}{mark}"
