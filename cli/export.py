"""`vlmdistill export`: a trained drafter for serving engines."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console


def export(
    drafter: Annotated[str, typer.Argument(help="Name or folder of a trained drafter.")],
    out: Annotated[Path, typer.Option(help="Folder to write, not there yet.")],
    model: console.Model = "demo",
    dtype: Annotated[
        console.Dtype, typer.Option(help="Number format of the weights.")
    ] = console.Dtype.bfloat16,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Write a drafter as SGLang and vLLM load it: eagle3, the one method that both serve with images."""
    from vlmdistill.drafters.export import export as write
    from vlmdistill.pipelines.workspace import Workspace

    workspace = Workspace.of(model, Path(runs) if runs else None)
    facts = write(workspace.trained(drafter), out, dtype.value)
    console.result(facts, as_json)
    target = facts["target"]
    console.note(
        f"SGLang: python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {out}"
    )
    console.note(
        f"vLLM:   vllm serve {target} --speculative-config "
        f'\'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 3}}\''
    )
