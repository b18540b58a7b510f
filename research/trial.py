"""Trials of settings: what several seeds of a setting cost to train, and how well they draft.

A `Trial` keeps what it has finished in its workspace, so that an interrupted one continues, and settings that
comparisons share are trained once. Tau is counted without decoding: at temperature 0 a chain commits what
the target says, however it was drafted. So a training forward pass over the target's greedy responses to
the held-out prompts says which guesses are right after every token, and a walk over these tokens takes the
cycles that decoding takes. Speed is measured by decoding.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from research import say
from research.claimed import Setting
from research.walk import Walk, right_guesses, walk
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.catalogue import RECIPES
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.settings import to_dict
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.drafters.training.run import Run as TrainingRun
from vlmdistill.drafters.training.unroll import supervised
from vlmdistill.pipelines import flow, train
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.bench.records import (
    Decoding,
    Measurement,
    Phases,
    PromptKind,
    PromptResult,
    Turn,
)
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.cluster.processes import FunctionDone
from vlmdistill.pipelines.cluster.reporting import check_failed
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.demo import files
from vlmdistill.pipelines.demo.clips import patches_for
from vlmdistill.pipelines.targets import software
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.manifest import VIEWS, record_names
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

CLIPS = 3  # unless a trial has another number
LONGEST = 256  # tokens of a response
T = TypeVar("T")
TRAINED = tuple(name for name in catalogue.DRAFTERS if catalogue.is_trained(name))


@dataclass(frozen=True)
class Cost:
    """What the training of a drafter cost, and the code that trained it."""

    cpu_seconds: float | None = None  # None: unknown, since it was interrupted
    commit: str = "unknown"


@dataclass(frozen=True)
class Measured:
    """What was measured of a drafter, where and when."""

    measurement: Measurement
    hardware: str
    day: str


@dataclass(frozen=True)
class Run:
    """One seed of a setting, trained and measured."""

    cost: Cost
    measured: Measured

    @property
    def pictured(self) -> Measurement:
        """The prompts with a picture; all prompts if none has one."""
        found = self.measured.measurement
        rows = tuple(row for row in found.prompts if row.kind != "text")
        return replace(found, prompts=rows or found.prompts, shown=())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The workspaces and conditions of one target's trials."""

    base: Workspace
    seeds: int
    steps: int
    limit: int
    jobs: int
    clips: int = CLIPS  # videos of each length

    @property
    def recipe(self) -> tuple[str, ...]:
        """Settings of all drafters; stages keep the ratio of their paper's epochs."""
        shared = RECIPES["demo-paper" if self.base.model in EMBEDDED else "fair-paper"]
        return (
            *shared.settings.split(),
            *([f"steps={self.steps}"] if self.steps else []),
        )

    def at(self, length: int, race: str = "") -> Workspace:
        """A workspace with the base's store, and its own reports; for a length, its own prompts too."""
        root = (
            self.base.root
            / "claims"
            / (race or (str(length) if length else "held-out"))
        )
        root.mkdir(parents=True, exist_ok=True)
        (self.base.root / "claims" / "drafters").mkdir(exist_ok=True)
        links = {"drafters": Path("../drafters"), "features": Path("../../features")}
        if not length:
            links |= {
                name: Path("../..") / name for name in ("prompts.parquet", "demo-data")
            }
        for name, to in links.items():
            if not (root / name).is_symlink():
                (root / name).symlink_to(to)
        return Workspace(self.base.model, root)

    def settings(self, setting: Setting) -> tuple[str, ...]:
        """What is set for one setting, after the shared recipe."""
        view = [f"stages.*.view={_view(setting.where)}"] if setting.where else []
        return (*setting.settings, *view)

    def folders(self, setting: Setting) -> list[str]:
        """The drafters of a setting by seed. The names contain a hash of the whole configuration."""
        config = resolve(
            setting.drafter, "paper", (*self.recipe, *self.settings(setting))
        )
        digest = content_hash([catalogue.base(setting.drafter), to_dict(config)])[:10]
        return [f"{setting.drafter}.{digest}.{seed}" for seed in range(self.seeds)]

    def all_folders(self, settings: Sequence[Setting]) -> list[str]:
        """The drafters of some settings, seed after seed."""
        return [folder for setting in settings for folder in self.folders(setting)]

    def evaluation(self) -> evaluate.Settings:
        """Greedy, each drafter with the tree of its configuration."""
        return evaluate.Settings(limit=self.limit, max_new_tokens=LONGEST, threads=1)

    def prepare(self, settings: Sequence[Setting]) -> None:
        """Make the missing prompts, responses, views, and the features of every drafter."""
        flow.prepare(self.base, flow.Plan(drafters=TRAINED), say)
        store = Store.open(str(self.base.features))
        for where in {one.where for one in settings if one.where}:
            if _view(where) not in record_names(store.backend, VIEWS):
                filter_store(store, _view(where), expressions=[where])

    def lengthen(self, length: int) -> None:
        """Write the videos of a length and import them as prompts: the same clips for every length.

        DataError on another target than the embedded ones, where the user has to provide them.
        """
        workspace = self.at(length)
        if workspace.prompts.exists() or not length:
            return
        if self.base.model not in EMBEDDED:
            raise DataError(
                f"{workspace.prompts} is missing: import held-out videos of about {length} visual tokens in "
                "another --runs folder with `vlmdistill prompts --split eval`, and copy its prompts.parquet"
            )
        films = files.write_videos(
            workspace.root / "demo-data",
            videos=self.clips,
            seed=0,
            tokens=length,
            split="evaluation",
        )
        choices = Choices(
            images=films.videos, split="eval", fps=None, frames=2 * patches_for(length)
        )
        import_prompts([str(films.llava)], workspace.prompts, choices=choices)

    def train(self, settings: Sequence[Setting]) -> None:
        """Train what is missing, several at a time."""
        workspace = self.at(0)
        missing = {
            folder: (setting, seed)
            for setting in settings
            for seed, folder in enumerate(self.folders(setting))
            if not workspace.drafter(folder).exists()
        }
        runs = [
            train.planned(
                workspace,
                setting.drafter,
                "paper",
                (*self.recipe, *self.settings(setting)),
                name=folder,
                seed=seed,
            )
            for folder, (setting, seed) in missing.items()
        ]
        resumed = {
            folder for folder in missing if self._beside(folder, "checkpoint").exists()
        }

        def keep(run: TrainingRun, done: FunctionDone) -> None:
            name = run.out.name
            for old in self._beside(name, "").parent.glob("counted-*.json"):
                old.unlink()
            seconds = None if name in resumed else done.cpu_seconds
            _write(
                Cost(seconds, software.commit() or "unknown"),
                self._beside(name, "cost"),
            )
            shown = " ".join(self.settings(missing[name][0]))
            say(f"trained {name} {shown}, {done.cpu_seconds:.0f} CPU-seconds")

        train.several(runs, self.jobs, on_done=keep)

    @property
    def counts(self) -> bool:
        """Whether tau is counted, and not decoded: where drafters have chains, and numbers float32."""
        return self.base.model in EMBEDDED

    def measure(self, setting: Setting, length: int) -> None:
        """Measure tau of all seeds of a setting unless that is done: count it where that works."""
        self.lengthen(length)
        if self.counts:
            if not self._counted(setting, length):
                self._count(setting, length)
        else:
            self._decode(self.at(length), [setting])

    def race(self, name: str, settings: Sequence[Setting]) -> None:
        """Decode with all seeds of the settings in turn, in one process: speeds compare only within one."""
        self._decode(self.at(0, name), settings)

    def read(self, setting: Setting, length: int) -> list[Run]:
        """What `measure` found of each seed; empty if one is missing."""
        if not self.at(length).prompts.exists():
            return []
        if self.counts:
            return self._runs(setting, self._counted(setting, length))
        return self._runs(setting, self._decoded(self.at(length), [setting]))

    def raced(self, name: str, settings: Sequence[Setting]) -> list[list[Run]]:
        """What a race found, by setting and seed; empty lists if it has not been run."""
        found = (
            self._decoded(self.at(0, name), settings)
            if self.at(0).prompts.exists()
            else []
        )
        parts = zip(settings, self.by_setting(found, len(settings)), strict=True)
        return [self._runs(setting, part) for setting, part in parts]

    def by_setting(self, found: Sequence[T], count: int) -> list[Sequence[T]]:
        """What was found of `all_folders` of so many settings, setting by setting."""
        return [found[at * self.seeds : (at + 1) * self.seeds] for at in range(count)]

    def _decode(self, workspace: Workspace, settings: Sequence[Setting]) -> None:
        if not self._decoded(workspace, settings):
            drafters = open_drafters(workspace, self.all_folders(settings))
            evaluate.evaluate(workspace, drafters, self.evaluation())

    def _decoded(
        self, workspace: Workspace, settings: Sequence[Setting]
    ) -> list[Measured]:
        try:
            drafters = open_drafters(workspace, self.all_folders(settings))
        except TrainingError:
            return []  # not all are trained
        kept = evaluate.kept(workspace, drafters, self.evaluation())
        return [
            Measured(one.temperatures[0], one.hardware, one.measured[:10])
            for one in kept
        ]

    def _runs(self, setting: Setting, found: Sequence[Measured]) -> list[Run]:
        files = [self._beside(folder, "cost") for folder in self.folders(setting)]
        costs = [
            msgspec.json.decode(file.read_bytes(), type=Cost)
            if file.exists()
            else Cost()
            for file in files
        ]
        return [Run(*one) for one in zip(costs, found, strict=True)] if found else []

    def _counted(self, setting: Setting, length: int) -> list[Measured]:
        name = _record(length, self.keys(length))
        files = [self._beside(folder, name) for folder in self.folders(setting)]
        if not all(file.exists() for file in files):
            return []
        return [msgspec.json.decode(file.read_bytes(), type=Measured) for file in files]

    def _count(self, setting: Setting, length: int) -> None:
        keys, store = self.keys(length), self.greedy(length)
        head = Head.of(store.head())
        there = sorted(store.keys().intersection(keys))
        machine, day = hardware.of(torch.device("cpu")).name, time.strftime("%Y-%m-%d")
        for folder in self.folders(setting):
            drafter = checkpoint.load(self.at(0).drafter(folder), head, store.info)
            assert isinstance(drafter, Drafter)
            found = count(drafter, store, there)
            _write(
                Measured(found, machine, day),
                self._beside(folder, _record(length, keys)),
            )

    def keys(self, length: int) -> tuple[str, ...]:
        """The held-out prompts of a length."""
        return _held_out(self.at(length).prompts, self.limit)

    def greedy(self, length: int) -> Store:
        """The target's greedy responses to the prompts of a length, with the features of every drafter.

        They are float32, as decoding has them: near-ties of a drafter fall otherwise in bfloat16.
        """
        workspace = self.at(length)
        sampling = SamplingSettings(max_new_tokens=LONGEST, temperature=0.0)
        prompts = evaluate.held_out(workspace.prompts, self.limit, self.base.model)
        return greedy_store(workspace, prompts, TRAINED, sampling)

    def _beside(self, folder: str, name: str) -> Path:
        """A record of a drafter. It is not in the drafter's folder, which training replaces."""
        return self.at(0).drafter(f"{folder}.training") / f"{name}.json"


def greedy_store(
    workspace: Workspace,
    prompts: Sequence[Prompt],
    drafters: Sequence[str],
    sampling: SamplingSettings,
    workers: WorkerOptions | None = None,
) -> Store:
    """The responses to prompts, in the folder `greedy`, with the drafters' features in float32."""
    root = workspace.root / "greedy"
    job = CaptureJob(
        workspace=workspace,
        prompts=prompts,
        responses=root / "responses",
        store=CaptureStore(root / "features"),
        settings=CaptureSettings(drafters=drafters, dtype="float32"),
        sampling=sampling,
        workers=workers or WorkerOptions(),
    )
    done = flow.capture_features(job)
    check_failed(done.failed, len(prompts), allowed=0.0)
    return Store.open(str(root / "features"))


@torch.no_grad()
def count(drafter: Drafter, store: Store, keys: Sequence[str]) -> Measurement:
    """The counts of decoding responses of a store with the drafter's chain; no seconds."""
    assert drafter.tree.k == 1, (
        "a tree keeps what a walk along the response does not see"
    )
    rows = []
    for key in keys:
        (samples,) = Epoch(
            store, drafter.config.needs(store.info), keys=[key], token_budget=1
        )
        batch = as_batch(samples, store.provenance.dtype).to("cpu", torch.float32)
        right_R = right_guesses(drafter, batch, drafter.tree.total - 1)
        assert len(right_R) == int(supervised(batch).sum())
        plain, own = counts(walk(right_R.tolist()), len(right_R))
        kind: PromptKind = "image" if len(batch.start_M) else "text"
        rows.append(
            PromptResult(
                key=key,
                dataset="",
                kind=kind,
                plain=plain,
                drafted=own,
                turn=Turn(started=0, ended=0, seconds=(0, 0), plain=0, drafted=1),
            )
        )
    return Measurement(temperature=0.0, prompts=tuple(rows))


def counts(found: Walk, end: int) -> tuple[Decoding, Decoding]:
    """Plain decoding of a response of so many supervised tokens, and that with a chain.

    By position nothing is counted: what the chain guesses beyond the end of the response is not known.
    """
    plain = Decoding(
        tokens=end + 1,
        calls=end,
        accepted=0,
        seconds=0,
        prefill_seconds=0,
        decode_seconds=0,
        finish="stop",
        phases=Phases(),
        passes=end,
        missed=0,
    )
    own = replace(plain, calls=found.calls, accepted=found.accepted, passes=found.calls)
    return plain, own


def cost(runs: Sequence[Run]) -> str:
    """The mean CPU seconds of a training, of those that are known."""
    known = [run.cost.cpu_seconds for run in runs if run.cost.cpu_seconds is not None]
    return f"{statistics.fmean(known):.0f}" if known else "-"


def compare(counted: Sequence[Run], decoded: Sequence[Run]) -> tuple[int, int]:
    """Responses of which tau was counted and decoded, and those with the same counts of them."""
    pairs = [
        (one.drafted, other.drafted)
        for mine, theirs in zip(counted, decoded, strict=True)
        for one in mine.measured.measurement.prompts
        for other in theirs.measured.measurement.prompts
        if one.key == other.key
    ]
    facts = attrgetter("tokens", "calls", "accepted")
    return len(pairs), sum(facts(one) == facts(other) for one, other in pairs)


@cache
def _held_out(prompts: Path, limit: int) -> tuple[str, ...]:
    """The keys of the held-out prompts: to read them takes longer than all records of a claim."""
    return tuple(prompt.key for prompt in evaluate.held_out(prompts, limit))


def _record(length: int, keys: Sequence[str]) -> str:
    return f"counted-{length}-{content_hash(list(keys))[:10]}"


def _view(where: str) -> str:
    return f"claims-{content_hash(where)[:10]}"


def _write(record: Cost | Measured, file: Path) -> None:
    with atomic_write(file) as aside:
        aside.write_bytes(msgspec.json.encode(record))
