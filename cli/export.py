"""`vlmdistill export`: write a trained drafter for serving engines."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.drafters.checkpoints.export import Exported
    from vlmdistill.pipelines.bench.parity import Parity
    from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
    from vlmdistill.pipelines.workspace.workspace import Workspace


def export(
    drafter: Annotated[str, typer.Argument(help="Name or folder of a trained drafter.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write: a new one, or one with the same drafter.")
    ],
    model: console.Model = "demo",
    dtype: Annotated[console.Dtype, typer.Option(help="Dtype of the weights.")] = "bfloat16",
    check: Annotated[
        bool, typer.Option("--check", help="Serve it with vLLM and compare with our own decoder.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --check: on at most N held-out prompts; default: 49.")
    ] = None,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Write a trained drafter in the format of serving engines.

    vLLM serves it with the plugin of vlmdistill, SGLang serves eagle3 only. With --check, the exit
    status is 1 when the drafter changes a response of vLLM, or when the drafted tokens
    that vLLM accepts per draft differ from those of our decoder by more than 1%.
    """
    from vlmdistill.drafters.checkpoints.export import export as write
    from vlmdistill.pipelines.bench.evaluate import held_out
    from vlmdistill.pipelines.cluster.environment import check_environment
    from vlmdistill.pipelines.workspace.workspace import checkpoint_folder

    if limit and not check:
        raise typer.BadParameter(f"--limit {limit}: it needs --check")
    workspace = console.workspace(model, runs)
    if check:  # before anything is written
        check_environment("vllm")
        prompts = held_out(workspace.prompts, limit or 49, workspace.model)
    folder = workspace.trained(drafter)
    written = write(folder, out, dtype)
    parity = compare(workspace, drafter, written, prompts) if check else None
    facts = asdict(written)
    if parity:
        facts |= {
            "prompts": parity.prompts,
            "identical": parity.identical,
            "accepted_per_draft": parity.engine.per_draft,
            "accepted_per_draft_by_eval": parity.ours.per_draft,
            "tree": parity.tree,
            "accepted_per_draft_by_tree": parity.own.per_draft if parity.own else None,
            "versions": parity.versions,
        }
    console.result(facts, as_json)
    here = folder.resolve().is_relative_to(workspace.root.resolve())
    # A drafter of elsewhere has a target of its own, unless --model is the folder of it.
    for line in commands(model if here or checkpoint_folder(model) else written.target, written):
        console.note(line)
    if parity and not parity.holds:
        console.note("vLLM does not serve this drafter as it was trained: see the numbers above")
        raise typer.Exit(1)


def compare(
    workspace: "Workspace", drafter: str, written: "Exported", prompts: "Sequence[Prompt]"
) -> "Parity":
    """Check an exported drafter; see `parity.check`."""
    from vlmdistill.pipelines.bench import parity
    from vlmdistill.pipelines.targets.loading import load
    from vlmdistill.pipelines.vllm.messages import EngineJob

    target = load(workspace.model, dtype=written.dtype)
    job = EngineJob(
        target=str(target.folder.absolute()), questions=parity.questions(target, prompts), dtype=written.dtype
    )
    with console.progress("comparing", "prompts") as report:
        return parity.check(
            target, workspace.trained(drafter), written, prompts, job, own_tree=True, on_prompt=report
        )


def commands(model: str, written: "Exported") -> list[str]:
    """How each engine is started with what was written for a target."""
    import shlex

    import torch

    from vlmdistill.pipelines.cluster.environment import engine_python
    from vlmdistill.pipelines.targets.checkpoints.registry import HUB
    from vlmdistill.pipelines.targets.embedded import EMBEDDED
    from vlmdistill.pipelines.vllm.serve import serve_command, vllm
    from vlmdistill.pipelines.workspace.workspace import absolute_model
    from vlmdistill.stores.errors import TargetError

    try:
        program = vllm(engine_python())
    except TargetError:
        program = "vllm"
    target = str(EMBEDDED.get(model) or HUB.get(model) or absolute_model(model))
    caching, whole = not written.drops_visual, written.whole_images
    serve = serve_command(
        target, written.dtype, written, program=program, caching=caching, whole_images=whole
    )
    settings = "" if torch.cuda.is_available() else "VLLM_CPU_KVCACHE_SPACE=1 "  # GiB
    lines = [f"vLLM:   {settings}{shlex.join(serve)}"]
    if "sglang" in written.engines:
        launch = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm"]
        launch += [
            written.method.upper(),
            "--speculative-draft-model-path",
            str(Path(written.out).absolute()),
        ]
        lines.append(f"SGLang: {shlex.join(launch)}")
    return lines
