"""Decodes prompts at temperature 0 in a process of its own, which has seen no response to them."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmdistill.pipelines.bench.records import Again
from vlmdistill.pipelines.cluster.processes import Processes
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.stores.progress import Progress

PROMPTS = 8  # decoded again, at most


@dataclass(frozen=True)
class Repeated:
    """A drafter that decodes again."""

    label: str
    folder: Path
    tree: str


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How prompts were decoded the first time."""

    model: str
    how: Mapping[str, Any]  # of loading the target
    prompts_file: Path
    keys: Sequence[str]
    max_new_tokens: int
    threads: int


Calls = dict[str, tuple[Again, ...]]
"""By the labels of the drafters."""


def decode_again(drafters: Sequence[Repeated], conditions: Conditions) -> Calls:
    """The calls of each drafter for some of the prompts; TrainingError if the process fails."""
    if not PROMPTS or not drafters:
        return {}
    with tempfile.TemporaryDirectory() as folder, Processes() as children:
        out = Path(folder) / "calls.json"
        arguments = (drafters, conditions, PROMPTS, out)
        environment = {"OMP_NUM_THREADS": str(conditions.threads)}
        children.start("decoding again", _decode, arguments, environment)
        for _ in children.messages():
            pass
        return msgspec.json.decode(out.read_bytes(), type=Calls)


def _decode(
    drafters: Sequence[Repeated],
    conditions: Conditions,
    count: int,
    out: Path,
    report: Progress,
) -> None:
    """Decode the first `count` prompts, and write the calls to `out`: runs in a process of its own."""
    from vlmdistill.drafters.core.tree import Tree
    from vlmdistill.drafters.decoding.decoders import speculate
    from vlmdistill.pipelines.targets.loading import load

    target = load(conditions.model, **conditions.how)
    prompts = prompt_table.load(conditions.prompts_file, conditions.model, "all")
    chosen_keys = set(conditions.keys[:count])
    chosen = [prompt for prompt in prompts if prompt.key in chosen_keys]
    calls: Calls = {}
    for done, repeated in enumerate(drafters, 1):
        drafter = target.drafter(repeated.folder)
        tree = Tree.parse(repeated.tree)
        calls[repeated.label] = ()
        for prompt in chosen:
            cycles = speculate(
                target,
                drafter,
                target.encode(prompt.messages),
                tree=tree,
                max_new_tokens=conditions.max_new_tokens,
            )
            # The first cycle is the prefill's.
            again = Again(key=prompt.key, calls=len(list(cycles)) - 1)
            calls[repeated.label] += (again,)
            report(done, len(drafters))
    out.write_bytes(msgspec.json.encode(calls))
