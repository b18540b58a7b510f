"""The trainer: a store in, a drafter folder out, on one process or many.

Everything random is drawn from (seed, step), so that a run that was killed continues bit for bit on the
same number of ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters import catalogue, checkpoint
from vlmdistill.drafters.base import Batch, DrafterConfig, Head, Stage
from vlmdistill.drafters.config import to_dict
from vlmdistill.drafters.training import engine as deepspeed
from vlmdistill.drafters.training.data import Split, pack, split
from vlmdistill.drafters.training.record import Board, Measures, Progress
from vlmdistill.drafters.training.unroll import Unroll, supervised
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.reader import Epoch
from vlmdistill.stores.schema import Feature, Sample, content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.tensors import as_torch

PROBE_HOPS = 5
"""How many tokens ahead held-out agreement is measured, whatever a stage trains."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: what is trained, on what, and where it goes."""

    drafter: str
    config: DrafterConfig
    store: Path
    out: Path
    view: str | None = None
    seed: int = 0
    zero: int = 0
    dtype: str = "auto"  # bfloat16 on a GPU, float32 on a CPU
    micro_tokens: int = 8192  # tokens of one forward pass on one rank
    held_out: float = 0.02  # share of samples kept apart to measure agreement on
    save_every: int = 200  # optimizer steps between resumable checkpoints
    resume: bool = False

    @property
    def state(self) -> Path:
        """Where the run keeps its resumable state and logs, beside the drafter's own folder."""
        return self.out.with_name(f"{self.out.name}.training")


@dataclass
class Position:
    """Where a run stands; saved with every checkpoint."""

    stage: int = 0
    epoch: int = 0
    taken: int = 0  # optimizer steps of the stage
    begun: int = 0  # of those, done when the epoch began
    total: int = 0  # optimizer steps done in all
    reader: dict[str, Any] | None = None  # how far the epoch has been read
    history: list[dict[str, Any]] = field(default_factory=list)


def train(run: Run, on_step: Callable[[Progress], None] = lambda progress: None) -> Path:
    """Train a drafter to the end of its schedule and return its folder.

    A folder that already holds this very run is left as it is; a half-done one continues with `resume`.
    TrainingError when the store lacks what the drafter needs or has nothing to train on, or when
    another run is in the way.
    """
    store = Store.open(run.store)
    needs = _needs(run, store)
    samples = [
        split(store, stage.view or run.view, run.config, run.held_out) for stage in run.config.schedule
    ]
    signature = content_hash(
        [run.drafter, to_dict(run.config), run.seed, [sorted([*one.visual, *one.text]) for one in samples]]
    )
    if _finished(run, signature):
        return run.out
    tag = deepspeed.resumable(run.state, signature, run.resume)
    rank, world = deepspeed.start(run.seed)
    trainer = _Trainer(run, store, needs, samples, signature, (rank, world))
    trainer.on_step = on_step
    if tag is not None:
        trainer.position = Position(**deepspeed.load(trainer.engine, run.state, tag)["position"])
    elif trainer.engine.module.drafter.counts_tokens:
        trainer.prepare()
    trainer.fit()
    return run.out


def _needs(run: Run, store: Store) -> frozenset[Feature]:
    needs = catalogue.trained(run.drafter).needs(run.config, store.info)
    if missing := sorted(feature.name for feature in needs - {*store.layout.features}):
        raise TrainingError(
            f"{run.store} does not hold {', '.join(missing)}, which {run.drafter} needs: capture them into "
            f"another store with `vlmdistill features --for {run.drafter} --store DIR`"
        )
    return needs


def _finished(run: Run, signature: str) -> bool:
    if not run.out.exists():
        return False
    if checkpoint.describe(run.out).get("training", {}).get("signature") == signature:
        return True
    raise TrainingError(
        f"{run.out} holds a drafter trained with other settings or data: give this one a --name of its own, "
        "or --force to replace it"
    )


class _Trainer:
    def __init__(
        self,
        run: Run,
        store: Store,
        needs: frozenset[Feature],
        samples: Sequence[Split],
        signature: str,
        ranks: tuple[int, int],
    ) -> None:
        self.run, self.store, self.needs, self.samples, self.signature = run, store, needs, samples, signature
        self.config = run.config
        self.keys = sorted({key for one in samples for key in (*one.visual, *one.text)})
        self.rank, self.world = ranks
        self.position = Position()
        self.on_step: Callable[[Progress], None] = lambda progress: None
        self.board = Board(run.state) if self.rank == 0 else None
        self.measures = Measures()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        automatic = "bfloat16" if cuda else "float32"
        self.dtype: torch.dtype = getattr(torch, automatic if run.dtype == "auto" else run.dtype)
        frozen = store.head()
        embed_VD, lm_head_VD = (
            as_torch(table, frozen.dtype).to(self.device, self.dtype)
            for table in (frozen.embed_VD, frozen.lm_head_VD)
        )
        drafter = catalogue.trained(run.drafter)(self.config, store.info, Head(embed_VD, lm_head_VD))
        self.micro = max(1, round(self.config.batch_tokens / (self.world * run.micro_tokens)))
        self.budget = max(1, self.config.batch_tokens // (self.world * self.micro))
        self.engine = deepspeed.build(
            Unroll(drafter).to(self.device), clip=self.config.clip, zero=run.zero, dtype=self.dtype
        )

    def prepare(self) -> None:
        """Tell the drafter how often each token stands in the responses that it will train on."""
        count_V = torch.zeros(self.store.info.vocab_size, dtype=torch.float64)
        reader = Epoch(
            self.store,
            (),
            keys=self.keys,
            token_budget=self.budget,
            rank=self.rank,
            world=self.world,
        )
        for sample in chain.from_iterable(reader):
            ids_R = torch.from_numpy(sample.ids_T[sample.response_T]).long()
            count_V += torch.bincount(ids_R, minlength=len(count_V))
        self.engine.module.drafter.prepare(self._sum(count_V.to(self.device)))

    def fit(self) -> None:
        """All stages, all epochs; then the drafter's folder, written whole."""
        stages = self.config.schedule
        while self.position.stage < len(stages):
            stage = stages[self.position.stage]
            while self._progress(stage) < 1 and self._epoch(stage):
                self.position.epoch += 1
                self.position.begun = self.position.taken
                self.position.reader = None
            if self.samples[self.position.stage].held_out:
                self._measure(stage)
            self.position.stage += 1
            self.position.epoch = self.position.taken = self.position.begun = 0
        if self.position.total == 0:
            raise TrainingError(f"{self.run.store} has no samples for the stages of {self.run.drafter}")
        deepspeed.barrier()
        if self.rank == 0:
            self._publish()
        deepspeed.barrier()

    def _steps(self) -> int:
        """Optimizer steps of the present stage, where the run counts steps: those of all stages add up."""
        epochs = [one.epochs for one in self.config.schedule]
        before, after = (sum(epochs[: self.position.stage + more]) for more in (0, 1))
        share = self.config.steps / max(sum(epochs), 1e-9)
        return round(share * after) - round(share * before)

    def _progress(self, stage: Stage, part: float = 0.0) -> float:
        """How much of a stage is done, `part` being that of its present epoch."""
        if self.config.steps:
            return self.position.taken / steps if (steps := self._steps()) else 1.0
        return (self.position.epoch + part) / stage.epochs if stage.epochs else 1.0

    def _done(self, stage: Stage, progress: float) -> float:
        """How much of the run is done, every stage weighing as much as its epochs."""
        epochs = [one.epochs for one in self.config.schedule]
        before = sum(epochs[: self.position.stage])
        return (before + stage.epochs * progress) / max(sum(epochs), 1e-9)

    def _epoch(self, stage: Stage) -> bool:
        """One pass, or the part of it that the stage's epochs or steps allow; False: nothing to read."""
        number, steps = self.position.epoch, self._steps()
        ramp = self.position.begun / steps if steps else number / max(1, -int(-stage.epochs // 1) - 1)
        seed = int(content_hash([self.run.seed, self.position.stage, number]), 16) % 2**31
        reader = Epoch(
            self.store,
            self.needs,
            keys=self.samples[self.position.stage].draw(stage, min(1.0, ramp), seed),
            token_budget=self.budget,
            seed=seed,
            rank=self.rank,
            world=self.world,
            start_state=self.position.reader,
        )
        read = sum(steps for _, steps in self.position.reader["history"]) if self.position.reader else 0
        whole = read + len(reader)
        if steps:
            allowed = (steps - self.position.taken) * self.micro
            last = (steps - self.position.begun) * self.micro <= whole
        else:
            allowed = round(whole * min(1.0, stage.epochs - number)) - read
            last = number + 1 >= stage.epochs
        final = last and self.position.stage == len(self.config.schedule) - 1
        for group in self._groups(reader, allowed):
            started = time.perf_counter()
            rate = stage.learning_rate * _warm(self._progress(stage, read / whole), self.config.warmup)
            sums, tokens = self._step(stage, group, rate, final)
            read += len(group)
            self.position.reader = reader.state
            self.position.total += 1
            self.position.taken += 1
            seconds = time.perf_counter() - started
            done = self._done(stage, self._progress(stage, read / whole))
            self._tell(Progress(stage.name, done, self.position.total, sums, tokens, seconds), rate)
            if self.position.total % self.run.save_every == 0:
                deepspeed.save(
                    self.engine,
                    self.run.state,
                    f"step{self.position.total}",
                    {"position": vars(self.position)},
                    self.signature,
                )
        reader.close()
        return whole > 0

    def _groups(self, reader: Epoch, batches: int) -> Iterator[list[list[Sample]]]:
        """The micro-batches of one optimizer step at a time, `batches` of them in all."""
        while batches > 0 and len(reader):
            group = [next(reader) for _ in range(min(self.micro, batches, len(reader)))]
            batches -= len(group)
            yield group

    def _step(
        self, stage: Stage, group: Sequence[Sequence[Sample]], rate: float, final: bool
    ) -> tuple[torch.Tensor, int]:
        """One optimizer step: the gradient of the mean over the supervised rows of all ranks."""
        deepspeed.set_learning_rate(self.engine, rate)
        batches = [self._batch(samples) for samples in group]
        counts = torch.tensor(
            [
                sum(int(supervised(batch).sum()) for batch in batches if batch),
                sum(len(batch.ids_T) + int(batch.length_M.sum()) for batch in batches if batch),
            ],
            dtype=torch.float64,
            device=self.device,
        )
        rows, tokens = self._sum(counts).tolist()
        sums = torch.zeros(stage.hops, 3, dtype=torch.float64, device=self.device)  # loss, agree, counted
        for micro, (batch, samples) in enumerate(zip(batches, group, strict=True)):
            self.engine.set_gradient_accumulation_boundary(micro == len(batches) - 1)
            # A draw of its own for every step, micro-batch and rank: nothing to save, nothing to lose.
            draw = int(content_hash([self.run.seed, self.position.total, micro, self.rank]), 16)
            generator = torch.Generator(self.device).manual_seed(draw % 2**63)
            # An epoch's tail may leave a rank without samples. It plays its part on another one for nothing,
            # so that all ranks have the same gradients in the same order: ZeRO 2 adds them as they come.
            out = self.engine(self._spare if batch is None else batch, stage, generator)
            losses = [score.total * stage.hop_decay**hop for hop, score in enumerate(out.scores)]
            loss = torch.stack(losses).sum() * (0 if batch is None else self.world / max(rows, 1))
            if batch is not None:
                sums += torch.stack([score.sums for score in out.scores])
                if final:
                    self.measures.add([sample.key for sample in samples], out)
            self.engine.backward(loss, scale_wrt_gas=False)
            self.engine.step()
        return self._sum(sums), int(tokens)

    def _measure(self, stage: Stage) -> None:
        """Agreement on held-out samples, hop by hop: what a chain of drafts can hope for."""
        hops = min(PROBE_HOPS, self.engine.module.drafter.max_hops or PROBE_HOPS)
        probe = Stage(name="probe", hops=hops, losses=stage.losses)
        reader = Epoch(
            self.store,
            self.needs,
            keys=self.samples[self.position.stage].held_out,
            token_budget=self.budget,
            rank=self.rank,
            world=self.world,
        )
        sums = torch.zeros(hops, 3, dtype=torch.float64, device=self.device)
        self.engine.eval()
        with torch.no_grad():
            for samples in reader:
                if batch := self._batch(samples):
                    sums += torch.stack([score.sums for score in self.engine(batch, probe).scores])
        self.engine.train()
        sums = self._sum(sums)
        agreement = (sums[:, 1] / sums[:, 2].clamp(min=1)).tolist()
        entry = {"stage": stage.name, "step": self.position.total, "held_out_agreement": agreement}
        self.position.history.append(entry)
        if self.board is not None:
            self.board.measured(entry)

    @cached_property
    def _spare(self) -> Batch | None:
        return self._batch([self.store.read(self.keys[0], self.needs)])

    def _batch(self, samples: Sequence[Sample]) -> Batch | None:
        if not samples:
            return None
        batch = pack(samples, self.needs, self.store.provenance.dtype)
        return batch.to(self.device, self.dtype)

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        if self.world > 1:
            torch.distributed.all_reduce(value)
        return value

    def _tell(self, progress: Progress, rate: float) -> None:
        if self.board is not None:
            self.board.step(progress, rate)
            self.on_step(progress)

    def _publish(self) -> None:
        """The drafter's folder, and what training learnt about each sample, for later views."""
        training = {
            "signature": self.signature,
            "steps": self.position.total,
            "samples": len(self.keys),
            "view": self.run.view,
            "seed": self.run.seed,
            "history": self.position.history,
        }
        origin = checkpoint.Origin(self.store.provenance, training)
        checkpoint.save(self.engine.module.drafter, self.run.drafter, self.run.out, origin)
        if table := self.measures.table():
            self.store.write_stats(self.run.out.name, table)


def _warm(progress: float, warmup: float) -> float:
    """The learning rate's factor: a linear rise over `warmup` of the stage, then a linear fall to zero."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return (1 - progress) / (1 - warmup)
