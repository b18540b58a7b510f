"""Compares two sets of evaluations drafter by drafter: what changed by more than the prompts' noise.

Prompts are paired, so the interval of the ratio of two rates is over prompts (`statistics.advantage`): a rate
has changed if the interval of its ratio excludes 1. Times are compared only on equal hardware, dtype,
threads, attention and compilation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import Evaluation, Measurement, stages_run
from vlmdistill.pipelines.bench.statistics import (
    OF_CYCLES,
    Figures,
    Interval,
    Rate,
    advantage,
    figures,
)
from vlmdistill.pipelines.report.greedy_responses import other_targets
from vlmdistill.pipelines.report.results import (
    REPEATED,
    DrafterResult,
    conditions,
    in_words,
    of_drafters,
    with_whole_fingerprints,
)
from vlmdistill.pipelines.report.selection import Kept, distinguished
from vlmdistill.pipelines.targets.software import PACKAGES
from vlmdistill.stores.errors import DataError

COUNTED: Final[tuple[Rate, ...]] = ("tau", "accepted")
TIMED: Final[tuple[Rate, ...]] = ("decode_speedup", "speedup")
NEEDED_FOR_TIMES: Final = ("hardware", "dtype", "threads", "attention", "compiled")
SOFTWARE: Final = ("python", *PACKAGES, "commit")


@dataclass(frozen=True)
class Change:
    """A rate of a drafter at one temperature, before and after."""

    rate: Rate
    before: float
    after: float
    ratio: Interval | None
    """After over before; None: too few prompts, or nothing was accepted before."""

    @property
    def verdict(self) -> Literal["higher", "lower", "equal", "unknown"]:
        """Whether it has changed by more than noise."""
        if self.ratio is None:
            return "unknown"
        if self.ratio.low > 1:
            return "higher"
        return "lower" if self.ratio.high < 1 else "equal"

    @property
    def sentence(self) -> str:
        """The change in words."""
        change = f"{in_words(self.rate)} is {self.verdict}, {self.before:.2f} -> {self.after:.2f}"
        if self.ratio is None:
            return change
        low, high = self.ratio.low, self.ratio.high
        return f"{change} (95%: {low:.3f} to {high:.3f} times)"


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
        return next((change for change in self.rates if change.rate == rate), None)


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
    refused: dict[str, list[str]] = field(default_factory=dict)
    """By drafter that does not compare, with its temperature if it has several: why not."""
    untimed: dict[str, list[str]] = field(default_factory=dict)
    """By drafter whose times do not compare, likewise: why not."""
    only_before: list[str] = field(default_factory=list)
    only_after: list[str] = field(default_factory=list)

    @property
    def rates(self) -> list[Rate]:
        """The columns of a table."""
        return [*COUNTED, *TIMED]

    @property
    def changed(self) -> list[tuple[ChangedDrafter, Change]]:
        """The rates that changed by more than noise."""
        changed = []
        for drafter in self.drafters:
            for change in drafter.rates:
                if change.verdict in ("higher", "lower"):
                    changed.append((drafter, change))
        return changed


def compare(before: Path, after: Path, where: Sequence[str] = ()) -> Changes:
    """Compare the evaluations of two workspaces, folders or files; two files compare whatever their names.

    Of each kind, the latest counts (`selection.Kept`). DataError if there are none, or if a file is not an
    evaluation.
    """
    measured = [_evaluations(before), _evaluations(after)]
    both_sides = [*chain.from_iterable(measured)]
    results = [
        of_drafters(with_whole_fingerprints(side, both_sides)) for side in measured
    ]
    sides = distinguished(
        [Kept(side).where(where).latest.drafter_results for side in results]
    )
    if before.is_file() and after.is_file():
        sides = _under_one_name(sides)
    before_side, after_side = sides
    old_results, new_results = _by_name(before_side), _by_name(after_side)
    both = [name for name in old_results if name in new_results]
    only_before = [name for name in old_results if name not in new_results]
    only_after = [name for name in new_results if name not in old_results]
    changes = Changes(both, only_before=only_before, only_after=only_after)
    facts = _DifferingFacts()
    for name in both:
        old, new = old_results[name], new_results[name]
        changes.only_before += _temperatures(name, old.keys() - new.keys())
        changes.only_after += _temperatures(name, new.keys() - old.keys())
        shared = [temperature for temperature in old if temperature in new]
        labels = _temperatures(name, shared) if len(shared) > 1 else [name]
        for temperature, label in zip(shared, labels, strict=False):
            _compare(changes, facts, label, old[temperature], new[temperature])
    changes.differing = facts.listed
    return changes


def _under_one_name(
    sides: Sequence[Sequence[DrafterResult]],
) -> list[list[DrafterResult]]:
    """The results of two files, renamed so that they compare."""
    names = dict.fromkeys(result.name for side in sides for result in side)
    name = " -> ".join(names)
    return [[_renamed(result, name) for result in side] for side in sides]


def _renamed(result: DrafterResult, name: str) -> DrafterResult:
    return replace(result, evaluation=replace(result.evaluation, name=name))


def _temperatures(name: str, temperatures: Iterable[float]) -> list[str]:
    return [f"{name} at T={temperature:g}" for temperature in sorted(temperatures)]


class _DifferingFacts:
    """The facts that differ, and for which drafters, in the order in which they are found."""

    def __init__(self) -> None:
        self._drafters: dict[tuple[str, str, str], dict[str, None]] = {}

    def add(self, fact: str, before: str, after: str, drafter: str) -> None:
        """A fact of a drafter that differs."""
        self._drafters.setdefault((fact, before, after), {})[drafter] = None

    @property
    def listed(self) -> list[ChangedFact]:
        """All of them."""
        changed = []
        for (fact, before, after), drafters in self._drafters.items():
            changed.append(ChangedFact(fact, before, after, tuple(drafters)))
        return changed


def _compare(
    changes: Changes,
    facts: _DifferingFacts,
    label: str,
    before: DrafterResult,
    after: DrafterResult,
) -> None:
    """Add how one drafter has changed at one temperature, and which facts differ.

    `label` names it if it does not compare.
    """
    name = before.name
    differing = _differing(before.evaluation, after.evaluation)
    for fact, (old_value, new_value) in differing.items():
        facts.add(fact, old_value, new_value, name)
    refused = _reasons_not_to_compare(before.evaluation, after.evaluation)
    refused += [f"A: {text}" for text in before.wrong_counts]
    refused += [f"B: {text}" for text in after.wrong_counts]
    if refused:
        changes.refused[label] = refused
        return
    untimed = [f"other {fact}" for fact in NEEDED_FOR_TIMES if fact in differing]
    untimed += [f"A: {text}" for text in before.no_speedup]
    untimed += [f"B: {text}" for text in after.no_speedup]
    if untimed:
        changes.untimed[label] = untimed
    timed = () if untimed else TIMED
    changes.drafters.append(_changed(name, before, after, (*COUNTED, *timed)))


def _differing(old: Evaluation, new: Evaluation) -> dict[str, tuple[str, str]]:
    """The facts that differ, with both values."""
    before, after = _facts(old), _facts(new)
    differing = {}
    for fact, value in before.items():
        if value != after[fact]:
            differing[fact] = value, after[fact]
    return differing


def _facts(evaluation: Evaluation) -> dict[str, str]:
    """The facts of an evaluation that are named if they differ."""
    settings = conditions(evaluation)
    for package in PACKAGES:  # among SOFTWARE
        settings.pop(package, None)
    installed = asdict(evaluation.software)
    software = {name: installed[name] or "none" for name in SOFTWARE}
    return {
        **settings,
        "seed": "drawn" if evaluation.seed is None else str(evaluation.seed),
        "drafter": evaluation.drafter,
        "tree": evaluation.tree,
        "parameters": str(evaluation.parameters),
        "training": _training(evaluation),
        "weights": evaluation.weights or "none",
        **software,
    }


def _training(evaluation: Evaluation) -> str:
    """How the drafter was trained, in words."""
    training = evaluation.training
    if not training.steps:
        return "none"
    facts = [f"{training.steps} steps on {training.samples} samples"]
    if training.seed is not None:
        facts.append(f"seed {training.seed}")
    if training.signature is not None:
        facts.append(f"settings and samples {training.signature}")
    if training.budget is not None:
        facts.append(training.budget.text)
    if training.view is not None:
        facts.append(f"view {training.view}")
    return ", ".join([*facts, *stages_run(training, evaluation.config)])


def _reasons_not_to_compare(old: Evaluation, new: Evaluation) -> list[str]:
    """The conditions of counts that differ."""
    reasons = []
    if old.target.fingerprint != new.target.fingerprint:
        reasons.append("other target")
    if sorted(old.keys) != sorted(new.keys):
        reasons.append("other prompts")
    if old.max_new_tokens != new.max_new_tokens:
        reasons.append("other max new tokens")
    if old.thinking != new.thinking:
        reasons.append("other thinking")
    if other_targets([new, old]):
        reasons.append("other responses of plain decoding")
    return reasons


def _changed(
    name: str, before: DrafterResult, after: DrafterResult, rates: Sequence[Rate]
) -> ChangedDrafter:
    """How these rates have changed."""
    old, new = by_key(before.measurement), by_key(after.measurement)
    old_figures, new_figures = figures(old), figures(new)
    changes = []
    have_drafts = old_figures.calls and new_figures.calls
    for rate in rates:
        if rate in OF_CYCLES and not have_drafts:
            continue
        values = getattr(old_figures, rate), getattr(new_figures, rate)
        changes.append(Change(rate, *values, advantage(new, old, rate)))
    warnings = [f"A: {text}" for text in _warnings(before, old_figures)]
    warnings += [f"B: {text}" for text in _warnings(after, new_figures)]
    return ChangedDrafter(
        name, old.temperature, old_figures.prompts, tuple(changes), tuple(warnings)
    )


def _warnings(result: DrafterResult, rated: Figures) -> Iterator[str]:
    """Problems of one side."""
    yield from rated.warnings
    if result.repeats > 1:
        yield f"it is one of {result.repeats} {REPEATED}"


def by_key(measurement: Measurement) -> Measurement:
    """Its prompts in an order that does not depend on that of decoding."""
    prompts = sorted(measurement.prompts, key=lambda prompt: prompt.key)
    return replace(measurement, prompts=tuple(prompts))


def _evaluations(where: Path) -> list[Evaluation]:
    """The evaluations of a workspace, a folder of them or a file."""
    needed = "give a workspace, its reports folder, or an evaluation's file"
    if not where.exists():
        raise DataError(f"{where} does not exist: {needed}")
    folder = where / "reports" if (where / "reports").is_dir() else where
    files = [where] if where.is_file() else records.files_in(folder)
    if not files:
        raise DataError(f"no evaluations in {folder}: {needed}")
    return [records.read(file) for file in files]


def _by_name(results: Sequence[DrafterResult]) -> dict[str, dict[float, DrafterResult]]:
    """By name and temperature, in the order of both."""
    ordered = sorted(results, key=lambda result: (result.name, result.temperature))
    by_name: dict[str, dict[float, DrafterResult]] = {}
    for result in ordered:
        by_name.setdefault(result.name, {})[result.temperature] = result
    return by_name
