"""What a stage would do, without doing it: samples, tokens, bytes, memory, hours, and what exists already."""

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
        found = {}
        for text in stated:
            stage, _, number = text.partition("=")
            if (
                stage not in STAGES
                or not re.fullmatch(r"\d+(\.\d+)?", number)
                or not float(number)
            ):
                raise DataError(
                    f"--rate {text}: write one of {', '.join(STAGES)} and its tokens per second, such as "
                    "features=3000"
                )
            found[stage] = float(number)
        return cls(root, found)

    def seconds(
        self, stage: str, tokens: float | None, engine: str = "transformers"
    ) -> float | None:
        """The time of so many tokens; None where no rate is known."""
        if tokens is None:
            return None
        if not tokens:
            return 0.0
        if stated := self.stated.get(
            stage.partition(" ")[0]
        ):  # of a training, for all methods
            return tokens / stated
        rate = rates.known(self.root, stage, engine) if self.root else None
        return tokens / rate.tokens_per_second if rate else None


@dataclass(frozen=True, kw_only=True)
class CaptureForecast:
    """What `responses` and `features` would do for some prompts.

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
class _Gain:
    """What a store, or an annex of it, would get; tokens None where no response tells."""

    features: frozenset[Feature]
    samples: int
    text: int | None = None
    visual: int | None = None

    def bytes(self, width: int) -> int:
        from vlmdistill.pipelines.targets.describe import SampleSize, feature_cost

        spans = self.samples if self.visual else 0
        size = SampleSize(text=self.text or 0, visual=self.visual or 0, images=spans)
        return feature_cost(self.features, size, width).bytes


def _described(
    model: str, drafters: Sequence[str] | None = None
) -> "TargetDescription":
    """The target. It alone needs transformers, which takes longer to import than a forecast of training."""
    from vlmdistill.pipelines.targets.describe import describe

    return describe(model, 0, 0, drafters=drafters)


def _generating(info: TargetInfo, batch: int, tokens: int) -> dict[str, int]:
    """The numbers of a batch of responses, each of so many tokens with its prompt."""
    return {
        "kv_cache": kv_cache(info, batch * tokens),
        "logits": 2 * batch * info.vocab_size,
    }


def capture(job: CaptureJob, speeds: Speeds | None = None) -> CaptureForecast:
    """Forecast responses and features; no weights are loaded and nothing is written."""
    speeds, drafters = speeds or Speeds(), job.settings.drafters
    facts = job.generated()
    missing = len(job.prompts) - len(facts)
    limit = (job.sampling or dataset.read_settings(job.responses)[0]).max_new_tokens
    about = _described(job.workspace.model, drafters)

    def gain(part: CaptureStore, waiting: pl.DataFrame) -> _Gain:
        """What a part gets from the responses that exist, and from those to come, each of the mean size."""
        held = (
            part.select(drafters, part.base.info)
            if part.base
            else map(Feature.parse, needed)
        )
        gain = _Gain(frozenset(held), len(waiting) + missing)
        if not len(facts) and missing:
            return gain
        more = missing / len(facts) if missing else 0.0
        visual, prompt, response = (
            int(waiting[name].sum()) + round(more * int(facts[name].sum()))
            for name in ("visual_tokens", "prompt_tokens", "tokens")
        )
        return replace(gain, text=prompt - visual + response, visual=visual)

    stored = job.store.keys()
    needed = about.together.features
    gains = [gain(*one) for one in job.waiting(facts)]
    info, weights = about.target, about.parameters.all
    largest, width = max(gains, key=lambda gain: gain.samples), info.hidden_size
    captured = sorted(
        {feature.name for one in gains if one.samples for feature in one.features}
    )
    likely = (
        round(missing * int(facts["tokens"].sum()) / len(facts)) if len(facts) else None
    )
    longest = int(facts["prompt_tokens"].max() or 0) + limit  # type: ignore[arg-type]
    at_once = _generating(info, min(job.batch or CPU_BATCH, missing), longest)
    in_pass = {"pass": rows(info, job.settings.batch_tokens, captured)}
    dtype, engine = job.workers.load.get("dtype", "auto"), job.workers.engine
    tokens = None if largest.text is None else largest.text + (largest.visual or 0)
    return CaptureForecast(
        prompts=len(job.prompts),
        responses=len(facts),
        to_generate=missing,
        most_tokens=missing * limit,
        likely_tokens=likely if missing else 0,
        samples=sum(key in stored for key in facts_of(job.prompts)["key"]),
        to_capture=largest.samples,
        text_tokens=largest.text,
        visual_tokens=largest.visual,
        features=tuple(captured),
        bytes=None if largest.text is None else sum(one.bytes(width) for one in gains),
        free_bytes=free_disk(job.store.path),
        weights_bytes=about.weights_bytes,
        response_memory=on_target(weights, dtype, batch=at_once, spread=True),
        feature_memory=on_target(weights, dtype, batch=in_pass, spread=True),
        response_seconds=speeds.seconds("responses", likely if missing else 0, engine),
        feature_seconds=speeds.seconds("features", tokens, engine),
    )


@dataclass(frozen=True, kw_only=True)
class TrainForecast:
    """What a training would do."""

    samples: int  # with images or videos, and without
    text_samples: int
    held_out: int
    steps: int
    stages: dict[str, str]  # the share of each in the run
    batch_tokens: int  # of an optimizer step
    parameters: int  # that are trained
    memory: Memory  # of one rank, before ZeRO
    disk_bytes: (
        int  # of the checkpoint, while its successor is written, and of the drafter
    )
    seconds: float | None  # of the steps that are left; None: no rate is known
    done: int  # steps of an earlier start of the same run
    finished: bool


def needs_of_training(
    run: Run, info: TargetInfo, world: int = 1
) -> tuple[int, Memory, int]:
    """The weights that a run trains, the memory of a rank, and the bytes that it writes."""
    with torch.device("meta"):
        table_VD = torch.empty(info.vocab_size, info.hidden_size)
        drafter = catalogue.trained(run.drafter)(
            run.config.model, info, Head(table_VD, table_VD)
        )
    weights = sum(
        weight.numel() for weight in drafter.parameters() if weight.requires_grad
    )
    _, tokens = run.packing(world)
    memory = of_training(
        info, weights, run.precision, tokens, len(run.config.model.needs(info))
    )
    return weights, memory, (SAVED + 1) * 4 * weights


PLANNED_TOKENS = 2048  # of a prompt with its response, in `fits`


def fits(model: str, gpus: int, gpu_bytes: int) -> dict[str, Memory]:
    """What each stage needs of one process in bfloat16, beside what so many GPUs of that size have.

    Stages run with their defaults, responses with `PLANNED_TOKENS` for each prompt; a training of each method
    is one rank per GPU, before ZeRO.
    """
    about = _described(model)
    info, weights = about.target, about.parameters.all
    dtype, answers = "bfloat16", _generating(info, CPU_BATCH, PLANNED_TOKENS)
    captured = {
        "pass": rows(info, CaptureSettings.batch_tokens, about.together.features)
    }
    stages = {
        "responses": on_target(weights, dtype, batch=answers, spread=True),
        "features": on_target(weights, dtype, batch=captured, spread=True),
        "eval, serve": on_target(
            weights, dtype, batch={"kv_cache": kv_cache(info, PLANNED_TOKENS)}
        ),
    }
    for name in filter(catalogue.is_trained, catalogue.NAMES):
        run = Run(
            drafter=name,
            config=catalogue.config(name),
            store="",
            out=Path(name),
            dtype=dtype,
        )
        stages[f"train {name}"] = needs_of_training(run, info, gpus)[1]
    return {
        stage: replace(memory, free=[gpu_bytes] * gpus, device="GPU")
        for stage, memory in stages.items()
    }


def check_training(run: Run, world: int = 1) -> None:
    """DataError if a run cannot be trained here."""
    _, memory, disk = needs_of_training(
        run, Store.open(run.store, run.cache).info, world
    )
    advice = "use smaller --set batch_tokens or a larger machine; for the disk, another --runs"
    check(f"train {run.out.name}", memory, disk, run.out, advice)


def training(run: Run, speeds: Speeds | None = None, world: int = 1) -> TrainForecast:
    """Forecast a training; nothing is written. Raises what the training would of its store and settings."""
    speeds = speeds or Speeds()
    data = RunData.of(run)
    micro, budget = run.packing(world)
    schedule = Schedule(run.config.training, run.config.schedule, micro)

    def batches(keys: Sequence[str]) -> int:
        return len(
            Epoch(data.store, data.needs, keys=keys, token_budget=budget, world=world)
        )

    def drawn(stage: int, ramp: float) -> Sequence[str]:
        return data.samples[stage].draw(schedule.stages[stage], ramp, 0)

    weights, memory, disk = needs_of_training(run, data.store.info, world)
    begun = saved.read(run.state)
    last = data.samples[-1]
    steps = schedule.planned(Position(), drawn, batches)
    over = finished(run, data)
    done = begun.position.total if begun and begun.signature == data.signature else 0
    left = 0 if over else steps - done
    return TrainForecast(
        samples=len(last.visual),
        text_samples=len(last.text),
        held_out=len(last.held_out),
        steps=steps,
        stages={
            one.name: schedule.share(number)
            for number, one in enumerate(schedule.stages)
        },
        batch_tokens=run.config.training.batch_tokens,
        parameters=weights,
        memory=memory,
        disk_bytes=disk,
        seconds=speeds.seconds(
            f"train {run.drafter}", left * run.config.training.batch_tokens
        ),
        done=done,
        finished=over,
    )


@dataclass(frozen=True, kw_only=True)
class EvalForecast:
    """What an evaluation would do."""

    prompts: int
    decodings: (
        int  # of a prompt: plain, and each drafter with each tree, at each temperature
    )
    most_tokens: int
    memory: Memory
    seconds: (
        float | None
    )  # of decoding, by earlier evaluations here; None where a drafter has none

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
    for name in () if untrained else drafters:
        describe_drafter(workspace.drafter(name))
    files = [workspace.drafter(name) / "model.safetensors" for name in drafters]
    more = sum(file.stat().st_size // 4 for file in files if file.is_file())
    weights = parameters_in(resolve(workspace.model))
    prompts = len(
        held_out(prompts_file or workspace.prompts, settings.limit, workspace.model)
    )
    temperatures, trees = len(settings.temperatures), max(1, len(settings.trees))
    decodings = temperatures * (1 + len(drafters) * trees)
    return EvalForecast(
        prompts=prompts,
        decodings=decodings,
        most_tokens=prompts * decodings * settings.max_new_tokens,
        memory=on_target(weights, settings.how.get("dtype", "auto"), more=more),
        seconds=_seconds(workspace, drafters, prompts * temperatures, trees)
        if timed
        else None,
    )


def _seconds(
    workspace: Workspace, drafters: Sequence[str], responses: int, trees: int
) -> float | None:
    """The time of so many responses, plain and of each drafter, by the latest measurements here."""
    machine = hardware.of(
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ).name
    latest = {
        one.drafter: one.measurement.prompts
        for one in reversed(selection.read(workspace.reports).own)
        if one.evaluation.hardware == machine
    }
    if not {*drafters} <= latest.keys():
        return None
    found = [latest[name] for name in drafters]
    plain = fmean(row.plain.seconds for rows in found for row in rows)
    return responses * (
        plain
        + trees * sum(fmean(row.drafted.seconds for row in rows) for rows in found)
    )


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """What is known of a training before there is a store."""

    steps: int | None  # None: the recipe counts epochs
    parameters: int
    memory: Memory
    disk_bytes: int
    seconds: float | None
    finished: bool


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What the whole flow would do."""

    capture: CaptureForecast
    training: dict[str, PlannedTraining]
    evaluation: EvalForecast
    seconds: (
        float | None
    )  # of all stages, one after the other; None: that of some is not known


def run(
    model: str,
    capture: CaptureForecast,
    runs: Mapping[str, Run],
    evaluation: EvalForecast,
    speeds: Speeds,
) -> RunForecast:
    """Forecast the flow, by what its stages are told; nothing is written."""
    info = _described(model, ["wren"]).target
    trained = {}
    for name, one in runs.items():
        weights, memory, disk = needs_of_training(one, info)
        steps, over = (
            one.config.training.steps or None,
            (one.out / "config.json").exists(),
        )
        tokens = 0 if over else steps and steps * one.config.training.batch_tokens
        trained[name] = PlannedTraining(
            steps=steps,
            parameters=weights,
            memory=memory,
            disk_bytes=disk,
            seconds=speeds.seconds(f"train {one.drafter}", tokens),
            finished=over,
        )
    parts = [capture.response_seconds, capture.feature_seconds, evaluation.seconds]
    parts += [one.seconds for one in trained.values()]
    known = [part for part in parts if part is not None]
    whole = sum(known) if len(known) == len(parts) else None
    return RunForecast(
        capture=capture, training=trained, evaluation=evaluation, seconds=whole
    )
