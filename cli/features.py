"""`vlmdistill features`: capture the target's hidden states into the feature store."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console, forecasts


def features(
    model: console.Model = "demo",
    prompts: console.PromptsFile = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of responses; default: the workspace's, where missing ones are generated first.",
        ),
    ] = None,
    store: console.StoreName = None,
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            metavar="NAMES",
            help=f"Drafters to capture for; default: all; {console.LIST}.",
        ),
    ] = None,
    import_: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="SRC",
            help="Import this first if there are no prompts: a file, or demo.",
        ),
    ] = None,
    split: console.SplitName = "train",
    limit: console.Limit = None,
    dtype: Annotated[
        console.Dtype | None,
        typer.Option(help="Dtype of features in a new store; default: bfloat16."),
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE=ENCODING",
            help="Encoding of a feature such as hidden.text: raw (default) or int8 (lossy, half of the "
            "bytes); may be repeated.",
        ),
    ] = None,
    batch_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum tokens in one forward pass, padding included."
        ),
    ] = 8192,
    max_new_tokens: console.TrainedTokens = None,
    workers: console.Workers = None,
    wait: console.Wait = None,
    allow_failed: console.AllowFailed = 0.0,
    engine: console.Engine = "transformers",
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    dry_run: console.DryRun = False,
    rate: console.Rate = None,
    anyway: console.Anyway = False,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Capture the features that drafters need.

    One pass captures the hidden states for all drafters of --for. Missing responses are generated first, with
    --engine vllm in the same pass, and only missing samples are captured. Features that a store lacks are
    added to the samples that it has. The exit status is 1 if any prompt fails on all machines.
    """
    from vlmdistill.pipelines.data.features import capture_store
    from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
    from vlmdistill.pipelines.data.responses import dataset
    from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint

    if responses and max_new_tokens:
        raise typer.BadParameter(
            "it has no effect with --responses: remove one of them",
            param_hint="--max-new-tokens",
        )
    if import_ and dry_run:
        raise typer.BadParameter(
            "it imports nothing: leave out --import", param_hint="--dry-run"
        )
    workspace = console.workspace(model, runs)
    if not dry_run:
        checkpoint(model)  # cheap checks come before Ray and torch
    settings = CaptureSettings(
        drafters=capture_store.drafters(",".join(drafters or ["all"])),
        dtype=dtype,
        encoding=capture_store.encodings(encoding or ()),
        batch_tokens=batch_tokens,
    )
    prompts = prompts or workspace.prompts
    if import_ and not prompts.exists():
        from vlmdistill.pipelines.prompts import import_sources

        with console.progress("importing", "rows") as report:
            import_sources(workspace, [import_], prompts, progress=report)
    sampling = None
    if not responses:
        sampling = dataset.sampling(workspace.responses, max_new_tokens)
    job = CaptureJob.of(
        workspace,
        prompts=prompts,
        split=split,
        limit=limit,
        responses=responses,
        store=store,
        settings=settings,
        workers=console.worker_options(workers, wait, attention, target_dtype, engine),
        sampling=sampling,
    )
    if dry_run:
        from vlmdistill.pipelines.planning import forecast
        from vlmdistill.pipelines.planning.stages import Speeds

        speeds = Speeds.of(workspace.root, rate or ())
        planned = forecast.capture(job, speeds)
        forecasts.show(planned.stages, as_json)
        return
    from vlmdistill.pipelines import flow
    from vlmdistill.pipelines.cluster.reporting import check_failed

    done = flow.capture_features(job, bar=console.progress, anyway=anyway)
    facts = vars(done.features)
    # Those of both stages; a key may fail in either.
    failed = done.failed if as_json else len(done.failed)
    console.result(facts | {"failed": failed}, as_json)
    check_failed(done.failed, len(job.prompts), allow_failed)
