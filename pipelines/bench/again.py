"""Decodes prompts in a process of its own, which has seen no response to them."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmdistill.pipelines.bench.records import Again, Evaluation
from vlmdistill.pipelines.cluster.processes import Processes
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.stores.progress import Progress
from vlmdistill.stores.schema import content_hash

PROMPTS = 8  # of each temperature, at most


@dataclass(frozen=True)
class Repeated:
    """A drafter that decodes again."""

    label: str
    folder: Path
    tree: str


@dataclass(frozen=True)
class RepeatedPrompt:
    """A prompt that is decoded again."""

    temperature: float
    number: int  # of the prompt in the evaluation
    key: str


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How prompts were decoded the first time."""

    model: str
    how: Mapping[str, Any]  # of loading the target
    prompts_file: Path
    seed: int
    max_new_tokens: int
    threads: int


Calls = dict[str, tuple[Again, ...]]
"""By the labels of the drafters."""


def repeated_prompts(evaluation: Evaluation) -> Iterator[RepeatedPrompt]:
    """Some prompts of each temperature, by a hash of plain decoding's seconds.

    So no drafter can know them while it decodes, and all drafters of a run have the same ones.
    """
    for measurement in evaluation.temperatures:
        seconds = [prompt.plain.seconds for prompt in measurement.prompts]
        numbers = sorted(
            range(len(seconds)), key=lambda number: content_hash([seconds, number])
        )
        for number in sorted(numbers[:PROMPTS]):
            key = measurement.prompts[number].key
            yield RepeatedPrompt(measurement.temperature, number, key)


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
    import torch

    from vlmdistill.drafters.core.tree import Tree
    from vlmdistill.drafters.decoding.decoders import speculate
    from vlmdistill.pipelines.bench.sampled import prompt_seed
    from vlmdistill.pipelines.targets.loading import load

    target = load(conditions.model, **conditions.how)
    table = prompt_table.load(conditions.prompts_file, conditions.model, "all")
    chosen_keys = {choice.key for choice in chosen_prompts}
    prompt_of = {prompt.key: prompt for prompt in table if prompt.key in chosen_keys}
    calls: Calls = {}
    for done, repeated in enumerate(drafters, 1):
        drafter = target.drafter(repeated.folder)
        tree = Tree.parse(repeated.tree)
        calls[repeated.label] = ()
        for choice in chosen_prompts:
            generator = torch.Generator(target.device)
            generator.manual_seed(prompt_seed(conditions.seed, choice.number))
            cycles = speculate(
                target,
                drafter,
                target.encode(prompt_of[choice.key].messages),
                tree=tree,
                max_new_tokens=conditions.max_new_tokens,
                temperature=choice.temperature,
                generator=generator,
            )
            # The first cycle is the prefill's.
            count = len(list(cycles)) - 1
            again = Again(key=choice.key, calls=count, temperature=choice.temperature)
            calls[repeated.label] += (again,)
            report(done, len(drafters))
    out.write_bytes(msgspec.json.encode(calls))
