"""Compares drafters: groups evaluations measured under the same conditions, ranks each group by speedup.

A drafter is called the fastest only if its lead is larger than the noise of the prompts
(`statistics.advantage`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from vlmdistill.pipelines.bench import audit
from vlmdistill.pipelines.bench.records import Decoding, Evaluation, PromptResult
from vlmdistill.pipelines.bench.statistics import (
    BUSY,
    FEWEST,
    FEWEST_OF_KIND,
    Checks,
    Interval,
    Rate,
    advantage,
    drift,
)
from vlmdistill.pipelines.report.results import CONDITIONS, DrafterResult, of_drafters
from vlmdistill.pipelines.report.selection import distinguished

SPEEDUPS: Final[tuple[Rate, ...]] = ("speedup", "cpu_speedup")
MOSTLY: Final = 0.5  # of the CPU: below, speeds are those of other programs


@dataclass(frozen=True)
class Verdict:
    """The result of the losslessness check at temperature 0, in a sentence."""

    level: Literal["lossless", "near-ties", "broken", "unchecked"]
    text: str


@dataclass(frozen=True)
class Ranking:
    """The drafters of a group at one temperature, by speedup."""

    results: tuple[DrafterResult, ...]  # the fastest first

    @cached_property
    def ranked(self) -> tuple[DrafterResult, ...]:
        """Those that can be the fastest: they are lossless, their counts agree and no warning doubts them."""
        return tuple(
            one
            for one in self.results
            if one.evaluation.lossless and not one.failures and not one.doubts
        )

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.results[0].temperature

    @cached_property
    def speed(self) -> Rate:
        """The speedup that ranks them."""
        return speed_of(self.results)

    @cached_property
    def leaders(self) -> tuple[DrafterResult, ...]:
        """The fastest drafter, and those not significantly slower; none if none is ranked."""
        return self.best(self.speed)

    def best(self, rate: Rate) -> tuple[DrafterResult, ...]:
        """The drafter with the highest rate, and those not significantly worse, the highest first."""
        if not self.ranked:
            return ()
        first, *others = sorted(self.ranked, key=lambda one: -rate_of(one, rate))
        beyond = [advantage(first.measurement, one.measurement, rate) for one in others]
        close = [
            one
            for one, by in zip(others, beyond, strict=True)
            if by is None or by.low <= 1
        ]
        return (first, *close)

    def marked(self, rate: Rate) -> tuple[DrafterResult, ...]:
        """Those of `best` that a table may mark: with no speedup of a busy CPU, nor one below 1."""
        is_speedup = rate in SPEEDUPS
        if is_speedup and (self.disturbed or rate != self.speed):
            return ()
        best = self.best(rate)
        slower = bool(best) and rate_of(best[0], rate) < 1
        return () if is_speedup and slower else best

    @property
    def winner(self) -> DrafterResult | None:
        """The drafter that is significantly faster than all others; None if there is none or it is alone."""
        if len(self.ranked) < 2 or len(self.leaders) != 1 or self.disturbed:
            return None
        (leader,) = self.leaders
        return leader if rate_of(leader, self.speed) >= 1 else None

    @property
    def disturbed(self) -> bool:
        """Other programs had most of the CPU: no drafter can be called the fastest."""
        shares = [
            one.figures.cpu_share
            for one in self.ranked
            if one.figures.cpu_share is not None
        ]
        return bool(shares) and min(shares) < MOSTLY

    @property
    def against_plain(self) -> Literal["faster", "slower", "equal", "unknown"]:
        """Whether the fastest is significantly faster or slower than plain decoding."""
        return self.leaders[0].against_plain(self.speed) if self.leaders else "unknown"

    @property
    def text(self) -> str:
        """The ranking in a sentence, with 95% intervals."""
        return " ".join([*self._verdict, *self._left_out])

    @property
    def _verdict(self) -> Iterator[str]:
        """Which drafter is the fastest, and whether it is faster than plain decoding."""
        prefix = f"At temperature {self.temperature:g}"
        if not self.leaders:
            yield f"{prefix}, no drafter is ranked."
            return
        first, count = self.leaders[0], self.results[0].figures.prompts
        if self.speed == "cpu_speedup" and not self.disturbed:
            prefix += " and in CPU seconds, since other programs had a part of the CPU"
        if self.disturbed:
            yield f"{prefix}, other programs had most of the CPU: no drafter is called the fastest."
        elif len(self.leaders) > 1:
            named = [f"{one.name} {self._speedup(one)}" for one in self.leaders[:4]]
            more = len(self.leaders) - len(named)
            names = ", ".join(named) + (f", and {more} more" if more else "")
            yield f"{prefix}, {count} prompts do not separate the fastest drafters: speedup {names}."
        elif self.winner:
            second = self.ranked[1]
            by = advantage(first.measurement, second.measurement, self.speed)
            lead = rate_of(first, self.speed) / max(rate_of(second, self.speed), 1e-9)
            yield (
                f"{prefix}, {first.name} is the fastest drafter: speedup {self._speedup(first)}, "
                f"{lead:.2f} times{_within(by)} as fast as {second.name}, the second."
            )
        else:
            yield f"{prefix}, {first.name} has a speedup of {self._speedup(first)}."
        yield from {
            "faster": [],
            "slower": ["No drafter is faster than plain decoding."],
            "equal": [
                f"On {count} prompts, {first.name} is not significantly faster than plain decoding."
            ],
            "unknown": [
                f"Fewer than {FEWEST} prompts, or {FEWEST_OF_KIND} of a kind, are too few for intervals."
            ],
        }[self.against_plain]

    @property
    def _left_out(self) -> Iterator[str]:
        """Which drafters are not ranked, and why."""
        if odd := [one.name for one in self.results if not one.evaluation.lossless]:
            yield f"Not ranked, since not lossless: {', '.join(odd)}."
        if odd := [one.name for one in self.results if one.failures]:
            yield f"Not ranked, since their counts contradict each other: {', '.join(odd)}."
        for one in self.results:
            if one.doubts and one.evaluation.lossless and not one.failures:
                yield f"Not ranked, {one.name}: {'; '.join(one.doubts)}."
            if (leak := one.evaluation.leak) and leak.keys:
                yield f"{one.name} was trained on {len(leak.keys)} of these prompts, or on their media."

    def _speedup(self, one: DrafterResult) -> str:
        return f"{rate_of(one, self.speed):.2f}{_within(one.figures.intervals.get(self.speed))}"


@dataclass(frozen=True)
class Group:
    """Evaluations measured under the same conditions."""

    number: int
    conditions: dict[str, str]
    measured: list[DrafterResult]

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Those that the results are from, the latest first."""
        return [*{id(one.evaluation): one.evaluation for one in self.measured}.values()]

    @cached_property
    def rankings(self) -> list[Ranking]:
        """One for each temperature, the lowest first."""
        return ranked(self.measured)

    @property
    def results(self) -> list[DrafterResult]:
        """Every drafter at every temperature: the lowest temperature first, then the fastest drafter."""
        return [one for ranking in self.rankings for one in ranking.results]

    def by(
        self, label: Callable[[PromptResult], str]
    ) -> dict[str, list[DrafterResult]]:
        """The results on the prompts of each label, such as their dataset; in the order of `results`."""
        divided = [one.by(label) for one in self.results]
        names = sorted({name for parts in divided for name in parts})
        return {
            name: [parts[name] for parts in divided if name in parts] for name in names
        }

    @property
    def facts(self) -> dict[str, str]:
        """The machine, its calibrations, versions, commits and commands; empty if they were not recorded."""
        found: dict[str, dict[str, None]] = {}
        for one in self.evaluations:
            facts = {"machine": one.machine.details} if one.machine else {}
            if baseline := _baseline(one):
                facts["plain decoding"] = baseline
            if one.weights:
                facts["weights"] = f"{one.name.partition('@')[0]} sha256:{one.weights}"
            if one.again:
                facts["decoded again"] = (
                    f"{len(one.again)} prompts, in a process that had seen none"
                )
            if one.calibrations:
                facts["calibration"] = ", then ".join(
                    at.text for at in one.calibrations
                )
            for name, value in (
                facts | (one.software.facts if one.software else {})
            ).items():
                found.setdefault(name, {})[value] = None
        return {name: "; ".join(values) for name, values in found.items()}

    @property
    def warnings(self) -> list[str]:
        """Problems of the figures, with the drafters' names, and of comparing them."""
        found = [warning for one in self.results for warning in one.warnings] + drifts(
            self.evaluations
        )
        found += dict.fromkeys(
            f"{one.name} could not be decoded again: {one.not_again}"
            for one in self.evaluations
            if one.not_again
        )
        if (runs := len({one.measured for one in self.evaluations})) > 1:
            found.append(
                f"these evaluations were measured in {runs} separate runs: the intervals do not contain the "
                "noise between runs"
            )
        return found

    @property
    def verdict(self) -> Verdict:
        """Whether every response at temperature 0 equals the target's own."""
        if failed := {one.name: one.failures for one in self.results if one.failures}:
            said = "; ".join(
                f"{name}: {', '.join(texts)}" for name, texts in failed.items()
            )
            return Verdict(
                "broken",
                f"THE COUNTS CONTRADICT EACH OTHER. Do not rely on these numbers. {said}.",
            )
        greedy = [one for one in self.results if one.temperature == 0]
        counts = [(one.name, one.figures.lossless) for one in greedy]
        counts += [("plain decoding", one.figures.plain_lossless) for one in greedy[:1]]
        if not any(count.total for _, count in counts):
            text = "Losslessness was not checked: nothing was decoded at temperature 0."
            return Verdict("unchecked", f"{text} {self.sampled}".rstrip())

        def affected(kind: Callable[[Checks], int]) -> str:
            return ", ".join(
                f"{name}: {kind(one)} of {one.total}"
                for name, one in counts
                if kind(one)
            )

        checked = {name for name, count in counts if count.total}
        missed = sorted({one.name for one in self.results} - checked)
        rest = f" Not checked: {', '.join(missed)}." if missed else ""
        if broken := affected(lambda count: count.different):
            return Verdict(
                "broken",
                "NOT LOSSLESS: responses at temperature 0 differ from the stock model's greedy ones "
                f"({broken} prompts). Do not rely on these numbers.{rest}",
            )
        if ties := affected(lambda count: count.near_tie):
            return Verdict(
                "near-ties",
                "At temperature 0, some responses differ from the stock model's greedy ones by near-ties: "
                f"two logits that are equal within the rounding of {self.conditions['dtype']} "
                f"({ties} prompts). All others are identical.{rest}",
            )
        most = max(count.total for _, count in counts)
        prompts = f"all {most} prompts" if most > 1 else "the only prompt"
        text = f"Responses at temperature 0 are the stock model's greedy ones on {prompts}.{rest}"
        return Verdict("lossless", f"{text} {self.sampled}".rstrip())

    @property
    def sampled(self) -> str:
        """What was checked of sampled responses, in a sentence; empty if there are none."""
        above = [one for one in self.results if one.temperature > 0]
        known = [
            off for one in above for off in audit.surprises(one.measurement).values()
        ]
        if not above:
            return ""
        if len(known) < 2 * len(above):
            return "The distribution of sampled responses was not checked."
        nats = max(abs(off.nats / off.tokens) for off in known)
        least = max(
            (audit.ERRORS * off.error + audit.NATS) / off.tokens for off in known
        )
        return (
            f"Sampled responses surprise the target as its own would, up to {nats:.3f} nats a token; "
            f"differences above {least:.3f} would be found."
        )


def drifts(evaluations: Sequence[Evaluation]) -> list[str]:
    """Warnings of runs in which the speed of the machine changed; evaluations of a run share calibrations."""
    runs = dict.fromkeys((one.measured, one.calibrations) for one in evaluations)
    found = [
        f"run of {measured}: {text}" for measured, at in runs for text in drift(at)
    ]
    slow = dict.fromkeys(
        (one.measured, text) for one in evaluations for text in audit.doubts_of_run(one)
    )
    leaks = [
        f"{one.name} has seen in training: {', '.join(one.leak.keys)}"
        for one in evaluations
        if one.leak and one.leak.keys
    ]
    unknown = [
        f"{one.name}: {text}"
        for one in evaluations
        for text in audit.unknown_training(one)
    ]
    slow_runs = [f"run of {measured}: {text}" for measured, text in slow]
    return [*found, *slow_runs, *leaks, *dict.fromkeys(unknown)]


def _baseline(evaluation: Evaluation) -> str:
    """What plain decoding was compared with; empty if with nothing."""
    found = audit.baseline(evaluation)
    facts = []
    if found.against_stock is not None:
        facts.append(f"{found.against_stock:.2f} times as fast as model.generate")
    if found.reads is not None:
        facts.append(
            f"a step takes as long as reading its weights {found.reads:.1f} times"
        )
    return ", ".join(facts)


def rank(alike: Sequence[Evaluation]) -> list[Ranking]:
    """Rank evaluations of one group at each temperature by speedup."""
    return ranked(of_drafters(alike))


def ranked(alike: Iterable[DrafterResult]) -> list[Ranking]:
    """Rank results that compare, at each temperature by speedup."""
    by_temperature: dict[float, list[DrafterResult]] = {}
    for one in alike:
        by_temperature.setdefault(one.temperature, []).append(one)
    rankings = []
    for _, alike_at in sorted(by_temperature.items()):
        results = _beside_each_other(alike_at)
        speed = speed_of(results)
        ordered = sorted(results, key=lambda one: (-rate_of(one, speed), one.name))
        rankings.append(Ranking(tuple(ordered)))
    return rankings


def _beside_each_other(results: Sequence[DrafterResult]) -> list[DrafterResult]:
    """The results at one temperature, with a doubt where those of a run have other plain decoding.

    The drafters of a run are measured beside the same one, so that one of their records was changed.
    """
    first: dict[object, Decoding] = {}
    odd = set[object]()
    for one in results:
        for prompt in one.measurement.prompts:
            plain = first.setdefault((_run(one), prompt.key), prompt.plain)
            if (plain.tokens, plain.seconds) != (
                prompt.plain.tokens,
                prompt.plain.seconds,
            ):
                odd.add(_run(one))
    doubt = (
        "records of its run differ in the numbers of plain decoding, which they share",
    )
    return [replace(one, beside=doubt) if _run(one) in odd else one for one in results]


def _run(one: DrafterResult) -> tuple[object, ...]:
    """The process that measured a result."""
    software = one.evaluation.software
    return one.evaluation.measured, software and software.command


def speed_of(results: Iterable[DrafterResult]) -> Rate:
    """The speedup that compares them: by the clock, or in CPU seconds where others had a part of the CPU."""
    figures = [one.figures for one in results]
    shared = any(one.cpu_share is not None and one.cpu_share < BUSY for one in figures)
    if shared and all(one.cpu_speedup is not None for one in figures):
        return "cpu_speedup"
    return "speedup"


def rate_of(one: DrafterResult, rate: Rate) -> float:
    """A rate; 0 if it was not measured."""
    return float(getattr(one.figures, rate) or 0.0)


def differing(groups: Sequence[Group]) -> list[str]:
    """The conditions that differ between groups; empty for a single group."""
    return [
        name
        for name in CONDITIONS
        if len({group.conditions[name] for group in groups}) > 1
    ]


def group(measured: Sequence[DrafterResult]) -> list[Group]:
    """Group the results that can be compared, the latest first."""
    alike: dict[tuple[str, ...], list[DrafterResult]] = {}
    for one in measured:
        alike.setdefault(
            tuple(value(one.evaluation) for value in CONDITIONS.values()), []
        ).append(one)
    return [
        Group(number, dict(zip(CONDITIONS, key, strict=True)), *distinguished([found]))
        for number, (key, found) in enumerate(alike.items(), 1)
    ]


def _within(interval: Interval | None) -> str:
    return f" (95%: {interval.low:.2f} to {interval.high:.2f})" if interval else ""
