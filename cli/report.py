"""`vlmdistill report`: all evaluations of a workspace as one page and a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmdistill.cli import console

HEADER = (
    "drafter",
    "T",
    "tau",
    "accepted",
    "speedup",
    "decode speedup",
    "prefill",
    "tokens/s",
    "plain tokens/s",
    "answers at T=0",
    "tree",
    "parameters",
    "calls",
)


def report(
    model: console.Model = "demo",
    runs: console.Runs = None,
    out: Annotated[Path | None, typer.Option(help="HTML file; default: reports/index.html.")] = None,
    as_json: console.Json = False,
) -> None:
    """Make one page of all evaluations, and print their table.

    Evaluations that were measured on other prompts, settings or hardware stand in groups of their own.
    """
    from vlmdistill.pipelines import report as pipeline
    from vlmdistill.pipelines.evaluations import differing
    from vlmdistill.pipelines.workspace import Workspace

    made = pipeline.make(Workspace.of(model, Path(runs) if runs else None), out)
    apart = differing(made.groups)
    if as_json:
        console.result({"page": str(made.page), "differing": apart, "rows": made.rows}, as_json=True)
        return
    if apart:
        typer.echo(f"{len(made.groups)} groups that do not compare; they differ in {', '.join(apart)}")
    for group in made.groups:
        told = ", ".join(f"{name} {value}" for name, value in group.conditions.items())
        typer.echo(f"\ngroup {group.number}: {told}" if apart else told)
        console.rows(HEADER, [_line(row) for row in group.rows])
        typer.echo(group.verdict.text)
    typer.echo(f"{chr(10) if apart else ''}page  {made.page}")


def _line(row: Mapping[str, Any]) -> list[str]:
    count = row["lossless"]
    checked = sum(count.values())
    answers = f"{count['identical']:g}/{checked:g} identical" if checked else "-"
    answers += f", {count['near_tie']:g} near-tie" if count["near_tie"] else ""
    answers += f", {count['different']:g} DIFFERENT" if count["different"] else ""
    return [
        row["name"],
        f"{row['temperature']:g}",
        *(f"{row[name]:.2f}" for name in ("tau", "accepted", "speedup", "decode_speedup")),
        f"{row['prefill_share']:.0%}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['plain_tokens_per_second']:.0f}",
        answers,
        row["tree"],
        f"{row['parameters']:g}" if row["parameters"] < 1e6 else f"{row['parameters'] / 1e6:.2f}M",
        f"{row['calls']:g}",
    ]
