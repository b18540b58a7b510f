"""The evaluations that are kept, and those of them that a report is of: the latest of each kind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import polars as pl

from vlmdistill.pipelines.bench import records, served_records
from vlmdistill.pipelines.bench.records import Evaluation
from vlmdistill.pipelines.media.urls import shown
from vlmdistill.pipelines.report.results import (
    CONDITIONS,
    DrafterResult,
    ServerResult,
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
        return [one for one in self.results if isinstance(one, DrafterResult)]

    @property
    def served(self) -> list[ServerResult]:
        """Those of servers."""
        return [one for one in self.results if isinstance(one, ServerResult)]

    @property
    def table(self) -> pl.DataFrame:
        """A row of columns for each."""
        return pl.DataFrame(
            [one.facts for one in self.results], infer_schema_length=None
        )

    def where(self, conditions: Sequence[str]) -> "Kept":
        """Those for which all expressions are true (`stores.views.expressions`).

        StoreError on a mistake in an expression, DataError if none is left.
        """
        if not conditions:
            return self
        table, found = self.table, [True] * len(self.results)
        for text in conditions if found else ():
            kept = expressions.where(
                text, table.columns, listed="eval --list --json"
            ).keep(table)
            found = [
                before and bool(now) for before, now in zip(found, kept, strict=True)
            ]
        if not any(found):
            raise DataError(
                f"--where: none of the {len(found)} measurements matches: see `eval --list`"
            )
        return Kept(
            [one for one, keep in zip(self.results, found, strict=True) if keep]
        )

    @property
    def latest(self) -> "Kept":
        """The latest of each kind."""
        last = {one.kind: one for one in reversed(self.results)}
        return Kept([one for one in self.results if last[one.kind] is one])


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
    last = {
        one.drafter: one.measured
        for one, _ in sorted(headings, key=lambda found: found[0].measured)
    }
    found: dict[str, list[DrafterResult]] = {name: [] for name in last}
    for one, file in headings:
        if one.measured == last[one.drafter]:
            found[one.drafter] += of_drafters([records.read(file)])
    return found


def check(reports: Path, model: str) -> None:
    """DataError if there are no evaluations."""
    if not records.files_in(reports) and not records.files_in(reports / "served"):
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
) -> Iterator[list[DrafterResult]]:
    """The same, where a drafter's name says also what tells its results on one side apart."""
    told: dict[
        str, list[str]
    ] = {}  # for each drafter, the fewest facts that tell its results apart
    for drafter in {one.drafter for side in sides for one in side}:
        some = [
            [one.evaluation for one in side if one.drafter == drafter] for side in sides
        ]

        def apart(
            names: Sequence[str], some: Sequence[Sequence[Evaluation]] = some
        ) -> list[int]:
            return [
                len({tuple(_TOLD[name](one) for name in names) for one in side})
                for side in some
            ]

        told[drafter] = found = list[str]()
        for name in _TOLD:
            if apart([*found, name]) != apart(found):
                found.append(name)
    for side in sides:
        made: dict[int, Evaluation] = {}
        for result in side:
            one = result.evaluation
            facts = {*told[result.drafter], *(["tree"] if "@" in one.name else [])}
            name = result.drafter + "".join(
                value(one) for fact, value in _TOLD.items() if fact in facts
            )
            made.setdefault(
                id(one), one if name == one.name else replace(one, name=name)
            )
        yield [
            replace(result, evaluation=made[id(result.evaluation)]) for result in side
        ]


def _told(name: str, value: Callable[[Evaluation], str]) -> Callable[[Evaluation], str]:
    return lambda one: f" [{name} {value(one)}]"


_TOLD: dict[str, Callable[[Evaluation], str]] = {
    "title": lambda one: f" ({one.title})" if one.title else "",
    "tree": lambda one: f"@{one.tree}",
    "prompts": _told("prompts", CONDITIONS["prompts"]),
    **{name: _told(name, value) for name, value in CONDITIONS.items()},
}
