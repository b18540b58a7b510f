"""The evaluations that are kept, and those of them that a report is of: the latest of each kind."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import polars as pl

from vlmdistill.pipelines.bench import records, served_records
from vlmdistill.pipelines.bench.records import Evaluation, Measurement
from vlmdistill.pipelines.bench.served_records import ServedEvaluation, ServedLoad, load_figures
from vlmdistill.pipelines.bench.statistics import rates
from vlmdistill.pipelines.media.urls import shown
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.views import expressions

CONDITIONS: dict[str, Callable[[Evaluation], str]] = {
    "target": lambda one: f"{one.target.short_name} ({one.target.fingerprint})",
    "hardware": lambda one: one.hardware,
    "dtype": lambda one: one.dtype,
    "threads": lambda one: str(one.threads),
    "attention": lambda one: one.attention or "not recorded",
    "compiled": lambda one: {True: "yes", False: "no", None: "not recorded"}[one.compiled],
    "prompts": lambda one: f"{len(one.keys)} ({one.prompt_set})",
    "max new tokens": lambda one: str(one.max_new_tokens),
}
"""What must be equal to compare two evaluations."""
LISTED: Final = (
    *("name", "measured", "drafter", "prompts", "dataset"),
    *("temperature", "tree", "tau", "speedup", "machine"),
)
"""The columns that `eval --list` prints."""


@dataclass(frozen=True)
class Measured:
    """A drafter at one temperature."""

    evaluation: Evaluation
    at: Measurement

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Of two measurements of one kind, a report has the latest."""
        one = self.evaluation
        conditions = (value(one) for value in CONDITIONS.values())
        return _drafter(one), one.title, one.tree, *conditions, self.at.temperature

    @property
    def facts(self) -> dict[str, Any]:
        """Its columns."""
        one = self.evaluation
        return {
            "name": one.title,
            "measured": one.measured,
            "drafter": _drafter(one),
            "method": one.drafter,
            "target": one.target.short_name,
            "prompts": len(one.keys),
            "dataset": ", ".join(sorted({prompt.dataset for prompt in self.at.prompts})),
            "prompt_set": one.prompt_set,
            "temperature": float(self.at.temperature),
            "tree": one.tree,
            "max_new_tokens": one.max_new_tokens,
            "seed": one.seed,
            "engine": "transformers",
            "machine": one.hardware,
            "threads": one.threads,
            "dtype": one.dtype,
            "attention": one.attention,
            "compiled": one.compiled,
            "parameters": one.parameters,
            "commit": one.software and one.software.commit,
            **{str(name): value for name, value in rates(self.at).items()},
        }


@dataclass(frozen=True)
class MeasuredServer:
    """A server at one temperature and concurrency."""

    evaluation: ServedEvaluation
    at: ServedLoad

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """As of `Measured`."""
        one = self.evaluation
        settings = one.model, one.drafter, one.prompt_set, one.max_new_tokens
        return "server", one.name, *settings, self.at.temperature, self.at.concurrency

    @property
    def facts(self) -> dict[str, Any]:
        """Its columns; a condition that `Measured` has and a server does not tell is missing."""
        one, found = self.evaluation, load_figures(self.at)
        return {
            "name": one.name,
            "measured": one.measured,
            "drafter": one.drafter or one.name,
            "target": one.model,
            "prompts": found.server.requests,
            "prompt_set": one.prompt_set,
            "temperature": float(self.at.temperature),
            "max_new_tokens": one.max_new_tokens,
            "seed": one.seed,
            "engine": one.url,
            "concurrency": self.at.concurrency,
            "commit": one.software and one.software.commit,
            "tau": found.server.tau,
            "accepted": found.server.accepted,
            "speedup": found.speedup,
            "decode_speedup": found.decode_speedup,
        }


@dataclass(frozen=True)
class Kept:
    """Measurements of drafters and of servers, the latest first."""

    own: list[Measured]
    served: list[MeasuredServer]

    @property
    def table(self) -> pl.DataFrame:
        """A row of columns for each, the drafters first."""
        rows = [*(one.facts for one in self.own), *(one.facts for one in self.served)]
        return pl.DataFrame(rows, infer_schema_length=None)

    def where(self, conditions: Sequence[str]) -> "Kept":
        """Those for which all expressions are true (`stores.views.expressions`).

        StoreError on a mistake in an expression, DataError if none is left.
        """
        table, found = self.table, [True] * (len(self.own) + len(self.served))
        for text in conditions if found else ():
            kept = expressions.where(text, table.columns, listed="eval --list --json").keep(table)
            found = [before and bool(now) for before, now in zip(found, kept, strict=True)]
        if conditions and not any(found):
            raise DataError(f"--where: none of the {len(found)} measurements matches: see `eval --list`")
        own, served = found[: len(self.own)], found[len(self.own) :]
        return Kept(
            [one for one, keep in zip(self.own, own, strict=True) if keep],
            [one for one, keep in zip(self.served, served, strict=True) if keep],
        )

    @property
    def latest(self) -> "Kept":
        """The latest of each kind."""
        own = {one.kind: one for one in reversed(self.own)}
        served = {one.kind: one for one in reversed(self.served)}
        return Kept(
            [one for one in self.own if own[one.kind] is one],
            [one for one in self.served if served[one.kind] is one],
        )

    @property
    def servers(self) -> list[ServedEvaluation]:
        """The evaluations of servers, each with the loads that are selected."""
        loads: dict[int, list[MeasuredServer]] = {}
        for one in self.served:
            loads.setdefault(id(one.evaluation), []).append(one)
        found = [replace(some[0].evaluation, loads=tuple(one.at for one in some)) for some in loads.values()]
        return sorted(found, key=lambda one: one.name)


def read(reports: Path) -> Kept:
    """All evaluations that a workspace keeps; DataError if a JSON file there is not an evaluation."""
    files = records.files_in(reports / "served")
    servers = sorted(map(served_records.read, files), key=lambda one: one.measured)[::-1]
    own = of(map(records.read, records.files_in(reports))).own
    return Kept(own, [MeasuredServer(one, load) for one in servers for load in one.loads])


def last_of_each(reports: Path) -> dict[str, list[Measured]]:
    """The measurements of the last evaluation of each drafter; of the others only the headings are read.

    DataError as of `read`.
    """
    headings = {file: records.heading(file) for file in records.files_in(reports)}
    last: dict[str, str] = {}
    for one in headings.values():
        last[one.drafter] = max(last.get(one.drafter, ""), one.measured)
    found: dict[str, list[Measured]] = {name: [] for name in last}
    for file, one in headings.items():
        if one.measured == last[one.drafter]:
            found[one.drafter] += of([records.read(file)]).own
    return found


def of(evaluations: Iterable[Evaluation]) -> Kept:
    """All measurements of evaluations that were read in the order of their files."""
    ordered = sorted(evaluations, key=lambda one: one.measured)[::-1]
    return Kept([Measured(one, at) for one in ordered for at in one.temperatures], [])


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


def distinguished(sides: Sequence[Sequence[Measured]]) -> Iterator[list[Measured]]:
    """The same, where a drafter's name says also what tells its measurements on one side apart."""
    told: dict[str, list[str]] = {}  # for each drafter, the fewest facts that tell its measurements apart
    for drafter in {_drafter(one.evaluation) for side in sides for one in side}:
        some = [[one.evaluation for one in side if _drafter(one.evaluation) == drafter] for side in sides]

        def apart(names: Sequence[str], some: Sequence[Sequence[Evaluation]] = some) -> list[int]:
            return [len({tuple(_TOLD[name](one) for name in names) for one in side}) for side in some]

        told[drafter] = found = list[str]()
        for name in _TOLD:
            if apart([*found, name]) != apart(found):
                found.append(name)
    for side in sides:
        made: dict[int, Evaluation] = {}
        for one in (one.evaluation for one in side):
            facts = {*told[_drafter(one)], *(["tree"] if "@" in one.name else [])}
            name = _drafter(one) + "".join(value(one) for fact, value in _TOLD.items() if fact in facts)
            made.setdefault(id(one), one if name == one.name else replace(one, name=name))
        yield [replace(one, evaluation=made[id(one.evaluation)]) for one in side]


def _drafter(one: Evaluation) -> str:
    """The drafter's name without its tree."""
    return one.name.partition("@")[0]


def _told(name: str, value: Callable[[Evaluation], str]) -> Callable[[Evaluation], str]:
    return lambda one: f" [{name} {value(one)}]"


_TOLD: dict[str, Callable[[Evaluation], str]] = {
    "title": lambda one: f" ({one.title})" if one.title else "",
    "tree": lambda one: f"@{one.tree}",
    "prompts": _told("prompts", CONDITIONS["prompts"]),
    **{name: _told(name, value) for name, value in CONDITIONS.items()},
}
