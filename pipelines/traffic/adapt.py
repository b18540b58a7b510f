"""A round: traffic is harvested and captured, a drafter trained on it, and published if it is better.

A round may be stopped at any point: its plan says what is decided, and all that it starts goes on from where
it was. What trains is fixed by a view when the capture has ended; more traffic waits for the next round.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.description import describe, trained_on
from vlmdistill.drafters.core.settings import from_dict, override
from vlmdistill.drafters.training.run import Run, TrainingBudget, splits
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench import audit, evaluate
from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.bench.side_by_side import kind_of
from vlmdistill.pipelines.bench.statistics import (
    FEWEST,
    FEWEST_OF_KIND,
    Interval,
    advantage,
    figures,
)
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.flow import ProgressBar
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.traffic.harvest import EVAL_SHARE, harvest
from vlmdistill.pipelines.traffic.logs import unread_line
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.versions import DrafterRound
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, naming
from vlmdistill.stores.input_files import read_bytes
from vlmdistill.stores.manifest import VIEWS, record_names
from vlmdistill.stores.schema import TIME, content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store

log = logging.getLogger("vlmdistill.pipelines")

PLAN, METRICS = "plan.json", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How a drafter is adapted."""

    sources: tuple[str, ...]
    policy: Policy = field(default_factory=Policy)
    eval_share: float = EVAL_SHARE
    minutes: float | None = None  # of training; either these or the steps
    steps: int | None = None
    old: float = 0.5
    """Share of the training samples that the drafter knows already, or that are no traffic."""
    fewest: int = 32  # new samples that a round needs
    settings: tuple[str, ...] = ()
    limit: int = 60  # held-out prompts of the new traffic, and as many old ones
    max_new_tokens: int = 256
    tolerance: float = 0.02
    """Share of the tokens per call on old prompts that may be lost."""
    seed: int = 0
    workers: int | None = None

    def check(self) -> None:
        """DataError if a value is out of range."""
        if (self.minutes is None) == (self.steps is None):
            raise DataError("give the budget of training: either --minutes or --steps")
        for option, value in (("--minutes", self.minutes), ("--steps", self.steps)):
            if value is not None and value <= 0:
                raise DataError(f"{option} {value}: give a number above 0")
        for option, share in (("--old", self.old), ("--tolerance", self.tolerance)):
            if not 0 <= share < 1:
                raise DataError(f"{option} {share}: give a share from 0 to below 1")
        if self.limit < FEWEST:
            raise DataError(
                f"--limit {self.limit}: need at least {FEWEST} prompts for a confidence interval"
            )


class RoundPlan(msgspec.Struct, kw_only=True):
    """The decisions of a round that is not finished."""

    number: int
    round: str
    base: str  # the version to beat
    drafter: str  # the version to make
    harvested: dict[str, Any] | None = None
    fresh: int = 0  # samples of traffic that the base was not trained on
    known: int = 0  # others that it trains on as well
    chosen: str = ""  # a hash of the keys of all these
    anew: bool = False  # some were deleted before it was trained on them
    seconds: dict[str, float] = {}  # by stage of the round


@dataclass(frozen=True)
class Judgement:
    """Whether the candidate is published, or good enough on some prompts, and why."""

    publishes: bool
    reason: str


def adapt(
    workspace: Workspace,
    name: str,
    how: Adaptation,
    *,
    bar: ProgressBar = flow.silent,
    say: Callable[[str], None] = lambda line: None,
) -> DrafterRound:
    """One round for the drafter `name`, or the rest of one that was stopped; what became of it.

    DataError if another process adapts this drafter; otherwise raises what the stages raise.
    """
    how.check()
    describe(workspace.drafter(name))
    with only_writer(workspace.drafter(f"{name}.adapt")) as part:
        finished_round = _Round(workspace, name, how, bar, say).run()
        part.save()
    return finished_round


@dataclass
class _Round:
    """The state of a round."""

    workspace: Workspace
    name: str
    how: Adaptation
    bar: ProgressBar
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._file = self.workspace.drafter(f"{self.name}.adapt") / PLAN
        earlier = versions.rounds(self.workspace, self.name, again=True)
        number = 1 + max((drafter_round.number for drafter_round in earlier), default=0)
        self.plan = self._stopped_plan(number) or RoundPlan(
            number=number,
            round=datetime.now(UTC).strftime("%Y-%m-%d"),
            base=versions.current(self.workspace, self.name),
            drafter=f"{self.name}.r{number}",
        )
        self.base = self.workspace.drafter(self.plan.base)
        self.method = str(describe(self.base)["drafter"])
        self.facts: dict[str, Any] = {}  # of the evaluation

    def _stopped_plan(self, number: int) -> RoundPlan | None:
        """The plan of the round of that number, if it was stopped."""
        try:
            plan = msgspec.json.decode(read_bytes(self._file), type=RoundPlan)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return plan if plan.number == number else None

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """Time a stage, and note what it decided."""
        start = time.monotonic()
        yield
        spent = self.plan.seconds.get(stage, 0.0) + time.monotonic() - start
        self.plan.seconds[stage] = round(spent, 1)
        self._write_plan()

    def _write_plan(self) -> None:
        with atomic_write(self._file, alone=True) as file:
            file.write_bytes(msgspec.json.encode(self.plan))

    def run(self) -> DrafterRound:
        """All stages that are left."""
        view = self.plan.drafter
        store = Store.find(self.workspace.features)
        if store is None or not self._is_chosen(store, view):
            with self._stage("harvest"):
                self._harvest()
            with self._stage("capture"):
                self._capture()
            with self._stage("view"):
                store = self._choose(view)
        if store is None or self.plan.fresh < self.how.fewest:
            few = f"{self.plan.fresh} samples of traffic are new to {self.plan.base}"
            reason = f"{few}: a round needs {self.how.fewest}"
            return self._end(Judgement(False, reason))
        samples = f"{self.plan.fresh} new samples and {self.plan.known} known ones"
        self.say(f"training   on {samples}")
        if not self._is_trained():
            with self._stage("train"):
                self._train(view)
        with self._stage("eval"):
            verdict = self._judge()
        return self._end(verdict)

    def _is_chosen(self, store: Store, view: str) -> bool:
        """Whether the samples of the round are fixed, and none was deleted before it was trained on them."""
        if view not in record_names(store.backend, VIEWS):
            return False
        if self._is_trained() or _hash_of(store.view(view)["key"]) == self.plan.chosen:
            return True
        self.say("samples of the round were deleted: it begins anew")
        self.plan.anew = True
        self._write_plan()
        return False

    def _is_trained(self) -> bool:
        folder = self.workspace.drafter(self.plan.drafter)
        return (folder / "config.json").exists()

    def _harvest(self) -> None:
        with self.bar("harvesting", "exchanges") as report:
            harvested = harvest(
                self.workspace,
                self.how.sources,
                self.how.policy,
                round_name=self.plan.round,
                eval_share=self.how.eval_share,
                progress=report,
            )
        kept_before = (self.plan.harvested or {}).get("kept", 0)
        kept = harvested.kept + kept_before
        self.plan.harvested = {**asdict(harvested), "kept": kept}
        counts = f"{harvested.kept} of {harvested.exchanges} exchanges"
        self.say(f"harvested  {counts}, {harvested.known} known before")
        if harvested.unread:
            log.warning("the rest is harvested, but %s", unread_line(harvested.unread))
        if harvested.other_files:
            log.warning("%s", harvested.other_files)

    def _capture(self) -> None:
        """Capture the features of the harvested prompts."""
        file = self.workspace.prompts
        traffic_keys = _traffic_keys(file, "train") if file.is_file() else set[str]()
        if not traffic_keys:
            return
        store = CaptureStore(self.workspace.features)
        engine = "transformers"
        if store.base:
            engine = store.base.provenance.engine.partition(" ")[0]
        prompts = prompt_table.load(file, self.workspace.model, "train")
        other_keys = [key for key in prompts.facts["key"] if key not in traffic_keys]
        job = CaptureJob(
            workspace=self.workspace,
            prompts=prompts.without(pl.Series(other_keys, dtype=pl.String)),
            responses=self.workspace.responses,
            store=store,
            settings=CaptureSettings(drafters=[self.method]),
            workers=WorkerOptions(
                workers=self.how.workers,
                engine=engine,  # type: ignore[arg-type]
                load=self._target_options(),
            ),
        )
        flow.capture_features(job, bar=self.bar)

    def _target_options(self) -> Options:
        """How the target runs: in the dtype of the store's states, with the thinking of the responses."""
        sampling, _ = dataset.read_settings(self.workspace.responses)
        options = Options(thinking=sampling.thinking)
        store = Store.find(self.workspace.features)
        return options | Options(dtype=store.record.head.dtype) if store else options

    def _choose(self, view: str) -> Store | None:
        """Fix the samples of the round: those that are new to the base, and a share of all others.

        New samples that the training cannot take are no reason for a round, and are not counted.
        """
        store = Store.find(self.workspace.features)
        if store is None or TIME not in store.index.columns:
            return None
        rows = store.index.select("key", TIME)
        seen = trained_on(self.base) or frozenset()
        fresh = {
            key
            for key, time_of_request in rows.iter_rows()
            if time_of_request is not None and key not in seen
        }
        trainable: set[str] = set()
        for stage_split in splits(self._run(1), store):
            trainable.update(stage_split.visual, stage_split.text)
        self.plan.fresh = len(fresh & trainable)
        known_keys = self._known_keys(set(rows["key"]) - fresh, view)
        self.plan.known = len(known_keys)
        chosen = [*fresh, *known_keys]
        self.plan.chosen = _hash_of(chosen)
        self._write_plan()  # before the view, with which the round goes on past this stage
        if self.plan.fresh >= self.how.fewest:
            of_round = Filter(
                "not of this round", lambda frame: frame["key"].is_in(chosen)
            )
            filter_store(store, view, filters=[of_round])
        return store

    def _known_keys(self, keys: Iterable[str], view: str) -> list[str]:
        """The samples among `keys` that the round trains on besides the fresh ones."""
        old_share = self.how.old
        count = round(self.plan.fresh * old_share / (1 - old_share))
        shuffled = sorted(keys, key=lambda key: content_hash([view, key]))
        return shuffled[:count]

    def _run(self, steps: int, view: str | None = None) -> Run:
        """The training of the round."""
        config = from_dict(catalogue.config(self.method), describe(self.base)["config"])
        # The views that the base was trained on are not kept.
        of_round = [f"steps={steps}", "stages.*.view="]
        changed = override(config, [*of_round, *self.how.settings])
        run = train.planned(
            self.workspace, self.method, name=self.plan.drafter, seed=self.how.seed
        )
        return replace(run, config=changed, view=view, init=self.base.absolute())

    def _train(self, view: str) -> None:
        run = self._run(self.how.steps or 1, view)
        if self.how.minutes is not None:
            run = replace(run, budget=TrainingBudget(60 * self.how.minutes))
        with self.bar(f"training {self.plan.drafter}", "steps") as report:
            # A checkpoint may be of samples that were deleted.
            train.run(run, force=self.plan.anew, report=report)

    def _judge(self) -> Judgement:
        """Measure base and candidate on held-out prompts; whether the candidate is published, and why."""
        description = describe(self.workspace.drafter(self.plan.drafter))
        self.facts = {"steps": description["training"]["steps"]}
        new_prompts, old_prompts = self._held_out()
        verdicts = []
        for side, held_out in (("new", new_prompts), ("old", old_prompts)):
            if side == "old" and not held_out:
                continue
            prompts = _comparable(held_out)
            if len(prompts) < FEWEST:
                few = f"{len(prompts)} of {len(held_out)} held-out prompts of the {side} traffic"
                return Judgement(
                    False, f"{few} can be compared, and an interval needs {FEWEST}"
                )
            candidate, base = self._evaluate(side, prompts)
            problem = _contradiction(candidate, base)
            if problem:
                return Judgement(False, problem)
            verdicts.append(self._compare(side, candidate, base, len(prompts)))
        reasons = "; ".join(verdict.reason for verdict in verdicts)
        return Judgement(all(verdict.publishes for verdict in verdicts), reasons)

    def _compare(
        self, side: str, candidate: Evaluation, base: Evaluation, prompts: int
    ) -> Judgement:
        """Whether the candidate is good enough on a side; the numbers become facts of the round."""
        candidate_results = candidate.temperatures[0]
        base_results = base.temperatures[0]
        candidate_tau = figures(candidate_results).tau
        base_tau = figures(base_results).tau
        ratio = advantage(candidate_results, base_results, "tau")
        self.facts[side] = {
            "prompts": prompts,
            "tau": candidate_tau,
            "base_tau": base_tau,
            "ratio": [ratio.low, ratio.high] if ratio else None,
        }
        self.say(f"measured   {side}: tau {candidate_tau:.2f}, {base_tau:.2f} before")
        return _verdict(side, ratio, self.how.tolerance)

    def _held_out(self) -> tuple[list[Prompt], list[Prompt]]:
        """The latest held-out prompts of traffic, and the others."""
        prompts = prompt_table.read(self.workspace.prompts)
        held_out = [prompt for prompt in prompts if prompt.split == "eval"]
        held_out.sort(key=lambda prompt: (-(prompt.time or 0), prompt.key))
        new_prompts = [prompt for prompt in held_out if prompt.time is not None]
        old_prompts = [prompt for prompt in held_out if prompt.time is None]
        limit = self.how.limit
        return new_prompts[:limit], old_prompts[:limit]

    def _evaluate(
        self, side: str, prompts: Sequence[Prompt]
    ) -> tuple[Evaluation, Evaluation]:
        """Candidate and base on the same prompts, in one process."""
        settings = evaluate.Settings(
            limit=len(prompts),
            max_new_tokens=self.how.max_new_tokens,
            how=self._target_options(),
        )
        with (
            self.workspace.staging() as folder,
            self.bar(f"decoding {side}", "prompts") as report,
        ):
            file = folder / "prompts.parquet"
            prompt_table.write(file, prompts)
            candidate, base = evaluate.evaluate(
                self.workspace,
                open_drafters(self.workspace, [self.plan.drafter, self.plan.base]),
                settings,
                prompts_file=file,
                title=f"{self.plan.drafter}-{side}",
                on_prompt=report,
            )
        return candidate, base

    def _end(self, verdict: Judgement) -> DrafterRound:
        """Record the round; from then on the candidate is in use, if it is published."""
        plan = self.plan
        facts = {
            "harvest": plan.harvested,
            "fresh": plan.fresh,
            "known": plan.known,
            "seconds": plan.seconds,
            **self.facts,
        }
        drafter_round = versions.record(
            self.workspace,
            self.name,
            plan.drafter,
            base=plan.base,
            published=verdict.publishes,
            why=verdict.reason,
            facts=facts,
        )
        self._file.unlink(missing_ok=True)
        metrics = self._file.parent / METRICS
        with naming(metrics), metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(msgspec.to_builtins(drafter_round)) + "\n")
        return drafter_round


def _contradiction(candidate: Evaluation, base: Evaluation) -> str:
    """Why two evaluations cannot be compared; empty if they can."""
    failures = [*audit.failures(candidate), *audit.failures(base)]
    if failures:
        return f"the evaluation contradicts itself: {failures[0]}"
    if not candidate.lossless or not base.lossless:
        return "a response differs from the target's"
    return ""


def _verdict(side: str, ratio: Interval | None, tolerance: float) -> Judgement:
    """Whether the candidate is good enough on a side, and why."""
    if ratio is None:
        few = f"too few prompts of each kind to compare on the {side} ones"
        return Judgement(False, few)
    if side == "new":
        is_good = ratio.low > 1
        outcome = "better" if is_good else "not surely better"
    else:
        is_good = ratio.low >= 1 - tolerance
        outcome = "not worse" if is_good else "maybe worse"
    interval = f"{ratio.low:.3f} to {ratio.high:.3f} times the tokens per call"
    return Judgement(is_good, f"{outcome} on the {side} prompts, {interval}")


def _comparable(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of those kinds that have enough prompts for an interval."""
    counts = Counter(kind_of(prompt) for prompt in prompts)
    return [prompt for prompt in prompts if counts[kind_of(prompt)] >= FEWEST_OF_KIND]


def _hash_of(keys: Iterable[str]) -> str:
    return content_hash(sorted(keys))


def _traffic_keys(file: Path, split: str) -> set[str]:
    """The keys of the harvested prompts of a split."""
    columns = pl.read_parquet_schema(file)
    if TIME not in columns:
        return set()
    rows = pl.read_parquet(file, columns=["key", "split", TIME])
    is_traffic = pl.col(TIME).is_not_null() & (pl.col("split") == split)
    return set(rows.filter(is_traffic)["key"])
