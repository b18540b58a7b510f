"""What a report is of: results of drafters, each at one temperature, and of servers, each under one load."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from vlmdistill.pipelines.bench.records import Evaluation, Measurement, PromptResult
from vlmdistill.pipelines.bench.served_records import (
    LoadFigures,
    ServedEvaluation,
    ServedLoad,
    load_figures,
)
from vlmdistill.pipelines.bench.statistics import (
    OF_CYCLES,
    Figures,
    Rate,
    figures,
    rates,
)

CONDITIONS: dict[str, Callable[[Evaluation], str]] = {
    "target": lambda one: f"{one.target.short_name} ({one.target.fingerprint})",
    "hardware": lambda one: one.hardware,
    "dtype": lambda one: one.dtype,
    "threads": lambda one: str(one.threads),
    "attention": lambda one: one.attention or "not recorded",
    "compiled": lambda one: {True: "yes", False: "no", None: "not recorded"}[
        one.compiled
    ],
    "thinking": lambda one: one.thinking or "as the template",
    "torch": lambda one: one.software.torch if one.software else "not recorded",
    "transformers": lambda one: (
        one.software.transformers if one.software else "not recorded"
    ),
    "prompts": lambda one: f"{len(one.keys)} ({one.prompt_set})",
    "max new tokens": lambda one: str(one.max_new_tokens),
}
"""What must be equal to compare two evaluations."""

E = TypeVar("E", Evaluation, ServedEvaluation)


@dataclass(frozen=True, repr=False)
class DrafterResult:
    """One drafter at one temperature."""

    evaluation: Evaluation
    measurement: Measurement
    beside: tuple[str, ...] = ()  # doubts from other results of its run

    def __repr__(self) -> str:
        """Its rates and their intervals; the numbers of each prompt are in `measurement`."""
        found = self.figures
        shown = [f"tau {found.tau:.2f}", f"speedup {found.speedup:.2f}"]
        if within := found.intervals.get("speedup"):
            shown[-1] += f" ({within.low:.2f} to {within.high:.2f})"
        if not found.calls:
            shown = ["nothing was drafted"]
        if not self.evaluation.lossless:
            shown.append("NOT LOSSLESS")
        if self.failures:
            shown.append("its counts contradict each other")
        if self.doubts:
            shown.append(f"in doubt: {self.doubts[0]}")
        where = f"{found.prompts} prompts at temperature {self.temperature:g}"
        return f"{self.name} on {where}: {', '.join(shown)}"

    @cached_property
    def figures(self) -> Figures:
        """The metrics, with their intervals."""
        return figures(self.measurement)

    @property
    def name(self) -> str:
        """The drafter's name, and what tells its results apart."""
        return self.evaluation.name

    @property
    def drafter(self) -> str:
        """The name without its tree."""
        return self.name.partition("@")[0]

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.measurement.temperature

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Of two results of one kind, a report has the latest."""
        one = self.evaluation
        conditions = (value(one) for value in CONDITIONS.values())
        return self.drafter, one.title, one.tree, *conditions, self.temperature

    @property
    def facts(self) -> dict[str, Any]:
        """Its columns."""
        one = self.evaluation
        return {
            "name": one.title,
            "measured": one.measured,
            "drafter": self.drafter,
            "method": one.drafter,
            "target": one.target.short_name,
            "prompts": len(one.keys),
            "dataset": ", ".join(
                sorted({prompt.dataset for prompt in self.measurement.prompts})
            ),
            "prompt_set": one.prompt_set,
            "temperature": float(self.temperature),
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
            "weights": one.weights,
            "commit": one.software and one.software.commit,
            **self._rates,
        }

    @property
    def _rates(self) -> dict[str, float | None]:
        """None: there is no such rate, as nothing was drafted."""
        drafted = any(prompt.drafted.calls for prompt in self.measurement.prompts)
        return {
            str(name): value if drafted or name not in OF_CYCLES else None
            for name, value in rates(self.measurement).items()
        }

    def against_plain(
        self, rate: Rate
    ) -> Literal["faster", "slower", "equal", "unknown"]:
        """Whether it is significantly faster or slower than plain decoding, by a speedup."""
        found = self.figures.intervals.get(rate)
        if found is None:
            return "unknown"
        if found.low > 1:
            return "faster"
        return "slower" if found.high < 1 else "equal"

    @cached_property
    def doubts(self) -> list[str]:
        """Why its speedup may not be one, so that no verdict rests on it; part of the warnings."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        of_run = audit.doubts_of_run(self.evaluation)
        return [
            *self.figures.doubts,
            *self.beside,
            *of_run,
            *audit.leaked(self.evaluation),
        ]

    @property
    def warnings(self) -> list[str]:
        """Problems of its figures."""
        return [
            f"{self.name} at temperature {self.temperature:g}: {one}"
            for one in self.figures.warnings
        ]

    @cached_property
    def failures(self) -> list[str]:
        """What cannot be true of its evaluation; see `audit.py`."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        return audit.failures(self.evaluation)

    def by(self, label: Callable[[PromptResult], str]) -> "dict[str, DrafterResult]":
        """Its results on the prompts of each label, such as their kind or dataset."""
        return {
            name: DrafterResult(self.evaluation, at)
            for name, at in self.measurement.by(label).items()
        }


@dataclass(frozen=True)
class ServerResult:
    """One server at one temperature and concurrency."""

    evaluation: ServedEvaluation
    load: ServedLoad

    @cached_property
    def figures(self) -> LoadFigures:
        """As of `DrafterResult`."""
        return load_figures(self.load)

    @property
    def drafter(self) -> str:
        """Its drafter; the server's name if it does not tell."""
        return self.evaluation.drafter or self.evaluation.name

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """As of `DrafterResult`."""
        one = self.evaluation
        settings = one.model, one.drafter, one.prompt_set, one.max_new_tokens
        return (
            "server",
            one.name,
            *settings,
            self.load.temperature,
            self.load.concurrency,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Its columns; a condition that `DrafterResult` has and a server does not tell is missing."""
        one, found = self.evaluation, self.figures
        return {
            "name": one.name,
            "measured": one.measured,
            "drafter": self.drafter,
            "target": one.model,
            "prompts": found.server.requests,
            "prompt_set": one.prompt_set,
            "temperature": float(found.temperature),
            "max_new_tokens": one.max_new_tokens,
            "seed": one.seed,
            "engine": one.url,
            "concurrency": found.concurrency,
            "commit": one.software and one.software.commit,
            "tau": found.server.tau,
            "accepted": found.server.accepted,
            "speedup": found.speedup,
            "decode_speedup": found.decode_speedup,
        }

    @property
    def warnings(self) -> list[str]:
        """As of `DrafterResult`."""
        found = self.figures
        return [
            f"{self.drafter} at temperature {found.temperature:g}: {one}"
            for one in found.warnings
        ]


def of_drafters(evaluations: Iterable[Evaluation]) -> list[DrafterResult]:
    """The results of evaluations that are in the order of their files; the latest first."""
    return [
        DrafterResult(one, at)
        for one in _latest_first(evaluations)
        for at in one.temperatures
    ]


def of_servers(evaluations: Iterable[ServedEvaluation]) -> list[ServerResult]:
    """As `of_drafters`."""
    return [
        ServerResult(one, load)
        for one in _latest_first(evaluations)
        for load in one.loads
    ]


def _latest_first(evaluations: Iterable[E]) -> list[E]:
    return sorted(evaluations, key=lambda one: one.measured)[::-1]
