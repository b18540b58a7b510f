"""`vlmdistill report`: all evaluations of a workspace as one HTML page and a table."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console
from vlmdistill.cli.evaluate import known, rate, responses

if TYPE_CHECKING:
    from vlmdistill.pipelines.evaluation.comparison import DrafterResult

COLUMNS: "dict[str, Callable[[DrafterResult], str]]" = {
    "drafter": lambda one: one.name,
    "T": lambda one: f"{one.temperature:g}",
    "tau": lambda one: rate(one.figures, "tau"),
    "accepted": lambda one: rate(one.figures, "accepted"),
    "speedup": lambda one: rate(one.figures, "speedup"),
    "decode speedup": lambda one: rate(one.figures, "decode_speedup"),
    "prefill": lambda one: f"{one.figures.prefill_share:.0%}",
    "tokens/s": lambda one: f"{one.figures.tokens_per_second:.0f}",
    "plain tokens/s": lambda one: f"{one.figures.plain_tokens_per_second:.0f}",
    "responses at T=0": lambda one: responses(one.figures.lossless),
    "tree": lambda one: one.evaluation.tree,
    "parameters": lambda one: _count(one.evaluation.parameters),
    "calls": lambda one: f"{one.figures.calls}",
}


def report(
    model: console.Model = "demo",
    runs: console.Runs = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="HTML file; default: the workspace's reports/index.html."),
    ] = None,
    as_json: console.Json = False,
) -> None:
    """Write an HTML page of all evaluations and print their table.

    Evaluations with different prompts, settings or hardware do not compare; each such group has its own
    table, and those of serving engines another.
    """
    from vlmdistill.pipelines.evaluation import report as pipeline
    from vlmdistill.pipelines.evaluation.comparison import differing
    from vlmdistill.pipelines.evaluation.served_records import TABLE, load_figures, table

    made = pipeline.make(console.workspace(model, runs), out)
    apart = differing(made.groups)
    if as_json:
        rows = [
            {"group": group.number, **_facts(one), "conditions": group.conditions}
            for group in made.groups
            for one in group.results
        ]
        served = [
            known({**asdict(load_figures(load)), "name": one.name})
            for one in made.served
            for load in one.loads
        ]
        facts = {"page": str(made.page), "differing": apart, "rows": rows, "served": served}
        console.result(facts, as_json=True)
        return
    if apart:
        typer.echo(f"{len(made.groups)} groups that do not compare; they differ in {', '.join(apart)}")
    for group in made.groups:
        conditions = ", ".join(f"{name} {value}" for name, value in group.conditions.items())
        typer.echo(f"\ngroup {group.number}: {conditions}" if apart else conditions)
        console.rows([*COLUMNS], [[cell(one) for cell in COLUMNS.values()] for one in group.results])
        for text in (*(ranking.text for ranking in group.rankings), group.verdict.text):
            typer.echo(text)
        for warning in group.warnings:
            console.note(f"warning: {warning}")
    if made.served:
        typer.echo("\nserving engines, by eval --engine")
        console.rows(TABLE, table(made.served))
    typer.echo(f"{chr(10) if apart else ''}page  {made.page}")


def _facts(result: "DrafterResult") -> dict[str, Any]:
    """A row as JSON."""
    one = result.evaluation
    facts = {"name": one.name, "drafter": one.drafter, "tree": one.tree, "parameters": one.parameters}
    return {**facts, "measured": one.measured, "temperature": result.temperature, **asdict(result.figures)}


def _count(parameters: int) -> str:
    return f"{parameters}" if parameters < 1e6 else f"{parameters / 1e6:.2f}M"
