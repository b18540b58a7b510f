"""The results in a report: of a drafter at one temperature, and of a server under one load."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

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
    is_busy,
    is_disturbed,
    rates,
)
from vlmdistill.pipelines.report.greedy_responses import other_targets
from vlmdistill.stores import notebook
from vlmdistill.stores.schema import agree

E = TypeVar("E", Evaluation, ServedEvaluation)
SEEDED: Final = re.compile(r"(.+)\.s(\d{1,18})")
"""The name of a drafter, and the number of its seed."""
DISTURBED: Final = "other programs had most of the CPU"
UNCLOCKED: Final = (
    "other programs had a part of the CPU, and it is not known for how long"
)
"""Of several threads, on systems other than Linux, and in records of earlier versions."""
UNEVENLY: Final = (
    "other programs had more of the CPU beside a drafter than beside plain decoding"
)
NOT_LOSSLESS: Final = "it is not lossless"
NOT_ACCEPTED: Final = "right tokens were not accepted"
REPEATED: Final = "repeated evaluations"
MARK: Final = " (in doubt)"
BUSY: Final = " (busy CPU)"
SHOWN: Final = ("drafter", "T", "prompts", "tau", "speedup", "in doubt")
Speed = Literal["faster", "slower", "equal", "unknown"]


def conditions(evaluation: Evaluation) -> dict[str, str]:
    """What must be equal to compare two evaluations, by name."""
    target, software = evaluation.target, evaluation.software
    target_id = f"{target.short_name} ({target.fingerprint})"
    prompts = f"{len(evaluation.keys)} ({evaluation.prompt_set})"
    return {
        "target": target_id,
        "hardware": evaluation.hardware,
        "dtype": evaluation.dtype,
        "threads": str(evaluation.threads),
        "attention": evaluation.attention,
        "compiled": "yes" if evaluation.compiled else "no",
        "thinking": evaluation.thinking or "as the template",
        "torch": software.torch,
        "transformers": software.transformers,
        "prompts": prompts,
        "max new tokens": str(evaluation.max_new_tokens),
    }


@dataclass(frozen=True, repr=False)
class DrafterResult:
    """One drafter at one temperature."""

    evaluation: Evaluation
    measurement: Measurement
    beside: tuple[str, ...] = ()
    """Doubts that other results of the same run raise, or all prompts of a part."""
    changed: tuple[str, ...] = ()
    """Why its target was another one than in a later run; part of the doubts."""
    repeats: int = 1
    """Results like it that the workspace has, under whatever names of evaluations."""
    seeds: int = 1
    """Seeds of its drafter that the workspace has, as `seeded` names them, under its conditions."""
    remarks: tuple[str, ...] = ()
    """Problems that the workspace tells; part of the warnings."""

    def __repr__(self) -> str:
        """Its rates and their intervals; the numbers of each prompt are in `measurement`."""
        prompts = f"{self.figures.prompts} prompts at temperature {self.temperature:g}"
        facts = ["nothing was drafted"]
        if self.figures.calls:
            facts = [f"tau {self.figures.tau:.2f}", f"speedup {self.speedup_text}"]
        if not self.evaluation.lossless:
            facts.append("NOT LOSSLESS")
        if self.failures:
            facts.append("its counts contradict each other")
        if self.doubts:
            facts.append(f"in doubt: {self.doubts[0]}")
        elif self.disturbed:
            facts.append(f"in doubt: {self.disturbed}")
        return f"{self.name} on {prompts}: {', '.join(facts)}"

    @property
    def speedup_text(self) -> str:
        """The speedup and its interval."""
        speedup = f"{self.figures.speedup:.2f}"
        if interval := self.figures.intervals.get("speedup"):
            speedup += f" ({interval.low:.2f} to {interval.high:.2f})"
        return speedup

    @property
    def speedup(self) -> float | None:
        """The speedup; None if it is in doubt."""
        return None if self.no_speedup else self.figures.speedup

    @cached_property
    def figures(self) -> Figures:
        """The metrics, with their intervals."""
        return figures(self.measurement)

    @property
    def name(self) -> str:
        """The drafter's name, with the facts that distinguish its results."""
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
        return self.evaluation.title, *self.repeated

    @cached_property
    def repeated(self) -> tuple[object, ...]:
        """Two results of which this is equal repeat each other."""
        return self.drafter, *self._settings

    @cached_property
    def alike(self) -> tuple[str, ...]:
        """The values of its conditions: equal for results that compare."""
        return tuple(conditions(self.evaluation).values())

    @cached_property
    def _settings(self) -> tuple[object, ...]:
        return self.evaluation.tree, *self.alike, self.temperature

    @cached_property
    def over_seeds(self) -> tuple[object, ...]:
        """Results of drafters that differ in their seeds alone have the same, by their names."""
        match = SEEDED.fullmatch(self.drafter)
        name = match[1] if match else self.drafter
        return name, match is not None, *self._settings

    @property
    def facts(self) -> dict[str, Any]:
        """The columns of its row, by name."""
        evaluation = self.evaluation
        datasets = sorted({prompt.dataset for prompt in self.measurement.prompts})
        return {
            "name": evaluation.title,
            "measured": evaluation.measured,
            "drafter": self.drafter,
            "method": evaluation.drafter,
            "target": evaluation.target.short_name,
            "prompts": len(evaluation.keys),
            "dataset": ", ".join(datasets),
            "prompt_set": evaluation.prompt_set,
            "temperature": float(self.temperature),
            "tree": evaluation.tree,
            "max_new_tokens": evaluation.max_new_tokens,
            "seed": evaluation.seed,
            "engine": "transformers",
            "machine": evaluation.hardware,
            "threads": evaluation.threads,
            "dtype": evaluation.dtype,
            "attention": evaluation.attention,
            "compiled": evaluation.compiled,
            "thinking": evaluation.thinking,
            "parameters": evaluation.parameters,
            "weights": evaluation.weights,
            "commit": evaluation.software.commit,
            **self._rates,
            "not_ranked": "; ".join(self.no_speedup) or None,
        }

    @property
    def _rates(self) -> dict[str, float | None]:
        """The rates; None for those that do not exist, as nothing was drafted."""
        has_drafts = any(prompt.drafted.calls for prompt in self.measurement.prompts)
        columns: dict[str, float | None] = {}
        for name, rate in rates(self.measurement).items():
            is_known = has_drafts or name not in OF_CYCLES
            columns[name] = rate if is_known else None
        return columns

    def against_plain(self, rate: Rate) -> Speed:
        """Whether it is significantly faster or slower than plain decoding, by a speedup."""
        interval = self.figures.intervals.get(rate)
        if interval is None:
            return "unknown"
        if interval.low > 1:
            return "faster"
        return "slower" if interval.high < 1 else "equal"

    @cached_property
    def doubts(self) -> list[str]:
        """Why its speedup may be wrong, so that no verdict rests on it; part of the warnings."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        of_run = audit.doubts_of_run(self.evaluation)
        of_training = audit.leaked(self.evaluation)
        of_others = [*self.beside, *self.changed]
        doubts = [*self.figures.doubts, *of_others, *of_run, *of_training]
        return list(dict.fromkeys(doubts))

    @cached_property
    def unranked(self) -> list[str]:
        """Why no verdict rests on it: failures, then doubts; empty if it is ranked."""
        return [*self.broken, *self.doubts]

    @property
    def broken(self) -> list[str]:
        """Why nothing of its evaluation is right; empty if it may be."""
        return [*self._lossy, *self.failures]

    @property
    def disturbed(self) -> str:
        """Why no speed of it is right, although counts are; empty if it may be."""
        return without_clock(self.figures)

    @property
    def no_speedup(self) -> list[str]:
        """Why no speedup of it is shown alone; empty if it may be."""
        return [*self.unranked, self.disturbed] if self.disturbed else self.unranked

    @property
    def wrong_counts(self) -> list[str]:
        """Why not even its counts, such as tau, say how good its drafter is; some of `no_speedup`."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        missed = [NOT_ACCEPTED] if self.figures.missed else []
        return [
            *self.broken,
            *missed,
            *self.changed,
            *audit.leaked(self.evaluation),
        ]

    @property
    def _lossy(self) -> list[str]:
        return [] if self.evaluation.lossless else [NOT_LOSSLESS]

    @property
    def label(self) -> str:
        """Its name beside a speedup or a time, in a table or a chart."""
        return timed_label(self.name, self.figures, self.no_speedup)

    @property
    def count_label(self) -> str:
        """Its name beside counts alone."""
        return marked(self.name, self.wrong_counts)

    @property
    def warnings(self) -> list[str]:
        """Problems of its figures."""
        prefix = f"{self.name} at temperature {self.temperature:g}"
        return [f"{prefix}: {problem}" for problem in self.problems]

    @property
    def problems(self) -> list[str]:
        """The warnings without its name."""
        return [*self.figures.warnings, *self.remarks]

    @cached_property
    def failures(self) -> list[str]:
        """Contradictions in its evaluation; see `audit.py`."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        return audit.failures(self.evaluation)

    def by(self, label: Callable[[PromptResult], str]) -> "dict[str, DrafterResult]":
        """Its results on the prompts of each label, such as their kind or dataset.

        What is doubtful of all prompts is so of some.
        """
        doubts = tuple(self.doubts)
        return {
            name: replace(self, measurement=measurement, beside=doubts)
            for name, measurement in self.measurement.by(label).items()
        }


def without_clock(rated: Figures) -> str:
    """Why the clock does not say how fast a drafter is, as other programs had the CPU; empty if it does."""
    if is_disturbed(rated.cpu_share):
        return DISTURBED
    if is_busy(rated.least_cpu_share) and not rated.has_delays:
        return UNCLOCKED
    return UNEVENLY if rated.is_uneven else ""


def marked(name: str, doubts: Sequence[str]) -> str:
    """A name beside numbers: with a mark if these are in doubt."""
    return name + MARK if doubts else name


def timed_label(name: str, rated: Figures, doubts: Sequence[str]) -> str:
    """A name beside times: with a mark if these are in doubt, or other programs had a part of the CPU."""
    if doubts or not is_busy(rated.least_cpu_share):
        return marked(name, doubts)
    return name + BUSY


def in_words(rate: Rate) -> str:
    """The name of a rate."""
    return rate.replace("_", " ")


def rate_of(result: DrafterResult, rate: Rate) -> float:
    """A rate."""
    return float(getattr(result.figures, rate))


class Results(list[DrafterResult]):
    """Results of drafters, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = []
        for result in self:
            rates = result.figures
            doubts = "; ".join(result.no_speedup)
            tau = f"{rates.tau:.2f}" if rates.calls else "-"
            row = [result.name, f"{result.temperature:g}", rates.prompts, tau]
            rows.append([*row, result.speedup_text, doubts])
        return notebook.table(SHOWN, rows)


@dataclass(frozen=True)
class ServerResult:
    """One server at one temperature and concurrency."""

    evaluation: ServedEvaluation
    load: ServedLoad
    repeats: int = 1  # as of a drafter's

    @cached_property
    def figures(self) -> LoadFigures:
        """The metrics, with their intervals."""
        return load_figures(self.load)

    @property
    def name(self) -> str:
        """The name of its evaluation, with the mode of thinking that was asked for."""
        evaluation = self.evaluation
        if not evaluation.thinking:
            return evaluation.name
        return f"{evaluation.name}, thinking {evaluation.thinking}"

    @property
    def drafter(self) -> str:
        """Its drafter; the server's name if the server does not report one."""
        return self.evaluation.drafter or self.evaluation.name

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Of two results of one kind, a report has the latest."""
        return "server", self.evaluation.name, self.evaluation.drafter, *self.repeated

    @cached_property
    def repeated(self) -> tuple[object, ...]:
        """Two results of which this is equal repeat each other."""
        evaluation = self.evaluation
        prompts = (
            evaluation.prompt_set,
            evaluation.max_new_tokens,
            evaluation.thinking,
        )
        load = self.load.temperature, self.load.concurrency
        return evaluation.model, self.drafter, *prompts, *load

    @cached_property
    def no_speedup(self) -> list[str]:
        """Why no speedup of it is shown; empty if it is."""
        from vlmdistill.pipelines.bench import audit  # which imports torch

        return [*self.figures.doubts, *audit.leaked(self.evaluation)]

    @property
    def facts(self) -> dict[str, Any]:
        """The columns of its row, by name, without those that a server does not report."""
        evaluation = self.evaluation
        load = self.figures
        server = load.server
        return {
            "name": evaluation.name,
            "measured": evaluation.measured,
            "drafter": self.drafter,
            "target": evaluation.model,
            "prompts": server.requests,
            "prompt_set": evaluation.prompt_set,
            "temperature": float(load.temperature),
            "max_new_tokens": evaluation.max_new_tokens,
            "seed": evaluation.seed,
            "engine": evaluation.url,
            "concurrency": load.concurrency,
            "thinking": evaluation.thinking,
            "commit": evaluation.software.commit,
            "tau": server.tau,
            "accepted": server.accepted,
            "speedup": load.speedup,
            "decode_speedup": load.decode_speedup,
            "not_ranked": "; ".join(self.no_speedup) or None,
        }

    @property
    def warnings(self) -> list[str]:
        """Problems of its figures."""
        prefix = f"{self.name} at temperature {self.figures.temperature:g}"
        return [f"{prefix}: {problem}" for problem in self.problems]

    @property
    def problems(self) -> list[str]:
        """The warnings without its name."""
        problems = [*self.figures.warnings, *self._too_long, *self._of_training]
        if self.repeats > 1:
            problems.append(f"it is one of {self.repeats} {REPEATED}")
        return problems

    @property
    def _of_training(self) -> Iterator[str]:
        """What its drafter has seen in training, if the evaluation started the server."""
        evaluation, leak = self.evaluation, self.evaluation.leak
        if leak is None:
            if evaluation.weights is not None:
                yield "it is not known what it was trained on"
            return
        if leak.keys:
            count = len(leak.keys)
            yield f"it was trained on {count} of these prompts, or on their media"
        if leak.unknown:
            yield f"{leak.unknown} samples of its training were not compared with these prompts"

    @property
    def _too_long(self) -> Iterator[str]:
        """A warning of responses with more tokens than were asked for."""
        limit = self.evaluation.max_new_tokens
        for whose, run in (
            ("server", self.load.server),
            ("baseline", self.load.baseline),
        ):
            requests = run.requests if run else ()
            count = sum((request.tokens or 0) > limit for request in requests)
            if count:
                yield f"{count} responses of the {whose} have more than {limit} tokens, the limit"


def with_whole_fingerprints(
    evaluations: Iterable[Evaluation], all_evaluations: Iterable[Evaluation]
) -> list[Evaluation]:
    """The evaluations, of which those of earlier versions have shorter fingerprints of their targets.

    Such a one counts as the only longer one among `all_evaluations` that agrees with it.
    """
    fingerprints = {evaluation.target.fingerprint for evaluation in all_evaluations}
    return [_with_whole(evaluation, fingerprints) for evaluation in evaluations]


def _with_whole(evaluation: Evaluation, fingerprints: Iterable[str]) -> Evaluation:
    target = evaluation.target
    agreeing = [text for text in fingerprints if agree(target.fingerprint, text)]
    longer = [text for text in agreeing if len(text) > len(target.fingerprint)]
    if len(longer) != 1:
        return evaluation
    return replace(evaluation, target=replace(target, fingerprint=longer[0]))


def of_drafters(evaluations: Iterable[Evaluation]) -> list[DrafterResult]:
    """The results of evaluations, the latest first; of one time, the last evaluation first.

    Each says how many there are under its conditions, of how many seeds, and what those of its run and later
    ones put in doubt, so that a selection hides none of it.
    """
    latest_first = _latest_first(evaluations)
    latest_first = with_whole_fingerprints(latest_first, latest_first)
    doubts = other_targets(latest_first)
    results = [
        DrafterResult(evaluation, measurement, changed=doubts.get(id(evaluation), ()))
        for evaluation in latest_first
        for measurement in evaluation.temperatures
    ]
    repeats = Counter(result.repeated for result in results)
    drafters: dict[object, set[str]] = {}
    for result in results:
        drafters.setdefault(result.over_seeds, set()).add(result.drafter)
    return [
        replace(
            result,
            repeats=repeats[result.repeated],
            seeds=len(drafters[result.over_seeds]),
        )
        for result in _beside_each_other(results)
    ]


def _beside_each_other(results: Sequence[DrafterResult]) -> list[DrafterResult]:
    """The results, with a doubt where those of a run have other plain decoding.

    The drafters of a run are measured beside the same plain decoding: if it differs, a record was changed.
    """
    first: dict[object, PromptResult] = {}
    doubted_runs = set[object]()
    for result in results:
        run = _run(result)
        for prompt in result.measurement.prompts:
            other = first.setdefault((run, prompt.key), prompt)
            if not _agree(prompt, other):
                doubted_runs.add(run)
    doubt = (
        "records of its run differ in the numbers of plain decoding or in the times of all decodings, "
        "which they share"
    )
    return [
        replace(result, beside=(*result.beside, doubt))
        if _run(result) in doubted_runs
        else result
        for result in results
    ]


def _agree(prompt: PromptResult, other: PromptResult) -> bool:
    """Whether two records of one prompt have the same plain decoding, and the same times of all decodings."""
    if _beside_drafters(prompt) != _beside_drafters(other):
        return False
    turn, other_turn = prompt.turn, other.turn
    if len(turn.seconds) == 2:  # the drafter was alone
        return True
    times = turn.seconds, turn.started, turn.ended
    other_times = other_turn.seconds, other_turn.started, other_turn.ended
    return times == other_times


def _beside_drafters(prompt: PromptResult) -> tuple[object, ...]:
    """What a record of one drafter has that is no drafter's, but for the check, which may be near a tie."""
    plain = replace(prompt.plain, check=None)
    return plain, prompt.stock, prompt.room, prompt.bare_step


def _run(result: DrafterResult) -> tuple[object, ...]:
    """The process that measured a result, and its temperature."""
    return *result.evaluation.run, *result.alike, result.temperature


def of_servers(evaluations: Iterable[ServedEvaluation]) -> list[ServerResult]:
    """As `of_drafters`."""
    results = [
        ServerResult(evaluation, load)
        for evaluation in _latest_first(evaluations)
        for load in evaluation.loads
    ]
    repeats = Counter(result.repeated for result in results)
    return [replace(result, repeats=repeats[result.repeated]) for result in results]


def _latest_first(evaluations: Iterable[E]) -> list[E]:
    return sorted(evaluations, key=lambda evaluation: evaluation.measured)[::-1]
