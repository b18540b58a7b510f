"""`vlmdistill train`: train a drafter on a feature store."""

import os
from typing import Annotated, Any, Literal

import typer

from vlmdistill.cli import console, forecasts


def train(
    drafter: Annotated[str, typer.Argument(help="Name of a drafter, such as sparrow.")],
    model: console.Model = "demo",
    store: console.StoreName = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR:SIZE",
            help="Keep what is read of a store behind a URL in a local folder: /scratch/cache:500GB.",
        ),
    ] = None,
    view: Annotated[
        str | None, typer.Option(help="Train on this view of the store only.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the trained drafter; default: the same as DRAFTER."),
    ] = None,
    recipe: console.Recipe = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A training setting, such as steps=100; may be repeated.",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FROM",
            help="Initialize from this drafter or published checkpoint (matching weights only).",
        ),
    ] = None,
    seed: console.Seed = 0,
    ranks: Annotated[
        int, typer.Option(min=1, help="Training processes on this machine.")
    ] = 1,
    zero: Annotated[
        int,
        typer.Option(
            min=0,
            max=2,
            help="DeepSpeed ZeRO stage; stage 3 has nothing to shard in one layer.",
        ),
    ] = 0,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Dtype of training; auto: bfloat16 on a GPU, else float32."),
    ] = "auto",
    save_every: Annotated[
        int, typer.Option(min=1, help="Optimizer steps between checkpoints.")
    ] = 200,
    held_out: console.HeldOut = 0.02,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Copy each checkpoint there, and go on from it on any machine: s3://bucket/runs.",
        ),
    ] = None,
    tracker: console.Trackers = None,
    show_config: Annotated[
        bool,
        typer.Option(
            "--show-config",
            help="Only print all settings, as a file that --recipe takes; needs no store.",
        ),
    ] = False,
    dry_run: console.DryRun = False,
    rate: console.Rate = None,
    anyway: console.Anyway = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Start over and replace an earlier run of this name."
        ),
    ] = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Train a drafter on a feature store; the target is not loaded.

    To continue a run that was stopped or killed, run the same command again. Ctrl-C and SIGTERM save a
    checkpoint first. To train on several machines, start this command with torchrun on each.
    """
    import dataclasses

    from vlmdistill.drafters import catalogue

    catalogue.check(drafter)  # what is cheap to check comes before torch
    if recipe and not recipe.endswith(".toml"):
        catalogue.check_recipe(recipe)
    workspace = console.workspace(model, runs)
    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.drafters.core.settings import to_dict
    from vlmdistill.drafters.training import recipes
    from vlmdistill.pipelines import train as pipeline

    plan = pipeline.planned(
        workspace, drafter, recipe, settings or (), name=name, seed=seed
    )
    if show_config:
        if as_json:
            console.result(to_dict(plan.config), as_json)
        else:
            typer.echo(recipes.as_file(drafter, plan.config), nl=False)
        return
    copies = (
        f"{checkpoints.rstrip('/')}/{workspace.root.name}/{plan.out.name}"
        if checkpoints
        else None
    )
    plan = dataclasses.replace(
        plan,
        store=store or plan.store,
        cache=cache,
        view=view,
        zero=zero,
        dtype=dtype,
        save_every=save_every,
        held_out=held_out,
        trackers=tuple(tracker or ()),
        init=workspace.trained(init).absolute() if init else None,
        checkpoints=copies or plan.checkpoints,
    )
    if dry_run:
        from vlmdistill.pipelines.planning import forecast

        found = forecast.training(
            plan, forecast.Speeds.of(workspace.root, rate or ()), ranks
        )
        forecasts.show_training(found, as_json)
        return
    if not anyway:
        from vlmdistill.pipelines.planning import forecast

        forecast.check_training(plan, ranks)
    with console.progress(f"training {plan.out.name}", "steps") as report:
        folder = pipeline.launch(plan, ranks, force, report)
    if os.environ.get("RANK", "0") == "0":
        training = describe(folder)["training"]
        step = training["saved_step"]
        measured: dict[str, Any] = next(
            (one for one in training["history"] if one["step"] == step), {}
        )
        agreement = measured.get("held_out_agreement", [])
        shares = (
            " ".join(f"{share:.3f}" for share in agreement) or "nothing was held out"
        )
        facts = {"drafter": str(folder), "steps": training["steps"], "saved_step": step}
        if warm := training.get("init"):
            counts = {
                name: len(warm[name]) for name in ("taken", "zero", "fresh", "unused")
            }
            facts |= {"init": warm["from"], "init_weights": counts}
        facts |= {
            "samples": training["samples"],
            "held_out_agreement": agreement if as_json else shares,
        }
        console.result(
            facts
            | {name: measured[name] for name in ("predicted_tau",) if name in measured},
            as_json,
        )
