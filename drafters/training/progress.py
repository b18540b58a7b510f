"""Progress of training: figures of each step and validation, and statistics of each sample.

    <run>.training/metrics.jsonl   a line for each step and each validation: its step, stage and figures
                   tensorboard/    the same figures, if asked for; see `trackers`

Shapes: H hops; R rows of a batch.
"""

import logging
import resource
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.saved import HeldOut
from vlmdistill.drafters.training.trackers import RunFacts, Tracker, open_tracker
from vlmdistill.drafters.training.unroll import Unrolled
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import TrainingError, one_line
from vlmdistill.stores.input_files import read_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """One optimizer step over all ranks."""

    stage: str
    step: int  # of the whole run
    total: int  # steps that the run will take
    sums_H3: Tensor  # by hop: loss, rows that agree, rows that count
    tokens: int
    seconds: float  # from the end of the step before, waiting included
    cpu_seconds: float  # of all threads and ranks
    waited: float  # of those, for data
    learning_rate: float
    gradient_norm: float  # before clipping
    memory: int  # most bytes in use so far: of the GPU, or of the process

    @property
    def remark(self) -> str:
        """The figures in one short line."""
        agreement = " ".join(f"{share:.2f}" for share in self.agreement)
        rate = self.figures["tokens_per_second"]
        return f"{self.stage}: loss {self.loss:.3f}, agreement {agreement}, {rate:.0f} tokens/s"

    @property
    def figures(self) -> dict[str, float]:
        """The recorded figures of the step, by name."""
        tokens_per_second = self.tokens / max(self.seconds, 1e-9)
        agreement = _by_hop(self.agreement)
        return {
            "loss": self.loss,
            **agreement,
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": tokens_per_second,
            "data_wait": self.waited,
            "memory_bytes": self.memory,
        }

    @property
    def loss(self) -> float:
        """The weighted loss per row, summed over hops."""
        return loss_of(self.sums_H3)

    @property
    def agreement(self) -> list[float]:
        """By hop, the share of rows whose best token is the target's."""
        _, agree_H, count_H = self.sums_H3.T
        shares: list[float] = (agree_H / count_H.clamp(min=1)).tolist()
        return shares


def loss_of(sums_H3: Tensor) -> float:
    """The weighted loss per row, summed over hops."""
    loss_H, _, count_H = sums_H3.T
    return float((loss_H / count_H.clamp(min=1)).sum())


def memory() -> int:
    """The most bytes that were in use: of this rank's GPU, or of its process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux
    return kibibytes * 1024


class Metrics:
    """The figures of a run, written as they come."""

    def __init__(
        self, facts: RunFacts, history: Sequence[HeldOut], trackers: Sequence[str]
    ) -> None:
        """Continue the record of a run after the measurements of `history`; drop later lines.

        TrainingError when a tracker is not installed, or when nothing can be written.
        """
        self._file = facts.folder / "metrics.jsonl"
        self._trackers = [open_tracker(name, facts) for name in dict.fromkeys(trackers)]
        try:
            facts.folder.mkdir(parents=True, exist_ok=True)
            self._drop_later_lines(facts.done, history)
        except OSError as error:
            raise TrainingError(
                f"{self._file} cannot be written ({one_line(error)})"
            ) from None

    def _drop_later_lines(self, done: int, history: Sequence[HeldOut]) -> None:
        lines: list[bytes] = []
        if self._file.exists():
            lines = read_bytes(self._file).splitlines(keepends=True)
        measured_steps = [entry.step for entry in history]
        kept = [line for line in lines if _is_kept(line, done, measured_steps)]
        with atomic_write(self._file, alone=True) as new:
            new.write_bytes(b"".join(kept))

    def step(self, progress: TrainingProgress) -> None:
        """Record an optimizer step."""
        self._write(
            "train",
            progress.stage,
            progress.step,
            progress.figures,
            total=progress.total,
        )

    def measured(self, entry: HeldOut) -> None:
        """Record a measurement on held-out samples."""
        figures = _by_hop(entry.held_out_agreement)
        figures["predicted_tau"] = entry.predicted_tau
        self._write("held_out", entry.stage, entry.step, figures)

    def close(self) -> None:
        """Let the trackers write out all figures."""
        for tracker in list(self._trackers):
            self._send(tracker, tracker.close)

    def _write(
        self,
        group: str,
        stage: str,
        step: int,
        figures: dict[str, float],
        **counts: int,
    ) -> None:
        named = {f"{group}/{name}": value for name, value in figures.items()}
        line = msgspec.json.encode({"step": step, "stage": stage, **counts, **named})
        try:
            with self._file.open("ab") as file:
                file.write(line + b"\n")
        except OSError as error:  # figures are not worth the run
            log.warning("step %d is not in %s (%s)", step, self._file, one_line(error))
        for tracker in list(self._trackers):
            self._send(tracker, partial(tracker.log, named, step))

    def _send(self, tracker: Tracker, send: Callable[[], None]) -> None:
        """Send to a tracker; a tracker that fails gets nothing more."""
        try:
            send()
        except Exception as error:  # noqa: BLE001 (whatever it raises without a network)
            log.warning(
                "a tracker has failed and gets no more figures (%s)", one_line(error)
            )
            self._trackers.remove(tracker)


def open_metrics(
    facts: RunFacts, history: Sequence[HeldOut], trackers: Sequence[str]
) -> Metrics | None:
    """The `Metrics` of a run on rank 0, None on other ranks; an error reaches all ranks."""
    opened: list[Metrics] = []
    ranks.first(lambda: opened.append(Metrics(facts, history, trackers)))
    return opened[0] if opened else None


def _by_hop(agreement: Sequence[float]) -> dict[str, float]:
    return {f"agreement/hop{hop}": share for hop, share in enumerate(agreement)}


def _is_kept(line: bytes, done: int, measured_steps: Collection[int]) -> bool:
    """Whether a line is of a step, or of a measurement, that the run does not do again."""
    try:
        figures = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:  # cut off
        return False
    step = figures.get("step")
    if "train/loss" in figures:
        return step in range(done + 1)
    return step in measured_steps


class SampleStats:
    """Loss, kept share and agreement of the samples of the last epoch.

    Of a run that was resumed within that epoch, only samples of the present process.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, float]] = {}

    def add(self, keys: Sequence[str], unrolled: Unrolled) -> None:
        """Add a batch whose samples have those keys."""
        scores = unrolled.scores
        figures_R = {
            "loss": torch.stack([score.loss_R for score in scores]).sum(0),
            "kept": scores[-1].count_R,
        }
        for hop, score in enumerate(scores):
            figures_R[f"agree{hop}"] = score.agree_R
        # One wait for a GPU, on which sums over many rows would have no fixed order.
        columns = [unrolled.segment_R, *figures_R.values()]
        on_cpu = torch.stack([column_R.double() for column_R in columns]).cpu()
        segment_R = on_cpu[0].long()
        rows_B = torch.bincount(segment_R, minlength=len(keys)).clamp(min=1)
        means: dict[str, list[float]] = {}
        for name, values_R in zip(figures_R, on_cpu[1:], strict=True):
            sums_B = torch.bincount(segment_R, values_R, len(keys))
            means[name] = (sums_B / rows_B).tolist()
        for number, key in enumerate(keys):
            self._rows[key] = {name: values[number] for name, values in means.items()}

    def gather(self) -> None:
        """Add the samples of all other ranks."""
        gathered: dict[str, dict[str, float]] = {}
        for _, rows in ranks.of_each(self._rows):
            gathered |= rows
        self._rows = gathered

    def table(self) -> dict[str, list[Any]]:
        """The columns of `Store.write_stats`; empty when nothing was measured."""
        if not self._rows:
            return {}
        names = next(iter(self._rows.values()))
        columns: dict[str, list[Any]] = {"key": list(self._rows)}
        for name in names:
            columns[name] = [row[name] for row in self._rows.values()]
        return columns
