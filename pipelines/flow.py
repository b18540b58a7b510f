"""The whole flow in one workspace: prompts -> responses -> features -> train -> eval.

Each stage does only what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.drafters.training.run import Run
from vlmdistill.pipelines import forecast, train
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.cluster.reporting import check_failed
from vlmdistill.pipelines.cluster.shared import Shared
from vlmdistill.pipelines.data.features import capturer, synthesizer
from vlmdistill.pipelines.data.features.capturer import CaptureSettings, CaptureSummary
from vlmdistill.pipelines.data.features.store_part import StorePart
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.responder import Responder, ResponseSummary
from vlmdistill.pipelines.prompts import import_sources
from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores import progress
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.store import Store


class ProgressBar(Protocol):
    """Shows the progress of one stage."""

    def __call__(self, what: str, unit: str, kept_in: str = "") -> AbstractContextManager[progress.Progress]:
        """`what` is done to each `unit`; a stage that is stopped keeps its results in `kept_in`."""


def silent(what: str, unit: str, kept_in: str = "") -> AbstractContextManager[progress.Progress]:
    """A progress bar that shows nothing."""
    return nullcontext(progress.silent)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. The same plan again continues where the run stopped, or does nothing."""

    drafters: Sequence[str]
    recipe: str = "paper"
    settings: Sequence[str] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int | None = None  # of a response to train on; None: as in those that exist, or 1024
    eval_limit: int = 100  # prompts
    eval_tokens: int = 512  # of a response in the evaluation
    batch: int = 32  # prompts of one batch of responses
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    allow_failed: float = 0.0  # share of the prompts to train on
    jobs: int | None = None  # drafters trained at once
    watching: train.Watching = field(default_factory=train.Watching)
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


def run(
    workspace: Workspace, plan: Plan, log: Callable[[str], None], bar: ProgressBar = silent
) -> list[Evaluation]:
    """Run all stages up to the evaluation; `log` gets one line for each stage that had work to do.

    Raises what the stages raise; finished work is kept.
    """
    configs, _ = _trained(plan)
    prepare(workspace, plan, log, bar)
    fit(workspace, configs, plan, log, bar)
    trees = {config.tree for config in configs.values()}
    return measure(workspace, plan, log, bar, trees.pop() if len(trees) == 1 else None)


def prepare(workspace: Workspace, plan: Plan, log: Callable[[str], None], bar: ProgressBar = silent) -> None:
    """All stages before training: prompts, and for trained drafters responses and features.

    DataError if more prompts failed than the plan allows; all others are done by then.
    """
    if workspace.model in EMBEDDED and not workspace.prompts.exists():
        with bar("importing", "rows") as report:
            made = import_sources(workspace, ["demo"], progress=lambda rows: report(rows, 0, ""))
        log(f"prompts    {made.train} to train on and {made.eval} held out, in {workspace.prompts}")
    prompts = prompt_table.load(workspace.prompts, workspace.model, "train")
    prompt_table.load(workspace.prompts, workspace.model, "eval")  # an error now, not after hours of training
    if trained := [name for name in plan.drafters if catalogue.is_trained(name)]:
        done = capture_features(
            workspace.model,
            prompts,
            workspace.responses,
            StorePart(workspace.features),
            CaptureSettings(drafters=trained),
            plan.workers,
            sampling=sampling(workspace.responses, plan.max_new_tokens, plan.seed),
            batch=plan.batch,
            bar=bar,
            root=workspace.root,
            anyway=plan.anyway,
        )
        if done.responses:
            dropped = ", ".join(f"{reason} {count}" for reason, count in done.responses.dropped.items())
            more = f", {done.responses.dropped.total()} dropped ({dropped})" if dropped else ""
            log(f"responses  {done.responses.kept} kept{more}, in {workspace.responses}")
        if done.features.captured:
            names = ", ".join(done.features.features)
            log(f"features   {done.features.samples} samples, in {done.features.store}: {names}")
        check_failed(done.failed, len(prompts), plan.allow_failed)


def sampling(responses: Path, max_new_tokens: int | None, seed: int = 0) -> SamplingSettings:
    """How responses are sampled: as those that exist, which may be of another seed than the training."""
    known = dataset.read_settings(responses)[0]
    if not (responses / dataset.SETTINGS).is_file():
        known = replace(known, seed=seed)
    return replace(known, max_new_tokens=max_new_tokens or known.max_new_tokens)


@dataclass(frozen=True)
class CaptureRun:
    """The summaries of the stages that `capture_features` ran."""

    responses: ResponseSummary | None  # None if none was missing
    features: CaptureSummary

    @property
    def failed(self) -> dict[str, str]:
        """The prompts that failed in either stage: key -> error."""
        return {**(self.responses.failed if self.responses else {}), **self.features.failed}


def capture_features(
    model: str,
    prompts: Sequence[Prompt],
    responses: Path,
    part: StorePart,
    settings: CaptureSettings,
    workers: WorkerOptions,
    *,
    generate: bool = True,
    sampling: SamplingSettings | None = None,
    batch: int = 32,
    bar: ProgressBar = silent,
    root: Path | None = None,
    anyway: bool = False,
) -> CaptureRun:
    """Generate the missing responses if `generate`, then capture the missing features, in one session.

    An engine does both in one pass. Ray does not start if nothing is missing. `sampling` defaults to that of
    the responses that exist. The rates are recorded in the workspace at `root`. DataError if disk or memory
    will not suffice, unless it is to be done `anyway`.
    """
    generated = None
    missing = set[str]()
    if sampling:  # also if nothing is missing
        dataset.check_settings(responses, {"sampling": asdict(sampling)})
    if generate:
        missing = set(prompt_table.facts_of(dataset.without_response(prompts, responses))["key"])
    if not anyway and (missing or _waiting(prompts, responses, part, settings)):
        load = forecast.Load(
            batch=batch, batch_tokens=settings.batch_tokens, dtype=workers.load.get("dtype", "auto")
        )
        limit = sampling.max_new_tokens if sampling else None
        found = forecast.capture(model, prompts, responses, part, settings.drafters, limit, load=load)
        found.check(responses, part.path)
    there = capturer.keys_in(part, settings, workers.engine) if missing else set()
    at_once = workers.engine != "transformers" and not missing & there
    whole = len(there | missing)
    how = synthesizer.one_pass(part, settings, whole) if at_once else (Responder, lambda result: None)
    if missing:
        dataset.check_settings(responses, {"checkpoint": str(checkpoint(model))})
        part.check_origin(checkpoint(model))
    with workers.session() if missing else nullcontext():
        if missing:
            known, filters = dataset.read_settings(responses)
            with (
                bar("generating", "responses", str(responses)) as report,
                part.writing(),
                part.marked() as mark,
            ):
                generated = responder.respond(
                    prompts,
                    responses,
                    model,
                    sampling or known,
                    filters,
                    workers,
                    batch=batch,
                    report=report,
                    worker=how[0],
                    on_result=how[1],
                    shared=partial(Shared, store=part.backend, mark=mark),
                    on_start=partial(part.announce, whole),
                )
        with bar("capturing", "samples", part.path) as report:
            captured = capturer.capture(prompts, responses, part, model, settings, workers, report)
    if generated and at_once:
        rows = (row for row in dataset.read(responses) if row.key in missing)
        tokens = sum(row.prompt_tokens + len(row.ids) for row in rows)
        captured = captured.after(generated.seconds, len(there), tokens)
    if root:
        for stage, one in (("responses", generated), ("features", captured)):
            if one:
                count = one.tokens_per_second * one.seconds
                rates.record(root, stage, count, one.seconds, workers.engine)
    return CaptureRun(generated, captured)


def _waiting(prompts: Sequence[Prompt], responses: Path, part: StorePart, settings: CaptureSettings) -> bool:
    """Whether a kept response has features to be captured."""
    wanted = {*prompt_table.facts_of(prompts)["key"]}
    kept = {*dataset.facts(responses).filter("keep")["key"]} & wanted
    return any(kept - {*one.keys()} for one in (part, *part.annexes(settings.drafters)))


def planned(workspace: Workspace, configs: Mapping[str, DrafterConfig], plan: Plan) -> dict[str, Run]:
    """The trainings of a plan, by the name of the drafter."""
    return {
        name: train.planned(workspace, name, config, seed=plan.seed, watching=plan.watching)
        for name, config in configs.items()
    }


def dry_run(workspace: Workspace, plan: Plan, speeds: forecast.Speeds) -> forecast.RunForecast:
    """What `run` would do; nothing is written. DataError if there are no prompts."""
    configs, trained = _trained(plan)
    prompts = prompt_table.load(workspace.prompts, workspace.model, "train")
    capture = forecast.capture(
        workspace.model,
        prompts,
        workspace.responses,
        StorePart(workspace.features),
        trained,
        sampling(workspace.responses, plan.max_new_tokens, plan.seed).max_new_tokens,
        speeds,
        forecast.Load(batch=plan.batch),
    )
    evaluation = forecast.evaluation(workspace, plan.drafters, plan.evaluation, untrained=True)
    return forecast.run(workspace, capture, planned(workspace, configs, plan), evaluation, speeds)


def _trained(plan: Plan) -> tuple[dict[str, DrafterConfig], list[str]]:
    """The configurations of what a plan trains, and their names."""
    if not plan.drafters:
        raise DataError("--drafters names no drafter: give names separated by commas, or all")
    trained = [name for name in plan.drafters if catalogue.is_trained(name)]
    return {name: resolve(name, plan.recipe, plan.settings) for name in trained}, trained


def fit(
    workspace: Workspace,
    configs: Mapping[str, DrafterConfig],
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
) -> None:
    """Train the missing drafters, several at once if there is room; check the settings of the others."""
    missing = [name for name in configs if not (workspace.drafter(name) / "config.json").exists()]
    runs = planned(workspace, configs, plan)
    if missing and not plan.anyway:
        info = Store.open(workspace.features).info
        for name in missing:
            forecast.check_training(runs[name], info)
    at_once = min(len(missing), plan.jobs or train.default_jobs())
    if at_once > 1:
        with bar("training", "steps") as report:
            train.several(
                workspace,
                [train.Job(name, name, plan.seed) for name in missing],
                at_once,
                recipe=plan.recipe,
                settings=plan.settings,
                watching=plan.watching,
                report=report,
            )
    with ranks.group():
        for name, one in runs.items():
            with bar(f"training {name}", "steps") as report:
                train.run(one, report=report)
            if name in missing:
                log(f"trained    {name}, in {workspace.drafter(name)}")


def measure(
    workspace: Workspace,
    plan: Plan,
    log: Callable[[str], None],
    bar: ProgressBar = silent,
    tree: Tree | None = None,
) -> list[Evaluation]:
    """Evaluate all drafters unless that is done; each with its own draft tree if none is given."""
    settings = replace(plan.evaluation, trees=(tree,) if tree else ())
    if found := evaluate.kept(workspace, plan.drafters, settings):
        return found
    if not plan.anyway:
        forecast.evaluation(workspace, plan.drafters, settings, timed=False).check(workspace.reports)
    with bar("decoding", "prompts", str(workspace.reports)) as report:
        found = evaluate.evaluate(workspace, plan.drafters, settings, on_prompt=report)
    log(f"evaluated  {', '.join(plan.drafters)}, in {workspace.reports}")
    return found
