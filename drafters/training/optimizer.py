"""Optimizer steps: the gradients of some micro-batches on all ranks, and one update.

Shapes: H hops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.transfer import place
from vlmdistill.drafters.training import deepspeed_engine, ranks
from vlmdistill.drafters.training.batches import BatchSource, MicroBatches
from vlmdistill.drafters.training.deepspeed_engine import Engine
from vlmdistill.drafters.training.signals import Signals, asked
from vlmdistill.drafters.training.unroll import Unrolled, rows_of
from vlmdistill.stores.schema import content_hash


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step over all ranks, on the CPU."""

    sums_H3: Tensor  # by hop: loss, rows that agree, rows that count
    tokens: int
    gradient_norm: float  # before clipping
    signal: int | None  # that any rank has received


class Optimizer:
    """The optimizer of a run.

    Args:
        engine: DeepSpeed's engine around `Unroll`.
        source: The rank's batches.
        spare_key: Key of a sample to run where the rank has none.
        seed: Of the run; with the number of the step it seeds every draw.
        signals: Signals that the rank has received, which a step tells all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        source: BatchSource,
        spare_key: str,
        seed: int,
        signals: Signals,
    ) -> None:
        self._engine = engine
        self._source = source
        self._spare_key = spare_key
        self._seed = seed
        self._signals = signals

    def step(
        self,
        number: int,
        stage: Stage,
        step: MicroBatches,
        learning_rate: float,
        observe: Callable[[Sequence[str], Unrolled], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepResult:
        """One step: the gradient of the mean loss over the supervised rows of all ranks.

        Args:
            number: How many steps of the run are done.
            stage: The stage of the run.
            step: The micro-batches of this rank.
            learning_rate: Of this step.
            observe: Is called with the keys of the samples and the scores of each micro-batch.
            meanwhile: Is called once a GPU has been asked for all gradients, while it computes them.

        Returns:
            The figures of the step, for which a GPU is waited for once.
        """
        deepspeed_engine.set_learning_rate(self._engine, learning_rate)
        counts_2 = self._count(step, stage)
        loss_scale = self._source.world / counts_2[0].clamp(min=1)
        device = self._source.device
        sums_H3 = torch.zeros(stage.hops, 3, dtype=torch.float64, device=device)
        gradient_norm: Tensor | float = 0.0
        last = len(step.batches) - 1
        for micro, batch in enumerate(step.batches):
            self._engine.set_gradient_accumulation_boundary(micro == last)
            generator = self._generator(number, micro)
            # At the end of an epoch, a rank may have no samples. It runs a spare batch with a weight of zero,
            # so that all ranks have the same gradients in the same order, as ZeRO 2 needs.
            if batch is None:
                loss = self._engine(self._spare, stage, generator).total * 0
            else:
                unrolled = self._engine(batch, stage, generator)
                loss = unrolled.total * loss_scale.to(unrolled.total.dtype)
                sums_H3 += torch.stack([score.sums for score in unrolled.scores])
                if observe is not None:
                    observe(step.packed[micro].keys, unrolled)
            self._engine.backward(loss, scale_wrt_gas=False)
            if micro == last and meanwhile is not None:
                meanwhile()
            gradient_norm = deepspeed_engine.step(self._engine)
        return self._gather(sums_H3, counts_2[1:], gradient_norm)

    @cached_property
    def _spare(self) -> Batch:
        return self._source.single(self._spare_key)

    def _count(self, step: MicroBatches, stage: Stage) -> Tensor:
        """The supervised rows and the tokens of the step on all ranks: [2]."""
        rows = 0
        tokens = 0
        for batch in step.batches:
            if batch is not None:
                rows += rows_of(batch, stage)
                tokens += len(batch.ids_T) + int(batch.readable.length_M.sum())
        counts_2 = torch.tensor([rows, tokens], dtype=torch.float64)
        return ranks.total(place(counts_2, self._source.device))

    def _generator(self, number: int, micro: int) -> torch.Generator:
        """A generator for this micro-batch alone: a run that continues has no state of it to restore."""
        seed = content_hash([self._seed, number, micro, self._source.rank])
        generator = torch.Generator(self._source.device)
        return generator.manual_seed(int(seed, 16) % 2**63)

    def _gather(
        self, sums_H3: Tensor, tokens_1: Tensor, gradient_norm: Tensor | float
    ) -> StepResult:
        """Add up the figures and signals of all ranks, and bring them to the CPU."""
        device = sums_H3.device
        flags = torch.tensor(self._signals.flags, dtype=torch.float64)
        summed = ranks.total(torch.cat([sums_H3.flatten(), place(flags, device)]))
        norm_1 = torch.as_tensor(gradient_norm, dtype=torch.float64).reshape(1)
        # The only wait for a GPU besides DeepSpeed's own.
        figures = torch.cat([summed, tokens_1, place(norm_1, device)]).cpu()
        sizes = [sums_H3.numel(), len(flags), 1, 1]
        sums, flags, tokens, norm = torch.split(figures, sizes)
        return StepResult(
            sums.view_as(sums_H3), int(tokens), float(norm), asked(flags.tolist())
        )
