"""`vlmdistill export`: write a trained drafter for serving engines."""

import shlex
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.drafters.checkpoints.export import Exported


def export(
    context: typer.Context,
    drafter: Annotated[
        str, typer.Argument(help="Name or folder of a trained drafter.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder to write: a new one, or one with the same drafter.",
        ),
    ],
    model: console.Model = "demo",
    dtype: Annotated[
        console.Dtype, typer.Option(help="Dtype of the weights.")
    ] = "bfloat16",
    layout: Annotated[
        Literal["engine", "speculators"],
        typer.Option(
            "--format",
            help="For engines with the plugin of vlmdistill, or as the library speculators saves drafters.",
        ),
    ] = "engine",
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Write a trained drafter in the format of serving engines, with a card (README.md) for a hub.

    vLLM serves it with the plugin of vlmdistill, SGLang serves eagle3 only. `vlmdistill eval DRAFTER
    --engine vllm` measures it there.
    """
    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.pipelines.targets.checkpoints.registry import HUB
    from vlmdistill.pipelines.workspace.workspace import checkpoint_folder

    workspace = console.workspace(model, runs)
    folder = workspace.trained(drafter)
    provenance = describe(folder)["provenance"]
    # A drafter from elsewhere has a target of its own, unless --model is the folder of that target.
    in_workspace = folder.resolve().is_relative_to(workspace.root.resolve())
    is_of_model = in_workspace or checkpoint_folder(model) is not None
    names_another = provenance["target"] not in (model, HUB.get(model))
    if not is_of_model and names_another and _is_given(context, "model"):
        raise typer.BadParameter(
            f"{folder} was trained for {provenance['target']}, not for {model}",
            param_hint="--model",
        )
    from vlmdistill.drafters.checkpoints.export import export as write
    from vlmdistill.pipelines.report import card

    written = write(folder, out, dtype, layout)
    if kept := card.write(workspace, folder, written):
        console.note(kept)
    console.result(asdict(written) if as_json else _facts(written), as_json)
    target = model if is_of_model else written.target
    if difference := _served_difference(target, provenance, written):
        console.note(f"warning: {difference}")
    for line in commands(target, written):
        console.note(line)


def _facts(written: "Exported") -> dict[str, Any]:
    """What was written, in words."""
    facts = asdict(written)
    facts["layers"] = written.layers or "the last one alone"
    facts["visual_tokens"] = "dropped" if facts.pop("drops_visual") else "all"
    for name in ("whole_images", "method", "plugin", "thinking"):  # for programs
        del facts[name]
    return facts


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether an option is in the command line; its default and a variable speak of no one command."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _served_difference(
    model: str, provenance: dict[str, Any], written: "Exported"
) -> str:
    """How the target treats prompts otherwise than in training; empty if its files are not here."""
    from vlmdistill.pipelines.targets.checkpoints.folder import locate
    from vlmdistill.pipelines.targets.checkpoints.template import (
        served_otherwise,
        thinking_arguments,
    )
    from vlmdistill.stores.errors import TargetError
    from vlmdistill.stores.schema import Provenance

    try:
        folder = locate(model).folder
    except TargetError:
        return ""
    if not folder:
        return ""
    arguments = thinking_arguments(written.thinking)
    return served_otherwise(Provenance.from_dict(provenance), folder, arguments)


def commands(model: str, written: "Exported") -> list[str]:
    """How each engine is started with what was written for a target."""
    import torch

    from vlmdistill.pipelines.cluster.engine_environment import engine_python
    from vlmdistill.pipelines.targets.checkpoints import packaged
    from vlmdistill.pipelines.targets.checkpoints.registry import HUB
    from vlmdistill.pipelines.targets.embedded import EMBEDDED
    from vlmdistill.pipelines.vllm.launch import preloaded, serve_command, vllm
    from vlmdistill.pipelines.workspace.workspace import absolute_model
    from vlmdistill.stores.errors import TargetError

    settings = dict[str, str]()
    if not torch.cuda.is_available():
        settings["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    program = "vllm"
    with suppress(TargetError):
        python = engine_python()
        program = vllm(python)
        settings |= preloaded(python)
    folders = {**EMBEDDED, packaged.NAME: packaged.folder()}
    target = str(folders.get(model) or HUB.get(model) or absolute_model(model))
    serve = serve_command(
        target,
        written.dtype,
        written,
        program=program,
        caching=not written.drops_visual,
        whole_images=written.whole_images,
    )
    variables = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines = []
    if program == "vllm":
        beside = " and this package" if written.plugin else ""
        lines.append(f"in the environment of `make engine`, or any with vLLM{beside}:")
    lines.append(f"vLLM:   {' '.join([*variables, shlex.join(serve)])}")
    if "sglang" in written.engines:
        lines.append(f"SGLang: {_sglang_command(target, written)}")
        lines += _sglang_thinking(written.thinking)
    return lines


def _sglang_thinking(mode: str) -> list[str]:
    """What the command for SGLang cannot set."""
    from vlmdistill.pipelines.targets.checkpoints.template import thinking_arguments

    arguments = thinking_arguments(mode)
    if not arguments:
        return []
    return [
        f"SGLang: the drafter was trained with thinking {mode}: send "
        f"`chat_template_kwargs` {arguments[1]} with each request"
    ]


def _sglang_command(target: str, written: "Exported") -> str:
    command = ["python", "-m", "sglang.launch_server", "--model-path", target]
    command += ["--sampling-defaults", "openai"]
    command += ["--speculative-algorithm", written.method.upper()]
    command += ["--speculative-draft-model-path", str(Path(written.out).absolute())]
    return shlex.join(command)
