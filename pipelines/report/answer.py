"""The first thing on the page: the drafter to use, its speedup on each kind of prompts, how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.report.comparison import Group, Ranking, ranked
from vlmdistill.pipelines.report.results import DrafterResult

KINDS: Final = {
    "text": "text",
    "image": "images",
    "images": "several images",
    "video": "video",
}
MOST: Final = 3  # drafters that are named
HEADLINES: Final = {
    "slower": "Plain decoding is faster",
    "equal": "No drafter is clearly faster",
    "unknown": "Too few prompts to tell",
}
"""Headlines where no drafter is to be used, by how the fastest compares with plain decoding."""


@dataclass(frozen=True)
class Recommendation:
    """The drafter to use at one temperature.

    There is none if responses are not lossless, other programs had the CPU, prompts are too few, or no
    drafter is faster than plain decoding. With a warning, it is a guess.
    """

    ranking: Ranking
    kinds: dict[str, Ranking]  # on the prompts of each kind, if there are several
    warned: bool
    broken: bool
    """Responses differ or counts contradict each other: no number is reliable."""

    @property
    def level(self) -> Literal["sure", "unsure", "none"]:
        """How sure it is."""
        if not self._used:
            return "none"
        return "unsure" if self.warned else "sure"

    @property
    def headline(self) -> str:
        """The answer in a few words."""
        if self.broken:
            return "No verdict: do not rely on these numbers"
        if not self.ranking.leaders:
            is_doubted = any(result.doubts for result in self.ranking.results)
            if is_doubted:
                return "No verdict: the numbers are in doubt"
            return "No drafter to use"
        if self.ranking.disturbed:
            return "No verdict: other programs had the CPU"
        if not self._used:
            return HEADLINES[self.ranking.against_plain]
        verb = "Perhaps" if self.warned else "Use"
        slower = [kind for kind, ranking in self.kinds.items() if self._slower(ranking)]
        exception = f", but plain decoding for {' and '.join(slower)}" if slower else ""
        return f"{verb} {self._used}{exception}"

    @property
    def text(self) -> str:
        """The answer and the ranking in sentences, for pages without the table of `columns`."""
        return f"{self.headline}. {self.ranking.text}"

    @property
    def columns(self) -> dict[str, dict[str, DrafterResult]]:
        """The results to show, by the prompts they are on and by drafter; none without a verdict."""
        if self._unusable:
            return {}
        shown = [*self.ranking.leaders[:MOST]]
        if self.ranking.against_plain != "faster":
            for ranking in self._helped.values():
                shown += ranking.leaders[:MOST]
        names = list(dict.fromkeys(result.name for result in shown))
        rankings = {"all prompts": self.ranking, **self.kinds}
        return {kind: _by_name(ranking, names) for kind, ranking in rankings.items()}

    def prompts_of(self, column: str) -> int:
        """How many prompts a column of `columns` is of."""
        ranking = self.kinds.get(column, self.ranking)
        return ranking.results[0].figures.prompts

    @property
    def _unusable(self) -> bool:
        is_disturbed = bool(self.ranking.disturbed)
        return self.broken or is_disturbed or not self.ranking.leaders

    @property
    def _used(self) -> str:
        """The drafters to use, and for which kinds of prompts; empty if there are none."""
        if self._unusable:
            return ""
        if self.ranking.against_plain == "faster":
            return _named(self.ranking.leaders)
        drafters = []
        for kind, ranking in self._helped.items():
            drafters.append(f"{_named(ranking.leaders)} for {kind}")
        return ", ".join(drafters)

    @property
    def _helped(self) -> dict[str, Ranking]:
        """The kinds of prompts on which a drafter is faster than plain decoding."""
        return {
            kind: ranking
            for kind, ranking in self.kinds.items()
            if ranking.against_plain == "faster" and not ranking.disturbed
        }

    def _slower(self, kind: Ranking) -> bool:
        """Whether all drafters to use are slower than plain decoding on these prompts, without doubts."""
        if kind.against_plain == "faster":
            return False
        leaders = {result.name for result in self.ranking.leaders}
        used = [result for result in kind.results if result.name in leaders]
        return all(
            result.against_plain("speedup") == "slower" and not result.no_speedup
            for result in used
        )


def answers(group: Group) -> list[Recommendation]:
    """An answer for each temperature, the lowest first."""
    is_warned = bool(group.warnings)
    is_broken = group.verdict.level == "broken"
    by_kind = _rankings_by_kind(group)
    return [
        Recommendation(
            ranking, by_kind.get(ranking.temperature, {}), is_warned, is_broken
        )
        for ranking in group.rankings
    ]


def _rankings_by_kind(group: Group) -> dict[float, dict[str, Ranking]]:
    """By temperature, the ranking on the prompts of each kind; only where there are several kinds."""
    by_temperature: dict[float, dict[str, Ranking]] = {}
    for label, results in group.by(LABELS["kind"]).items():
        kind = KINDS.get(label, label)
        for ranking in ranked(results):
            if _compare(ranking.results):
                by_temperature.setdefault(ranking.temperature, {})[kind] = ranking
    return {at: kinds for at, kinds in by_temperature.items() if len(kinds) > 1}


def _compare(results: Sequence[DrafterResult]) -> bool:
    """Whether all are on the same prompts: records may disagree on the kind of a prompt."""
    prompt_sets = {
        tuple(prompt.key for prompt in result.measurement.prompts) for result in results
    }
    return len(prompt_sets) == 1


def _by_name(ranking: Ranking, names: Sequence[str]) -> dict[str, DrafterResult]:
    """The results of these drafters without doubts, in this order."""
    results = {
        result.name: result for result in ranking.results if not result.no_speedup
    }
    return {name: results[name] for name in names if name in results}


def _named(leaders: Sequence[DrafterResult]) -> str:
    names = [leader.name for leader in leaders[:MOST]]
    if len(leaders) > MOST:
        names.append(f"{len(leaders) - MOST} more")
    return " or ".join(names)
