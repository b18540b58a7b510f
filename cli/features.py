"""`vlmdistill features`: capture the target's hidden states into the store."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console
from vlmdistill.cli.prompts import imported


def features(
    model: console.Model = "demo",
    prompts: Annotated[Path | None, typer.Option(help="Prompts file; default: the workspace's.")] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            help="Folder of answers; default: the workspace's, where missing answers are made first."
        ),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Store (folder or URL); default: the workspace's.")
    ] = None,
    drafters: Annotated[
        str, typer.Option("--for", help="Drafters to capture for, separated by commas, or all.")
    ] = "all",
    import_: Annotated[
        str | None,
        typer.Option(
            "--import", metavar="SRC", help="Import this first when there are no prompts: a file, or demo."
        ),
    ] = None,
    split: Annotated[console.Side, typer.Option(help="Which prompts to capture.")] = console.Side.train,
    dtype: Annotated[
        console.Dtype, typer.Option(help="Number format of the stored features.")
    ] = console.Dtype.bfloat16,
    encoding: Annotated[
        list[str] | None,
        typer.Option(
            "--encoding",
            metavar="FIELD=HOW",
            help="How a field such as hidden.text is kept: raw (default), zstd (the same bits in 0.8 of the "
            "bytes, slower) or int8 (half the bytes, not the same bits); may be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N prompts only.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Ray actors; default: the GPUs, else the cores.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in one forward pass, padding included.")
    ] = 8192,
    attention: console.Kernels = console.Attention.sdpa,
    target_dtype: console.Precision = console.TargetDtype.auto,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Capture what the drafters need of the target's hidden states, in one pass, into the store.

    Prompts that are not answered yet are answered first. Does what is missing.
    """
    from vlmdistill.pipelines import answers as parts
    from vlmdistill.pipelines import features as capturing
    from vlmdistill.pipelines import fields
    from vlmdistill.pipelines import prompts as prompting
    from vlmdistill.pipelines import responses as answering
    from vlmdistill.pipelines.workers import session
    from vlmdistill.pipelines.workspace import Workspace

    workspace = Workspace.of(model, Path(runs) if runs else None)
    how = console.loading(attention, target_dtype)
    answering.checkpoint(model)  # a wrong model is the first thing to say
    names = fields.drafters(drafters)
    place = store or str(workspace.features)
    kept = fields.encodings(encoding or (), place)
    if import_ and not (prompts or workspace.prompts).exists():
        console.note(f"no prompts yet: importing {import_}")
        imported([import_], workspace, prompts or workspace.prompts, prompting.Choices())
    asked = prompting.select(prompting.read(prompts or workspace.prompts, model), split.value, limit)
    answers = responses or workspace.responses
    # Ray starts once for both, and not at all when nothing is missing.
    answer = responses is None and bool(parts.unanswered(asked, answers))
    with session(workers) if answer else nullcontext():
        if answer:
            sampling, filters = parts.made_with(answers)
            with console.progress("answering", "prompts") as report:
                answering.respond(
                    asked, answers, model, sampling, filters, workers=workers, report=report, how=how
                )
        with console.progress("capturing", "samples") as report:
            summary = capturing.capture(
                asked,
                answers,
                place,
                model,
                names,
                dtype=dtype.value,
                workers=workers,
                budget=batch_tokens,
                report=report,
                how=how,
                encoding=kept,
            )
    console.result(summary.to_dict(), as_json)
