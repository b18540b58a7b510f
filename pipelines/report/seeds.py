"""Drafters that were trained with several seeds, named `x.s0`, `x.s1` and so on: one row of mean and spread.

They are compared by a paired test: each seed that two drafters share gives a difference
(`statistics.difference`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, stdev
from typing import Final

from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.bench.statistics import (
    FEWEST_SEEDS,
    Difference,
    Rate,
    difference,
)
from vlmdistill.pipelines.report.changes import by_key
from vlmdistill.pipelines.report.results import (
    SEEDED,
    DrafterResult,
    rate_of,
)

NAMED: Final = re.compile(SEEDED.pattern + r"((?:[@ ].*)?)")
"""A drafter, the number of its seed, and the facts that tell its evaluations apart."""
MARK: Final = "*"
UNKNOWN: Final = "-"
NOTE: Final = (
    "Over seeds: mean ± standard deviation. Below the best: the mean difference to the drafter with the "
    "highest mean, paired by seed, with its 95% interval over seeds (Student's t) and prompts (jackknife); "
    f"{MARK} where it excludes 0. An interval needs {FEWEST_SEEDS} seeds of each."
)


@dataclass(frozen=True)
class SeededDrafter:
    """A drafter at one temperature, trained with several seeds."""

    name: str
    temperature: float
    results: dict[int, DrafterResult]  # by seed

    @cached_property
    def mismatch(self) -> str:
        """Why the results are not of one method, trained alike with several seeds; empty if they are."""
        evaluations = [result.evaluation for result in self.results.values()]
        trainings = [evaluation.training for evaluation in evaluations]
        settings = {evaluation.settings for evaluation in evaluations} - {None}
        lengths = {_trained_alike(evaluation) for evaluation in evaluations}
        if len(settings) > 1 or len(lengths) > 1:
            return "not trained alike"
        if _repeats([training.seed for training in trainings]):
            return "a seed twice"
        if _repeats([evaluation.weights for evaluation in evaluations]):
            return "the same weights twice"
        return ""

    @property
    def of_seeds(self) -> int:
        """How many seeds the workspace has, whichever are selected."""
        return max(result.seeds for result in self.results.values())

    @property
    def count(self) -> str:
        """How many seeds it has, and of how many if some are not selected."""
        selected = len(self.results)
        return (
            f"{selected} of {self.of_seeds}"
            if self.of_seeds > selected
            else f"{selected}"
        )

    @cached_property
    def ranked(self) -> bool:
        """Whether none of its results is in doubt."""
        return not any(result.unranked for result in self.results.values())

    @cached_property
    def has_wrong_counts(self) -> bool:
        """Whether not even the counts of some seed can be relied on."""
        return any(result.wrong_counts for result in self.results.values())

    @cached_property
    def disturbed(self) -> bool:
        """Whether other programs had most of the CPU at some seed."""
        return any(result.disturbed for result in self.results.values())

    def mean(self, rate: Rate) -> float:
        """The mean of a rate over seeds."""
        return mean(self._values(rate))

    def spread(self, rate: Rate) -> float:
        """The standard deviation of a rate over seeds."""
        return stdev(self._values(rate))

    def text(self, rate: Rate) -> str:
        """Mean and spread of a rate."""
        return f"{self.mean(rate):.2f} ± {self.spread(rate):.2f}"

    def _values(self, rate: Rate) -> list[float]:
        return [rate_of(result, rate) for result in self.results.values()]


def _trained_alike(evaluation: Evaluation) -> tuple[object, ...]:
    """What the drafters of several seeds have in common."""
    training = evaluation.training
    length: object = training.steps
    if training.budget is not None:
        length = training.budget.asked
    drafter = evaluation.drafter, evaluation.parameters, evaluation.tree
    data = training.samples, training.view
    return *drafter, evaluation.config, *data, length


def _repeats(values: Sequence[object]) -> bool:
    """Whether a known value is there twice."""
    known = [value for value in values if value is not None]
    return len({*known}) < len(known)


@dataclass(frozen=True)
class OverSeeds:
    """Drafters at one temperature that were trained with several seeds; the best tau first."""

    drafters: tuple[SeededDrafter, ...]

    def known(self, drafter: SeededDrafter, rate: Rate) -> bool:
        """Whether a rate of a drafter can be relied on."""
        if drafter.mismatch:
            return False
        if rate == "tau":
            return not drafter.has_wrong_counts
        return drafter.ranked and not drafter.disturbed

    def best(self, rate: Rate) -> SeededDrafter | None:
        """The drafter with the highest mean, of those without doubts.

        None for speedups of which some are not known, as other programs had the CPU.
        """
        ranked = [drafter for drafter in self.drafters if drafter.ranked]
        if rate == "speedup" and any(drafter.disturbed for drafter in ranked):
            return None
        candidates = [drafter for drafter in ranked if self.known(drafter, rate)]
        return max(candidates, key=lambda drafter: drafter.mean(rate), default=None)

    def below_best(self, drafter: SeededDrafter, rate: Rate) -> Difference | None:
        """A drafter minus the best, over the seeds of both; None for the best, or in doubt."""
        best = self.best(rate)
        if best is None or best is drafter or not drafter.ranked:
            return None
        shared = sorted(drafter.results.keys() & best.results.keys())
        if not shared or not self.known(drafter, rate):
            return None
        return difference(
            [by_key(drafter.results[seed].measurement) for seed in shared],
            [by_key(best.results[seed].measurement) for seed in shared],
            rate,
        )


def is_significant(below: Difference | None) -> bool:
    """Whether the interval of a difference excludes 0."""
    if below is None or below.interval is None:
        return False
    return below.interval.high < 0 or below.interval.low > 0


def over_seeds(results: Iterable[DrafterResult]) -> list[OverSeeds]:
    """The drafters of a group that have several seeds, by temperature."""
    by_drafter: dict[tuple[float, str], dict[int, DrafterResult]] = {}
    for result in results:
        if match := NAMED.fullmatch(result.name):
            name = match[1] + match[3]
            of_drafter = by_drafter.setdefault((result.temperature, name), {})
            of_drafter.setdefault(int(match[2]), result)
    by_temperature: dict[float, list[SeededDrafter]] = {}
    for (temperature, name), of_seeds in sorted(by_drafter.items()):
        if len(of_seeds) > 1:
            seeded = SeededDrafter(name, temperature, dict(sorted(of_seeds.items())))
            by_temperature.setdefault(temperature, []).append(seeded)
    return [_best_first(drafters) for drafters in by_temperature.values()]


def _best_first(drafters: Sequence[SeededDrafter]) -> OverSeeds:
    by_tau = sorted(drafters, key=lambda drafter: drafter.mean("tau"), reverse=True)
    return OverSeeds(tuple(by_tau))


SHOWN: Final[tuple[Rate, ...]] = ("tau", "speedup")
HEADER: Final = (
    *("drafter", "T", "seeds", "tau", "below the best", "speedup", "below the best"),
)


def seed_rows(compared: Iterable[OverSeeds]) -> list[list[str]]:
    """The rows of `HEADER`."""
    rows = []
    for at_temperature in compared:
        for drafter in at_temperature.drafters:
            row = [drafter.name, f"{drafter.temperature:g}"]
            count, mismatch = drafter.count, drafter.mismatch
            row.append(f"{count}: {mismatch}" if mismatch else count)
            for rate in SHOWN:
                row += _cells(at_temperature, drafter, rate)
            rows.append(row)
    return rows


def _cells(compared: OverSeeds, drafter: SeededDrafter, rate: Rate) -> list[str]:
    """Mean and spread of a rate, and its distance from the best."""
    if not compared.known(drafter, rate):
        return [UNKNOWN, UNKNOWN]
    text = drafter.text(rate)
    below = compared.below_best(drafter, rate)
    if below is None:
        return [text, "the best" if compared.best(rate) is drafter else UNKNOWN]
    mark = f" {MARK}" if is_significant(below) else ""
    return [text, below.text + mark]
