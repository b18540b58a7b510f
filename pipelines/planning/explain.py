"""Whether a drafter is good, and what would make it better, by its training and its last evaluation.

The checks are those of docs/methods.md, "When tau is low". Acceptance is compared with what the method
reached on `demo-small`, and stands out if it misses `MISSES` times as often.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import fsum
from operator import mul
from pathlib import Path
from typing import Any, Literal

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench.plan import Description
from vlmdistill.pipelines.bench.records import PromptResult, TrainedStage
from vlmdistill.pipelines.bench.statistics import (
    FEWEST_OF_KIND,
    alpha,
    is_busy,
)
from vlmdistill.pipelines.planning.status import doubt_of, other_weights
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.results import DrafterResult, conditions
from vlmdistill.pipelines.targets.checkpoints.folder import locate
from vlmdistill.pipelines.targets.checkpoints.template import DEFAULT, template_of
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Provenance, content_hash
from vlmdistill.stores.store import Store

MOST = 5  # symptoms
LEAST_OF_A_LAYER = (0.83, 0.66, 0.70, 0.66)
"""The least that methods with a decoder layer reached; for methods that were not measured."""
MISSES = 2.0
SEEDS = 0.05  # by which the tau of a method differs over seeds there, at most
PASSES = 5.0
"""Over the samples, of every method on `demo-small`: 600 steps of 2,048 tokens."""
SHARE = 0.8  # of the samples of a store, as in `status`
FEW_OF_KIND = 0.1  # of the samples
GAIN = 1.05
"""Of the decode speedup by another chain. Speedups of one method differ by less over seeds (results.md)."""
LONGER = 8  # tokens by which a longer chain is tried
HEAD = 0.1
"""Of the bytes of a plain step, from which scoring all tokens is worth a word."""
COMPARED = 50  # verified tokens that an acceptance rate is compared from


@dataclass(frozen=True)
class Symptom:
    """What stands out, with its numbers, and the command that helps."""

    text: str
    command: str


@dataclass(frozen=True)
class Reference:
    """What a method reached on `demo-small`, and a drafter beside it."""

    method: str  # empty: of the methods with a decoder layer, the least
    acceptance: tuple[float, ...]  # by drafted token
    tau: float  # of a chain with that acceptance
    own_tau: float  # of as long a chain with the drafter's acceptance
    verdict: Literal["better", "as good", "worse"]

    @classmethod
    def of(cls, method: str, acceptance: Sequence[float]) -> "Reference":
        """Beside a drafter with some acceptance by drafted token, over the tokens that both have."""
        measured = catalogue.choice(method).reached
        reached = (measured or LEAST_OF_A_LAYER)[: len(acceptance)]
        tau, own_tau = _tau(reached), _tau(acceptance[: len(reached)])
        verdict: Literal["better", "as good", "worse"] = "as good"
        if own_tau > (1 + SEEDS) * tau:
            verdict = "better"
        elif own_tau < (1 - SEEDS) * tau:
            verdict = "worse"
        return cls(method if measured else "", reached, tau, own_tau, verdict)


@dataclass(frozen=True)
class Explanation:
    """A drafter with its numbers, and what stands out."""

    drafter: str
    method: str
    tau: float | None
    """Of the last evaluation at its lowest temperature; None also if it is in doubt."""
    speedup: float | None  # likewise
    acceptance: tuple[float, ...]  # by drafted token; empty if the tau is None
    acceptance_by_kind: Mapping[str, float]  # of the first drafted token
    held_out_agreement: tuple[float, ...]  # by hop, of the saved weights
    reference: Reference | None  # None: acceptance at temperature 0 is not known
    samples: int
    passes: float
    symptoms: tuple[Symptom, ...]  # at most `MOST`


def explain(workspace: Workspace, name: str) -> Explanation:
    """Explain a drafter of a workspace by its records; nothing is loaded or decoded.

    TrainingError if it is not trained, DataError if that cannot be its name.
    """
    trained = Trained.open(workspace, name)
    last = selection.last_of_each(workspace.reports)
    latest = last.get(name, [])
    coldest = min(latest, key=lambda result: result.temperature, default=None)
    evidence = _Evidence(workspace, trained, Description.of(trained), coldest, last)
    counted = evidence.counted
    return Explanation(
        drafter=name,
        method=trained.method,
        tau=counted.figures.tau if counted else None,
        speedup=coldest.speedup if coldest else None,
        acceptance=counted.figures.alpha if counted else (),
        acceptance_by_kind=evidence.first_by_kind,
        held_out_agreement=evidence.held_out,
        reference=evidence.reference,
        samples=evidence.described.training.samples,
        passes=evidence.passes,
        symptoms=tuple(evidence.symptoms())[:MOST],
    )


@dataclass(frozen=True)
class _Evidence:
    """The records of a drafter."""

    workspace: Workspace
    trained: Trained
    described: Description
    result: DrafterResult | None  # of the last evaluation
    last: Mapping[str, Sequence[DrafterResult]]  # of all drafters, the same

    def symptoms(self) -> Iterator[Symptom]:
        """What stands out, the gravest first."""
        if not catalogue.is_trained(self.trained.method):
            yield from self._tree()
            return
        if not self.described.training.steps and "imported" not in self.facts:
            text = "it is not trained: its weights are random"
            yield Symptom(text, self._train("--force"))
            return
        checks = (
            self._broken,
            self._prompts_differ,
            self._doubts,
            self._faster,
            self._first_token,
            self._kinds,
            self._later_tokens,
            self._coverage,
            self._tree,
            self._cost,
            self._head,
            self._unmeasured,
        )
        for check in checks:
            yield from check()

    @property
    def name(self) -> str:
        """Of the drafter."""
        return self.trained.name

    @property
    def counted(self) -> DrafterResult | None:
        """The result, if its counts are not in doubt."""
        return None if self.result is None or self.result.wrong_counts else self.result

    @property
    def timed(self) -> DrafterResult | None:
        """The result, if its times are not in doubt, nor beside those of other programs."""
        result = self.result
        if result is None or result.no_speedup or is_busy(result.figures.cpu_share):
            return None
        return result

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its training recorded."""
        facts: Mapping[str, Any] = self.trained.description["training"]
        return facts

    @property
    def passes(self) -> float:
        """Over the samples of the training, of all stages together."""
        return sum(stage.passes for stage in self.described.training.stages)

    @cached_property
    def held_out(self) -> tuple[float, ...]:
        """The agreement of the saved weights on held-out samples, by hop; empty if it was not measured."""
        saved_step = self.facts.get("saved_step")
        for measured in self.described.training.history:
            if measured.step == saved_step:
                return measured.held_out_agreement
        return ()

    @property
    def reference(self) -> Reference | None:
        """Its method's acceptance on `demo-small`, which is that of temperature 0."""
        is_sampled = self.counted is not None and self.counted.temperature > 0
        is_trained = catalogue.is_trained(self.trained.method)
        if is_sampled or not is_trained or not self.acceptance:
            return None
        return Reference.of(self.trained.method, self.acceptance)

    @property
    def reached(self) -> tuple[float, ...]:
        """What its method reached on `demo-small`."""
        return catalogue.choice(self.trained.method).reached or LEAST_OF_A_LAYER

    @cached_property
    def acceptance(self) -> tuple[float, ...]:
        """By drafted token: as evaluated, else as on held-out samples."""
        return self.counted.figures.alpha if self.counted else self.held_out

    @cached_property
    def by_kind(self) -> Mapping[str, Sequence[PromptResult]]:
        """The evaluated prompts with images or videos, and without; kinds with too few are left out."""
        groups: dict[str, list[PromptResult]] = {}
        for prompt in self.counted.measurement.prompts if self.counted else ():
            kind = "text" if prompt.kind == "text" else "images"
            groups.setdefault(kind, []).append(prompt)
        return {
            kind: prompts
            for kind, prompts in groups.items()
            if len(prompts) >= FEWEST_OF_KIND
        }

    @cached_property
    def first_by_kind(self) -> dict[str, float]:
        """The acceptance of the first drafted token."""
        first = {}
        for kind, prompts in self.by_kind.items():
            rates = alpha([prompt.drafted for prompt in prompts])
            if rates:
                first[kind] = rates[0]
        return first

    @cached_property
    def weak_tokens(self) -> Literal["", "first", "later"]:
        """The drafted tokens that make it worse than its method: the first, or those after it.

        Of the kinds of prompts, the best counts: `_kinds` compares them.
        """
        reference = self.reference
        if reference is None or reference.verdict != "worse":
            return ""
        reached_first, *reached_later = reference.acceptance
        first, *later = self.acceptance[: len(reference.acceptance)]
        best_first = max(self.first_by_kind.values(), default=first)
        tau_by_first = _tau([best_first, *reached_later])
        tau_by_later = _tau([reached_first, *later])
        # At least half of the loss is of the weaker ones.
        if min(tau_by_first, tau_by_later) > (1 - SEEDS / 2) * reference.tau:
            return ""
        return "first" if tau_by_first < tau_by_later else "later"

    @cached_property
    def store(self) -> Store | None:
        """The feature store of the workspace; None if there is none."""
        return Store.find(self.workspace.features)

    @cached_property
    def samples_by_kind(self) -> Mapping[str, int]:
        """Those that it was trained on; empty if they are not known."""
        keys = self.trained.samples
        if self.store is None or not keys:
            return {}
        rows = self.store.view(None).select("key", "visual_tokens")
        counts = {"text": 0, "images": 0}
        for key, visual_tokens in rows.iter_rows():
            if key in keys:
                counts["images" if visual_tokens else "text"] += 1
        return counts

    def _train(self, options: str) -> str:
        """The command that trains it again, on the same view of the store."""
        command = f"vlmdistill train {self.trained.method}"
        if self.name != self.trained.method:
            command += f" --name {self.name}"
        if view := self.described.training.view:
            command += f" --view {view}"
        return f"{command} {options}"

    @property
    def _tune(self) -> str:
        """The command that goes on from its weights, under another name."""
        tuned = f"--name {self.name}-tuned --init {self.name}"
        return f"vlmdistill train {self.trained.method} {tuned}"

    def _broken(self) -> Iterator[Symptom]:
        """Drafted tokens that are right and were not accepted."""
        if self.result and self.result.figures.missed:
            missed = self.result.figures.missed
            text = f"a bug, please report it: {missed} right tokens were not accepted"
            yield Symptom(text, f"vlmdistill eval --list {self.name}")

    def _prompts_differ(self) -> Iterator[Symptom]:
        """Prompts that the target reads otherwise than in training."""
        facts = self.trained.description["provenance"]
        provenance = Provenance.from_dict(facts)
        if self.result:
            trained_mode = provenance.thinking or DEFAULT
            mode = self.result.evaluation.thinking or DEFAULT
            if mode != trained_mode:
                text = f"trained with thinking {trained_mode}, evaluated with {mode}"
                yield Symptom(text, f"vlmdistill eval {self.name}")
        folder = _folder_of(self.workspace.model)
        template = template_of(folder) if folder else None
        if template is not None and content_hash(template) != provenance.template_hash:
            text = (
                "its training had another chat template than the target has now: begin a "
                "new workspace"
            )
            yield Symptom(text, "vlmdistill prompts FILE --runs NEW")
            return
        if self.store is None:
            return
        stored = _with_features_of(self.store.provenance, provenance)
        other = provenance.mismatch(stored)
        if other:
            text = f"it was trained on another store ({other})"
            yield Symptom(text, self._train("--force"))

    def _doubts(self) -> Iterator[Symptom]:
        """A warning of the evaluation that the numbers are from."""
        if self.result is None or self.result.figures.missed:
            return
        stale = other_weights(self.result, self.facts, self.trained.folder)
        warnings = [doubt_of(self.result), *stale, *self.result.figures.warnings]
        for warning in [*filter(None, warnings)][:1]:
            yield Symptom(
                f"its evaluation warns: {warning}", f"vlmdistill eval {self.name}"
            )

    def _faster(self) -> Iterator[Symptom]:
        """The fastest drafter under the same conditions, if it is significantly faster."""
        if self.result is None:
            return
        own, settings = self.result, conditions(self.result.evaluation)
        every_result = [result for results in self.last.values() for result in results]
        alike = [
            result
            for result in every_result
            if result.temperature == own.temperature
            and conditions(result.evaluation) == settings
        ]
        # It loads torch.
        from vlmdistill.pipelines.report.comparison import ranked

        (ranking,) = ranked(alike)
        is_ranked = any(result.drafter == self.name for result in ranking.ranked)
        names = [result.drafter for result in ranking.leaders]
        if not is_ranked or ranking.disturbed or self.name in names:
            return
        best = ranking.leaders[0]
        factor = best.figures.speedup / own.figures.speedup
        text = (
            f"{best.drafter} is better under the same conditions: tau {best.figures.tau:.2f}, "
            f"{factor:.2f} times as fast"
        )
        yield Symptom(text, f"vlmdistill serve --drafter {best.drafter}")

    def _first_token(self) -> Iterator[Symptom]:
        """A first token that is often missed, on all kinds of prompts."""
        rates = [*self.first_by_kind.values()] or [*self.acceptance[:1]]
        if not rates:
            return
        if not _is_low(max(rates), self.reached[0]) and self.weak_tokens != "first":
            return
        training = self.described.training
        text = (
            f"the first drafted token is accepted in {max(rates):.0%} of the cycles "
            f"({self.reached[0]:.0%} on demo-small), "
        )
        if not training.steps:
            text += "as imported: it was not trained on responses of this target"
            yield Symptom(text, self._tune)
        elif self.passes < PASSES:
            steps = max(
                training.steps + 1, round(training.steps * PASSES / (self.passes or 1))
            )
            text += f"after {self.passes:.1f} passes over {training.samples} samples: too few steps"
            yield Symptom(text, self._train(f"--set steps={steps} --force"))
        else:
            text += f"after {self.passes:.0f} passes over {training.samples} samples: too few samples"
            yield Symptom(text, "vlmdistill prompts FILE")

    def _kinds(self) -> Iterator[Symptom]:
        """A kind of prompts on which the first token is missed more often than on the other."""
        counts = self.samples_by_kind
        for kind in ("text", "images"):
            share = None
            if counts:
                share = counts[kind] / max(1, sum(counts.values()))
            is_rare = share is not None and share < FEW_OF_KIND
            if self._is_worse(kind, is_rare):
                yield self._of_kind(kind, share)

    def _is_worse(self, kind: str, is_rare: bool) -> bool:
        """Whether the first token is missed more often on prompts of a kind.

        Where both kinds were not evaluated, a kind that was rare in training is worse unless it was
        accepted as often as on `demo-small`.
        """
        rates = self.first_by_kind
        if len(rates) == 2:
            (other,) = [rate for name, rate in rates.items() if name != kind]
            return _is_low(rates[kind], other)
        if not rates:
            return is_rare
        return is_rare and kind in rates and _is_low(rates[kind], self.reached[0])

    def _of_kind(self, kind: str, share: float | None) -> Symptom:
        """Acceptance is low on prompts of a kind."""
        other = "images" if kind == "text" else "text"
        facts = [f"{name} {rate:.0%}" for name, rate in self.first_by_kind.items()]
        text = f"first token by kind: {', '.join(facts) or 'not measured'}"
        if share is not None and share < FEW_OF_KIND:
            text += f"; {share:.0%} of its samples are of {kind}"
            return Symptom(f"{text}: import some", "vlmdistill prompts FILE")
        stages = self.trained.description["config"]["stages"]
        last_share = stages[-1]["visual"][-1] if stages else 0.5
        if kind == "images":
            last_share = 1 - last_share
        if last_share > 1 - FEW_OF_KIND:
            text += f"; its last stage has {other} alone"
        command = self._train("--set 'stages.*.visual=[0.5,0.5]' --force")
        return Symptom(text, command)

    def _later_tokens(self) -> Iterator[Symptom]:
        """Later tokens that are missed although the first is right: more hops, or a longer last stage."""
        stages = self.described.config.stages
        if not stages or not self._misses_later():
            return
        last = stages[-1]
        limit = catalogue.config(self.trained.method).model.max_hops
        hops = limit or last.hops
        drafted = len(self.acceptance)
        rates = " ".join(f"{rate:.0%}" for rate in self.acceptance)
        text = f"acceptance is low after the first drafted token ({rates})"
        if not self.described.training.steps:
            text += ", as imported: it was not trained on responses of this target"
            yield Symptom(text, self._tune)
            return
        text += f"; its last stage, {last.name}, trains {hops} in a row"
        if limit is None and hops < drafted:
            settings = f"--set stages.{last.name}.hops={max(4, hops + 2)}"
        else:
            text += ", no fewer than are drafted: it was too short"
            settings = self._twice_as_long(last)
        yield Symptom(text, self._train(f"{settings} --force"))

    def _misses_later(self) -> bool:
        """Whether tokens after the first are missed too often, and the first is not."""
        if not self.acceptance or _is_low(self.acceptance[0], self.reached[0]):
            return False
        pairs = zip(self.acceptance[1:], self.reached[1:], strict=False)
        is_low = any(_is_low(rate, reached) for rate, reached in pairs)
        return is_low or self.weak_tokens == "later"

    def _twice_as_long(self, last: TrainedStage) -> str:
        """Settings by which the last stage takes twice its steps or epochs, and the others theirs."""
        settings = f"--set stages.{last.name}.epochs={2 * last.epochs:g}"
        if not self.trained.description["config"].get("steps"):
            return settings
        training = self.described.training
        of_last = sum(run.steps for run in training.stages if run.name == last.name)
        return f"--set steps={training.steps + of_last} {settings}"

    def _coverage(self) -> Iterator[Symptom]:
        """Samples of the store that it has not seen."""
        store, training = self.store, self.described.training
        if store is None or training.view or training.samples >= SHARE * len(store):
            return
        text = f"trained on {training.samples} of the {len(store)} samples of the store"
        yield Symptom(text, self._train("--force"))

    def _tree(self) -> Iterator[Symptom]:
        """A chain whose length costs more than it brings, or could bring more."""
        chain = _Chain.of(self.timed) if self.timed else None
        if chain is None:
            return
        length, gain = chain.best
        if gain < GAIN:
            return
        word = "short" if length > chain.length else "long"
        text = (
            f"its chain of {chain.length} tokens is too {word}: {length} would decode "
            f"{gain - 1:.0%} faster by its acceptance and the time of a token"
        )
        yield Symptom(text, f"vlmdistill eval {self.name} --tree chain-{length}")

    def _cost(self) -> Iterator[Symptom]:
        """A good tau that does not pay."""
        if self.timed is None:
            return
        figures = self.timed.figures
        if figures.decode_speedup >= 1 or not figures.calls:
            return
        text = (
            f"a cycle takes the time of {figures.cycle_cost:.1f} plain steps and brings "
            f"{figures.tau:.2f} tokens"
        )
        yield Symptom(text, f"vlmdistill eval {self.name} --tree auto")

    def _head(self) -> Iterator[Symptom]:
        """Each drafted token scores the whole vocabulary, where that is a large part of a step."""
        if self.result is None:
            return
        evaluation = self.result.evaluation
        scores_all = self.trained.description["config"].get("draft_vocab") == 0
        if not scores_all or not evaluation.calibrations:
            return
        target = self.trained.description["target"]
        tokens = int(target["vocab_size"])
        bytes_each = 4 if evaluation.dtype == "float32" else 2
        head_bytes = tokens * int(target["hidden_size"]) * bytes_each
        step_bytes = evaluation.calibrations[0].step_bytes
        if step_bytes and head_bytes >= HEAD * step_bytes:
            share = head_bytes / step_bytes
            yield Symptom(
                f"each drafted token scores all {tokens:,} tokens, {share:.0%} of what a plain step reads",
                self._train(f"--force --set draft_vocab={max(1, tokens // 4)}"),
            )

    def _unmeasured(self) -> Iterator[Symptom]:
        """No evaluation of its present weights."""
        command = f"vlmdistill eval {self.name}"
        if self.result is None:
            yield Symptom(
                "it was not evaluated: held-out agreement is all there is", command
            )
        elif self.result.evaluation.weights not in (None, self.trained.weights):
            yield Symptom("its evaluation is of other weights", command)


@dataclass(frozen=True)
class _Chain:
    """What a chain of tokens costs and brings, by its length."""

    length: int
    reach: tuple[float, ...]  # chance that so many tokens of a cycle are all accepted
    cycle_seconds: float
    token_seconds: float  # of one more token: to draft it, and to verify it

    @classmethod
    def of(cls, result: DrafterResult) -> "_Chain | None":
        """As evaluated; None for other trees, for blocks of one pass, and for too few cycles."""
        tree = Tree.parse(result.evaluation.tree)
        rates = result.figures.alpha
        config = catalogue.config(result.evaluation.drafter)
        length = tree.total - 1
        is_chain = tree.k == 1 and not tree.confidence and len(rates) == length
        calls = result.figures.calls
        if not is_chain or config.model.max_hops is not None or calls < COMPARED:
            return None
        seconds = sum(
            prompt.drafted.decode_seconds for prompt in result.measurement.prompts
        )
        budget = result.figures.budget
        verify_seconds = max(0.0, budget.verify / calls - budget.plain_step)
        return cls(
            length=length,
            reach=tuple(accumulate(rates, mul)),
            cycle_seconds=seconds / calls,
            token_seconds=(budget.draft / calls + verify_seconds) / length,
        )

    @property
    def best(self) -> tuple[int, float]:
        """The length with the most tokens a second, and its gain.

        To verify a chain takes longer than a plain step by the same time for each of its tokens.
        """
        own = self._rate(self.length)
        lengths = range(1, self.length + LONGER + 1)
        best = max(lengths, key=self._rate)
        return best, self._rate(best) / own

    def _rate(self, length: int) -> float:
        """Tokens a second of a chain; further tokens are accepted as often as the last."""
        reach = [*self.reach[:length]]
        last = self.reach[-1]
        before = self.reach[-2] if len(self.reach) > 1 else 1.0
        rate = last / before if before else 0.0
        for _ in range(length - self.length):
            last *= rate
            reach.append(last)
        further = length - self.length
        return (1 + sum(reach)) / (self.cycle_seconds + further * self.token_seconds)


def _tau(acceptance: Sequence[float]) -> float:
    """Tokens a cycle of a chain, the target's own token included."""
    return 1 + fsum(accumulate(acceptance, mul))


def _is_low(rate: float, reached: float) -> bool:
    """Whether a rate misses `MISSES` times as often as another."""
    return 1 - rate > MISSES * (1 - reached)


def _folder_of(model: str) -> Path | None:
    """The folder of a target that is complete on this machine."""
    try:
        location = locate(model)
    except TargetError:
        return None
    return None if location.lacking else location.folder


def _with_features_of(provenance: Provenance, other: Provenance) -> Provenance:
    from msgspec.structs import replace

    return replace(provenance, features=other.features)
