"""`vlmdistill train`: fit a drafter to a feature store."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console


def train(
    drafter: Annotated[str, typer.Argument(help="Name of a drafter, such as sparrow.")],
    model: console.Model = "demo",
    store: Annotated[Path | None, typer.Option(help="Feature store; the workspace's own by default.")] = None,
    view: Annotated[str | None, typer.Option(help="Train on a view of the store.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result; the drafter's by default.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="paper | fair | demo; demo for the demo target, else paper.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be repeated.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=console.LAST_SEED, help="Seed of weights, order and noise.")
    ] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    zero: Annotated[
        int, typer.Option(min=0, max=2, help="ZeRO stage; a drafter is one layer, too small to part.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="auto | bfloat16 | float32.")] = "auto",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between resumable checkpoints.")] = 200,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Train a drafter from the feature store; the target itself is not needed."""
    from vlmdistill.drafters import checkpoint
    from vlmdistill.drafters.training.record import Progress
    from vlmdistill.pipelines import train as pipeline
    from vlmdistill.pipelines.workspace import Workspace

    workspace = Workspace.of(model, Path(runs) if runs else None)
    config = pipeline.resolve(drafter, recipe or pipeline.default_recipe(model), settings or ())
    if ranks > 1 and "RANK" not in os.environ:
        pipeline.launch(ranks, sys.argv[1:])
        return
    with console.progress(f"training {name or drafter}", "%") as report:

        def on_step(progress: Progress) -> None:
            report(round(100 * progress.done), 100, progress.remark)

        folder = pipeline.run(
            workspace,
            drafter,
            config,
            name=name,
            store=store,
            view=view,
            seed=seed,
            zero=zero,
            dtype=dtype,
            save_every=save_every,
            resume=resume,
            force=force,
            on_step=on_step,
        )
    if os.environ.get("RANK", "0") == "0":
        training = checkpoint.describe(folder)["training"]
        measured = training["history"][-1]["held_out_agreement"] if training["history"] else []
        facts = {"drafter": str(folder), "steps": training["steps"], "samples": training["samples"]}
        shares = " ".join(f"{share:.3f}" for share in measured)
        shown = measured if as_json else shares or "nothing was held out"
        console.result({**facts, "held_out_agreement": shown}, as_json)
