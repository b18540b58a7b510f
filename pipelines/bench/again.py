"""Decodes prompts in a process of its own, which has seen no response to them.

Before it loads a drafter, it measures what the target takes alone, which a drafter could slow or prepare.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle, Timed, clocked, timed
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines.bench.records import Again, Evaluation
from vlmdistill.pipelines.cluster.processes import Processes
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.stores.progress import Progress
from vlmdistill.stores.schema import content_hash, content_hashes

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

PROMPTS = 8  # of each temperature, at most
PLAIN = 4  # of these, at most, that are decoded plainly as well
WARM_UP = 8  # tokens that are decoded before anything is measured


@dataclass(frozen=True)
class Repeated:
    """A drafter that decodes again."""

    label: str
    folder: Path
    tree: str


@dataclass(frozen=True, kw_only=True)
class RepeatedPrompt:
    """A prompt that is decoded again."""

    temperature: float
    key: str
    seed: int | None  # of the sampling the first time; None at temperature 0
    plainly: bool  # without a drafter as well


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How prompts were decoded the first time."""

    model: str
    how: Mapping[str, Any]  # of loading the target
    prompts_file: Path
    max_new_tokens: int
    threads: int


Calls = dict[str, tuple[Again, ...]]
"""By the labels of the drafters."""


def repeated_prompts(
    evaluation: Evaluation, of_each_kind: bool = True
) -> Iterator[RepeatedPrompt]:
    """Some prompts of each temperature, by a hash of the seconds of all decodings.

    So no drafter can know them while it decodes, all drafters of a run have the same ones, and times that are
    changed later choose others. One is of each kind, which earlier versions did not see to.
    """
    for measurement in evaluation.temperatures:
        seconds = [prompt.turn.seconds for prompt in measurement.prompts]
        hashes = content_hashes(seconds, range(len(seconds)))
        numbers = sorted(range(len(seconds)), key=hashes.__getitem__)
        if of_each_kind:
            kinds = [prompt.kind for prompt in measurement.prompts]
            first_of_kind = {kinds[number]: number for number in reversed(numbers)}
            firsts = {*first_of_kind.values()}
            numbers.sort(key=lambda number: number not in firsts)
        decoded_plainly = numbers[:PLAIN]
        for number in sorted(numbers[:PROMPTS]):
            prompt = measurement.prompts[number]
            yield RepeatedPrompt(
                temperature=measurement.temperature,
                key=prompt.key,
                seed=prompt.drafted.seed,
                plainly=number in decoded_plainly,
            )


def decode_again(
    drafters: Sequence[Repeated],
    prompts: Sequence[RepeatedPrompt],
    conditions: Conditions,
) -> Calls:
    """The calls of each drafter for some of the prompts; TrainingError if the process fails."""
    if not prompts or not drafters:
        return {}
    with tempfile.TemporaryDirectory() as folder, Processes() as children:
        out = Path(folder) / "calls.json"
        arguments = (drafters, prompts, conditions, out)
        environment = {"OMP_NUM_THREADS": str(conditions.threads)}
        children.start("decoding again", _decode, arguments, environment)
        for _ in children.messages():
            pass
        return msgspec.json.decode(out.read_bytes(), type=Calls)


def _decode(
    drafters: Sequence[Repeated],
    chosen_prompts: Sequence[RepeatedPrompt],
    conditions: Conditions,
    out: Path,
    report: Progress,
) -> None:
    """Decode prompts, and write the calls to `out`: runs in a process of its own."""
    from vlmdistill.pipelines.targets.loading import load

    target = load(conditions.model, **conditions.how)
    table = prompt_table.load(conditions.prompts_file, conditions.model, "all")
    chosen_keys = {choice.key for choice in chosen_prompts}
    prompt_of = {prompt.key: prompt for prompt in table if prompt.key in chosen_keys}
    fresh = _FreshTarget(target, prompt_of, conditions)
    measured = fresh.measure_alone(chosen_prompts)
    calls: Calls = {}
    for done, repeated in enumerate(drafters, 1):
        drafter = target.drafter(repeated.folder)
        tree = Tree.parse(repeated.tree)
        calls[repeated.label] = tuple(
            replace(again, calls=fresh.calls(choice, drafter, tree))
            for choice, again in zip(chosen_prompts, measured, strict=True)
        )
        report(done, len(drafters))
    out.write_bytes(msgspec.json.encode(calls))


@dataclass(frozen=True)
class _FreshTarget:
    """The target in a process that has seen no response, and the prompts to decode."""

    target: "VisionLanguageTarget"
    prompt_of: Mapping[str, Prompt]  # by key
    conditions: Conditions

    def measure_alone(self, chosen_prompts: Sequence[RepeatedPrompt]) -> list[Again]:
        """Encode all prompts, and decode some of them plainly; calls are not known yet."""
        self._decoded_plainly(chosen_prompts[0], WARM_UP)
        measured = []
        for choice in chosen_prompts:
            _, encoding = self._encoded(choice)
            again = Again(
                key=choice.key,
                calls=0,
                temperature=choice.temperature,
                encoding=encoding,
            )
            if choice.plainly:
                limit = self.conditions.max_new_tokens
                decoded = self._decoded_plainly(choice, limit)
                again = replace(
                    again,
                    plain_step=self._step(decoded),
                    plain_response=content_hash(decoded.ids),
                )
            measured.append(again)
        return measured

    def calls(self, choice: RepeatedPrompt, drafter: Proposer, tree: Tree) -> int:
        """The calls of a drafter for a prompt."""
        encoded, _ = self._encoded(choice)
        cycles = speculate(
            self.target,
            drafter,
            encoded,
            tree=tree,
            max_new_tokens=self.conditions.max_new_tokens,
            temperature=choice.temperature,
            generator=self._generator(choice),
        )
        # The first cycle is the prefill's.
        return len(list(cycles)) - 1

    def _encoded(self, choice: RepeatedPrompt) -> tuple[Any, float]:
        """A prompt, and the CPU seconds of encoding it."""
        messages = self.prompt_of[choice.key].messages
        encoded, spent = clocked(
            lambda: self.target.encode(messages), self.target.device
        )
        return encoded, spent.cpu_seconds

    def _decoded_plainly(self, choice: RepeatedPrompt, limit: int) -> Timed:
        encoded, _ = self._encoded(choice)
        generator = self._generator(choice)

        def decode() -> Iterator[Cycle]:
            return plain(
                self.target,
                encoded,
                max_new_tokens=limit,
                temperature=choice.temperature,
                generator=generator,
            )

        return timed(decode, self.target.device)

    def _step(self, decoded: Timed) -> float | None:
        """The seconds of a step; None for a response of one token."""
        calls = len(decoded.cycles) - 1
        if not calls:
            return None
        spent = decoded.spent
        own_share = spent.own_seconds / spent.seconds
        return own_share * decoded.decode_seconds / calls

    def _generator(self, choice: RepeatedPrompt) -> torch.Generator:
        """With the seed that the evaluation gave the prompt."""
        generator = torch.Generator(self.target.device)
        if choice.seed is not None:
            generator.manual_seed(choice.seed)
        return generator
