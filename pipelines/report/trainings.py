"""The curves of trainings, finished or under way, from the figures that each run records."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.pipelines.bench.records import Training
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.input_files import read_bytes

MOST = 160  # points of a curve: with more, each is the mean of its steps
METRICS = "metrics.jsonl"  # see `drafters.training.progress`
RECENT = 20  # steps over which the speed is a mean
AGREEMENT = "/agreement/hop"  # in the names of figures, before the number of the hop

Curve = list[tuple[float, float]]
"""Values by step."""


class _Figures(msgspec.Struct):
    """Figures of a step, or of a measurement on held-out samples."""

    step: int
    stage: str = ""
    total: int = 0
    loss: float | None = msgspec.field(default=None, name="train/loss")
    predicted_tau: float | None = msgspec.field(
        default=None, name="held_out/predicted_tau"
    )
    tokens_per_second: float | None = msgspec.field(
        default=None, name="train/tokens_per_second"
    )


@dataclass(frozen=True)
class _RecordedLine:
    """A line that a run recorded."""

    figures: _Figures
    agreement: dict[int, float]  # with the target, by hop


@dataclass(frozen=True)
class TrainingRun:
    """The figures that a run has recorded so far."""

    name: str
    written: float  # the time of the last figures, in seconds since 1970
    finished: bool  # the drafter of these steps is saved
    step: int  # the last one
    total: int  # steps that the run will take; 0 if that was not recorded
    stages: dict[str, float] = field(default_factory=dict)  # the first step of each
    loss: Curve = field(default_factory=list)
    agreement: list[Curve] = field(default_factory=list)
    """With the target, of batches, by drafted token."""
    held_out: list[Curve] = field(default_factory=list)  # the same on held-out samples
    measured: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    """Agreement on held-out samples by step, as recorded."""
    predicted_tau: Curve = field(default_factory=list)
    tokens_per_second: float = 0.0  # of the last steps

    @property
    def stage(self) -> str:
        """The last stage."""
        return next(reversed(self.stages), "")

    def made(self, training: Training) -> bool:
        """Whether this run, not a later one, trained the evaluated drafter, which had this `training`."""
        history = [
            (agreement.step, agreement.held_out_agreement)
            for agreement in training.history
        ]
        return (self.step, self.measured) == (training.steps, history)


def read(workspace: Workspace) -> list[TrainingRun]:
    """The runs of a workspace that have recorded figures, by name."""
    runs = (_read(workspace, name) for name in workspace.drafters())
    return [run for run in runs if run is not None]


def _read(workspace: Workspace, name: str) -> TrainingRun | None:
    """The run of a drafter; None without figures."""
    file = workspace.drafter(f"{name}.training") / METRICS
    try:
        written = file.stat().st_mtime
        lines = [*_lines(read_bytes(file))]
    except OSError:
        return None
    steps = [line for line in lines if line.figures.loss is not None]
    if not steps:
        return None
    measured = [line for line in lines if line.figures.predicted_tau is not None]
    last = steps[-1].figures
    saved_steps = _saved_steps(workspace.drafter(name))
    return TrainingRun(
        name=name,
        written=written,
        finished=saved_steps == last.step,
        step=last.step,
        total=last.total,
        stages=_first_steps(steps),
        loss=_losses(steps),
        agreement=_by_token(steps),
        held_out=_by_token(measured),
        measured=[_in_order(line) for line in measured],
        predicted_tau=_predicted_tau(measured),
        tokens_per_second=_speed(steps[-RECENT:]),
    )


def _saved_steps(drafter: Path) -> int:
    """The steps of the drafter that is saved; 0 without one."""
    with suppress(TrainingError, DataError):
        steps: int = describe(drafter)["training"].get("steps", 0)
        return steps
    return 0


def _first_steps(steps: Iterable[_RecordedLine]) -> dict[str, float]:
    """The first step of each stage."""
    stages: dict[str, float] = {}
    for line in steps:
        stages.setdefault(line.figures.stage, line.figures.step)
    return stages


def _losses(steps: Iterable[_RecordedLine]) -> Curve:
    losses = [(line.figures.step, line.figures.loss) for line in steps]
    return _thinned((step, loss) for step, loss in losses if loss is not None)


def _in_order(line: _RecordedLine) -> tuple[int, tuple[float, ...]]:
    """The step, and the agreement of each hop."""
    agreement = tuple(share for _, share in sorted(line.agreement.items()))
    return line.figures.step, agreement


def _predicted_tau(measured: Iterable[_RecordedLine]) -> Curve:
    curve: Curve = []
    for line in measured:
        tau = line.figures.predicted_tau
        if tau is not None:
            curve.append((line.figures.step, tau))
    return curve


def _speed(steps: Iterable[_RecordedLine]) -> float:
    """The mean of the tokens per second; 0 if none were recorded."""
    speeds = [line.figures.tokens_per_second for line in steps]
    recorded = [speed for speed in speeds if speed]
    return sum(recorded) / len(recorded) if recorded else 0.0


def _lines(text: bytes) -> Iterator[_RecordedLine]:
    """The lines of a run, without those that are incomplete, of no run, or not finite."""
    for encoded in text.splitlines():
        with suppress(msgspec.DecodeError, UnicodeDecodeError, ValueError):
            figures = msgspec.json.decode(encoded, type=_Figures)
            agreement = {}
            for name, value in msgspec.json.decode(encoded).items():
                _, _, hop = name.partition(AGREEMENT)
                if hop.isdecimal():
                    agreement[int(hop)] = float(value)
            numbers = [figures.loss or 0, *agreement.values()]
            if all(map(math.isfinite, numbers)):
                yield _RecordedLine(figures, agreement)


def _by_token(lines: Sequence[_RecordedLine]) -> list[Curve]:
    """A curve of the agreement at each hop."""
    curves: dict[int, Curve] = {}
    for line in lines:
        for hop, share in line.agreement.items():
            curves.setdefault(hop, []).append((line.figures.step, share))
    return [_thinned(curve) for _, curve in sorted(curves.items())]


def _thinned(points: Iterable[tuple[float, float]]) -> Curve:
    """At most MOST points, each the mean of as many."""
    every_point = list(points)
    size = max(1, math.ceil(len(every_point) / MOST))
    starts = range(0, len(every_point), size)
    return [_mean(every_point[start : start + size]) for start in starts]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    xs, ys = zip(*points, strict=True)
    count = len(points)
    return sum(xs) / count, sum(ys) / count
