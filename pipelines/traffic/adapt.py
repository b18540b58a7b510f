"""A round: traffic is harvested and captured, a drafter trained on it, and published if it is better.

A round may be stopped at any point: its plan says what is decided, and all that it starts goes on from where
it was. What trains is fixed by a view when the capture has ended; more traffic waits for the next round.
"""

import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from vlmdistill.drafters.training import trainer
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run, splits
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
from vlmdistill.pipelines.flow import ProgressBar
from vlmdistill.pipelines.traffic.harvest import EVAL_SHARE, harvest
from vlmdistill.pipelines.traffic.logs import unread_line
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.versions import DrafterRound
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, StoppedError, naming
from vlmdistill.stores.input_files import read_bytes
from vlmdistill.stores.manifest import VIEWS, record_names
from vlmdistill.stores.schema import TIME, content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.expressions import Filter
from vlmdistill.stores.views.filters import filter_store

log = logging.getLogger("vlmdistill.pipelines")

PLAN, METRICS = "plan.json", "metrics.jsonl"
TIMED = 8  # steps by which the length of a step is measured


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How a drafter is adapted."""

    sources: tuple[str, ...]
    policy: Policy = field(default_factory=Policy)
    eval_share: float = EVAL_SHARE
    minutes: float | None = None  # of training; either these or the steps
    steps: int | None = None
    old: float = 0.5  # share of the training samples that the drafter knows already, or that are no traffic
    fewest: int = 32  # new samples that a round needs
    settings: tuple[str, ...] = ()
    limit: int = 60  # held-out prompts of the new traffic, and as many old ones
    max_new_tokens: int = 256
    tolerance: float = (
        0.02  # share of the tokens per call on old prompts that may be lost
    )
    seed: int = 0
    workers: int | None = None

    def check(self) -> None:
        """DataError if a value is out of range."""
        if (self.minutes is None) == (self.steps is None):
            raise DataError("give the budget of training: either --minutes or --steps")
        for name, value in (("--minutes", self.minutes), ("--steps", self.steps)):
            if value is not None and value <= 0:
                raise DataError(f"{name} {value}: give a number above 0")
        for name, share in (("--old", self.old), ("--tolerance", self.tolerance)):
            if not 0 <= share < 1:
                raise DataError(f"{name} {share}: give a share from 0 to below 1")
        if self.limit < FEWEST:
            raise DataError(
                f"--limit {self.limit}: an interval needs at least {FEWEST} prompts"
            )


class RoundPlan(msgspec.Struct, kw_only=True):
    """What is decided of a round that is not finished."""

    number: int
    round: str
    base: str  # the version to beat
    drafter: str  # the version to make
    harvested: dict[str, Any] | None = None
    fresh: int = 0  # samples of traffic that the base was not trained on
    known: int = 0  # others that it trains on as well
    steps: int = 0
    seconds: dict[str, float] = {}  # by stage of the round


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
        round_ = _Round(workspace, name, how, bar, say)
        made = round_.run()
        part.save()
    return made


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
        there = versions.rounds(self.workspace, self.name, again=True)
        number = 1 + max((one.number for one in there), default=0)
        self.plan = self._begun(number) or RoundPlan(
            number=number,
            round=datetime.now(UTC).strftime("%Y-%m-%d"),
            base=versions.current(self.workspace, self.name),
            drafter=f"{self.name}.r{number}",
        )
        self.base = self.workspace.drafter(self.plan.base)
        self.method = str(describe(self.base)["drafter"])

    def _begun(self, number: int) -> RoundPlan | None:
        """The plan of the round of that number, if it was stopped."""
        try:
            found = msgspec.json.decode(read_bytes(self._file), type=RoundPlan)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return found if found.number == number else None

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """Time a stage, and note what it decided."""
        start = time.monotonic()
        yield
        spent = self.plan.seconds.get(stage, 0.0) + time.monotonic() - start
        self.plan.seconds[stage] = round(spent, 1)
        self._note()

    def _note(self) -> None:
        """Write the plan."""
        with atomic_write(self._file, alone=True) as file:
            file.write_bytes(msgspec.json.encode(self.plan))

    def run(self) -> DrafterRound:
        """All stages that are left."""
        view = self.plan.drafter
        store = Store.find(self.workspace.features)
        if store is None or view not in record_names(store.backend, VIEWS):
            with self._stage("harvest"):
                self._harvest()
            with self._stage("capture"):
                self._capture()
            with self._stage("view"):
                store = self._choose(view)
        if store is None or self.plan.fresh < self.how.fewest:
            few = f"{self.plan.fresh} samples of traffic are new to {self.plan.base}"
            return self._end(False, f"{few}: a round needs {self.how.fewest}")
        self.say(
            f"training   on {self.plan.fresh} new samples and {self.plan.known} known ones"
        )
        if not (self.workspace.drafter(self.plan.drafter) / "config.json").exists():
            with self._stage("train"):
                self._train(view)
        with self._stage("eval"):
            published, why, facts = self._judge()
        return self._end(published, why, facts)

    def _harvest(self) -> None:
        with self.bar("harvesting", "exchanges") as report:
            made = harvest(
                self.workspace,
                self.how.sources,
                self.how.policy,
                round_name=self.plan.round,
                eval_share=self.how.eval_share,
                progress=report,
            )
        before = self.plan.harvested or {"kept": 0}
        self.plan.harvested = {**asdict(made), "kept": made.kept + before["kept"]}
        self.say(
            f"harvested  {made.kept} of {made.exchanges} exchanges, {made.known} known before"
        )
        if made.unread:
            log.warning("the rest is harvested, but %s", unread_line(made.unread))

    def _capture(self) -> None:
        file = self.workspace.prompts
        if not file.is_file() or not (keys := _traffic(file, "train")):
            return
        store = CaptureStore(self.workspace.features)
        prompts = prompt_table.load(file, self.workspace.model, "train")
        others = pl.Series(
            [key for key in prompts.facts["key"] if key not in keys], dtype=pl.String
        )
        engine = (
            store.base.provenance.engine.partition(" ")[0]
            if store.base
            else "transformers"
        )
        job = CaptureJob(
            workspace=self.workspace,
            prompts=prompts.without(others),
            responses=self.workspace.responses,
            store=store,
            settings=CaptureSettings(drafters=[self.method]),
            workers=WorkerOptions(workers=self.how.workers, engine=engine),  # type: ignore[arg-type]
        )
        flow.capture_features(job, bar=self.bar)

    def _choose(self, view: str) -> Store | None:
        """Fix the samples of the round: those that are new to the base, and a share of all others.

        Those that no training takes are measured in each round, and are no reason for one.
        """
        store = Store.find(self.workspace.features)
        if store is None or TIME not in store.index.columns:
            return None
        seen = trained_on(self.base) or frozenset()
        rows = store.index.select("key", TIME)
        fresh = {
            key
            for key, asked in rows.iter_rows()
            if asked is not None and key not in seen
        }
        able = {
            key
            for one in splits(self._run(1), store)
            for key in (*one.visual, *one.text)
        }
        self.plan.fresh = len(fresh & able)
        wanted = round(self.plan.fresh * self.how.old / (1 - self.how.old))
        others = sorted(
            set(rows["key"]) - fresh, key=lambda key: content_hash([view, key])
        )[:wanted]
        chosen = [*fresh, *others]
        self.plan.known = len(others)
        self._note()  # before the view, with which the round goes on past this stage
        if self.plan.fresh >= self.how.fewest:
            of_round = Filter(
                "not of this round", lambda frame: frame["key"].is_in(chosen)
            )
            filter_store(store, view, filters=[of_round])
        return store

    def _run(self, steps: int, view: str | None = None) -> Run:
        """The training of the round."""
        config = from_dict(catalogue.config(self.method), describe(self.base)["config"])
        of_round = [
            "steps=" + str(steps),
            "stages.*.view=",
        ]  # not the views that the base was trained on
        changed = override(config, [*of_round, *self.how.settings])
        run = train.planned(
            self.workspace, self.method, name=self.plan.drafter, seed=self.how.seed
        )
        return replace(run, config=changed, view=view, init=self.base.absolute())

    def _train(self, view: str) -> None:
        if not self.plan.steps:
            self.plan.steps = self.how.steps or self._affordable_steps(view)
            self._note()
        with self.bar(f"training {self.plan.drafter}", "steps") as report:
            train.run(self._run(self.plan.steps, view), report=report)

    def _affordable_steps(self, view: str) -> int:
        """The steps that fit into the minutes."""
        minutes = self.how.minutes or 0
        with self.workspace.staging() as folder:
            seconds = seconds_per_step(self._run(TIMED, view), folder)
        return max(1, round(60 * minutes / seconds))

    def _judge(self) -> tuple[bool, str, dict[str, Any]]:
        """Measure base and candidate on held-out prompts; whether the candidate is published, and why."""
        new, old = self._held_out()
        facts: dict[str, Any] = {"steps": self.plan.steps}
        verdicts = []
        for side, held_out in (("new", new), ("old", old)):
            if side == "old" and not held_out:
                continue
            if len(prompts := _comparable(held_out)) < FEWEST:
                few = f"{len(prompts)} of {len(held_out)} held-out prompts of the {side} traffic"
                return (
                    False,
                    f"{few} can be compared, and an interval needs {FEWEST}",
                    facts,
                )
            one, other = self._evaluate(side, prompts)
            if wrong := [
                text for made in (one, other) for text in audit.failures(made)
            ]:
                return False, f"the evaluation contradicts itself: {wrong[0]}", facts
            if not (one.lossless and other.lossless):
                return False, "a response differs from the target's", facts
            mine, theirs = one.temperatures[0], other.temperatures[0]
            ratio = advantage(mine, theirs, "tau")
            facts[side] = {
                "prompts": len(prompts),
                "tau": figures(mine).tau,
                "base_tau": figures(theirs).tau,
                "ratio": [ratio.low, ratio.high] if ratio else None,
            }
            verdicts.append(_verdict(side, ratio, self.how.tolerance))
            self.say(
                f"measured   {side}: tau {figures(mine).tau:.2f}, {figures(theirs).tau:.2f} before"
            )
        return (
            all(good for good, _ in verdicts),
            "; ".join(text for _, text in verdicts),
            facts,
        )

    def _held_out(self) -> tuple[list[Prompt], list[Prompt]]:
        """The latest held-out prompts of traffic, and the others."""
        prompts = [
            one
            for one in prompt_table.read(self.workspace.prompts)
            if one.split == "eval"
        ]
        prompts.sort(key=lambda one: (-(one.time or 0), one.key))
        new, old = (
            [one for one in prompts if (one.time is None) == known]
            for known in (False, True)
        )
        return new[: self.how.limit], old[: self.how.limit]

    def _evaluate(
        self, side: str, prompts: Sequence[Prompt]
    ) -> tuple[Evaluation, Evaluation]:
        """Candidate and base on the same prompts, in one process."""
        names = [self.plan.drafter, self.plan.base]
        settings = evaluate.Settings(
            limit=len(prompts), max_new_tokens=self.how.max_new_tokens
        )
        with (
            self.workspace.staging() as folder,
            self.bar(f"decoding {side}", "prompts") as report,
        ):
            file = folder / "prompts.parquet"
            prompt_table.write(file, prompts)
            title = f"{self.plan.drafter}-{side}"
            one, other = evaluate.evaluate(
                self.workspace,
                open_drafters(self.workspace, names),
                settings,
                prompts_file=file,
                title=title,
                on_prompt=report,
            )
        return one, other

    def _end(
        self, published: bool, why: str, facts: dict[str, Any] | None = None
    ) -> DrafterRound:
        """Record the round; from then on the candidate is in use, if it is published."""
        plan = self.plan
        known = {
            "harvest": plan.harvested,
            "fresh": plan.fresh,
            "known": plan.known,
            "seconds": plan.seconds,
        }
        made = versions.record(
            self.workspace,
            self.name,
            plan.drafter,
            base=plan.base,
            published=published,
            why=why,
            facts={**known, **(facts or {})},
        )
        self._file.unlink(missing_ok=True)
        metrics = self._file.parent / METRICS
        with naming(metrics), metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(msgspec.to_builtins(made)) + "\n")
        return made


def _verdict(side: str, ratio: Interval | None, tolerance: float) -> tuple[bool, str]:
    """Whether the candidate is good enough on a side, and why."""
    if ratio is None:
        return False, f"too few prompts of each kind to compare on the {side} ones"
    shown = f"{ratio.low:.3f} to {ratio.high:.3f} times the tokens per call"
    good, words = ratio.low >= 1 - tolerance, ("not worse", "maybe worse")
    if side == "new":
        good, words = ratio.low > 1, ("better", "not surely better")
    return good, f"{words[0] if good else words[1]} on the {side} prompts, {shown}"


def _comparable(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Without those of kinds that are too few for an interval."""
    counts = Counter(kind_of(prompt) for prompt in prompts)
    return [prompt for prompt in prompts if counts[kind_of(prompt)] >= FEWEST_OF_KIND]


def _traffic(file: Path, split: str) -> set[str]:
    """The keys of the harvested prompts of a split."""
    columns = pl.read_parquet_schema(file)
    if TIME not in columns:
        return set()
    rows = pl.read_parquet(file, columns=["key", "split", TIME])
    return set(
        rows.filter(pl.col(TIME).is_not_null() & (pl.col("split") == split))["key"]
    )


class _TimedError(Exception):
    """Breaks off a run all of whose steps are timed."""


def seconds_per_step(run: Run, folder: Path) -> float:
    """The median length of the steps of a run, which writes into an empty `folder` alone.

    It takes all steps and makes no drafter. Raises what `trainer.train` raises.
    """
    lengths: list[float] = []

    def note(progress: TrainingProgress) -> None:
        lengths.append(progress.seconds)
        if (
            progress.step == progress.total
        ):  # before the store gets statistics of the samples
            raise _TimedError

    try:
        trainer.train(replace(run, out=folder / run.out.name, checkpoints=None), note)
    except _TimedError:
        pass
    except StoppedError as error:
        again = "the steps were being timed, which the same command does again"
        raise StoppedError(again, error.signal) from None
    return statistics.median(lengths)
