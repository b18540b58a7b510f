"""Which evaluations a report shows: of all that are kept, the latest of each kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Final

import polars as pl

from vlmdistill.pipelines.bench import records, served_records
from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.media.urls import shown
from vlmdistill.pipelines.report.results import (
    DrafterResult,
    ServerResult,
    conditions,
    of_drafters,
    of_servers,
)
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.views import expressions

LISTED: Final = (
    "name",
    "measured",
    "drafter",
    "prompts",
    "dataset",
    "temperature",
    "tree",
    "tau",
    "speedup",
    "machine",
    "not_ranked",
    "warnings",
)
"""The columns that `eval --list` prints."""


@dataclass(frozen=True)
class Kept:
    """Results of evaluations: those of drafters, then those of servers, of each the latest first."""

    results: Sequence[DrafterResult | ServerResult]

    @property
    def drafter_results(self) -> list[DrafterResult]:
        """The results of drafters."""
        return [result for result in self.results if isinstance(result, DrafterResult)]

    @property
    def server_results(self) -> list[ServerResult]:
        """The results of servers."""
        return [result for result in self.results if isinstance(result, ServerResult)]

    @property
    def table(self) -> pl.DataFrame:
        """A row for each result, with all columns that any of them has."""
        rows = [result.facts for result in self.results]
        return pl.DataFrame(rows, infer_schema_length=None)

    def where(self, conditions: Sequence[str]) -> "Kept":
        """The results for which all expressions are true (`stores.views.expressions`).

        Raises:
            StoreError: An expression has a mistake.
            DataError: No result is left.
        """
        if not conditions:
            return self
        table = self.table
        is_selected = [True] * len(self.results)
        # Without results the table has no columns that an expression could name.
        for text in conditions if self.results else ():
            expression = expressions.where(
                text, table.columns, listed="eval --list --json"
            )
            matches = expression.keep(table)
            is_selected = [
                before and bool(match)
                for before, match in zip(is_selected, matches, strict=True)
            ]
        if not any(is_selected):
            raise DataError(
                f"--where: none of the {len(self.results)} measurements matches: see `eval --list`"
            )
        return Kept([*compress(self.results, is_selected)])

    @property
    def latest(self) -> "Kept":
        """The latest result of each kind."""
        of_kind: dict[tuple[object, ...], DrafterResult | ServerResult] = {}
        for result in self.results:  # the latest first
            of_kind.setdefault(result.kind, result)
        return Kept([*of_kind.values()])


def read(reports: Path) -> Kept:
    """All evaluations that a workspace keeps; DataError if a JSON file there is not an evaluation."""
    evaluations = map(records.read, records.files_in(reports))
    served = map(served_records.read, records.files_in(reports / "served"))
    return Kept([*of_drafters(evaluations), *of_servers(served)])


def last_of_each(reports: Path) -> dict[str, list[DrafterResult]]:
    """The results of the last evaluation of each drafter; of earlier runs only the headings are read.

    DataError if a JSON file among the reports is not an evaluation.
    """
    headed_files = [(records.heading(file), file) for file in records.files_in(reports)]
    last_measured: dict[str, str] = {}
    for heading, _ in headed_files:
        before = last_measured.get(heading.drafter, "")
        last_measured[heading.drafter] = max(before, heading.measured)
    # With the others of a run and with later runs, which may contradict one of them.
    first_of_last = min(last_measured.values(), default="")
    of_last_runs = [
        records.read(file)
        for heading, file in headed_files
        if heading.measured >= first_of_last
    ]
    results: dict[str, list[DrafterResult]] = {name: [] for name in last_measured}
    for result in of_drafters(of_last_runs):
        if result.evaluation.measured == last_measured[result.drafter]:
            results[result.drafter].append(result)
    return results


def check(reports: Path, model: str) -> None:
    """DataError if there are no evaluations."""
    if records.files_in(reports) or records.files_in(reports / "served"):
        return
    raise DataError(
        f"no evaluations in {shown(reports)}: evaluate a drafter first with "
        f"`vlmdistill eval DRAFTER... --model {model}`"
    )


def latest(reports: Path, model: str, where: Sequence[str] = ()) -> Kept:
    """The latest of each kind among those selected; DataError if there are none."""
    check(reports, model)
    return read(reports).where(where).latest


def distinguished(
    sides: Sequence[Sequence[DrafterResult]],
) -> list[list[DrafterResult]]:
    """The results, each named by its drafter and by facts that tell the evaluations of that drafter apart.

    Facts tell apart what is on one side: evaluations that differ only by their side get the same name, so
    that they can be compared.
    """
    results = [result for side in sides for result in side]
    label_of: dict[int, str] = {}  # by the id of an evaluation
    for drafter in {result.drafter for result in results}:
        drafter_sides = [_evaluations_of(drafter, side) for side in sides]
        facts = distinguishing_facts(drafter_sides)
        for evaluation in chain.from_iterable(drafter_sides):
            label_of[id(evaluation)] = labelled(evaluation, facts)
    # One renamed evaluation for all results that share it.
    renamed: dict[int, Evaluation] = {}
    for result in results:
        evaluation = result.evaluation
        label = label_of[id(evaluation)]
        if label != evaluation.name and id(evaluation) not in renamed:
            renamed[id(evaluation)] = replace(evaluation, name=label)
    return [[_renamed(result, renamed) for result in side] for side in sides]


def _evaluations_of(drafter: str, results: Iterable[DrafterResult]) -> list[Evaluation]:
    return [result.evaluation for result in results if result.drafter == drafter]


def _renamed(result: DrafterResult, renamed: dict[int, Evaluation]) -> DrafterResult:
    """The result of the renamed evaluation, if it was renamed."""
    evaluation = renamed.get(id(result.evaluation), result.evaluation)
    return replace(result, evaluation=evaluation)


def distinguishing_facts(sides: Sequence[Sequence[Evaluation]]) -> list[str]:
    """The names of facts that tell a drafter's evaluations apart within each side.

    A fact is taken, in the order of `_labels`, if it tells evaluations apart that the facts before it do not.
    """
    labels = [[_labels(evaluation) for evaluation in side] for side in sides]
    names: dict[str, None] = {}  # in order, each once
    for evaluation_labels in chain.from_iterable(labels):
        names |= dict.fromkeys(evaluation_labels)
    facts: list[str] = []
    for name in names:
        if _distinct(labels, [*facts, name]) != _distinct(labels, facts):
            facts.append(name)
    return facts


def _distinct(
    sides: Sequence[Sequence[dict[str, str]]], facts: Sequence[str]
) -> list[int]:
    """For each side, how many different evaluations it has if only these facts count."""
    counts = []
    for side in sides:
        different = {tuple(map(labels.get, facts)) for labels in side}
        counts.append(len(different))
    return counts


def labelled(evaluation: Evaluation, facts: Sequence[str]) -> str:
    """The drafter's name with these facts; the tree stays if the evaluation's name has it."""
    drafter, at, _ = evaluation.name.partition("@")
    shown_facts = {*facts, "tree"} if at else {*facts}
    labels = _labels(evaluation)
    shown_labels = [labels[name] for name in labels if name in shown_facts]
    return drafter + "".join(shown_labels)


def _labels(evaluation: Evaluation) -> dict[str, str]:
    """By fact, the text that adds it to a drafter's name; the facts that say most to a reader first."""
    settings = conditions(evaluation)
    labels = {"title": f" ({evaluation.title})" if evaluation.title else ""}
    labels["tree"] = f"@{evaluation.tree}"
    labels["prompts"] = f" [prompts {settings.pop('prompts')}]"
    for name, value in settings.items():
        labels[name] = f" [{name} {value}]"
    return labels
