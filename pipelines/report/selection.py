"""Which evaluations a report shows: of all that are kept, the latest of each kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    *("name", "measured", "drafter", "prompts", "dataset"),
    *("temperature", "tree", "tau", "speedup", "machine"),
)
"""The columns that `eval --list` prints."""


@dataclass(frozen=True)
class Kept:
    """Results of drafters, then those of servers; of each, the latest first."""

    results: Sequence[DrafterResult | ServerResult]

    @property
    def own(self) -> list[DrafterResult]:
        """Those of drafters."""
        return [result for result in self.results if isinstance(result, DrafterResult)]

    @property
    def served(self) -> list[ServerResult]:
        """Those of servers."""
        return [result for result in self.results if isinstance(result, ServerResult)]

    @property
    def table(self) -> pl.DataFrame:
        """A row of columns for each."""
        rows = [result.facts for result in self.results]
        return pl.DataFrame(rows, infer_schema_length=None)

    def where(self, conditions: Sequence[str]) -> "Kept":
        """Those for which all expressions are true (`stores.views.expressions`).

        Raises:
            StoreError: An expression has a mistake.
            DataError: None is left.
        """
        if not conditions:
            return self
        table = self.table
        selected = [True] * len(self.results)
        if selected:
            for text in conditions:
                expression = expressions.where(
                    text, table.columns, listed="eval --list --json"
                )
                matches = expression.keep(table)
                selected = [
                    before and bool(match)
                    for before, match in zip(selected, matches, strict=True)
                ]
        if not any(selected):
            raise DataError(
                f"--where: none of the {len(selected)} measurements matches: see `eval --list`"
            )
        pairs = zip(self.results, selected, strict=True)
        return Kept([result for result, is_selected in pairs if is_selected])

    @property
    def latest(self) -> "Kept":
        """The latest of each kind."""
        last = {result.kind: result for result in reversed(self.results)}
        return Kept([result for result in self.results if last[result.kind] is result])


def read(reports: Path) -> Kept:
    """All evaluations that a workspace keeps; DataError if a JSON file there is not an evaluation."""
    own = map(records.read, records.files_in(reports))
    servers = map(served_records.read, records.files_in(reports / "served"))
    return Kept([*of_drafters(own), *of_servers(servers)])


def last_of_each(reports: Path) -> dict[str, list[DrafterResult]]:
    """The results of the last evaluation of each drafter; of the others only the headings are read.

    DataError as of `read`.
    """
    headings = [(records.heading(file), file) for file in records.files_in(reports)]
    last_measured: dict[str, str] = {}
    for heading, _ in headings:
        before = last_measured.get(heading.drafter, "")
        last_measured[heading.drafter] = max(before, heading.measured)
    results: dict[str, list[DrafterResult]] = {name: [] for name in last_measured}
    for heading, file in headings:
        if heading.measured == last_measured[heading.drafter]:
            results[heading.drafter] += of_drafters([records.read(file)])
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
    """The same results, each named by its drafter and the facts that distinguish its results.

    Results are told apart within a side only: those of one drafter on both sides get the same name, so
    that they can be compared.
    """
    labels: dict[int, str] = {}  # by the id of an evaluation
    for drafter in {result.drafter for side in sides for result in side}:
        own_sides = [_evaluations_of(drafter, side) for side in sides]
        facts = distinguishing_facts(own_sides)
        for evaluation in (evaluation for side in own_sides for evaluation in side):
            labels[id(evaluation)] = labelled(evaluation, facts)
    renamed: dict[int, Evaluation] = {}
    for result in (result for side in sides for result in side):
        evaluation = result.evaluation
        label = labels[id(evaluation)]
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
    """The facts that tell a drafter's evaluations apart within each side, as few as possible.

    A fact is added, in the order of `_labels`, if it splits evaluations that those before it do not.
    """
    labels = [[_labels(evaluation) for evaluation in side] for side in sides]
    names = dict.fromkeys(name for side in labels for one in side for name in one)
    facts: list[str] = []
    for name in names:
        if _groups(labels, [*facts, name]) != _groups(labels, facts):
            facts.append(name)
    return facts


def _groups(
    sides: Sequence[Sequence[dict[str, str]]], facts: Sequence[str]
) -> list[int]:
    """How many different evaluations of each side these facts tell apart."""
    return [len({tuple(map(labels.get, facts)) for labels in side}) for side in sides]


def labelled(evaluation: Evaluation, facts: Sequence[str]) -> str:
    """The drafter's name with these facts; a name that has its tree keeps it."""
    drafter, at, _ = evaluation.name.partition("@")
    shown_facts = {*facts, "tree"} if at else {*facts}
    labels = _labels(evaluation)
    return drafter + "".join(labels[name] for name in labels if name in shown_facts)


def _labels(evaluation: Evaluation) -> dict[str, str]:
    """Each fact that can distinguish evaluations of a drafter, as its name shows it; the plainest first."""
    settings = conditions(evaluation)
    labels = {"title": f" ({evaluation.title})" if evaluation.title else ""}
    labels["tree"] = f"@{evaluation.tree}"
    labels["prompts"] = f" [prompts {settings.pop('prompts')}]"
    for name, value in settings.items():
        labels[name] = f" [{name} {value}]"
    return labels
