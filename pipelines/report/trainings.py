"""The curves of trainings, finished or under way, from the figures that each run records."""

import math
from collections.abc import Iterable, Iterator
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

Curve = list[tuple[float, float]]
"""Values by step."""


class _Recorded(msgspec.Struct):
    """A line of the figures: of a step, or of a measurement on held-out samples."""

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
class TrainingRun:
    """What a run has recorded so far."""

    name: str
    written: float  # when the last figures were, in seconds since 1970
    finished: bool  # the drafter of these steps is saved
    step: int  # the last one
    total: int  # steps that the run will take; 0 if that was not recorded
    stages: dict[str, float] = field(default_factory=dict)  # the first step of each
    loss: Curve = field(default_factory=list)
    agreement: list[Curve] = field(
        default_factory=list
    )  # with the target, of batches, by drafted token
    held_out: list[Curve] = field(default_factory=list)  # the same on held-out samples
    measured: list[tuple[int, tuple[float, ...]]] = field(
        default_factory=list
    )  # as is, by step
    predicted_tau: Curve = field(default_factory=list)
    tokens_per_second: float = 0.0  # of the last steps

    @property
    def stage(self) -> str:
        """The last stage."""
        return next(reversed(self.stages), "")

    def made(self, training: Training) -> bool:
        """Whether this run, not a later one, trained the drafter that an evaluation is of."""
        history = [(one.step, one.held_out_agreement) for one in training.history]
        return (self.step, self.measured) == (training.steps, history)


def read(workspace: Workspace) -> list[TrainingRun]:
    """The runs of a workspace that have recorded figures, by name."""
    runs = (_read(workspace, name) for name in workspace.drafters())
    return [run for run in runs if run is not None]


def files(workspace: Workspace) -> Iterator[Path]:
    """The files that `read` reads."""
    for name in workspace.drafters():
        yield workspace.drafter(name) / "config.json"
        yield workspace.drafter(f"{name}.training") / METRICS


def _read(workspace: Workspace, name: str) -> TrainingRun | None:
    file = workspace.drafter(f"{name}.training") / METRICS
    try:
        written, lines = file.stat().st_mtime, [*_lines(read_bytes(file))]
    except OSError:
        return None
    steps = [(one, shares) for one, shares in lines if one.loss is not None]
    measured = [(one, shares) for one, shares in lines if one.predicted_tau is not None]
    if not steps:
        return None
    stages: dict[str, float] = {}
    for one, _ in steps:
        stages.setdefault(one.stage, one.step)
    last, saved = steps[-1][0], 0
    with suppress(TrainingError, DataError):
        saved = describe(workspace.drafter(name))["training"].get("steps", 0)
    recent = [one.tokens_per_second for one, _ in steps[-20:] if one.tokens_per_second]
    return TrainingRun(
        name,
        written,
        saved == last.step,
        last.step,
        last.total,
        stages,
        _thinned((one.step, one.loss) for one, _ in steps if one.loss is not None),
        _by_token(steps),
        _by_token(measured),
        [
            (one.step, tuple(shares[hop] for hop in sorted(shares)))
            for one, shares in measured
        ],
        [
            (one.step, one.predicted_tau)
            for one, _ in measured
            if one.predicted_tau is not None
        ],
        sum(recent) / len(recent) if recent else 0.0,
    )


def _lines(text: bytes) -> Iterator[tuple[_Recorded, dict[int, float]]]:
    """Each line with its agreement by hop; one that is not written to its end, or of no run, is dropped."""
    for line in text.splitlines():
        with suppress(msgspec.DecodeError, UnicodeDecodeError, ValueError):
            one = msgspec.json.decode(line, type=_Recorded)
            shares = {
                int(hop): float(value)
                for name, value in msgspec.json.decode(line).items()
                if (hop := name.partition("/agreement/hop")[2]).isdecimal()
            }
            if all(map(math.isfinite, [one.loss or 0, *shares.values()])):
                yield one, shares


def _by_token(lines: list[tuple[_Recorded, dict[int, float]]]) -> list[Curve]:
    """A curve for each hop."""
    hops = sorted({hop for _, shares in lines for hop in shares})
    return [
        _thinned((one.step, shares[hop]) for one, shares in lines if hop in shares)
        for hop in hops
    ]


def _thinned(points: Iterable[tuple[float, float]]) -> Curve:
    """At most MOST points, each the mean of as many."""
    whole = list(points)
    size = max(1, math.ceil(len(whole) / MOST))
    parts = (whole[at : at + size] for at in range(0, len(whole), size))
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part))
        for part in parts
    ]
