"""`vlmdistill run`: the whole flow."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console
from vlmdistill.cli.report import report


def run(
    model: console.Model = "demo",
    drafters: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    recipe: Annotated[
        str | None, typer.Option(help="paper | fair | demo; demo for the demo target, else paper.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting of all drafters.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the evaluation; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Evaluate on at most N prompts.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to learn from.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 32,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray actors.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Drafters trained at once; one a GPU, or a few on a CPU.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=console.LAST_SEED, help="Seed of everything.")] = 0,
    runs: console.Runs = None,
) -> None:
    """Prompts, responses, features, training, evaluation and report: whatever of it is missing."""
    from vlmdistill.drafters.catalogue import NAMES
    from vlmdistill.pipelines import flow, train
    from vlmdistill.pipelines.workspace import Workspace

    names = list(NAMES) if drafters == "all" else [name.strip() for name in drafters.split(",")]
    plan = flow.Plan(
        drafters=names,
        recipe=recipe or train.default_recipe(model),
        settings=settings or (),
        temperatures=tuple(temperature or (0.0, 1.0)),
        max_new_tokens=max_new_tokens,
        eval_limit=limit,
        batch=batch_size,
        workers=workers,
        jobs=jobs,
        seed=seed,
    )
    workspace = Workspace.of(model, Path(runs) if runs else None)
    flow.run(workspace, plan, console.note, console.progress)
    report(model=model, runs=runs)
