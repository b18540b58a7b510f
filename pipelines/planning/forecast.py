"""What the stages of a workspace would take: their work, time, memory and disk, and what exists already.

Nothing is downloaded or written. The configuration of a target that is not on this machine is the one that
this package ships.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from vlmdistill.pipelines.bench.records import PromptResult
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import CaptureJob
from vlmdistill.pipelines.data.prompts.prompt_table import LENGTHS, facts_of
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.planning.assumptions import (
    AssumedRates,
    decoding_rate,
    training_rate,
)
from vlmdistill.pipelines.planning.gpus import Gpus
from vlmdistill.pipelines.planning.resources import (
    SAVED,
    Memory,
    free_disk,
    kv_cache,
    of_training,
    on_target,
    rows,
)
from vlmdistill.pipelines.planning.stages import Certainty, Speed, Speeds, StagePlan
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.targets.batching import CPU_BATCH
from vlmdistill.pipelines.targets.checkpoints.folder import (
    locate,
    parameters_in,
    resolve,
)
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import TargetError, size
from vlmdistill.stores.loader.epoch import Epoch, cost, select
from vlmdistill.stores.schema import Feature, TargetInfo
from vlmdistill.stores.store import Store

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.describe import TargetDescription

MEMORY_ADVICE = "use a larger machine, or --target-dtype bfloat16"
STORE_ADVICE = (
    f"name another --store, or fewer methods in --for; for memory, {MEMORY_ADVICE}"
)
TRAINING_ADVICE = (
    "use smaller --set batch_tokens or a larger machine; for the disk, another --runs"
)
TOKEN_BYTES = 8  # of a response on the disk: the id of a token and its text
CHARACTERS = 4  # of a token; an image counts as 500 tokens, a video as 5,000


@dataclass(frozen=True)
class _Tokens:
    """Tokens of samples, each a prompt with its response."""

    text: int
    visual: int

    @property
    def all(self) -> int:
        """Text and visual tokens together."""
        return self.text + self.visual

    def __add__(self, other: "_Tokens") -> "_Tokens":
        return _Tokens(self.text + other.text, self.visual + other.visual)


@dataclass(frozen=True)
class _PlannedResponses:
    """The responses that exist, and those that are to be generated."""

    facts: pl.DataFrame  # of those that exist
    missing_prompts: pl.DataFrame  # see `facts_of`
    max_tokens: int  # of a response

    @classmethod
    def of(cls, job: CaptureJob) -> "_PlannedResponses":
        """The responses of a job."""
        facts = job.generated()
        sampling = job.sampling or dataset.read_settings(job.responses)[0]
        return cls(facts, facts_of(job.missing()), sampling.max_new_tokens)

    @property
    def missing(self) -> int:
        """How many are to be generated."""
        return len(self.missing_prompts)

    @property
    def certainty(self) -> Certainty:
        """How the tokens of those to generate are known."""
        if not self.missing:
            return "counted"
        return "estimated" if len(self.facts) else "assumed"

    @property
    def tokens_to_generate(self) -> int:
        """By the mean of the responses that exist; if there is none, as many as may be."""
        if self.certainty == "assumed":
            return self.missing * self.max_tokens
        return self._scaled("tokens")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest known prompt with the longest response."""
        longest_prompt = self.facts["prompt_tokens"].max() or 0
        return int(longest_prompt) + self.max_tokens  # type: ignore[arg-type]

    @property
    def samples_to_generate(self) -> _Tokens:
        """The tokens of the responses to generate, with their prompts."""
        if self.certainty == "assumed":
            return self._assumed_samples
        visual = self._scaled("visual_tokens")
        prompt_text = self._scaled("prompt_tokens") - visual  # which counts both
        return _Tokens(prompt_text + self._scaled("tokens"), visual)

    @property
    def _assumed_samples(self) -> _Tokens:
        """By the characters of the prompts, in which an image has a length, and the longest responses."""
        of_image = LENGTHS["image"]
        visual_characters = pl.col("chars") // of_image * of_image
        prompts = self.missing_prompts.select(
            visual=visual_characters, text=pl.col("chars") % of_image
        )
        prompt_text = _sum(prompts, "text") // CHARACTERS
        visual = _sum(prompts, "visual") // CHARACTERS
        return _Tokens(prompt_text + self.tokens_to_generate, visual)

    def _scaled(self, column: str) -> int:
        """The sum of a column over those to generate, by the mean of those that exist."""
        if not self.missing:
            return 0
        return round(self.missing * _sum(self.facts, column) / len(self.facts))


def _sum(table: pl.DataFrame, column: str) -> int:
    return int(table[column].sum())


def _samples(responses: pl.DataFrame) -> _Tokens:
    """The tokens of responses that exist, with their prompts."""
    visual = _sum(responses, "visual_tokens")
    prompt_text = _sum(responses, "prompt_tokens") - visual  # which counts both
    return _Tokens(prompt_text + _sum(responses, "tokens"), visual)


@dataclass(frozen=True)
class _PlannedCapture:
    """The samples that a store, or an annex of it, would get."""

    features: frozenset[Feature]
    samples: int  # at most: filters may drop some of the responses to come
    waiting: _Tokens  # whose responses exist
    to_come: _Tokens  # whose responses are to be generated

    @classmethod
    def of(
        cls,
        store: CaptureStore,
        waiting: pl.DataFrame,
        planned: _PlannedResponses,
        job: CaptureJob,
        needed: Sequence[str],
    ) -> "_PlannedCapture":
        """The samples of the responses in `waiting`, which the store lacks, and of those to generate.

        `needed` are the features that a new store gets.
        """
        if store.base:
            features = store.select(job.settings.drafters, store.base.info)
        else:
            features = frozenset(map(Feature.parse, needed))
        samples = len(waiting) + planned.missing
        return cls(features, samples, _samples(waiting), planned.samples_to_generate)

    def bytes(self, hidden_size: int) -> int:
        """The size of the features on the disk, in bfloat16; a store of int8 takes half."""
        from vlmdistill.pipelines.targets.describe import SampleSize, feature_cost

        tokens = self.waiting + self.to_come
        samples = SampleSize(
            text=tokens.text,
            visual=tokens.visual,
            images=self.samples if tokens.visual else 0,  # an estimate: one each
        )
        return feature_cost(self.features, samples, hidden_size).bytes


def capture(job: CaptureJob, speeds: Speeds | None = None) -> "CapturePlan":
    """Plan responses and features; no weights are loaded."""
    description = _described(job.workspace.model, job.settings.drafters)
    planned = _PlannedResponses.of(job)
    needed = description.together.features
    captures = [
        _PlannedCapture.of(store, waiting, planned, job, needed)
        for store, waiting in job.waiting(planned.facts)
    ]
    return CapturePlan(job, speeds or Speeds(), description, planned, captures)


@dataclass(frozen=True)
class CapturePlan:
    """The plans of `responses` and `features` for some prompts."""

    job: CaptureJob
    speeds: Speeds
    description: "TargetDescription"
    planned: _PlannedResponses
    captures: Sequence[_PlannedCapture]  # of the store, then of its annexes

    @cached_property
    def responses(self) -> StagePlan:
        """The generation of missing responses."""
        planned = self.planned
        info = self.description.target
        # On a GPU, free memory decides how large batches are; they are planned as on a CPU.
        batch = min(self.job.batch or CPU_BATCH, planned.missing)
        numbers = response_batch(info, batch, planned.longest_sequence)
        tokens = planned.tokens_to_generate
        return StagePlan(
            name="responses",
            unit="responses",
            to_do=planned.missing,
            done=len(planned.facts),
            tokens=tokens,
            certainty=planned.certainty,
            speed=self._speed("responses"),
            memory=worker_memory(self.description, self._dtype, numbers),
            disk_bytes=TOKEN_BYTES * tokens,
            folder=self.job.responses,
            details=f"at most {planned.max_tokens} tokens each; {self._weights}",
            advice=MEMORY_ADVICE,
        )

    @cached_property
    def features(self) -> StagePlan:
        """The capture of missing features."""
        job = self.job
        names = self._features
        one_pass = rows(self.description.target, job.settings.batch_tokens, names)
        hidden_size = self.description.target.hidden_size
        disk_bytes = sum(capture.bytes(hidden_size) for capture in self.captures)
        prompt_keys = {*facts_of(job.prompts)["key"]}
        return StagePlan(
            name="features",
            unit="samples",
            to_do=self._largest.samples,
            done=len(prompt_keys & job.store.keys()),
            tokens=self._tokens_to_run,
            certainty=self.planned.certainty,
            speed=self._speed("features"),
            memory=worker_memory(self.description, self._dtype, {"pass": one_pass}),
            disk_bytes=disk_bytes,
            folder=job.store.path,
            details=self._feature_details(names),
            advice=STORE_ADVICE,
        )

    @property
    def stages(self) -> tuple[StagePlan, StagePlan]:
        """Responses, then features."""
        return self.responses, self.features

    def check(self) -> None:
        """DataError if the responses and features cannot be made here."""
        for stage in self.stages:
            stage.check()

    @property
    def _largest(self) -> _PlannedCapture:
        """A sample that the store and its annexes lack counts once, though each gets features of it."""
        return max(self.captures, key=lambda capture: capture.samples)

    @property
    def _dtype(self) -> str:
        return self.job.workers.load.get("dtype", "auto")

    @property
    def _weights(self) -> str:
        """Where the weights of the target are."""
        if self.description.weights_bytes is None:
            parameters = self.description.parameters.all
            return f"the target's weights are not here ({size(2 * parameters)} in bfloat16)"
        return f"weights of {size(self.description.weights_bytes)}"

    def _speed(self, stage: str) -> Speed | None:
        engine = self.job.workers.engine
        assumed = self._assumed
        rate = getattr(assumed, stage) if assumed else None
        return self.speeds.speed(stage, rate, engine)

    @cached_property
    def _assumed(self) -> AssumedRates | None:
        """The rates of the GPUs here; None without work or GPUs of a known class."""
        largest = self._largest
        gpus = Gpus.here()
        if gpus is None or not largest.samples:
            return None
        tokens = (largest.waiting + largest.to_come).all
        response_tokens = max(1, self.planned.max_tokens)
        prompt_tokens = max(1, tokens // largest.samples - response_tokens)
        return AssumedRates(gpus, self.description, prompt_tokens, response_tokens)

    @property
    def _tokens_to_run(self) -> int:
        """The tokens that the target runs to capture features for the store, then for each annex.

        In one pass, responses that are generated come into the store without another run.
        """
        missing_keys = {*self.planned.missing_prompts["key"]}
        in_one_pass = self.job.captures_while_generating(missing_keys)
        return tokens_to_run(self.captures, in_one_pass=in_one_pass)

    @property
    def _features(self) -> list[str]:
        """The names of the features that any sample gets."""
        names = set[str]()
        for capture in self.captures:
            if capture.samples:
                names |= {feature.name for feature in capture.features}
        return sorted(names)

    def _feature_details(self, names: Sequence[str]) -> str:
        """What is captured, and the free disk."""
        tokens = self._largest.waiting + self._largest.to_come
        details = f"{tokens.text} text and {tokens.visual} visual tokens"
        details += f": {', '.join(names) or 'nothing'}"
        free_bytes = free_disk(self.job.store.path)
        if free_bytes is not None:
            details += f"; {size(free_bytes)} of disk are free"
        return details


def tokens_to_run(captures: Sequence[_PlannedCapture], *, in_one_pass: bool) -> int:
    """The tokens of all passes; see `CapturePlan`."""
    own, *annexes = captures
    own_tokens = own.waiting if in_one_pass else own.waiting + own.to_come
    of_annexes = sum((annex.waiting + annex.to_come).all for annex in annexes)
    return own_tokens.all + of_annexes


def worker_memory(
    description: "TargetDescription", dtype: str, batch: Mapping[str, int]
) -> Memory:
    """A process with a target that may be spread over GPUs.

    `batch` is how many numbers a batch takes beside the weights, by what they are.
    """
    return on_target(description.parameters.all, dtype, batch=batch, spread=True)


def response_batch(info: TargetInfo, responses: int, tokens: int) -> dict[str, int]:
    """How many numbers a batch of responses takes, each of `tokens` tokens with its prompt."""
    return {
        "kv_cache": kv_cache(info, responses * tokens),
        "logits": 2 * responses * info.vocab_size,  # and their probabilities
    }


def _described(
    model: str, drafters: Sequence[str] | None = None
) -> "TargetDescription":
    """The target, and what `drafters` need of it; None: all methods.

    Only here, as transformers takes longer to import than a forecast of training takes in all.
    """
    from vlmdistill.pipelines.targets.describe import describe

    # The size of a sample is not asked for.
    return describe(model, text=0, visual=0, drafters=drafters)


@dataclass(frozen=True)
class TrainingNeeds:
    """What a training needs before its samples are known."""

    weights: int  # that are trained
    memory: Memory  # of one rank, before ZeRO
    disk_bytes: int
    """Of the checkpoint, while its successor is written, and of the drafter."""

    @classmethod
    def of(cls, run: Run, info: TargetInfo, world: int = 1) -> "TrainingNeeds":
        """Of a run, for a target."""
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
        saved_floats = (SAVED + 1) * weights  # of the checkpoints, and of the drafter
        return cls(weights, memory, 4 * saved_floats)


def check_training(run: Run, world: int = 1) -> None:
    """DataError if a run cannot be trained here."""
    info = Store.open(run.store, run.cache).info
    unmeasured = _TrainingWork(to_do=None, tokens=None)
    _stage_of_training(run, info, Speeds(), world, unmeasured).check()


def training(
    run: Run,
    speeds: Speeds | None = None,
    world: int = 1,
    model: str = "",
    *,
    force: bool = False,
) -> StagePlan:
    """Plan a training; with `force` it starts over, whatever its folders hold.

    Without a store, its settings and the configuration of the target `model` say what they can. It raises
    what the training itself would raise when its store and settings are checked.
    """
    speeds = speeds or Speeds()
    if model and Store.find(run.store) is None:
        info = _described(model, ["wren"]).target
        return training_to_come(run, info, speeds, world, force=force)
    data = RunData.of(run)
    work = _work_of(run, data, world, force=force)
    return _stage_of_training(run, data.store.info, speeds, world, work)


def training_to_come(
    run: Run,
    info: TargetInfo,
    speeds: Speeds,
    world: int = 1,
    *,
    force: bool = False,
) -> StagePlan:
    """Plan a training whose samples do not exist yet."""
    steps = run.config.training.steps or None
    is_trained = (run.out / "config.json").exists()
    to_do = 0 if is_trained and not force else steps
    tokens = None
    if to_do is not None:
        tokens = to_do * run.config.training.batch_tokens
    work = _TrainingWork(to_do, tokens, details=NO_STORE)
    return _stage_of_training(run, info, speeds, world, work)


NO_STORE = "its samples are not known before `vlmdistill features`; `vlmdistill plan` assumes some"


@dataclass(frozen=True)
class _TrainingWork:
    """The steps of a training."""

    to_do: int | None  # None: not known
    tokens: int | None  # of these steps
    done: int = 0
    details: str = ""  # of its samples


def _stage_of_training(
    run: Run, info: TargetInfo, speeds: Speeds, world: int, work: _TrainingWork
) -> StagePlan:
    """The plan of a training with so much work."""
    needs = TrainingNeeds.of(run, info, world)
    gpus = Gpus.here()
    assumed = training_rate(gpus, run.config, needs.weights) if gpus else None
    micro, _ = run.packing(world)
    schedule = Schedule(run.config.training, run.config.schedule, micro)
    stages = [
        f"{stage.name} {schedule.length_of(number)}"
        for number, stage in enumerate(schedule.stages)
    ]
    details = (
        f"{', '.join(stages)}, of at most {run.config.training.batch_tokens} tokens",
        f"{needs.weights} weights",
        work.details,
    )
    return StagePlan(
        name=f"train {run.out.name}",
        unit="steps",
        to_do=work.to_do,
        done=work.done,
        tokens=work.tokens,
        speed=speeds.speed(f"train {run.drafter}", assumed),
        memory=needs.memory,
        disk_bytes=0 if work.to_do == 0 else needs.disk_bytes,
        folder=run.out,
        details="; ".join(filter(None, details)),
        advice=TRAINING_ADVICE,
    )


def _work_of(run: Run, data: RunData, world: int, *, force: bool) -> _TrainingWork:
    """The steps of a run on its samples; with `force` none of them is done."""
    micro, budget = run.packing(world)
    schedule = Schedule(run.config.training, run.config.schedule, micro)

    def batches(keys: Sequence[str]) -> int:
        epoch = Epoch(
            data.store, data.needs, keys=keys, token_budget=budget, world=world
        )
        return len(epoch)

    def drawn(stage: int, ramp: float) -> Sequence[str]:
        return data.samples[stage].draw(schedule.stages[stage], ramp, 0)

    steps = schedule.planned(Position(), drawn, batches)
    done = 0 if force else _steps_done(run, data, steps)
    to_do = max(0, steps - done)
    # A step ends with the epoch, however many tokens it might have.
    samples_read = select(data.store, None, data.keys)
    epoch_tokens = int(cost(samples_read, data.needs).sum())
    step_tokens = min(run.config.training.batch_tokens, epoch_tokens)
    samples = data.samples[-1]  # of the last stage
    details = (
        f"{len(samples.visual)} samples with images or videos, {len(samples.text)} of text "
        f"alone, {len(samples.held_out)} held out"
    )
    return _TrainingWork(to_do, to_do * step_tokens, done, details)


def _steps_done(run: Run, data: RunData, planned_steps: int) -> int:
    """The steps that a run has done; TrainingError if its folders hold another run."""
    if finished(run, data):
        return planned_steps
    checkpoint = saved.read(run.state)
    return checkpoint.position.total if checkpoint else 0


def evaluation(
    workspace: Workspace,
    drafters: Sequence[str],
    settings: Settings,
    prompts_file: Path | None = None,
    *,
    untrained: bool = False,
    timed: bool = True,
) -> StagePlan:
    """Plan an evaluation, its time only if it is to be `timed`; nothing is decoded.

    DataError if there are no prompts, TrainingError if a drafter is missing, unless some may be `untrained`.
    """
    settings.check()
    if not untrained:
        for name in drafters:
            describe_drafter(workspace.drafter(name))
    prompts = len(
        held_out(prompts_file or workspace.prompts, settings.limit, workspace.model)
    )
    trees = max(1, len(settings.trees))
    responses = prompts * len(settings.temperatures)
    decodings = responses * (1 + len(drafters) * trees)
    tokens = decodings * settings.max_new_tokens
    parameters = _parameters(workspace.model, timed)
    speed = None
    if timed:
        seconds = _decoding_seconds(workspace, drafters, responses, trees)
        gpus = Gpus.here()
        if seconds:
            speed = Speed(tokens / seconds, "measured")
        elif gpus:
            speed = Speed(decoding_rate(gpus, parameters), "assumed")
    memory = on_target(
        parameters,
        settings.how.get("dtype", "auto"),
        drafter=_weights_of(workspace, drafters),
    )
    missing = [name for name in drafters if not workspace.drafter(name).exists()]
    to_train = [name for name in missing if catalogue.is_trained(name)]
    temperatures = " and ".join(f"{value:g}" for value in settings.temperatures)
    decoders = f"plain and {len(drafters)} drafters"
    if trees > 1:
        decoders += f" with {trees} trees"
    return StagePlan(
        name="eval",
        unit="responses",
        to_do=decodings,
        tokens=tokens,
        certainty="assumed",
        speed=speed,
        memory=memory,
        disk_bytes=0,
        details=f"{prompts} held-out prompts at temperature {temperatures}, {decoders}; "
        f"at most {settings.max_new_tokens} tokens each{_to_train(to_train)}",
        advice=MEMORY_ADVICE,
    )


def _to_train(names: Sequence[str]) -> str:
    """What the plan leaves out of drafters that do not exist yet."""
    if not names:
        return ""
    return f"; without the memory of {', '.join(names)}, not trained yet"


def _parameters(model: str, only_planned: bool) -> int:
    """The parameters of a target, of its configuration if the weights are not here.

    Of a target of which nothing is known here, the weights are downloaded, unless it is `only_planned`.
    """
    try:
        location = locate(model)
    except TargetError:
        if only_planned:
            raise
        return parameters_in(resolve(model))
    if location.folder is None or location.lacking:
        return _described(model, ["wren"]).parameters.all
    return parameters_in(location.folder)


def _weights_of(workspace: Workspace, drafters: Sequence[str]) -> int:
    """The weights of all drafters that exist, by the sizes of their float32 files."""
    total_weights = 0
    for name in drafters:
        file = workspace.drafter(name) / "model.safetensors"
        if file.is_file():
            total_weights += file.stat().st_size // 4
    return total_weights


def _decoding_seconds(
    workspace: Workspace, drafters: Sequence[str], responses: int, trees: int
) -> float | None:
    """The time of so many responses, plain and of each drafter, by the latest measurements here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = hardware.of(device).name
    latest: dict[str, Sequence[PromptResult]] = {}
    for result in selection.read(workspace.reports).drafter_results:  # the latest first
        if result.evaluation.hardware == machine:
            latest.setdefault(result.drafter, result.measurement.prompts)
    if not {*drafters} <= latest.keys():
        return None
    measured = [latest[name] for name in drafters]
    plain_seconds = fmean(row.plain.seconds for rows in measured for row in rows)
    drafted_seconds = sum(
        fmean(row.drafted.seconds for row in rows) for rows in measured
    )
    return responses * (plain_seconds + trees * drafted_seconds)


def run(
    model: str,
    capture: CapturePlan,
    runs: Mapping[str, Run],
    evaluation: StagePlan,
    speeds: Speeds,
) -> list[StagePlan]:
    """The plans of all stages of the flow, in order."""
    if capture.features.to_do == 0:
        trainings = [training(each, speeds, model=model) for each in runs.values()]
    else:
        info = capture.description.target
        trainings = [training_to_come(each, info, speeds) for each in runs.values()]
    return [*capture.stages, *trainings, evaluation]
