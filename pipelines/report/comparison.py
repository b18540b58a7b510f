"""Compares drafters: groups evaluations measured under the same conditions, ranks each group by speedup.

A drafter is called the fastest only if its lead is larger than the noise of the prompts
(`statistics.advantage`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from vlmdistill.pipelines.bench import audit
from vlmdistill.pipelines.bench.records import Evaluation, PromptResult
from vlmdistill.pipelines.bench.statistics import (
    FEWEST,
    FEWEST_OF_KIND,
    Checks,
    Interval,
    Rate,
    advantage,
    drift,
)
from vlmdistill.pipelines.report.results import (
    REPEATED,
    DrafterResult,
    Speed,
    conditions,
    of_drafters,
    rate_of,
)
from vlmdistill.pipelines.report.selection import distinguished
from vlmdistill.pipelines.targets.embedded import ignorance

NAMED: Final = 4  # leaders that a sentence names
MANY: Final = 3  # ranked drafters, the best of which is partly so by chance
CHANCE: Final = (
    "Chance favours the best of several: its own interval does not cover that."
)


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
        """Those that can be the fastest: lossless, with consistent counts and without doubts."""
        return tuple(result for result in self.results if not result.unranked)

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.results[0].temperature

    @cached_property
    def leaders(self) -> tuple[DrafterResult, ...]:
        """The fastest drafter, and those not significantly slower; none if none is ranked."""
        return self.best("speedup")

    def best(self, rate: Rate) -> tuple[DrafterResult, ...]:
        """The drafter with the highest rate, and those not significantly worse, the highest first."""
        if not self.ranked:
            return ()
        first, *others = sorted(
            self.ranked, key=lambda result: rate_of(result, rate), reverse=True
        )
        close = [result for result in others if not _is_better(first, result, rate)]
        return (first, *close)

    def marked(self, rate: Rate) -> tuple[DrafterResult, ...]:
        """Those of `best` that a table may mark: with no speedup of a busy CPU, nor one below 1."""
        if rate != "speedup":
            return self.best(rate)
        if self.disturbed:
            return ()
        best = self.best(rate)
        is_slower_than_plain = bool(best) and best[0].figures.speedup < 1
        return () if is_slower_than_plain else best

    @property
    def winner(self) -> DrafterResult | None:
        """The drafter that is significantly faster than all others; None if there is none or it is alone."""
        is_alone = len(self.ranked) < 2
        if is_alone or len(self.leaders) != 1 or self.disturbed:
            return None
        (leader,) = self.leaders
        return leader if leader.figures.speedup >= 1 else None

    @property
    def disturbed(self) -> str:
        """Why no drafter can be called the fastest, as other programs had the CPU; empty if one can be."""
        return next(filter(None, (result.disturbed for result in self.ranked)), "")

    @property
    def against_plain(self) -> Speed:
        """Whether the fastest is significantly faster or slower than plain decoding."""
        return self.leaders[0].against_plain("speedup") if self.leaders else "unknown"

    @property
    def text(self) -> str:
        """The ranking in a sentence, with 95% intervals."""
        prefix = f"At temperature {self.temperature:g}"
        if not self.leaders:
            sentences = [f"{prefix}, no drafter is ranked."]
        else:
            sentences = [f"{prefix}{self._lead}"]
            if not self.disturbed:
                sentences += self._beside_plain
                sentences += [CHANCE] if len(self.ranked) >= MANY else []
        return " ".join([*sentences, *self._left_out])

    @property
    def _lead(self) -> str:
        """The end of a sentence: which drafter is the fastest."""
        if self.disturbed:
            return f", {self.disturbed}: no drafter is called the fastest."
        if len(self.leaders) > 1:
            return f", {self._tie}"
        if self.winner:
            return f", {self._win}"
        (leader,) = self.leaders
        return f", {leader.name} has a speedup of {self._speedup(leader)}."

    @property
    def _tie(self) -> str:
        named = [
            f"{leader.name} {self._speedup(leader)}" for leader in self.leaders[:NAMED]
        ]
        more = len(self.leaders) - len(named)
        names = ", ".join(named) + (f", and {more} more" if more else "")
        return f"{self._prompts} prompts do not separate the fastest drafters: speedup {names}."

    @property
    def _win(self) -> str:
        first, second = self.leaders[0], self.ranked[1]
        ratio = advantage(first.measurement, second.measurement)
        lead = first.figures.speedup / max(second.figures.speedup, 1e-9)
        return (
            f"{first.name} was the fastest drafter: speedup {self._speedup(first)}, "
            f"{lead:.2f} times{_within(ratio)} as fast as {second.name}, the second."
        )

    @property
    def _beside_plain(self) -> list[str]:
        """A sentence if no drafter is significantly faster than plain decoding."""
        if self.against_plain == "faster":
            return []
        if self.against_plain == "slower":
            return ["No drafter is faster than plain decoding."]
        if self.against_plain == "equal":
            name = self.leaders[0].name
            return [
                f"On {self._prompts} prompts, {name} is not significantly faster than plain decoding."
            ]
        return [
            f"Fewer than {FEWEST} prompts, or {FEWEST_OF_KIND} of a kind, are too few for intervals."
        ]

    @property
    def _left_out(self) -> Iterator[str]:
        """Which drafters are not ranked, and why."""
        results = self.results
        lossy = [result.name for result in results if not result.evaluation.lossless]
        if lossy:
            yield f"Not ranked, since not lossless: {', '.join(lossy)}."
        failed = [result.name for result in results if result.failures]
        if failed:
            yield f"Not ranked, since their counts contradict each other: {', '.join(failed)}."
        for result in results:
            is_valid = result.evaluation.lossless and not result.failures
            if is_valid and result.doubts:
                yield f"Not ranked, {result.name}: {'; '.join(result.doubts)}."
            leak = result.evaluation.leak
            if leak and leak.keys:
                yield f"{result.name} was trained on {len(leak.keys)} of these prompts, or on their media."

    @property
    def _prompts(self) -> int:
        return self.results[0].figures.prompts

    def _speedup(self, result: DrafterResult) -> str:
        interval = result.figures.intervals.get("speedup")
        return f"{result.figures.speedup:.2f}{_within(interval)}"


def _is_better(first: DrafterResult, second: DrafterResult, rate: Rate) -> bool:
    """Whether the first has a significantly higher rate."""
    ratio = advantage(first.measurement, second.measurement, rate)
    return ratio is not None and ratio.low > 1


@dataclass(frozen=True)
class Group:
    """Evaluations measured under the same conditions."""

    number: int
    conditions: dict[str, str]
    measured: list[DrafterResult]

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Those that the results are from, the latest first."""
        by_id = {id(result.evaluation): result.evaluation for result in self.measured}
        return [*by_id.values()]

    @cached_property
    def rankings(self) -> list[Ranking]:
        """One for each temperature, the lowest first."""
        return ranked(self.measured)

    @property
    def results(self) -> list[DrafterResult]:
        """Every drafter at every temperature: the lowest temperature first, then the fastest drafter."""
        return [result for ranking in self.rankings for result in ranking.results]

    def by(
        self, label: Callable[[PromptResult], str]
    ) -> dict[str, list[DrafterResult]]:
        """The results on the prompts of each label, such as their dataset; in the order of `results`."""
        divided: dict[str, list[DrafterResult]] = {}
        for result in self.results:
            for name, part in result.by(label).items():
                divided.setdefault(name, []).append(part)
        return dict(sorted(divided.items()))

    @property
    def facts(self) -> dict[str, str]:
        """The machine, its calibrations, versions, commits and commands."""
        values: dict[str, dict[str, None]] = {}
        for evaluation in self.evaluations:
            for name, value in _facts(evaluation).items():
                values.setdefault(name, {})[value] = None
        for result in self.results:
            if result.repeats > 1:
                text = (
                    f"{result.name} at temperature {result.temperature:g} is one of "
                    f"{result.repeats}"
                )
                values.setdefault(REPEATED, {})[text] = None
        return {name: "; ".join(different) for name, different in values.items()}

    @property
    def warnings(self) -> list[str]:
        """Problems of the figures, with the drafters' names, and of comparing them."""
        warnings = [text for result in self.results for text in result.warnings]
        warnings += drifts(self.evaluations)
        runs = {evaluation.run for evaluation in self.evaluations}
        if len(runs) > 1:
            warnings.append(
                f"these evaluations were measured in {len(runs)} separate runs: the intervals do not "
                "contain the noise between runs"
            )
        return warnings

    @property
    def verdict(self) -> Verdict:
        """Whether every response at temperature 0 equals the target's own."""
        failed = {}
        for result in self.results:
            if result.failures:
                failed[result.name] = f"{result.name}: {', '.join(result.failures)}"
        if failed:
            text = "THE COUNTS CONTRADICT EACH OTHER. Do not rely on these numbers."
            return Verdict("broken", f"{text} {'; '.join(failed.values())}.")
        greedy = [result for result in self.results if result.temperature == 0]
        checks = [_Check(result.name, result.figures.lossless) for result in greedy]
        if greedy:
            checks.append(_Check("plain decoding", greedy[0].figures.plain_lossless))
        checked = [check for check in checks if check.count.total]
        if not checked:
            reason = "nothing was decoded at temperature 0"
            if greedy:
                reason = "no response was compared with the target's own"
            text = f"Losslessness was not checked: {reason}."
            return Verdict("unchecked", f"{text} {self.sampled}".rstrip())
        return self._verdict_on(checked)

    def _verdict_on(self, checked: "Sequence[_Check]") -> Verdict:
        names = {check.name for check in checked}
        unchecked = sorted({result.name for result in self.results} - names)
        rest = f" Not checked: {', '.join(unchecked)}." if unchecked else ""
        if broken := _affected(checked, lambda count: count.different):
            return Verdict(
                "broken",
                "NOT LOSSLESS: responses at temperature 0 differ from the stock model's greedy ones "
                f"({broken} prompts). Do not rely on these numbers.{rest}",
            )
        if ties := _affected(checked, lambda count: count.near_tie):
            return Verdict(
                "near-ties",
                "At temperature 0, some responses differ from the stock model's greedy ones by near-ties: "
                f"two logits that are equal within the rounding of {self.conditions['dtype']} "
                f"({ties} prompts). All others are identical.{rest}",
            )
        measured = max(result.figures.prompts for result in self.results)
        prompts = f"all {measured} prompts" if measured > 1 else "the only prompt"
        if partly := [check for check in checked if check.count.total < measured]:
            counts = [f"{check.name}: {check.count.total}" for check in partly]
            prompts = (
                f"the prompts that it can read ({', '.join(counts)} of {measured})"
            )
        text = f"Responses at temperature 0 are the stock model's greedy ones on {prompts}.{rest}"
        return Verdict("lossless", f"{text} {self.sampled}".rstrip())

    @property
    def sampled(self) -> str:
        """How sampled responses were checked, in a sentence; empty if there are none."""
        sampled = [result for result in self.results if result.temperature > 0]
        if not sampled:
            return ""
        surprises = [
            surprise
            for result in sampled
            for surprise in audit.surprises(result.measurement).values()
        ]
        if len(surprises) < 2 * len(sampled):  # of plain decoding and of the drafter
            return "The distribution of sampled responses was not checked."
        largest = max(abs(surprise.nats / surprise.tokens) for surprise in surprises)
        detectable = max(
            (audit.ERRORS * surprise.error + audit.NATS) / surprise.tokens
            for surprise in surprises
        )
        return (
            f"Sampled responses surprise the target as its own would, up to {largest:.3f} nats a token; "
            f"differences above {detectable:.3f} would be found."
        )


@dataclass(frozen=True)
class _Check:
    """The responses at temperature 0 of a drafter, or of plain decoding, against the stock model's."""

    name: str
    count: Checks


def _affected(checked: Sequence[_Check], kind: Callable[[Checks], int]) -> str:
    """The drafters with responses of a kind, and how many; empty if there are none."""
    texts = []
    for check in checked:
        affected = kind(check.count)
        if affected:
            texts.append(f"{check.name}: {affected} of {check.count.total}")
    return ", ".join(texts)


def _facts(evaluation: Evaluation) -> dict[str, str]:
    """The facts of an evaluation that its group lists."""
    facts = {"machine": evaluation.machine.details}
    if baseline := _baseline(evaluation):
        facts["plain decoding"] = baseline
    if evaluation.weights:
        drafter = evaluation.name.partition("@")[0]
        facts["weights"] = f"{drafter} sha256:{evaluation.weights}"
    if evaluation.again:
        count = len(evaluation.again)
        facts["decoded again"] = f"{count} prompts, in a process that had seen none"
    if evaluation.calibrations:
        texts = [calibration.text for calibration in evaluation.calibrations]
        facts["calibration"] = ", then ".join(texts)
    return facts | evaluation.software.facts


def drifts(evaluations: Sequence[Evaluation]) -> list[str]:
    """Warnings of what is wrong with whole evaluations, each once: those of a run share calibrations."""
    of_machines: list[str] = []
    of_runs: list[str] = []
    of_leaks: list[str] = []
    of_trainings: list[str] = []
    not_again: list[str] = []
    for evaluation in evaluations:
        run, name = f"run of {evaluation.measured}", evaluation.name
        of_machines += [f"{run}: {text}" for text in drift(evaluation.calibrations)]
        of_runs += [f"{run}: {text}" for text in audit.doubts_of_run(evaluation)]
        if evaluation.leak and evaluation.leak.keys:
            keys = ", ".join(evaluation.leak.keys)
            of_leaks.append(f"{name} has seen in training: {keys}")
        unknown = audit.unknown_training(evaluation)
        of_trainings += [f"{name}: {text}" for text in unknown]
        if evaluation.not_again:
            text = f"{name} could not be decoded again: {evaluation.not_again}"
            not_again.append(text)
    warnings = [*of_machines, *of_runs, *of_leaks, *of_trainings, *not_again]
    warnings += [*_limits_of_targets(evaluations), *_given_seeds(evaluations)]
    return list(dict.fromkeys(warnings))


def _limits_of_targets(evaluations: Iterable[Evaluation]) -> Iterator[str]:
    """What embedded targets know, if they were asked for more."""
    for evaluation in evaluations:
        datasets = {
            prompt.dataset
            for measurement in evaluation.temperatures
            for prompt in measurement.prompts
        }
        if limits := ignorance(evaluation.target.name, sorted(datasets)):
            yield limits


def _given_seeds(evaluations: Iterable[Evaluation]) -> Iterator[str]:
    """The sampled evaluations with a seed that was not drawn for each prompt, in a sentence."""
    names = [
        evaluation.name
        for evaluation in evaluations
        if evaluation.seed is not None
        and any(measured.temperature for measured in evaluation.temperatures)
    ]
    if names:
        yield (
            f"the seed of sampling was given ({', '.join(names)}), so that a drafter may have known what the "
            "target draws: without --seed, it cannot"
        )


def _baseline(evaluation: Evaluation) -> str:
    """How fast plain decoding was, beside `model.generate` and reading its weights; empty if unknown."""
    baseline = audit.baseline(evaluation)
    facts = []
    if baseline.against_stock is not None:
        facts.append(f"{baseline.against_stock:.2f} times as fast as model.generate")
    if baseline.reads is not None:
        facts.append(
            f"a step takes as long as reading its weights {baseline.reads:.1f} times"
        )
    return ", ".join(facts)


def rank(evaluations: Sequence[Evaluation]) -> list[Ranking]:
    """Rank evaluations of one group at each temperature by speedup."""
    return ranked(of_drafters(evaluations))


def ranked(results: Iterable[DrafterResult]) -> list[Ranking]:
    """Rank results that compare, at each temperature by speedup."""
    by_temperature: dict[float, list[DrafterResult]] = {}
    for result in results:
        by_temperature.setdefault(result.temperature, []).append(result)
    return [_ranking(by_temperature[at]) for at in sorted(by_temperature)]


def _ranking(results: Sequence[DrafterResult]) -> Ranking:
    """Rank results at one temperature; equally fast ones by name."""
    by_name = sorted(results, key=lambda result: result.name)
    fastest_first = sorted(
        by_name, key=lambda result: result.figures.speedup, reverse=True
    )
    return Ranking(tuple(fastest_first))


def differing(groups: Sequence[Group]) -> list[str]:
    """The conditions that differ between groups; empty for a single group."""
    names = groups[0].conditions if groups else ()
    return [
        name for name in names if len({group.conditions[name] for group in groups}) > 1
    ]


def group(measured: Sequence[DrafterResult]) -> list[Group]:
    """Group the results that can be compared, the latest first."""
    alike: dict[tuple[str, ...], list[DrafterResult]] = {}
    for result in measured:
        alike.setdefault(result.alike, []).append(result)
    groups = []
    for number, results in enumerate(alike.values(), 1):
        (named,) = distinguished([results])
        groups.append(Group(number, conditions(results[0].evaluation), named))
    return groups


def _within(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f" (95%: {interval.low:.2f} to {interval.high:.2f})"
