"""`vlmdistill plan`: what a project takes, before anything is downloaded."""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console, forecasts

if TYPE_CHECKING:
    from vlmdistill.drafters.core.config import DrafterConfig
    from vlmdistill.pipelines.planning.plan import ProjectPlan
    from vlmdistill.pipelines.workspace.workspace import Workspace

DEFAULT_DRAFTERS = "wren,hivis,eagle3"
DRAFTERS = ("method", "its features", "published tau", "served by", "good for")


def plan(
    target: Annotated[
        str | None, typer.Argument(help="Target model, in place of --model.")
    ] = None,
    model: console.Model = "demo",
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
    model = _only(target, model)
    workspace = console.workspace(model, runs)
    from vlmdistill.pipelines.planning import plan as planning
    from vlmdistill.pipelines.train import default_recipe

    data = planning.ProjectData(
        prompts=prompts,
        text_tokens=text_tokens,
        visual_tokens=visual_tokens,
        response_tokens=max_new_tokens,
    )
    recipe = recipe or default_recipe(model)
    configs = _configs(names, recipe)
    planned = planning.plan(workspace, data, machine, names, configs)
    if as_json:
        console.result(planned.to_dict(), as_json)
        return
    _show(planned, recipe)
    console.echo("\ncommands:")
    for line in _commands(planned, workspace, recipe):
        console.echo(f"  {line}")


def _only(argument: str | None, model: str) -> str:
    """The target, as an argument or of --model; BadParameter if these are two."""
    from vlmdistill.pipelines.workspace.workspace import default_model

    if argument is None:
        return model
    if model not in (argument, default_model()):
        raise typer.BadParameter(
            f"the target is {argument} or {model}: give one of them",
            param_hint="--model",
        )
    return argument


def _configs(names: list[str], recipe: str) -> dict[str, "DrafterConfig"]:
    """The settings of the drafters that are trained; DataError on an unknown recipe."""
    from vlmdistill.drafters import catalogue
    from vlmdistill.drafters.training import recipes

    return {
        name: recipes.resolve(name, recipe)
        for name in names
        if catalogue.is_trained(name)
    }


def _show(planned: "ProjectPlan", recipe: str) -> None:
    """Print the project, its stages and its methods."""
    console.result({**_facts(planned), "recipe": recipe}, as_json=False)
    console.echo("")
    forecasts.table(planned.stages, planned.download_bytes)
    for line in _sources_of_rates(planned):
        console.echo(line)
    console.echo("")
    drafters = [_drafter(*drafter) for drafter in planned.drafters.items()]
    console.rows(DRAFTERS, drafters)
    head = console.size(planned.target.head_bytes)
    console.echo(
        "features of several methods share states and are stored once, with the target's "
        f"head and embeddings ({head})"
    )
    for line in _known_of_tau(planned):
        console.echo(line)
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


def _sources_of_rates(planned: "ProjectPlan") -> Iterator[str]:
    """What the rates of the stages are, and how they differ from those on the page of measurements."""
    from vlmdistill.pipelines.planning.assumptions import PROMPT

    sources = {stage.speed.source for stage in planned.stages if stage.speed}
    if "assumed" in sources:
        yield (
            "assumed rates: of one H100 with 8.3B random weights (docs/measurements/gpu.md), scaled to these "
            "GPUs and this target"
        )
        yield (
            "- responses: the reading of their prompts included, which have "
            f"{planned.data.prompt_tokens} tokens (there about {PROMPT})"
        )
        yield "- train: the rate of eagle2 over the mean number of hops and the drafter's weights"
        yield "- eval: one response at a time, as fast as without a drafter"
    if "measured" in sources:
        yield "measured rates: of the latest run of the stage in this workspace"


def _known_of_tau(planned: "ProjectPlan") -> Iterator[str]:
    """What is known of the tau of the methods before anything is measured."""
    from vlmdistill.drafters import catalogue
    from vlmdistill.pipelines.planning.assumptions import BREAK_EVEN

    if any(catalogue.choice(name).tau == "-" for name in planned.drafters):
        yield (
            "published tau, -: no paper prints one for a 7B target with images; why: docs/methods.md"
        )
    chain, tree = BREAK_EVEN
    yield (
        "tau: tokens a cycle; a bonus is the target's own token of each cycle; on an H100 a 7B target "
        f"breaks even at {chain:.1f} to {tree:.1f} with it (docs/measurements/gpu.md)"
    )


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
    for name in trained:
        if catalogue.choice(name).engines:
            lines.append(f"vlmdistill export {name} --out served/{name} {model}")
    return lines
