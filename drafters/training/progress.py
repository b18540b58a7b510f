"""Progress of training: figures of each step and validation, and statistics of each sample.

    <run>.training/metrics.jsonl   a line for each step and each validation: its step, stage and figures
                   tensorboard/    the same figures, if asked for; see `trackers`

Shapes: H hops; R rows of a batch.
"""

import logging
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from vlmdistill.drafters.training import ranks
from vlmdistill.drafters.training.saved import HeldOut
from vlmdistill.drafters.training.trackers import About, Tracker, opened
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
        """What is recorded of the step, by name."""
        return {
            "loss": self.loss,
            **_by_hop(self.agreement),
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
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
        shares: list[float] = (
            self.sums_H3[:, 1] / self.sums_H3[:, 2].clamp(min=1)
        ).tolist()
        return shares


def loss_of(sums_H3: Tensor) -> float:
    """The weighted loss per row, summed over hops."""
    return float((sums_H3[:, 0] / sums_H3[:, 2].clamp(min=1)).sum())


def memory() -> int:
    """The most bytes that were in use: of this rank's GPU, or of its process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )  # Linux counts in KiB


class Metrics:
    """The figures of a run, written as they come."""

    def __init__(
        self, about: About, history: Sequence[HeldOut], trackers: Sequence[str]
    ) -> None:
        """Continue the record of a run after the measurements of `history`; drop later lines.

        TrainingError when a tracker is not installed, or when nothing can be written.
        """
        folder, done = about.folder, about.done
        self._file = folder / "metrics.jsonl"
        self._trackers = [opened(name, about) for name in dict.fromkeys(trackers)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = (
                read_bytes(self._file).splitlines(keepends=True)
                if self._file.exists()
                else []
            )
            with atomic_write(self._file, alone=True) as new:
                new.write_bytes(
                    b"".join(line for line in lines if _is_kept(line, done, history))
                )
        except OSError as error:
            raise TrainingError(
                f"{self._file} cannot be written ({one_line(error)})"
            ) from None

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
        figures = {
            **_by_hop(entry.held_out_agreement),
            "predicted_tau": entry.predicted_tau,
        }
        self._write("held_out", entry.stage, entry.step, figures)

    def close(self) -> None:
        """Write out what the trackers have not yet."""
        for tracker in list(self._trackers):
            self._sent(tracker, tracker.close)

    def _write(
        self, group: str, stage: str, step: int, figures: dict[str, float], **more: int
    ) -> None:
        named = {f"{group}/{name}": value for name, value in figures.items()}
        try:
            with self._file.open("ab") as file:
                file.write(
                    msgspec.json.encode({"step": step, "stage": stage, **more, **named})
                    + b"\n"
                )
        except OSError as error:  # figures are not worth the run
            log.warning("step %d is not in %s (%s)", step, self._file, one_line(error))
        for tracker in list(self._trackers):
            self._sent(tracker, partial(tracker.log, named, step))

    def _sent(self, tracker: Tracker, send: Callable[[], None]) -> None:
        """Send to a tracker; one that fails gets nothing more."""
        try:
            send()
        except Exception as error:  # noqa: BLE001 (whatever it raises without a network)
            log.warning(
                "a tracker has failed and gets no more figures (%s)", one_line(error)
            )
            self._trackers.remove(tracker)


def _by_hop(agreement: Sequence[float]) -> dict[str, float]:
    return {f"agreement/hop{hop}": share for hop, share in enumerate(agreement)}


def _is_kept(line: bytes, done: int, history: Sequence[HeldOut]) -> bool:
    """Whether a line is of a step, or of a measurement, that the run does not do again."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:  # cut off
        return False
    steps = range(done + 1) if "train/loss" in found else [one.step for one in history]
    return found.get("step") in steps


class SampleStats:
    """Loss, kept share and agreement of the samples of the last epoch, of this process if it was resumed."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, float]] = {}

    def add(self, keys: Sequence[str], out: Unrolled) -> None:
        """Add a batch whose samples have those keys."""
        told = {
            "loss": torch.stack([score.loss_R for score in out.scores]).sum(0),
            "kept": out.scores[-1].count_R,
            **{f"agree{hop}": score.agree_R for hop, score in enumerate(out.scores)},
        }
        # One wait for a GPU, whose sums of many rows would have no fixed order.
        rows = torch.stack(
            [value_R.double() for value_R in (out.segment_R, *told.values())]
        )
        segment_R, *values = rows.cpu()
        rows_B = torch.bincount(segment_R.long(), minlength=len(keys)).clamp(min=1)

        def mean(value_R: Tensor) -> list[float]:
            sums = torch.bincount(segment_R.long(), value_R, len(keys))
            shares: list[float] = (sums / rows_B).tolist()
            return shares

        columns = {
            name: mean(value_R) for name, value_R in zip(told, values, strict=True)
        }
        for number, key in enumerate(keys):
            self._rows[key] = {name: values[number] for name, values in columns.items()}

    def gather(self) -> None:
        """Add the samples of all other ranks."""
        self._rows = {
            key: row
            for _, rows in ranks.of_each(self._rows)
            for key, row in rows.items()
        }

    def table(self) -> dict[str, list[Any]]:
        """The columns of `Store.write_stats`; empty when nothing was measured."""
        if not self._rows:
            return {}
        names = next(iter(self._rows.values()))
        columns: dict[str, list[Any]] = {"key": list(self._rows)}
        return columns | {
            name: [row[name] for row in self._rows.values()] for name in names
        }
