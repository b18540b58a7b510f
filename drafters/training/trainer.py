"""The trainer: reads a store, writes a drafter folder, on one process or many.

All random draws depend on (seed, step) alone, so an interrupted run continues bit for bit on the same number
of ranks if the device computes the same twice. A CPU does; the attention kernels of GPUs do for certain only
with `torch.use_deterministic_algorithms`. Rank 0 decides what to continue, and only rank 0 writes.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.initial import WarmStart, fresh
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.devices import choose_kernels
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.vocabulary import (
    DraftVocabulary,
    columns_of,
    coverage,
)
from vlmdistill.drafters.training import cpu, deepspeed_engine, ranks, saved
from vlmdistill.drafters.training.batches import (
    BatchSource,
    MicroBatches,
    Prefetched,
    advice_on_step,
    occurrences,
)
from vlmdistill.drafters.training.checkpointing import Checkpoints
from vlmdistill.drafters.training.deepspeed_engine import Engine
from vlmdistill.drafters.training.optimizer import Optimizer, StepResult
from vlmdistill.drafters.training.progress import (
    Metrics,
    SampleStats,
    TrainingProgress,
    loss_of,
    memory,
    open_metrics,
)
from vlmdistill.drafters.training.run import Run, RunData, finished
from vlmdistill.drafters.training.saved import Position
from vlmdistill.drafters.training.schedule import Schedule
from vlmdistill.drafters.training.signals import Signals
from vlmdistill.drafters.training.trackers import RunFacts
from vlmdistill.drafters.training.unroll import Unroll
from vlmdistill.drafters.training.validation import measure
from vlmdistill.stores.errors import StoppedError, StoreError, TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import content_hash

log = logging.getLogger(__name__)

OnStep = Callable[[TrainingProgress], None]


def train(
    run: Run, on_step: OnStep = lambda progress: None, force: bool = False
) -> Path:
    """Train a drafter to the end of its schedule and return its folder; `on_step` is called on rank 0.

    If the folder holds the drafter of a finished run with the same settings and samples, nothing is done; a
    half-done run is continued, on any number of ranks. With `force` the run starts over: the checkpoint of an
    earlier run of that name is deleted once the new engine is built, its drafter right before the first step.

    TrainingError when the store lacks what the drafter needs or has nothing to train on, when the folder
    holds a run with other settings or samples, when a loss is not finite, or when settings or data differ
    between ranks. StoppedError after SIGINT or SIGTERM: each makes the run write a checkpoint first.
    """
    with Signals() as signals, ranks.guarded(), cpu.tuned():
        data = _open_data(run, force)
        if force or not ranks.first(lambda: finished(run, data)):
            _warn_of_missing_kinds(run, data)
            trainer = _begin(run, data, signals, on_step, force)
            try:
                trainer.fit()
                trainer.publish()
            finally:
                trainer.close()
    return run.out


def take_steps(run: Run, on_step: OnStep) -> None:
    """Train as `train` does and make no drafter: the steps are looked at, and forgotten."""
    with Signals() as signals, ranks.guarded(), cpu.tuned():
        data = _open_data(run, force=False)
        trainer = _begin(run, data, signals, on_step, force=False)
        try:
            trainer.fit()
        finally:
            trainer.close()


def _open_data(run: Run, force: bool) -> RunData:
    """The data of the run; TrainingError on all ranks if settings or data differ between them."""
    ranks.join()
    # Ranks whose options differ would not make the same exchanges after this, and would wait forever.
    ranks.same(run.rank_options | {"force": force}, "train the same")
    with ranks.all_or_none():
        data = RunData.of(run)
    provenance = content_hash(data.store.provenance.to_dict())
    ranks.same(data.settings | {"provenance": provenance}, "train the same")
    return data


def _warn_of_missing_kinds(run: Run, data: RunData) -> None:
    """Warn of samples that stages mix with others and that are not there; on rank 0."""
    stages_by_kind: dict[str, list[str]] = {}
    for stage, samples in zip(run.config.schedule, data.samples, strict=True):
        if kind := samples.lacks(stage):
            stages_by_kind.setdefault(kind, []).append(stage.name)
    if not ranks.is_first():
        return
    for kind, names in stages_by_kind.items():
        log.warning(
            "%s: a mix of images and text is set, but %s has no samples %s: it trains on the others "
            "alone, so fewer drafted tokens will be accepted for prompts %s",
            ", ".join(names),
            run.store,
            kind,
            kind,
        )


def _begin(
    run: Run, data: RunData, signals: Signals, on_step: OnStep, force: bool
) -> "_Trainer":
    """A trainer that stands where the run's last checkpoint was written, or at its first step."""
    source = _batch_source(run, data)
    choose_kernels(source.device)
    # A warm start comes before the engine, which copies the weights. A checkpoint comes after it, and
    # replaces all weights. The draft vocabulary may come last: the engine does not copy buffers.
    drafter, warm_start = _initial_drafter(run, data, source)
    engine = deepspeed_engine.build(
        Unroll(drafter, run.config.training).to(source.device),
        clip=run.config.training.clip,
        zero=run.zero,
        dtype=source.dtype,
    )
    checkpoints = Checkpoints(run, data, engine)
    position = checkpoints.restore(force)
    if position is None:
        position = Position()
        if ranks.is_first():
            _log_start(run, data, warm_start)
        _choose_vocabulary(drafter, data, source, warm_start)
    facts = RunFacts(
        name=run.out.name,
        target=data.store.info.name,
        settings=data.settings,
        signature=data.signature,
        folder=run.state,
        done=position.total,
    )
    spare_key = next(iter(data.keys), "")
    optimizer = Optimizer(engine, source, spare_key, run.seed, signals)
    schedule = Schedule(run.config.training, run.config.schedule, source.micro_batches)
    trainer = _Trainer(
        run=run,
        data=data,
        drafter=drafter,
        warm_start=warm_start,
        engine=engine,
        source=source,
        optimizer=optimizer,
        schedule=schedule,
        checkpoints=checkpoints,
        position=position,
        metrics=open_metrics(facts, position.history, run.trackers),
        on_step=on_step,
    )
    signals.wait_for_step(trainer.where)
    if force:
        # On all ranks: any of them may have been rank 0 of an earlier run, and hold its drafter.
        shutil.rmtree(run.out, ignore_errors=True)
    return trainer


def _batch_source(run: Run, data: RunData) -> BatchSource:
    rank, world = ranks.join()
    micro_batches, micro_tokens = run.packing(world)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    return BatchSource(
        store=data.store,
        features=data.needs,
        rank=rank,
        world=world,
        micro_batches=micro_batches,
        micro_tokens=micro_tokens,
        device=device,
        dtype=getattr(torch, run.precision),
    )


def _initial_drafter(
    run: Run, data: RunData, source: BatchSource
) -> tuple[Drafter, WarmStart | None]:
    """The drafter before its first step, and what it took from the drafter of `--init`, if any."""
    info = data.store.info
    if data.initial:
        info = data.initial.info(info)
    drafter = fresh(
        run.drafter,
        run.config,
        data.store,
        run.seed,
        info,
        device=source.device,
        dtype=source.dtype,
    )
    warm_start = data.initial.into(drafter, run.drafter) if data.initial else None
    return drafter, warm_start


def _log_start(run: Run, data: RunData, warm_start: WarmStart | None) -> None:
    """Log what a warm start took; warn if a share is to validate and no sample falls into it."""
    if warm_start:
        for line in warm_start.lines():
            log.info("%s", line)
    if not data.samples:
        return
    last_split = data.samples[-1]
    if run.held_out == 0 or last_split.held_out:
        return
    count = len(last_split.trained)
    log.warning(
        "none of %s samples validates at a share of %g, so that no agreement is measured on others and "
        "no tau predicted: with --validation-share 0.2 about %s do",
        count,
        run.held_out,
        ceil(0.2 * count),
    )


def _choose_vocabulary(
    drafter: Drafter, data: RunData, source: BatchSource, warm_start: WarmStart | None
) -> None:
    """Let the drafter choose its vocabulary by the responses to train on, unless it took one over."""
    columns_K = columns_of(drafter)
    if not isinstance(drafter, DraftVocabulary) or columns_K is None:
        return
    buffers = {name for name, _ in drafter.named_buffers()}
    if warm_start and buffers.intersection(warm_start.taken):
        return
    reader = Epoch(
        data.store,
        (),
        keys=data.keys,
        token_budget=source.micro_tokens,
        rank=source.rank,
        world=source.world,
    )
    count_V = occurrences(reader, data.store.info.vocab_size)
    total_V = ranks.total(count_V.to(source.device))
    if ranks.is_first():
        log.info("%s", coverage(total_V, len(columns_K)))
    drafter.choose_vocabulary(total_V)


@dataclass(frozen=True)
class _StepTimes:
    """How long a step took; see `TrainingProgress`."""

    seconds: float
    cpu_seconds: float
    waited: float


@dataclass(kw_only=True)
class _Trainer:
    """The loop over stages, epochs and optimizer steps."""

    run: Run
    data: RunData
    drafter: Drafter
    warm_start: WarmStart | None
    engine: Engine
    source: BatchSource
    optimizer: Optimizer
    schedule: Schedule
    checkpoints: Checkpoints
    position: Position
    metrics: Metrics | None  # on rank 0
    on_step: OnStep
    planned_steps: int = 0
    sample_stats: SampleStats = field(default_factory=SampleStats)

    def fit(self) -> None:
        """Train all stages; TrainingError when they have nothing to train on."""
        while self.position.stage < len(self.schedule.stages):
            self._train_stage(self.schedule.stages[self.position.stage])
        if self.position.total == 0:
            raise TrainingError(
                f"no step was taken: {self.run.store} has no samples for the stages of "
                f"{self.run.drafter}, or their epochs are too short"
            )

    def _train_stage(self, stage: Stage) -> None:
        self.planned_steps = self._plan_steps()
        self._warn_of_empty_stage(stage)
        # A signal stops a run between a step and its validation (`_stop`), which is made up for here.
        self._validate_if_due(stage)
        has_batches = True
        while has_batches and not self._is_over(stage):
            has_batches = self._train_epoch(stage)
        self._validate(stage)
        self.position.end_stage(stage.name)

    def _train_epoch(self, stage: Stage) -> bool:
        """Train on one epoch of samples, or on as much of it as the stage allows; False: it has no batches.

        Each call ends an epoch, so that a stage that counts epochs comes to its end even without a step.
        """
        position = self.position
        seed = self._epoch_seed()
        ramp = self.schedule.ramp(position)
        keys = self.data.samples[position.stage].draw(stage, ramp, seed)
        reader = self.source.epoch(keys, seed, position.reader)
        batches = reader.epoch_batches
        batches_read = batches - len(reader)
        is_last = self.schedule.is_last_epoch(position, batches)
        observe = self.sample_stats.add if is_last else None
        batches_left = self.schedule.batches_left(position, batches, batches_read)
        steps = Prefetched(self.source.steps(reader, batches_left))
        # A GPU computes the gradients of a step while the CPU fetches the batches of the next.
        meanwhile = None if self.source.device.type == "cpu" else steps.fetch
        began, cpu_began = time.perf_counter(), time.process_time()
        for step in steps:
            # Train step
            epoch_share = batches_read / batches
            learning_rate = self.schedule.learning_rate(position, epoch_share)
            result = self.optimizer.step(
                position.total, stage, step, learning_rate, observe, meanwhile
            )
            self._require_finite(result, step)
            batches_read += len(step.packed)
            # As passes over all samples of the run: an epoch may draw only some of them.
            epoch_passes = batches_read / batches * len(keys) / len(self.data.keys)
            position.end_step(step.state, epoch_passes)

            # Report, stop, validate, save
            seconds = time.perf_counter() - began
            # Ranks do the same work: the threads of this one stand for all.
            cpu_seconds = (time.process_time() - cpu_began) * self.source.world
            position.seconds += seconds
            position.cpu_seconds += cpu_seconds
            times = _StepTimes(seconds, cpu_seconds, step.waited)
            self._report(stage, result, learning_rate, times)
            if result.signal:
                self._stop(result.signal)
            self._validate_if_due(stage)
            if position.total % self.run.save_every == 0:
                self._save()
            if position.total % cpu.TRIM_EVERY == 0:
                cpu.trim()
            if self._is_over(stage):
                break
            began, cpu_began = time.perf_counter(), time.process_time()
        reader.close()
        position.end_epoch()
        return batches > 0

    def _epoch_seed(self) -> int:
        """The seed of the samples of an epoch and of their order."""
        position = self.position
        digest = content_hash([self.run.seed, position.stage, position.epoch])
        return int(digest, 16) % 2**31

    def _plan_steps(self) -> int:
        """The optimizer steps of the whole run; see `Schedule.planned`."""

        def batches(keys: Sequence[str]) -> int:
            return len(self.source.epoch(keys))

        return self.schedule.planned(self.position, self._draw, batches)

    def _draw(self, stage: int, ramp: float) -> Sequence[str]:
        """The samples of an epoch of a stage, to count them."""
        return self.data.samples[stage].draw(self.schedule.stages[stage], ramp, 0)

    def _warn_of_empty_stage(self, stage: Stage) -> None:
        stage_index = self.position.stage
        if ranks.is_first() and not self._draw(stage_index, 0.0):
            log.warning(
                "stage %s has no samples in %s: its %s are left out",
                stage.name,
                self.run.store,
                self.schedule.length_of(stage_index),
            )

    def _is_over(self, stage: Stage) -> bool:
        """Whether a stage has come to its end, or its best validation is `patience` validations ago."""
        if self.schedule.progress(self.position) >= 1:
            return True
        patience = self.run.config.training.patience
        history = self.position.history
        taus = [entry.predicted_tau for entry in history if entry.stage == stage.name]
        if not patience or not taus:
            return False
        validations_since_best = len(taus) - 1 - taus.index(max(taus))
        return validations_since_best >= patience

    def _require_finite(self, result: StepResult, step: MicroBatches) -> None:
        loss = loss_of(result.sums_H3)
        norm = result.gradient_norm
        if isfinite(norm + loss):
            return
        step_number = self.position.total + 1
        advice = advice_on_step(step.packed, self.data.store, self.data.needs)
        raise TrainingError(
            f"step {step_number} has a loss of {loss:g} and a gradient of norm {norm:g}: {advice} "
            f"({self.where()})"
        )

    def _report(
        self,
        stage: Stage,
        result: StepResult,
        learning_rate: float,
        times: "_StepTimes",
    ) -> None:
        """Record the figures of the last step on rank 0."""
        if self.metrics is None:
            return
        step = self.position.total
        progress = TrainingProgress(
            stage=stage.name,
            step=step,
            total=max(self.planned_steps, step),
            sums_H3=result.sums_H3,
            tokens=result.tokens,
            seconds=times.seconds,
            cpu_seconds=times.cpu_seconds,
            waited=times.waited,
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            memory=memory(),
        )
        self.metrics.step(progress)
        self.on_step(progress)

    def _validate_if_due(self, stage: Stage) -> None:
        every = self.run.config.training.validate_every
        if every and self.position.total % every == 0:
            self._validate(stage)

    def _validate(self, stage: Stage) -> None:
        """Measure agreement on validation samples, once for each step.

        In every stage these are the validation samples of the last one, so that the measurements of a run
        compare. With `validate_every`, rank 0 keeps the weights if they are better than all before.
        """
        held_out = self.data.samples[-1].held_out
        history = self.position.history
        step = self.position.total
        is_measured = bool(history) and history[-1].step == step
        if not held_out or not step or is_measured:
            return
        entry = measure(
            self.engine, self.source, held_out, self.run.config, stage, step
        )
        history.append(entry)
        if self.metrics is None:
            return
        self.metrics.measured(entry)
        if self.run.config.training.validate_every and self.position.best is entry:
            self.checkpoints.keep_best()

    def _save(self) -> None:
        """Write a checkpoint and copy it; TrainingError on all ranks when it cannot be written."""
        try:
            self.checkpoints.save(self.position)
        except TrainingError as error:
            raise TrainingError(f"{error}; {self.where()}") from None
        self.checkpoints.copy()

    def _stop(self, signal: int) -> None:
        """Write a checkpoint and end the run, as a signal asked."""
        try:
            self._save()
        except TrainingError as error:
            # The run stops all the same, as the signal asked.
            raise StoppedError(str(error), signal) from None
        # An error, not a warning: another machine that goes on with the copy would lose these steps.
        if self.checkpoints.copy_error:
            raise TrainingError(f"{self.checkpoints.copy_error}; {self.where()}")
        raise StoppedError(self.where(), signal)

    def where(self) -> str:
        """How many steps are done and saved, as text."""
        return saved.where(
            self.position.total, self.planned_steps, self.checkpoints.saved_step
        )

    def publish(self) -> None:
        """Write the drafter's folder, and the statistics of each sample to the store."""
        self.sample_stats.gather()
        ranks.first(self._write_drafter)
        self.checkpoints.copy()  # the logs have grown since the last checkpoint
        if self.checkpoints.copy_error:
            raise TrainingError(
                f"{self.checkpoints.copy_error}; the drafter is done, in {self.run.out}"
            )

    def _write_drafter(self) -> None:
        saved_step = self.position.total
        best = self.position.best
        if self.checkpoints.best_weights and best:
            deepspeed_engine.set_weights(self.engine, self.checkpoints.best_weights)
            saved_step = best.step
        samples = set(self.data.keys)
        if self.data.initial:
            samples |= self.data.initial.keys
        origin = checkpoint.Origin(
            self.data.store.provenance,
            self.run.config.training,
            self._record(saved_step),
            sorted(samples),
        )
        checkpoint.save(self.drafter, self.run.drafter, self.run.out, origin)
        self._write_stats()

    def _record(self, saved_step: int) -> dict[str, Any]:
        """What the drafter's `config.json` says of its training."""
        data = self.data
        position = self.position
        stages = [asdict(stage) for stage in position.stages_done]
        history = [asdict(entry) for entry in position.history]
        record: dict[str, Any] = {
            "signature": data.signature,
            "content": data.settings["content"],
            "steps": position.total,
            "saved_step": saved_step,
            "samples": len(data.keys),
            "validate": data.validating,
            "view": self.run.view,
            "seed": self.run.seed,
            "stages": stages,
            "history": history,
        }
        if data.initial and self.warm_start:
            record["init"] = data.initial.record(self.warm_start)
        if self.run.budget:
            record["budget"] = {
                "asked": self.run.budget.text,
                "seconds": round(position.seconds, 1),
                "cpu_seconds": round(position.cpu_seconds, 1),
            }
        return record

    def _write_stats(self) -> None:
        table = self.sample_stats.table()
        if not table:
            return
        try:
            self.data.store.write_stats(self.run.out.name, table)
        except StoreError as error:  # the store may be read-only
            log.warning("the statistics of each sample are not in the store: %s", error)

    def close(self) -> None:
        """Write out what is still to be recorded."""
        if self.metrics is not None:
            self.metrics.close()
