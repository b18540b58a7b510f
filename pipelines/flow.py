"""The whole flow in one workspace: prompts -> responses -> features -> train -> eval.

Each stage does only what is missing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
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
from vlmdistill.pipelines.data.features.capturer import (
    CaptureJob,
    CaptureSettings,
    CaptureSummary,
)
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.responses.responder import ResponseSummary, ResponseWork
from vlmdistill.pipelines.planning import forecast
from vlmdistill.pipelines.planning.stages import Speeds, StagePlan
from vlmdistill.pipelines.prompts import import_sources
from vlmdistill.pipelines.targets.checkpoints.fingerprint import (
    checkpoint as checkpoint_of,
)
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores import progress
from vlmdistill.stores.errors import DataError


class ProgressBar(Protocol):
    """Shows the progress of one stage."""

    def __call__(
        self, action: str, unit: str, kept_in: str = "", /
    ) -> AbstractContextManager[progress.Progress]:
        """Show an `action` on each `unit`, such as `generating` `responses`.

        If the stage is stopped, the user is told that its results are kept in `kept_in`.
        """


def silent(
    action: str, unit: str, kept_in: str = "", /
) -> AbstractContextManager[progress.Progress]:
    """A progress bar that shows nothing."""
    return nullcontext(progress.silent)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. The same plan again continues where the run stopped, or does nothing."""

    drafters: Sequence[str]
    recipe: str | None = None  # None: `demo` for embedded targets, else `paper`
    settings: Sequence[str] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int | None = None
    """Of a response to train on; None: as in those that exist, or 1024."""
    eval_limit: int = 100  # prompts
    eval_tokens: int = 512  # of a response in the evaluation
    batch: int | None = None
    """Responses that are generated at a time; None: by memory, see `respond`."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    allow_failed: float = 0.0  # share of the prompts to train on
    jobs: int | None = None  # drafters trained at once
    held_out: float = 0.02  # share of the samples kept apart to validate on
    trackers: tuple[str, ...] = ()
    seed: int = 0
    anyway: bool = False  # run although disk or memory will not suffice

    @property
    def evaluation(self) -> evaluate.Settings:
        """The settings of the evaluation; each drafter drafts its own tree."""
        return evaluate.Settings(
            temperatures=self.temperatures,
            limit=self.eval_limit,
            max_new_tokens=self.eval_tokens,
        )

    @property
    def trained(self) -> list[str]:
        """The drafters that need training."""
        return [name for name in self.drafters if catalogue.is_trained(name)]

    def trainings(self, workspace: Workspace) -> dict[str, Run]:
        """The trainings by the name of the drafter; DataError if there are no drafters."""
        if not self.drafters:
            raise DataError(
                "--drafters is empty: give names separated by commas, or all"
            )
        trainings = dict[str, Run]()
        for name in self.trained:
            training = train.planned(
                workspace, name, self.recipe, self.settings, seed=self.seed
            )
            trainings[name] = replace(
                training, held_out=self.held_out, trackers=self.trackers
            )
        return trainings

    def capture(self, workspace: Workspace) -> CaptureJob:
        """The responses and features to train on; DataError if there are no prompts."""
        return CaptureJob.of(
            workspace,
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
    trees = {training.config.tree for training in trainings.values()}
    common_tree = trees.pop() if len(trees) == 1 else None
    return measure(workspace, plan, log, bar, common_tree)


def dry_run(workspace: Workspace, plan: Plan, speeds: Speeds) -> list[StagePlan]:
    """Plan `run`; nothing is written. DataError if there are no prompts."""
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

    DataError if more prompts failed than the plan allows; the features of all others are stored by then.
    """
    if workspace.model in EMBEDDED and not workspace.prompts.exists():
        with bar("importing", "rows") as report:
            imported = import_sources(workspace, ["demo"], progress=report)
        log(
            f"prompts    {imported.train} to train on and {imported.eval} held out, in {workspace.prompts}"
        )
    job = plan.capture(workspace)
    # If there is nothing to evaluate on, that is an error now, not after hours of training.
    prompt_table.load(workspace.prompts, workspace.model, "eval")
    if not plan.trained:
        return
    done = capture_features(job, bar=bar, anyway=plan.anyway)
    if done.responses:
        log(f"responses  {_kept_and_dropped(done.responses)}, in {job.responses}")
    stored = done.features
    if stored.captured:
        names = ", ".join(stored.features)
        log(f"features   {stored.samples} samples, in {stored.store}: {names}")
    check_failed(done.failed, len(job.prompts), plan.allow_failed)


def _kept_and_dropped(summary: ResponseSummary) -> str:
    text = f"{summary.kept} kept"
    if summary.dropped:
        reasons = [f"{reason} {count}" for reason, count in summary.dropped.items()]
        text += f", {summary.dropped.total()} dropped ({', '.join(reasons)})"
    return text


def generate(
    job: CaptureJob,
    filters: Filters | None = None,
    *,
    bar: ProgressBar = silent,
    anyway: bool = False,
) -> ResponseSummary:
    """Generate the missing responses alone; DataError if memory will not suffice, unless `anyway`."""
    missing = len(job.missing())
    if missing and not anyway:
        forecast.capture(job).responses.check()
    job = replace(job, workers=job.workers.for_prompts(missing))
    with bar("generating", "responses", str(job.responses)) as report:
        generated = _respond(job, filters, report, None)
    _record(job, "responses", generated)
    return generated


@dataclass(frozen=True)
class CaptureRun:
    """The summaries of the stages that `capture_features` ran."""

    responses: ResponseSummary | None  # None if none was missing
    features: CaptureSummary

    @property
    def failed(self) -> dict[str, str]:
        """The prompts that failed in either stage: key -> error."""
        without_response = self.responses.failed if self.responses else {}
        return {**without_response, **self.features.failed}


def capture_features(
    job: CaptureJob, *, bar: ProgressBar = silent, anyway: bool = False
) -> CaptureRun:
    """Generate the missing responses and capture the missing features, in one session of the workers.

    vLLM captures the features of a response while it generates it, if it can. Ray does not start if nothing
    is missing. The rates are recorded in the workspace.

    Raises:
        DataError: Responses or store were made with other settings, or by another target; or disk or memory
            will not suffice, unless the work is to be done `anyway`.
    """
    if job.sampling:  # other settings are refused also if nothing is missing
        dataset.check_settings(job.responses, {"sampling": asdict(job.sampling)})
    missing_keys = set(prompt_table.facts_of(job.missing())["key"])
    to_do = len(missing_keys) or _uncaptured(job)
    if to_do and not anyway:
        forecast.capture(job).check()
    job = replace(job, workers=job.workers.for_prompts(to_do))
    if not missing_keys:
        captured = _capture(job, bar)
        _record(job, "features", captured)
        return CaptureRun(None, captured)

    stored_keys = capturer.keys_in(job.store, job.settings, job.workers.engine)
    origin = checkpoint_of(job.workspace.model)
    dataset.check_settings(job.responses, {"checkpoint": str(origin)})
    thinking = job.sampling.thinking if job.sampling else ""
    job.store.check_origin(origin, thinking)
    in_one_pass = job.captures_while_generating(missing_keys)
    work = ResponseWork()
    if in_one_pass:
        work = synthesizer.one_pass(job.store, job.settings)
    with job.workers.session():
        generated = _generate(job, work, bar)
        captured = _capture(job, bar)
    _record(job, "responses", generated)
    # Captures of one pass have no time of their own: it is in the rate of the responses.
    _record(job, "features", captured)
    if in_one_pass:
        tokens = _tokens_of(job, missing_keys)
        captured = captured.with_one_pass(generated.seconds, tokens, len(stored_keys))
    return CaptureRun(generated, captured)


def _uncaptured(job: CaptureJob) -> int:
    """The responses that wait to be captured."""
    return max(len(waiting) for _, waiting in job.waiting(job.generated()))


def _tokens_of(job: CaptureJob, keys: Collection[str]) -> int:
    """The tokens of some responses with their prompts."""
    return sum(
        row.prompt_tokens + len(row.ids)
        for row in dataset.read(job.responses)
        if row.key in keys
    )


def _generate(job: CaptureJob, work: ResponseWork, bar: ProgressBar) -> ResponseSummary:
    """Generate missing responses with workers that see the store, into which features are captured."""
    with (
        bar("generating", "responses", str(job.responses)) as report,
        job.store.writing(job.prompts),
        job.store.marked() as store_mark,
    ):
        shared = partial(Shared, store=job.store.backend, mark=store_mark)
        _, filters = dataset.read_settings(job.responses)
        return _respond(job, filters, report, replace(work, shared=shared))


def _respond(
    job: CaptureJob,
    filters: Filters | None,
    report: progress.Progress,
    work: ResponseWork | None,
) -> ResponseSummary:
    """Generate the missing responses of a job."""
    return responder.respond(
        job.prompts,
        job.responses,
        job.workspace.model,
        job.sampling,
        filters,
        job.workers,
        batch=job.batch,
        report=report,
        work=work,
    )


def _capture(job: CaptureJob, bar: ProgressBar) -> CaptureSummary:
    """Capture the features that the store lacks."""
    with bar("capturing", "samples", job.store.path) as report:
        return capturer.capture(
            job.prompts,
            job.responses,
            job.store,
            job.workspace.model,
            job.settings,
            job.workers,
            report,
        )


def _record(
    job: CaptureJob, stage: str, summary: ResponseSummary | CaptureSummary
) -> None:
    """Record how many tokens a stage took in which time, for later forecasts."""
    tokens = summary.tokens_per_second * summary.seconds
    engine = job.workers.engine
    rates.record(job.workspace.root, stage, tokens, summary.seconds, engine)


def fit(
    trainings: Mapping[str, Run],
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
) -> None:
    """Train the missing drafters, several in parallel if there is room; check the settings of the others."""
    missing = {
        name: training
        for name, training in trainings.items()
        if not (training.out / "config.json").exists()
    }
    if not plan.anyway:
        for training in missing.values():
            forecast.check_training(training)
    parallel = min(len(missing), plan.jobs or train.default_jobs())
    if parallel > 1:
        with bar("training", "steps") as report:
            train.several([*missing.values()], parallel, report=report)
    with ranks.group():
        # Drafters that are trained by now are not trained again: `train.run` checks their settings.
        for name, training in trainings.items():
            with bar(f"training {name}", "steps") as report:
                train.run(training, report=report)
            if name in missing:
                log(f"trained    {name}, in {training.out}")


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
    evaluations = evaluate.kept(workspace, drafters, settings)
    if evaluations:
        return evaluations
    if not plan.anyway:
        forecast.evaluation(workspace, plan.drafters, settings, timed=False).check()
    with bar("decoding", "prompts", str(workspace.reports)) as report:
        evaluations = evaluate.evaluate(workspace, drafters, settings, on_prompt=report)
    log(f"evaluated  {', '.join(plan.drafters)}, in {workspace.reports}")
    return evaluations
