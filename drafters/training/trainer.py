"""The trainer: reads a store, writes a drafter folder, on one process or many.

All random draws depend on (seed, step) alone, so an interrupted run continues bit for bit on the same number
of ranks. Rank 0 decides what to continue; only its disk is written.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core import catalogue
from vlmdistill.drafters.core.batch import Batch, Head
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.drafters.training import deepspeed_engine, ranks, saved
from vlmdistill.drafters.training.batches import as_batch
from vlmdistill.drafters.training.progress import SampleStats, TensorBoardLogger, TrainingProgress
from vlmdistill.drafters.training.run import Run, RunData, finished, furthest
from vlmdistill.drafters.training.saved import Position, Saved
from vlmdistill.drafters.training.schedule import Schedule
from vlmdistill.drafters.training.signals import ASKING, Signals
from vlmdistill.drafters.training.unroll import Unroll, supervised
from vlmdistill.stores.errors import StoppedError, StoreError, TrainingError
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import PackedSamples, content_hash

log = logging.getLogger(__name__)
PROBE_HOPS = 5
"""Hops for which held-out agreement is measured, for any stage."""


def train(run: Run, on_step: Callable[[TrainingProgress], None] = lambda progress: None) -> Path:
    """Train a drafter to the end of its schedule and return its folder; `on_step` is called on rank 0.

    A folder that already holds this very run is left as it is; a half-done one is continued, on any number
    of ranks. TrainingError when the store lacks what the drafter needs or has nothing to train on, when
    another run is in the way, or when the ranks do not see the same. StoppedError after SIGINT or SIGTERM,
    which write a checkpoint first.
    """
    with Signals() as signals, ranks.guarded():
        ranks.join()
        with ranks.all_or_none():
            data = RunData.of(run)
        how = {
            name: getattr(run, name)
            for name in ("zero", "precision", "micro_tokens", "held_out", "save_every")
        }
        origin = {"provenance": content_hash(data.store.provenance.to_dict())}
        ranks.same(data.settings | how | origin, "train the same")
        if not ranks.first(lambda: finished(run, data)):
            trainer = _Trainer(run, data, signals, on_step)
            trainer.begin(*furthest(run, data))
            trainer.fit()
    return run.out


class _Trainer:
    def __init__(
        self, run: Run, data: RunData, signals: Signals, on_step: Callable[[TrainingProgress], None]
    ) -> None:
        self.run, self.store, self.needs, self.samples = run, data.store, data.needs, data.samples
        self.data, self.signals, self.on_step = data, signals, on_step
        self.config, self.keys = run.config.training, data.keys
        self.rank, self.world = ranks.join()
        self.position = Position()
        self.planned = 0
        self.saved = 0  # the step of the last checkpoint
        self.board = TensorBoardLogger(run.state) if self.rank == 0 else None
        self.measures = SampleStats()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, run.precision)
        torch.manual_seed(run.seed)
        frozen = self.store.head()
        embed_VD, lm_head_VD = (
            as_torch(table, frozen.dtype).to(self.device, self.dtype)
            for table in (frozen.embed_VD, frozen.lm_head_VD)
        )
        kind = catalogue.trained(run.drafter)
        drafter = kind(run.config.model, self.store.info, Head(embed_VD, lm_head_VD))
        drafter.tree = run.config.tree
        self.micro = max(1, round(self.config.batch_tokens / (self.world * run.micro_tokens)))
        self.budget = max(1, self.config.batch_tokens // (self.world * self.micro))
        self.schedule = Schedule(self.config, run.config.schedule, self.micro)
        self.engine = deepspeed_engine.build(
            Unroll(drafter, self.config).to(self.device),
            clip=self.config.clip,
            zero=run.zero,
            dtype=self.dtype,
        )

    def begin(self, found: Saved | None, source: int) -> None:
        """Continue from a checkpoint, which the rank `source` has; without one, start."""
        if found is None:
            if columns_of(self.engine.module.drafter) is not None:
                self._count_tokens()
        else:
            expected = deepspeed_engine.expected(self.engine)
            tensors: dict[str, torch.Tensor] = {}

            def read() -> list[deepspeed_engine.PartEntry]:
                tensors.update(saved.tensors(self.run.state, found, expected))
                return [expected[key] for key in sorted(tensors)]

            deepspeed_engine.restore(self.engine, ranks.first(read, source), tensors, source)
            self.position, self.saved = found.position, found.position.total
        self.planned = self._plan()
        self.signals.where = self._where
        self.signals.patient = True

    def _count_tokens(self) -> None:
        """Let the drafter choose its vocabulary by the tokens of the responses that it will train on."""
        count_V = torch.zeros(self.store.info.vocab_size, dtype=torch.float64)
        reader = Epoch(
            self.store,
            (),
            keys=self.keys,
            token_budget=self.budget,
            rank=self.rank,
            world=self.world,
        )
        for samples in reader:
            ids_R = torch.from_numpy(samples.ids_T[samples.response_T]).long()
            count_V += torch.bincount(ids_R, minlength=len(count_V))
        self.engine.module.drafter.choose_vocabulary(ranks.total(count_V.to(self.device)))

    def fit(self) -> None:
        """Train all stages, then write the drafter's folder."""
        while self.position.stage < len(self.schedule.stages):
            stage = self.schedule.stages[self.position.stage]
            while self.schedule.progress(self.position) < 1 and self._epoch(stage):
                self.position.epoch += 1
                self.position.begun = self.position.taken
                self.position.reader = None
            if self.samples[self.position.stage].held_out:
                self._measure(stage)
            self.position.stage += 1
            self.position.epoch = self.position.taken = self.position.begun = 0
        if self.position.total == 0:
            raise TrainingError(f"{self.run.store} has no samples for the stages of {self.run.drafter}")
        ranks.first(self._publish)

    def _plan(self) -> int:
        """Optimizer steps of the whole run: exact where it counts steps, else to a few steps an epoch."""
        planned = 0.0
        for number, stage in enumerate(self.schedule.stages):
            keys = self.samples[number].draw(stage, 0.0, 0)
            if keys and self.config.steps:
                planned += self.schedule.steps(number)
            elif keys and stage.epochs:
                batches = len(self._read(keys, 0))
                planned += stage.epochs * batches / self.micro
        return max(1, ceil(planned))

    def _read(self, keys: Sequence[str], seed: int, start: dict[str, Any] | None = None) -> Epoch:
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
        seed = int(content_hash([self.run.seed, position.stage, position.epoch]), 16) % 2**31
        keys = self.samples[position.stage].draw(stage, schedule.ramp(position), seed)
        reader = self._read(keys, seed, position.reader)
        whole = reader.whole
        read = whole - len(reader)
        final = schedule.is_last_epoch(position, whole)
        for group in self._groups(reader, schedule.batches_left(position, whole, read)):
            started = time.perf_counter()
            rate = schedule.learning_rate(position, read / whole)
            sums, tokens, asked = self._step(stage, group, rate, final)
            read += len(group)
            position.reader = reader.state
            position.total += 1
            position.taken += 1
            seconds = time.perf_counter() - started
            total = max(self.planned, position.total)
            self._report(TrainingProgress(stage.name, position.total, total, sums, tokens, seconds), rate)
            if asked:
                self._stop(asked)
            if position.total % self.run.save_every == 0:
                self._save()
        reader.close()
        return whole > 0

    def _groups(self, reader: Epoch, batches: int) -> Iterator[list[PackedSamples]]:
        """The micro-batches of one optimizer step at a time, `batches` of them in all."""
        while batches > 0 and len(reader):
            group = [next(reader) for _ in range(min(self.micro, batches, len(reader)))]
            batches -= len(group)
            yield group

    def _step(
        self, stage: Stage, group: Sequence[PackedSamples], rate: float, final: bool
    ) -> tuple[torch.Tensor, int, int | None]:
        """One optimizer step: the gradient of the mean over the supervised rows of all ranks.

        Returns loss, agreement and count of each hop, the tokens, and the signal that any rank has received.
        """
        deepspeed_engine.set_learning_rate(self.engine, rate)
        batches = [self._batch(samples) for samples in group]
        counts = torch.tensor(
            [
                sum(int(supervised(batch).sum()) for batch in batches if batch),
                sum(len(batch.ids_T) + int(batch.length_M.sum()) for batch in batches if batch),
            ],
            dtype=torch.float64,
            device=self.device,
        )
        rows, tokens = ranks.total(counts).tolist()
        sums = torch.zeros(stage.hops, 3, dtype=torch.float64, device=self.device)  # loss, agree, counted
        for micro, (batch, samples) in enumerate(zip(batches, group, strict=True)):
            self.engine.set_gradient_accumulation_boundary(micro == len(batches) - 1)
            # A draw of its own for every step, micro-batch and rank: nothing to save, nothing to lose.
            draw = int(content_hash([self.run.seed, self.position.total, micro, self.rank]), 16)
            generator = torch.Generator(self.device).manual_seed(draw % 2**63)
            # At the end of an epoch, a rank may have no samples. It runs a spare batch with a weight of zero,
            # so that all ranks have the same gradients in the same order, as ZeRO 2 needs.
            out = self.engine(self._spare if batch is None else batch, stage, generator)
            loss = out.total * (0 if batch is None else self.world / max(rows, 1))
            if batch is not None:
                sums += torch.stack([score.sums for score in out.scores])
                if final:
                    self.measures.add(samples.keys, out)
            self.engine.backward(loss, scale_wrt_gas=False)
            self.engine.step()
        received = torch.tensor([self.signals.received == number for number in ASKING], device=self.device)
        sent = ranks.total(torch.cat([sums.flatten(), received.double()]))
        asked = [number for number, some in zip(ASKING, sent[-len(ASKING) :].tolist(), strict=True) if some]
        return sent[: -len(ASKING)].view_as(sums), int(tokens), asked[-1] if asked else None

    def _measure(self, stage: Stage) -> None:
        """Measure agreement on held-out samples, hop by hop."""
        hops = min(PROBE_HOPS, self.run.config.model.max_hops or PROBE_HOPS)
        probe = Stage(name="probe", hops=hops, losses=stage.losses)
        reader = self._read(self.samples[self.position.stage].held_out, 0)
        sums = torch.zeros(hops, 3, dtype=torch.float64, device=self.device)
        self.engine.eval()
        with torch.no_grad():
            for samples in reader:
                if batch := self._batch(samples):
                    sums += torch.stack([score.sums for score in self.engine(batch, probe).scores])
        self.engine.train()
        sums = ranks.total(sums)
        agreement = (sums[:, 1] / sums[:, 2].clamp(min=1)).tolist()
        entry = {"stage": stage.name, "step": self.position.total, "held_out_agreement": agreement}
        self.position.history.append(entry)
        if self.board is not None:
            self.board.measured(entry)

    @cached_property
    def _spare(self) -> Batch | None:
        (samples,) = Epoch(self.store, self.needs, keys=self.keys[:1], token_budget=1)
        return self._batch(samples)

    def _batch(self, samples: PackedSamples) -> Batch | None:
        if not samples:
            return None
        return as_batch(samples, self.store.provenance.dtype).to(self.device, self.dtype)

    def _report(self, progress: TrainingProgress, rate: float) -> None:
        if self.board is not None:
            self.board.step(progress, rate)
            self.on_step(progress)

    def _save(self) -> None:
        """Write a checkpoint; TrainingError on all ranks when it cannot be written."""
        tensors = deepspeed_engine.state(self.engine)
        data = self.data
        now = Saved(
            signature=data.signature,
            settings=data.settings,
            ranks=self.world,
            dtype=self.run.precision,
            position=self.position,
        )
        try:
            ranks.first(lambda: saved.write(self.run.state, now, tensors))
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._where()}") from None
        self.saved = self.position.total

    def _stop(self, number: int) -> None:
        """Write a checkpoint and end the run, as a signal asked."""
        try:
            self._save()
        except TrainingError as error:
            raise StoppedError(str(error), number) from None
        raise StoppedError(self._where(), number)

    def _where(self) -> str:
        """How much of the run is done and saved, as text."""
        done = self.position.total
        now = f"{done} of {max(self.planned, done)} steps are done"
        if not self.saved:
            return f"{now} and none is saved: the same command starts again"
        kept = "all of them saved" if self.saved == done else f"the first {self.saved} of them saved"
        return f"{now}, {kept}: the same command goes on from there"

    def _publish(self) -> None:
        """Write the drafter's folder, and the statistics of each sample to the store, for later views."""
        training = {
            "signature": self.data.signature,
            "steps": self.position.total,
            "samples": len(self.keys),
            "view": self.run.view,
            "seed": self.run.seed,
            "history": self.position.history,
        }
        origin = checkpoint.Origin(self.store.provenance, self.config, training)
        checkpoint.save(self.engine.module.drafter, self.run.drafter, self.run.out, origin)
        if table := self.measures.table():
            try:
                self.store.write_stats(self.run.out.name, table)
            except StoreError as error:  # the store may be read-only
                log.warning("the statistics of each sample are not in the store: %s", error)
