"""What the page says first: which drafter to use, what it gains on each kind of prompts, and how sure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vlmdistill.pipelines.bench.records import LABELS
from vlmdistill.pipelines.report.comparison import Group, Ranking, ranked
from vlmdistill.pipelines.report.results import DrafterResult

KINDS = {
    "text": "text",
    "image": "images",
    "images": "several images",
    "video": "video",
}
MOST = 3  # drafters that are named


@dataclass(frozen=True)
class Answer:
    """The drafter to use at one temperature.

    It yields to what speaks against it: without the CPU, without losslessness, with too few prompts or
    below a speedup of 1 there is none, and beside a warning it is a guess.
    """

    ranking: Ranking
    kinds: dict[
        str, Ranking
    ]  # the same on the prompts of each kind, if there are several
    warned: bool
    broken: bool  # responses differ, or counts contradict each other: no number can be relied on

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
            doubted = any(one.doubts for one in self.ranking.results)
            return (
                "No verdict: the numbers are in doubt"
                if doubted
                else "No drafter to use"
            )
        if self.ranking.disturbed:
            return "No verdict: other programs had the CPU"
        if self._used:
            verb = "Perhaps" if self.warned else "Use"
            slower = [kind for kind, one in self.kinds.items() if self._slower(one)]
            but = f", but plain decoding for {' and '.join(slower)}" if slower else ""
            return f"{verb} {self._used}{but}"
        return {
            "slower": "Plain decoding is faster",
            "equal": "No drafter is clearly faster",
            "unknown": "Too few prompts to tell",
        }[self.ranking.against_plain]

    @property
    def columns(self) -> dict[str, dict[str, DrafterResult]]:
        """The results to show, by the prompts they are on and by drafter; none without a verdict."""
        if self._unusable:
            return {}
        named = [*self.ranking.leaders[:MOST]]
        if self.ranking.against_plain != "faster":
            named += [
                one
                for ranking in self._helped.values()
                for one in ranking.leaders[:MOST]
            ]
        names = list(dict.fromkeys(one.name for one in named))
        everything = {"all prompts": self.ranking, **self.kinds}
        found = {
            kind: {one.name: one for one in at.results}
            for kind, at in everything.items()
        }
        return {
            kind: {name: at[name] for name in names if name in at}
            for kind, at in found.items()
        }

    @property
    def _unusable(self) -> bool:
        return self.broken or self.ranking.disturbed or not self.ranking.leaders

    @property
    def _used(self) -> str:
        """The drafters to use, and what for; empty if there is none."""
        if self._unusable:
            return ""
        if self.ranking.against_plain == "faster":
            return _named(self.ranking.leaders)
        return ", ".join(
            f"{_named(one.leaders)} for {kind}" for kind, one in self._helped.items()
        )

    @property
    def _helped(self) -> dict[str, Ranking]:
        """The kinds of prompts on which a drafter is faster than plain decoding."""
        return {
            kind: one
            for kind, one in self.kinds.items()
            if one.against_plain == "faster"
        }

    def _slower(self, kind: Ranking) -> bool:
        """Whether none of the drafters to use is fast enough on these prompts."""
        leaders = {one.name for one in self.ranking.leaders}
        used = [one for one in kind.results if one.name in leaders]
        all_slower = all(one.against_plain(kind.speed) == "slower" for one in used)
        return kind.against_plain != "faster" and all_slower


def answers(group: Group) -> list[Answer]:
    """An answer for each temperature, the lowest first."""
    parts = [
        (KINDS.get(kind, kind), ranked(some))
        for kind, some in group.by(LABELS["kind"]).items()
    ]
    warned, broken = bool(group.warnings), group.verdict.level == "broken"
    found = []
    for ranking in group.rankings:
        alike = [
            (kind, at)
            for kind, some in parts
            for at in some
            if at.temperature == ranking.temperature
        ]
        kinds = {kind: at for kind, at in alike if _compare(at.results)}
        found.append(Answer(ranking, kinds if len(kinds) > 1 else {}, warned, broken))
    return found


def _compare(some: Sequence[DrafterResult]) -> bool:
    """Whether all are on the same prompts: records may differ in what kind a prompt is of."""
    return (
        len({tuple(prompt.key for prompt in one.measurement.prompts) for one in some})
        == 1
    )


def _named(leaders: Sequence[DrafterResult]) -> str:
    names = [one.name for one in leaders]
    more = [f"{len(names) - MOST} more"] if len(names) > MOST else []
    return " or ".join([*names[:MOST], *more])
