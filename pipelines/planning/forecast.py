"""Dry run: the samples, tokens, bytes, memory and time that a stage would take, and what exists already."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import polars as pl
import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints.description import describe as describe_drafter
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.decoding import hardware
from vlmdistill.drafters.training import saved
from vlmdistill.drafters.training.run import Run, RunData, finished
from vlmdistill.drafters.training.saved import Position
from vlmdistill.drafters.training.schedule import Schedule
from vlmdistill.pipelines.bench.evaluate import Settings, held_out
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import CaptureJob, CaptureSettings
from vlmdistill.pipelines.data.prompts.prompt_table import facts_of
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.planning.resources import (
    SAVED,
    Memory,
    check,
    free_disk,
    kv_cache,
    of_training,
    on_target,
    rows,
)
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.targets.batching import CPU_BATCH
from vlmdistill.pipelines.targets.checkpoints.folder import parameters_in, resolve
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import Feature, TargetInfo
from vlmdistill.stores.store import Store

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.describe import TargetDescription

LARGER = "use a larger machine, or --target-dtype bfloat16"
STAGES = ("responses", "features", "train")


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of stages: as stated, else as the latest run on this machine measured."""

    root: Path | None = None  # of the workspace
    stated: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, stated: Sequence[str]) -> "Speeds":
        """Of texts such as `features=3000`; DataError on other texts."""
        by_stage = dict[str, float]()
        for text in stated:
            stage, _, number = text.partition("=")
            is_number = re.fullmatch(r"\d+(\.\d+)?", number) is not None
            if stage not in STAGES or not is_number or not float(number):
                raise DataError(
                    f"--rate {text}: write one of {', '.join(STAGES)} and its tokens per second, such as "
                    "features=3000"
                )
            by_stage[stage] = float(number)
        return cls(root, by_stage)

    def seconds(
        self, stage: str, tokens: float | None, engine: str = "transformers"
    ) -> float | None:
        """The time of so many tokens; None where no rate is known."""
        if tokens is None:
            return None
        if not tokens:
            return 0.0
        kind = stage.partition(" ")[0]  # `train` for the training of any method
        if kind in self.stated:
            return tokens / self.stated[kind]
        if self.root is None:
            return None
        rate = rates.known(self.root, stage, engine)
        return tokens / rate.tokens_per_second if rate else None


@dataclass(frozen=True, kw_only=True)
class CaptureForecast:
    """The work of `responses` and `features` for some prompts.

    Tokens of responses that are missing are estimated by the mean of those that exist, dropped ones included;
    None where none exists.
    """

    prompts: int
    responses: int  # that exist
    to_generate: int
    most_tokens: int  # to generate at most
    likely_tokens: int | None  # to generate
    samples: int  # of these prompts that exist
    to_capture: int  # at most: filters may drop some of the responses to come
    text_tokens: int | None  # to capture
    visual_tokens: int | None
    features: tuple[str, ...]
    bytes: int | None  # in the dtype of two bytes; a store of int8 takes half
    free_bytes: int | None  # where the store lies; None behind a URL
    weights_bytes: int | None  # of the target's files
    response_memory: Memory
    feature_memory: Memory
    response_seconds: float | None  # None: no rate is known
    feature_seconds: float | None

    def check_responses(self, out: Path) -> None:
        """DataError if the responses cannot be generated here."""
        if self.to_generate:
            check("responses", self.response_memory, 4 * self.most_tokens, out, LARGER)

    def check(self, responses: Path, store: str) -> None:
        """DataError if the responses and features cannot be made here."""
        self.check_responses(responses)
        if self.to_capture:
            advice = (
                f"name another --store, or fewer methods in --for; for memory, {LARGER}"
            )
            check("features", self.feature_memory, self.bytes, store, advice)


@dataclass(frozen=True)
class _PlannedResponses:
    """The responses that exist, and those that are to be generated."""

    facts: pl.DataFrame  # of those that exist
    missing: int
    max_tokens: int  # of a response

    @classmethod
    def of(cls, job: CaptureJob) -> "_PlannedResponses":
        """The responses of a job."""
        facts = job.generated()
        sampling = job.sampling or dataset.read_settings(job.responses)[0]
        missing = len(job.prompts) - len(facts)
        return cls(facts, missing, sampling.max_new_tokens)

    @property
    def likely_tokens(self) -> int | None:
        """Tokens to generate, by the mean of the responses that exist; None if there are none."""
        if not self.missing:
            return 0
        if not len(self.facts):
            return None
        return round(self.missing * self._sum(self.facts, "tokens") / len(self.facts))

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest known prompt with the longest response."""
        longest_prompt = self.facts["prompt_tokens"].max() or 0
        return int(longest_prompt) + self.max_tokens  # type: ignore[arg-type]

    def tokens_with(self, waiting: pl.DataFrame) -> tuple[int, int] | None:
        """Text and visual tokens of the responses in `waiting` and of those to generate.

        Each of these counts as much as the mean of those that exist; None if there are none.
        """
        if self.missing and not len(self.facts):
            return None
        to_come = self.missing / len(self.facts) if self.missing else 0.0

        def total(column: str) -> int:
            future = round(to_come * self._sum(self.facts, column))
            return self._sum(waiting, column) + future

        visual = total("visual_tokens")
        text = total("prompt_tokens") - visual + total("tokens")
        return text, visual

    @staticmethod
    def _sum(rows: pl.DataFrame, column: str) -> int:
        return int(rows[column].sum())


@dataclass(frozen=True)
class _PlannedCapture:
    """The samples that a store, or an annex of it, would get; tokens None if no response exists."""

    features: frozenset[Feature]
    samples: int
    text_tokens: int | None
    visual_tokens: int | None

    @classmethod
    def of(
        cls,
        store: CaptureStore,
        waiting: pl.DataFrame,
        planned: _PlannedResponses,
        job: CaptureJob,
        needed: Sequence[str],
    ) -> "_PlannedCapture":
        """Of one store of a job, which lacks the responses `waiting`; a new store gets `needed` features."""
        if store.base:
            features = store.select(job.settings.drafters, store.base.info)
        else:
            features = frozenset(map(Feature.parse, needed))
        samples = len(waiting) + planned.missing
        tokens = planned.tokens_with(waiting)
        text, visual = tokens or (None, None)
        return cls(features, samples, text, visual)

    @property
    def tokens(self) -> int | None:
        """Text and visual tokens together."""
        if self.text_tokens is None or self.visual_tokens is None:
            return None
        return self.text_tokens + self.visual_tokens

    def bytes(self, hidden_size: int) -> int:
        """The size of the features on the disk."""
        from vlmdistill.pipelines.targets.describe import SampleSize, feature_cost

        size = SampleSize(
            text=self.text_tokens or 0,
            visual=self.visual_tokens or 0,
            images=self.samples if self.visual_tokens else 0,
        )
        return feature_cost(self.features, size, hidden_size).bytes


def capture(job: CaptureJob, speeds: Speeds | None = None) -> CaptureForecast:
    """Forecast responses and features; no weights are loaded and nothing is written."""
    speeds = speeds or Speeds()
    engine = job.workers.engine
    target = _described(job.workspace.model, job.settings.drafters)
    planned = _PlannedResponses.of(job)
    captures = [
        _PlannedCapture.of(store, waiting, planned, job, target.together.features)
        for store, waiting in job.waiting(planned.facts)
    ]
    largest = max(captures, key=lambda capture: capture.samples)
    captured = _captured_features(captures)
    prompt_keys = {*facts_of(job.prompts)["key"]}
    response_tokens = planned.likely_tokens
    return CaptureForecast(
        prompts=len(job.prompts),
        responses=len(planned.facts),
        to_generate=planned.missing,
        most_tokens=planned.missing * planned.max_tokens,
        likely_tokens=response_tokens,
        samples=len(prompt_keys & job.store.keys()),
        to_capture=largest.samples,
        text_tokens=largest.text_tokens,
        visual_tokens=largest.visual_tokens,
        features=tuple(captured),
        bytes=_capture_bytes(captures, target.target.hidden_size),
        free_bytes=free_disk(job.store.path),
        weights_bytes=target.weights_bytes,
        response_memory=_response_memory(job, target, planned),
        feature_memory=_feature_memory(job, target, captured),
        response_seconds=speeds.seconds("responses", response_tokens, engine),
        feature_seconds=speeds.seconds("features", largest.tokens, engine),
    )


def _captured_features(captures: Sequence[_PlannedCapture]) -> list[str]:
    """The names of the features that some sample gets."""
    names = set[str]()
    for capture in captures:
        if capture.samples:
            names |= {feature.name for feature in capture.features}
    return sorted(names)


def _capture_bytes(captures: Sequence[_PlannedCapture], hidden_size: int) -> int | None:
    """The growth of the store and its annexes; None if no response exists to estimate it by."""
    if any(capture.tokens is None for capture in captures):
        return None
    return sum(capture.bytes(hidden_size) for capture in captures)


def _response_memory(
    job: CaptureJob, target: "TargetDescription", planned: _PlannedResponses
) -> Memory:
    """A process that generates responses."""
    responses = min(job.batch or CPU_BATCH, planned.missing)
    batch = _response_batch(target.target, responses, planned.longest_sequence)
    return _worker_memory(target, _dtype(job), batch)


def _feature_memory(
    job: CaptureJob, target: "TargetDescription", features: Sequence[str]
) -> Memory:
    """A process that captures features."""
    batch = {"pass": rows(target.target, job.settings.batch_tokens, features)}
    return _worker_memory(target, _dtype(job), batch)


def _worker_memory(
    target: "TargetDescription", dtype: str, batch: Mapping[str, int]
) -> Memory:
    """A process with a target that may be spread over GPUs; `batch` are the numbers of its batches."""
    return on_target(target.parameters.all, dtype, batch=batch, spread=True)


def _dtype(job: CaptureJob) -> str:
    return job.workers.load.get("dtype", "auto")


def _response_batch(info: TargetInfo, responses: int, tokens: int) -> dict[str, int]:
    """The numbers of a batch of responses, each of so many tokens with its prompt."""
    return {
        "kv_cache": kv_cache(info, responses * tokens),
        "logits": 2 * responses * info.vocab_size,
    }


def _described(
    model: str, drafters: Sequence[str] | None = None
) -> "TargetDescription":
    """The target. It alone needs transformers, which takes longer to import than a forecast of training."""
    from vlmdistill.pipelines.targets.describe import describe

    return describe(model, 0, 0, drafters=drafters)


@dataclass(frozen=True, kw_only=True)
class TrainForecast:
    """The work of a training."""

    samples: int  # with images or videos, and without
    text_samples: int
    held_out: int
    steps: int
    stages: dict[str, str]  # the share of each in the run
    batch_tokens: int  # of an optimizer step
    parameters: int  # that are trained
    memory: Memory  # of one rank, before ZeRO
    disk_bytes: int
    """Of the checkpoint, while its successor is written, and of the drafter."""
    seconds: float | None  # of the steps that are left; None: no rate is known
    done: int  # steps of an earlier start of the same run
    finished: bool


def needs_of_training(
    run: Run, info: TargetInfo, world: int = 1
) -> tuple[int, Memory, int]:
    """The weights that a run trains, the memory of a rank, and the bytes that it writes."""
    with torch.device("meta"):
        table_VD = torch.empty(info.vocab_size, info.hidden_size)
        head = Head(table_VD, table_VD)
        drafter = catalogue.trained(run.drafter)(run.config.model, info, head)
    weights = sum(
        weight.numel() for weight in drafter.parameters() if weight.requires_grad
    )
    _, tokens = run.packing(world)
    features = len(run.config.model.needs(info))
    memory = of_training(info, weights, run.precision, tokens, features)
    return weights, memory, (SAVED + 1) * 4 * weights


PLANNED_TOKENS = 2048  # of a prompt with its response, in `fits`


def fits(model: str, gpus: int, gpu_bytes: int) -> dict[str, Memory]:
    """The memory of a process of each stage in bfloat16, beside that of so many GPUs of a size.

    Stages run with their defaults, responses with `PLANNED_TOKENS` for each prompt; a training of each method
    is one rank per GPU, before ZeRO.
    """
    target = _described(model)
    info = target.target
    weights = target.parameters.all
    dtype = "bfloat16"
    responses = _response_batch(info, CPU_BATCH, PLANNED_TOKENS)
    one_pass = rows(info, CaptureSettings.batch_tokens, target.together.features)
    one_response = kv_cache(info, PLANNED_TOKENS)
    stages = {
        "responses": _worker_memory(target, dtype, responses),
        "features": _worker_memory(target, dtype, {"pass": one_pass}),
        "eval, serve": on_target(weights, dtype, batch={"kv_cache": one_response}),
    }
    for name in filter(catalogue.is_trained, catalogue.NAMES):
        run = Run(
            drafter=name,
            config=catalogue.config(name),
            store="",
            out=Path(name),
            dtype=dtype,
        )
        _, stages[f"train {name}"], _ = needs_of_training(run, info, gpus)
    return {
        stage: replace(memory, free=[gpu_bytes] * gpus, device="GPU")
        for stage, memory in stages.items()
    }


def check_training(run: Run, world: int = 1) -> None:
    """DataError if a run cannot be trained here."""
    info = Store.open(run.store, run.cache).info
    _, memory, disk_bytes = needs_of_training(run, info, world)
    advice = "use smaller --set batch_tokens or a larger machine; for the disk, another --runs"
    check(f"train {run.out.name}", memory, disk_bytes, run.out, advice)


def training(run: Run, speeds: Speeds | None = None, world: int = 1) -> TrainForecast:
    """Forecast a training; nothing is written. Raises what the training would of its store and settings."""
    speeds = speeds or Speeds()
    data = RunData.of(run)
    micro, budget = run.packing(world)
    schedule = Schedule(run.config.training, run.config.schedule, micro)

    def batches(keys: Sequence[str]) -> int:
        epoch = Epoch(
            data.store, data.needs, keys=keys, token_budget=budget, world=world
        )
        return len(epoch)

    def drawn(stage: int, ramp: float) -> Sequence[str]:
        return data.samples[stage].draw(schedule.stages[stage], ramp, 0)

    weights, memory, disk_bytes = needs_of_training(run, data.store.info, world)
    steps = schedule.planned(Position(), drawn, batches)
    checkpoint = saved.read(run.state)
    done = 0
    if checkpoint and checkpoint.signature == data.signature:
        done = checkpoint.position.total
    is_finished = finished(run, data)
    steps_left = 0 if is_finished else steps - done
    batch_tokens = run.config.training.batch_tokens
    seconds = speeds.seconds(f"train {run.drafter}", steps_left * batch_tokens)
    samples = data.samples[-1]  # of the last stage
    shares = {
        stage.name: schedule.share(number)
        for number, stage in enumerate(schedule.stages)
    }
    return TrainForecast(
        samples=len(samples.visual),
        text_samples=len(samples.text),
        held_out=len(samples.held_out),
        steps=steps,
        stages=shares,
        batch_tokens=batch_tokens,
        parameters=weights,
        memory=memory,
        disk_bytes=disk_bytes,
        seconds=seconds,
        done=done,
        finished=is_finished,
    )


@dataclass(frozen=True, kw_only=True)
class EvalForecast:
    """The work of an evaluation."""

    prompts: int
    decodings: int
    """Of a prompt: plain, and each drafter with each tree, at each temperature."""
    most_tokens: int
    memory: Memory
    seconds: float | None
    """Of decoding, by earlier evaluations here; None if a drafter has none."""

    def check(self, reports: Path) -> None:
        """DataError if the target does not fit here."""
        check("eval", self.memory, None, reports, LARGER)


def evaluation(
    workspace: Workspace,
    drafters: Sequence[str],
    settings: Settings,
    prompts_file: Path | None = None,
    *,
    untrained: bool = False,
    timed: bool = True,
) -> EvalForecast:
    """Forecast an evaluation, its time only if it is to be `timed`; nothing is decoded or written.

    DataError if there are no prompts, TrainingError if a drafter is missing unless `untrained` ones may be.
    """
    settings.check()
    if not untrained:
        for name in drafters:
            describe_drafter(workspace.drafter(name))
    prompts = len(
        held_out(prompts_file or workspace.prompts, settings.limit, workspace.model)
    )
    temperatures = len(settings.temperatures)
    trees = max(1, len(settings.trees))
    decodings = temperatures * (1 + len(drafters) * trees)
    seconds = None
    if timed:
        responses = prompts * temperatures
        seconds = _decoding_seconds(workspace, drafters, responses, trees)
    memory = on_target(
        parameters_in(resolve(workspace.model)),
        settings.how.get("dtype", "auto"),
        drafter=_weights_of(workspace, drafters),
    )
    return EvalForecast(
        prompts=prompts,
        decodings=decodings,
        most_tokens=prompts * decodings * settings.max_new_tokens,
        memory=memory,
        seconds=seconds,
    )


def _weights_of(workspace: Workspace, drafters: Sequence[str]) -> int:
    """The weights of all drafters that are there, by the sizes of their float32 files."""
    total = 0
    for name in drafters:
        file = workspace.drafter(name) / "model.safetensors"
        if file.is_file():
            total += file.stat().st_size // 4
    return total


def _decoding_seconds(
    workspace: Workspace, drafters: Sequence[str], responses: int, trees: int
) -> float | None:
    """The time of so many responses, plain and of each drafter, by the latest measurements here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = hardware.of(device).name
    latest = {
        result.drafter: result.measurement.prompts
        for result in reversed(selection.read(workspace.reports).own)
        if result.evaluation.hardware == machine
    }
    if not {*drafters} <= latest.keys():
        return None
    measured = [latest[name] for name in drafters]
    plain_seconds = fmean(row.plain.seconds for rows in measured for row in rows)
    drafted_seconds = sum(
        fmean(row.drafted.seconds for row in rows) for rows in measured
    )
    return responses * (plain_seconds + trees * drafted_seconds)


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The work of a training, as far as it is known before the store exists."""

    steps: int | None  # None: the recipe counts epochs
    parameters: int
    memory: Memory
    disk_bytes: int
    seconds: float | None
    finished: bool

    @classmethod
    def of(cls, run: Run, info: TargetInfo, speeds: Speeds) -> "PlannedTraining":
        """The training of a run, for a target."""
        weights, memory, disk_bytes = needs_of_training(run, info)
        steps = run.config.training.steps or None
        is_finished = (run.out / "config.json").exists()
        tokens = None
        if is_finished:
            tokens = 0
        elif steps:
            tokens = steps * run.config.training.batch_tokens
        return cls(
            steps=steps,
            parameters=weights,
            memory=memory,
            disk_bytes=disk_bytes,
            seconds=speeds.seconds(f"train {run.drafter}", tokens),
            finished=is_finished,
        )


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """The work of the whole flow."""

    capture: CaptureForecast
    training: dict[str, PlannedTraining]
    evaluation: EvalForecast
    seconds: float | None
    """Of all stages, one after the other; None: that of some is not known."""


def run(
    model: str,
    capture: CaptureForecast,
    runs: Mapping[str, Run],
    evaluation: EvalForecast,
    speeds: Speeds,
) -> RunForecast:
    """Forecast the flow from the forecasts of its stages; nothing is written."""
    info = _described(model, ["wren"]).target
    trainings = {
        name: PlannedTraining.of(training, info, speeds)
        for name, training in runs.items()
    }
    seconds = _total(
        capture.response_seconds,
        capture.feature_seconds,
        evaluation.seconds,
        *(training.seconds for training in trainings.values()),
    )
    return RunForecast(
        capture=capture, training=trainings, evaluation=evaluation, seconds=seconds
    )


def _total(*stages: float | None) -> float | None:
    """The sum; None if one of them is not known."""
    total = 0.0
    for seconds in stages:
        if seconds is None:
            return None
        total += seconds
    return total
