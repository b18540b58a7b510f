"""The checkpoints of a run: writing and copying them, and the one that a run continues from."""

import shutil

from torch import Tensor

from vlmdistill.drafters.training import deepspeed_engine, ranks, saved
from vlmdistill.drafters.training.deepspeed_engine import Engine, PartEntry
from vlmdistill.drafters.training.run import Run, RunData
from vlmdistill.drafters.training.saved import Position, RemoteRun, Saved
from vlmdistill.stores.errors import TrainingError


class Checkpoints:
    """The checkpoints of a run; rank 0 writes them, and copies each of them if the run has `checkpoints`.

    All ranks call each method together, but `keep_best`, and an error on one rank reaches all.
    """

    saved_step = 0
    """The step of the last checkpoint; 0: there is none."""
    copy_error = ""
    """Why the last copy failed; empty: it did not."""
    best_weights: dict[str, Tensor]
    """The weights at `Position.best`, on rank 0, if the run validates."""

    def __init__(self, run: Run, data: RunData, engine: Engine) -> None:
        self._run = run
        self._data = data
        self._engine = engine
        self._remote = (
            RemoteRun(run.state, run.checkpoints) if run.checkpoints else None
        )
        self.best_weights = {}

    def restore(self, force: bool = False) -> Position | None:
        """Load the furthest checkpoint into the engine; None if there is none.

        With `force` each rank deletes its local checkpoint, and the next one that is saved replaces the copy.
        """
        if force:
            shutil.rmtree(self._run.state, ignore_errors=True)
        if remote := self._remote:
            ranks.first(lambda: remote.begin(self._data.signature, force))
        checkpoint, source_rank = furthest(self._run, self._data)
        if checkpoint is None:
            return None
        self._load(checkpoint, source_rank)
        self.saved_step = checkpoint.position.total
        return checkpoint.position

    def _load(self, checkpoint: Saved, source_rank: int) -> None:
        """Load a checkpoint, which the rank `source_rank` has on its disk, on all ranks."""
        validates = self._run.config.training.validate_every > 0
        has_best = validates and checkpoint.position.best is not None
        expected = deepspeed_engine.expected(self._engine, best=has_best)
        # Only `source_rank` reads the tensors; it first tells all ranks their names and shapes.
        tensors: dict[str, Tensor] = {}

        def read_tensors() -> list[PartEntry]:
            tensors.update(saved.tensors(self._run.state, checkpoint, expected))
            return [expected[key] for key in sorted(tensors)]

        entries = ranks.first(read_tensors, source_rank)
        self.best_weights = deepspeed_engine.restore(
            self._engine, entries, tensors, source_rank
        )

    def save(self, position: Position) -> None:
        """Write a checkpoint; TrainingError when it cannot be written."""
        tensors = deepspeed_engine.state(self._engine) | self.best_weights
        _, world = ranks.join()
        checkpoint = Saved(
            signature=self._data.signature,
            settings=self._data.settings,
            ranks=world,
            dtype=self._run.precision,
            position=position,
        )
        ranks.first(lambda: saved.write(self._run.state, checkpoint, tensors))
        self.saved_step = position.total

    def copy(self) -> None:
        """Copy checkpoint and logs if the run asks for it; a failure is kept in `copy_error`.

        TrainingError when another machine has continued the run.
        """
        if self._remote:
            self.copy_error = ranks.first(self._remote.send)

    def keep_best(self) -> None:
        """Keep the weights of the engine as the best ones; called on rank 0 alone."""
        self.best_weights = deepspeed_engine.weights(self._engine)


def furthest(run: Run, data: RunData) -> tuple[Saved | None, int]:
    """The run's last checkpoint, None if there is none, and the rank whose disk holds it.

    Without a shared disk, the rank that was rank 0 when it was written may have another number now.
    """
    try:
        local = saved.read(run.state)
    except TrainingError:
        # It is damaged: `finished` has stopped rank 0 for that, other ranks ignore theirs.
        local = None
    if local is not None and local.signature != data.signature:
        local = None
    checkpoints = [checkpoint for _, checkpoint in ranks.of_each(local)]
    steps = [
        checkpoint.position.total if checkpoint else 0 for checkpoint in checkpoints
    ]
    source_rank = steps.index(max(steps))
    return checkpoints[source_rank], source_rank
