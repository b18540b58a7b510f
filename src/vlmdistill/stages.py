"""The stages of the flow as functions: each does what the command of its name does, in the same workspace."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import export as exports
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.drafters.training.recipes import as_texts
from vlmdistill.pipelines import flow
from vlmdistill.pipelines import train as training
from vlmdistill.pipelines.bench import evaluate as bench
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.cluster.reporting import check_failed
from vlmdistill.pipelines.data.features.capturer import (
    CaptureJob,
    CaptureSettings,
    CaptureSummary,
)
from vlmdistill.pipelines.data.prompts.importing import Choices, ImportSummary
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.responder import ResponseSummary
from vlmdistill.pipelines.planning import forecast
from vlmdistill.pipelines.planning import status as overview
from vlmdistill.pipelines.planning.status import WorkspaceStatus
from vlmdistill.pipelines.prompts import import_sources
from vlmdistill.pipelines.report import card, page
from vlmdistill.pipelines.report.comparison import rank
from vlmdistill.pipelines.report.results import DrafterResult, Results
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, VlmdistillError
from vlmdistill.stores.progress import Progress, silent

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
Runs = str | Path | None


class StageProgress(Protocol):
    """Is called whenever more of a stage is done."""

    def __call__(self, stage: str, done: int, total: int, remark: str = "", /) -> None:
        """`done` of `total` parts of `stage`, and a remark; a total of 0 is unknown."""


Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def in_api_words(
    function: Callable[Arguments, Returned],
) -> Callable[Arguments, Returned]:
    """The function with errors that name its arguments, such as `eval_share`, not options of the command."""
    options: dict[str, str] = {}
    for name in inspect.signature(function).parameters:
        options[f"--{name.replace('_', '-')}"] = name

    def argument_of(match: re.Match[str]) -> str:
        return options.get(match[0], match[0])

    def reworded(text: object) -> object:
        if not isinstance(text, str):
            return text
        parts = text.split("`")  # every second part is a command, which stays
        for number in range(0, len(parts), 2):
            parts[number] = OPTION.sub(argument_of, parts[number])
        return "`".join(parts)

    @functools.wraps(function)
    def call(*args: Arguments.args, **named: Arguments.kwargs) -> Returned:
        _check_progress(named.get("progress"))
        try:
            return function(*args, **named)
        except VlmdistillError as error:
            error.args = tuple(map(reworded, error.args))
            raise

    return call


def _check_progress(progress: object) -> None:
    """DataError if `progress` cannot be called as `StageProgress` is."""
    if progress is None:
        return
    try:
        inspect.signature(progress).bind("stage", 0, 0, "")  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            "progress: give a function of four arguments, progress(stage, done, total, remark)"
        ) from None
    except ValueError:  # a function of C, whose arguments are not known
        return


def _of(progress: StageProgress | None, stage: str) -> Progress:
    """The progress of one stage."""
    return partial(progress, stage) if progress else silent


@in_api_words
def prompts(
    *sources: str | Path,
    model: str | None = None,
    runs: Runs = None,
    images: str | Path | None = None,
    ask: str | None = None,
    limit: int | None = None,
    eval_share: float = 0.05,
    split: Literal["train", "eval"] | None = None,
    progress: StageProgress | None = None,
) -> ImportSummary:
    """Import prompts from files, folders and datasets into a workspace; as `vlmdistill prompts`.

    Args:
        sources: JSON, JSONL, Parquet or tar files, datasets, folders of photos (with `ask`), or `demo`.
        model: The target: a name, a hub id or a checkpoint folder; default: VLMDISTILL_MODEL, else `demo`.
            Its workspace is `runs/<model>`.
        runs: Folder or URL of the workspaces; default: VLMDISTILL_RUNS, else `runs`.
        images: Folder of the images, if it is not that of the source.
        ask: The question about images and videos that have none.
        limit: Import at most so many prompts.
        eval_share: Share of the prompts to hold out for evaluation.
        split: Put all prompts into this split instead.
        progress: Is called as rows are read, with stage, done, total and a remark.

    Returns:
        What was added, and what was skipped for which reason.

    Raises:
        DataError: Nothing can be imported.

    Example:
        >>> vlmdistill.prompts("photos", ask="Describe the image.")
    """
    choices = Choices(
        images=Path(images) if images else None,
        ask=ask,
        limit=limit,
        eval_share=eval_share,
        split=split,
    )
    with Workspace.of(model, runs) as workspace:
        return import_sources(
            workspace,
            [str(source) for source in sources],
            choices=choices,
            progress=_of(progress, "prompts"),
        )


@in_api_words
def responses(
    *,
    model: str | None = None,
    runs: Runs = None,
    limit: int | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    seed: int = 0,
    thinking: Thinking = "",
    workers: int | None = None,
    allow_failed: float = 0.0,
    anyway: bool = False,
    progress: StageProgress | None = None,
) -> ResponseSummary:
    """Generate the missing responses of the target to the prompts to train on; as `vlmdistill responses`.

    Args:
        model: The target; see `prompts`.
        runs: Folder or URL of the workspaces.
        limit: Use only the first prompts.
        temperature: 1 is the target's own distribution, 0 is greedy.
        max_new_tokens: Maximum length of a response, in tokens.
        seed: Seed of the sampling.
        thinking: Whether the target reasons before it answers: `on`, `off`, or `mixed`, at half of the
            prompts; default: as its chat template has it.
        workers: Ray workers; 0: this process, without Ray; default: this process for few prompts or on one
            device, else as many as the GPUs, or cores, can hold.
        allow_failed: Share of the prompts that may fail.
        anyway: Start also where free disk or memory will not suffice.
        progress: Is called as responses come, with stage, done, total and a remark.

    Returns:
        What was generated, kept and dropped.

    Raises:
        DataError: There are no prompts, disk or memory will not suffice, or more failed than `allow_failed`;
            the others are kept.

    Example:
        >>> vlmdistill.responses(max_new_tokens=256)
    """
    with Workspace.of(model, runs) as workspace:
        sampling = SamplingSettings(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            thinking=thinking,
        )
        job = _job(workspace, limit, workers, CaptureSettings(), sampling)
        summary = flow.generate(job, bar=partial(_bar, progress), anyway=anyway)
        check_failed(summary.failed, summary.prompts, allow_failed)
        return summary


@in_api_words
def features(
    drafters: Sequence[str] | None = None,
    *,
    model: str | None = None,
    runs: Runs = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    workers: int | None = None,
    allow_failed: float = 0.0,
    anyway: bool = False,
    progress: StageProgress | None = None,
) -> CaptureSummary:
    """Capture the features that drafters need, after missing responses; as `vlmdistill features`.

    Args:
        drafters: Names to capture for; None: all.
        model: The target; see `prompts`.
        runs: Folder or URL of the workspaces.
        limit: Use only the first prompts.
        max_new_tokens: Maximum length of new responses; default: that of those that exist, or 1024.
        workers: Ray workers; 0: this process, without Ray; default: this process for few prompts or on one
            device, else as many as the GPUs, or cores, can hold.
        allow_failed: Share of the prompts that may fail.
        anyway: Start also where free disk or memory will not suffice.
        progress: Is called as responses and samples come, with stage, done, total and a remark.

    Returns:
        What was captured, and the store.

    Raises:
        DataError: There are no prompts, disk or memory will not suffice, or more failed than `allow_failed`;
            the others are kept.

    Example:
        >>> vlmdistill.features(["wren", "sparrow"])
    """
    if drafters is not None and not drafters:
        raise DataError("drafters=[] names no drafter: give names, or None for all")
    for name in drafters or ():
        catalogue.trained(name)
    with Workspace.of(model, runs) as workspace:
        settings = CaptureSettings(drafters=tuple(drafters) if drafters else None)
        sampling = dataset.sampling(workspace.responses, max_new_tokens)
        job = _job(workspace, limit, workers, settings, sampling)
        done = flow.capture_features(job, bar=partial(_bar, progress), anyway=anyway)
        check_failed(done.failed, len(job.prompts), allow_failed)
        return done.features


def _job(
    workspace: Workspace,
    limit: int | None,
    workers: int | None,
    settings: CaptureSettings,
    sampling: SamplingSettings,
) -> CaptureJob:
    return CaptureJob.of(
        workspace,
        limit=limit,
        settings=settings,
        workers=WorkerOptions(workers=workers),
        sampling=sampling,
    )


@contextmanager
def _bar(
    progress: StageProgress | None, title: str, unit: str, kept_in: str = ""
) -> Iterator[Progress]:
    """The progress bar of a stage of `flow`: calls of `progress`."""
    yield _of(progress, unit)


@dataclass(frozen=True, kw_only=True)
class TrainedDrafter:
    """A drafter after its training."""

    name: str
    folder: Path
    steps: int
    saved_step: int
    """The step whose weights are kept: the last one, or the best on the validation samples."""
    samples: int
    agreement: tuple[float, ...]
    """Of each hop, the share of drafted tokens that the target would choose, on validation samples."""


@in_api_words
def train(
    drafter: str,
    *,
    model: str | None = None,
    runs: Runs = None,
    name: str | None = None,
    recipe: str | None = None,
    settings: Mapping[str, Any] | None = None,
    init: str | None = None,
    seed: int = 0,
    validation_share: float = 0.02,
    force: bool = False,
    anyway: bool = False,
    progress: StageProgress | None = None,
) -> TrainedDrafter:
    """Train a drafter on the workspace's features, in this process; as `vlmdistill train`.

    Args:
        drafter: Name of a method, such as `wren`.
        model: The target; see `prompts`. It is not loaded.
        runs: Folder or URL of the workspaces.
        name: Name of the trained drafter; default: that of the method.
        recipe: A recipe by name, or a file; default: `demo` for the embedded targets, else `paper`.
        settings: Settings over those of the recipe, such as `{"steps": 100}`.
        init: Initialize from this drafter or published checkpoint.
        seed: Of weights, order and noise.
        validation_share: Share of the samples that validate and are not trained on.
        force: Start over and replace an earlier run of this name.
        anyway: Start also where free disk or memory will not suffice.
        progress: Is called after each step, with stage, done, total and a remark.

    Returns:
        The drafter. A run that was stopped continues; one that is done is returned as it is.

    Raises:
        DataError: A name or a setting is unknown, the store lacks a feature, or disk or memory will not
            suffice.
        TrainingError: The training cannot run, or the folder holds another run.

    Example:
        >>> vlmdistill.train("wren", settings={"steps": 100})
    """
    catalogue.check(drafter)
    with Workspace.of(model, runs) as workspace:
        texts = as_texts(settings or {})
        plan = training.planned(workspace, drafter, recipe, texts, name=name, seed=seed)
        initial = workspace.trained(init).absolute() if init else None
        plan = replace(plan, held_out=validation_share, init=initial)
        if not anyway:
            forecast.check_training(plan)
        folder = training.launch(plan, 1, force, _of(progress, "train"))
        record = describe(folder)["training"]
    agreement: tuple[float, ...] = ()
    for entry in record["history"]:
        if entry["step"] == record["saved_step"]:
            agreement = tuple(entry["held_out_agreement"])
    return TrainedDrafter(
        name=folder.name,
        folder=folder,
        steps=record["steps"],
        saved_step=record["saved_step"],
        samples=record["samples"],
        agreement=agreement,
    )


@in_api_words
def evaluate(
    *drafters: str,
    model: str | None = None,
    runs: Runs = None,
    name: str = "",
    temperatures: float | Sequence[float] = (0.0,),
    limit: int = 100,
    max_new_tokens: int = 512,
    trees: str | Sequence[str] = (),
    seed: int | None = None,
    threads: int = 0,
    anyway: bool = False,
    progress: StageProgress | None = None,
) -> list[DrafterResult]:
    """Decode held-out prompts with and without drafters, and add the evaluation; as `vlmdistill eval`.

    Args:
        drafters: Names of trained drafters, or of methods that need no training.
        model: The target; see `prompts`.
        runs: Folder or URL of the workspaces.
        name: Name of the evaluation, to find it.
        temperatures: One or several; 0 is greedy.
        limit: Decode at most so many prompts.
        max_new_tokens: Maximum length of a response, in tokens.
        trees: Draft trees, or one, such as `chain-5` or `auto`; none: each drafter's own.
        seed: Of sampling, to repeat it; None: each prompt has one that no drafter can guess.
        threads: CPU threads; 0: one or all, whichever decodes faster.
        anyway: Start also where free disk or memory will not suffice.
        progress: Is called after each prompt, with stage, done, total and a remark.

    Returns:
        A result for each drafter, tree and temperature, the fastest first at each temperature. `figures` has
        tau, speedup and their intervals, `failures` says what contradicts itself, and `evaluation.lossless`
        is False if a response at temperature 0 is not the target's.

    Raises:
        DataError: There are no prompts, or memory will not suffice.
        TrainingError: A drafter is missing, or was trained for another target.

    Example:
        >>> [(one.name, one.figures.tau) for one in vlmdistill.evaluate("wren")]
    """
    if not drafters:
        raise DataError(
            "evaluate() names no drafter: give at least one, such as 'wren'"
        )
    tree_names = [trees] if isinstance(trees, str) else trees
    settings = bench.Settings(
        temperatures=_numbers("temperatures", temperatures),
        limit=limit,
        max_new_tokens=max_new_tokens,
        trees=bench.trees_of(tree_names),
        seed=seed,
        threads=threads,
    )
    with Workspace.of(model, runs) as workspace:
        if not anyway:
            forecast.evaluation(workspace, drafters, settings, timed=False).check()
        evaluations = bench.evaluate(
            workspace,
            open_drafters(workspace, drafters),
            settings,
            title=name,
            on_prompt=_of(progress, "evaluate"),
        )
    results = Results()
    for ranking in rank(evaluations):
        results += ranking.results
    return results


def _numbers(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    """One number or several; DataError for anything else."""
    numbers = value if isinstance(value, list | tuple) else [value]
    for number in numbers:
        if not isinstance(number, int | float):
            raise DataError(f"{name}={value!r}: give numbers, such as [0, 1]")
    return tuple(dict.fromkeys(numbers))


@in_api_words
def report(
    *,
    model: str | None = None,
    runs: Runs = None,
    out: str | Path | None = None,
    where: Sequence[str] = (),
    plots: str | Path | None = None,
) -> Path:
    """Write the page of all evaluations; as `vlmdistill report`.

    Args:
        model: The target; see `prompts`.
        runs: Folder or URL of the workspaces.
        out: File to write; default: the workspace's `reports/index.html`.
        where: Only evaluations for which these expressions are true, such as `temperature = 0`.
        plots: Folder that gets each chart of the page as an SVG file.

    Returns:
        The page.

    Raises:
        DataError: There are no evaluations.

    Example:
        >>> vlmdistill.report()
    """
    with Workspace.of(model, runs) as workspace:
        written = page.make(workspace, Path(out) if out else None, where)
        if plots is not None:
            page.plot(written, Path(plots))
        return written.page


@in_api_words
def export(
    drafter: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    runs: Runs = None,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
) -> Exported:
    """Write a trained drafter in the format of serving engines, with a card; as `vlmdistill export`.

    Args:
        drafter: Name or folder of a trained drafter.
        out: Folder to write.
        model: The target; see `prompts`.
        runs: Folder or URL of the workspaces.
        dtype: Dtype of the weights.

    Returns:
        What was written, and how vLLM is to be started with it.

    Raises:
        TrainingError: The drafter is missing, or no engine has its method.

    Example:
        >>> vlmdistill.export("wren", "served/wren")
    """
    with Workspace.of(model, runs) as workspace:
        folder = workspace.trained(str(drafter))
        written = exports.export(folder, Path(out), dtype)
        card.write(workspace, folder, written)
        return written


@in_api_words
def status(*, model: str | None = None, runs: Runs = None) -> WorkspaceStatus:
    """What a workspace holds, what is missing or stale, and the next command; as `vlmdistill status`.

    Args:
        model: The target; see `prompts`.
        runs: Folder or URL of the workspaces.

    Returns:
        Counts, drafters with what they were measured at, and `next`, a command.

    Raises:
        TargetError: There is neither a target nor a workspace of that name.

    Example:
        >>> vlmdistill.status().next
    """
    with Workspace.of(model, runs) as workspace:
        return overview.status(workspace)
