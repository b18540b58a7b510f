"""`vlmdistill plan`: what a project takes, before anything is downloaded."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.pipelines.planning.plan import MethodPlan, ProjectPlan, StagePlan
    from vlmdistill.pipelines.workspace.workspace import Workspace

DEFAULT_DRAFTERS = "wren,hivis,eagle3"
COLUMNS = ("hours", "tokens/s", "rate", "memory of a process", "disk")
"""Of a stage and of a training."""


def plan(
    model: Annotated[
        str, typer.Argument(help="A name, a hub id or a checkpoint folder.")
    ],
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 10_000,
    gpus: Annotated[
        str, typer.Option(metavar="NxGPU", help="GPUs, such as H100 or 2xA100-40GB.")
    ] = "1xH100",
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            metavar="NAMES",
            help=f"Drafters, or all; default: {DEFAULT_DRAFTERS}; {console.LIST}.",
        ),
    ] = None,
    recipe: console.Recipe = None,
    text_tokens: Annotated[
        int, typer.Option(min=1, help="Text tokens of a prompt.")
    ] = 100,
    visual_tokens: Annotated[
        int, typer.Option(min=0, help="Visual tokens of a prompt.")
    ] = 1000,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a response.")
    ] = 512,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Say what a project takes: hours, memory and disk of each stage and method, and the commands.

    Needs neither weights nor a network. Rates are those that the workspace has measured on such GPUs, else
    assumed: as on one H100, by the arithmetic and bandwidth of the GPU.
    """
    from vlmdistill.drafters import catalogue
    from vlmdistill.pipelines.planning.gpus import Gpus

    listed = catalogue.listed(",".join(drafters or [DEFAULT_DRAFTERS]))
    names = listed or [*catalogue.NAMES]
    machine = Gpus.parse(gpus)
    workspace = console.workspace(model, runs)
    from vlmdistill.pipelines.planning import plan as planning

    data = planning.ProjectData(
        prompts=prompts,
        text_tokens=text_tokens,
        visual_tokens=visual_tokens,
        response_tokens=max_new_tokens,
    )
    configs = _configs(names, recipe)
    measured = planning.measured_rates(workspace, machine, names)
    planned = planning.plan(workspace, data, machine, names, configs, measured)
    if as_json:
        console.result(planned.to_dict(), as_json)
        return
    _show(planned)
    console.echo("\ncommands:")
    for line in _commands(planned, workspace, recipe):
        console.echo(f"  {line}")


def _configs(names: list[str], recipe: str | None) -> dict[str, "DrafterConfig"]:
    """The settings of the drafters that are trained; DataError on an unknown recipe."""
    from vlmdistill.drafters import catalogue
    from vlmdistill.drafters.training import recipes

    return {
        name: recipes.resolve(name, recipe or "fair")
        for name in names
        if catalogue.is_trained(name)
    }


def _show(planned: "ProjectPlan") -> None:
    """Print the project, its stages and its methods."""
    console.result(_facts(planned), as_json=False)
    console.echo("")
    stages = [(name, *_stage(stage)) for name, stage in planned.stages.items()]
    console.rows(("stage", *COLUMNS), stages)
    console.echo("")
    methods = [_method(name, method) for name, method in planned.methods.items()]
    header = ("method", *COLUMNS, "features alone", "tau in papers", "vLLM")
    console.rows(header, methods)
    if not planned.fits:
        console.note(
            "warning: what does not fit needs more or larger GPUs, or ZeRO (`train --zero 2`)"
        )


def _facts(planned: "ProjectPlan") -> dict[str, str]:
    """The lines above the tables."""
    from vlmdistill.pipelines.planning.gpus import TERA

    data = planned.data
    gpu = planned.gpus.each
    target = planned.target
    parameters = console.scaled(target.parameters.all, ("", "k", "M", "B"), "")
    weights = console.size(planned.download_bytes)
    prompt = f"{data.text_tokens} text and {data.visual_tokens} visual tokens"
    arithmetic = f"{gpu.flops / TERA:.0f} TFLOP/s"
    memory = f"{gpu.gib} GiB at {gpu.bandwidth / TERA:.2f} TB/s"
    return {
        "target": f"{target.origin}, {parameters} parameters, {weights} in bfloat16",
        "data": f"{data.prompts} prompts of {prompt}, responses of {data.response_tokens}",
        "machine": f"{planned.gpus.count} x {planned.gpus.name} ({memory}, {arithmetic})",
        "hours": f"{planned.hours:.1f} in all",
        "disk": f"{console.size(planned.disk_bytes)} in all",
    }


def _method(name: str, method: "MethodPlan") -> tuple[str, ...]:
    """The row of a method."""
    training = _stage(method.training) if method.training else ("-",) * len(COLUMNS)
    size = console.size(method.store_bytes)
    served = "yes" if method.served else "no"
    return (name, *training, size, method.published_tau, served)


def _stage(stage: "StagePlan") -> tuple[str, ...]:
    """The columns of a stage."""
    rate = "measured" if stage.measured else "assumed"
    memory = console.size(stage.memory.total)
    if stage.memory.lacking:
        memory += ", does not fit"
    disk = console.size(stage.disk_bytes)
    return (f"{stage.hours:.2f}", f"{stage.rate:.0f}", rate, memory, disk)


def _commands(
    planned: "ProjectPlan", workspace: "Workspace", recipe: str | None
) -> list[str]:
    """The commands of the project, from prompts to a served drafter."""
    model = f"--model {shlex.quote(workspace.model)}"
    chosen_recipe = f"--recipe {shlex.quote(recipe or 'fair')}"
    limit = planned.data.prompts
    lines = [f"vlmdistill prompts FILE --images DIR --limit {limit} {model}"]
    trained = [name for name, method in planned.methods.items() if method.training]
    if trained:
        lines.append(f"vlmdistill features --for {','.join(trained)} {model}")
    ranks = ""
    if planned.gpus.count > 1:
        ranks = f" --ranks {planned.gpus.count}"
    for name in trained:
        lines.append(f"vlmdistill train {name} {chosen_recipe}{ranks} {model}")
    compared = " ".join(planned.methods)
    lines.append(f"vlmdistill eval {compared} {model}")
    served = [name for name in trained if planned.methods[name].served]
    if served:
        first = served[0]
        lines.append(f"vlmdistill export {first} --out served/{first} {model}")
    return lines
