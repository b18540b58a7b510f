"""`vlmdistill plan`: what a project takes, before anything is downloaded."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console, forecasts

if TYPE_CHECKING:
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.pipelines.planning.plan import ProjectPlan
    from vlmdistill.pipelines.workspace.workspace import Workspace

DEFAULT_DRAFTERS = "wren,hivis,eagle3"
DRAFTERS = ("method", "features alone", "tau in papers", "served by", "good for")


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
    recipe = recipe or _recipe_of(model)
    configs = _configs(names, recipe)
    planned = planning.plan(workspace, data, machine, names, configs)
    if as_json:
        console.result(planned.to_dict(), as_json)
        return
    _show(planned)
    console.echo("\ncommands:")
    for line in _commands(planned, workspace, recipe):
        console.echo(f"  {line}")


def _recipe_of(model: str) -> str:
    """The recipe to compare methods with on a target."""
    from vlmdistill.pipelines.targets.embedded import EMBEDDED

    return "demo" if model in EMBEDDED else "fair"


def _configs(names: list[str], recipe: str) -> dict[str, "DrafterConfig"]:
    """The settings of the drafters that are trained; DataError on an unknown recipe."""
    from vlmdistill.drafters import catalogue
    from vlmdistill.drafters.training import recipes

    return {
        name: recipes.resolve(name, recipe)
        for name in names
        if catalogue.is_trained(name)
    }


def _show(planned: "ProjectPlan") -> None:
    """Print the project, its stages and its methods."""
    console.result(_facts(planned), as_json=False)
    console.echo("")
    forecasts.table(planned.stages)
    console.echo("")
    drafters = [_drafter(*drafter) for drafter in planned.drafters.items()]
    console.rows(DRAFTERS, drafters)
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
    weights = "on this machine"
    if planned.download_bytes:
        weights = f"{console.size(planned.download_bytes)} to download"
    prompt = f"{data.text_tokens} text and {data.visual_tokens} visual tokens"
    arithmetic = f"{gpu.flops / TERA:.0f} TFLOP/s"
    memory = f"{gpu.gib} GiB at {gpu.bandwidth / TERA:.2f} TB/s"
    return {
        "target": f"{target.origin}, {parameters} parameters, {weights}",
        "data": f"{data.prompts} prompts of {prompt}, responses of {data.response_tokens}",
        "machine": f"{planned.gpus.count} x {planned.gpus.name} ({memory}, {arithmetic})",
    }


def _drafter(name: str, store_bytes: int) -> tuple[str, ...]:
    """The row of a method."""
    from vlmdistill.drafters import catalogue

    choice = catalogue.choice(name)
    size = console.size(store_bytes)
    return (name, size, choice.tau, choice.engine_names, choice.good_for)


def _commands(planned: "ProjectPlan", workspace: "Workspace", recipe: str) -> list[str]:
    """The commands of the project, from prompts to a served drafter."""
    from vlmdistill.drafters import catalogue
    from vlmdistill.pipelines.targets.embedded import EMBEDDED

    model = f"--model {shlex.quote(workspace.model)}"
    chosen_recipe = f"--recipe {shlex.quote(recipe)}"
    limit = planned.data.prompts
    source = "FILE --images DIR"
    if workspace.model in EMBEDDED:
        source = "demo"
    lines = [f"vlmdistill prompts {source} --limit {limit} {model}"]
    trained = [name for name in planned.drafters if catalogue.is_trained(name)]
    if trained:
        chosen = (
            f"--for {','.join(trained)} --max-new-tokens {planned.data.response_tokens}"
        )
        lines.append(f"vlmdistill features {chosen} {model}")
    ranks = ""
    if planned.gpus.count > 1:
        ranks = f" --ranks {planned.gpus.count}"
    for name in trained:
        lines.append(f"vlmdistill train {name} {chosen_recipe}{ranks} {model}")
    compared = " ".join(planned.drafters)
    lines.append(f"vlmdistill eval {compared} {model}")
    served = [name for name in trained if catalogue.choice(name).engines]
    if served:
        first = served[0]
        lines.append(f"vlmdistill export {first} --out served/{first} {model}")
    return lines
