"""`vlmdistill responses`: let the target answer the prompts."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console


def responses(
    model: console.Model = "demo",
    prompts: Annotated[Path | None, typer.Option(help="Prompts file; default: the workspace's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of answers; default: the workspace's.")] = None,
    split: Annotated[
        console.Side, typer.Option(help="Which prompts to answer; eval decodes its own.")
    ] = console.Side.train,
    temperature: Annotated[
        float, typer.Option(help="1 samples the target's own distribution, 0 is greedy.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, max=console.LAST_SEED, help="Of the sampling.")] = 0,
    min_words: Annotated[int, typer.Option(help="Drop answers of fewer words.")] = 6,
    max_repetition: Annotated[
        float, typer.Option(help="Drop answers with a larger share of 8-grams that they repeat.")
    ] = 0.5,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Drop what is longer, prompt included; default: the target's limit."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N prompts only.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Ray actors; default: the GPUs, else the cores.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 32,
    attention: console.Kernels = console.Attention.sdpa,
    target_dtype: console.Precision = console.TargetDtype.auto,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Let the target answer the prompts, sampled, into Parquet parts.

    Does what is missing; whatever is killed, each prompt ends with one answer. Answers that a filter
    drops are kept aside with their reason.
    """
    from vlmdistill.pipelines import prompts as prompting
    from vlmdistill.pipelines import responses as answering
    from vlmdistill.pipelines.answers import Sampling
    from vlmdistill.pipelines.filters import Filters
    from vlmdistill.pipelines.workspace import Workspace

    workspace = Workspace.of(model, Path(runs) if runs else None)
    answering.checkpoint(model)  # a wrong model is the first thing to say
    asked = prompting.select(prompting.read(prompts or workspace.prompts, model), split.value, limit)
    with console.progress("answering", "prompts") as report:
        summary = answering.respond(
            asked,
            out or workspace.responses,
            model,
            Sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed),
            Filters(min_words=min_words, max_repetition=max_repetition, max_length=max_length),
            workers=workers,
            batch=batch_size,
            report=report,
            how=console.loading(attention, target_dtype),
        )
    console.result(summary.to_dict(), as_json)
