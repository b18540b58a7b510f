"""`vlmdistill run`: the whole flow."""

from typing import Annotated

import typer

from vlmdistill.cli import console, forecasts
from vlmdistill.cli.evaluate import check_lossless
from vlmdistill.cli.report import report


def run(
    model: console.Model = "demo",
    drafters: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help=f"Drafters; default: all; {console.LIST}."),
    ] = None,
    recipe: console.Recipe = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A training setting of all drafters; may be repeated.",
        ),
    ] = None,
    validation_share: console.ValidationShare = 0.02,
    tracker: console.Trackers = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBERS",
            help=f"Temperatures of the evaluation; default: 0 and 1; {console.LIST}.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Evaluate on at most N held-out prompts.")
    ] = 100,
    max_new_tokens: console.TrainedTokens = None,
    batch_size: console.BatchSize = None,
    workers: console.Workers = None,
    wait: console.Wait = None,
    allow_failed: console.AllowFailed = 0.0,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Drafters to train at once; default: one per GPU, or per core up to 4.",
        ),
    ] = None,
    seed: console.Seed = 0,
    dry_run: console.DryRun = False,
    rate: console.Rate = None,
    anyway: console.Anyway = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Run the whole flow, from prompts to the report.

    Each stage does only what is missing. If more prompts fail than --allow-failed permits, the run ends
    before training.
    """
    from vlmdistill.drafters import catalogue

    # Mistakes are found before torch is loaded.
    listed = catalogue.listed(",".join(drafters or ["all"]))
    names = listed or [*catalogue.NAMES]
    temperatures = console.numbers("--temperature", temperature, 0.0)
    if recipe and not recipe.endswith(".toml"):
        catalogue.check_recipe(recipe)
    workspace = console.workspace(model, runs)
    from vlmdistill.pipelines import flow
    from vlmdistill.pipelines.planning.stages import Speeds
    from vlmdistill.pipelines.stage_times import StageTimes

    plan = flow.Plan(
        drafters=names,
        recipe=recipe,
        settings=settings or (),
        temperatures=tuple(temperatures or (0.0, 1.0)),
        max_new_tokens=max_new_tokens,
        eval_limit=limit,
        batch=batch_size,
        workers=console.worker_options(workers, wait),
        allow_failed=allow_failed,
        jobs=jobs,
        seed=seed,
        held_out=validation_share,
        trackers=tuple(tracker or ()),
        anyway=anyway,
    )
    if dry_run:
        speeds = Speeds.of(workspace.root, rate or ())
        forecasts.show(flow.dry_run(workspace, plan, speeds), as_json)
        return
    times = StageTimes()
    bar = times.timed(console.progress)
    evaluations = flow.run(workspace, plan, console.remark, bar)
    report(model=model, runs=runs, as_json=as_json)
    times.end("report")
    for stage, minutes in times.minutes().items():
        console.remark(f"{stage:10} {minutes:6.1f} min")
    check_lossless(evaluations)
