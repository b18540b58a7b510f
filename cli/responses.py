"""`vlmdistill responses`: generate the target's responses to the prompts."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console, forecasts


def responses(
    model: console.Model = "demo",
    prompts: console.PromptsFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of responses; default: the workspace's."
        ),
    ] = None,
    split: console.SplitName = "train",
    limit: console.Limit = None,
    temperature: Annotated[
        float,
        typer.Option(
            help="Sampling temperature; 1 is the target's own distribution, 0 is greedy."
        ),
    ] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(help="Nucleus sampling: share of probability kept; 1 is off."),
    ] = 1.0,
    max_new_tokens: console.MaxNewTokens = 1024,
    seed: console.Seed = 0,
    min_words: Annotated[
        int, typer.Option(help="Drop responses with fewer words.")
    ] = 6,
    max_repetition: Annotated[
        float,
        typer.Option(
            help="Drop responses in which a larger share of the 8-grams is repeated."
        ),
    ] = 0.5,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Drop prompt and response with more tokens together; default: the target's limit.",
        ),
    ] = None,
    batch_size: console.BatchSize = None,
    workers: console.Workers = None,
    wait: console.Wait = None,
    allow_failed: console.AllowFailed = 0.0,
    thinking: console.Thinking = None,
    engine: console.Engine = "transformers",
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    dry_run: console.DryRun = False,
    rate: console.Rate = None,
    anyway: console.Anyway = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Generate the target's responses to the prompts.

    Only missing responses are generated. Responses that a filter drops are kept in the folder, with the
    reason, but not used. A prompt that fails, such as one with an unreadable image, is retried on another
    machine; the exit status is 1 if any prompt fails in the end.
    """
    from vlmdistill.pipelines.data.features.capturer import CaptureJob
    from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
    from vlmdistill.pipelines.data.responses.quality import Filters
    from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint

    workspace = console.workspace(model, runs)
    if not dry_run:
        checkpoint(model)  # cheap checks come before Ray and torch
    sampling = SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        thinking=thinking or "",
    )
    job = CaptureJob.of(
        workspace,
        prompts=prompts,
        split=split,
        limit=limit,
        responses=out,
        workers=console.worker_options(workers, wait, attention, target_dtype, engine),
        sampling=sampling,
        batch=batch_size,
    )
    if dry_run:
        from vlmdistill.pipelines.planning import forecast
        from vlmdistill.pipelines.planning.stages import Speeds

        speeds = Speeds.of(workspace.root, rate or ())
        planned = forecast.capture(job, speeds)
        forecasts.show([planned.responses], as_json)
        return
    from vlmdistill.pipelines import flow
    from vlmdistill.pipelines.cluster.reporting import check_failed

    filters = Filters(
        min_words=min_words, max_repetition=max_repetition, max_length=max_length
    )
    summary = flow.generate(job, filters, bar=console.progress, anyway=anyway)
    console.result(summary.to_dict(), as_json)
    check_failed(summary.failed, summary.prompts, allow_failed)
