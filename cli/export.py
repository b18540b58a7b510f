"""`vlmdistill export`: write a trained drafter for serving engines."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Write a trained drafter in the format of serving engines.

    vLLM serves it with the plugin of vlmdistill, SGLang serves eagle3 only. `vlmdistill eval DRAFTER
    --engine vllm` measures it there.
    """
    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.pipelines.targets.checkpoints.registry import HUB
    from vlmdistill.pipelines.workspace.workspace import checkpoint_folder

    workspace = console.workspace(model, runs)
    folder = workspace.trained(drafter)
    # A drafter of elsewhere has a target of its own, unless --model is the folder of it.
    known = (
        folder.resolve().is_relative_to(workspace.root.resolve())
        or checkpoint_folder(model) is not None
    )
    target = describe(folder)["provenance"]["target"]
    source = context.get_parameter_source("model")
    given = source is not None and source.name != "DEFAULT"
    if given and not known and target not in (model, HUB.get(model)):
        raise typer.BadParameter(
            f"{folder} was trained for {target}, not for {model}", param_hint="--model"
        )
    from vlmdistill.drafters.checkpoints.export import export as write

    written = write(folder, out, dtype)
    console.result(asdict(written), as_json)
    served = model if known else written.target
    if otherwise := _otherwise(served, describe(folder)["provenance"]):
        console.note(f"warning: {otherwise}")
    for line in commands(served, written):
        console.note(line)


def _otherwise(model: str, trained: dict[str, Any]) -> str:
    """What the target does to prompts otherwise than in training; empty where nothing of it is here."""
    from vlmdistill.pipelines.targets.checkpoints.folder import locate
    from vlmdistill.pipelines.targets.checkpoints.template import served_otherwise
    from vlmdistill.stores.errors import TargetError
    from vlmdistill.stores.schema import Provenance

    try:
        folder = locate(model).folder
    except TargetError:
        return ""
    return served_otherwise(Provenance.from_dict(trained), folder) if folder else ""


def commands(model: str, written: "Exported") -> list[str]:
    """How each engine is started with what was written for a target."""
    import shlex

    import torch

    from vlmdistill.pipelines.cluster.engine_environment import engine_python
    from vlmdistill.pipelines.targets.checkpoints.registry import HUB
    from vlmdistill.pipelines.targets.embedded import EMBEDDED
    from vlmdistill.pipelines.vllm.launch import serve_command, vllm
    from vlmdistill.pipelines.workspace.workspace import absolute_model
    from vlmdistill.stores.errors import TargetError

    try:
        program = vllm(engine_python())
    except TargetError:
        program = "vllm"
    target = str(EMBEDDED.get(model) or HUB.get(model) or absolute_model(model))
    caching, whole = not written.drops_visual, written.whole_images
    serve = serve_command(
        target,
        written.dtype,
        written,
        program=program,
        caching=caching,
        whole_images=whole,
    )
    settings = "" if torch.cuda.is_available() else "VLLM_CPU_KVCACHE_SPACE=1 "  # GiB
    lines = [f"vLLM:   {settings}{shlex.join(serve)}"]
    if "sglang" in written.engines:
        launch = ["python", "-m", "sglang.launch_server", "--model-path", target]
        launch += ["--sampling-defaults", "openai", "--speculative-algorithm"]
        launch += [
            written.method.upper(),
            "--speculative-draft-model-path",
            str(Path(written.out).absolute()),
        ]
        lines.append(f"SGLang: {shlex.join(launch)}")
    return lines
