"""The whole flow in one workspace: prompts -> responses -> features -> train -> eval.

Each stage does only what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Protocol

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.run import Run
from vlmdistill.pipelines import train
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.cluster.reporting import check_failed
from vlmdistill.pipelines.cluster.shared import Shared
from vlmdistill.pipelines.data.features import capturer, synthesizer
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import (
    CaptureJob,
    CaptureSettings,
    CaptureSummary,
)
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.responses.responder import Responder, ResponseSummary
from vlmdistill.pipelines.planning import forecast
from vlmdistill.pipelines.prompts import import_sources
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores import progress
from vlmdistill.stores.errors import DataError


class ProgressBar(Protocol):
    """Shows the progress of one stage."""

    def __call__(
        self, what: str, unit: str, kept_in: str = ""
    ) -> AbstractContextManager[progress.Progress]:
        """`what` is done to each `unit`; a stage that is stopped keeps its results in `kept_in`."""


def silent(
    what: str, unit: str, kept_in: str = ""
) -> AbstractContextManager[progress.Progress]:
    """A progress bar that shows nothing."""
    return nullcontext(progress.silent)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. The same plan again continues where the run stopped, or does nothing."""

    drafters: Sequence[str]
    recipe: str | None = None  # None: as `train.planned`
    settings: Sequence[str] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int | None = (
        None  # of a response to train on; None: as in those that exist, or 1024
    )
    eval_limit: int = 100  # prompts
    eval_tokens: int = 512  # of a response in the evaluation
    batch: int | None = (
        None  # responses that are generated at a time; None: by memory, see `respond`
    )
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    allow_failed: float = 0.0  # share of the prompts to train on
    jobs: int | None = None  # drafters trained at once
    held_out: float = 0.02  # share of the samples kept apart to validate on
    trackers: tuple[str, ...] = ()
    seed: int = 0
    anyway: bool = False  # also where disk or memory will not suffice

    @property
    def evaluation(self) -> evaluate.Settings:
        """How it evaluates, where each drafter has its own tree."""
        return evaluate.Settings(
            temperatures=self.temperatures,
            limit=self.eval_limit,
            max_new_tokens=self.eval_tokens,
            seed=self.seed,
        )

    @property
    def trained(self) -> list[str]:
        """Those of its drafters that are trained."""
        return [name for name in self.drafters if catalogue.is_trained(name)]

    def trainings(self, workspace: Workspace) -> dict[str, Run]:
        """The trainings by the name of the drafter; DataError if there are no drafters."""
        if not self.drafters:
            raise DataError(
                "--drafters names no drafter: give names separated by commas, or all"
            )
        return {
            name: replace(
                train.planned(
                    workspace, name, self.recipe, self.settings, seed=self.seed
                ),
                held_out=self.held_out,
                trackers=self.trackers,
            )
            for name in self.trained
        }

    def capture(self, workspace: Workspace) -> CaptureJob:
        """The responses and features to train on; DataError if there are no prompts."""
        return CaptureJob(
            workspace=workspace,
            prompts=prompt_table.load(workspace.prompts, workspace.model, "train"),
            responses=workspace.responses,
            part=CaptureStore(workspace.features),
            settings=CaptureSettings(drafters=self.trained),
            workers=self.workers,
            sampling=dataset.sampling(
                workspace.responses, self.max_new_tokens, self.seed
            ),
            batch=self.batch,
        )


def run(
    workspace: Workspace,
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
) -> list[Evaluation]:
    """Run all stages up to the evaluation; `log` gets one line for each stage that had work to do.

    Raises what the stages raise; finished work is kept.
    """
    trainings = plan.trainings(workspace)
    prepare(workspace, plan, log, bar)
    fit(trainings, plan, log, bar)
    trees = {one.config.tree for one in trainings.values()}
    return measure(workspace, plan, log, bar, trees.pop() if len(trees) == 1 else None)


def dry_run(
    workspace: Workspace, plan: Plan, speeds: forecast.Speeds
) -> forecast.RunForecast:
    """What `run` would do; nothing is written. DataError if there are no prompts."""
    trainings = plan.trainings(workspace)
    capture = forecast.capture(plan.capture(workspace), speeds)
    evaluation = forecast.evaluation(
        workspace, plan.drafters, plan.evaluation, untrained=True
    )
    return forecast.run(workspace.model, capture, trainings, evaluation, speeds)


def prepare(
    workspace: Workspace,
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
) -> None:
    """All stages before training: prompts, and for trained drafters responses and features.

    DataError if more prompts failed than the plan allows; all others are done by then.
    """
    if workspace.model in EMBEDDED and not workspace.prompts.exists():
        with bar("importing", "rows") as report:
            made = import_sources(workspace, ["demo"], progress=report)
        log(
            f"prompts    {made.train} to train on and {made.eval} held out, in {workspace.prompts}"
        )
    job = plan.capture(workspace)
    prompt_table.load(
        workspace.prompts, workspace.model, "eval"
    )  # an error now, not after hours of training
    if not plan.trained:
        return
    done = capture_features(job, bar=bar, anyway=plan.anyway)
    if done.responses:
        dropped = ", ".join(
            f"{reason} {count}" for reason, count in done.responses.dropped.items()
        )
        more = (
            f", {done.responses.dropped.total()} dropped ({dropped})" if dropped else ""
        )
        log(f"responses  {done.responses.kept} kept{more}, in {job.responses}")
    if done.features.captured:
        names = ", ".join(done.features.features)
        log(
            f"features   {done.features.samples} samples, in {done.features.store}: {names}"
        )
    check_failed(done.failed, len(job.prompts), plan.allow_failed)


def generate(
    job: CaptureJob,
    filters: Filters | None = None,
    *,
    bar: ProgressBar = silent,
    anyway: bool = False,
) -> ResponseSummary:
    """Generate the missing responses alone. DataError as `capture_features`."""
    if not anyway and len(job.missing()):
        forecast.capture(job).check_responses(job.responses)
    with bar("generating", "responses", str(job.responses)) as report:
        done = responder.respond(
            job.prompts,
            job.responses,
            job.workspace.model,
            job.sampling,
            filters,
            job.workers,
            batch=job.batch,
            report=report,
        )
    _record(job, "responses", done)
    return done


@dataclass(frozen=True)
class CaptureRun:
    """The summaries of the stages that `capture_features` ran."""

    responses: ResponseSummary | None  # None if none was missing
    features: CaptureSummary

    @property
    def failed(self) -> dict[str, str]:
        """The prompts that failed in either stage: key -> error."""
        return {
            **(self.responses.failed if self.responses else {}),
            **self.features.failed,
        }


def capture_features(
    job: CaptureJob, *, bar: ProgressBar = silent, anyway: bool = False
) -> CaptureRun:
    """Generate the missing responses, then capture the missing features, in one session.

    An engine does both in one pass. Ray does not start if nothing is missing. The rates are recorded in the
    workspace. DataError if disk or memory will not suffice, unless it is to be done `anyway`.
    """
    generated = None
    part, model, responses, settings = (
        job.part,
        job.workspace.model,
        job.responses,
        job.settings,
    )
    if job.sampling:  # also if nothing is missing
        dataset.check_settings(responses, {"sampling": asdict(job.sampling)})
    missing = set(prompt_table.facts_of(job.missing())["key"])
    if not anyway and (
        missing or any(len(lacks) for _, lacks in job.waiting(job.generated()))
    ):
        forecast.capture(job).check(responses, part.path)
    there = capturer.keys_in(part, settings, job.workers.engine) if missing else set()
    at_once = job.workers.engine != "transformers" and not missing & there
    how = (
        synthesizer.one_pass(part, settings)
        if at_once
        else (Responder, lambda result: None)
    )
    if missing:
        dataset.check_settings(responses, {"checkpoint": str(checkpoint(model))})
        part.check_origin(checkpoint(model))
    with job.workers.session() if missing else nullcontext():
        if missing:
            with (
                bar("generating", "responses", str(responses)) as report,
                part.writing(),
                part.marked() as mark,
            ):
                generated = responder.respond(
                    job.prompts,
                    responses,
                    model,
                    job.sampling,
                    dataset.read_settings(responses)[1],
                    job.workers,
                    batch=job.batch,
                    report=report,
                    worker=how[0],
                    on_result=how[1],
                    shared=partial(Shared, store=part.backend, mark=mark),
                )
        with bar("capturing", "samples", part.path) as report:
            captured = capturer.capture(
                job.prompts, responses, part, model, settings, job.workers, report
            )
    if generated and at_once:
        rows = (row for row in dataset.read(responses) if row.key in missing)
        tokens = sum(row.prompt_tokens + len(row.ids) for row in rows)
        captured = captured.after(generated.seconds, len(there), tokens)
    if generated:
        _record(job, "responses", generated)
    _record(job, "features", captured)
    return CaptureRun(generated, captured)


def _record(
    job: CaptureJob, stage: str, done: ResponseSummary | CaptureSummary
) -> None:
    """Keep the rate of a stage for later forecasts."""
    tokens = done.tokens_per_second * done.seconds
    rates.record(job.workspace.root, stage, tokens, done.seconds, job.workers.engine)


def fit(
    trainings: Mapping[str, Run],
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
) -> None:
    """Train the missing drafters, several at once if there is room; check the settings of the others."""
    missing = {
        name: one
        for name, one in trainings.items()
        if not (one.out / "config.json").exists()
    }
    for one in () if plan.anyway else missing.values():
        forecast.check_training(one)
    at_once = min(len(missing), plan.jobs or train.default_jobs())
    if at_once > 1:
        with bar("training", "steps") as report:
            train.several([*missing.values()], at_once, report=report)
    with ranks.group():
        for name, one in trainings.items():
            with bar(f"training {name}", "steps") as report:
                train.run(one, report=report)
            if name in missing:
                log(f"trained    {name}, in {one.out}")


def measure(
    workspace: Workspace,
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
    tree: Tree | None = None,
) -> list[Evaluation]:
    """Evaluate all drafters unless that is done; each with its own draft tree if none is given."""
    settings = replace(plan.evaluation, trees=(tree,) if tree else ())
    drafters = open_drafters(workspace, plan.drafters)
    if found := evaluate.kept(workspace, drafters, settings):
        return found
    if not plan.anyway:
        forecast.evaluation(workspace, plan.drafters, settings, timed=False).check(
            workspace.reports
        )
    with bar("decoding", "prompts", str(workspace.reports)) as report:
        found = evaluate.evaluate(workspace, drafters, settings, on_prompt=report)
    log(f"evaluated  {', '.join(plan.drafters)}, in {workspace.reports}")
    return found
