"""`vlmdistill train`: train a drafter on a feature store."""

import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmdistill.cli import console, forecasts

if TYPE_CHECKING:
    from vlmdistill.drafters.training.run import Run

Drafter = Annotated[str, typer.Argument(help="Name of a drafter, such as sparrow.")]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the trained drafter; default: the same as DRAFTER."),
]

# Data
Cache = Annotated[
    str | None,
    typer.Option(
        metavar="DIR:SIZE",
        help="Keep what is read of a store behind a URL in a local folder: /scratch/cache:500GB.",
    ),
]
View = Annotated[str | None, typer.Option(help="Train on this view of the store only.")]

# Settings
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A training setting, such as steps=100; may be repeated.",
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        metavar="FROM",
        help="Initialize from this drafter or published checkpoint (matching weights only).",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        metavar="MINUTES",
        help="Train for this time, in place of the steps or epochs: steps are timed first.",
    ),
]
CpuSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Train for these CPU seconds of all threads and ranks; see --minutes.",
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config",
        help="Only print all settings, as a file that --recipe takes; needs no store.",
    ),
]

# Machine
Ranks = Annotated[int, typer.Option(min=1, help="Training processes on this machine.")]
Zero = Annotated[
    int,
    typer.Option(
        min=0,
        max=2,
        help="DeepSpeed ZeRO stage; stage 3 has nothing to shard in one layer.",
    ),
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="Dtype of training; auto: bfloat16 on a GPU, else float32."),
]

# Checkpoints
SaveEvery = Annotated[
    int, typer.Option(min=1, help="Optimizer steps between checkpoints.")
]
CheckpointsUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Copy each checkpoint there, and continue from it on any machine: s3://bucket/runs.",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Start over and replace an earlier run of this name."),
]


def train(
    drafter: Drafter,
    model: console.Model = "demo",
    store: console.StoreName = None,
    cache: Cache = None,
    view: View = None,
    name: Name = None,
    recipe: console.Recipe = None,
    settings: Settings = None,
    minutes: Minutes = None,
    cpu_seconds: CpuSeconds = None,
    init: Init = None,
    seed: console.Seed = 0,
    ranks: Ranks = 1,
    zero: Zero = 0,
    dtype: Dtype = "auto",
    save_every: SaveEvery = 200,
    validation_share: console.ValidationShare = 0.02,
    checkpoints: CheckpointsUrl = None,
    tracker: console.Trackers = None,
    show_config: ShowConfig = False,
    dry_run: console.DryRun = False,
    rate: console.Rate = None,
    anyway: console.Anyway = False,
    force: Force = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Train a drafter on a feature store; the target is not loaded.

    To continue a run that was stopped or killed, run the same command again. Ctrl-C and SIGTERM save a
    checkpoint first. To train on several machines, start this command with torchrun on each.
    """
    from dataclasses import replace

    from vlmdistill.drafters import catalogue

    # Names are checked before torch is loaded.
    catalogue.check(drafter)
    if recipe and not recipe.endswith(".toml"):
        catalogue.check_recipe(recipe)
    _check_budget(minutes, cpu_seconds, settings or (), dry_run)
    workspace = console.workspace(model, runs)
    from vlmdistill.drafters.training.run import TrainingBudget
    from vlmdistill.pipelines import train as pipeline

    plan = pipeline.planned(
        workspace, drafter, recipe, settings or (), name=name, seed=seed
    )
    if show_config:
        _show_config(drafter, plan, recipe or pipeline.default_recipe(model), as_json)
        return
    if checkpoints:
        folder = f"{workspace.root.name}/{plan.out.name}"
        plan = replace(plan, checkpoints=f"{checkpoints.rstrip('/')}/{folder}")
    plan = replace(
        plan,
        store=store or plan.store,
        cache=cache,
        view=view,
        zero=zero,
        dtype=dtype,
        save_every=save_every,
        held_out=validation_share,
        trackers=tuple(tracker or ()),
        init=workspace.trained(init).absolute() if init else None,
    )
    if minutes is not None:
        plan = replace(plan, budget=TrainingBudget(60 * minutes))
    if cpu_seconds is not None:
        plan = replace(plan, budget=TrainingBudget(cpu_seconds, of_cpu=True))
    from vlmdistill.pipelines.planning import forecast
    from vlmdistill.pipelines.planning.stages import Speeds

    if dry_run:
        speeds = Speeds.of(workspace.root, rate or ())
        own_model = "" if store else model
        planned = forecast.training(plan, speeds, ranks, own_model, force=force)
        forecasts.show([planned], as_json)
        return
    if not anyway:
        forecast.check_training(plan, ranks)
    if store and (target := pipeline.other_target(model, store, cache)):
        console.note(
            f"warning: {store} holds features of {target}, not of {model}: the drafter is for "
            f"{target}, and --model names another workspace"
        )
    was_trained = plan.out.exists() and not force
    with console.progress(f"training {plan.out.name}", "steps") as report:
        out = pipeline.launch(plan, ranks, force, report)
    if os.environ.get("RANK", "0") == "0":
        facts = _facts(out, as_json)
        console.result(facts, as_json)
        if was_trained:
            console.note(
                f"{out.name} is already trained ({facts['steps']} steps): --force trains it again"
            )


def _check_budget(
    minutes: float | None,
    cpu_seconds: float | None,
    settings: Sequence[str],
    dry_run: bool,
) -> None:
    """BadParameter if the length of the training is given twice, or is none, or cannot be known."""
    lengths: list[str] = []
    for option, time in (("--minutes", minutes), ("--cpu-seconds", cpu_seconds)):
        if time is None:
            continue
        lengths.append(option)
        if not 0 < time < inf:
            raise typer.BadParameter("give a time above 0", param_hint=option)
        if dry_run:
            raise typer.BadParameter(
                "the steps are known once some are timed, which --dry-run does not do",
                param_hint=option,
            )
    lengths += [f"--set {text}" for text in settings if text.startswith("steps=")]
    if len(lengths) > 1:
        raise typer.BadParameter(
            "each says how long to train: give one of them",
            param_hint=" and ".join(lengths),
        )


def _show_config(drafter: str, plan: "Run", recipe: str, as_json: bool) -> None:
    """Print all settings of a run: as JSON, or as a recipe file."""
    from vlmdistill.drafters.core.settings import to_dict
    from vlmdistill.drafters.training import recipes

    if as_json:
        console.result(to_dict(plan.config), as_json)
    else:
        console.echo(
            f'# {drafter} by the recipe {recipe} and --set; "default" is the method\'s own value.'
        )
        typer.echo(recipes.as_file(drafter, plan.config), nl=False)


def _facts(folder: Path, as_json: bool) -> dict[str, Any]:
    """What to print of a trained drafter."""
    from vlmdistill.drafters.checkpoints.description import describe

    training = describe(folder)["training"]
    facts = {
        "drafter": str(folder),
        "steps": training["steps"],
        "saved_step": training["saved_step"],
    }
    if "budget" in training:
        facts["budget"] = training["budget"]
    if "init" in training:
        facts |= _init_facts(training["init"])
    measured = _measurement_of(training)
    agreement = measured.get("held_out_agreement", [])
    shares = " ".join(f"{share:.3f}" for share in agreement)
    facts["samples"] = training["samples"]
    facts["validate"] = training.get("validate", 0)
    facts["validation_agreement"] = (
        agreement if as_json else shares or "no samples validate"
    )
    if "predicted_tau" in measured:
        facts["predicted_tau"] = measured["predicted_tau"]
    return facts


def _init_facts(init: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter that a run began with, and how many of its weights were taken."""
    groups = ("taken", "zero", "fresh", "unused")
    counts = {group: len(init[group]) for group in groups}
    return {"init": init["from"], "init_weights": counts}


def _measurement_of(training: Mapping[str, Any]) -> Mapping[str, Any]:
    """The measurement of the saved weights; empty if no samples validate."""
    for entry in training["history"]:
        if entry["step"] == training["saved_step"]:
            measured: Mapping[str, Any] = entry
            return measured
    return {}
