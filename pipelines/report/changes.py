"""Compares two sets of evaluations drafter by drafter: what changed by more than the prompts' noise.

Prompts are paired, so the interval of the ratio of two rates is over prompts (`statistics.advantage`): a rate
has changed if the interval of its ratio excludes 1. Times are compared only on equal hardware, dtype,
threads, attention and compilation.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import Evaluation, Measurement, stages_run
from vlmdistill.pipelines.bench.statistics import Interval, Rate, advantage, figures
from vlmdistill.pipelines.report.results import CONDITIONS, DrafterResult, of_drafters
from vlmdistill.pipelines.report.selection import Kept, distinguished
from vlmdistill.pipelines.targets.software import PACKAGES
from vlmdistill.stores.errors import DataError

COUNTED: Final[tuple[Rate, ...]] = ("tau", "accepted")
TIMED: Final[tuple[Rate, ...]] = ("decode_speedup", "speedup")
NEEDED: Final[dict[str, Callable[[Evaluation], Any]]] = {
    "target": lambda one: one.target.fingerprint,
    "prompts": lambda one: sorted(one.keys),
    "max new tokens": lambda one: one.max_new_tokens,
    "thinking": lambda one: one.thinking,
}
"""What must be equal to compare counts."""
NEEDED_FOR_TIMES: Final[tuple[str, ...]] = (
    "hardware",
    "dtype",
    "threads",
    "attention",
    "compiled",
)
FACTS: Final[dict[str, Callable[[Evaluation], str]]] = {
    **{name: value for name, value in CONDITIONS.items() if name not in PACKAGES},
    "seed": lambda one: str(one.seed),
    "drafter": lambda one: one.drafter,
    "tree": lambda one: one.tree,
    "parameters": lambda one: str(one.parameters),
    "training": lambda one: _training(one),
    "weights": lambda one: one.weights or "not recorded",
    "software": lambda one: "recorded" if one.software else "not recorded",
}
"""What is said if it differs, with what both recorded of their software."""
RECORDED: Final = ("python", *PACKAGES, "commit")


@dataclass(frozen=True)
class Change:
    """A rate of a drafter at one temperature, before and after."""

    rate: Rate
    before: float
    after: float
    ratio: (
        Interval | None
    )  # of after over before; None: too few prompts, or nothing was accepted before

    @property
    def verdict(self) -> Literal["higher", "lower", "equal", "unknown"]:
        """Whether it has changed by more than noise."""
        if self.ratio is None:
            return "unknown"
        return (
            "higher"
            if self.ratio.low > 1
            else "lower"
            if self.ratio.high < 1
            else "equal"
        )

    @property
    def sentence(self) -> str:
        """The change in words."""
        within = (
            f" (95%: {self.ratio.low:.3f} to {self.ratio.high:.3f} times)"
            if self.ratio
            else ""
        )
        rate = self.rate.replace("_", " ")
        return (
            f"{rate} is {self.verdict}, {self.before:.2f} -> {self.after:.2f}{within}"
        )


@dataclass(frozen=True)
class ChangedDrafter:
    """A drafter at one temperature; without times if they do not compare."""

    name: str
    temperature: float
    prompts: int
    rates: tuple[Change, ...]
    warnings: tuple[str, ...]  # of either measurement

    def of(self, rate: Rate) -> Change | None:
        """The change of a rate."""
        return next((one for one in self.rates if one.rate == rate), None)


@dataclass(frozen=True)
class ChangedFact:
    """A condition or version that differs."""

    name: str
    before: str
    after: str
    drafters: tuple[str, ...]


@dataclass
class Changes:
    """Two sets of evaluations compared."""

    both: list[str]  # names
    drafters: list[ChangedDrafter] = field(default_factory=list)
    differing: list[ChangedFact] = field(default_factory=list)
    refused: dict[str, list[str]] = field(
        default_factory=dict
    )  # drafters that do not compare: why
    untimed: dict[str, list[str]] = field(
        default_factory=dict
    )  # whose times do not compare: why
    only_before: list[str] = field(default_factory=list)
    only_after: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[tuple[ChangedDrafter, Change]]:
        """The rates that changed by more than noise."""
        pairs = [(one, rate) for one in self.drafters for rate in one.rates]
        return [
            (one, rate) for one, rate in pairs if rate.verdict in ("higher", "lower")
        ]


def compare(before: Path, after: Path, where: Sequence[str] = ()) -> Changes:
    """Compare the evaluations of two workspaces, folders or files; two files compare whatever their names.

    Of each kind, the latest counts (`selection.Kept`). DataError if there are none, or if a file is not an
    evaluation.
    """
    sides = [*distinguished([_read(before, where), _read(after, where)])]
    if before.is_file() and after.is_file():
        names = dict.fromkeys(one.name for side in sides for one in side)
        sides = [
            [
                replace(
                    one, evaluation=replace(one.evaluation, name=" -> ".join(names))
                )
                for one in side
            ]
            for side in sides
        ]
    olds, news = (_by_name(side) for side in sides)
    found = Changes(
        both=[name for name in olds if name in news],
        only_before=[name for name in olds if name not in news],
        only_after=[name for name in news if name not in olds],
    )
    facts: dict[tuple[str, str, str], dict[str, None]] = {}
    for name in found.both:
        at = [temperature for temperature in olds[name] if temperature in news[name]]
        found.only_before += [
            f"{name} at T={one:g}" for one in olds[name] if one not in at
        ]
        found.only_after += [
            f"{name} at T={one:g}" for one in news[name] if one not in at
        ]
        for temperature in at:
            _compare(found, facts, olds[name][temperature], news[name][temperature])
    found.differing = [
        ChangedFact(*fact, tuple(names)) for fact, names in facts.items()
    ]
    return found


def _compare(
    found: Changes,
    facts: dict[tuple[str, str, str], dict[str, None]],
    before: DrafterResult,
    after: DrafterResult,
) -> None:
    """Add how one drafter has changed at one temperature, and which facts differ."""
    old, new, name = before.evaluation, after.evaluation, before.name
    values = {fact: (value(old), value(new)) for fact, value in FACTS.items()}
    if old.software and new.software:
        was, now = asdict(old.software), asdict(new.software)
        values |= {
            fact: (was[fact] or "none", now[fact] or "none") for fact in RECORDED
        }
    differing = [fact for fact, (one, other) in values.items() if one != other]
    for fact in differing:
        facts.setdefault((fact, *values[fact]), {})[name] = None
    sides = (("A", before), ("B", after))
    refused = [
        f"other {fact}" for fact, value in NEEDED.items() if value(old) != value(new)
    ]
    refused += [f"{side}: {text}" for side, one in sides for text in one.failures]
    if refused:
        found.refused[name] = refused
        return
    untimed = [f"other {fact}" for fact in NEEDED_FOR_TIMES if fact in differing]
    untimed += [f"{side}: {text}" for side, one in sides for text in one.doubts]
    if untimed:
        found.untimed[name] = untimed
    rates = COUNTED if untimed else (*COUNTED, *TIMED)
    found.drafters.append(_changes(name, before, after, rates))


def _changes(
    name: str, before: DrafterResult, after: DrafterResult, rates: Sequence[Rate]
) -> ChangedDrafter:
    old, new = _by_key(before.measurement), _by_key(after.measurement)
    was, now = figures(old), figures(new)
    changes = [
        Change(rate, getattr(was, rate), getattr(now, rate), advantage(new, old, rate))
        for rate in rates
    ]
    warnings = [
        f"{when}: {text}"
        for when, of in (("A", was), ("B", now))
        for text in of.warnings
    ]
    return ChangedDrafter(
        name, old.temperature, was.prompts, tuple(changes), tuple(warnings)
    )


def _by_key(measurement: Measurement) -> Measurement:
    """Its prompts in an order that does not depend on that of decoding."""
    return replace(
        measurement, prompts=tuple(sorted(measurement.prompts, key=lambda one: one.key))
    )


def _read(where: Path, conditions: Sequence[str]) -> list[DrafterResult]:
    """The selected evaluations of a workspace, a folder of them or a file."""
    if not where.exists():
        raise DataError(
            f"{where} does not exist: give a workspace, its reports folder, or an evaluation's file"
        )
    folder = where / "reports" if (where / "reports").is_dir() else where
    files = [where] if where.is_file() else records.files_in(folder)
    if not files:
        raise DataError(
            f"no evaluations in {folder}: give a workspace, its reports folder, or an evaluation's file"
        )
    return Kept(of_drafters(map(records.read, files))).where(conditions).latest.own


def _by_name(
    measured: Sequence[DrafterResult],
) -> dict[str, dict[float, DrafterResult]]:
    """By name and temperature."""
    found: dict[str, dict[float, DrafterResult]] = {}
    for one in sorted(measured, key=lambda one: (one.name, one.temperature)):
        found.setdefault(one.name, {})[one.temperature] = one
    return found


def _training(one: Evaluation) -> str:
    how = one.training
    known = {"seed": how.seed, "settings and samples": how.signature, "view": how.view}
    facts = [f"{name} {value}" for name, value in known.items() if value is not None]
    if not how.steps:
        return "none"
    stages = stages_run(how, one.config)
    return ", ".join([f"{how.steps} steps on {how.samples} samples", *facts, *stages])
