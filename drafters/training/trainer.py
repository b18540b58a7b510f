"""The trainer: reads a store, writes a drafter folder, on one process or many.

All random draws depend on (seed, step) alone, so an interrupted run continues bit for bit on the same number
of ranks, as far as the device computes the same twice: a CPU does, the attention kernels of GPUs may not
unless `torch.use_deterministic_algorithms` is on. Rank 0 decides what to continue; only its disk is written.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.initial import fresh
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.devices import choose_kernels
from vlmdistill.drafters.core.transfer import place
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.drafters.training import cpu, deepspeed_engine, ranks, saved
from vlmdistill.drafters.training.batches import (
    Ahead,
    MicroBatches,
    as_batch,
    cure_of,
    occurrences,
)
from vlmdistill.drafters.training.progress import (
    Metrics,
    SampleStats,
    TrainingProgress,
    loss_of,
    memory,
)
from vlmdistill.drafters.training.run import Run, RunData, finished, furthest
from vlmdistill.drafters.training.saved import HeldOut, Position, Saved
from vlmdistill.drafters.training.schedule import Schedule
from vlmdistill.drafters.training.signals import Signals, asked
from vlmdistill.drafters.training.trackers import About
from vlmdistill.drafters.training.unroll import Unroll, agreement, rows_of
from vlmdistill.stores.errors import StoppedError, StoreError, TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.schema import PackedSamples, content_hash

log = logging.getLogger(__name__)
PROBE_HOPS = 5
"""The least hops for which held-out agreement is measured, for any stage."""


def train(
    run: Run,
    on_step: Callable[[TrainingProgress], None] = lambda progress: None,
    force: bool = False,
) -> Path:
    """Train a drafter to the end of its schedule and return its folder; `on_step` is called on rank 0.

    A folder that already holds this very run is left as it is; a half-done one is continued, on any number
    of ranks. With `force` the run starts over, and the files of an earlier one of that name are removed once
    it can. TrainingError when the store lacks what the drafter needs or has nothing to train on, when
    another run is in the way, when a loss is not finite, or when the ranks do not see the same. StoppedError
    after SIGINT or SIGTERM, which write a checkpoint first.
    """
    with Signals() as signals, ranks.guarded(), cpu.tuned():
        ranks.join()
        ranks.same(
            run.how | {"force": force}, "train the same"
        )  # it decides which exchanges there are
        with ranks.all_or_none():
            data = RunData.of(run)
        origin = {"provenance": content_hash(data.store.provenance.to_dict())}
        ranks.same(data.settings | origin, "train the same")
        if force or not ranks.first(lambda: finished(run, data)):
            trainer = _Trainer(run, data, signals, on_step)
            if force:
                shutil.rmtree(run.state, ignore_errors=True)
            trainer.fetch(force)
            trainer.begin(*furthest(run, data))
            if force:
                shutil.rmtree(run.out, ignore_errors=True)
            try:
                trainer.fit()
            finally:
                trainer.close()
    return run.out


class _Trainer:
    def __init__(
        self,
        run: Run,
        data: RunData,
        signals: Signals,
        on_step: Callable[[TrainingProgress], None],
    ) -> None:
        self.run, self.store, self.needs, self.samples = (
            run,
            data.store,
            data.needs,
            data.samples,
        )
        self.data, self.signals, self.on_step = data, signals, on_step
        self.config, self.keys = run.config.training, data.keys
        self.rank, self.world = ranks.join()
        self.position = Position()
        self.planned = 0
        self.saved = 0  # the step of the last checkpoint
        self.copied = (
            saved.RemoteRun(run.state, run.checkpoints) if run.checkpoints else None
        )
        self.missing = ""  # why its copy failed
        self.metrics: Metrics | None = None  # on rank 0
        self.best: dict[
            str, torch.Tensor
        ] = {}  # weights at `position.best`, on rank 0, if the run validates
        self.measures = SampleStats()
        cuda = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if cuda
            else torch.device("cpu")
        )
        choose_kernels(self.device)
        self.dtype: torch.dtype = getattr(torch, run.precision)
        initial = data.initial
        info = initial.info(self.store.info) if initial else self.store.info
        drafter = fresh(
            run.drafter,
            run.config,
            self.store,
            run.seed,
            info,
            device=self.device,
            dtype=self.dtype,
        )
        # Before DeepSpeed copies the weights; a checkpoint then replaces them all.
        self.taken = initial.into(drafter, run.drafter) if initial else None
        self.micro, self.budget = run.packing(self.world)
        self.schedule = Schedule(self.config, run.config.schedule, self.micro)
        self.engine = deepspeed_engine.build(
            Unroll(drafter, self.config).to(self.device),
            clip=self.config.clip,
            zero=run.zero,
            dtype=self.dtype,
        )

    def _warn_of_nothing_held_out(self) -> None:
        """A small share of few samples, which their keys choose, may be none."""
        wanted = self.run.held_out > 0 and self.samples
        if self.rank != 0 or not wanted or self.samples[-1].held_out:
            return
        samples = self.samples[-1]
        count = len(samples.visual) + len(samples.text)
        log.warning(
            "none of %s samples is held out at a share of %g, so that no agreement is measured on others and "
            "no tau predicted: --held-out 0.2 holds out about %s",
            count,
            self.run.held_out,
            ceil(0.2 * count),
        )

    def fetch(self, force: bool) -> None:
        """Take over the copy of the run's checkpoint if it is further; with `force`, it will be replaced."""
        if copied := self.copied:
            ranks.first(lambda: copied.begin(self.data.signature, force))

    def begin(self, found: Saved | None, source: int) -> None:
        """Continue from a checkpoint, which the rank `source` has; without one, start."""
        if found is None:
            for line in self.taken.lines() if self.taken and self.rank == 0 else ():
                log.info("%s", line)
            self._warn_of_nothing_held_out()
            self._choose_vocabulary()
        else:
            validated = (
                self.config.validate_every > 0 and found.position.best is not None
            )
            expected = deepspeed_engine.expected(self.engine, best=validated)
            tensors: dict[str, torch.Tensor] = {}

            def read() -> list[deepspeed_engine.PartEntry]:
                tensors.update(saved.tensors(self.run.state, found, expected))
                return [expected[key] for key in sorted(tensors)]

            self.best = deepspeed_engine.restore(
                self.engine, ranks.first(read, source), tensors, source
            )
            self.position, self.saved = found.position, found.position.total

        def record() -> None:
            about = About(
                name=self.run.out.name,
                target=self.store.info.name,
                settings=self.data.settings,
                signature=self.data.signature,
                folder=self.run.state,
                done=self.position.total,
            )
            self.metrics = Metrics(about, self.position.history, self.run.trackers)

        ranks.first(record)
        self.signals.where = self._where
        self.signals.patient = True

    def _choose_vocabulary(self) -> None:
        """Let the drafter choose its vocabulary by the responses to train on, unless it began with one."""
        drafter = self.engine.module.drafter
        there = {name for name, _ in drafter.named_buffers()}
        if columns_of(drafter) is None or (self.taken and there & {*self.taken.taken}):
            return
        reader = Epoch(
            self.store,
            (),
            keys=self.keys,
            token_budget=self.budget,
            rank=self.rank,
            world=self.world,
        )
        count_V = occurrences(reader, self.store.info.vocab_size)
        drafter.choose_vocabulary(ranks.total(count_V.to(self.device)))

    def fit(self) -> None:
        """Train all stages, then write the drafter's folder."""
        while self.position.stage < len(self.schedule.stages):
            stage = self.schedule.stages[self.position.stage]
            self.planned = self.schedule.planned(
                self.position, self._drawn, lambda keys: len(self._read(keys, 0))
            )
            if self.rank == 0 and not self._drawn(self.position.stage, 0.0):
                left = f"its {self.schedule.share(self.position.stage)} are left out"
                log.warning(
                    "stage %s has no samples in %s: %s",
                    stage.name,
                    self.run.store,
                    left,
                )
            self._validate(stage)  # if a signal has stopped the run just before
            while not self._over(stage) and self._epoch(stage):
                self.position.epoch += 1
                self.position.begun = self.position.taken
                self.position.reader = None
            self._measure(stage)
            self.position.done.append(
                saved.StageDone(
                    name=stage.name,
                    steps=self.position.taken,
                    passes=round(self.position.passes + self.position.part, 3),
                )
            )
            self.position.stage += 1
            self.position.epoch = self.position.taken = self.position.begun = 0
            self.position.passes = self.position.part = 0.0
            self.position.reader = None  # of a checkpoint at the last step of the stage
        if self.position.total == 0:
            stages = f"the stages of {self.run.drafter}, or their epochs are too short"
            raise TrainingError(
                f"no step was taken: {self.run.store} has no samples for {stages}"
            )
        self.measures.gather()
        ranks.first(self._publish)
        self._copy()  # the last figures, too
        if self.missing:
            raise TrainingError(
                f"{self.missing}; the drafter is done, in {self.run.out}"
            )

    def close(self) -> None:
        """Write out what is still to be recorded."""
        if self.metrics is not None:
            self.metrics.close()

    def _drawn(self, stage: int, ramp: float) -> Sequence[str]:
        """The samples of an epoch of a stage."""
        return self.samples[stage].draw(self.schedule.stages[stage], ramp, 0)

    def _read(
        self, keys: Sequence[str], seed: int, start: dict[str, Any] | None = None
    ) -> Epoch:
        """This rank's batches of some samples."""
        return Epoch(
            self.store,
            self.needs,
            keys=keys,
            token_budget=self.budget,
            seed=seed,
            rank=self.rank,
            world=self.world,
            start_state=start,
            keep=self.micro,
        )

    def _epoch(self, stage: Stage) -> bool:
        """One pass, or the part of it that the stage's epochs or steps allow; False: nothing to read."""
        position, schedule = self.position, self.schedule
        seed = (
            int(content_hash([self.run.seed, position.stage, position.epoch]), 16)
            % 2**31
        )
        keys = self.samples[position.stage].draw(stage, schedule.ramp(position), seed)
        reader = self._read(keys, seed, position.reader)
        whole = reader.whole
        read = whole - len(reader)
        final = schedule.is_last_epoch(position, whole)
        started = time.perf_counter()
        left = schedule.batches_left(position, whole, read)
        groups = Ahead(self._groups(reader, left))
        for group in groups:
            rate = schedule.learning_rate(position, read / whole)
            done = self._step(
                stage, group, rate, final, groups.fetch if self._moves else None
            )
            loss, norm = loss_of(done.sums_H3), done.norm
            if not isfinite(norm + loss):
                cure = cure_of(group.samples, self.store, self.needs)
                raise TrainingError(
                    f"step {position.total + 1} has a loss of {loss:g} and a gradient of norm {norm:g}: "
                    f"{cure} ({self._where()})"
                )
            read += len(group.samples)
            position.reader = group.state
            position.total += 1
            position.taken += 1
            position.part = read / whole * len(keys) / len(self.keys)
            if self.metrics is not None:
                progress = TrainingProgress(
                    stage=stage.name,
                    step=position.total,
                    total=max(self.planned, position.total),
                    sums_H3=done.sums_H3,
                    tokens=done.tokens,
                    seconds=time.perf_counter() - started,
                    waited=group.waited,
                    learning_rate=rate,
                    gradient_norm=norm,
                    memory=memory(),
                )
                self.metrics.step(progress)
                self.on_step(progress)
            if done.signal:
                self._stop(done.signal)
            self._validate(stage)
            if position.total % self.run.save_every == 0:
                self._save()
            if self._over(stage):
                break
            started = time.perf_counter()
        reader.close()
        position.passes, position.part = position.passes + position.part, 0.0
        return whole > 0

    @property
    def _moves(self) -> bool:
        """Batches move to another device, where the next ones can arrive while it works."""
        return self.device.type != "cpu"

    def _groups(self, reader: Epoch, batches: int) -> Iterator[MicroBatches]:
        """The micro-batches of one optimizer step at a time, `batches` of them in all."""
        while batches > 0 and len(reader):
            began = time.perf_counter()
            samples = [
                next(reader) for _ in range(min(self.micro, batches, len(reader)))
            ]
            waited, state = time.perf_counter() - began, reader.state
            batches -= len(samples)
            yield MicroBatches(
                samples, [self._batch(one) for one in samples], state, waited
            )

    def _step(
        self,
        stage: Stage,
        group: MicroBatches,
        rate: float,
        final: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> "_Step":
        """One optimizer step: the gradient of the mean over the supervised rows of all ranks.

        A GPU does what is `meanwhile` asked of it while it works out the gradients, and tells the figures of
        the step all at once.
        """
        deepspeed_engine.set_learning_rate(self.engine, rate)
        there = [batch for batch in group.batches if batch]
        rows = sum(rows_of(batch, stage) for batch in there)
        tokens = sum(
            len(batch.ids_T) + int(batch.readable.length_M.sum()) for batch in there
        )
        counts_2 = place(torch.tensor([rows, tokens], dtype=torch.float64), self.device)
        share = self.world / ranks.total(counts_2)[0].clamp(min=1)
        sums = torch.zeros(
            stage.hops, 3, dtype=torch.float64, device=self.device
        )  # loss, agree, counted
        norm: torch.Tensor | float = 0.0
        last = len(group.batches) - 1
        for micro, (batch, samples) in enumerate(
            zip(group.batches, group.samples, strict=True)
        ):
            self.engine.set_gradient_accumulation_boundary(micro == last)
            # A draw of its own for every step, micro-batch and rank: nothing to save, nothing to lose.
            draw = int(
                content_hash([self.run.seed, self.position.total, micro, self.rank]), 16
            )
            generator = torch.Generator(self.device).manual_seed(draw % 2**63)
            # At the end of an epoch, a rank may have no samples. It runs a spare batch with a weight of zero,
            # so that all ranks have the same gradients in the same order, as ZeRO 2 needs.
            out = self.engine(self._spare if batch is None else batch, stage, generator)
            loss = out.total * (0 if batch is None else share.to(out.total.dtype))
            if batch is not None:
                sums += torch.stack([score.sums for score in out.scores])
                if final:
                    self.measures.add(samples.keys, out)
            self.engine.backward(loss, scale_wrt_gas=False)
            if micro == last and meanwhile:
                meanwhile()
            norm = deepspeed_engine.step(self.engine)
        flags = torch.tensor(self.signals.flags, dtype=torch.float64)
        sent = ranks.total(torch.cat([sums.flatten(), place(flags, self.device)]))
        norm_1 = torch.as_tensor(norm, dtype=torch.float64).reshape(1)
        parts = [sent, counts_2[1:], place(norm_1, self.device)]
        told = torch.cat(parts).cpu()  # the only wait for a GPU besides DeepSpeed's own
        sums_X, flags, (tokens_all, norm_all) = torch.split(
            told, [sums.numel(), len(flags), 2]
        )
        return _Step(
            sums_X.view_as(sums),
            int(tokens_all),
            float(norm_all),
            asked(flags.tolist()),
        )

    def _over(self, stage: Stage) -> bool:
        """Whether a stage has come to its end, or had `patience` validations without a better one."""
        taus = [
            one.predicted_tau
            for one in self.position.history
            if one.stage == stage.name
        ]
        stale = len(taus) - 1 - taus.index(max(taus)) if taus else 0
        return (
            self.schedule.progress(self.position) >= 1
            or 0 < self.config.patience <= stale
        )

    def _validate(self, stage: Stage) -> None:
        """Measure when the settings say so."""
        if (
            self.config.validate_every
            and self.position.total % self.config.validate_every == 0
        ):
            self._measure(stage)

    def _measure(self, stage: Stage) -> None:
        """Measure agreement on held-out samples, hop by hop, once for each step.

        All take the samples of the last stage, so that the measurements of a run compare. If the run
        validates, the weights are kept unless an earlier step had weights as good.
        """
        keys, history = self.samples[-1].held_out, self.position.history
        if (
            not keys
            or not self.position.total
            or (history and history[-1].step == self.position.total)
        ):
            return
        limit = self.run.config.model.max_hops or sys.maxsize
        chain = min(self.run.config.tree.depth + 1, limit)
        hops = max(chain, min(PROBE_HOPS, limit))
        probe = Stage(
            name="probe", hops=hops, anchors=stage.anchors, losses=stage.losses
        )
        batches = (
            batch for samples in self._read(keys, 0) if (batch := self._batch(samples))
        )
        agree_H, count_H, accepted_H = ranks.total(
            agreement(self.engine, batches, probe, self.device)
        )
        count_H = count_H.clamp(min=1)
        entry = HeldOut(
            stage=stage.name,
            step=self.position.total,
            held_out_agreement=(agree_H / count_H)[:PROBE_HOPS].tolist(),
            predicted_tau=1 + float((accepted_H / count_H)[:chain].sum()),
        )
        history.append(entry)
        if self.metrics is not None:
            self.metrics.measured(entry)
            if self.config.validate_every and self.position.best is entry:
                self.best = deepspeed_engine.weights(self.engine)

    @cached_property
    def _spare(self) -> Batch | None:
        return self._batch(
            next(Epoch(self.store, self.needs, keys=self.keys[:1], token_budget=1))
        )

    def _batch(self, samples: PackedSamples) -> Batch | None:
        if not samples:
            return None
        batch = as_batch(samples, self.store.provenance.dtype)
        return batch.to(self.device, self.dtype)

    def _save(self) -> None:
        """Write a checkpoint and try to copy it; TrainingError on all ranks when it cannot be written."""
        tensors = deepspeed_engine.state(self.engine) | self.best
        now = Saved(
            signature=self.data.signature,
            settings=self.data.settings,
            ranks=self.world,
            dtype=self.run.precision,
            position=self.position,
        )

        try:
            ranks.first(lambda: saved.write(self.run.state, now, tensors))
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._where()}") from None
        self.saved = self.position.total
        self._copy()

    def _copy(self) -> None:
        if self.copied:
            self.missing = ranks.first(self.copied.send)

    def _stop(self, number: int) -> None:
        """Write a checkpoint and end the run, as a signal asked."""
        try:
            self._save()
        except TrainingError as error:
            raise StoppedError(str(error), number) from None
        if self.missing:
            raise TrainingError(f"{self.missing}; {self._where()}")
        raise StoppedError(self._where(), number)

    def _where(self) -> str:
        return saved.where(self.position.total, self.planned, self.saved)

    def _publish(self) -> None:
        """Write the drafter's folder, and the statistics of each sample to the store, for later views."""
        kept = self.position.total
        if self.best and (best := self.position.best):
            deepspeed_engine.set_weights(self.engine, self.best)
            kept = best.step
        training = {
            "signature": self.data.signature,
            "content": self.data.settings["content"],
            "steps": self.position.total,
            "saved_step": kept,
            "samples": len(self.keys),
            "view": self.run.view,
            "seed": self.run.seed,
            "stages": [asdict(one) for one in self.position.done],
            "history": [asdict(one) for one in self.position.history],
        }
        if self.data.initial and self.taken:
            training["init"] = self.data.initial.record(self.taken)
        before = self.data.initial.samples if self.data.initial else ()
        samples = sorted({*self.keys, *before})
        origin = checkpoint.Origin(
            self.store.provenance, self.config, training, samples
        )
        checkpoint.save(
            self.engine.module.drafter, self.run.drafter, self.run.out, origin
        )
        if table := self.measures.table():
            try:
                self.store.write_stats(self.run.out.name, table)
            except StoreError as error:  # the store may be read-only
                log.warning(
                    "the statistics of each sample are not in the store: %s", error
                )


@dataclass(frozen=True)
class _Step:
    """The figures of one optimizer step, on the CPU."""

    sums_H3: torch.Tensor  # by hop: loss, rows that agree, rows that count
    tokens: int
    norm: float  # of the gradient before clipping
    signal: int | None  # that any rank has received
