"""Progress of training: figures of each step, a TensorBoard log, and statistics of each sample.

Shapes: H hops; R rows of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmdistill.drafters.training.unroll import Unrolled


@dataclass(frozen=True)
class TrainingProgress:
    """One optimizer step over all ranks."""

    stage: str
    step: int  # of the whole run
    total: int  # steps that the run will take
    sums_H3: Tensor  # by hop: loss, rows that agree, rows that count
    tokens: int
    seconds: float

    @property
    def remark(self) -> str:
        """The figures in one short line."""
        agreement = " ".join(f"{share:.2f}" for share in self.agreement)
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{self.stage}: loss {self.loss:.3f}, agreement {agreement}, {rate:.0f} tokens/s"

    @property
    def loss(self) -> float:
        """The weighted loss per row, summed over hops."""
        return float((self.sums_H3[:, 0] / self.sums_H3[:, 2].clamp(min=1)).sum())

    @property
    def agreement(self) -> list[float]:
        """By hop, the share of rows whose best token is the target's."""
        shares: list[float] = (self.sums_H3[:, 1] / self.sums_H3[:, 2].clamp(min=1)).tolist()
        return shares


class TensorBoardLogger:
    """TensorBoard scalars under `<run>.training/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def step(self, progress: TrainingProgress, rate: float) -> None:
        """One optimizer step."""
        values = {"loss": progress.loss, "learning_rate": rate}
        values["tokens_per_second"] = progress.tokens / max(progress.seconds, 1e-9)
        values |= {f"agreement/hop{hop}": share for hop, share in enumerate(progress.agreement)}
        self._write("train", values, progress.step)

    def measured(self, entry: dict[str, Any]) -> None:
        """Agreement on held-out samples."""
        shares = {f"agreement/hop{hop}": share for hop, share in enumerate(entry["held_out_agreement"])}
        self._write("held_out", shares, entry["step"])
        self._writer.flush()

    def _write(self, group: str, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)


class SampleStats:
    """Loss, kept share and agreement of the samples of the last epoch on this rank."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, float]] = {}

    def add(self, keys: Sequence[str], out: Unrolled) -> None:
        """Add a batch whose samples have those keys."""
        rows_B = torch.bincount(out.segment_R, minlength=len(keys)).clamp(min=1)

        def mean(value_R: Tensor) -> list[float]:
            sums = torch.bincount(out.segment_R, value_R.double(), len(keys))
            shares: list[float] = (sums / rows_B).tolist()
            return shares

        columns = {"loss": mean(torch.stack([score.loss_R for score in out.scores]).sum(0))}
        columns["kept"] = mean(out.scores[-1].count_R)
        columns |= {f"agree{hop}": mean(score.agree_R) for hop, score in enumerate(out.scores)}
        for number, key in enumerate(keys):
            self._rows[key] = {name: values[number] for name, values in columns.items()}

    def table(self) -> dict[str, list[Any]]:
        """The columns of `Store.write_stats`; empty when nothing was measured."""
        if not self._rows:
            return {}
        names = next(iter(self._rows.values()))
        columns: dict[str, list[Any]] = {"key": list(self._rows)}
        return columns | {name: [row[name] for row in self._rows.values()] for name in names}
